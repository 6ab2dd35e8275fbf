"""The rule, a second time: straight from its formulas, in float64, one step of one layer or parameter at a time.

Independent of `cafin_cupy.reference`: it shares no code with it, and names pixels one by one where that has slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .rounded import PRECISION, Precision, Rounded, join

EPSILON = 1e-6


CHANNELS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "GroupNorm", "InstanceNorm")
NORMS = (*CHANNELS, "LayerNorm", "RMSNorm")
TURNED = ("TransposedLinear", "Embedding")  # their weight's rows belong to the input


@dataclass(frozen=True)
class Geometry:
    """What the moments of a layer depend on.

    Attributes:
        kind: the name of its descriptor.
        weight: shape of the weight.
        bias: there is one.
        stride, padding, dilation, groups: of a convolution, a number for each axis of an image.
        padding_idx: of an embedding.
    """

    kind: str
    weight: tuple[int, ...]
    bias: bool
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_idx: int | None = None

    @property
    def norm(self) -> bool:
        return self.kind in NORMS

    @property
    def transposed(self) -> bool:
        """A transposed convolution, whose output meets the taps."""
        return self.kind.startswith("ConvTranspose")

    @property
    def convolves(self) -> bool:
        return self.kind.startswith("Conv")

    @property
    def taps(self) -> int:
        """Columns of a convolution's weight."""
        return math.prod(self.weight[1:])

    @property
    def outputs(self) -> int:
        """Entries of a bias."""
        if self.transposed:
            return self.weight[1] * self.groups
        return math.prod(self.weight) if self.kind in ("LayerNorm", "RMSNorm") else self.weight[self.kind in TURNED]

    @property
    def rows(self) -> int:
        """Length of S."""
        return self.taps + self.bias * self.outputs if self.transposed else self.outputs

    @property
    def columns(self) -> int:
        """Length of H without its last entry, which is the bias's."""
        if self.norm:
            return 1
        return self.weight[0] if self.transposed or self.kind in TURNED else self.taps

    @property
    def length(self) -> int:
        """Length of H."""
        return 2 if self.norm else self.columns + self.bias

    def of(self, role: str, H: Rounded, S: Rounded) -> tuple[Rounded, Rounded]:
        """The vectors (columns, rows) whose outer product is F of the "weight" or "bias"."""
        if role == "weight":
            of_weight = (H[: self.columns], S[: self.taps] if self.transposed else S)
            return of_weight[::-1] if self.transposed or self.kind in TURNED else of_weight  # type: ignore[return-value]
        return H[self.columns : self.columns + 1], S[self.taps :] if self.transposed else S


class Part(NamedTuple):
    """A product with some rows of a matrix, from the `first`, where an attention multiplies its thirds apart."""

    h: Rounded
    s: Rounded
    first: int
    rows: int  # that the uppermost part of the matrix has read


Call = tuple[Rounded, Rounded] | Part  # a layer's input and output gradient


def raw_moments(layer: Geometry, calls: Sequence[Any], scale: float = 1.0) -> tuple[Rounded, Rounded]:
    """(H, S) of all calls of one step; a loss scale is divided out of S twice."""
    if layer.norm:
        H, S = _norm(layer, calls)
    elif layer.transposed:
        H, S = _transposed(layer, calls)
    elif layer.convolves:
        H, S = _convolution(layer, calls)
    else:
        H, S = _embedding(layer, calls) if layer.kind == "Embedding" else _linear(layer, calls)
    return H, S / scale / scale


def counted(layer: Geometry, calls: Sequence[Any]) -> list[Any]:
    """The calls that say anything: an embedding may have read nothing but padding."""
    if layer.kind != "Embedding":
        return list(calls)
    return [call for call in calls if (call[0].value != layer.padding_idx).any()]


def _linear(layer: Geometry, calls: Sequence[Any]) -> tuple[Rounded, Rounded]:
    inputs, outputs, count = [], [], 0
    for h, s, *part in calls:
        H, S = ((x * x).sum(0) for x in (h.reshape(-1, layer.columns), s.reshape(-1, s.value.shape[-1])))
        read = math.prod(h.value.shape[:-1])
        if part:  # as many rows as the uppermost part has read; each third of the matrix counts them
            first, rows = part
            thirds = 3 * s.value.shape[-1] // layer.rows
            H, S = H * (thirds * rows / read), S * (3 * rows / read)
            zeros = [S.like(np.zeros(n)) for n in (first, layer.rows - first - len(S.value))]
            S, read = join(join(zeros[0], S), zeros[1]), rows * thirds
        inputs, outputs, count = [*inputs, H], [*outputs, S], count + read
    return _with_entry(layer, _total(inputs) / count, 1.0), _total(outputs) / count


def _embedding(layer: Geometry, calls: Sequence[Any]) -> tuple[Rounded, Rounded]:
    """A linear layer of one-hot rows, without those that read padding."""
    hot, squares = [], []
    for h, s in calls:
        numbers, rows = h.value.reshape(-1), s.reshape(-1, layer.rows)
        kept = np.flatnonzero(numbers != layer.padding_idx)
        hot.append(np.bincount(numbers[kept].astype(int), minlength=layer.columns).astype(float))
        squares.append((rows[kept] * rows[kept]).sum(0))
    counts = sum(hot)
    S = _total(squares)
    return S.like(counts) / float(np.sum(counts)), S / float(np.sum(counts))


def _convolution(layer: Geometry, calls: Sequence[Any]) -> tuple[Rounded, Rounded]:
    count = sum(s.value.size // s.value.shape[1] for _, s in calls)
    H = _total([_taps(layer, h * h, s.value.shape[2:]) for h, s in calls]) / (count * layer.taps)
    S = _total([_of_channels(s * s) for _, s in calls]) / count
    return _with_entry(layer, H, layer.groups / layer.taps), S


def _transposed(layer: Geometry, calls: Sequence[Any]) -> tuple[Rounded, Rounded]:
    """Input and output exchanged; each output channel's entry for the bias is groups / K * mean s²."""
    count = sum(h.value.size // h.value.shape[1] for h, _ in calls)
    H = _total([_of_channels(h * h) for h, _ in calls]) / count
    S = _total([_taps(layer, s * s, h.value.shape[2:]) for h, s in calls]) / (count * layer.taps)
    if layer.bias:
        ratio = [math.prod(h.value.shape[2:]) / math.prod(s.value.shape[2:]) for h, s in calls]
        each = _total([_of_channels(s * s) * (layer.groups * r) for (_, s), r in zip(calls, ratio)])
        S = join(S, each / (count * layer.taps))
    return _with_entry(layer, H, 1.0), S


def _of_channels(x: Rounded) -> Rounded:
    return x.sum((0, *range(2, x.value.ndim)))


def _taps(layer: Geometry, squares: Rounded, positions: tuple[int, ...]) -> Rounded:
    """Sums over batch, groups and positions for each entry (c, tap) of a kernel."""
    channels, *kernel = layer.weight[1:]
    zero = Rounded(np.zeros((layer.groups, channels)), np.zeros((layer.groups, channels)), squares.precision)
    sums = []
    for tap in np.ndindex(*kernel):
        seen = squares
        for axis, place in enumerate(tap):
            begin = place * layer.dilation[axis] - layer.padding[axis]
            pixels = [begin + number * layer.stride[axis] for number in range(positions[axis])]
            inside = [pixel for pixel in pixels if 0 <= pixel < squares.value.shape[2 + axis]]
            seen = seen[(*[slice(None)] * (2 + axis), inside)]
        sums.append(_of_channels(seen).reshape(layer.groups, channels) if seen.value.size else zero)
    value, error = (np.array([getattr(x.sum(0), part) for x in sums]) for part in ("value", "error"))
    return Rounded(value.T.reshape(-1), error.T.reshape(-1), squares.precision)


def _norm(layer: Geometry, calls: Sequence[Any]) -> tuple[Rounded, Rounded]:
    batch = sum(len(h.value) for h, _ in calls)
    units = max(h.value.shape[1] for h, _ in calls)
    u, total = [], []
    for h, s in calls:
        inner = max(1, math.prod(h.value.shape[2:]))
        mean = h.reshape(*h.value.shape[:2], inner).sum((0, 2)) / inner / inner
        missing = Rounded.of(np.zeros(units - len(mean.value)), mean.precision)
        u.append(join(mean, missing))
        total.append(_of_channels(s) if layer.kind in CHANNELS else s.reshape(-1, layer.rows).sum(0))
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
    dtypes: tuple[str, str],
    scale: float = 1.0,
) -> tuple[Rounded, Rounded]:
    """(parameter, momentum) after one update, of these dtypes; numbers of 16 bits are computed with in float32.

    `factors`: the effective vectors (columns, rows) of this parameter.
    """
    precision = PRECISION["float64" if dtypes[0] == "float64" else "float32"]
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
    new = p - move, m
    return tuple(n if PRECISION[d] is precision else n.to(PRECISION[d]) for n, d in zip(new, dtypes))  # type: ignore[return-value]
