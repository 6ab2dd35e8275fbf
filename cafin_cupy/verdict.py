"""A loss scaler's verdict, which the kernels read on the device: whether a step happens is decided there, and the host
learns it later."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from .arrays import on_device
from .table import lent


class Verdict(NamedTuple):
    """Addresses of what a loss scaler has found, where the host does not wait for it.

    Attributes:
        found_inf: float32, not 0 if a gradient is inf or NaN: the step does not happen then.
        scale: float32, of the gradients; 0 if they are unscaled already.
        skipped: int64, counts the steps that do not happen.
        loss_scale: float32, of the loss, which the factors still have; 0 for 1.
        known: what `skipped` was when the host last looked, if it takes for granted that it still is: with another
            number there the step is not a sampled one, and the factors stay. -1 if the step is sampled in any case.
    """

    found_inf: int = 0
    scale: int = 0
    skipped: int = 0
    loss_scale: int = 0
    known: int = -1


class Readback:
    """An int64 of the device on its way to the host: one asynchronous copy, which alone is waited for."""

    def __init__(self, device: int) -> None:
        self._device = device
        piece = self._piece = lent(8, device)
        self._number = piece.bytes[:8].view(np.int64)
        weakref.finalize(self, setattr, piece, "busy", False)

    def start(self, address: int, stream: int) -> None:
        """Copy the number at `address`, as it is when `stream` comes to that. The copy before is forgotten."""
        import cupy

        runtime = cupy.cuda.runtime
        with on_device(self._device):
            try:
                runtime.memcpyAsync(self._piece.memory.ptr, address, 8, runtime.memcpyDeviceToHost, stream)
            finally:  # also where Ctrl-C comes in between: who gets the memory next must wait for the copy
                runtime.eventRecord(self._piece.read.ptr, stream)

    def wait(self) -> int:
        """The number. Waits for the copy, not for what the device was given behind it."""
        self._piece.read.synchronize()
        return int(self._number[0])
