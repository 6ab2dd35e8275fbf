"""Layers and the shapes of their batches, as descriptions that print as code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import cafin_cupy

from .expected import Geometry

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

_two = lambda least, most: st.tuples(*2 * [st.integers(least, most)])  # noqa: E731
_width = st.sampled_from([3, 1, 2, 4, 5, 13, 0])


@st.composite
def _convolutions(draw: Any) -> Geometry:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    weight = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)), *draw(_two(1, 3)))
    return Geometry("Conv2d", weight, draw(st.booleans()), draw(_two(1, 3)), draw(_two(0, 3)), draw(_two(1, 2)), groups)


geometries = st.one_of(
    st.builds(Geometry, st.just("Linear"), st.tuples(_width, _width), st.booleans()),
    _convolutions(),
    st.builds(Geometry, st.just("BatchNorm2d"), st.tuples(_width), st.booleans()),
    st.builds(Geometry, st.just("LayerNorm"), st.lists(_width, min_size=1, max_size=3).map(tuple), st.booleans()),
)


def options(layer: Geometry) -> dict[str, Any]:
    """Keywords of the layer's descriptor."""
    if layer.kind != "Conv2d":
        return {}
    return {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}


def descriptor(layer: Geometry, weight: Any, bias: Any, name: str | None) -> Any:
    return getattr(cafin_cupy, layer.kind)(weight, bias, name=name, **options(layer))


def bias_shape(layer: Geometry) -> Shape:
    return layer.weight if layer.kind == "LayerNorm" else layer.weight[:1]


def shapes(layer: Geometry, batch: Batch) -> tuple[Shape, Shape]:
    """Shapes of an input and output gradient that fit the layer."""
    b, y, x = batch.sizes
    lead = batch.sizes[: batch.axes]
    if layer.kind == "Linear":
        return (*lead, layer.weight[1]), (*lead, layer.weight[0])
    if layer.kind == "LayerNorm":
        lead = lead or (b,)
        return (*lead, *layer.weight), (*lead, *layer.weight)
    if layer.kind == "BatchNorm2d":
        return (b, layer.weight[0], y, x), (b, layer.weight[0], y, x)
    output = [
        max(0, (n + 2 * p - d * (k - 1) - 1) // t + 1 + batch.more)
        for n, k, t, p, d in zip((y, x), layer.weight[2:], layer.stride, layer.padding, layer.dilation)
    ]
    return (b, layer.groups * layer.weight[1], y, x), (b, layer.weight[0], *output)


def wrong_shapes(layer: Geometry, h: Shape, s: Shape) -> dict[str, tuple[Shape, Shape]]:
    """Shapes that do not fit the layer, by what is wrong."""
    last = 1 if layer.kind == "Conv2d" else -1  # any image is welcome
    wrong = {
        "h is longer": (_longer(h, last), s),
        "s is longer": (h, _longer(s, last)),
        "h has one more sample": (_longer(h, 0), s),
        "no axes": ((), ()),
        "one axis more": ((1, *h), s),
    }
    if layer.kind != "Linear":
        wrong["flat"] = (math.prod(h),), (math.prod(s),)
    return wrong


def _longer(shape: Shape, axis: int) -> Shape:
    longer = list(shape)
    longer[axis] += 1
    return tuple(longer)
