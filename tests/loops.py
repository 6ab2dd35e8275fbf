"""The raw moments as explicit loops in float64, written from the rule's table alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from helpers import Case

from cafin_cupy import BatchNorm2d, Conv2d, LayerNorm, Linear

Array = np.ndarray[Any, Any]


def linear(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    rows, grads = h.reshape(-1, h.shape[-1]), s.reshape(-1, s.shape[-1])
    n = len(rows)
    return [sum(r[j] ** 2 for r in rows) / n for j in range(h.shape[-1])] + [1.0] * case.bias, [
        sum(g[j] ** 2 for g in grads) / n for j in range(s.shape[-1])
    ]


def convolution(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    """Every patch entry by its own coordinates."""
    stride, padding, dilation = (case.options.get(k, d) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1)))
    (sy, sx), (py, px), (dy, dx) = (v if isinstance(v, tuple) else (v, v) for v in (stride, padding, dilation))
    groups = case.options.get("groups", 1)
    _, c_in, kh, kw = case.weight
    batch, _, out_h, out_w = s.shape
    taps = c_in * kh * kw
    H = []
    for c in range(c_in):
        for i in range(kh):
            for j in range(kw):
                total = 0.0
                for y in range(out_h):
                    for x in range(out_w):
                        row, column = y * sy + i * dy - py, x * sx + j * dx - px
                        if 0 <= row < h.shape[2] and 0 <= column < h.shape[3]:
                            total += float(np.sum(h[:, c::c_in, row, column] ** 2))
                H.append(total / (batch * out_h * out_w * taps))
    S = np.einsum("bchw,bchw->c", s, s) / (batch * out_h * out_w)
    return H + [groups / taps] * case.bias, list(S)


def batch_norm(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    batch, channels, height, width = h.shape
    u = [sum(h[b, c].sum() for b in range(batch)) / (height * width) ** 2 for c in range(channels)]
    H = [sum(x**2 for x in u) / batch**2, channels / batch**2]
    return H, [sum(s[b, c].sum() for b in range(batch)) ** 2 / batch for c in range(channels)]


def layer_norm(case: Case, h: Array, s: Array) -> tuple[list[float], list[float]]:
    batch, length = h.shape[:2]
    Q = math.prod(h.shape[2:])
    u = [h[:, j].sum() / Q**2 for j in range(length)]
    flat = s.reshape(-1, math.prod(case.weight))
    return [sum(x**2 for x in u) / batch**2, length / batch**2], list(flat.sum(axis=0) ** 2 / batch)


EXPLICIT = {Linear: linear, Conv2d: convolution, BatchNorm2d: batch_norm, LayerNorm: layer_norm}


def expected(case: Case, h: Array, s: Array) -> tuple[Array, Array]:
    """Raw moments (H, S) of one call of a layer."""
    H, S = EXPLICIT[case.kind](case, h, s)
    if case.kind in (BatchNorm2d, LayerNorm) and not case.bias:
        assert len(H) == 2  # both entries, whether or not there is a bias: normalisation sees them
    return np.array(H), np.array(S)
