"""What a step must have made of factors and parameters, by the rule in float64 from what was there before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import expected
from .arrays import dtype_of, value
from .expected import Call, Geometry, Scalars
from .rounded import PRECISION, Precision, Rounded, check


def exact(x: Any) -> Rounded:
    """A layer's input or output gradient; half precision is summed in float32."""
    return Rounded.of(value(x), PRECISION["float64" if dtype_of(x) == "float64" else "float32"])


@dataclass
class Rule:
    """How the factors of a run follow their moments: (keep, add, "before" or "after")."""

    coefficients: tuple[float, float, str]

    def kept_in(self, weight: Any) -> Precision:
        """Precision of the averages."""
        return PRECISION["float64"] if self.coefficients[2] == "after" else self.enters_in(weight)

    def enters_in(self, weight: Any) -> Precision:
        """Precision of what enters the preconditioner."""
        return PRECISION["float64" if dtype_of(weight) == "float64" else "float32"]

    def check_factors(
        self, name: str, layer: Geometry, weight: Any, calls: Sequence[Call], scale: float, old: Any, new: Any
    ) -> bool | None:
        """After a sampled step that has seen `calls` of a layer. `old`: values of (H, S) before; `new`: after it.

        Returns:
            True if a NaN has kept the factors as they were; None if rounding decides that.
        """
        calls = expected.counted(layer, calls)
        raw = expected.raw_moments(layer, calls, scale) if calls else None
        broken = expected.broken(*raw) if raw else False
        if broken is None:
            return None
        for letter, F, x, now in zip("HS", old, raw or old, new):
            precision = self.kept_in(weight)
            want = (
                Rounded(F, 0.0 * F, precision)
                if broken or not raw
                else expected.averaged(F, x, self.coefficients, precision)
            )
            check(f"{letter} of {name}", value(now), want)
        return broken

    def finite(self, layer: Geometry, calls: Sequence[Call], scale: float) -> bool | None:
        """Whether the raw moments of a sampled step are; None if rounding decides."""
        calls = expected.counted(layer, calls)
        raw = expected.raw_moments(layer, calls, scale) if calls else ()
        if any((x.certain & ~np.isfinite(x.value)).any() for x in raw):
            return False
        return True if all(x.certain.all() for x in raw) else None

    def pair(self, layer: Geometry, role: str, weight: Any, factors: Any) -> tuple[Rounded, Rounded]:
        """(columns, rows) as they enter the update of a layer's "weight" or "bias"."""
        return layer.of(
            role, *(expected.effective(value(F), self.coefficients, self.enters_in(weight)) for F in factors)
        )


def check_update(
    name: str,
    p: Any,
    m: Any,
    was: Sequence[Any],
    pair: Any,
    x: Scalars,
    step: int,
    scale: float = 1.0,
    master: Any = None,
) -> None:
    """`was`: values of (p, g, m) before the update; for a parameter with a master p is `what_counts`."""
    updated = p if master is None else master
    want = expected.updated(*was, pair, x, step, (dtype_of(updated), dtype_of(m)), scale)
    for what, got, right in zip(("weights", "momentum"), (updated, m), want):
        check(f"{what} of {name}", value(got), right)
    if master is not None:
        assert np.array_equal(value(p), nearest(value(master), dtype_of(p)), equal_nan=True), (
            f"{name} is not its master"
        )


def nearest(x: Any, dtype: str) -> Any:
    """Float32 numbers as they are in another dtype."""
    return torch.tensor(x).float().to(getattr(torch, dtype)).double().numpy()


def what_counts(p: Any, master: Any) -> Any:
    """What is updated: the master, where the parameter is a copy of it; None for none."""
    if master is None:
        return value(p)
    return np.where(value(p) == nearest(value(master), dtype_of(p)), value(master), value(p))


def all_finite(grads: Sequence[Any], moments: Sequence[bool | None] = ()) -> bool | None:
    """What `error_if_nonfinite` must find: True, False, or None if rounding decides. `moments`: of each layer."""
    found = [bool(np.isfinite(value(g)).all()) for g in grads if g is not None] + list(moments)
    return False if False in found else None if None in found else True
