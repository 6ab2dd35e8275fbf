"""`python -m bench.precision`: steps of ResNet-18 by the kernels for each kind of parameters and momenta, beside
PyTorch's fused optimizers, and the time of a copy of as many bytes. Prints a table; needs a GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from cafin_cupy.adapters.torch import AdaFisher

from .environment import environment
from .models import resnet18

STEPS, ROUNDS = 200, 5
AHEAD = 30_000_000  # clock cycles that keep the device waiting while the host queues
ROWS: list[tuple[str, torch.dtype, dict[str, Any], int]] = [  # what, dtype, options, bytes that a step moves
    ("float32", torch.float32, {}, 20),
    ("float32, momentum bfloat16", torch.float32, {"momentum_dtype": torch.bfloat16}, 16),
    ("bfloat16", torch.bfloat16, {}, 14),
    ("bfloat16, momentum bfloat16", torch.bfloat16, {"momentum_dtype": torch.bfloat16}, 10),
    ("bfloat16, stochastic rounding", torch.bfloat16, {"stochastic_rounding": True}, 14),
    ("bfloat16, master weights", torch.bfloat16, {"master_weights": True}, 22),
    ("float16", torch.float16, {}, 14),
]


def step_us(make: Callable[[Any], Any], dtype: torch.dtype) -> float:
    """Device time of a step, the median of some rounds; the host queues ahead."""
    model = resnet18().cuda().to(dtype)
    optimizer = make(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for _ in range(5):
        optimizer.step()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        begin.record()
        for _ in range(STEPS):
            optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / STEPS * 1e3)
    return median(times)


def main() -> int:
    if not torch.cuda.is_available():
        print("bench.precision: needs a GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # no forward: no layer is seen
    facts = environment(torch.device("cuda"))
    print(
        ", ".join(f"{name} {facts[name]}" for name in ("device", "driver", "torch", "cupy", "python", "commit", "date"))
    )
    print("\n| | bytes a parameter | µs |\n| --- | ---: | ---: |")
    for what, dtype, options, moved in ROWS:
        us = step_us(partial(AdaFisher, TCov=10**6, **options), dtype)
        print(f"| AdaFisher, {what} | {moved} | {us:.1f} |")
    for what, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        us = step_us(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True), dtype)
        print(f"| SGD(momentum, fused), {what} | {5 * dtype.itemsize} | {us:.1f} |")
        us = step_us(lambda model: torch.optim.AdamW(model.parameters(), fused=True), dtype)
        print(f"| AdamW(fused), {what} | {7 * dtype.itemsize} | {us:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
