"""The derivations of the descriptors, against autograd: a weight's gradient is a sum over positions of a row entry
times a column entry, and its factors are the mean squares of these."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_cases import LAYERS, Conv1D, drawn  # noqa: E402
from torch_helpers import CONVS, TRANSPOSED, near, patches_of  # noqa: E402

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

NAMES = [name for name in LAYERS if name.startswith(("linear", "conv", "transposed", "embedding"))]


def by_group(x: Tensor, groups: int) -> Tensor:
    """(B, C, positions) as (groups, B * positions, C / groups)."""
    return x.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def patches(module: Any, x: Tensor, mode: str, around: list[int]) -> Tensor:
    """(groups, B * positions, K)."""
    padded = nn.functional.pad(x, around, mode=mode)
    found = patches_of(padded, module.kernel_size, module.stride, module.dilation)  # (B, C, positions, taps)
    return found.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


def positions(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """What the weight's rows and columns have at each position: (groups, positions, rows or columns)."""
    if isinstance(module, nn.Embedding):
        hot = nn.functional.one_hot(h.flatten(), module.num_embeddings).double()
        if module.padding_idx is not None:
            read = h.flatten() != module.padding_idx
            return hot[read][None], s.reshape(-1, s.shape[-1])[read][None]
        return hot[None], s.reshape(1, -1, s.shape[-1])
    if isinstance(module, (nn.Linear, Conv1D)):
        rows, columns = s.reshape(1, -1, s.shape[-1]), h.reshape(1, -1, h.shape[-1])
        return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
    if h.dim() == 1 + len(module.kernel_size):
        h, s = h.unsqueeze(0), s.unsqueeze(0)
    if isinstance(module, CONVS):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return by_group(s.flatten(2), module.groups), patches(module, h, mode, module._reversed_padding_repeated_twice)
    assert isinstance(module, TRANSPOSED)
    whole = [
        (n - 1) * t + d * (k - 1) + 1
        for n, t, d, k in zip(h.shape[2:], module.stride, module.dilation, module.kernel_size)
    ]
    around = [x for n, p, size in reversed(list(zip(whole, module.padding, s.shape[2:]))) for x in (p, n - p - size)]
    return by_group(h.flatten(2), module.groups), patches(module, s, "constant", around)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", NAMES)
def test_gradient_and_factors(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    module: Any = make().double()
    optimizer = AdaFisher(module, TCov=1, averaging=RAW)
    h = drawn(module, shape)
    h = h.double() if h.is_floating_point() else h
    out = module(h)
    s = torch.randn_like(out)
    (out * s).sum().backward()
    rows, columns = positions(module, h, s)
    gradient = torch.einsum("gtr,gtc->grc", rows, columns).flatten(0, 1)  # rows of the groups one below the other
    near(module.weight.grad, gradient.reshape(module.weight.shape), "gradient", 1e-12)
    optimizer.step()
    (layer,) = optimizer._layers
    found = layer.of_weight(*optimizer.factors()[""])
    means = columns.square().mean((0, 1)), rows.square().mean(1).flatten()
    for got, mean in zip(found, means):
        near(got / got.sum(), mean / mean.sum(), "factor", 1e-12)  # constant factors go
