"""What a fresh process pays: `python -m bench.fresh MODULE ... [--step DEVICE]` prints it as one line of JSON.

The time of importing each module in turn and, with `--step`, of the first step of AdaFisher, in seconds. What it
imports itself weighs nothing.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from time import perf_counter
from typing import Any


def main(argv: list[str]) -> None:
    modules, _, device = " ".join(argv).partition("--step")
    figures: dict[str, Any] = {"imports": {}}
    for name in modules.split():
        start = perf_counter()
        import_module(name)
        figures["imports"][name] = perf_counter() - start
    if device:
        figures.update(first_step(device.strip()))
    print(json.dumps(figures))


def first_step(device: str) -> dict[str, float]:
    """Construction of AdaFisher, one iteration and its (sampled) step, of a small model with each layer type; what the
    same iteration takes without optimizer, once cuDNN is warm; and what the first optimizer of a process costs whatever
    it is, because PyTorch then imports its compiler."""
    import torch

    from cafin_cupy.adapters.torch import AdaFisher

    from . import models

    place = torch.device(device)
    model = models.mixed().to(place)
    x, y = models.batch(16, 12, 10, place)

    def iterate() -> None:
        models.backward(model, x, y)
        model.zero_grad(set_to_none=True)

    def seconds(call: Any) -> float:
        torch.cuda.synchronize(place)
        start = perf_counter()
        call()
        torch.cuda.synchronize(place)
        return perf_counter() - start

    def first() -> None:
        optimizer = AdaFisher(model)
        models.backward(model, x, y)
        optimizer.step()

    optimizer = seconds(lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    warm_up = seconds(iterate)
    plain = min(seconds(iterate) for _ in range(5))
    return {"optimizer": optimizer, "warm_up": warm_up, "plain": plain, "first": seconds(first) - plain}


if __name__ == "__main__":
    main(sys.argv[1:])
