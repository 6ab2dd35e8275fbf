"""Runs of PyTorch models under a `GradScaler`, and hosts that must not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch_helpers import loss_of, mlp

from cafin_cupy.adapters import torch as adapter
from cafin_cupy.adapters.torch import AdaFisher
from cafin_cupy.verdict import Readback


class Scaled:
    """A run under a scaler; its scales are powers of two, so that scaling changes no bits.

    Args:
        model: called in the place of the optimizer's.
        unscale: the script calls `unscale_`, as to clip gradients.
        optimizer: in the place of one for a small perceptron with `options`.
    """

    def __init__(
        self, device: str, model: Any = None, unscale: bool = False, optimizer: Any = None, **options: Any
    ) -> None:
        self.optimizer = optimizer or AdaFisher(mlp(device), **{"TCov": 3, "weight_decay": 0.1, **options})
        self.model = self.optimizer.model if model is None else model
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
        self.unscale = unscale
        if unscale:
            self.optimizer.grad_scaler = self.scaler

    def backward(self, x: Any, bad: bool, micro: int = 1) -> None:
        self.optimizer.zero_grad()
        for part in x.chunk(micro):
            self.scaler.scale(loss_of(self.model, part) / micro).backward()
        if bad:
            last = next(p for p in reversed([*self.optimizer.model.parameters()]) if p.grad is not None)
            last.grad.view(-1)[:1].fill_(torch.inf)

    def step(self) -> None:
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iterate(self, x: Any, bad: bool = False, micro: int = 1) -> None:
        self.backward(x, bad, micro)
        self.step()

    def train(self, xs: list[Any], bad: list[bool]) -> AdaFisher:
        for x, spoiled in zip(xs, bad):
            self.iterate(x, spoiled)
        return self.optimizer


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """No tensor becomes a number of Python."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(*_: Any) -> Any:
        raise AssertionError("the host waits")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def left(xs: list[Any], bad: list[bool]) -> list[Any]:
    return [x for x, spoiled in zip(xs, bad) if not spoiled]


@contextmanager
def host_reads() -> Iterator[None]:
    """The host reads each verdict, as it does for models on several devices: what all must come to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "verdict_of_device", lambda optimizer: None)
        yield


READS = {"device": nullcontext, "host": host_reads}


class Waits:
    """What the script does, and has done whenever the host waited for the number of steps that have not happened."""

    def __init__(self) -> None:
        self.doing, self.seen = "nothing", []  # type: ignore[var-annotated]

    @contextmanager
    def counted(self) -> Iterator[None]:
        wait = Readback.wait

        def counted(readback: Readback) -> int:
            self.seen.append(self.doing)
            return wait(readback)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Readback, "wait", counted)
            yield


def marks(pattern: str) -> list[bool]:
    return [mark == "x" for mark in pattern]
