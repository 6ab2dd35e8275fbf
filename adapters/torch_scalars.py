"""The scalars of a step: those of the parameter groups, and the scales of a `GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.errors import CafinError, CafinTypeError, refuse
from cafin_cupy.rule import Hyper, at_least

from .torch_groups import SCALARS, check_groups

if TYPE_CHECKING:
    from .torch import AdaFisher

_PLAIN = (float, int)
_values = itemgetter(*SCALARS, "maximize")


def unscaling(optimizer: AdaFisher) -> tuple[float, float] | None:
    """(scale of the gradients, scale of the loss), or None if a scaler found non-finite gradients."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return 1.0, 1.0
    if float(found_inf):
        return None
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        scale = _checked_scale(scale)
        return scale, scale
    if optimizer.samples and optimizer._kept_factors is not None and optimizer._kept_factors.pending:
        if optimizer.grad_scaler is None:
            refuse(
                "step", "grad_scaler", "be known where unscale_ is called before step", "None",
                f"construct {type(optimizer).__name__}(model, ..., grad_scaler=scaler)",
            )  # fmt: skip
        check_scaler("step", optimizer.grad_scaler)
        if not getattr(optimizer.grad_scaler, "is_enabled", lambda: True)():
            rule, mend = "be the GradScaler that steps", "set optimizer.grad_scaler to that one"
            refuse("step", "grad_scaler", rule, "another one, which is disabled", mend)
        return 1.0, _checked_scale(optimizer.grad_scaler.get_scale())
    return 1.0, 1.0


def check_scaler(where: str, scaler: Any) -> None:
    """Refuse a `grad_scaler` that knows no scale."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        refuse(where, "grad_scaler", "be a GradScaler", type(scaler).__name__, kind=CafinTypeError)


def _checked_scale(scale: Any) -> float:
    return at_least("step", "scale of the GradScaler", scale, 0.0, strict=True)


def forget_scale(optimizer: AdaFisher) -> None:
    """After a step that has raised: a `GradScaler` takes back what it has set for the step only if all went well, and
    would multiply its next scale by what is left."""
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)


def checked_hypers(optimizer: AdaFisher, where: str) -> list[Hyper]:
    """The scalars of all groups."""
    groups = optimizer.param_groups
    try:
        return [checked_hyper(optimizer, where, group) for group in groups]
    except (CafinError, KeyError, TypeError):  # then once more, to say which
        check_groups(where, groups)
        if len(groups) == 1:
            raise
        for number, group in enumerate(groups):
            checked_hyper(optimizer, where, group, f"param_groups[{number}]['{{}}']")
        raise


def checked_hyper(optimizer: AdaFisher, where: str, group: Mapping[str, Any], path: str = "{}") -> Hyper:
    """The scalars of a parameter group, which errors call by `path`; those that were checked before are looked up."""
    key = lr, beta, Lambda, weight_decay, maximize = _values(group)
    plain = type(lr) in _PLAIN and type(beta) in _PLAIN and type(Lambda) in _PLAIN and type(weight_decay) in _PLAIN
    known = optimizer._hypers.get(key) if plain and type(maximize) is bool else None
    if known is not None:
        return known
    for name in SCALARS:
        if isinstance(group[name], Tensor) and group[name].is_cuda:
            if name == "lr" and optimizer.capturable:
                if lr.dtype is not torch.float32 or lr.numel() != 1:
                    rule, got = "be float32 with one element, if on a GPU", f"{lr.dtype} of shape {tuple(lr.shape)}"
                    refuse(where, path.format(name), rule, got)
                lr = 0.0  # read on the device
                continue
            got = f"a tensor on {group[name].device}"
            refuse(where, path.format(name), "be a number or a CPU tensor", got, "pass .item()")
    hyper = Hyper.checked(where, lr, beta, Lambda, weight_decay, optimizer._decoupled, path, maximize)
    if plain:  # and `maximize` is checked
        if len(optimizer._hypers) > 1000:  # a schedule makes new ones with every step
            optimizer._hypers.clear()
        optimizer._hypers[key] = hyper
    return hyper
