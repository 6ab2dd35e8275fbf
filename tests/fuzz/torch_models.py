"""Small models for the PyTorch optimizer, and what their layers are in the terms of `expected.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_cases import Conv1D

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


class Signals(nn.Sequential):
    """Of one axis, there and back."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(2, 4, 3, 2, padding=1, groups=2, bias=False),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.ConvTranspose1d(4, 2, 3, 2, groups=2, dilation=2),
            nn.InstanceNorm1d(2, affine=True),
            nn.Conv1d(2, 3, 2, padding="same", padding_mode="circular"),
            nn.BatchNorm1d(3),
        )


class Volumes(nn.Module):
    """Of three axes, and slices of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 4, (2, 1, 3), padding=(1, 0, 1), groups=2), nn.BatchNorm3d(4)
        self.back, self.instance = nn.ConvTranspose3d(4, 2, 2, (1, 2, 2), bias=False), nn.InstanceNorm3d(2, affine=True)
        self.slices, self.group = nn.ConvTranspose2d(2, 3, (2, 3), (2, 1), (1, 0), (1, 0)), nn.GroupNorm(1, 3)
        self.sync, self.rms = nn.SyncBatchNorm(3), nn.RMSNorm((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.back(torch.tanh(self.norm(self.conv(x)))))
        x = self.group(self.slices(x[:, :, 0]))
        return self.rms(nn.functional.adaptive_avg_pool2d(self.sync(x), (2, 3)))


class Turned(Conv1D):
    """Of transformers; a class that can be pickled."""


class Tokens(nn.Module):
    """Attention to itself and to others, of one width and of several."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.own = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.RMSNorm(4)
        self.others = nn.MultiheadAttention(4, 1, bias=False, batch_first=True)
        self.widths = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_zero_attn=True, batch_first=True)
        self.keys, self.head = Turned(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = self.norm(self.own(x, x, x, need_weights=False)[0])
        x = self.others(x[:, :2], x, x * 2)[0]
        keys = self.keys(x)
        return self.head(self.widths(x, keys, keys[..., :2])[0])


class Language(nn.Module):
    """A head that multiplies by the table of the embedding, which then has no factors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.fc(self.table(x) + places)))


class Trained(nn.Module):
    """A model, and layers that join it while it trains."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.late = body, nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        for layer in self.late:
            out = out + layer(torch.tanh(out.sum()).reshape(1, 1).expand(2, 3)).mean()
        return out


class Model(NamedTuple):
    """Attributes:
    sample: shape of a sample.
    least: samples of a batch, at least.
    words: it reads whole numbers below this.
    """

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    least: int = 0
    words: int = 0


MODELS = {
    "perceptron": Model(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)), (5,)),
    "sequences": Model(lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 5)),
    "images": Model(Images, (2, 7, 6), 1),
    "signals": Model(Signals, (2, 7), 1),
    "volumes": Model(Volumes, (2, 3, 2, 3), 1),
    "tokens": Model(Tokens, (3,), 1, 7),
    "language": Model(Language, (3,), 0, 7),
    "loose": Model(Loose, (5,)),
    "tied": Model(Tied, (5,)),
    "frozen": Model(Frozen, (5,)),
}


def build(name: str, dtype: str, seed: int, channels_last: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = Trained(MODELS[name].make())
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(getattr(torch, dtype))
    for b in model.buffers():
        if b.is_floating_point():
            b.data = b.data.to(getattr(torch, dtype))
    return model.to(memory_format=torch.channels_last) if channels_last else model


KINDS: dict[type[nn.Module], str] = {
    Conv1D: "TransposedLinear",
    nn.InstanceNorm1d: "InstanceNorm",
    nn.InstanceNorm3d: "InstanceNorm",
}
for _known in (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
):
    KINDS[_known] = _known.__name__

Described = tuple[str, Geometry, Any, Any]  # name, weight and bias of a layer


def described(model: nn.Module) -> Iterator[tuple[nn.Module, Described]]:
    """The layers of a model that have factors, each with its module; what attentions multiply by comes without one."""
    every = [(m, layer) for name, m in model.named_modules() for layer in _layers_of(name, m)]
    multiplied = {id(weight) for _, (_, layer, weight, _) in every if layer.kind != "Embedding"}
    for module, entry in every:
        if entry[1].kind != "Embedding" or id(entry[2]) not in multiplied:
            yield module, entry


def _layers_of(name: str, module: nn.Module) -> Iterator[Described]:
    own = module._parameters
    if isinstance(module, nn.MultiheadAttention):
        for matrix in ("in_proj", "q_proj", "k_proj", "v_proj"):
            weight, bias = own.get(f"{matrix}_weight"), own["in_proj_bias"] if matrix == "in_proj" else None
            if weight is not None:
                yield f"{name}.{matrix}", Geometry("Linear", tuple(weight.shape), bias is not None), weight, bias
        return
    kind = next((kind for known, kind in KINDS.items() if isinstance(module, known)), None)
    weight, bias = own.get("weight"), own.get("bias")
    if kind is None or weight is None:
        return
    options: dict[str, Any] = {}
    if kind.startswith("Conv"):
        options = {key: getattr(module, key) for key in ("stride", "dilation", "groups")}
        options["padding"] = _padding(module)
    elif kind == "Embedding":
        options = {"padding_idx": module.padding_idx}
    yield name, Geometry(kind, tuple(weight.shape), bias is not None, **options), weight, bias


def _padding(module: Any) -> tuple[int, ...]:
    """Ahead of the first pixel of each axis."""
    if module.padding_mode != "zeros":
        return (0,) * len(module.kernel_size)  # it is padded before, see `seen`
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size))
    return tuple(module.padding)


def seen(module: Any, h: Tensor) -> Tensor:
    """The input as the weight of a layer meets it."""
    if getattr(module, "padding_mode", "zeros") != "circular":
        return h
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
    ahead = [n // 2 for n in total] if module.padding == "same" else module.padding
    behind = [n - n // 2 for n in total] if module.padding == "same" else module.padding
    around = [n for pair in reversed(list(zip(ahead, behind))) for n in pair]
    return nn.functional.pad(h, around, mode="circular")
