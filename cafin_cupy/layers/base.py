"""What every layer descriptor says, and nothing else is known of a layer type by the backends:

- the sizes of its factors `H` and `S`, and which part of them serves the weight, which the bias;
- how each raw sum is a *column sum* of `|x|**p` over the batch (`Columns`), for the kernels;
- how the sums become raw moments (`mean`, `bias_entry`), shared by kernels and reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import index
from typing import Any

from ..errors import CafinTypeError, refuse, shown

Shape = tuple[int, ...]
Three = tuple[int, int, int]  # depth, height, width


@dataclass(frozen=True)
class Patches:
    """Which pixels meet which tap of a convolution's kernel: output (z, y, x) and tap (k, i, j) read pixel
    `(z * stride[0] + k * dilation[0] - padding[0], y * stride[1] + ..., x * ...)`, if it lies inside the image. An
    image of one or two axes has a depth, or depth and height, of 1."""

    channels: int  # of a group
    groups: int
    image: Three
    output: Three
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    scale: float = 1.0  # multiplies every result


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
        patches: if given, the results are per pixel and are still to be folded into kernel taps, by each of them in
            turn: their results lie one behind the other.
    """

    lead: int
    rows: int
    segments: int
    run: int
    power: int
    scale: float = 1.0
    patches: tuple[Patches, ...] = ()


def _has_shape(array: Any) -> bool:
    """False for what has none, and for classes, modules and nested tensors, which have something else by that name."""
    try:
        return all(int(n) >= 0 for n in array.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


def whole_number(value: Any, least: int) -> int | None:
    """`value` as an int >= `least`; None if it is none."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        return None
    return number if number is not None and number >= least else None


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight, perhaps a bias, and the layer's name. Two descriptors are equal only if they are the same object."""

    weight: Any
    bias: Any = None
    name: str | None = field(default=None, kw_only=True)

    # What the subclasses fill in. `norm` layers square after summing; the others sum squares. The H sums of `counted`
    # layers are counts, and their total divides all sums.
    norm = False
    counted = False

    def __post_init__(self) -> None:
        for name, array in (("weight", self.weight), ("bias", self.bias)):
            if not _has_shape(array) and not (name == "bias" and array is None):
                refuse(type(self).__name__, name, "be an array", type(array).__name__, kind=CafinTypeError)
        if self.name is not None and not isinstance(self.name, str):
            refuse(type(self).__name__, "name", "be a string or None", shown(self.name), kind=CafinTypeError)
        self._check(tuple(self.weight.shape))
        if self.bias is not None and math.prod(self.bias.shape) != self.outputs:
            refuse(type(self).__name__, "bias", f"have {self.outputs} elements", f"shape {tuple(self.bias.shape)}")

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
    def home(self) -> Any:
        """The array beside which the factors lie, and whose precision they have: the weight, or this process's part of
        one that several processes hold."""
        return self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight

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
    def H_units(self) -> int | None:
        """Entries of the H sums, groups added up; None where they follow the input."""
        return self.width

    @property
    def outputs(self) -> int:
        """Entries of a bias."""
        return self.S_size

    @property
    def shares(self) -> tuple[int, int]:
        """Groups whose sums of (H, S) the kernels keep apart, and average adds up."""
        return 1, 1

    @property
    def tail(self) -> int:
        """Entries of S for the bias alone, behind those for the weight."""
        return 0

    @property
    def width(self) -> int:
        """Entries of `H` that serve the weight; the one behind them serves the bias."""
        return 1 if self.norm else math.prod(self.shape[1:])

    def of_weight(self, H: Any, S: Any) -> tuple[Any, Any]:
        """(columns, rows): the views of the factors that serve the weight, seen as a matrix in row-major order."""
        return H[: self.width], S

    def of_bias(self, H: Any, S: Any) -> tuple[Any, Any]:
        """(columns, rows) of the bias, a matrix of one column."""
        return H[self.width : self.width + 1], S

    def read(self, h: Any, s: Any) -> tuple[Any, Any]:
        """What the sums are taken of: input and output gradient, which have passed `check`, or arrays made of them."""
        return h, s

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        """How the kernels read what `read` has returned, an input of shape `h` and an output gradient of shape `s`."""
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
