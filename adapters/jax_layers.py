"""Kinds of layers of a JAX model: which parameters each has, how factors meet them, and the raw sums of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cafin_cupy as cafin
from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.reference import RawSums
from cafin_cupy.rule import flag, whole

from .jax_kernels import Part, Use
from .jax_sums import raw_sums

Shape = tuple[int, ...]
Padding = str | int | tuple[Any, ...] | list[Any]
PADDINGS = ("SAME", "VALID", "CIRCULAR", "CAUSAL")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's parameters by their paths in the tree of parameters, keys joined by "/", as "Dense_0/kernel".

    Attributes:
        weight: path of the weight; `bias`: of the bias, None without.
        stack: leading axes of every parameter that number layers of one kind, as `lax.scan` wants them.
    """

    weight: str
    bias: str | None = None
    stack: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type == "bool":
                flag(where, name, value)
            elif field.type == "int" or (field.type == "int | None" and value is not None):
                whole(where, name, value, 0 if name == "stack" else 1)
            elif name in ("weight", "bias") and not isinstance(value, (str, type(field.default))):
                mend = "as 'Dense_0/kernel'"
                refuse(where, name, "be the path of a parameter", type(value).__name__, mend, CafinTypeError)

    def core(self, weight: Shape, bias: bool) -> cafin.Layer:
        """The library's descriptor; `weight`: its shape without the stack."""
        raise NotImplementedError

    def uses(self, core: cafin.Layer, H: Part, S: Part) -> tuple[Use, Use]:
        """Of weight and bias."""
        of_weight, entry = H._replace(length=core.width), H._replace(offset=core.width, length=1)
        return (Use(S, of_weight) if self._input_major else Use(of_weight, S)), Use(entry, S)

    @property
    def _input_major(self) -> bool:
        return False

    def sums(self, core: cafin.Layer, h: Any, s: Any) -> RawSums:
        """Raw sums of one call.

        Raises:
            CafinError: shapes that the layer cannot have.
        """
        return raw_sums(core, h, s)

    def units(self, core: cafin.Layer) -> int:
        """Length of the sums of H."""
        return core.width


@dataclass(frozen=True, kw_only=True)
class Dense(Layer):
    """`y = h W + b` over the last axes of `h`. The weight's axes are those of the input, then those of the output
    (`input_major`, as in Flax), or the reverse, as in Equinox.

    Attributes:
        inputs: how many of the weight's axes belong to the input; 1 but for Flax's DenseGeneral.
    """

    input_major: bool = True
    inputs: int = 1

    @property
    def _input_major(self) -> bool:
        return self.input_major

    def core(self, weight: Shape, bias: bool) -> cafin.Layer:
        split = self.inputs if self.input_major else len(weight) - self.inputs
        if not 0 < split < len(weight):
            refuse("Dense", "inputs", f"leave axes of a weight of shape {weight} to either side", self.inputs)
        matrix = math.prod(weight[:split]), math.prod(weight[split:])
        kind = cafin.TransposedLinear if self.input_major else cafin.Linear
        outputs = matrix[1] if self.input_major else matrix[0]
        return kind(_shape(*matrix), _shape(outputs) if bias else None, name=self.weight)

    def sums(self, core: cafin.Layer, h: Any, s: Any) -> RawSums:
        lead = tuple(h.shape[: max(0, h.ndim - self.inputs)])
        rows = math.prod(lead)
        if (
            math.prod(h.shape) != rows * core.width
            or tuple(s.shape[: len(lead)]) != lead
            or s.size != rows * core.S_size
        ):
            got = f"{tuple(h.shape)} and {tuple(s.shape)}"
            rule = f"have {core.width} and {core.S_size} entries in each of the same rows"
            refuse("tap", f"h, y of {self.weight}", rule, got)
        return raw_sums(core, h.reshape(rows, core.width), s.reshape(rows, core.S_size))


