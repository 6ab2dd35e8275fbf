"""inf and NaN in raw moments: what becomes of the factors, and what is counted."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import (
    CPU,
    CUDA,
    EXAMPLES,
    RAW,
    Case,
    Device,
    cases,
    example_id,
    make,
    numpy_of,
    pair_of_layers,
    refuses,
    same_bits,
    seeds,
    take,
)
from hypothesis import given
from hypothesis import strategies as st
from loops import expected

from cafin_cupy import (
    AdaFisher,
    Averaging,
    BatchNorm2d,
    CafinValueError,
    Conv2d,
    Embedding,
    LayerNorm,
    Linear,
    reference,
)

INF, NAN = math.inf, math.nan
RULES = [Averaging.parity(), Averaging.paper(), Averaging(0.5, 0.25, "before"), Averaging(0.9, 0.3, "after")]
FLOAT32 = Device("numpy", "reference", "float32", 1e-6)  # the arithmetic of the kernels
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


Places = list[tuple[int, int, int]]  # in h or s, where, which value
PLACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**30), st.integers(0, 4)), max_size=4)


def batches(case: Case, seed: int, places: Places, huge: float) -> list[tuple[Array, Array]]:
    """(h, s) of three steps, the second with inf, NaN and large numbers at some places.

    Whole numbers have exact sums in any order, and beside 2^40 the small ones vanish in any order. Its square is
    finite, that of `huge` is not. Both are positive: of both signs the order would decide what a sum is. The indices
    that an embedding reads stay as they are.
    """
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(-4, 5, case.h).astype(float), rng.integers(-4, 5, case.s).astype(float)) for _ in range(3)]
    if case.kind is Embedding:
        steps = [(case.data(seed + step)[0], s) for step, (_, s) in enumerate(steps)]
    for array, index, which in places:
        flat = steps[1][1 if case.kind is Embedding else array].reshape(-1)
        flat[index % flat.size] = [NAN, INF, -INF, 2.0**40, huge][which]
    return steps


class Followed(NamedTuple):
    """A layer after a step: its factors, those that enter the preconditioner, and the count."""

    H: Array
    S: Array
    H_effective: Array
    S_effective: Array
    skipped: int


def follow(device: Device, case: Case, rule: Averaging, steps: list[tuple[Array, Array]]) -> list[Followed]:
    """The first of two layers after each step. The other sees the data of the first step always, and goes its way."""
    (opt, _), (alone, _) = (pair_of_layers(device, case, rule) for _ in range(2))
    found = []
    for pair in steps:
        take(opt, device, pair, steps[0])
        take(alone, device, steps[0], steps[0])
        state = opt._factors
        arrays = [numpy_of(F[0]) for F in (state.H, state.S, state.H_effective, state.S_effective)]
        found.append(Followed(*arrays, opt.skipped_refreshes()["0"]))
        for mine, theirs in zip(opt.factors()["1"], alone.factors()["1"]):
            same_bits(mine, theirs)
        assert opt.skipped_refreshes()["1"] == 0
    return found


def slack(x: Array, rounding: float) -> float:
    """What an error of `rounding` in moments becomes by normalisation."""
    x = np.where(np.isinf(x), 1.0, x)
    return rounding + min(1.0, rounding * np.max(x) / (np.max(x) - np.min(x) + 1e-6))


def by_hand(F: Array, raw: Array, rule: Averaging) -> Array:
    """One moment of the average."""
    x = [1.0 if v == INF else 0.0 if v == -INF else float(v) for v in raw]
    if rule.normalize == "before":
        low, high = min(x), max(x)
        x = [(v - low) / (high - low + 1e-6) for v in x]
    return np.array([rule.keep * f + rule.add * v for f, v in zip(F, x)])


@given(cases, seeds, PLACES, st.sampled_from(RULES))
def test_the_reference_follows_loops(case: Case, seed: int, places: Places, rule: Averaging) -> None:
    """A NaN leaves both factors of its layer alone, and is counted; inf counts as 1."""
    with np.errstate(all="ignore"):
        steps = batches(case, seed, places, 2.0**600)
        found = follow(CPU, case, rule, steps)
        H, S, skipped, error = np.ones(case.layer().H_size), np.ones(case.layer().S_size), 0, 0.0
        for pair, layer in zip(steps, found):
            raw = expected(case, *pair)
            if any(math.isnan(v) for moment in raw for v in moment):
                skipped += 1
            else:
                H, S = by_hand(H, raw[0], rule), by_hand(S, raw[1], rule)
                error = max(error, *(slack(moment, 1e-14) for moment in raw))
            assert layer.skipped == skipped
            np.testing.assert_allclose(layer.H, H, rtol=1e-12, atol=error)
            np.testing.assert_allclose(layer.S, S, rtol=1e-12, atol=error)
            for F in layer[:4]:
                assert np.all(np.isfinite(F) & (F >= 0))


@pytest.mark.gpu
@given(cases, seeds, PLACES, st.sampled_from(RULES))
def test_kernels_follow_the_reference(case: Case, seed: int, places: Places, rule: Averaging) -> None:
    with np.errstate(all="ignore"):
        steps = batches(case, seed, places, 2.0**70)
        error = 0.0
        for pair, got, want in zip(
            steps, follow(CUDA, case, rule, steps), follow(FLOAT32, case, rule, steps), strict=True
        ):
            assert got.skipped == want.skipped
            # All sums are exact, but the squares of a norm layer's sums are added in another order.
            sums = reference.raw_sums(case.layer(), *(make("numpy", x) for x in pair))
            raw, _ = reference.raw_moments(case.layer(), sums)
            error = max(error, 0.0 if np.any(np.isnan(raw)) else slack(raw, 1e-6), slack(want.H, 1e-6))
            for name, mine, theirs in zip(Followed._fields, got, want):
                atol = error if case.layer().norm and name.startswith("H") else 1e-6
                np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=atol, err_msg=name)


LINEAR = Case(Linear, (3, 2), False, (4, 2), (4, 3))
CONV = Case(Conv2d, (2, 1, 1, 1), False, (1, 2, 3, 3), (1, 2, 2, 2), {"stride": 2, "groups": 2})
BATCH = Case(BatchNorm2d, (3,), True, (2, 3, 1, 1), (2, 3, 1, 1))
LAYER = Case(LayerNorm, (3,), True, (4, 1, 3), (4, 1, 3))
COMES = {  # of ones in h and s: what is changed, and the raw moments that are averaged; None: the factors stay
    "inf in a column": (LINEAR, {"s": {(1, 1): INF}}, ([1, 1], [1, 1, 1])),
    "inf of both signs, squared": (LINEAR, {"s": {(0, 1): INF, (1, 1): -INF}}, ([1, 1], [1, 1, 1])),
    "inf beside larger moments": (LINEAR, {"s": {(0, 0): INF, (0, 1): 8.0}}, ([1, 1], [1, 67 / 4, 1])),
    "nothing but inf": (LINEAR, {"h": {...: INF}, "s": {...: -INF}}, ([1, 1], [1, 1, 1])),
    "a NaN in h": (LINEAR, {"h": {(3, 1): NAN}}, None),
    "a NaN in s": (LINEAR, {"s": {(0, 2): NAN}}, None),
    "inf and a NaN": (LINEAR, {"h": {(0, 0): INF}, "s": {(0, 2): NAN}}, None),
    "inf in one group": (CONV, {"h": {(0, 1, 2, 2): -INF}}, ([1], [1, 1])),
    "a NaN in one group": (CONV, {"h": {(0, 1, 2, 2): NAN}}, None),
    "a NaN that no output sees": (CONV, {"h": {(0, 0, 1, 1): NAN}}, ([2], [1, 1])),
    "inf in a plain sum": (BATCH, {"h": {(0, 0, 0, 0): -INF}, "s": {(1, 2, 0, 0): -INF}}, ([1, 3 / 4], [2, 2, 1])),
    "inf of both signs in two channels": (BATCH, {"h": {(0, 0, 0, 0): INF, (0, 1, 0, 0): -INF}}, ([1, 3 / 4], [2] * 3)),
    "inf of both signs in a plain sum": (BATCH, {"s": {(0, 0, 0, 0): INF, (1, 0, 0, 0): -INF}}, None),
    "a plain sum beyond all numbers": (LAYER, {"s": {(..., 1): "largest"}}, ([16 / 9 / 16, 1 / 16], [4, 1, 4])),
    "a plain sum whose square is": (LAYER, {"h": {(0, 0, 0): "large"}}, ([1, 1 / 16], [4, 4, 4])),
}


@pytest.mark.parametrize("name", COMES)
def test_what_comes_and_what_counts(device: Device, name: str) -> None:
    case, changes, moments = COMES[name]
    numbers = np.finfo(device.dtype)
    named = {"largest": numbers.max, "large": float(numbers.max) ** 0.75}
    arrays = {"h": np.ones(case.h), "s": np.ones(case.s)}
    for array, values in changes.items():
        for place, value in values.items():
            arrays[array][place] = named.get(value, value)
    opt, _ = pair_of_layers(device, case, RAW)
    take(opt, device, (arrays["h"], arrays["s"]))
    assert opt.skipped_refreshes() == {"0": int(moments is None), "1": 0}
    for F, want in zip(opt.factors()["0"], moments or (1.0, 1.0)):
        np.testing.assert_allclose(numpy_of(F), np.broadcast_to(want, F.shape), rtol=2e-7)


def test_a_nan_in_one_of_two_calls_costs_the_refresh(device: Device) -> None:
    """Their sums are one."""
    opt, (layer, _) = pair_of_layers(device, LINEAR, RULES[0])
    h, s = np.ones(LINEAR.h), np.ones(LINEAR.s)
    opt.accumulate(layer, device.array(h), device.array(s))
    opt.accumulate(layer, device.array(h), device.array(s * NAN))
    take(opt, device)
    assert opt.skipped_refreshes() == {"0": 1, "1": 0}
    np.testing.assert_array_equal(numpy_of(opt.factors()["0"][1]), 1.0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_an_average_stays_finite_whatever_comes(device: Device, case: Case, rule: Averaging) -> None:
    """The largest moments there are, inf and NaN, again and again; then the average forgets them."""
    opt, _ = pair_of_layers(device, case, rule)
    h, s = case.data()
    largest = math.sqrt(float(np.finfo(device.dtype).max))
    for factor in (1e-3 * largest, 0.5 * largest, INF, largest, 0.5 * largest, NAN) * 2:
        take(opt, device, (h if case.kind is Embedding else np.full(case.h, factor), s * factor), (h, s))
        for F in (*opt._factors.H, *opt._factors.S):
            assert np.all(np.isfinite(numpy_of(F)) & (numpy_of(F) >= 0))
        for F in (*opt._factors.H_effective, *opt._factors.S_effective):
            assert np.all((numpy_of(F) >= 0) & (numpy_of(F) <= 1 + rule.add))
    assert opt.skipped_refreshes()["0"] >= 2
    if rule.normalize == "before":
        for _ in range(40):  # 0.5^40 = 1e-12
            take(opt, device, (h, s), (h, s))
        for mine, theirs in zip(opt.factors()["0"], opt.factors()["1"]):
            np.testing.assert_allclose(numpy_of(mine), numpy_of(theirs), rtol=1e-6, atol=1e-6)


# Counts


def counting(device: Device, **options: Any) -> AdaFisher:
    """After two skipped refreshes of layer 0 and one of layer 1."""
    opt, _ = pair_of_layers(device, LINEAR, RULES[0], **options)
    good, bad = (np.ones(LINEAR.h), np.ones(LINEAR.s)), (np.full(LINEAR.h, NAN), np.ones(LINEAR.s))
    for first, second in ((good, good), (bad, good), (bad, bad), (good, good)):
        take(opt, device, first, second)
    assert opt.skipped_refreshes() == {"0": 2, "1": 1}
    return opt


def test_counts_are_numbers_of_steps_that_sampled(device: Device) -> None:
    """Discarded sums and steps without a layer's sums count nothing."""
    opt = counting(device)
    opt.accumulate(opt._layers[0], device.array(np.full(LINEAR.h, NAN)), device.array(np.ones(LINEAR.s)))
    opt.discard()
    take(opt, device)
    assert opt.skipped_refreshes() == {"0": 2, "1": 1}


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
def test_copies_count_on_alone(device: Device, duplicate: Callable[[Any], Any]) -> None:
    opt = counting(device)
    twin = duplicate(opt)
    assert twin.skipped_refreshes() == {"0": 2, "1": 1}
    take(twin, device, (np.full(LINEAR.h, NAN), np.ones(LINEAR.s)))
    assert twin.skipped_refreshes() == {"0": 3, "1": 1}
    assert opt.skipped_refreshes() == {"0": 2, "1": 1}


def test_a_loaded_run_counts_from_zero(device: Device) -> None:
    opt = counting(device)
    state = copy.deepcopy(opt.state_dict())
    assert set(state) == {"steps", "momenta", "H", "S"}
    with pytest.raises(CafinValueError):
        opt.load_state_dict({**state, "steps": -1})
    assert opt.skipped_refreshes() == {"0": 2, "1": 1}
    opt.load_state_dict(state)
    assert opt.skipped_refreshes() == {"0": 0, "1": 0}


@pytest.mark.parametrize("key", ["H", "S"])
@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_a_state_with_broken_factors_is_refused(device: Device, key: str, value: float) -> None:
    opt = counting(device)
    state = copy.deepcopy(opt.state_dict())
    state[key][1][0] = value
    unchanged = [*opt.momenta, *(F for pair in opt.factors().values() for F in pair)]
    with refuses(CafinValueError, "load_state_dict", f"state['{key}'][1]", "finite numbers >= 0", unchanged=unchanged):
        opt.load_state_dict(state)
    assert opt.skipped_refreshes() == {"0": 2, "1": 1}
