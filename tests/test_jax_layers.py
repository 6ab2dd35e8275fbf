"""Layers by name: which can be, and which calls of them; all others are refused."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import refuses
from jax_helpers import one

from cafin_cupy import CafinTypeError, CafinValueError
from cafin_cupy.adapters.jax import ChannelNorm, Conv, Dense, LayerNorm, Layers, tap

LAYERS = one(Dense, (5, 5), (5,))
X = jnp.ones((8, 5))


def test_layers_are_a_mapping_with_a_place_for_each_factor() -> None:
    params = {"a": {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3)}, "c": [jnp.zeros((2, 3, 3, 4, 6)), jnp.zeros(7)]}
    layers = Layers(
        params,
        {
            "dense": Dense(weight="a/w", bias="a/b"),
            "conv": Conv(weight="c/0", stack=1),
            "norm": ChannelNorm(weight="c/1"),
        },
    )
    assert repr(layers) == "Layers(dense: Dense, conv: Conv, norm: ChannelNorm)"
    assert list(layers) == ["dense", "conv", "norm"] and len(layers) == 3
    assert layers.size == (6 + 3) + 2 * (36 + 6) + (2 + 7)
    assert [bound.start for bound in layers.values()] == [0, 9, 93]
    assert {path: name for path, (name, _) in layers.uses.items()} == {
        "a/w": "dense",
        "a/b": "dense",
        "c/0": "conv",
        "c/1": "norm",
    }
    assert {name: [x.shape for x in taps] for name, taps in layers.zeros().items()} == {
        "dense": [(5,), (3,), ()],
        "conv": [(2, 36), (2, 6), (2,)],
        "norm": [(7,), (7,), ()],
    }


TREE = {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3), "k": jnp.zeros((3, 3, 2, 4)), "x": jnp.zeros((2, 2, 2, 2, 2, 2))}
BAD_LAYERS: dict[str, tuple[Any, type, tuple[str, ...]]] = {
    "no layer": ({"a": "w"}, CafinTypeError, ("layers['a']", "be a Layer", "str")),
    "no such path": ({"a": Dense(weight="v")}, CafinValueError, ("layers['a']", "'v'", "there are b, k, w")),
    "no such bias": ({"a": Dense(weight="w", bias="c")}, CafinValueError, ("layers['a']", "'c'")),
    "shared": (
        {"a": Dense(weight="w"), "c": Dense(weight="w")},
        CafinValueError,
        ("layers['c']", "'w' of 'a'", "tap one layer at both places"),
    ),
    "bias of another length": ({"a": Dense(weight="w", bias="x")}, CafinValueError, ("`x`", "3 entries")),
    "a vector as matrix": ({"a": Dense(weight="b")}, CafinValueError, ("Dense", "`inputs`", "(3,)")),
    "a matrix as images": ({"a": Conv(weight="w")}, CafinValueError, ("Conv", "one to three axes", "w of shape")),
    "four axes": ({"a": Conv(weight="x")}, CafinValueError, ("Conv", "one to three axes", "x of shape")),
    "groups": ({"a": Conv(weight="k", groups=3)}, CafinValueError, ("`groups`", "divides C_out = 4", "3")),
    "stride": ({"a": Conv(weight="k", stride=0)}, CafinValueError, ("`stride`", ">= 1")),
    "stride of one axis": ({"a": Conv(weight="k", stride=(1,))}, CafinValueError, ("`stride`", "two of them")),
    "padding": ({"a": Conv(weight="k", padding="REFLECT")}, CafinValueError, ("Conv", "`padding`", "REFLECT")),
    "padding of one axis": ({"a": Conv(weight="k", padding=(1,))}, CafinValueError, ("Conv", "`padding`", "2 axes")),
    "padding below 0": ({"a": Conv(weight="k", padding=-1)}, CafinValueError, ("Conv", "`padding`", "-1")),
    "padding of text": ({"a": Conv(weight="k", padding=("a", "b"))}, CafinValueError, ("Conv", "`padding`")),
    "stack": ({"a": Dense(weight="w", stack=1)}, CafinValueError, ("Dense", "`inputs`")),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_layers_that_cannot_be_are_refused(case: str) -> None:
    layers, kind, words = BAD_LAYERS[case]
    with refuses(kind, *words):
        Layers(TREE, layers)


BAD_OPTIONS = [
    (Dense, {"stack": -1}, CafinValueError, ("`stack`", ">= 0", "-1")),
    (Dense, {"inputs": 0}, CafinValueError, ("`inputs`", ">= 1", "0")),
    (Dense, {"input_major": "no"}, CafinTypeError, ("`input_major`", "True or False", "'no'")),
    (Dense, {"weight": None}, CafinTypeError, ("`weight`", "path", "NoneType")),
    (Dense, {"bias": 3}, CafinTypeError, ("`bias`", "path", "int")),
    (Conv, {"groups": 1.5}, CafinValueError, ("`groups`", "1.5")),
    (Conv, {"channels_last": None}, CafinTypeError, ("`channels_last`", "None")),
    (ChannelNorm, {"batched": "yes"}, CafinTypeError, ("`batched`", "'yes'")),
    (LayerNorm, {"length": 0}, CafinValueError, ("`length`", ">= 1", "0")),
]


@pytest.mark.parametrize(("layer", "options", "kind", "words"), BAD_OPTIONS)
def test_options_that_cannot_be_are_refused(layer: Any, options: Any, kind: type, words: tuple[str, ...]) -> None:
    with refuses(kind, layer.__name__, *words):
        layer(**{"weight": "w", **options})


BAD_CALLS: dict[str, tuple[Layers, tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {
    "dense, width": (one(Dense, (5, 3)), (4, 6), (4, 3), ("tap", "of w", "(4, 6)")),
    "dense, rows": (one(Dense, (5, 3)), (4, 5), (5, 3), ("tap", "of w")),
    "conv, channels": (one(Conv, (3, 3, 2, 4)), (4, 5, 5, 3), (4, 5, 5, 4), ("tap", "of w")),
    "conv, no batch of images": (one(Conv, (3, 3, 2, 4)), (4, 2), (4, 4), ("tap", "of w")),
    "norm, channels": (one(ChannelNorm, (3,)), (4, 5), (4, 5), ("tap", "of w")),
    "layer norm, another length": (one(LayerNorm, (3,), length=5), (4, 6, 3), (4, 6, 3), ("tap", "axis 1 of 5")),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_calls_that_do_not_fit_are_refused_in_the_forward_pass(case: str) -> None:
    """Where the traceback still shows the layer's call, taps differentiated or not."""
    layers, h, y, words = BAD_CALLS[case]
    with refuses(CafinValueError, *words):
        jax.eval_shape(lambda: tap(layers["layer"], jnp.zeros(h), jnp.zeros(y), layers.zeros()["layer"]))


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        (None, ("taps", "NoneType")),
        ({}, ("taps", "[]", "['layer']")),
        ({"layer": 0.0}, ("taps['layer']", "float")),
    ],
)
def test_taps_that_are_none_are_refused(taps: Any, words: tuple[str, ...]) -> None:
    with refuses(CafinTypeError, *words):
        LAYERS.check("tapped", "taps", taps)


