"""inf and NaN in gradients: what becomes of momentum and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    FRAMEWORKS,
    Device,
    make,
    numpy_of,
    same_bits,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy import (
    AdaFisher,
    Averaging,
    Linear,
    fused_step,
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
