"""The update of parameters and momenta of 16 bits: arithmetic in float32, results rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy.arrays import view
from cafin_cupy.cuda_update import CudaUpdate, Layout, scalars
from cafin_cupy.rule import Hyper

TYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = [  # parameter and gradient, momentum, whether float32 weights are kept
    *[("float32", momentum, False) for momentum in TYPES],
    *[(dtype, momentum, False) for dtype in ("bfloat16", "float16") for momentum in ("float32", dtype)],
    *[(dtype, "float32", True) for dtype in ("bfloat16", "float16")],
]
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # distance of neighbours, relative


class Problem:
    """Parameters with everything an update needs, on the host and on the device."""

    def __init__(self, specs: list[tuple[str, str, bool, int, int, int]], seed: int = 0) -> None:
        import cupy

        rng = np.random.default_rng(seed)
        self.specs = specs
        self.host: list[dict[str, Any]] = []
        self.device: list[dict[str, Any]] = []
        for dtype, momentum, whole, rows, columns, offset in specs:
            n = rows * columns
            w = rng.standard_normal(n).astype(np.float32)
            arrays = {
                "p": w.astype(TYPES[dtype]),
                "g": rng.standard_normal(n).astype(TYPES[dtype]),
                "m": rng.standard_normal(n).astype(TYPES[momentum]),
                "w": w if whole else None,
                "H": rng.uniform(0, 1, columns).astype(np.float32),
                "S": rng.uniform(0, 1, rows).astype(np.float32),
            }
            self.host.append(arrays)
            placed = {}
            for name, x in arrays.items():
                bits = None if x is None else x.view(np.uint16 if x.itemsize == 2 else np.uint32)
                shift = offset if name in "pgm" else 0
                placed[name] = (
                    None
                    if bits is None
                    else cupy.asarray(np.concatenate([bits[:0].repeat(0), np.zeros(shift, bits.dtype), bits]))[shift:]
                )
            self.device.append(placed)

    def update(self, hyper: Hyper, step: int, noise: int = 0) -> None:
        def at(name: str) -> list[int]:
            return [0 if d[name] is None else view(d[name]).ptr for d in self.device]

        layouts = [Layout(r * c, c, 0, 0, dtype, momentum) for dtype, momentum, _, r, c, _ in self.specs]
        factors = list(zip(at("H"), at("S")))
        launch = CudaUpdate(layouts, factors, self.device[0]["H"], 0, at("w"))
        sets = [(*scalars(hyper, step)[:-1], noise)]
        launch(at("p"), at("g"), at("m"), sets, [0] * len(layouts), 0)

    def result(self, k: int, name: str) -> Any:
        bits = self.device[k][name].get()
        kind = {"p": self.specs[k][0], "m": self.specs[k][1], "w": "float32"}[name]
        return bits.view(TYPES[kind])


def expected(arrays: dict[str, Any], hyper: Hyper, step: int) -> tuple[Any, Any]:
    """(new weight, new momentum) in float64."""
    w = arrays["p"] if arrays["w"] is None else arrays["w"]
    p, g, m = (x.astype(np.float64) for x in (w, arrays["g"], arrays["m"]))
    F = np.outer(arrays["S"].astype(np.float64), arrays["H"]).ravel() + hyper.Lambda
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = hyper.beta * m + (1 - hyper.beta) * g
    step_size = hyper.lr / (1 - hyper.beta**step)
    return p - step_size * m / F - (hyper.lr * hyper.weight_decay * p if hyper.decoupled else 0), m


def check(problem: Problem, hyper: Hyper, step: int) -> None:
    """Half a unit in the last place for the rounding, and a few of float32 for the arithmetic."""
    for k, (arrays, (dtype, momentum, whole, *_)) in enumerate(zip(problem.host, problem.specs)):
        w, m = expected(arrays, hyper, step)
        size = np.abs(w).max() + np.abs(m).max() / hyper.Lambda * hyper.lr
        for name, want, kind in (("p", w, dtype), ("m", m, momentum), *([("w", w, "float32")] if whole else [])):
            got = problem.result(k, name).astype(np.float64)
            slack = EPSILON[kind] / 2 * (np.abs(want) + 1e-7) + 2.0**-20 * size
            if kind == "float16":
                slack = slack + 2.0**-25  # denormals have fewer digits
            assert np.all(np.abs(got - want) <= slack), (k, name, np.abs(got - want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_against_float64(kind: tuple[str, str, bool], offset: int, decoupled: bool) -> None:
    """Sizes below and above a chunk, with tails; aligned, and not."""
    hyper = Hyper(0.1, 0.9, 0.5, 0.01, decoupled)
    problem = Problem([(*kind, *shape, offset) for shape in ((1, 1), (3, 5), (61, 17), (70, 64), (1, 9001))])
    problem.update(hyper, 3)
    check(problem, hyper, 3)


@pytest.mark.gpu
def test_kinds_share_a_launch() -> None:
    hyper = Hyper(0.1, 0.9, 0.5, 0.0, False)
    problem = Problem([(*kind, 9, 41, k % 3) for k, kind in enumerate(KINDS)])
    problem.update(hyper, 1)
    check(problem, hyper, 1)


@pytest.mark.gpu
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 40), st.integers(0, 7)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 50),
)
def test_any_shapes(drawn: list[Any], step: int) -> None:
    hyper = Hyper(0.01, 0.5, 1.0, 0.1, True)
    problem = Problem([(*kind, r, c, offset) for kind, r, c, offset in drawn], step)
    problem.update(hyper, step)
    check(problem, hyper, step)


@pytest.mark.gpu
def test_special_numbers_survive_rounding() -> None:
    """NaN stays NaN and the largest numbers become infinite, in both 16-bit types and in momentum."""
    special = np.array([np.nan, 3.4e38, -3.4e38, 65519.0, 65521.0, 1e-8, 0.0, -0.0], np.float32)
    for dtype in ("bfloat16", "float16"):
        problem = Problem([(dtype, "float32", True, 1, special.size, 0)])
        with np.errstate(over="ignore"):
            want = special.astype(TYPES[dtype])
        problem.device[0]["w"][...] = _device(special.view(np.uint32))
        problem.device[0]["p"][...] = _device(want.view(np.uint16))
        problem.device[0]["m"][...] = problem.device[0]["m"] * 0
        problem.update(Hyper(0.0, 0.0, 1.0, 0.0, False), 1)
        got = problem.result(0, "p")
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def _device(x: Any) -> Any:
    import cupy

    return cupy.asarray(x)


@pytest.mark.gpu
def test_random_rounding_is_right_on_average_and_repeats() -> None:
    """Both neighbours, no third; the mean error of n roundings is 1 / sqrt(12 n) of their distance, here within 5 of
    these."""
    n = 100_000
    hyper = Hyper(2.0**-10, 0.0, 1.0, 0.0, False)
    results = []
    for noise in (7, 7, 8):
        problem = Problem([("bfloat16", "float32", False, 1, n, 0)])
        problem.device[0]["H"][...] = 0
        problem.device[0]["p"][...] = _device(np.full(n, 1.5, ml_dtypes.bfloat16).view(np.uint16))
        problem.device[0]["g"][...] = _device(np.full(n, 2.0, ml_dtypes.bfloat16).view(np.uint16))
        problem.update(hyper, 1, noise)  # to 1.5 - 2^-9, a quarter of the distance of 2^-7 below 1.5
        results.append(problem.result(0, "p").astype(np.float64))
    assert set(results[0]) == {1.5, 1.5 - 2.0**-7}
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])
    for got in results:
        assert abs((got == 1.5).mean() - 0.75) < 5 * 0.5 / np.sqrt(n)
    down = results[0] != 1.5
    assert abs(np.corrcoef(down[:-1], down[1:])[0, 1]) < 5 / np.sqrt(n)
