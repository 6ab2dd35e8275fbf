"""Convolutions over images of one to three axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import refuse, shown
from .base import Columns, Layer, Patches, Shape, Three, whole_number

Numbers = int | tuple[int, ...]
COUNTED = {1: "one of them", 2: "two of them", 3: "three of them"}
LENGTHS = {1: ("L",), 2: ("H", "W"), 3: ("D", "H", "W")}
TAPS = {1: ("k",), 2: ("kh", "kw"), 3: ("kd", "kh", "kw")}


def _three(values: tuple[int, ...], missing: int) -> Three:
    """Of an image with fewer axes: `missing` ahead."""
    depth, height, width = (missing,) * (3 - len(values)) + values
    return depth, height, width


@dataclass(frozen=True, eq=False)
class Convolution(Layer):
    """What all convolutions share: geometry, groups, and which of them fit."""

    stride: Numbers = field(default=1, kw_only=True)
    padding: Numbers = field(default=0, kw_only=True)
    dilation: Numbers = field(default=1, kw_only=True)
    groups: int = field(default=1, kw_only=True)

    axes: ClassVar[int] = 2  # of an image

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 2 + self.axes, f"({', '.join((*self._channels(), *TAPS[self.axes]))})")
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, name, self._numbers(name, getattr(self, name), least))
        groups = whole_number(self.groups, 1)
        if groups is None or shape[0] % groups:
            name, rule = type(self).__name__, f"be a whole number that divides {self._channels()[0]} = {shape[0]}"
            refuse(name, "groups", rule, shown(self.groups))
        object.__setattr__(self, "groups", groups)

    def _numbers(self, name: str, value: Any, least: int) -> tuple[int, ...]:
        given = value if isinstance(value, (tuple, list)) else (value,) * self.axes
        each = tuple(n for n in (whole_number(n, least) for n in given) if n is not None)
        if not len(each) == len(given) == self.axes:
            rule = f"be a whole number >= {least} or {COUNTED[self.axes]}"
            refuse(type(self).__name__, name, rule, shown(value))
        return each

    def _channels(self) -> tuple[str, str]:
        """The weight's first two axes."""
        return "C_out", "C_in/groups"

    @property
    def taps(self) -> int:
        """K: columns of the weight."""
        return math.prod(self.shape[1:])

    @property
    def _in_out(self) -> tuple[int, int]:
        """Channels of input and output."""
        return self.shape[1] * self.groups, self.shape[0]

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        c_in, c_out = self._in_out
        whole = len(h) == len(s) == 2 + self.axes
        if not whole or h[1] != c_in or s[1] != c_out or h[0] != s[0]:
            of_input = ", ".join(LENGTHS[self.axes])
            of_output = ", ".join(f"O{n}" for n in LENGTHS[self.axes])
            self._refuse_shapes(where, f"have shapes (B, {c_in}, {of_input}) and (B, {c_out}, {of_output})", h, s)

    def _patches(self, image: Shape, output: Shape) -> Patches:
        """Of the side that the kernel's taps meet: pixels (C, ...) of shape `image`, at the positions of `output`."""
        return Patches(
            self.shape[1],
            self.groups,
            _three(image[2:], 1),
            _three(output[2:], 1),
            _three(self.shape[2:], 1),
            _three(self.stride, 1),  # type: ignore[arg-type]  # tuples since `_check`
            _three(self.padding, 0),  # type: ignore[arg-type]
            _three(self.dilation, 1),  # type: ignore[arg-type]
        )


class Conv(Convolution):
    """A convolution's weight (C_out, C_in/g, ...) multiplies patches: positions are batch and output pixels, x is the
    zero-padded patch of h, K entries in the order (c, taps), and s is s. Groups share H, as they share columns:

        H = sum over batch, groups and positions of x² / (B * positions * K),    S = sum of s² / (B * positions)

    The bias reads 1 in each group: its entry of H, divided likewise, is g / K.

    `padding` is what is put before the first pixel of an axis; what lies behind the last follows from the shape of s.
    """

    @property
    def H_size(self) -> int:
        return self.taps + (self.bias is not None)

    def count(self, h: Shape, s: Shape) -> int:
        return s[0] * math.prod(s[2:])

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        pixels = Columns(1, h[0], math.prod(h[1:]), 1, 2, patches=(self._patches(h, s),))
        return pixels, Columns(1, s[0], s[1], math.prod(s[2:]), 2)

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0 / (count * self.taps), 1.0 / count

    def bias_entry(self, count: int, units: int) -> float | None:
        return None if self.bias is None else self.groups / self.taps

    @property
    def shares(self) -> tuple[int, int]:
        return self.groups, 1


