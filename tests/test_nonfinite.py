"""inf and NaN in moments and gradients: what becomes of factors, counts, momentum and parameters, and the option that
raises instead."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    CPU,
    CUDA,
    EXAMPLES,
    FRAMEWORKS,
    RAW,
    Case,
    Device,
    cases,
    example_id,
    make,
    numpy_of,
    refuses,
    same_bits,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st
from loops import expected

from cafin_cupy import (
    AdaFisher,
    Averaging,
    BatchNorm2d,
    CafinError,
    CafinValueError,
    Conv2d,
    LayerNorm,
    Linear,
    NonFiniteError,
    fused_step,
    reference,
)
from cafin_cupy.nonfinite import refuse_nonfinite

INF, NAN = math.inf, math.nan
RULES = [Averaging.parity(), Averaging.paper(), Averaging(0.5, 0.25, "before"), Averaging(0.9, 0.3, "after")]
FLOAT32 = Device("numpy", "reference", "float32", 1e-6)  # the arithmetic of the kernels
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


# Moments

Places = list[tuple[int, int, int]]  # in h or s, where, which value
PLACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**30), st.integers(0, 4)), max_size=4)


def batches(case: Case, seed: int, places: Places, huge: float) -> list[tuple[Array, Array]]:
    """(h, s) of three steps, the second with inf, NaN and large numbers at some places.

    Whole numbers have exact sums in any order, and beside 2^40 the small ones vanish in any order. Its square is
    finite, that of `huge` is not. Both are positive: of both signs the order would decide what a sum is.
    """
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(-4, 5, case.h).astype(float), rng.integers(-4, 5, case.s).astype(float)) for _ in range(3)]
    for array, index, which in places:
        flat = steps[1][array].reshape(-1)
        flat[index % flat.size] = [NAN, INF, -INF, 2.0**40, huge][which]
    return steps


class Followed(NamedTuple):
    """A layer after a step: its factors, those that enter the preconditioner, and the count."""

    H: Array
    S: Array
    H_effective: Array
    S_effective: Array
    skipped: int


def pair_of_layers(device: Device, case: Case, rule: Averaging, **options: Any) -> tuple[AdaFisher, list[Any]]:
    layers = [case.layer(lambda shape: device.zeros(*shape)) for _ in range(2)]
    params = [layer.weight for layer in layers]
    return AdaFisher(params, layers, averaging=rule, TCov=1, backend=device.backend, **options), layers


def take(opt: AdaFisher, device: Device, *pairs: tuple[Array, Array]) -> None:
    """A step in which the layers see (h, s), and gradients are 0."""
    for layer, pair in zip(opt._layers, pairs):
        opt.accumulate(layer, *map(device.array, pair))
    opt.step([device.zeros(*layer.weight.shape) for layer in opt._layers])


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
            sums = reference.raw_sums(case.layer(), *(np.float32(x) for x in pair))
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
        take(opt, device, (np.full(case.h, factor), s * factor), (h, s))
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


# Gradients


class Scalars(NamedTuple):
    lr: float
    beta: float
    weight_decay: float
    decoupled: bool


SCALARS = st.builds(
    Scalars, st.sampled_from([0.0, 0.25]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.125]), st.booleans()
)
VALUES = st.sampled_from([NAN, INF, -INF, 2.0**80, -(2.0**80), 0.0])


def moved(p: float, g: float, m: float, F: float, x: Scalars) -> tuple[float, float]:
    """The formulas of the update for one element, in float64, where a term whose coefficient is 0 is left out."""
    term = lambda coefficient, value: coefficient * value if coefficient else 0.0  # noqa: E731
    slope = g + term(0.0 if x.decoupled else x.weight_decay, p)
    m = term(x.beta, m) + (1 - x.beta) * slope
    return p - (x.lr / (1 - x.beta**2) * m / F + term(x.lr * x.weight_decay if x.decoupled else 0.0, p)), m


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(SCALARS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 14), VALUES), max_size=12), seeds, st.booleans())
def test_inf_and_nan_pass_by_the_formulas(
    framework: str, x: Scalars, places: list[tuple[int, int, float]], seed: int, factors: bool
) -> None:
    """Into their own elements, with their sign, and in the same way on every backend."""
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(3, 3, 5)).astype(np.float32)
    for array, index, value in places:
        arrays[array].reshape(-1)[index] = value
    H, S = rng.random(5, dtype=np.float32), rng.random(3, dtype=np.float32)
    p, g, m, *pair = (make(framework, a) for a in (*arrays, H, S))
    with np.errstate(all="ignore"):
        fused_step([p], [g], [m], [tuple(pair)] if factors else None, **x._asdict(), Lambda=0.01, step=2)
        got_p, got_m = numpy_of(p), numpy_of(m)
        for place in np.ndindex(3, 5):
            F = float(S[place[0]]) * float(H[place[1]]) + 0.01 if factors else 1.0
            values = [float(a[place]) for a in arrays]
            want_p, want_m = moved(*values, F, x)
            # Terms of opposite signs cancel: an error is relative to the sum of their sizes.
            sizes = [abs(v) if math.isfinite(v) else 0.0 for v in values]
            size_p, size_m = moved(*sizes, F, x)
            np.testing.assert_allclose(got_m[place], want_m, rtol=0, atol=1e-6 * size_m)
            np.testing.assert_allclose(got_p[place], want_p, rtol=0, atol=1e-6 * (2 * sizes[0] - size_p))


def test_a_step_is_finite_where_its_result_is(device: Device) -> None:
    """Scaled before it is divided by F: momentum / F alone would be beyond all numbers of float32."""
    largest = float(np.finfo(device.dtype).max)
    p, g, m = (device.array(x) for x in ([0.0], [largest / 30], [0.0]))
    pair = device.array([0.0]), device.array([1.0])
    fused_step([p], [g], [m], [pair], lr=1e-3, Lambda=1e-3, backend=device.backend)
    np.testing.assert_allclose(numpy_of(p), [-largest / 30], rtol=1e-5)


def test_jax_arrays_follow_too() -> None:
    """A beta of 0 drops a momentum that is not finite."""
    p, g, m = (make("jax", x) for x in ([1.0, 2.0, 3.0], [1.0, INF, 1.0], [NAN, 1.0, INF]))
    p, m = reference.update(p, g, m, lr=0.5, beta=0.0)
    np.testing.assert_array_equal(numpy_of(m), [1.0, INF, 1.0])
    np.testing.assert_array_equal(numpy_of(p), [0.5, -INF, 2.5])


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_gradients_poison_what_they_poison_in_sgd(device: Device, beta: float, weight_decay: float) -> None:
    """Five steps, of which the second brings inf and NaN: the same elements of parameters and momenta as those of
    torch.optim.SGD are finite after each, and all others are what they would have been."""
    shapes, places = [(5, 3), (5,), (7,)], [[(0, 2, NAN), (0, 7, INF), (1, 4, -INF)], [(0, 7, -INF), (2, 3, NAN)]]
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape) for shape in shapes]
    theirs = [torch.tensor(a, dtype=torch.float32) for a in start]
    sgd = torch.optim.SGD(theirs, lr=0.01, momentum=beta, dampening=beta, weight_decay=weight_decay)
    runs = []
    for _ in range(2):
        params = [device.array(a) for a in start]
        layer = Linear(params[0], params[1])
        options = {"lr": 0.01, "beta": beta, "weight_decay": weight_decay, "backend": device.backend}
        runs.append((AdaFisher(params, [layer], **options), params))
    (opt, params), (clean, expected_params) = runs
    dirty = [np.zeros(shape, bool) for shape in shapes]
    for t in range(5):
        grads = [rng.normal(size=shape) for shape in shapes]
        clean.step([device.array(g) for g in grads])
        for index, place, value in places[t - 1] if t in (1, 2) else []:
            grads[index].reshape(-1)[place] = value
            dirty[index].reshape(-1)[place] = True
        opt.step([device.array(g) for g in grads])
        for p, g in zip(theirs, grads):
            p.grad = torch.tensor(g, dtype=torch.float32)
        sgd.step()
        for index, (p, m) in enumerate(zip(params, opt.momenta)):
            np.testing.assert_array_equal(np.isfinite(numpy_of(p)), np.isfinite(theirs[index].numpy()))
            np.testing.assert_array_equal(np.isfinite(numpy_of(p)), ~dirty[index])
            if beta:
                buffer = sgd.state[theirs[index]]["momentum_buffer"]
                np.testing.assert_array_equal(np.isfinite(numpy_of(m)), np.isfinite(buffer.numpy()))
            for mine, other in ((p, expected_params[index]), (m, clean.momenta[index])):
                same_bits(numpy_of(mine)[~dirty[index]], numpy_of(other)[~dirty[index]])


# The option


def raising(device: Device, **options: Any) -> tuple[AdaFisher, Any, list[Any]]:
    """(optimizer after a step, its layer, its parameters)."""
    rng = np.random.default_rng(1)
    params = {"w": device.array(rng.normal(size=(3, 2))), "free": device.array(rng.normal(size=4))}
    layer = Linear(params["w"], name="fc")
    options = {"TCov": 2, "backend": device.backend, "error_if_nonfinite": True, **options}
    opt = AdaFisher(params, [layer], **options)
    opt.accumulate(layer, *map(device.array, LINEAR.data(1)))
    opt.step(gradients(device))
    return opt, layer, list(params.values())


def gradients(device: Device, name: str = "", value: float = 0.0, seed: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    grads = {"w": rng.normal(size=(3, 2)), "free": rng.normal(size=4)}
    if name:
        grads[name].reshape(-1)[-1] = value
    return {key: device.array(g) for key, g in grads.items()}


def state_of(opt: AdaFisher, params: list[Any]) -> list[Any]:
    return [*params, *opt.momenta, *opt.factors()["fc"], *opt._factors.skipped]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["w", "free"])
def test_a_gradient_that_is_not_finite_raises(device: Device, name: str, value: float) -> None:
    """Before anything has changed; and without that gradient the run goes on as if nothing had been."""
    (opt, layer, params), (other, other_layer, others) = raising(device), raising(device)
    for sampled in (False, True):
        assert opt.samples == sampled
        for mine, at in ((opt, layer), (other, other_layer)):
            mine.accumulate(at, *map(device.array, LINEAR.data(3)))
        words = ("step", f"gradient of params['{name}']", "must be finite", "1 of", "discard()")
        with refuses(NonFiniteError, *words, unchanged=state_of(opt, params)):
            opt.step(gradients(device, name, value))
        assert opt._factors.pending == sampled and opt.steps == other.steps
        for mine in (opt, other):
            mine.step(gradients(device))
        for a, b in zip(state_of(opt, params), state_of(other, others)):
            same_bits(a, b)


@pytest.mark.parametrize("place, moment", [(0, "H"), (1, "S")])
@pytest.mark.parametrize("value", [NAN, INF])
def test_moments_that_are_not_finite_raise(device: Device, value: float, place: int, moment: str) -> None:
    """On sampled steps; after discard() the run goes on without that batch."""
    (opt, layer, params), (other, _, others) = raising(device), raising(device)
    bad = LINEAR.data(3)
    bad[place][0, 0] = value
    for sampled in (False, True):
        opt.accumulate(layer, *map(device.array, bad))
        if sampled:
            for _ in range(2):  # the sums stay
                words = ("step", f"`raw {moment} of fc` must be finite", "1 of", "discard()")
                with refuses(NonFiniteError, *words, unchanged=state_of(opt, params)):
                    opt.step(gradients(device))
            opt.discard()
        opt.step(gradients(device))
        other.step(gradients(device))
        for a, b in zip(state_of(opt, params), state_of(other, others)):
            same_bits(a, b)
    assert opt.skipped_refreshes() == {"fc": 0}


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_moments_are_looked_at_as_they_are_averaged(device: Device, case: Case) -> None:
    """Squares of a norm layer's sums too, though the sums are finite; and looking changes no bit of what comes."""
    (opt, _), (plain, _) = (pair_of_layers(device, case, RULES[1]) for _ in range(2))
    opt.error_if_nonfinite = True
    for seed in range(3):
        for mine in (opt, plain):
            for part in (seed, 10 + seed):
                for layer in mine._layers:
                    mine.accumulate(layer, *map(device.array, case.data(part)))
            take(mine, device)
    for mine, theirs in zip(opt._factors.H + opt._factors.S, plain._factors.H + plain._factors.S):
        same_bits(mine, theirs)
    h, s = case.data()
    opt.accumulate(opt._layers[1], device.array(h), device.array(s * float(np.finfo(device.dtype).max) ** 0.75))
    with pytest.raises(NonFiniteError, match=f"raw S of {case.kind.__name__}"):
        take(opt, device)


