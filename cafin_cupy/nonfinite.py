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
    named = [(name, known(array, where, name)) for name, array in named]
    if _all_finite([array for _, array in named]):
        return
    for name, array in named:
        xp = array_namespace(array)
        count = int(xp.count_nonzero(~xp.isfinite(array)))
        if count:
            got = f"inf or NaN in {count} of {math.prod(array.shape)} elements"
            refuse(where, name, "be finite", got, mend, NonFiniteError)


def _all_finite(arrays: Sequence[Any]) -> bool:
    torch = torch_of(arrays[0]) if arrays else None
    if torch is not None and all(torch_of(a) is not None for a in arrays):  # one pass in few launches, and one wait
        largest = torch.nn.utils.get_total_norm([a for a in arrays if a.numel()], math.inf)
        return math.isfinite(largest)
    return all(bool(array_namespace(a).all(array_namespace(a).isfinite(a))) for a in arrays)
