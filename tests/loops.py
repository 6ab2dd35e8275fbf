"""The raw moments as explicit loops in float64, written from the rule's table alone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
from helpers import Case

from cafin_cupy import Embedding, LayerNorm, Linear
from cafin_cupy.layers.convolution import Conv, ConvTranspose
from cafin_cupy.layers.norm import ChannelNorm, Norm

Array = np.ndarray[Any, Any]


def linear(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    rows, grads = h.reshape(-1, h.shape[-1]), s.reshape(-1, s.shape[-1])
    n = len(rows)
    return [sum(r[j] ** 2 for r in rows) / n for j in range(h.shape[-1])] + [1.0] * case.bias, [
        sum(g[j] ** 2 for g in grads) / n for j in range(s.shape[-1])
    ]


def embedding(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    """One-hot inputs, of the positions that read no padding."""
    rows, width = case.weight
    padding = case.options["padding_idx"]
    read = [(v, g) for v, g in zip(h.reshape(-1), s.reshape(-1, width)) if padding is None or v != padding % rows]
    hot = [[float(v == row) for row in range(rows)] for v, _ in read]
    return [sum(x[row] ** 2 for x in hot) / len(read) for row in range(rows)], [
        sum(g[j] ** 2 for _, g in read) / len(read) for j in range(width)
    ]


def geometry(case: Case) -> list[tuple[int, ...]]:
    """(stride, padding, dilation) of each axis."""
    axes = len(case.weight) - 2
    given = (case.options.get(name, least) for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)))
    return list(zip(*(value if isinstance(value, tuple) else (value,) * axes for value in given)))


def places(lengths: Any) -> Any:
    return product(*map(range, lengths))


def convolution(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    """Every patch entry by its own coordinates."""
    groups = case.options.get("groups", 1)
    _, c_in, *kernel = case.weight
    columns, count = c_in * math.prod(kernel), s.shape[0] * math.prod(s.shape[2:])
    H = []
    for c in range(c_in):
        for tap in places(kernel):
            total = 0.0
            for output in places(s.shape[2:]):
                at = [o * t + k * d - p for o, k, (t, p, d) in zip(output, tap, geometry(case))]
                if all(0 <= place < size for place, size in zip(at, h.shape[2:])):
                    total += float(np.sum(h[(slice(None), slice(c, None, c_in), *at)] ** 2))
            H.append(total / (count * columns))
    S = np.sum(s**2, axis=(0, *range(2, s.ndim))) / count
    return H + [groups / columns] * case.bias, list(S)


def transposed_convolution(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    """A convolution that reads s, and makes h; but each entry of the bias has what its own channel has."""
    S, H = convolution(case._replace(bias=False), s, h)
    own = case.options.get("groups", 1) / math.prod(case.weight[1:]) * np.mean(s**2, axis=(0, *range(2, s.ndim)))
    return H + [1.0] * case.bias, S + list(own) * case.bias


def channel_norm(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    batch, channels, *image = h.shape
    u = [sum(h[b, c].sum() for b in range(batch)) / math.prod(image) ** 2 for c in range(channels)]
    H = [sum(x**2 for x in u) / batch**2, channels / batch**2]
    return H, [sum(s[b, c].sum() for b in range(batch)) ** 2 / batch for c in range(channels)]


def layer_norm(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    batch, length = h.shape[:2]
    Q = math.prod(h.shape[2:])
    u = [h[:, j].sum() / Q**2 for j in range(length)]
    flat = s.reshape(-1, math.prod(case.weight))
    return [sum(x**2 for x in u) / batch**2, length / batch**2], list(flat.sum(axis=0) ** 2 / batch)


EXPLICIT: dict[type, Any] = {
    Linear: linear,
    Embedding: embedding,
    Conv: convolution,
    ConvTranspose: transposed_convolution,
    ChannelNorm: channel_norm,
    LayerNorm: layer_norm,
}


def expected(case: Case, h: Array, s: Array) -> tuple[Array, Array]:
    """Raw moments (H, S) of one call of a layer."""
    H, S = next(compute for kind, compute in EXPLICIT.items() if issubclass(case.kind, kind))(case, h, s)
    if issubclass(case.kind, Norm) and not case.bias:
        assert len(H) == 2  # both entries, whether or not there is a bias: normalisation sees them
    return np.array(H), np.array(S)
