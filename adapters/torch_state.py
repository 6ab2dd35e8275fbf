"""State dicts: the factors in them, and the checks before anything is taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.rule import whole

from .torch_scalars import SCALARS, checked_hyper
from .torch_warnings import warn_not_stored

if TYPE_CHECKING:
    from .torch import AdaFisher

OF_OLD = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)
KEYS = ("state", "param_groups", "H_D", "S_D", "steps")


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
    stored, missing = split_layers(optimizer._modules, state_dict)
    layers = [(name, optimizer._layers[index]) for name, _, index, _ in stored]
    H = check_factors(where, "H_D", state_dict["H_D"], [(name, layer.H_size) for name, layer in layers])
    S = check_factors(where, "S_D", state_dict["S_D"], [(name, layer.S_size) for name, layer in layers])
    factors = optimizer._factors
    pairs = [
        [F.to(device=mine[index].device, dtype=mine[index].dtype) for F, mine in ((h, factors.H), (s, factors.S))]
        for (_, _, index, _), h, s in zip(stored, H, S)
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
    for (_, _, index, _), pair in reversed(list(zip(stored, pairs))):  # the first of shared modules wins
        factors.load(index, *pair)
    for _, _, index, _ in missing:
        factors.restart(index)
    factors.discard()
    optimizer._count_steps(int(state_dict["steps"]))
    warn_not_stored(where, [name for name, *_ in missing])


def split_layers(modules: Sequence[Any], state_dict: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(layers whose factors a checkpoint holds, those it knows nothing of).

    It holds those of all layers; or of the types alone that the public implementation gives factors, and that versions
    of this one knew which had no others. The remaining layers then had F = 1, and begin at that."""
    known = [module for module in modules if isinstance(module[1], OF_OLD)]
    given = [state_dict[key] for key in ("H_D", "S_D")]
    if len(known) < len(modules) and all(isinstance(x, (list, tuple)) and len(x) == len(known) for x in given):
        return known, [module for module in modules if not isinstance(module[1], OF_OLD)]
    return list(modules), []


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
