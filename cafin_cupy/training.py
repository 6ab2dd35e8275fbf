"""What the training programs share: the data, defaults of the optimizers, the report of an epoch, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import rule
from .errors import refuse

TEST_SIZE = 450

# What suits each optimizer on this very task. Parity averaging leaves F near Lambda: a step is that of momentum SGD
# with lr / Lambda, here 1, where PyTorch's SGD, whose momentum is a sum and no mean, would say 0.1. By the paper's rule
# the factors fill [0, 1] and F rises to 1. The decoupled decay shrinks a weight by lr * weight_decay, here 5e-4 too.
DEFAULTS: dict[tuple[str, str], dict[str, float]] = {
    ("adafisher", "parity"): {"lr": 1e-3, "Lambda": 1e-3, "weight_decay": 5e-4, "TCov": 10},
    ("adafisher", "paper"): {"lr": 1e-2, "Lambda": 1e-2, "weight_decay": 5e-4, "TCov": 10},
    ("adafisherw", "parity"): {"lr": 1e-3, "Lambda": 1e-3, "weight_decay": 0.5, "TCov": 10},
    ("adafisherw", "paper"): {"lr": 1e-2, "Lambda": 1e-2, "weight_decay": 0.05, "TCov": 10},
    ("adamw", ""): {"lr": 3e-3, "weight_decay": 1e-2},
    ("sgd", ""): {"lr": 0.1, "weight_decay": 5e-4},
}


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images: mean loss, share of right answers on both sets, seconds."""

    loss: float
    train_accuracy: float
    test_accuracy: float
    seconds: float

    def line(self, number: int) -> str:
        """For the terminal."""
        return (
            f"epoch {number:3d}  loss {self.loss:.4f}  train {self.train_accuracy:7.2%}  "
            f"test {self.test_accuracy:7.2%}  {self.seconds:.2f} s"
        )


def check(settings: Any) -> None:
    """Refuse numbers that are out of range, and paths that cannot be files."""
    rule.whole("train", "epochs", settings.epochs, 1)
    rule.whole("train", "batch_size", settings.batch_size, 2)  # BatchNorm needs two values of each channel
    rule.whole("train", "seed", settings.seed, 0)
    rule.at_least("train", "lr", settings.lr, 0.0, strict=True)
    rule.at_least("train", "weight_decay", settings.weight_decay, 0.0)
    for name in ("output", "checkpoint", "factors"):
        path = getattr(settings, name, None)
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            refuse("train", name, "be a file in a folder that exists", path)


def images() -> tuple[np.ndarray[Any, Any], ...]:
    """Of scikit-learn's 1,797 handwritten digits: training images (1347, 64), standardised, test images (450, 64), and
    the labels of both. The split is the same for all seeds."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(pixels, labels, test_size=TEST_SIZE, stratify=labels, random_state=0)
    mean, deviation = x.mean(), x.std()
    return (x - mean) / deviation, (x_test - mean) / deviation, y, y_test


def draw(output: Path, epochs: Sequence[Epoch], title: str) -> None:
    """Write the curves of loss and accuracy, as PNG."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = range(1, len(epochs) + 1)
    left.semilogy(numbers, [epoch.loss for epoch in epochs], color="tab:blue", marker=".")
    left.set(title="training loss", xlabel="epoch", ylabel="cross-entropy")
    for part, color in (("train", "tab:blue"), ("test", "tab:orange")):
        percent = [100 * getattr(epoch, f"{part}_accuracy") for epoch in epochs]
        right.plot(numbers, percent, color=color, marker=".", label=part)
    right.set(title=f"accuracy: test {epochs[-1].test_accuracy:.2%}", xlabel="epoch", ylabel="%")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(output, format="png", dpi=120)
