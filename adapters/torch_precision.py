"""Momenta and master weights: those that a parameter has, or new ones of the dtypes that the optimizer asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.arrays import View, torch_view
from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.precision import Precision, dtype_name, momenta_of
from cafin_cupy.rule import steps_in

from .torch_shards import laid_out, local

if TYPE_CHECKING:
    from .torch import AdaFisher


def new_momentum(p: Tensor, precision: Precision, where: str = "step", name: str = "params") -> Tensor:
    """Zeros in the memory layout of a parameter, which errors call `name`."""
    dtype = getattr(torch, precision.momentum_of(where, name, dtype_name(p.dtype)))
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def new_master(p: Tensor) -> Tensor:
    """A parameter's numbers in float32, in its memory layout."""
    return p.detach().to(torch.float32, copy=True, memory_format=torch.preserve_format)


def state_of(optimizer: AdaFisher, p: Tensor, name: str) -> Mapping[str, Any]:
    """The state of a parameter, empty if it has none; refused if a script has put something else in its place."""
    entry = optimizer.state.get(p, {})
    if not isinstance(entry, Mapping):
        refuse("step", f"state of {name}", "be a dict", type(entry).__name__, "delete it to start anew", CafinTypeError)
    for key in ("exp_avg", "master"):
        if entry.get(key) is not None and not isinstance(entry[key], Tensor):
            got, mend = type(entry[key]).__name__, "delete it to start anew"
            refuse("step", f"{key!r} in the state of {name}", "be a tensor", got, mend, CafinTypeError)
    return entry


def steps_of(optimizer: AdaFisher, p: Tensor, name: str) -> int:
    """How many steps a parameter has taken."""
    return steps_in("step", f"step of {name}", state_of(optimizer, p, name).get("step", 0))


def momentum_of(optimizer: AdaFisher, p: Tensor, home: Tensor, name: str) -> Tensor:
    """The momentum of a parameter, divided over ranks as `home` is. A new one is not yet in the state, as memory may
    run out for the next."""
    average: Tensor | None = state_of(optimizer, p, name).get("exp_avg")
    if average is None:
        return new_momentum(home, optimizer._precision, "step", name)
    possible = momenta_of(dtype_name(p.dtype))
    if optimizer._factors.kernels and dtype_name(average.dtype) not in possible:  # they write no others
        refuse("step", f"momentum of {name}", f"be {' or '.join(possible)}", average.dtype, "convert it to float32")
    return _beside(home, name, average, "momentum")


def master_of(optimizer: AdaFisher, p: Tensor, home: Tensor, name: str) -> Tensor | None:
    """The master of a parameter, None if it has none; as `momentum_of`."""
    if not optimizer._precision.has_master(dtype_name(p.dtype)):
        return None
    master: Tensor | None = state_of(optimizer, p, name).get("master")
    if master is None:
        return new_master(home)
    if master.dtype is not torch.float32:
        refuse("step", f"master of {name}", "stay float32", master.dtype, "convert it to float32")
    return _beside(home, name, master, "master")


def written_state(
    optimizer: AdaFisher, params: Sequence[Tensor], name: Callable[[Tensor], str]
) -> list[tuple[str, View]]:
    """Momenta and masters that will be written where they are: not those that are new, or replaced."""
    kinds = [("momentum", "exp_avg"), *([("master", "master")] if optimizer._precision.masters else [])]
    written = []
    for p in params:
        state = state_of(optimizer, p, name(p))
        for kind, key in kinds:
            if state.get(key) is not None:
                called = f"{kind} of {name(p)}"
                v = torch_view(local(state[key]), "step", called)
                if v.strides == local(p).stride():
                    written.append((called, v))
    return written


def _beside(p: Tensor, name: str, x: Tensor, kind: str) -> Tensor:
    """State of a parameter, in its memory layout."""
    if x.device != p.device or x.shape != p.shape:
        rule = f"stay of shape {tuple(x.shape)} on {x.device}, as its {kind} is"
        mend = "make a new optimizer, or move the model before the first step"
        refuse("step", name, rule, f"{tuple(p.shape)} on {p.device}", mend)
    x = laid_out("step", f"{kind} of {name}", p, x)  # the process group may have come or gone
    if local(x).stride() == local(p).stride():
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
