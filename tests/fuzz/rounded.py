"""Arrays in float64 that carry a bound on how far a computation in lower precision may be from them.

This is running error analysis: each operation passes on the errors of its operands and adds its own rounding. So a
formula that is written once gives the value and the tolerance, and where signs cancel, or a quotient has almost no
denominator, the tolerance grows as it should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
compared: Counter[str] = Counter()  # entries that `check` has seen: "all", and those "bounded" by 1 % of their size
SUMMED = 64  # terms whose roundings add up in full: longer sums are made of parts, and their roundings mostly cancel
# But not where like terms are added one by one, as NumPy does across strides: all partial sums, on average half of the
# whole, may then be rounded in one direction, each by half a unit.
ALIKE = 0.25


@dataclass(frozen=True)
class Precision:
    """Attributes:
    unit: bound on the relative error of one operation: twice that of rounding to nearest, for another order of
        operations.
    least: what a result may lose near 0: below the smallest normal number the kernels flush to 0, and float16, which
        they do not compute in, loses digits.
    most: largest number; a result above may be infinite.
    """

    unit: float
    least: float
    most: float


PRECISION = {
    "float64": Precision(2.0**-52, 2.0**-1022, 1.7e308),
    "float32": Precision(2.0**-23, 2.0**-126, 3.4e38),
    "float16": Precision(2.0**-10, 2.0**-24, 65504.0),
    "bfloat16": Precision(2.0**-7, 2.0**-126, 3.3e38),
}


def _silently(function: Callable[..., Any]) -> Callable[..., Any]:
    """Infinities and NaN come without a warning."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments, **options)

    return call


class Rounded:
    """`value`, and for each entry an `error`; infinite where nothing can be said."""

    __array_ufunc__ = None  # so that `array * rounded` comes here

    @_silently
    def __init__(self, value: Any, error: Any, precision: Precision) -> None:
        self.value: Array = np.asarray(value, float)
        beyond = np.isfinite(self.value) & (np.abs(self.value) + error > precision.most)
        self.error: Array = np.where(np.isnan(error) | beyond, np.inf, error)
        self.precision = precision

    @classmethod
    def of(cls, value: Any, precision: Precision) -> Rounded:
        """Exactly `value`, but for what may be flushed to 0."""
        size = np.abs(np.asarray(value, float))
        return cls(value, np.where(size < precision.least, size, 0.0), precision)

    @property
    def _nan(self) -> Any:
        """Where a NaN was put in: then one comes out, whatever the rounding."""
        return np.isnan(self.value) & np.isfinite(self.error)

    def _made(self, value: Array, error: Any, size: Any, nan: Any, precision: Precision) -> Rounded:
        """A result with the errors of its operands, rounded once; `size` is that of what was added."""
        return Rounded(value, np.where(nan, 0.0, error + precision.unit * size + precision.least), precision)

    def _coarser(self, other: Rounded) -> Precision:
        return max(self.precision, other.precision, key=lambda p: p.unit)

    def like(self, other: Any) -> Rounded:
        """A number becomes one that is rounded to this precision."""
        if isinstance(other, Rounded):
            return other
        exact = np.asarray(other, float)
        return Rounded(exact, self.precision.unit * np.abs(exact) + self.precision.least, self.precision)

    @_silently
    def __add__(self, other: Any) -> Rounded:
        b = self.like(other)
        size = np.abs(self.value) + np.abs(b.value)
        return self._made(self.value + b.value, self.error + b.error, size, self._nan | b._nan, self._coarser(b))

    @_silently
    def __mul__(self, other: Any) -> Rounded:
        b = self.like(other)
        value = self.value * b.value
        error = np.abs(self.value) * b.error + np.abs(b.value) * self.error + self.error * b.error
        return self._made(value, error, np.abs(value), self._nan | b._nan, self._coarser(b))

    @_silently
    def __truediv__(self, other: Any) -> Rounded:
        b = self.like(other)
        value = self.value / b.value
        left = np.abs(b.value) - b.error  # of the denominator, at worst
        error = np.where(left > 0, (self.error + np.abs(value) * b.error) / left, np.inf)
        return self._made(value, error, np.abs(value), self._nan | b._nan, self._coarser(b))

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error, self.precision)

    def __sub__(self, other: Any) -> Rounded:
        return self + -self.like(other)

    __radd__, __rmul__ = __add__, __mul__

    def __getitem__(self, key: Any) -> Rounded:
        return Rounded(self.value[key], self.error[key], self.precision)

    def reshape(self, *shape: int) -> Rounded:
        return Rounded(np.reshape(self.value, shape), np.reshape(self.error, shape), self.precision)

    @_silently
    def sum(self, axis: int | tuple[int, ...] | None = None) -> Rounded:
        value, size = self.value.sum(axis), np.abs(self.value).sum(axis)
        terms = self.value.size // max(1, value.size)
        error = self.error.sum(axis) + terms * self.precision.least
        in_full = min(terms, max(SUMMED, ALIKE * terms))
        return self._made(value, error, in_full * size, self._nan.any(axis), self.precision)

    @property
    def certain(self) -> Array:
        """Where the error is finite."""
        return np.isfinite(self.error)

    @_silently
    def to(self, precision: Precision) -> Rounded:
        """As it is stored in another precision."""
        return self._made(self.value, self.error, np.abs(self.value), self._nan, precision)


def join(a: Rounded, b: Rounded) -> Rounded:
    """One vector behind the other."""
    return Rounded(np.append(a.value, b.value), np.append(a.error, b.error), a.precision)


@_silently
def check(what: str, got: Any, want: Rounded) -> None:
    """Fail if an entry of `got` is further from its value than its error allows."""
    got = np.asarray(got, float)
    assert got.shape == want.value.shape, f"{what} must have shape {want.value.shape}, got {got.shape}"
    compared["all"] += got.size
    compared["bounded"] += int((want.error <= 0.01 * np.abs(want.value)).sum())
    same = (got == want.value) | (np.isnan(got) & np.isnan(want.value))
    wrong = want.certain & ~same & ~(np.abs(got - want.value) <= want.error)
    if wrong.any():
        place = tuple(int(k) for k in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}{list(place)} must be {want.value[place]!r} within {want.error[place]:.2g}, got {got[place]!r} "
            f"({wrong.sum()} of {wrong.size} entries are wrong)"
        )
