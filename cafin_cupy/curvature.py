"""`optimizer.curvature()`: the preconditioner and the length of the update, in a few numbers a parameter.

No d x d product is made. The factors are never negative (averages, with weights >= 0, of ones and of squares, or of
what min-max normalisation makes of them), so of `F = outer(S, H) + Lambda`

    min F = min S min H + Lambda,   max F = max S max H + Lambda,   mean F = mean S mean H + Lambda.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from .arrays import at, where_is
from .factors import Factors
from .parts import Part, Rate

# Elements of a parameter that are in work together: on a CPU what is made of them stays in the cache, on a GPU the
# launches are few and the memory is bounded.
PIECE_OF_CPU, PIECE_OF_GPU = 2**16, 2**21
Pair = tuple[Any, Any]
Held = Callable[[Part, "Pair | None"], tuple[Any, Any, "Pair | None"]]
Total = Callable[[Any], Any]
FIELDS = ("min", "max", "mean", "update_ratio", "skipped")


class Curvature(Mapping[str, "dict[str, float]"]):
    """{parameter name: {"min", "max", "mean", "update_ratio", "skipped"}}, as all was when it was made.

    The numbers are computed on the parameters' devices, queued behind what is under way there. The names are known at
    once. The first look at a number waits for the devices and fetches all numbers; so an object that is kept and read
    a few steps later holds up nothing.

    - `min`, `max`, `mean`: of F; 1 where the parameter has no factors.
    - `update_ratio`: the norm of the update that momentum, factors and scalars make as they stand, over the norm of
      the parameter: right after a step, that step's update (of AdaFisherW with the decay of the new weights). 0 before
      the first step, inf for a parameter of zeros that is about to move.
    - `skipped`: how many refreshes of its layer's factors a NaN has prevented, as `skipped_refreshes` counts them.
    """

    def __init__(self, blocks: Sequence[tuple[list[str], Any]], names: Sequence[str]) -> None:
        """`blocks`: names, and their numbers as an array (names, fields), for each device."""
        self._blocks = list(blocks)
        self._names = list(names)
        self._numbers: dict[str, dict[str, float]] | None = None

    def __getitem__(self, name: str) -> dict[str, float]:
        if self._numbers is None:
            found = {key: line for keys, block in self._blocks for key, line in zip(keys, block.tolist())}
            self._numbers = {key: dict(zip(FIELDS, [*line[:-1], int(line[-1])])) for key, line in found.items()}
            self._blocks.clear()
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def flat(self, prefix: str = "adafisher") -> dict[str, float]:
        """{"adafisher/fc.weight/mean": ...}: every number under one key, as loggers of scalars take them."""
        return {f"{prefix}/{name}/{field}": value for name, values in self.items() for field, value in values.items()}


def _all(part: Part, pair: Pair | None) -> tuple[Any, Any, Pair | None]:
    return part.array, part.momentum, pair


def look(
    parts: Sequence[Part], factors: Factors, rates: Sequence[Rate], held: Held = _all, total: Total | None = None
) -> Curvature:
    """The curvature of all parameters that train and are not empty, computed where they are, without waiting.

    Args:
        held: what this process holds of a part, if others hold the rest.
        total: (k, 2) squared norms of update and parameter -> those of all parts together, or equal multiples of both.
    """
    lines: dict[int | str, list[tuple[str, Any]]] = {}
    shown = [(part, rate) for part, rate in zip(parts, rates) if part.trains and math.prod(part.array.shape)]
    with np.errstate(all="ignore"):  # NumPy alone warns of 0 / 0, which is not used, and of what diverges
        for part, rate in shown:
            pair = _pair(part, factors)
            array, momentum, own = held(part, pair)
            with at(array):
                squares = _squares(array, momentum, own, rate)
                lines.setdefault(where_is(array), []).append((part.name, _line(part, factors, pair, rate, squares)))
        blocks = []
        for found in lines.values():
            first = found[0][1]
            with at(first):
                block = array_namespace(first).stack([line for _, line in found])
                squares = block[:, 3:5] if total is None else total(block[:, 3:5])
                blocks.append(([name for name, _ in found], _with_ratios(block, squares)))
    return Curvature(blocks, [part.name for part, _ in shown])


def _pair(part: Part, factors: Factors) -> Pair | None:
    if part.layer is None:
        return None
    return factors.of_weight(part.index) if part.role == "weight" else factors.of_bias(part.index)


def _line(part: Part, factors: Factors, pair: Pair | None, rate: Rate, squares: list[Any]) -> Any:
    """min, max and mean of F, the `squares`, and skipped refreshes: float64, (6,)."""
    xp = array_namespace(squares[0])
    if pair is not None:
        skipped = xp.astype(factors.skipped[part.index][0], xp.float64)
        ends = [_double(f(pair[0])) * _double(f(pair[1])) + rate.Lambda for f in (xp.min, xp.max)]
        means = [xp.mean(xp.astype(x, xp.float64)) for x in pair]
        F = [*ends, means[0] * means[1] + rate.Lambda]
    else:
        skipped = xp.zeros_like(squares[0])
        F = [skipped + 1.0] * 3
    return xp.stack([*F, *squares, skipped])


def _double(x: Any) -> Any:
    xp = array_namespace(x)
    return xp.astype(x, xp.float64)


def _squares(array: Any, momentum: Any, pair: Pair | None, rate: Rate) -> list[Any]:
    """The squared norms of update and parameter: float64, in which no square of a float32 is lost."""
    xp = array_namespace(array)
    update = weight = xp.zeros((), dtype=xp.float64, device=device(array))
    if momentum is None or 0 in array.shape:
        return [update, weight]
    for piece in _pieces(array, pair):
        p, m = _double(array[piece]), _double(momentum[piece])
        change = rate.step_size * m
        if pair is not None:
            columns, rows = _double(pair[0]), _double(pair[1][piece])
            change = change / xp.reshape(rows[:, None] * columns[None, :] + rate.Lambda, tuple(p.shape))
        if rate.decay is not None:
            change = change + rate.decay * p
        update, weight = update + xp.sum(change * change), weight + xp.sum(p * p)
    return [update, weight]


def _with_ratios(block: Any, squares: Any) -> Any:
    """Lines with the ratio of both norms in the place of their squares: (names, fields)."""
    xp = array_namespace(block)
    update, weight = squares[:, :1], squares[:, 1:]
    ratio = xp.where(update == 0, xp.zeros_like(update), xp.sqrt(update / weight))
    return xp.concat([block[:, :3], ratio, block[:, 5:]], axis=1)


def _pieces(p: Any, pair: Pair | None) -> list[Any]:
    """Slices of axis 0 that are rows of F as well, of few elements; one of everything where that is not possible."""
    by_rows = len(p.shape) > 0 and (pair is None or pair[1].shape[0] == p.shape[0])
    if not by_rows:
        return [...]
    piece = PIECE_OF_CPU if where_is(p) == "cpu" else PIECE_OF_GPU
    rows = max(1, piece * p.shape[0] // math.prod(p.shape))
    return [slice(first, first + rows) for first in range(0, p.shape[0], rows)]