def test_a_layer_that_is_none_is_refused() -> None:
    with refuses(CafinTypeError, "tap", "`layer`", "Dense", "layers[name]"):
        tap(Dense(weight="w"), X, X, LAYERS.zeros()["layer"])  # type: ignore[arg-type]
    with refuses(CafinTypeError, "tap", "`t`", "dict", "layers.zeros()"):
        tap(LAYERS["layer"], X, X, LAYERS.zeros())  # type: ignore[arg-type]


def test_parameters_whose_paths_read_alike_are_refused() -> None:
    """Both would get the factors of one."""
    params = {"a/b": jnp.ones((2, 2)), "a": {"b": jnp.ones((2, 2))}, "c": jnp.ones((2, 2))}
    with refuses(CafinValueError, "layers['d']", "'a/b'", "rename"):
        Layers(params, {"d": Dense(weight="a/b")})
    assert Layers(params, {"d": Dense(weight="c")}).size == 4


def test_a_key_named_value_is_a_key() -> None:
    """An attribute of this name, as Flax's NNX has it behind parameters, is not."""
    assert set(Layers({"a": {"value": jnp.ones((2, 2))}}, {"d": Dense(weight="a/value")}).uses) == {"a/value"}


def test_layers_are_pickled_and_copied() -> None:
    for copy in (pickle.loads(pickle.dumps(LAYERS)), deepcopy(LAYERS)):
        assert repr(copy) == repr(LAYERS) and copy.uses == LAYERS.uses
        copy.check("tapped", "taps", LAYERS.zeros())
