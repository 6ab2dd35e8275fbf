"""inf and NaN in gradients: what becomes of momentum and parameters; and the option that raises instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    EXAMPLES,
    FRAMEWORKS,
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

from cafin_cupy import AdaFisher, Averaging, CafinError, Linear, NonFiniteError, fused_step, reference
from cafin_cupy.nonfinite import refuse_nonfinite

INF, NAN = math.inf, math.nan
LINEAR = Case(Linear, (3, 2), False, (4, 2), (4, 3))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


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
    (opt, _), (plain, _) = (pair_of_layers(device, case, Averaging.paper()) for _ in range(2))
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
