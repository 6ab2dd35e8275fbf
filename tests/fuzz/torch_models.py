"""Small models for the PyTorch optimizer, and what their layers are in the terms of `expected.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .expected import Geometry


class Loose(nn.Module):
    """Parameters that no layer owns: of no dimension, without entries, in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale + self.turned.sum(1)) + self.empty.sum()


class Tied(nn.Module):
    """Two layers with one weight, a third that is the second once more, a layer that is called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.c.weight, self.c.bias = self.b.weight, self.b.bias
        self.norm, self.unused = nn.LayerNorm(5), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.c(self.norm(self.b(torch.tanh(self.a(x))))))


class Images(nn.Module):
    """Convolutions of every kind, normalised, with activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.groups = nn.Conv2d(4, 4, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
        self.same = nn.Conv2d(4, 2, 3, padding="same", dilation=2)
        self.around = nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular")
        self.ln = nn.LayerNorm((3, 3), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.stem(x)), inplace=True)
        x = nn.functional.relu_(self.plain(self.groups(x)))
        return self.ln(nn.functional.adaptive_avg_pool2d(self.around(self.same(x)), 3))


class Frozen(nn.Sequential):
    """A layer that does not train, one of which the bias does, and a norm without any parameter."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2))
        self[0].requires_grad_(False)
        self[1].weight.requires_grad_(False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # with the shape of a sample
    "perceptron": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)), (5,)),
    "sequences": (lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 5)),
    "images": (Images, (2, 7, 6)),
    "loose": (Loose, (5,)),
    "tied": (Tied, (5,)),
    "frozen": (Frozen, (5,)),
}


def build(name: str, dtype: str, seed: int, channels_last: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name][0]()
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(getattr(torch, dtype))
    for b in model.buffers():
        if b.is_floating_point():
            b.data = b.data.to(getattr(torch, dtype))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def geometry(module: nn.Module) -> Geometry | None:
    """What the optimizer's factors of a module depend on; None if it has none."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)) or weight is None:
        return None
    shape, bias = tuple(weight.shape), module.bias is not None
    if not isinstance(module, nn.Conv2d):
        return Geometry(type(module).__name__, shape, bias)
    if module.padding == "same":
        padding = [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size)]
    elif module.padding_mode != "zeros":
        padding = [0, 0]  # it is padded before, see `seen`
    else:
        padding = list(module.padding)  # type: ignore[arg-type]
    return Geometry(
        "Conv2d",
        shape,
        bias,
        module.stride,
        (padding[0], padding[1]),
        module.dilation,
        module.groups,  # type: ignore[arg-type]
    )


def seen(module: nn.Module, h: Tensor) -> Tensor:
    """The input as the weight of a layer meets it."""
    if isinstance(module, nn.Conv2d) and module.padding_mode == "circular":
        (y, x) = module.padding
        return nn.functional.pad(h, (x, x, y, y), mode="circular")  # type: ignore[list-item]
    return h
