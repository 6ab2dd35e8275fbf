"""Matrices that multiply rows."""

from __future__ import annotations

import math

from .base import Columns, Layer, Shape


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
