"""What one run shares: sizes, clock, contenders, and the list of what failed."""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import models
from .contenders import Contender
from .timing import Clock


@dataclass(frozen=True)
class Sizes:
    """How much a run does.

    Attributes:
        batch, image, width: images per batch, their side, and the width of the ResNet's first stage.
        rounds: samples per figure.
        inner: steps per sample.
        cycles: blocks of iterations per contender and TCov.
        block: iterations per block, if TCov is not larger.
        large: number, rows and columns of the large matrices.
        copy: bytes of the copied array.
    """

    batch: int = 128
    image: int = 32
    width: int = 64
    rounds: int = 50
    inner: int = 10
    cycles: int = 5
    block: int = 20
    large: tuple[int, int, int] = (6, 20480, 8192)
    copy: int = 1 << 31


FULL = Sizes()
QUICK = Sizes(rounds=15, cycles=2, block=10)
SMOKE = Sizes(batch=4, image=8, width=4, rounds=3, inner=2, cycles=1, block=2, large=(2, 64, 96), copy=1 << 20)
TCOVS = (1, 10, 100)
SMOKE_TCOVS = (1, 2)


@dataclass
class Run:
    """One run on one device."""

    device: torch.device
    sizes: Sizes
    contenders: list[Contender]
    clock: Clock
    tcovs: tuple[int, ...] = TCOVS
    failures: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self._model = models.resnet18(width=self.sizes.width).to(self.device)
        self.data = models.batch(self.sizes.batch, self.sizes.image, 10, self.device)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self) -> nn.Module:
        """A fresh copy of the ResNet."""
        return copy.deepcopy(self._model)

    def backward(self, model: nn.Module) -> Tensor:
        """Forward and backward pass over the batch."""
        return models.backward(model, *self.data)

    def ready(self, contender: Contender) -> torch.optim.Optimizer:
        """An optimizer of a fresh model, past its first step (the sampled one), with gradients present."""
        model = self.model()
        optimizer = contender.make(model)
        self.backward(model)
        for _ in range(3):
            optimizer.step()
        self.clock.synchronize()
        return optimizer

    @contextlib.contextmanager
    def guard(self, section: str, who: str = "") -> Iterator[None]:
        """Note what fails inside, and go on."""
        try:
            yield
        except Exception as error:  # whatever it is, the other figures are still wanted
            self.failures.append(
                {
                    "section": section,
                    "contender": who,
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": "".join(traceback.format_exception(error, limit=-4)),
                }
            )

    def interleave(self, section: str, actions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
        """What `rounds` rounds of all actions returned: each round makes every action once, so that a drift of the
        device meets all alike.  An action that fails is noted and left out from then on."""
        collected: dict[str, list[Any]] = {name: [] for name in actions}
        alive = dict(actions)
        for _ in range(rounds):
            for name in list(alive):
                before = len(self.failures)
                with self.guard(section, name):
                    collected[name].append(alive[name]())
                if len(self.failures) > before:
                    del alive[name], collected[name]
        return collected

    def release(self) -> None:
        """Give back what the last section held."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