@dataclass(frozen=True, kw_only=True)
class Conv(Layer):
    """A convolution over images of one to three axes.

    `channels_last`: h and s (B, ..., C) and a weight (..., C_in / groups, C_out), as in Flax; else (B, C, ...) and
    (C_out, C_in / groups, ...), as in Equinox. Factors of the weight are ordered as it lies in memory.

    Attributes:
        stride, dilation: of each axis, or one number for all.
        padding: "SAME", "VALID", "CIRCULAR", "CAUSAL", a number, or a number or pair for each axis.
        groups: of channels.
    """

    stride: Any = 1
    padding: Padding = "SAME"
    dilation: Any = 1
    groups: int = 1
    channels_last: bool = True

    @property
    def _input_major(self) -> bool:
        return self.channels_last

    def core(self, weight: Shape, bias: bool) -> cafin.Layer:
        return self._at(weight, bias, self._before(len(weight) - 2) or 0)

    def _at(self, weight: Shape, bias: bool, padding: Any) -> cafin.Layer:
        if self.channels_last:
            weight = weight[-1], weight[-2], *weight[:-2]
        axes = len(weight) - 2
        if axes not in (1, 2, 3):
            refuse("Conv", "weight", "have one to three axes beside its channels", f"{self.weight} of shape {weight}")
        kind: Any = (cafin.Conv1d, cafin.Conv2d, cafin.Conv3d)[axes - 1]
        geometry = {"stride": _each(self.stride, axes), "dilation": _each(self.dilation, axes), "groups": self.groups}
        bias_shape = _shape(weight[0]) if bias else None
        return kind(_shape(*weight), bias_shape, name=self.weight, padding=padding, **geometry)

    def sums(self, core: cafin.Layer, h: Any, s: Any) -> RawSums:
        axes = len(core.shape) - 2
        if h.ndim == axes + 1:  # one sample, as under vmap
            h, s = h[None], s[None]
        if h.ndim != axes + 2:
            refuse("tap", f"h of {self.weight}", f"have {axes} axes beside batch and channels", tuple(h.shape))
        h, padding = self._padded(h, core.shape[2:])
        shape = (*core.shape[2:], core.shape[1], core.shape[0]) if self.channels_last else core.shape
        sums = raw_sums(self._at(shape, core.bias is not None, padding), h, s, self.channels_last)
        if self.channels_last:
            taps = sums.H.reshape(core.shape[1], -1)
            sums = sums._replace(H=taps.T.reshape(-1))
        return sums

    def _before(self, axes: int) -> tuple[int, ...] | None:
        """What is put before the first pixel of each axis; None where it depends on the image."""
        padding = self.padding
        if isinstance(padding, str):
            if padding.upper() not in PADDINGS:
                refuse("Conv", "padding", f"be one of {', '.join(PADDINGS)}, or numbers", repr(padding))
            return None
        given = padding if isinstance(padding, (tuple, list)) else (padding,) * axes
        pairs = [tuple(p) if isinstance(p, (tuple, list)) else (p, p) for p in given]
        if len(pairs) != axes or not all(len(p) == 2 and all(map(_is_size, p)) for p in pairs):
            refuse(
                "Conv", "padding", f"be a whole number >= 0, or one or a pair for each of {axes} axes", repr(padding)
            )
        return tuple(int(before) for before, _ in pairs)

    def _padded(self, h: Any, kernel: Shape) -> tuple[Any, tuple[int, ...]]:
        """(the image, what is put before the first pixel of each axis)."""
        axes = len(kernel)
        before = self._before(axes)
        if before is not None:
            return h, before
        stride, dilation = _each(self.stride, axes), _each(self.dilation, axes)
        span = tuple((n - 1) * d + 1 for n, d in zip(kernel, dilation))
        mode = str(self.padding).upper()
        if mode == "CIRCULAR":  # as Flax does: as for "SAME" with a stride of 1
            pads = [((n - 1) // 2, n // 2) for n in span]
            around = [(0, 0), *pads, (0, 0)] if self.channels_last else [(0, 0), (0, 0), *pads]
            return jnp.pad(h, around, mode="wrap"), (0,) * axes
        if mode == "CAUSAL":
            return h, tuple(n - 1 for n in span)
        image = h.shape[1:-1] if self.channels_last else h.shape[2:]
        return h, tuple(before for before, _ in jax.lax.padtype_to_pads(image, span, stride, mode))


@dataclass(frozen=True, kw_only=True)
class ChannelNorm(Layer):
    """Batch, group or instance normalisation: a weight and perhaps a bias (C,); h and s (B, ..., C) with
    `channels_last`, else (B, C, ...).

    Attributes:
        batched: False where h and s are of one sample, without the axis B, as under `jax.vmap`.
    """

    channels_last: bool = True
    batched: bool = True

    def core(self, weight: Shape, bias: bool) -> cafin.Layer:
        return cafin.GroupNorm(_shape(*weight), _shape(*weight) if bias else None, name=self.weight)

    def sums(self, core: cafin.Layer, h: Any, s: Any) -> RawSums:
        if not self.batched:
            h, s = h[None], s[None]
        return raw_sums(core, h, s, self.channels_last)

    def units(self, core: cafin.Layer) -> int:
        return core.shape[0]


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Layer):
    """Layer or RMS normalisation over the weight's axes, the last of h and s (B, ..., D).

    Attributes:
        length: of axis 1 of h, whose entries have sums of their own; by default that of a matrix h (B, D).
    """

    length: int | None = None

    def core(self, weight: Shape, bias: bool) -> cafin.Layer:
        return cafin.LayerNorm(_shape(*weight), _shape(*weight) if bias else None, name=self.weight)

    def sums(self, core: cafin.Layer, h: Any, s: Any) -> RawSums:
        if h.ndim == len(core.shape):  # one sample, as under vmap
            h, s = h[None], s[None]
        return raw_sums(core, h, s)

    def units(self, core: cafin.Layer) -> int:
        return core.shape[0] if self.length is None else self.length


def _shape(*shape: int) -> Any:
    """What a descriptor takes for an array of which nothing but the shape is known."""
    return jax.ShapeDtypeStruct(shape, np.float32)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
