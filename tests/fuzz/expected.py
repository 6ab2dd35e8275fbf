"""The rule, a second time: straight from its formulas, in float64, one step of one layer or parameter at a time.

Independent of `cafin_cupy.reference`: it shares no code with it, and names pixels one by one where that has slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rounded import PRECISION, Precision, Rounded, join

EPSILON = 1e-6


@dataclass(frozen=True)
class Geometry:
    """What the moments of a layer depend on.

    Attributes:
        kind: "Linear", "Conv2d", "BatchNorm2d" or "LayerNorm".
        weight: shape of the weight.
        bias: there is one.
        stride, padding, dilation, groups: of a convolution.
    """

    kind: str
    weight: tuple[int, ...]
    bias: bool
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def norm(self) -> bool:
        return self.kind in ("BatchNorm2d", "LayerNorm")

    @property
    def rows(self) -> int:
        """Length of S."""
        return math.prod(self.weight) if self.kind == "LayerNorm" else self.weight[0]

    @property
    def columns(self) -> int:
        """Length of H without its last entry, which is the bias's."""
        return 1 if self.norm else math.prod(self.weight[1:])

    @property
    def length(self) -> int:
        """Length of H."""
        return 2 if self.norm else self.columns + self.bias


Call = tuple[Rounded, Rounded]  # a layer's input and output gradient


def raw_moments(layer: Geometry, calls: Sequence[Call], scale: float = 1.0) -> tuple[Rounded, Rounded]:
    """(H, S) of all calls of one step; a loss scale is divided out of S twice."""
    H, S = {"Linear": _linear, "Conv2d": _conv2d}.get(layer.kind, _norm)(layer, calls)
    return H, S / scale / scale


def _linear(layer: Geometry, calls: Sequence[Call]) -> tuple[Rounded, Rounded]:
    rows = [(h.reshape(-1, layer.weight[1]), s.reshape(-1, layer.weight[0])) for h, s in calls]
    count = sum(len(h.value) for h, _ in rows)
    H, S = (_total([(x * x).sum(0) for x in part]) / count for part in zip(*rows))
    return _with_entry(layer, H, 1.0), S


def _conv2d(layer: Geometry, calls: Sequence[Call]) -> tuple[Rounded, Rounded]:
    K = layer.columns
    count = sum(s.value.size // s.value.shape[1] for _, s in calls)
    H = _total([_taps(layer, h * h, s.value.shape[2:]) for h, s in calls]) / (count * K)
    S = _total([(s * s).sum((0, 2, 3)) for _, s in calls]) / count
    return _with_entry(layer, H, layer.groups / K), S


def _taps(layer: Geometry, squares: Rounded, output: tuple[int, ...]) -> Rounded:
    """Sums over batch, groups and output positions for each entry (c, i, j) of a kernel."""
    channels, *kernel = layer.weight[1:]
    zero = Rounded(np.zeros((layer.groups, channels)), np.zeros((layer.groups, channels)), squares.precision)
    sums = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            rows, columns = (
                [
                    pixel
                    for position in range(output[axis])
                    if (pixel := position * layer.stride[axis] + tap * layer.dilation[axis] - layer.padding[axis]) >= 0
                    and pixel < squares.value.shape[2 + axis]
                ]
                for axis, tap in ((0, i), (1, j))
            )
            seen = squares[:, :, rows][:, :, :, columns] if rows and columns else None
            sums.append(zero if seen is None else seen.sum((0, 2, 3)).reshape(layer.groups, channels))
    value, error = (np.array([getattr(x.sum(0), part) for x in sums]) for part in ("value", "error"))
    return Rounded(value.T.reshape(-1), error.T.reshape(-1), squares.precision)


def _norm(layer: Geometry, calls: Sequence[Call]) -> tuple[Rounded, Rounded]:
    batch = sum(len(h.value) for h, _ in calls)
    units = max(h.value.shape[1] for h, _ in calls)
    u, total = [], []
    for h, s in calls:
        inner = max(1, math.prod(h.value.shape[2:]))
        mean = h.reshape(*h.value.shape[:2], inner).sum((0, 2)) / inner / inner
        missing = Rounded.of(np.zeros(units - len(mean.value)), mean.precision)
        u.append(join(mean, missing))
        per_entry = s.sum((0, 2, 3)) if layer.kind == "BatchNorm2d" else s.reshape(-1, layer.rows).sum(0)
        total.append(per_entry)
    U, T = _total(u), _total(total)
    H = ((U * U).sum() / batch / batch).reshape(1)
    return join(H, H.like([units / batch**2])), T * T / batch


def _total(parts: Sequence[Rounded]) -> Rounded:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _with_entry(layer: Geometry, H: Rounded, entry: float) -> Rounded:
    return join(H, H.like([entry])) if layer.bias else H


def clean(x: Rounded) -> Rounded:
    """An infinity becomes 1, a negative one 0."""
    value = np.where(np.isposinf(x.value), 1.0, np.where(np.isneginf(x.value), 0.0, x.value))
    return Rounded(value, x.error, x.precision)


def normalize(x: Rounded) -> Rounded:
    """Min-max normalised: the result lies in [0, 1] whatever the rounding."""
    if x.value.size == 0:
        return x
    x = clean(x)
    worst = x.error.max()
    low, high = (Rounded(value, worst, x.precision) for value in (x.value.min(), x.value.max()))
    y = (x - low) / (high - low + EPSILON)
    return Rounded(y.value, np.minimum(y.error, 1.0), y.precision)


def averaged(F: Any, raw: Rounded, rule: tuple[float, float, str], precision: Precision) -> Rounded:
    """A factor after a sampled step, by `rule` = (keep, add, "before" or "after")."""
    keep, add, when = rule
    x = normalize(raw) if when == "before" else clean(raw)
    return (Rounded.of(F, precision) * keep + x * add).to(precision)


def broken(*raw: Rounded) -> bool | None:
    """True if a moment is NaN: then the factors stay. None if rounding decides."""
    if not all(x.certain.all() for x in raw):
        return None
    return any(bool(np.isnan(x.value).any()) for x in raw)


def effective(F: Any, rule: tuple[float, float, str], precision: Precision) -> Rounded:
    """A factor as it enters the preconditioner."""
    if rule[2] == "before":
        return Rounded.of(F, precision)
    return normalize(Rounded.of(F, PRECISION["float64"])).to(precision)


@dataclass(frozen=True)
class Scalars:
    lr: float
    beta: float
    Lambda: float
    weight_decay: float
    decoupled: bool


def updated(
    p: Any,
    g: Any,
    m: Any,
    factors: tuple[Rounded, Rounded] | None,
    x: Scalars,
    step: int,
    precision: Precision,
    scale: float = 1.0,
) -> tuple[Rounded, Rounded]:
    """(parameter, momentum) after one update; `factors`: the effective (H, S) of this parameter."""
    p, g, m = (Rounded.of(a, precision) for a in (p, g, m))
    if scale != 1.0:
        g = g / scale
    if x.weight_decay and not x.decoupled:
        g = g + p * x.weight_decay
    m = m * x.beta + g * (1.0 - x.beta) if x.beta else g
    move = m * (x.lr / (1.0 - x.beta**step))
    if factors is not None:
        H, S = factors
        F = S.reshape(-1, 1) * H.reshape(1, -1) + x.Lambda
        move = move / F.reshape(*p.value.shape)
    if x.lr * x.weight_decay and x.decoupled:
        move = move + p * (x.lr * x.weight_decay)
    return p - move, m
