"""The verdict of a `GradScaler` where the device reads it, and what the host makes up its mind about meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.cuda_factors import CudaFactors
from cafin_cupy.cuda_update import CudaUpdate
from cafin_cupy.verdict import Readback, Verdict

from .torch_internals import scale_of
from .torch_ranks import group_of

if TYPE_CHECKING:
    from .torch import AdaFisher


def verdict_of_device(optimizer: AdaFisher) -> Verdict | None:
    """Where a scaler's verdict and scale lie, if the kernels can read them there and the host need not: for a model
    whose update is one launch. A sampled step is refreshed by one launch, too, and no other rank has a part in it."""
    found_inf, plan = getattr(optimizer, "found_inf", None), optimizer._plan
    if found_inf is None or plan is None or optimizer.error_if_nonfinite or not isinstance(plan.launch, CudaUpdate):
        return None
    scale = loss_scale = getattr(optimizer, "grad_scale", None)
    known = -1
    factors = optimizer._kept_factors
    if factors is None or factors.refreshed:  # by an attempt that failed: should this one not happen, they stay so
        return None
    if optimizer._may_sample:
        if not isinstance(factors, CudaFactors) or factors.device != plan.device or group_of(optimizer) is not None:
            return None
        if scale is None and factors.pending:  # unscale_ has reached the gradients alone
            loss_scale = scale_of(optimizer.grad_scaler)
            if loss_scale is None:
                return None
        if optimizer._unsure and optimizer.TCov > 1:
            known = optimizer._known_skips
    home = plan.params[0].device
    if not all(_readable(x, home) for x in (found_inf, scale, loss_scale) if x is not None):
        return None
    if optimizer._skips is not None and optimizer._skips.device != home:  # the model has moved since
        return None
    if optimizer._skips is None:
        optimizer._skips = torch.zeros(1, dtype=torch.int64, device=home)
        optimizer._readback = Readback(plan.device)
    if plan.schedule is None:
        optimizer._plan = None  # the next one counts on the device
    scale_at, loss_scale_at = (0 if x is None else x.data_ptr() for x in (scale, loss_scale))
    return Verdict(found_inf.data_ptr(), scale_at, optimizer._skips.data_ptr(), loss_scale_at, known)


def _readable(x: Any, home: torch.device) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.device == home


def see_whether_refreshed(optimizer: AdaFisher) -> None:
    """After an update that failed behind a refresh which the device may have left out: wait for it and see, so that the
    next attempt neither leaves the refresh out nor does it twice."""
    factors = optimizer._kept_factors
    if factors is not None and factors.refreshed:
        happened = not float(optimizer.found_inf)  # type: ignore[attr-defined]  # GradScaler's
        factors.refreshed = happened and optimizer.steps % optimizer.TCov == 0