@given(cases, seeds)
def test_the_moments_looked_at_are_those_averaged(device: Device, case: Case, seed: int) -> None:
    """Of all groups of a convolution, and of the step's loss scale."""
    opt, (layer, _) = pair_of_layers(device, case, RAW)
    opt.accumulate(layer, *map(device.array, case.data(seed)))
    ((index, *raw),) = opt._factors.raw(4.0)
    opt.step([device.zeros(*layer.weight.shape) for layer in opt._layers], grad_scale=4.0)
    assert index == 0
    for F, moment in zip(opt.factors()["0"], raw):
        np.testing.assert_allclose(numpy_of(F), numpy_of(moment), rtol=1e-5)  # squares, added in another order


def test_an_error_is_one_of_each_kind() -> None:
    assert issubclass(NonFiniteError, CafinError) and issubclass(NonFiniteError, FloatingPointError)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fused_step_raises_too(framework: str) -> None:
    arrays = [np.ones((2, 3)), np.ones(4)]
    p, g, m = ([make(framework, a) for a in arrays] for _ in range(3))
    fused_step(p, g, m, lr=0.1, error_if_nonfinite=True)
    g[1][2] = INF
    words = ("fused_step", "gradient of params[1]", "1 of 4 elements")
    with refuses(NonFiniteError, *words, unchanged=[*p, *m]):
        fused_step(p, g, m, lr=0.1, error_if_nonfinite=True)
    fused_step(p, g, m, lr=0.1)
    assert not np.isfinite(numpy_of(p[1])[2]) and np.all(np.isfinite(numpy_of(p[0])))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("size", [1, 31, 1023, 2**20 + 3])
def test_no_place_is_overlooked(framework: str, size: int) -> None:
    """First, last and in between, however large the others are; and large numbers alone are finite."""
    x = make(framework, np.full(size, np.finfo(np.float32).max))
    none = make(framework, np.zeros(0))
    refuse_nonfinite("step", [("none", none), ("x", x)], "")
    for place in {0, size // 2, size - 1}:
        for value in (NAN, INF, -INF):
            kept, x[place] = float(x[place]), value
            with refuses(NonFiniteError, "`x`", f"1 of {size} elements"):
                refuse_nonfinite("step", [("none", none), ("x", x)], "")
            x[place] = kept
