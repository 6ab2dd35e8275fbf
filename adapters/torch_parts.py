"""What `summary` and `curvature` of the PyTorch optimizer look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from cafin_cupy.parts import Part, Rate, rate

from .torch_ranks import group_of
from .torch_reduced import telling
from .torch_scalars import checked_hypers
from .torch_shards import local, mesh_of, named_parameters, part_of
from .torch_zero import homes

if TYPE_CHECKING:
    from .torch import AdaFisher

CURVATURE = "the sum of the norms for curvature()"


def parts(optimizer: AdaFisher) -> list[Part]:
    """The parameters in the order of the groups."""
    names = {id(p): name for name, p in named_parameters(optimizer.model)}
    holders: dict[int, str] = {}
    for module in optimizer.model.modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(id(p), type(module).__name__)
    found, home = [], homes(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            momentum = optimizer.state.get(p, {}).get("exp_avg")
            place = optimizer._owners.get(id(p))
            index, role = place or (-1, "")
            trains = p.requires_grad or momentum is not None
            note = "" if place else f"F = 1: {_reason(holders.get(id(p)))}"
            if not p.requires_grad:
                note = "frozen"
            elif momentum is None and optimizer.steps:
                trains, note = False, "no gradient so far"
            layer = optimizer._layers[index] if place else None
            name = names.get(id(p), f"param_groups[{number}][{k}]")
            given = p.detach(), momentum, trains, layer, index, role, note, optimizer._precision, local(home(p)).numel()
            found.append(Part(name, *given))
    return found


def _reason(holder: str | None) -> str:
    return "no module of the model holds it" if holder is None else f"{holder} is no layer with factors"


@torch.no_grad()
def rates(optimizer: AdaFisher, where: str) -> list[Rate]:
    """Of each of `parts`; what a capturable optimizer keeps on the device is left there."""
    found = []
    for group, hyper in zip(optimizer.param_groups, checked_hypers(optimizer, where)):
        lr = group["lr"].detach().reshape(()) if _on_device(group["lr"]) else None
        for p in group["params"]:
            t: Any = optimizer.state.get(p, {}).get("step", 0)
            t = t.clamp(min=1).double() if _on_device(t) else max(1, int(t))
            found.append(rate(hyper, 1.0 - hyper.beta**t, lr))
    return found


def held(part: Part, pair: tuple[Any, Any] | None) -> tuple[Any, Any, tuple[Any, Any] | None]:
    """This rank's part of parameter, momentum and factors."""
    own = None if pair is None else part_of(pair, part.array, part.name)
    return local(part.array), local(part.momentum), own


def over_parts(optimizer: AdaFisher) -> Callable[[Tensor], Tensor] | None:
    """What adds squared norms up over the ranks, for the ratio of two: of one parameter each part is held by equally
    many ranks, so that cancels. None if all hold the whole."""
    group = group_of(optimizer) if mesh_of(optimizer) is not None else None
    if group is None:
        return None

    def total(squares: Tensor) -> Tensor:
        squares = squares.contiguous()
        with telling(CURVATURE, group):
            dist.all_reduce(squares, group=group)
        return squares

    return total


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda
