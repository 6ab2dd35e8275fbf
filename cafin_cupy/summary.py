"""`optimizer.summary()`: what the optimizer makes of each parameter, as a table to print and as rows of data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arrays import item_size, torch_of, view
from .layers import Layer
from .parts import Part
from .rule import Averaging
from .text import aligned, percent, size

HEAD = ("parameter", "", "shape", "layer", "H", "S", "parameters", "share", "momentum", "factors", "note")
ALIGN = "<><<>>>>>><"
RUNS = 4  # of numbers that a shared line lists
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")  # a whole component of a name: blocks.11.fc, params[3]


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        name, shape: of the parameter.
        layer: type of the layer whose factors it has, with the layer's name where the parameter's does not begin with
            it; "" where it has none.
        H, S: entries of that layer's factors; 0 where it has none.
        parameters: elements.
        momentum: bytes of its momentum on this rank: those that it has or, before the first step, will have.
        factors: bytes of the layer's factors, in the row of the layer's first parameter. Where the rule normalises
            after averaging, averages and normalised factors are two.
        note: why F is 1, or that it is not updated; else "".
        master: bytes of its master weights on this rank.
    """

    name: str
    shape: tuple[int, ...]
    layer: str
    H: int
    S: int
    parameters: int
    momentum: int
    factors: int
    note: str
    master: int = 0

    @property
    def state(self) -> int:
        """Bytes of momentum, master and factors."""
        return self.momentum + self.master + self.factors


@dataclass(frozen=True)
class Summary:
    """All parameters of an optimizer. `str` is the table of `table()`.

    The bytes are those of momenta, masters and factors, not of the sums that a sampled step adds up until it ends.

    Attributes:
        title: the optimizer, its backend and its rule.
        rows: one for each parameter, in the optimizer's order.
    """

    title: str
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def momentum(self) -> int:
        """Bytes of all momenta."""
        return sum(row.momentum for row in self.rows)

    @property
    def factors(self) -> int:
        """Bytes of all factors."""
        return sum(row.factors for row in self.rows)

    @property
    def masters(self) -> int:
        """Bytes of all master weights."""
        return sum(row.master for row in self.rows)

    @property
    def state(self) -> int:
        """Bytes of all of them."""
        return self.momentum + self.masters + self.factors

    @property
    def without_factors(self) -> tuple[Row, ...]:
        """The rows of parameters that no layer gives factors."""
        return tuple(row for row in self.rows if not row.layer)

    def table(self, merge: bool = True) -> str:
        """The rows, their total, and how many have no factors.

        Args:
            merge: parameters that differ in numbers of their names alone, as those of equal blocks do, share a line:
                `blocks.0-11.fc.weight` with how many they are.
        """
        whole = self.parameters
        groups = _merged(self.rows) if merge else [(row.name, [row]) for row in self.rows]
        lines = [HEAD, *(_cells(name, rows, whole) for name, rows in groups)]
        total = ("total", f"x{len(self.rows)}", "", "", "", "", f"{whole:,}", percent(whole, whole))
        lines.append((*total, size(self.momentum), size(self.factors), ""))
        text = [self.title, *aligned(lines, ALIGN)]
        if self.masters:
            text.append(f"master weights: {size(self.masters)}")
        bare = self.without_factors
        if bare:
            count = sum(row.parameters for row in bare)
            text.append(f"without factors: {len(bare)} of {len(self.rows)}, {percent(count, whole)} of the parameters")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


def summarise(title: str, parts: Sequence[Part], averaging: Averaging) -> Summary:
    """The summary of an optimizer's parameters. Touches no device."""
    counted: set[int] = set()  # layers whose factors are in the row of an earlier parameter
    rows = []
    for part in parts:
        layer = part.layer
        first = layer is not None and part.index not in counted
        counted.add(part.index)
        shape = tuple(int(n) for n in part.array.shape)
        rows.append(
            Row(
                part.name,
                shape,
                "" if layer is None else _kind(part, layer),
                0 if layer is None else layer.H_size,
                0 if layer is None else layer.S_size,
                math.prod(shape),
                _momentum_bytes(part),
                factor_bytes(layer, averaging) if layer is not None and first else 0,
                part.note,
                _master_bytes(part),
            )
        )
    return Summary(title, tuple(rows))


def factor_bytes(layer: Layer, averaging: Averaging) -> int:
    """Bytes of a layer's factors, as `Factors` keeps them."""
    entering = 8 if _dtype(layer.weight) == "float64" else 4
    return (layer.H_size + layer.S_size) * (entering if averaging.normalize == "before" else 8 + entering)


def _momentum_bytes(part: Part) -> int:
    if part.momentum is not None:
        dtype = _dtype(part.momentum)
    elif part.trains:
        dtype = part.precision.momentum_of("summary", part.name, _dtype(part.array))
    else:
        return 0
    return part.kept * item_size(dtype)


def _master_bytes(part: Part) -> int:
    return 4 * part.kept if part.trains and part.precision.has_master(_dtype(part.array)) else 0


def _dtype(array: Any) -> str:
    if torch_of(array) is not None:
        return str(array.dtype).removeprefix("torch.")
    return view(array, "summary", "params").dtype


def _kind(part: Part, layer: Layer) -> str:
    kind, name = type(layer).__name__, layer.name
    own = not name or part.name.startswith((f"{name}.", f"{name}_"))
    return kind if own else f"{kind} {name}"


def _merged(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """(name, rows) of each line, in the order of their first rows."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (_NUMBER.sub("*", row.name), row.shape, _NUMBER.sub("*", row.layer), row.H, row.S, row.note)
        groups.setdefault(key, []).append(row)
    return [(_common([row.name for row in group]), group) for group in groups.values()]


def _common(names: Sequence[str]) -> str:
    """One name for all, in which numbers that differ are a list of them: blocks.0-2,4-11.fc."""
    numbers = iter([_listed(sorted({int(n) for n in found})) for found in zip(*map(_NUMBER.findall, names))])
    return _NUMBER.sub(lambda _: next(numbers), names[0])


def _listed(numbers: Sequence[int]) -> str:
    """1,3-5 for 1, 3, 4, 5; the middle of a long list is left out."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    texts = ["-".join(map(str, run)) for run in runs]
    return ",".join(texts if len(texts) <= RUNS else [*texts[: RUNS - 2], "..", texts[-1]])


def _cells(name: str, rows: Sequence[Row], whole: int) -> tuple[str, ...]:
    first = rows[0]
    count = sum(row.parameters for row in rows)
    factors = sum(row.factors for row in rows)
    return (
        name,
        f"x{len(rows)}" if len(rows) > 1 else "",
        " x ".join(map(str, first.shape)) or "scalar",
        _common([row.layer for row in rows]),
        f"{first.H:,}" if first.layer else "",
        f"{first.S:,}" if first.layer else "",
        f"{count:,}",
        percent(count, whole),
        size(sum(row.momentum for row in rows)),
        size(factors) if factors else "",
        first.note,
    )
