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
        build: model, TCov and options -> optimizer.
        samples: whether TCov means anything to it.
        bytes: device memory traffic per float32 parameter that its rule needs; None where nobody counted.
        construct: optimizer and (h, s) by layer name -> a call that makes all factors of one sampled step.
        capturable: options under which a CUDA graph may capture its step; None where none may.
    """

    key: str
    label: str
    build: Callable[..., torch.optim.Optimizer]
    samples: bool = False
    bytes: int | None = None
    construct: Callable[[Any, Pairs], Callable[[], None]] | None = None
    capturable: dict[str, Any] | None = None

    @property
    def state(self) -> int | None:
        """Bytes of state per parameter: what is read and written besides p, which is both, and g, which is read."""
        return None if self.bytes is None else (self.bytes - 12) // 2

    def make(self, model: nn.Module, TCov: int = NEVER, **options: Any) -> torch.optim.Optimizer:
        """The optimizer of `model` with the learning rate of all contenders."""
        optimizer = self.build(model, TCov, **options)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return optimizer


def contenders(other: str | None = None) -> list[Contender]:
    """All contenders; `other` is PATH:CLASS of one more."""
    listed = [
        Contender("ours", "cafin_cupy AdaFisher", _ours, True, 20, _construct_ours, {"capturable": True}),
        Contender("eager", "eager AdaFisher", _eager, True, None, _construct_eager),
        Contender("sgd", "SGD(momentum, fused)", _sgd, False, 20, capturable={}),
        Contender("adamw", "AdamW(fused)", _adamw, False, 28, capturable={"capturable": True}),
    ]
    return listed + ([_other(other)] if other else [])


def _sgd(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9, fused=True)


def _adamw(model: nn.Module, TCov: int, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def _ours(model: nn.Module, TCov: int, **options: Any) -> torch.optim.Optimizer:
    from cafin_cupy.adapters.torch import AdaFisher

    backend = "cuda" if next(model.parameters()).is_cuda else "reference"
    return AdaFisher(model, TCov=TCov, backend=backend, **options)


def _eager(model: nn.Module, TCov: int) -> torch.optim.Optimizer:
    return Eager(model, TCov=TCov)


def _construct_ours(optimizer: Any, pairs: Pairs) -> Callable[[], None]:
    indexed = [(index, *pairs[layer.name]) for index, layer in enumerate(optimizer._layers)]

    @torch.no_grad()
    def call() -> None:
        for index, h, s in indexed:
            optimizer._factors.defer(index, h, s)
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
