"""The networks that are timed: ResNet-18 for CIFAR, a small one of every layer type, a stack of large matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pairs = dict[str, tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Basic residual block: two 3x3 convolutions and a shortcut, (B, c_in, H, W) -> (B, c_out, H/stride, W/stride)."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-18 with the CIFAR stem (3x3, no max-pool): 11,173,962 parameters.  Activations are out of place, so that
    implementations on full backward hooks run it too."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    c_in = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        c_out = width << stage
        layers += [Block(c_in, c_out, stride), Block(c_out, c_out, 1)]
        c_in = c_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))


class Tokens(nn.Module):
    """(B, C, H, W) -> (B, H * W, C): what a convolution hands to a transformer's layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class MeanOver(nn.Module):
    """Mean over one axis."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axis)


def mixed(classes: int = 10, width: int = 16) -> nn.Sequential:
    """A small network of 3-channel images with every layer type, with and without bias.  No convolution with a bias
    stands before a BatchNorm: its true gradient would be 0, and a relative error of it meaningless."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, groups=2),
        nn.GELU(),
        Tokens(),
        nn.LayerNorm(2 * width),
        nn.Linear(2 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, 2 * width, bias=False),
        MeanOver(1),
        nn.Linear(2 * width, classes),
    )


def matrices(count: int, rows: int, columns: int, device: torch.device) -> nn.ModuleList:
    """`count` Linear layers (rows, columns) without bias, made on `device`, with random gradients present."""
    with torch.device(device):
        stack = nn.ModuleList(nn.Linear(columns, rows, bias=False) for _ in range(count))
    for p in stack.parameters():
        p.grad = torch.randn_like(p).mul_(0.01)
    return stack


def batch(size: int, image: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images (size, 3, image, image) and labels (size,)."""
    return torch.randn(size, 3, image, image, device=device), torch.randint(classes, (size,), device=device)


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Forward and backward pass; the loss."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def layer_pairs(model: nn.Module, types: tuple[type[nn.Module], ...], x: Tensor, y: Tensor) -> Pairs:
    """(h, s) of every layer of one forward and backward pass, copied with their memory layout, by module name."""
    inputs: dict[str, Tensor] = {}
    pairs: Pairs = {}

    def watch(name: str):  # type: ignore[no-untyped-def]
        def keep_input(_: nn.Module, inputs_: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = inputs_[0].detach().clone()
            output.register_hook(keep_gradient)

        def keep_gradient(s: Tensor) -> None:
            pairs[name] = (inputs[name], s.detach().clone())

        return keep_input

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, types)]
    backward(model, x, y)
    for handle in handles:
        handle.remove()
    return {name: pairs[name] for name in inputs}
