"""Layer descriptors: sizes, what they hold, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import cases, refuses
from hypothesis import given

from cafin_cupy import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    CafinError,
    CafinTypeError,
    CafinValueError,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    SyncBatchNorm,
    TransposedLinear,
)
from cafin_cupy.layers import Layer

CHANNEL_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, InstanceNorm, SyncBatchNorm)
SIZES = [
    # kind, weight, options, then H and S sizes without a bias, and with one
    (Linear, (3, 5), {}, (5, 3), (6, 3)),
    (Linear, (1, 1), {}, (1, 1), (2, 1)),
    (TransposedLinear, (5, 3), {}, (5, 3), (6, 3)),
    (Conv2d, (4, 3, 2, 5), {}, (30, 4), (31, 4)),
    (Conv2d, (6, 1, 3, 3), {"groups": 3}, (9, 6), (10, 6)),
    (Conv1d, (4, 3, 5), {}, (15, 4), (16, 4)),
    (Conv3d, (6, 2, 3, 2, 1), {"groups": 3}, (12, 6), (13, 6)),
    (ConvTranspose1d, (4, 3, 5), {}, (4, 15), (5, 18)),
    (ConvTranspose2d, (6, 2, 3, 2), {"groups": 3}, (6, 12), (7, 18)),
    (ConvTranspose3d, (6, 1, 3, 2, 1), {"groups": 6}, (6, 6), (7, 12)),
    *((kind, (7,), {}, (2, 7), (2, 7)) for kind in CHANNEL_NORMS),
    (LayerNorm, (7,), {}, (2, 7), (2, 7)),
    (LayerNorm, (2, 3, 4), {}, (2, 24), (2, 24)),
]


@pytest.mark.parametrize(("kind", "weight", "options", "without", "with_bias"), SIZES)
def test_sizes(kind: type[Layer], weight: Any, options: Any, without: Any, with_bias: Any) -> None:
    w = np.zeros(weight)
    layer = kind(w, **options)
    assert (layer.H_size, layer.S_size) == without
    assert layer.width * layer.S_size == w.size  # the weight as an (S, H) matrix, or an (H, S) one
    layer = kind(w, np.zeros(layer.outputs), name="it", **options)
    assert (layer.H_size, layer.S_size) == with_bias
    assert (layer.label, layer.weight is w) == ("it", True)
    assert layer.H_size > layer.width  # an entry for the bias


def test_an_embedding_has_no_bias() -> None:
    layer = Embedding(np.zeros((9, 4)), padding_idx=-1)
    assert (layer.H_size, layer.S_size, layer.padding_idx) == (9, 4, 8)


@given(cases)
def test_columns_cover_the_arrays(case: Any) -> None:
    layer = case.layer()
    arrays = layer.read(*case.data())
    for columns, array in zip(layer.columns(*(x.shape for x in arrays)), arrays):
        assert columns.rows * columns.segments * columns.run == array.size


@given(cases)
def test_the_factors_of_a_weight_make_a_matrix_of_it(case: Any) -> None:
    """And those of a bias a column."""
    layer = case.layer()
    H, S = np.arange(layer.H_size), np.arange(layer.S_size)
    columns, rows = layer.of_weight(H, S)
    assert len(columns) * len(rows) == layer.weight.size
    if not layer.norm and layer.weight.ndim > 1:
        assert len(rows) == layer.weight.shape[0]
    if layer.bias is not None:
        columns, rows = layer.of_bias(H, S)
        assert (len(columns), len(rows)) == (1, layer.bias.size)
        assert (columns[0], rows[-1]) == (layer.H_size - 1, layer.S_size - 1)


def test_two_descriptors_are_equal_only_if_they_are_one() -> None:
    w = np.zeros((2, 2))
    a, b = Linear(w), Linear(w)
    assert a == a
    assert a != b
    assert len({a, b}) == 2


def test_descriptors_do_not_change() -> None:
    layer = Linear(np.zeros((2, 2)))
    with pytest.raises(AttributeError):
        layer.weight = np.ones((2, 2))  # type: ignore[misc]


def test_unnamed_layers_are_called_by_their_type() -> None:
    assert [kind(np.zeros(4)).label for kind in (BatchNorm2d, LayerNorm)] == ["BatchNorm2d", "LayerNorm"]


@pytest.mark.parametrize("pair", [2, (2, 2), [2, 2]])
def test_one_number_or_two(pair: Any) -> None:
    layer = Conv2d(np.zeros((1, 1, 3, 3)), stride=pair, padding=pair, dilation=pair)
    assert layer.stride == layer.padding == layer.dilation == (2, 2)
    assert Conv1d(np.zeros((1, 1, 3)), stride=2, padding=(2,)).stride == (2,)
    assert Conv3d(np.zeros((1, 1, 3, 3, 3)), stride=2).stride == (2, 2, 2)


IMAGE = (4, 2, 3, 3)
REFUSED = [
    (Linear, (3,), {}, ["weight", "(d_out, d_in)", "(3,)"]),
    (Linear, (3, 2, 1), {}, ["weight", "(d_out, d_in)", "(3, 2, 1)"]),
    (Linear, (3, 2), {"bias": np.zeros(2)}, ["bias", "3 elements", "(2,)"]),
    (Conv2d, (3, 2), {}, ["weight", "(C_out, C_in/groups, kh, kw)", "(3, 2)"]),
    (Conv2d, IMAGE, {"bias": np.zeros(2)}, ["bias", "4 elements", "(2,)"]),
    (Conv2d, IMAGE, {"stride": 0}, ["stride", ">= 1", "0"]),
    (Conv2d, IMAGE, {"stride": 1.5}, ["stride", "whole number", "1.5"]),
    (Conv2d, IMAGE, {"padding": -1}, ["padding", ">= 0", "-1"]),
    (Conv2d, IMAGE, {"padding": "same"}, ["padding", "whole number", "'same'"]),
    (Conv2d, IMAGE, {"dilation": (1, 2, 3)}, ["dilation", "two", "(1, 2, 3)"]),
    (Conv2d, IMAGE, {"dilation": True}, ["dilation", "whole number", "True"]),
    (Conv2d, IMAGE, {"groups": 3}, ["groups", "divides C_out = 4", "3"]),
    (Conv2d, IMAGE, {"groups": 0}, ["groups", "divides", "0"]),
    (Conv2d, IMAGE, {"groups": np.ones(2, int)}, ["groups", "divides", "array([1, 1])"]),
    (Conv2d, IMAGE, {"groups": np.ones(1)}, ["groups", "divides", "array([1.])"]),
    (Conv2d, IMAGE, {"stride": np.ones(2, int)}, ["stride", "whole number", "array([1, 1])"]),
    (Conv2d, IMAGE, {"padding": (np.zeros(2, int), 0)}, ["padding", "whole number", "array([0, 0])"]),
    (TransposedLinear, (3,), {}, ["weight", "(d_in, d_out)", "(3,)"]),
    (TransposedLinear, (3, 2), {"bias": np.zeros(3)}, ["bias", "2 elements", "(3,)"]),
    (Embedding, (3,), {}, ["weight", "(V, D)", "(3,)"]),
    (Embedding, (3, 2), {"bias": np.zeros(2)}, ["bias", "be None", "(2,)"]),
    (Embedding, (3, 2), {"padding_idx": 3}, ["padding_idx", "below V = 3", "3"]),
    (Embedding, (3, 2), {"padding_idx": -4}, ["padding_idx", "below V = 3", "-4"]),
    (Embedding, (3, 2), {"padding_idx": True}, ["padding_idx", "whole number", "True"]),
    (ConvTranspose2d, (3, 2), {}, ["weight", "(C_in, C_out/groups, kh, kw)", "(3, 2)"]),
    (ConvTranspose2d, IMAGE, {"groups": 3}, ["groups", "divides C_in = 4", "3"]),
    (ConvTranspose2d, IMAGE, {"bias": np.zeros(3)}, ["bias", "2 elements", "(3,)"]),
    (ConvTranspose2d, IMAGE, {"bias": np.zeros(2), "groups": 2}, ["bias", "4 elements", "(2,)"]),
    (Conv1d, (3, 2), {}, ["weight", "(C_out, C_in/groups, k)", "(3, 2)"]),
    (Conv1d, (3, 2, 1), {"stride": (1, 2)}, ["stride", "one of them", "(1, 2)"]),
    (Conv3d, (3, 2, 1, 1), {}, ["weight", "(C_out, C_in/groups, kd, kh, kw)", "(3, 2, 1, 1)"]),
    (Conv3d, (3, 2, 1, 1, 1), {"padding": (1, 2)}, ["padding", "three of them", "(1, 2)"]),
    *((kind, (3, 1), {}, ["weight", "(C,)", "(3, 1)"]) for kind in CHANNEL_NORMS),
    (RMSNorm, (), {}, ["weight", "at least one dimension", "()"]),
    (RMSNorm, (3,), {"bias": np.zeros(3)}, ["bias", "be None", "(3,)", "LayerNorm"]),
    (LayerNorm, (), {}, ["weight", "at least one dimension", "()"]),
    (LayerNorm, (2, 3), {"bias": np.zeros(3)}, ["bias", "6 elements", "(3,)"]),
]


@pytest.mark.parametrize(("kind", "weight", "options", "words"), REFUSED)
def test_refused_descriptors(kind: type[Layer], weight: Any, options: Any, words: list[str]) -> None:
    with refuses(CafinValueError, kind.__name__, f"`{words[0]}`", *words[1:]):
        kind(np.zeros(weight), **options)


NO_ARRAYS = [
    ((None,), "weight"),
    ((np.zeros((2, 2)), True), "bias"),
    ((np.ndarray,), "weight"),  # a class, a module and a nested tensor have something by the name of `shape`
    ((np,), "weight"),
    ((np.zeros((2, 2)), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)), "bias"),
]


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize(("arguments", "name"), NO_ARRAYS)
def test_what_is_no_array_is_refused(arguments: Any, name: str) -> None:
    with refuses(CafinTypeError, "Linear", f"`{name}`", "array", type(arguments[-1]).__name__):
        Linear(*arguments)


MISFITS = [
    (Linear(np.zeros((3, 5))), (4, 5), (4, 4)),
    (Linear(np.zeros((3, 5))), (4, 4), (4, 3)),
    (Linear(np.zeros((3, 5))), (4, 5), (5, 3)),
    (Linear(np.zeros((3, 5))), (2, 4, 5), (8, 3)),
    (Linear(np.zeros((3, 5))), (), ()),
    (TransposedLinear(np.zeros((5, 3))), (4, 3), (4, 5)),
    (Embedding(np.zeros((5, 3))), (4, 5), (4, 3)),
    (Embedding(np.zeros((5, 3))), (4,), (4, 5)),
    (Conv2d(np.zeros((4, 1, 3, 3)), groups=2), (1, 1, 5, 5), (1, 4, 3, 3)),
    (Conv2d(np.zeros((4, 2, 3, 3))), (2, 2, 5, 5), (1, 4, 3, 3)),
    (Conv2d(np.zeros((4, 2, 3, 3))), (2, 2, 5, 5), (2, 3, 3, 3)),
    (Conv2d(np.zeros((4, 2, 3, 3))), (2, 5, 5), (4, 3, 3)),
    (Conv1d(np.zeros((4, 2, 3))), (2, 2, 5, 5), (2, 4, 3, 3)),
    (ConvTranspose2d(np.zeros((4, 2, 3, 3))), (2, 2, 5, 5), (2, 4, 7, 7)),
    (ConvTranspose2d(np.zeros((4, 2, 3, 3)), groups=2), (2, 4, 5, 5), (2, 2, 7, 7)),
    (Conv3d(np.zeros((4, 2, 3, 3, 3))), (2, 2, 5, 5), (2, 4, 3, 3)),
    (BatchNorm1d(np.zeros(3)), (2, 3, 4, 4), (2, 3, 4, 4)),
    (BatchNorm3d(np.zeros(3)), (2, 3, 4, 4), (2, 3, 4, 4)),
    (GroupNorm(np.zeros(3)), (3,), (3,)),
    (InstanceNorm(np.zeros(3)), (2, 4, 5), (2, 4, 5)),
    (BatchNorm2d(np.zeros(3)), (2, 3, 4), (2, 3, 4)),
    (BatchNorm2d(np.zeros(3)), (2, 4, 5, 5), (2, 4, 5, 5)),
    (BatchNorm2d(np.zeros(3)), (2, 3, 5, 5), (2, 3, 5, 4)),
    (LayerNorm(np.zeros(3)), (3,), (3,)),
    (LayerNorm(np.zeros((2, 3))), (5, 3), (5, 3)),
    (LayerNorm(np.zeros((2, 3))), (5, 3, 2), (5, 3, 2)),
    (LayerNorm(np.zeros(3)), (5, 3), (4, 3)),
]


@pytest.mark.parametrize(("layer", "h", "s"), MISFITS, ids=lambda value: getattr(value, "label", str(value)))
def test_arrays_that_do_not_fit(layer: Layer, h: Any, s: Any) -> None:
    with refuses(CafinValueError, f"accumulate: `h, s of {layer.label}` must have shape", f"got {h} and {s}", "pass"):
        layer.check(h, s)


def test_every_error_is_caught_by_the_base_class_and_by_its_builtin() -> None:
    for builtin in (CafinError, ValueError):
        with pytest.raises(builtin):
            Linear(np.zeros(3))


@pytest.mark.parametrize("name", [["fc"], 1, b"fc", {}])
def test_names_are_strings(name: Any) -> None:
    with refuses(CafinTypeError, "Linear: `name` must be a string or None, got"):
        Linear(np.zeros((3, 5)), name=name)
