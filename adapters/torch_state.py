"""State dicts: what is in them, and the checks before anything is taken over. And what copies keep besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cafin_cupy.arrays import wraps_others
from cafin_cupy.errors import CafinError, CafinTypeError, refuse, shown
from cafin_cupy.precision import Precision, checked_seed, dtype_name, momenta_of
from cafin_cupy.rule import steps_in

from .torch_groups import SCALARS
from .torch_names import in_own_order, with_names, without_names
from .torch_precision import new_master, new_momentum
from .torch_ranks import compare_from_now_on
from .torch_scalars import checked_hyper
from .torch_shards import is_sharded, laid_out
from .torch_warnings import warn_not_stored
from .torch_zero import homes

if TYPE_CHECKING:
    from .torch import AdaFisher

OF_OLD = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)
WHERE = "load_state_dict"
MEND = "it must come from AdaFisher's state_dict()"
NOT_OURS = (
    f"{MEND}, and not through flatten_optimizer_state_dict=True, which drops the factors; of Adam's or AdamW's, "
    "load_momentum(state_dict) takes exp_avg and step"
)
KEYS = ("state", "param_groups", "H_D", "S_D", "steps")
ENTRY = ("step", "exp_avg")  # of a parameter that has momentum
KEPT = (
    *("model", "_TCov", "averaging", "_steps", "capturable", "grad_scaler", "error_if_nonfinite", "_requested"),
    *("_precision", "_seed", "_dist", "_divide_factor", "_check_every", "_shard_state"),
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def with_factors(optimizer: AdaFisher, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of torch's part, with ours added."""
    entries = state["state"]
    if optimizer.steps or entries:  # an entry for each parameter, so that none can be lost without notice
        indices = [index for group in state["param_groups"] for index in group["params"]]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        precision, home = optimizer._precision, homes(optimizer)
        state["state"] = {
            index: _entry(index, entries.get(index), home(p), precision) for index, p in zip(indices, parameters)
        }
    factors = optimizer._factors
    state["H_D"] = [factors.H[index] for _, _, index, _ in optimizer._modules]
    state["S_D"] = [factors.S[index] for _, _, index, _ in optimizer._modules]
    state["steps"] = optimizer.steps
    if optimizer._precision.begin:
        state["seed"] = optimizer._seed
    with_names(optimizer, state)
    return state


def _entry(index: int, entry: Any, p: Tensor, precision: Precision) -> dict[str, Any]:
    """A parameter's state as the next step would complete it; the step as a number, which every AdaFisher reads."""
    name = f"state[{index}]"
    _mapping(name, {} if entry is None else entry, (), "", "state_dict")
    if not entry:
        return {}
    average = entry.get("exp_avg")
    average = new_momentum(p, precision) if average is None else average
    count = steps_in("state_dict", f"{name}['step']", entry.get("step", 0))
    full = {**entry, "step": count, "exp_avg": average}
    if precision.has_master(dtype_name(p.dtype)):
        full.setdefault("master", new_master(p))
    return full


def take_over(optimizer: AdaFisher, state_dict: Any, load: Callable[[Any], None]) -> None:
    """See `AdaFisher.load_state_dict`; `load` is torch's, which calls the script's hooks and then `__setstate__`."""
    _mapping("state_dict", state_dict)

    def check(_: Any, given: Any) -> dict[str, Any]:
        given = in_own_order(WHERE, optimizer, given)
        optimizer._loading = Checkpoint(optimizer, given)
        return {
            "state": {},
            "param_groups": without_names(given["param_groups"]),
        }  # torch would cast momentum to its parameter's dtype

    handle = optimizer.register_load_state_dict_pre_hook(check)  # the last: it sees what the others make of the dict
    try:
        load(dict(state_dict))
        missing = [name for name, *_ in optimizer._loading.missing]
    finally:
        handle.remove()
        optimizer._loading = None
    warn_not_stored(WHERE, missing)


