"""What the PyTorch optimizer refuses before anything has changed: models and, if asked, inf and NaN."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cafin_cupy.arrays import View, place, refuse_without_memory, view, wraps_others
from cafin_cupy.backend import DTYPES
from cafin_cupy.errors import CafinTypeError, NonFiniteError, refuse
from cafin_cupy.nonfinite import first_nonfinite, raw_moments, refuse_nonfinite
from cafin_cupy.precision import Precision, dtype_name
from cafin_cupy.rule import flag

from .torch_parallel import settled
from .torch_ranks import group_of
from .torch_reduced import least_of_all
from .torch_shards import LAID, check_shards, is_sharded, local, mesh_of, named_parameters, steps_flat

if TYPE_CHECKING:
    from .torch import AdaFisher

FINITE = "the comparison of what each rank finds of inf and NaN"
MEND = "call zero_grad() and leave the batch out"


def check_model(where: str, model: Any) -> None:
    """Refuse what is no module, or one whose parameters cannot be trained."""
    if not isinstance(model, nn.Module):
        mend = "pass the model itself, not model.parameters(); shard_state=True replaces ZeroRedundancyOptimizer"
        refuse(where, "model", "be a torch.nn.Module", type(model).__name__, mend, CafinTypeError)
    named = list(model.named_parameters())
    if not named:
        refuse(where, "model", "have parameters", "none")
    check_shards(where, model)
    for name, p in named:
        if wraps_others(p) and not is_sharded(p):
            refuse_without_memory(p, where, f"model ({name})")
        if p.is_meta or (p.requires_grad and not p.is_floating_point()):
            rule = "have real floating-point parameters in memory"
            refuse(where, f"model ({name})", rule, f"{p.dtype} on {p.device}", "convert it first")
        if p.requires_grad or nn.parameter.is_lazy(p):
            refuse_without_memory(local(p), where, f"model ({name})")


def check_momenta(where: str, model: nn.Module, precision: Precision) -> None:
    """Refuse a dtype of momenta that does not go with a parameter's."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            precision.momentum_of(where, name, dtype_name(p.dtype))


def check_place(name: str, v: View, pair: tuple[Any, Any] | None, kernels: bool) -> None:
    """Refuse a parameter that has moved away from its factors, has another size, or is not for the kernels any more."""
    if pair is not None:
        home = view(pair[0]).device
        if home != v.device:
            rule, got = f"stay on {place(home)} where its factors are", f"a parameter on {place(v.device)}"
            refuse("step", name, rule, got, "move the model before the first step")
        check_size(name, v.shape, pair)
    if kernels and v.device == "cpu":
        refuse("step", name, "stay on a GPU as at the first step", "cpu", "make a new optimizer")
    if kernels and v.dtype not in DTYPES:
        refuse("step", name, f"stay of {', '.join(DTYPES)}, as at the first step", v.dtype, "make a new optimizer")


def check_size(name: str, shape: Sequence[int], pair: tuple[Any, Any]) -> None:
    """Refuse a parameter that is not of its factors' size any more."""
    if pair[0].numel() * pair[1].numel() != math.prod(shape):
        rule = f"have {pair[1].numel()} x {pair[0].numel()} elements, as its layer had"
        refuse("step", name, rule, tuple(shape), "make a new optimizer")


def check_owned(params: Sequence[Any], known: Container[int]) -> None:
    """Refuse groups whose parameters something has replaced: their curvature would be 1, and nobody would know.

    Args:
        params: those that are to be updated.
        known: ids of the model's.
    """
    if params and not any(id(p) in known for p in params):
        got = "others alone, as of a wrapper that keeps copies of its own"
        mend = (
            "of DeepSpeed use ZeRO's stage 1 or 2, else fully_shard, or DistributedDataParallel with shard_state=True"
        )
        refuse("step", "param_groups", "hold parameters of the model", got, mend)


def check_strangers(model: nn.Module, groups: Sequence[Sequence[Any]]) -> None:
    """Refuse a model whose parameters have all been replaced: it would never be updated, and nobody would know."""
    mine = {id(p) for group in groups for p in group}
    parameters = list(model.parameters())
    if any(p.grad is not None for p in parameters) and not any(id(p) in mine for p in parameters):
        rule, got = "keep the parameters that the optimizer was made for", "others alone"
        refuse("step", "model", rule, got, "make the optimizer after what replaces them")


def check_callable(where: str, name: str, value: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        refuse(where, name, "be a function", type(value).__name__, kind=CafinTypeError)


def check_finite(optimizer: AdaFisher, loss_scale: float) -> None:
    """For `error_if_nonfinite`: refuse a step whose gradients, or on a sampled step raw moments, hold an inf or a NaN.
    Waits for the device. Of divided gradients each rank sees a part, so all decide together, by one number."""
    flag("step", "error_if_nonfinite", optimizer.error_if_nonfinite)
    flat = steps_flat(optimizer)
    if flat and len(optimizer._every_group) > 1:
        rule, mend = f"be False with several groups of {LAID}", "their gradients come one after the other"
        refuse("step", "error_if_nonfinite", rule, True, mend)
    names = {id(p): name for name, p in named_parameters(optimizer.model)}
    every = (p for group in optimizer.param_groups for p in group["params"])
    named: list[tuple[str, Any]] = [
        # An empty one in the place of none, so that all ranks count alike.
        (f"gradient of {names.get(id(p), 'params')}", torch.empty(0) if p.grad is None else settled(p.grad))
        for p in every
    ]
    if optimizer.samples:
        named += raw_moments(optimizer._factors, loss_scale)
    group = group_of(optimizer) if flat or mesh_of(optimizer) is not None else None
    if group is None:
        refuse_nonfinite("step", named, MEND)
        return
    first = first_nonfinite("step", named)
    least = least_of_all(FINITE, first, group, optimizer._factors.H_effective[0].device)
    if least == first:
        refuse_nonfinite("step", named[first : first + 1], MEND)
    else:
        refuse("step", named[least][0], "be finite", "inf or NaN on another rank", MEND, NonFiniteError)
