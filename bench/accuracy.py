"""Numerical error: three float32 steps against the eager rule in float64, on the same data, by kind of parameter."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import models
from .context import Run
from .eager import Eager

STEPS = 3


def accuracy(run: Run) -> dict[str, Any]:
    """Largest error of any entry, relative to its tensor's largest entry, for conv, norm, linear and bias."""
    torch.manual_seed(1)
    start = models.mixed().to(run.device)
    data = [models.batch(16, 12, 10, run.device) for _ in range(STEPS)]
    with exact_matmul():
        truth = copy.deepcopy(start).double()
        oracle = Eager(truth, TCov=1)
        _train(truth, oracle, [(x.double(), y) for x, y in data])
        figures = {}
        for contender in run.contenders:
            if contender.samples:
                with run.guard("accuracy", contender.key):
                    model = copy.deepcopy(start)
                    optimizer = contender.build(model, 1)  # with its own learning rate: steps large enough to see
                    _train(model, optimizer, data)
                    figures[contender.key] = _errors(model, optimizer, truth, oracle)
    return {"steps": STEPS, "contenders": figures}


@contextlib.contextmanager
def exact_matmul() -> Iterator[None]:
    """Float32 products in float32, whatever the run's setting."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for x, y in data:
        models.backward(model, x, y)
        optimizer.step()
        model.zero_grad(set_to_none=True)


def kind(module: nn.Module, name: str) -> str:
    """The group that a parameter belongs to."""
    if name == "bias":
        return "bias"
    return {nn.Conv2d: "conv", nn.Linear: "linear"}.get(type(module), "norm")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry of `want`; NaN if either holds one."""
    difference = (got.detach().double() - want.detach().double()).abs().max()
    return float(difference / want.detach().abs().max().clamp_min(1e-300))


def _errors(model: nn.Module, optimizer: Any, truth: nn.Module, oracle: Eager) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, list[float]]] = {}

    def note(what: str, group: str, got: torch.Tensor, want: torch.Tensor) -> None:
        errors.setdefault(what, {}).setdefault(group, []).append(error(got, want))

    modules = dict(model.named_modules())
    for module_name, module in truth.named_modules():
        for name, want in module.named_parameters(recurse=False):
            group, got = kind(module, name), getattr(modules[module_name], name)
            note("parameter", group, got, want)
            momentum = optimizer.state[got].get("exp_avg")
            if momentum is not None:
                note("momentum", group, momentum, oracle.state[want]["exp_avg"])
    if hasattr(optimizer, "factors"):
        for module_name, (H, S) in optimizer.factors().items():
            group = kind(modules[module_name], "weight")
            note("H", group, H, oracle.averages[module_name][0])
            note("S", group, S, oracle.averages[module_name][1])
    return {what: {group: _worst(values) for group, values in groups.items()} for what, groups in errors.items()}


def _worst(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
