"""The task of the training program: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, and a network for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .training import images


class Residual(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = convolution(channels, channels), convolution(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.second(functional.relu(self.first(x))))


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3 x 3 convolution and batch normalisation, which makes a bias idle."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs))


class Network(nn.Sequential):
    """Images (B, 1, 8, 8) to logits (B, 10); 111,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            convolution(1, 32), nn.ReLU(), Residual(32), convolution(32, 64, 2), nn.ReLU(), Residual(64),
            nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (1347, 1, 8, 8), standardised, and labels; test images (450, 1, 8, 8) and labels.

    The split is the same for all seeds.
    """
    *pixels, of_train, of_test = images()
    x, x_test = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in pixels)
    y, y_test = torch.tensor(of_train), torch.tensor(of_test)
    return x.to(device), y.to(device), x_test.to(device), y_test.to(device)


def shifted(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image of (B, 1, 8, 8) moved by -1, 0 or 1 pixel along both axes, filled up with its own border."""
    windows = functional.pad(x, (1, 1, 1, 1), mode="replicate").unfold(2, 8, 1).unfold(3, 8, 1)  # (B, 1, 3, 3, 8, 8)
    dy, dx = torch.randint(3, (2, len(x)), generator=generator).to(x.device)
    return windows[torch.arange(len(x), device=x.device), :, dy, dx]
