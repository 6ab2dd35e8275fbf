"""Matrices that multiply rows, and tables that rows are taken from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from array_api_compat import array_namespace, device

from ..errors import CafinTypeError, refuse, shown
from .base import Columns, Layer, Shape, whole_number


class Linear(Layer):
    """Linear layer. `weight` (d_out, d_in), `bias` (d_out,) or None; h (..., d_in), s (..., d_out).

    Positions are the N rows of h, with x = h and s = s: `H = [mean_n h², 1]`, the 1 with a bias, and `S = mean_n s²`.
    """

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 2, "(d_out, d_in)")

    @property
    def H_size(self) -> int:
        return self.width + (self.bias is not None)

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        d_in, d_out = self.width, self.S_size
        if not h or not s or h[-1] != d_in or s[-1] != d_out or h[:-1] != s[:-1]:
            self._refuse_shapes(where, f"have shapes (..., {d_in}) and (..., {d_out})", h, s)

    def count(self, h: Shape, s: Shape) -> int:
        return math.prod(h[:-1])

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        rows = self.count(h, s)
        return Columns(len(h) - 1, rows, h[-1], 1, 2), Columns(len(s) - 1, rows, s[-1], 1, 2)


@dataclass(frozen=True, eq=False)
class SummedLinear(Linear):
    """A `Linear` of which a caller has summed the squares itself: h (1, d_in) and s (1, d_out) hold sums over `rows`
    rows."""

    rows: int = field(kw_only=True)

    def count(self, h: Shape, s: Shape) -> int:
        return self.rows

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        return Columns(1, 1, h[1], 1, 1), Columns(1, 1, s[1], 1, 1)


class TransposedLinear(Linear):
    """Linear layer that stores its weight input-major, as the Conv1D of transformers and Flax's Dense do: y = h W + b.
    `weight` (d_in, d_out), `bias` (d_out,) or None; h (..., d_in), s (..., d_out).

    The factors are those of `Linear`; the weight's rows belong to the input, so its rows vector is H, its columns S.
    """

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 2, "(d_in, d_out)")

    @property
    def S_size(self) -> int:
        return self.shape[1]

    @property
    def width(self) -> int:
        return self.shape[0]

    def of_weight(self, H: Any, S: Any) -> tuple[Any, Any]:
        return S, H[: self.width]


@dataclass(frozen=True, eq=False)
class Embedding(Layer):
    """Table of vectors. `weight` (V, D), no bias; h (...) whole numbers in [0, V), s (..., D).

    An embedding is a linear layer with input-major weight whose input is one-hot: x_n[v] is 1 if h_n is v, else 0. So
    mean_n x² is how often v was read, and over the N rows of h:

        H[v] = (number of n with h_n = v) / N,    S = mean_n s²

    The row at `padding_idx` has no gradient; positions that read it count neither in H nor in S nor in N. As N is then
    known on the device only, both sums are divided by the total of the H sums, which is N. No one-hot matrix is made,
    and nothing waits for the device. Counts are exact up to 2^24 a call.

    A number outside [0, V) is not counted.
    """

    padding_idx: int | None = field(default=None, kw_only=True)

    counted = True

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 2, "(V, D)")
        if self.bias is not None:
            refuse("Embedding", "bias", "be None", f"shape {tuple(self.bias.shape)}")
        if self.padding_idx is None:
            return
        place = whole_number(self.padding_idx, -shape[0])
        if place is None or place >= shape[0]:
            refuse(
                "Embedding", "padding_idx", f"be None or a whole number below V = {shape[0]}", shown(self.padding_idx)
            )
        object.__setattr__(self, "padding_idx", place % shape[0])

    @property
    def H_size(self) -> int:
        return self.shape[0]

    @property
    def S_size(self) -> int:
        return self.shape[1]

    @property
    def width(self) -> int:
        return self.shape[0]

    def of_weight(self, H: Any, S: Any) -> tuple[Any, Any]:
        return S, H

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        if s != (*h, self.S_size):
            self._refuse_shapes(where, f"have shapes (...) and (..., {self.S_size})", h, s)

    def read(self, h: Any, s: Any) -> tuple[Any, Any]:
        """(1, V) counts and s, 0 where padding was read."""
        xp = array_namespace(h)
        if not xp.isdtype(h.dtype, "integral"):
            refuse("accumulate", f"h of {self.label}", "hold whole numbers", h.dtype, kind=CafinTypeError)
        if xp.iinfo(h.dtype).bits < 32:  # V may be larger than it can tell
            h = xp.astype(h, xp.int32)
        rows = xp.arange(self.shape[0] + 1, dtype=h.dtype, device=device(h))
        # Sorted, each number is a run; in this way all is done on the device, in a fixed order, without atomics.
        starts = xp.searchsorted(xp.sort(xp.reshape(h, (-1,))), rows)
        counts = starts[1:] - starts[:-1]
        if self.padding_idx is not None:
            counts = xp.where(rows[:-1] == self.padding_idx, xp.zeros_like(counts), counts)
            padding = xp.reshape(h == self.padding_idx, (*h.shape, 1))
            s = xp.where(padding, xp.zeros_like(s), s)
        dtype = xp.float64 if s.dtype == xp.float64 else xp.float32
        return xp.reshape(xp.astype(counts, dtype), (1, -1)), s

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        return Columns(1, 1, h[1], 1, 1), Columns(len(s) - 1, math.prod(s[:-1]), s[-1], 1, 2)

    def count(self, h: Shape, s: Shape) -> int:
        return math.prod(s[:-1])

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0, 1.0  # what was counted divides them
