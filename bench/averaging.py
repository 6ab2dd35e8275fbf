"""What the two averaging rules make of F: `python -m bench.averaging` draws bench/averaging.png for the README.

The network and the digits of the training program, on the CPU, every step sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch.nn import functional

from cafin_cupy.adapters.torch import AdaFisher
from cafin_cupy.digits import Network, load

matplotlib.use("Agg")

from matplotlib import pyplot

LAMBDA = 1e-3
STEPS = 120
RULES = {"parity": 'averaging="parity"', "paper": 'averaging="paper"'}
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


def spread(averaging: str) -> np.ndarray[Any, Any]:
    """(steps, quantiles) of F over all weights with factors, after each step."""
    torch.manual_seed(0)
    x, y, _, _ = load(torch.device("cpu"))
    model = Network()
    optimizer = AdaFisher(model, lr=1e-3, Lambda=LAMBDA, TCov=1, averaging=averaging)
    order = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(STEPS):
        batch = torch.randint(len(x), (64,), generator=order)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        factors = optimizer._factors
        pairs = [factors.of_weight(index) for index in range(len(factors.layers))]
        F = torch.cat([(torch.outer(S, H) + LAMBDA).flatten() for H, S in pairs])
        rows.append(np.quantile(F.numpy(), QUANTILES))
    return np.array(rows)


def draw(path: Path) -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, (rule, title) in zip(axes, RULES.items()):
        low, lower, middle, upper, high = spread(rule).T
        steps = np.arange(1, STEPS + 1)
        axis.fill_between(steps, low, high, color="#1f6f5c", alpha=0.15, linewidth=0, label="smallest to largest")
        axis.fill_between(steps, lower, upper, color="#1f6f5c", alpha=0.35, linewidth=0, label="middle 90 %")
        axis.plot(steps, middle, color="#1f6f5c", label="median")
        axis.axhline(LAMBDA, color="#c0392b", linewidth=0.8, linestyle="--", label="λ")
        axis.set(title=title, xlabel="step", yscale="log", xlim=(1, STEPS), ylim=(6e-4, 2))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("F̃ = S H + λ")
    axes[1].legend(frameon=False, fontsize=8, loc="center right")
    figure.savefig(path, dpi=144)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
