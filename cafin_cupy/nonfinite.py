"""The option `error_if_nonfinite`: what a step is about to use is looked at first. Without it nothing here runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from .arrays import known, torch_of
from .errors import NonFiniteError, refuse
from .factors import Factors

Named = Sequence[tuple[str, Any]]


def raw_moments(factors: Factors, grad_scale: float = 1.0) -> list[tuple[str, Any]]:
    """(name, array) of the raw moments that the coming `factors.update(grad_scale)` would average."""
    return [
        (f"raw {letter} of {factors.layers[index].label}", moment)
        for index, H, S in factors.raw(grad_scale)
        for letter, moment in (("H", H), ("S", S))
    ]


def refuse_nonfinite(where: str, named: Named, mend: str) -> None:
    """Refuse arrays that hold an inf or a NaN. Waits for their device.

    Raises:
        NonFiniteError: it names the first of them.
    """
    first = first_nonfinite(where, named)
    if first < len(named):
        name, array = named[first]
        got = f"inf or NaN in {_nonfinite(known(array, where, name))} of {math.prod(array.shape)} elements"
        refuse(where, name, "be finite", got, mend, NonFiniteError)


def first_nonfinite(where: str, named: Named) -> int:
    """The place of the first array that holds an inf or a NaN; their number if none does. Waits for their device."""
    arrays = [known(array, where, name) for name, array in named]
    if _all_finite(arrays):
        return len(arrays)
    return next((place for place, array in enumerate(arrays) if _nonfinite(array)), len(arrays))


def _nonfinite(array: Any) -> int:
    xp = array_namespace(array)
    return int(xp.count_nonzero(~xp.isfinite(array)))


def _all_finite(arrays: Sequence[Any]) -> bool:
    torch = torch_of(arrays[0]) if arrays else None
    if torch is not None and all(torch_of(a) is not None for a in arrays):  # one pass in few launches, and one wait
        largest = torch.nn.utils.get_total_norm([a for a in arrays if a.numel()], math.inf)
        return math.isfinite(largest)
    return all(bool(array_namespace(a).all(array_namespace(a).isfinite(a))) for a in arrays)