class Conv1d(Conv):
    """1-d convolution. `weight` (C_out, C_in/groups, k), `bias` (C_out,) or None; h (B, C_in, L), s (B, C_out, OL).
    Derivation: `layers.convolution.Conv`."""

    axes = 1


class Conv2d(Conv):
    """2-d convolution. `weight` (C_out, C_in/groups, kh, kw), `bias` (C_out,) or None; h (B, C_in, H, W),
    s (B, C_out, OH, OW). Derivation: `layers.convolution.Conv`."""

    axes = 2


class Conv3d(Conv):
    """3-d convolution. `weight` (C_out, C_in/groups, kd, kh, kw), `bias` (C_out,) or None; h (B, C_in, D, H, W),
    s (B, C_out, OD, OH, OW). Derivation: `layers.convolution.Conv`."""

    axes = 3


class ConvTranspose(Convolution):
    """A transposed convolution is a convolution with input and output exchanged, and so are its factors: the weight
    (C_in, C_out/g, ...) multiplies the input, and its K = C_out/g * taps columns meet the output. Positions are batch
    and input pixels, x is h, and s is the zero-padded patch of the output gradient around the position, in the order
    (c, taps). Groups share S as they share columns:

        H = sum over batch and positions of h² / (B * positions),  an entry for each input channel, and 1 with a bias
        S = sum over batch, groups and positions of (patch of s)² / (B * positions * K)

    The weight's rows vector is H, its columns vector S. The bias adds to each output pixel once, whatever the taps, so
    it has entries of S of its own behind those K, one for each output channel. They are means over output pixels,
    divided as the others are, so that one normalisation serves both: g / K * mean of s². That is what a tap would have
    that meets each output pixel once.
    """

    def _channels(self) -> tuple[str, str]:
        return "C_in", "C_out/groups"

    @property
    def _in_out(self) -> tuple[int, int]:
        return self.shape[0], self.shape[1] * self.groups

    @property
    def outputs(self) -> int:
        return self.shape[1] * self.groups

    @property
    def H_size(self) -> int:
        return self.width + (self.bias is not None)

    @property
    def S_size(self) -> int:
        return self.taps + self.tail

    @property
    def width(self) -> int:
        return self.shape[0]

    @property
    def shares(self) -> tuple[int, int]:
        return 1, self.groups

    @property
    def tail(self) -> int:
        return 0 if self.bias is None else self.outputs

    def of_weight(self, H: Any, S: Any) -> tuple[Any, Any]:
        return S[: self.taps], H[: self.width]

    def of_bias(self, H: Any, S: Any) -> tuple[Any, Any]:
        return H[self.width :], S[self.taps :]

    def count(self, h: Shape, s: Shape) -> int:
        return h[0] * math.prod(h[2:])

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        read, made = math.prod(h[2:]), math.prod(s[2:])
        patches = [self._patches(s, h)]
        if self.bias is not None:  # a kernel of one tap meets each pixel once; the count that divides is of `read`
            image, one, none = _three(s[2:], 1), (1, 1, 1), (0, 0, 0)
            patches.append(Patches(s[1], 1, image, image, one, one, none, one, self.groups * read / max(1, made)))
        return Columns(1, h[0], h[1], read, 2), Columns(1, s[0], s[1] * made, 1, 2, patches=tuple(patches))

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0 / count, 1.0 / (count * self.taps)


class ConvTranspose1d(ConvTranspose):
    """1-d transposed convolution. `weight` (C_in, C_out/groups, k), `bias` (C_out,) or None; h (B, C_in, L),
    s (B, C_out, OL). Derivation: `layers.convolution.ConvTranspose`."""

    axes = 1


class ConvTranspose2d(ConvTranspose):
    """2-d transposed convolution. `weight` (C_in, C_out/groups, kh, kw), `bias` (C_out,) or None; h (B, C_in, H, W),
    s (B, C_out, OH, OW). Derivation: `layers.convolution.ConvTranspose`."""

    axes = 2


class ConvTranspose3d(ConvTranspose):
    """3-d transposed convolution. `weight` (C_in, C_out/groups, kd, kh, kw), `bias` (C_out,) or None;
    h (B, C_in, D, H, W), s (B, C_out, OD, OH, OW). Derivation: `layers.convolution.ConvTranspose`."""

    axes = 3
