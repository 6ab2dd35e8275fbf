"""State dicts: the factors in them, and the checks before anything is taken over. And what copies keep besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.errors import CafinError, CafinTypeError, refuse
from cafin_cupy.rule import whole

from .torch_scalars import SCALARS, checked_hyper

if TYPE_CHECKING:
    from .torch import AdaFisher

KEYS = ("state", "param_groups", "H_D", "S_D", "steps")
KEPT = ("model", "_TCov", "averaging", "steps", "capturable", "grad_scaler", "error_if_nonfinite", "_requested")


def with_factors(optimizer: AdaFisher, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of torch's part, with ours added."""
    factors = optimizer._factors
    if optimizer.capturable:  # counts as numbers, which every AdaFisher reads
        state["state"] = {key: {**entry, "step": int(entry.get("step", 0))} for key, entry in state["state"].items()}
    state["H_D"] = [factors.H[index] for _, _, index, _ in optimizer._modules]
    state["S_D"] = [factors.S[index] for _, _, index, _ in optimizer._modules]
    state["steps"] = optimizer.steps
    return state


def take_over(optimizer: AdaFisher, state_dict: Mapping[str, Any], load: Callable[[Any], None]) -> None:
    """See `AdaFisher.load_state_dict`; `load` takes over torch's part."""
    where = "load_state_dict"
    check_state(where, state_dict, optimizer.param_groups)
    for group in state_dict["param_groups"]:
        checked_hyper(optimizer, where, {**optimizer.defaults, **group})
    layers = [(name, optimizer._layers[index]) for name, _, index, _ in optimizer._modules]
    H = check_factors(where, "H_D", state_dict["H_D"], [(name, layer.H_size) for name, layer in layers])
    S = check_factors(where, "S_D", state_dict["S_D"], [(name, layer.S_size) for name, layer in layers])
    factors = optimizer._factors
    pairs = [
        [F.to(device=mine[index].device, dtype=mine[index].dtype) for F, mine in ((h, factors.H), (s, factors.S))]
        for (_, _, index, _), h, s in zip(optimizer._modules, H, S)
    ]
    load({key: state_dict[key] for key in ("state", "param_groups")})
    for group in optimizer.param_groups:
        for name in SCALARS:
            group.setdefault(name, optimizer.defaults[name])
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = int(state["step"])
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].clone()  # torch shares it with the caller's dict
    for (_, _, index, _), pair in reversed(list(zip(optimizer._modules, pairs))):  # the first of shared modules wins
        factors.load(index, *pair)
    factors.count_from(None)
    factors.discard()
    optimizer._count_steps(int(state_dict["steps"]))


def copied(optimizer: AdaFisher) -> tuple[Any, ...]:
    """What a copy of the optimizer takes along beside torch's part."""
    if optimizer._kept_factors is not None and optimizer._kept_factors.pending:
        raise CafinError(
            f"{type(optimizer).__name__}: a copy must be made between steps, got one between backward and step; "
            "call step() or zero_grad() first"
        )
    factors = optimizer._factors
    mine = {name: optimizer.__dict__[name] for name in KEPT}
    return mine, list(factors.H), list(factors.S), list(factors.skipped)


def go_on_from(optimizer: AdaFisher, ours: tuple[Any, ...]) -> None:
    """Make a copy of what `copied` has told."""
    mine, H, S, skipped = ours
    optimizer.__dict__.update(mine)
    optimizer._reset()
    optimizer._find_layers()
    for index, pair in enumerate(zip(H, S)):
        optimizer._factors.load(index, *pair)
    optimizer._factors.count_from(skipped)
    optimizer._attach()


def check_state(where: str, state_dict: Any, param_groups: list[dict[str, Any]]) -> None:
    """Refuse a dict that is not an AdaFisher's, or not of these parameters."""
    mend = "it must come from AdaFisher's state_dict()"
    _mapping(where, "state_dict", state_dict, KEYS, mend)
    whole(where, "steps", state_dict["steps"], 0)
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, (list, tuple)):
        refuse(where, "param_groups", "be a list of groups", type(groups).__name__, mend, CafinTypeError)
    for number, group in enumerate(groups):
        _mapping(where, f"param_groups[{number}]", group, ("params",), mend)
        if not isinstance(group["params"], (list, tuple)) or not all(
            isinstance(index, int) for index in group["params"]
        ):
            refuse(where, f"param_groups[{number}]['params']", "be a list of numbers", group["params"], mend)
    sizes = [len(group["params"]) for group in param_groups]
    given = [len(group["params"]) for group in groups]
    if given != sizes:
        refuse(where, "param_groups", f"have groups of {sizes} parameters", given)
    _mapping(where, "state", state, (), mend)
    indices = [index for group in groups for index in group["params"]]
    parameters = dict(zip(indices, (p for group in param_groups for p in group["params"])))
    for index, entry in state.items():
        if index not in parameters:
            refuse(where, "state", f"have keys among {indices}", index)
        _mapping(where, f"state[{index}]", entry, (), mend)
        whole(where, f"state[{index}]['step']", entry.get("step", 0), 0)
        if "exp_avg" in entry:
            _numbers(where, f"state[{index}]['exp_avg']", entry["exp_avg"], tuple(parameters[index].shape))


def check_factors(where: str, key: str, given: Any, sizes: Sequence[tuple[str, int]]) -> list[Tensor]:
    """A checkpoint's `H_D` or `S_D` as a list, refused if it is not one vector for each (name, size)."""
    if not isinstance(given, (list, tuple)) or len(given) != len(sizes):
        got = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
        refuse(where, key, f"hold {len(sizes)} tensors, one for each layer", got)
    for (name, size), factor in zip(sizes, given):
        _numbers(where, f"{key} of {name}", factor, (size,))
        if not bool(((factor >= 0) & torch.isfinite(factor)).all()):
            refuse(
                where, f"{key} of {name}", "hold finite numbers >= 0", "others", "the run that saved it had diverged"
            )
    return list(given)


def _mapping(where: str, name: str, value: Any, keys: Sequence[str], mend: str) -> None:
    if not isinstance(value, Mapping):
        refuse(where, name, "be a mapping", type(value).__name__, mend, CafinTypeError)
    for key in keys:
        if key not in value:
            refuse(where, name, f"have the key {key!r}", sorted(map(str, value)), mend)


def _numbers(where: str, name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is not a dense tensor of real floating-point numbers in memory."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        refuse(where, name, f"be a tensor of shape {shape}", got)
    if value.layout is not torch.strided or not value.is_floating_point() or value.is_meta:
        got = f"{value.dtype}, {value.layout}, on {value.device}"
        refuse(where, name, "be a dense tensor of real floating-point numbers in memory", got)
