"""Checks of a state dict, before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.rule import whole

KEYS = ("state", "param_groups", "H_D", "S_D", "steps")


def check_state(where: str, state_dict: Any, param_groups: list[dict[str, Any]]) -> None:
    """Refuse a dict that is not an AdaFisher's, or not of these parameters."""
    mend = "it must come from AdaFisher's state_dict()"
    if not isinstance(state_dict, Mapping):
        refuse(where, "state_dict", "be a mapping", type(state_dict).__name__, mend, CafinTypeError)
    for key in KEYS:
        if key not in state_dict:
            refuse(where, "state_dict", f"have the key {key!r}", sorted(map(str, state_dict)), mend)
    whole(where, "steps", state_dict["steps"], 0)
    sizes = [len(group["params"]) for group in param_groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if given != sizes:
        refuse(where, "param_groups", f"have groups of {sizes} parameters", given)
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = dict(zip(indices, (p for group in param_groups for p in group["params"])))
    for index, entry in state_dict["state"].items():
        if index not in parameters:
            refuse(where, "state", f"have keys among {indices}", index)
        whole(where, f"state[{index}]['step']", entry.get("step", 0), 0)
        average = entry.get("exp_avg")
        shape = tuple(parameters[index].shape)
        if average is not None and not (isinstance(average, Tensor) and tuple(average.shape) == shape):
            refuse(where, f"state[{index}]['exp_avg']", f"be a tensor of shape {shape}", describe(average))


def check_factors(where: str, key: str, given: Any, names: Sequence[str], sizes: Sequence[int]) -> list[Tensor]:
    """A checkpoint's `H_D` or `S_D` as a list, refused if it is not one vector of the right size for each layer."""
    if not isinstance(given, (list, tuple)) or len(given) != len(names):
        got = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
        refuse(where, key, f"hold {len(names)} tensors, one for each layer", got)
    for name, size, factor in zip(names, sizes, given):
        if not isinstance(factor, Tensor) or tuple(factor.shape) != (size,):
            refuse(where, f"{key} of {name}", f"be a tensor of shape ({size},)", describe(factor))
    return list(given)


def describe(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
