"""Marks in a run of PyTorch, and the time between them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """CUDA events on a GPU, which stop nothing, else the clock on the wall."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This point of the run; on a GPU of its current stream."""
        if not self.cuda:
            return time.perf_counter()
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds; the device must have reached both."""
        return float(start.elapsed_time(end)) / 1e3 if self.cuda else float(end - start)