def split_layers(modules: Sequence[Any], given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(layers whose factors a checkpoint holds, those it knows nothing of).

    It holds those of all layers; or of the types alone that the public implementation gives factors, and that versions
    of this one knew which had no others. The remaining layers then had F = 1, and begin at that."""
    known = [module for module in modules if isinstance(module[1], OF_OLD)]
    factors = [given[key] for key in ("H_D", "S_D")]
    if len(known) < len(modules) and all(isinstance(x, (list, tuple)) and len(x) == len(known) for x in factors):
        return known, [module for module in modules if not isinstance(module[1], OF_OLD)]
    return list(modules), []


class Checkpoint:
    """A state dict that fits an optimizer: checked, and copied to where it will serve.

    Raises:
        CafinError: it does not fit; the message names the first key that does not.
    """

    def __init__(self, optimizer: AdaFisher, given: Any) -> None:
        _mapping("state_dict", given, KEYS, NOT_OURS if of_adam(given) else MEND)
        self.steps = steps_in(WHERE, "steps", given["steps"])
        self.seed = checked_seed(WHERE, "seed", given.get("seed", optimizer._seed))
        groups = _checked_groups(optimizer, given["param_groups"])
        self.entries = _checked_state(optimizer, given["state"], groups, self.steps)
        stored, self.missing = split_layers(optimizer._modules, given)
        layers = [(name, optimizer._layers[index]) for name, _, index, _ in stored]
        factors = optimizer._factors
        H = _checked_factors("H_D", given["H_D"], [(name, layer.H_size) for name, layer in layers])
        S = _checked_factors("S_D", given["S_D"], [(name, layer.S_size) for name, layer in layers])
        self.factors = {
            index: (_like(factors.H[index], h), _like(factors.S[index], s))
            for (_, _, index, _), h, s in reversed(list(zip(stored, H, S)))  # the first of shared ones wins
        }

    def install(self, optimizer: AdaFisher) -> None:
        """Take over all but the groups."""
        for group in optimizer.param_groups:
            for name in (*SCALARS, "maximize"):
                group.setdefault(name, optimizer.defaults[name])
        optimizer.state.update(self.entries)
        optimizer._precision, optimizer._seed = optimizer._precision.seeded(self.seed), self.seed
        for index, pair in self.factors.items():
            optimizer._factors.load(index, *pair)
        for _, _, index, _ in self.missing:
            optimizer._factors.restart(index)
        optimizer._factors.count_from(None)
        optimizer._factors.discard()
        optimizer.steps = self.steps
        optimizer._count_steps(self.steps, waiting=True)


def of_adam(given: Any) -> bool:
    """True of a state dict that holds momentum, but no factors: of Adam, AdamW and their like."""
    state = given.get("state") if isinstance(given, Mapping) and "H_D" not in given else None
    entries = state.values() if isinstance(state, Mapping) else ()
    return any(isinstance(entry, Mapping) and "exp_avg" in entry for entry in entries)


def take_momentum(optimizer: AdaFisher, given: Any) -> None:
    """See `AdaFisher.load_momentum`."""
    where, mend = "load_momentum", "it must come from the state_dict() of Adam, AdamW or the like"
    if not of_adam(given):
        refuse(where, "state_dict", "hold `exp_avg`, and no factors", _told(given), mend)
    _mapping("state_dict", given, ("param_groups",), mend, where)
    groups = given["param_groups"]
    listed = isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups)
    if not listed or not all(_keys(group.get("params")) for group in groups):
        refuse(where, "param_groups", "be a list of groups with their 'params'", shown(groups), mend, CafinTypeError)
    given = in_own_order(where, optimizer, given)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in given["param_groups"] for index in group["params"]]
    lengths, own = (
        [len(group["params"]) for group in groups] for groups in (given["param_groups"], optimizer.param_groups)
    )
    if lengths != own:
        every = list(optimizer.model.parameters())
    if lengths not in (own, [len(every)]):
        mend = "make both with the same groups, or the other one with model.named_parameters()"
        refuse(where, "param_groups", f"hold {own} parameters", lengths, mend)
    entries: dict[Tensor, dict[str, Any]] = {}
    home = homes(optimizer)
    for index, p in zip(indices, every):
        name, entry = f"state[{index!r}]", given["state"].get(index, {})
        _mapping(name, entry, (), mend, where)
        if entry:
            _mapping(name, entry, ENTRY, mend, where)
            count = steps_in(where, f"{name}['step']", entry["step"])
            _momentum_of(where, f"{name}['exp_avg']", entry["exp_avg"], p)
            average = laid_out(where, f"{name}['exp_avg']", home(p), entry["exp_avg"])
            entries[p] = {"step": count, "exp_avg": _momentum(home(p), average, optimizer._precision)}
    optimizer.state.update(entries)


def _keys(params: Any) -> bool:
    """True of what a group of a state dict has in its `params`: numbers, or names."""
    return isinstance(params, (list, tuple)) and all(isinstance(key, (int, str)) for key in params)


def _told(given: Any) -> Any:
    return sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__


def copied(optimizer: AdaFisher) -> tuple[Any, ...]:
    """What a copy of the optimizer takes along beside torch's part."""
    if optimizer._kept_factors is not None and optimizer._kept_factors.pending:
        raise CafinError(
            f"{type(optimizer).__name__}: a copy must be made between steps, got one between backward and step; "
            "call step() or zero_grad() first"
        )
    factors = optimizer._factors
    _ = optimizer.steps  # which makes sure of `_steps`
    mine = {name: optimizer.__dict__[name] for name in KEPT}
    return mine, list(factors.H), list(factors.S), list(factors.skipped)


def go_on_from(optimizer: AdaFisher, ours: tuple[Any, ...]) -> None:
    """Make a copy of what `copied` has told."""
    mine, H, S, skipped = ours
    old = {"_precision": Precision(), "_seed": 0, "_steps": mine.get("steps", 0)}  # of copies that know less
    optimizer.__dict__.update({**old, **{name: value for name, value in mine.items() if name != "steps"}})
    optimizer._reset()
    optimizer._find_layers()
    if [(len(each), len(other)) for each, other in zip(H, S)] != [(x.H_size, x.S_size) for x in optimizer._layers]:
        rule, got = f"have the {len(H)} layers that it had", f"{len(optimizer._layers)} or others"
        refuse("copy", "model", rule, got, "call register_layer as before")
    for index, pair in enumerate(zip(H, S)):
        optimizer._factors.load(index, *pair)
    optimizer._factors.count_from(skipped)
    compare_from_now_on(optimizer)
    optimizer._attach(waiting=True)


def _checked_groups(optimizer: AdaFisher, groups: Any) -> Any:
    mine, seen = optimizer.param_groups, set()  # type: ignore[var-annotated]
    if not isinstance(groups, (list, tuple)):
        refuse(WHERE, "param_groups", "be a list of groups", type(groups).__name__, MEND, CafinTypeError)
    if len(groups) != len(mine):
        refuse(WHERE, "param_groups", f"hold {len(mine)} groups, as the optimizer has", len(groups))
    for number, (group, own) in enumerate(zip(groups, mine)):
        name = f"param_groups[{number}]"
        # The public implementation keeps no Lambda there.
        _mapping(name, group, ("params", *(SCALARS if _ours(groups) else ("lr", "beta", "weight_decay"))))
        indices, wanted = group["params"], len(own["params"])
        if not isinstance(indices, (list, tuple)) or not all(type(index) is int for index in indices):
            refuse(WHERE, f"{name}['params']", "be a list of numbers", indices, MEND)
        if len(indices) != wanted:
            refuse(WHERE, f"{name}['params']", f"hold {wanted} numbers, one for each parameter", len(indices))
        checked_hyper(optimizer, WHERE, {**optimizer.defaults, **group}, f"{name}['{{}}']")
        if len(seen.union(indices)) < len(seen) + wanted:
            refuse(WHERE, f"{name}['params']", "hold each number once", indices, MEND)
        seen.update(indices)
    return groups


def _ours(groups: Any) -> bool:
    """Written by this class, not by the public implementation."""
    return any(isinstance(group, Mapping) and "Lambda" in group for group in groups)


def _checked_state(optimizer: AdaFisher, state: Any, groups: Any, steps: int) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter that has any: step, momentum, and whatever else a script has put there."""
    _mapping("state", state)
    indices = [index for group in groups for index in group["params"]]
    parameters = dict(zip(indices, (p for group in optimizer.param_groups for p in group["params"])))
    entries: dict[Tensor, dict[str, Any]] = {}
    home = homes(optimizer)
    for index, p in parameters.items():
        name = f"state[{index}]"
        if index not in state:  # the public implementation never updates the last parameters of some models
            if steps and _ours(groups):
                refuse(WHERE, name, "be there, empty for a parameter without momentum", "no such key", MEND)
            continue
        entry = state[index]
        _mapping(name, entry)
        if entry:
            _mapping(name, entry, ENTRY)
            count = steps_in(WHERE, f"{name}['step']", entry["step"])
            _momentum_of(WHERE, f"{name}['exp_avg']", entry["exp_avg"], p)
            more = {key: _copied(value, p) for key, value in entry.items() if key not in ENTRY}
            if "master" in entry:
                more["master"] = _master(f"{name}['master']", home(p), entry["master"], optimizer._precision)
            average = laid_out(WHERE, f"{name}['exp_avg']", home(p), entry["exp_avg"])
            average = _momentum(home(p), average, optimizer._precision)
            entries[p] = {"step": count, "exp_avg": average, **more}
    for index in state:
        if index not in parameters:
            refuse(WHERE, f"state[{index!r}]", f"belong to a parameter of the groups, which are {indices}", "none")
    return entries


def _momentum_of(where: str, name: str, average: Any, p: Tensor) -> None:
    """Refuse what cannot be a parameter's momentum."""
    if not p.is_floating_point():
        refuse(where, name, "be left out, as its parameter does not train", f"one of a {p.dtype} parameter")
    _numbers(name, average, tuple(p.shape), where=where)


def _momentum(p: Tensor, average: Tensor, precision: Precision) -> Tensor:
    """A copy in the parameter's memory layout. That of a 16-bit parameter keeps its precision, as it was trained."""
    new, given = new_momentum(p, precision), dtype_name(average.dtype)
    keeps = precision.momentum is None and p.element_size() == 2 and given in momenta_of(dtype_name(p.dtype))
    return (new.to(average.dtype) if keeps else new).copy_(average.detach())


def _master(name: str, p: Tensor, master: Any, precision: Precision) -> Tensor:
    """A copy in the parameter's memory layout."""
    if not precision.has_master(dtype_name(p.dtype)):
        got = f"one of a {dtype_name(p.dtype)} parameter, with master_weights={precision.masters}"
        mend = "make the optimizer with master_weights=True, or copy the master into the parameter and delete it"
        refuse(WHERE, name, "be left out", got, mend)
    _numbers(name, master, tuple(p.shape))
    return new_master(p).copy_(laid_out(WHERE, name, p, master).detach())


def _copied(value: Any, p: Tensor) -> Any:
    return value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else deepcopy(value)


def _like(mine: Tensor, given: Tensor) -> Tensor:
    """A copy of `given` of the dtype, device and memory layout of `mine`."""
    return torch.empty_like(mine).copy_(given.detach())


def _checked_factors(key: str, given: Any, sizes: Sequence[tuple[str, int]]) -> list[Tensor]:
    """A checkpoint's `H_D` or `S_D`, refused if it is not one vector for each (name, size)."""
    if not isinstance(given, (list, tuple)):
        refuse(WHERE, key, "be a list of tensors, one for each layer", type(given).__name__, MEND, CafinTypeError)
    for number, ((name, size), factor) in enumerate(zip(sizes, given)):
        argument = f"{key}[{number}]"
        _numbers(argument, factor, (size,), f" for layer `{name}`")
        if not bool(((factor >= 0) & torch.isfinite(factor)).all()):
            refuse(WHERE, argument, "hold finite numbers >= 0", "others", "the run that saved it had diverged")
    if len(given) != len(sizes):
        refuse(WHERE, key, f"hold {len(sizes)} tensors, one for each layer", len(given))
    return list(given)


def _mapping(name: str, value: Any, keys: Sequence[str] = (), mend: str = MEND, where: str = WHERE) -> None:
    if not isinstance(value, Mapping):
        refuse(where, name, "be a mapping", type(value).__name__, MEND, CafinTypeError)
    for key in keys:
        if key not in value:
            refuse(where, name, f"have the key {key!r}", sorted(map(str, value)), mend)


def _numbers(name: str, value: Any, shape: tuple[int, ...], of: str = "", where: str = WHERE) -> None:
    """Refuse what is not a dense tensor of real floating-point numbers in memory."""
    if not isinstance(value, Tensor):
        refuse(where, name, f"be a tensor of shape {shape}{of}", type(value).__name__, kind=CafinTypeError)
    wrapper = wraps_others(value) and not is_sharded(value)
    if value.is_nested or wrapper or value.layout is not torch.strided or value.is_meta:
        got = f"{type(value).__name__} of layout {value.layout} on {value.device}"
        refuse(where, name, "be a dense tensor in memory", got)
    if tuple(value.shape) != shape:
        refuse(where, name, f"be a tensor of shape {shape}{of}", tuple(value.shape))
    if value.dtype not in FLOATS:
        refuse(where, name, "hold real floating-point numbers", value.dtype)
