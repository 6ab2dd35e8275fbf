"""What `summary` and `curvature` of the PyTorch optimizer look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.parts import Part, Rate, rate

from .torch_scalars import checked_hypers
from .torch_shards import local, named_parameters
from .torch_zero import homes

if TYPE_CHECKING:
    from .torch import AdaFisher


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


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda
