"""Layer descriptors: which arrays form a layer, and how its input and output gradient are read.

A descriptor says three things about a layer type, and the backends know no more of it than this:

- the sizes of its factors `H` and `S`;
- how each raw sum is a *column sum* of `|x|**p` over the batch (`Columns`), for the kernels;
- how the sums become raw moments (`mean`, `bias_entry`), shared by kernels and reference.

Shape letters: B batch, N rows (all dims but the last), C channels, T sequence, K = C_in/groups * kh * kw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import index
from typing import Any

from .errors import CafinTypeError, refuse

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Patches:
    """Which pixels meet which tap of a convolution's kernel: output (y, x) and tap (i, j) read pixel
    `(y * stride[0] + i * dilation[0] - padding[0], x * stride[1] + ...)`, if it lies inside the image."""

    channels: int
    groups: int
    image: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(frozen=True)
class Columns:
    """A contiguous array seen as (rows, segments * run): the sum over rows, and over each run of columns.

    Attributes:
        lead: number of leading axes that are rows.
        rows: their product.
        segments: number of results.
        run: neighbouring columns that share one result.
        power: 2 sums squares, 1 sums the values.
        scale: multiplies every result.
        patches: if given, the results are per pixel and are still to be folded into kernel taps.
    """

    lead: int
    rows: int
    segments: int
    run: int
    power: int
    scale: float = 1.0
    patches: Patches | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight, perhaps a bias, and the layer's name. Two descriptors are equal only if they are the same object."""

    weight: Any
    bias: Any = None
    name: str | None = field(default=None, kw_only=True)

    # What the subclasses fill in. `norm` layers square after summing; the others sum squares.
    norm = False

    def __post_init__(self) -> None:
        for name, array in (("weight", self.weight), ("bias", self.bias)):
            if not hasattr(array, "shape") and not (name == "bias" and array is None):
                refuse(type(self).__name__, name, "be an array", type(array).__name__, kind=CafinTypeError)
        self._check(tuple(self.weight.shape))
        if self.bias is not None and math.prod(self.bias.shape) != self.S_size:
            refuse(type(self).__name__, "bias", f"have {self.S_size} elements", f"shape {tuple(self.bias.shape)}")

    def _check(self, shape: Shape) -> None:
        raise NotImplementedError

    def _ndim(self, shape: Shape, ndim: int, meaning: str) -> None:
        if len(shape) != ndim:
            refuse(type(self).__name__, "weight", f"have shape {meaning}", shape)

    @property
    def label(self) -> str:
        """The name, or the type where there is none: for messages."""
        return self.name or type(self).__name__

    @property
    def shape(self) -> Shape:
        """The weight's shape."""
        return tuple(int(n) for n in self.weight.shape)

    @property
    def H_size(self) -> int:
        raise NotImplementedError

    @property
    def S_size(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """Columns of the weight seen as a matrix: `H[:width]` is the weight's, `H[width:]` the bias's."""
        return 1 if self.norm else math.prod(self.shape[1:])

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        """How the kernels read an input of shape `h` and an output gradient of shape `s`."""
        raise NotImplementedError

    def count(self, h: Shape, s: Shape) -> int:
        """What the sums of one call are later divided by: rows, samples or batch times positions."""
        raise NotImplementedError

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        """Refuse shapes that cannot be this layer's input and output gradient."""
        raise NotImplementedError

    def mean(self, count: int) -> tuple[float, float]:
        """What (H, S) sums are multiplied by to become raw moments."""
        return 1.0 / count, 1.0 / count

    def bias_entry(self, count: int, units: int) -> float | None:
        """The entry of the raw `H` behind the weight's; None if there is none. `units` is the length of the H sums."""
        return None if self.bias is None else 1.0

    def _refuse_shapes(self, where: str, rule: str, h: Shape, s: Shape) -> None:
        refuse(where, f"h, s of {self.label}", rule, f"{h} and {s}", "pass the layer's input and output gradient")


class Linear(Layer):
    """Linear layer. `weight` (d_out, d_in), `bias` (d_out,) or None; h (..., d_in), s (..., d_out)."""

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 2, "(d_out, d_in)")

    @property
    def H_size(self) -> int:
        return self.shape[1] + (self.bias is not None)

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        d_out, d_in = self.shape
        if not h or not s or h[-1] != d_in or s[-1] != d_out or h[:-1] != s[:-1]:
            self._refuse_shapes(where, f"have shapes (..., {d_in}) and (..., {d_out})", h, s)

    def count(self, h: Shape, s: Shape) -> int:
        return math.prod(h[:-1])

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        rows = self.count(h, s)
        return Columns(len(h) - 1, rows, h[-1], 1, 2), Columns(len(s) - 1, rows, s[-1], 1, 2)


def _pair(owner: str, name: str, value: Any, least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or any(isinstance(n, bool) or not hasattr(n, "__index__") or n < least for n in pair):
        refuse(owner, name, f"be a whole number >= {least} or two of them", repr(value))
    return index(pair[0]), index(pair[1])


@dataclass(frozen=True, eq=False)
class Conv2d(Layer):
    """2-d convolution. `weight` (C_out, C_in/groups, kh, kw), `bias` (C_out,) or None.

    h (B, C_in, H, W), s (B, C_out, OH, OW).

    `padding` is what is put before the first row and column; what lies behind the last follows from the shape of s.
    """

    stride: int | tuple[int, int] = field(default=1, kw_only=True)
    padding: int | tuple[int, int] = field(default=0, kw_only=True)
    dilation: int | tuple[int, int] = field(default=1, kw_only=True)
    groups: int = field(default=1, kw_only=True)

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 4, "(C_out, C_in/groups, kh, kw)")
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, name, _pair("Conv2d", name, getattr(self, name), least))
        groups = self.groups
        if isinstance(groups, bool) or not hasattr(groups, "__index__") or groups < 1 or shape[0] % groups:
            refuse("Conv2d", "groups", f"be a whole number that divides C_out = {shape[0]}", repr(groups))
        object.__setattr__(self, "groups", index(groups))

    @property
    def H_size(self) -> int:
        return math.prod(self.shape[1:]) + (self.bias is not None)

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        c_out, c_in = self.shape[0], self.shape[1] * self.groups
        if len(h) != 4 or len(s) != 4 or h[1] != c_in or s[1] != c_out or h[0] != s[0]:
            self._refuse_shapes(where, f"have shapes (B, {c_in}, H, W) and (B, {c_out}, OH, OW)", h, s)

    def count(self, h: Shape, s: Shape) -> int:
        return s[0] * s[2] * s[3]

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        patches = Patches(
            self.shape[1],
            self.groups,
            (h[2], h[3]),
            (s[2], s[3]),
            (self.shape[2], self.shape[3]),
            self.stride,  # type: ignore[arg-type]  # pairs since `_check`
            self.padding,  # type: ignore[arg-type]
            self.dilation,  # type: ignore[arg-type]
        )
        return Columns(1, h[0], math.prod(h[1:]), 1, 2, patches=patches), Columns(1, s[0], s[1], s[2] * s[3], 2)

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0 / (count * math.prod(self.shape[1:])), 1.0 / count

    def bias_entry(self, count: int, units: int) -> float | None:
        return None if self.bias is None else self.groups / math.prod(self.shape[1:])


class _Norm(Layer):
    """What the normalisation layers share: H has two entries, one for the weight and one for the bias."""

    norm = True

    @property
    def H_size(self) -> int:
        return 2

    def count(self, h: Shape, s: Shape) -> int:
        return h[0]

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0 / count**2, 1.0 / count

    def bias_entry(self, count: int, units: int) -> float | None:
        return units / count**2


class BatchNorm2d(_Norm):
    """Batch normalisation of images. `weight`, `bias` (C,); h and s (B, C, H, W)."""

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 1, "(C,)")

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        if len(h) != 4 or h != s or h[1] != self.shape[0]:
            self._refuse_shapes(where, f"have shape (B, {self.shape[0]}, H, W)", h, s)

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        pixels = h[2] * h[3]
        return Columns(1, h[0], h[1], pixels, 1, 1.0 / max(1, pixels) ** 2), Columns(1, s[0], s[1], pixels, 1)


class LayerNorm(_Norm):
    """Layer normalisation. `weight`, `bias` of the normalised shape (...); h and s (B, [T, ...,] ...)."""

    def _check(self, shape: Shape) -> None:
        if not shape:
            refuse("LayerNorm", "weight", "have at least one dimension", shape)

    @property
    def S_size(self) -> int:
        return math.prod(self.shape)

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        if h != s or len(h) <= len(self.shape) or h[-len(self.shape) :] != self.shape:
            self._refuse_shapes(where, f"have shape (B, ..., {', '.join(map(str, self.shape))})", h, s)

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        inner = max(1, math.prod(h[2:]))
        lead = len(s) - len(self.shape)
        return (
            Columns(1, h[0], h[1], inner, 1, 1.0 / inner**2),
            Columns(lead, math.prod(s[:lead]), self.S_size, 1, 1),
        )
