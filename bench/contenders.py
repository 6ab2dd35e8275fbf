"""Who is timed, and how each is made: an entry says what the sections need to know of it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .eager import LAYERS, Eager
from .models import Pairs

LEARNING_RATE = 1e-5  # small, so that random data lets nobody diverge
NEVER = 10**9  # a TCov under which only the first step samples


@dataclass(frozen=True)
class Contender:
    """One optimizer.

    Attributes:
        key: its name in the results.
        label: its name in tables and plots.
        build: model and TCov -> optimizer.
        samples: whether TCov means anything to it.
        bytes: device memory traffic per float32 parameter that its rule needs; None where nobody counted.
        construct: optimizer and (h, s) by layer name -> a call that makes all factors of one sampled step.
    """

    key: str
    label: str
    build: Callable[[nn.Module, int], torch.optim.Optimizer]
    samples: bool = False
    bytes: int | None = None
    construct: Callable[[Any, Pairs], Callable[[], None]] | None = None

    def make(self, model: nn.Module, TCov: int = NEVER) -> torch.optim.Optimizer:
        """The optimizer of `model` with the learning rate of all contenders."""
        optimizer = self.build(model, TCov)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return optimizer


def contenders(other: str | None = None) -> list[Contender]:
    """All contenders; `other` is PATH:CLASS of one more."""
    listed = [
        Contender("ours", "cafin_cupy AdaFisher", _ours, True, 20, _construct_ours),
        Contender("eager", "eager AdaFisher", _eager, True, None, _construct_eager),
        Contender("sgd", "SGD(momentum, fused)", _sgd, False, 20),
        Contender("adamw", "AdamW(fused)", _adamw, False, 28),
    ]
    return listed + ([_other(other)] if other else [])


def _fused(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _sgd(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9, fused=_fused(model))


def _adamw(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=_fused(model))


def _ours(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    from cafin_cupy.adapters.torch import AdaFisher

    return AdaFisher(model, TCov=TCov, backend="cuda" if _fused(model) else "reference")


def _eager(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    return Eager(model, TCov=TCov)


def _construct_ours(optimizer: Any, pairs: Pairs) -> Callable[[], None]:
    indexed = [(index, *pairs[layer.name]) for index, layer in enumerate(optimizer._layers)]

    @torch.no_grad()
    def call() -> None:
        for index, h, s in indexed:
            optimizer._factors.accumulate(index, h, s)
        optimizer._factors.update(1.0)

    return call


def _construct_eager(optimizer: Any, pairs: Pairs) -> Callable[[], None]:
    def call() -> None:
        for name, (h, s) in pairs.items():
            optimizer.construct(name, h, s)
        optimizer.update_factors()

    return call


def _other(spec: str) -> Contender:
    path, colon, name = spec.rpartition(":")
    if not colon or not Path(path).is_file():
        raise ValueError(f"bench: `--other` must be PATH:CLASS of a Python file, got {spec}")
    source = importlib.util.spec_from_file_location("bench_other", path)
    if source is None or source.loader is None:
        raise ValueError(f"bench: `--other` must name a Python file, got {path}")
    module = importlib.util.module_from_spec(source)
    sys.modules["bench_other"] = module
    sys.path.append(str(Path(path).resolve().parent))  # for what the file imports from beside it
    source.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"bench: `--other` must name a class of {path}, got {name}")
    kind = getattr(module, name)
    samples = "TCov" in inspect.signature(kind).parameters
    return Contender("other", f"other ({name})", lambda m, TCov: kind(m, TCov=TCov) if samples else kind(m), samples)


__all__ = ["LAYERS", "NEVER", "Contender", "Pairs", "contenders"]
