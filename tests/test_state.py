"""State dicts of the optimizer on raw arrays with one entry altered: named and refused whole, or taken over whole."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from altered import ARRAYS, PLAIN, REMOVED, altered, is_array, named, paths, value_at
from array_api_compat import array_namespace
from helpers import Device, numpy_of, refuses, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from cafin_cupy import AdaFisher, CafinError, CafinTypeError, CafinValueError, Linear

SHAPES = ((3, 5), (3,), (2, 3), (7,))


def trained(device: Device, averaging: str, steps: int) -> AdaFisher:
    rng = np.random.default_rng(steps)
    params = [device.array(rng.normal(size=shape)) for shape in SHAPES]
    layers = [Linear(params[0], params[1], name="fc"), Linear(params[2])]
    opt = AdaFisher(params, layers, TCov=2, averaging=averaging, backend=device.backend)
    for _ in range(steps):
        for layer, widths in zip(layers, ((5, 3), (3, 2))):
            opt.accumulate(layer, *(device.array(rng.normal(size=(4, width))) for width in widths))
        opt.step([device.array(rng.normal(size=shape)) for shape in SHAPES])
    return opt


@cache
def kept(device: Device, averaging: str) -> tuple[AdaFisher, dict[str, Any]]:
    return trained(device, averaging, 4), copy.deepcopy(trained(device, averaging, 3).state_dict())


def everything(opt: AdaFisher) -> list[Any]:
    return [np.array(opt.steps), *opt._params, *opt.momenta, *(F for pair in opt.factors().values() for F in pair)]


def in_words(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


@pytest.mark.parametrize("averaging", ["parity", "paper"])
@settings(max_examples=5 * settings().max_examples)
@given(data=st.data())
def test_one_altered_entry_is_named_and_nothing_taken_over(device: Device, averaging: str, data: Any) -> None:
    opt, good = kept(device, averaging)
    path = data.draw(st.sampled_from(paths(good)))
    old = value_at(good, path)
    kinds = {**PLAIN, **(ARRAYS if is_array(old) else {})}
    kind = data.draw(st.sampled_from(sorted(kinds)))
    value = kinds[kind](array_namespace(old), old) if kind in ARRAYS else kinds[kind](old)
    given, before = altered(good, path, value), [numpy_of(a) for a in everything(opt)]
    kept_bits = [numpy_of(a) for key in ("momenta", "H", "S") for a in good[key]]
    try:
        opt.load_state_dict(given)
    except CafinError as error:
        name = named(str(error))
        if value is REMOVED and len(path) == 2:  # those behind it have moved up
            assert name in {in_words((path[0], index)) for index in range(path[1], 9)} | {in_words(path[:1])}
        else:
            assert name.startswith(in_words(path)) or in_words(path).startswith(name)
        for now, then in zip(everything(opt), before):
            same_bits(now, then)
    else:
        assert opt.steps == given["steps"]
        taken = opt.state_dict()
        for key in ("momenta", "H", "S"):
            for mine, theirs in zip(taken[key], given[key]):
                np.testing.assert_array_equal(numpy_of(mine), numpy_of(theirs).astype(numpy_of(mine).dtype))
        opt.step([device.zeros(*shape) for shape in SHAPES])
    for array, then in zip((a for key in ("momenta", "H", "S") for a in good[key]), kept_bits):
        same_bits(array, then)


FOREIGN = {
    "nothing": ({}, CafinValueError, "`state` must have the key 'steps'"),
    "None": (None, CafinTypeError, "`state` must be a mapping"),
    "a list": ([1, 2], CafinTypeError, "`state` must be a mapping"),
    "of a model": ({"weight": np.ones(3)}, CafinValueError, "`state` must have the key 'steps'"),
    "of the PyTorch optimizer": (
        {"state": {}, "param_groups": [], "H_D": [], "S_D": [], "steps": 3},
        CafinValueError,
        "`state` must have the key 'momenta'",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_state_is_refused(device: Device, name: str) -> None:
    given, kind, words = FOREIGN[name]
    opt = trained(device, "parity", 3)
    with refuses(
        kind, "load_state_dict", words, "it must come from AdaFisher's state_dict()", unchanged=everything(opt)
    ):
        opt.load_state_dict(given)  # type: ignore[arg-type]


def test_a_state_between_accumulate_and_step_is_that_of_the_last_step(device: Device) -> None:
    """As gradients are: a resumed run repeats the iteration. A copy of the optimizer is refused there."""
    opt, again = (trained(device, "parity", 2) for _ in range(2))
    rng = np.random.default_rng(5)
    calls = [(device.array(rng.normal(size=(4, 5))), device.array(rng.normal(size=(4, 3)))) for _ in range(2)]
    grads = [device.array(rng.normal(size=shape)) for shape in SHAPES]
    opt.accumulate(opt._layers[0], *calls[0])
    state = copy.deepcopy(opt.state_dict())
    again.accumulate(again._layers[0], *calls[1])  # forgotten when the state is loaded
    again.load_state_dict(state)
    again.accumulate(again._layers[0], *calls[0])
    for each in (opt, again):
        each.step(grads)
    for mine, theirs in zip(everything(opt), everything(again)):
        same_bits(mine, theirs)
