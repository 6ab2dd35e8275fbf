"""Layers and the shapes of their batches, as descriptions that print as code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cafin_cupy

from .arrays import Held, whole_numbers
from .expected import CHANNELS, Geometry

Shape = tuple[int, ...]
ODD = (0, 1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Batch:
    """The free sizes of a layer's input and output gradient.

    Attributes:
        sizes: of the axes that the weight does not determine.
        axes: how many leading axes there are, for layers that take any number.
        more: rows and columns of a convolution's output beyond those that its geometry gives.
    """

    sizes: tuple[int, int, int] = (2, 3, 3)
    axes: int = 1
    more: int = 0


batches = st.builds(
    Batch,
    st.one_of(
        st.just((2, 3, 3)),
        st.tuples(*3 * [st.integers(1, 6)]),
        st.tuples(*3 * [st.sampled_from(ODD)]),
        st.just((67, 1, 4)),
    ),
    st.sampled_from([1, 0, 2, 3]),
    st.sampled_from([0, 0, 0, 1, -1]),
)

_width = st.sampled_from([3, 1, 2, 4, 5, 13, 0])


def _each(axes: int, least: int, most: int) -> Any:
    return st.tuples(*axes * [st.integers(least, most)])


@st.composite
def _convolutions(draw: Any) -> Geometry:
    axes = draw(st.sampled_from([2, 2, 1, 3]))
    kind, groups = draw(st.sampled_from(["Conv", "Conv", "ConvTranspose"])), draw(st.sampled_from([1, 1, 2, 3]))
    weight = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)), *draw(_each(axes, 1, 3)))
    stride, padding, dilation = (draw(_each(axes, *bounds)) for bounds in ((1, 3), (0, 3), (1, 2)))
    return Geometry(f"{kind}{axes}d", weight, draw(st.booleans()), stride, padding, dilation, groups)


@st.composite
def _embeddings(draw: Any) -> Geometry:
    rows = draw(st.integers(1, 7))
    padding = draw(st.one_of(st.none(), st.integers(0, rows - 1)))
    return Geometry("Embedding", (rows, draw(_width)), False, padding_idx=padding)


_shapes = st.lists(_width, min_size=1, max_size=3).map(tuple)
geometries = st.one_of(
    st.builds(Geometry, st.sampled_from(["Linear", "TransposedLinear"]), st.tuples(_width, _width), st.booleans()),
    _convolutions(),
    st.builds(Geometry, st.sampled_from(CHANNELS), st.tuples(_width), st.booleans()),
    st.builds(Geometry, st.just("LayerNorm"), _shapes, st.booleans()),
    st.builds(Geometry, st.just("RMSNorm"), _shapes, st.just(False)),
    _embeddings(),
)


def options(layer: Geometry) -> dict[str, Any]:
    """Keywords of the layer's descriptor."""
    if layer.kind == "Embedding":
        return {"padding_idx": layer.padding_idx}
    names = ("stride", "padding", "dilation", "groups") if layer.convolves else ()
    return {name: getattr(layer, name) for name in names}


def descriptor(layer: Geometry, weight: Any, bias: Any, name: str | None) -> Any:
    return getattr(cafin_cupy, layer.kind)(weight, bias, name=name, **options(layer))


def bias_shape(layer: Geometry) -> Shape:
    return layer.weight if layer.kind == "LayerNorm" else (layer.outputs,)


def shapes(layer: Geometry, batch: Batch) -> tuple[Shape, Shape]:
    """Shapes of an input and output gradient that fit the layer."""
    b, *sizes = batch.sizes
    lead = batch.sizes[: batch.axes]
    if layer.kind == "Embedding":
        return lead, (*lead, layer.rows)
    if layer.kind in ("Linear", "TransposedLinear"):
        return (*lead, layer.columns), (*lead, layer.rows)
    if layer.kind in ("LayerNorm", "RMSNorm"):
        lead = lead or (b,)
        return (*lead, *layer.weight), (*lead, *layer.weight)
    if layer.norm:
        axes = {"BatchNorm1d": min(1, batch.axes), "BatchNorm2d": 2, "BatchNorm3d": 3}.get(layer.kind, batch.axes)
        image = (*sizes, 2)[:axes]
        return (b, layer.weight[0], *image), (b, layer.weight[0], *image)
    image = (*sizes, 2)[: len(layer.weight) - 2]
    side = [  # that meets the taps
        max(0, (n + 2 * p - d * (k - 1) - 1) // t + 1 + batch.more)
        for n, k, t, p, d in zip(image, layer.weight[2:], layer.stride, layer.padding, layer.dilation)
    ]
    read, made = (b, layer.groups * layer.weight[1], *image), (b, layer.weight[0], *side)
    return (made, read) if layer.transposed else (read, made)


def wrong_shapes(layer: Geometry, h: Shape, s: Shape) -> dict[str, tuple[Shape, Shape]]:
    """Shapes that do not fit the layer, by what is wrong."""
    axis = 1 if layer.convolves else -1  # any image is welcome
    wrong = {
        "h is longer": (_longer(h, axis), s) if h else ((2,), s),
        "s is longer": (h, _longer(s, axis)),
        "h has one more sample": (_longer(h, 0), s) if h else ((3,), s),
        "no axes": ((), ()),
        "one axis more": ((1, *h), s),
    }
    if layer.kind not in ("Linear", "TransposedLinear"):
        wrong["flat"] = (math.prod(h),), (math.prod(s),)
    return wrong


def entering(layer: Geometry, h: Held, framework: str) -> Held:
    """What enters a layer: the array, or for an embedding rows of its table by the array's numbers."""
    if layer.kind != "Embedding":
        return h
    numbers = np.floor(np.nan_to_num(np.abs(h.value), posinf=1.0)) % layer.columns
    return whole_numbers(framework, numbers, "int32" if layer.columns % 2 else "int64")


def _longer(shape: Shape, axis: int) -> Shape:
    longer = list(shape)
    longer[axis] += 1
    return tuple(longer)
