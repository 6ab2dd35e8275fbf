"""Clocks.  Three ways to time a call, all in microseconds per call:

- `queued`: the device alone.  A delay kernel holds the stream while the host launches, so launch time is hidden.
- `streamed`: calls back to back between two events, as a training loop makes them; the slower of host and device.
- `host`: what the call costs the host, from an idle device, without waiting for the device.

On a CPU `queued` and `streamed` are the wall clock, and `host` does not apply.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]
MICRO = 1e6
DELAY_LIMIT = 50_000.0  # us: a host slower than this is not waited for
DELAY_CYCLES = 2_000_000


def summary(samples: list[float], unit: str = "us") -> dict[str, Any]:
    """Median, minimum and the 20th and 80th percentile of one or more samples."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p20": at(0.2),
        "p80": at(0.8),
        "samples": len(ordered),
        "unit": unit,
    }


class Clock:
    """Times calls on one device, on its current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.cycles_per_us = self._calibrate() if self.cuda else 0.0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _calibrate(self) -> float:
        for _ in range(3):  # the first ones raise the clock rate
            took = self._events(lambda: torch.cuda._sleep(DELAY_CYCLES), 1)
        return DELAY_CYCLES / took

    def _events(self, call: Call, inner: int, delay: float = 0.0) -> float:
        self.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if delay:
            torch.cuda._sleep(int(delay * self.cycles_per_us))
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / inner

    def wall(self, call: Call, inner: int = 1) -> float:
        """Wall clock, from an idle device to an idle device."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        self.synchronize()
        return (time.perf_counter() - start) * MICRO / inner

    def host(self, call: Call) -> float:
        """What one call costs the host."""
        self.synchronize()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * MICRO

    def queued(self, call: Call, inner: int, host: float) -> float:
        """`host` is what one call costs the host: it sets the delay."""
        if not self.cuda:
            return self.wall(call, inner)
        return self._events(call, inner, min(2.5 * inner * host + 500.0, DELAY_LIMIT))

    def streamed(self, call: Call, inner: int = 1) -> float:
        """Calls back to back."""
        return self._events(call, inner) if self.cuda else self.wall(call, inner)

    def each(self, call: Call, times: int) -> list[float]:
        """Time of every one of `times` calls without a pause between them, after one that is not timed."""
        call()
        if not self.cuda:
            return [self.wall(call) for _ in range(times)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def cycle(calls: Sequence[Call]) -> Call:
    """One call that makes the given ones in turn: equal work on other memory, so that no cache serves the next."""
    turn = 0

    def call() -> None:
        nonlocal turn
        calls[turn]()
        turn = (turn + 1) % len(calls)

    return call
