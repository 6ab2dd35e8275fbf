"""`AdaFisher.curvature` against F and update spelled out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import EXAMPLES, FRAMEWORKS, Case, Device, example_id, make, numpy_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cafin_cupy import AdaFisher, CafinError, Linear, curvature
from cafin_cupy.curvature import FIELDS, Curvature
from cafin_cupy.layers import Layer

CLOSE = 1e-12  # all is float64 from the stored numbers on; some thousand terms


def expected(opt: AdaFisher, p: Any, m: Any, F: Any) -> dict[str, float]:
    """The five numbers of a parameter; `F` of its shape."""
    p, m = (numpy_of(x).astype(float) for x in (p, m))
    update = opt.lr / (1 - opt.beta ** max(1, opt.steps)) * m / F
    if opt.decoupled:
        update = update + opt.lr * opt.weight_decay * p
    with np.errstate(all="ignore"):
        ratio = np.sqrt((update**2).sum()) / np.sqrt((p**2).sum()) if update.any() else 0.0
    return {"min": F.min(), "max": F.max(), "mean": F.mean(), "update_ratio": ratio, "skipped": 0}


def preconditioner(opt: AdaFisher, pair: tuple[Any, Any], shape: tuple[int, ...]) -> Any:
    columns, rows = (numpy_of(x).astype(float) for x in pair)
    return (np.outer(rows, columns) + opt.Lambda).reshape(shape)


@pytest.mark.parametrize("rule", ["parity", "paper"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_as_spelled_out(device: Device, case: Case, rule: str, decoupled: bool, monkeypatch: Any) -> None:
    for name in ("PIECE_OF_CPU", "PIECE_OF_GPU"):
        monkeypatch.setattr(curvature, name, 5)  # more than one piece
    rng = np.random.default_rng(3)
    layer = case.layer(lambda shape: device.array(rng.normal(size=shape)))
    params = [array for array in (layer.weight, layer.bias) if array is not None]
    scalars = {"lr": 0.01, "Lambda": 0.1, "weight_decay": 0.3, "decoupled": decoupled, "averaging": rule}
    opt = AdaFisher(params, [layer], TCov=1, backend=device.backend, **scalars)
    for seed in range(2):
        opt.accumulate(layer, *(device.array(x) for x in case.data(seed)))
        opt.step([device.array(rng.normal(size=p.shape)) for p in params])
    seen = opt.curvature()
    assert list(seen) == ["params[0]", "params[1]"][: len(params)]
    pairs = [opt._factors.of_weight(0), opt._factors.of_bias(0)]
    for name, p, m, pair in zip(seen, params, opt.momenta, pairs):
        want = expected(opt, p, m, preconditioner(opt, pair, tuple(p.shape)))
        assert tuple(seen[name]) == FIELDS
        assert seen[name] == pytest.approx(want, rel=CLOSE)


def problem(framework: str = "numpy", **options: Any) -> tuple[AdaFisher, Layer, list[Any]]:
    """A Linear layer, and a parameter of no layer."""
    rng = np.random.default_rng(0)
    params = [make(framework, rng.normal(size=shape)) for shape in ((3, 5), (7,))]
    layer = Linear(params[0], name="fc")
    return AdaFisher(params, [layer], **options), layer, params


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("TCov", [1, 3])
def test_the_ratio_is_that_of_the_step_just_made(framework: str, TCov: int) -> None:
    opt, layer, params = problem(framework, TCov=TCov, lr=0.1, Lambda=0.5)
    rng = np.random.default_rng(1)
    for _ in range(4):
        before = [numpy_of(p).astype(float) for p in params]
        opt.accumulate(layer, *(make(framework, rng.normal(size=(4, n))) for n in (5, 3)))
        opt.step([make(framework, rng.normal(size=p.shape)) for p in params])
        for values, old, p in zip(opt.curvature().values(), before, params):
            new = numpy_of(p).astype(float)
            ratio = np.linalg.norm(new - old) / np.linalg.norm(new)
            assert values["update_ratio"] == pytest.approx(ratio, rel=1e-5)  # the step rounds to float32


def test_without_factors_F_is_one_and_a_fresh_optimizer_moves_nothing() -> None:
    opt, *_ = problem(Lambda=0.25)
    seen = opt.curvature()
    assert seen["params[1]"] == {"min": 1.0, "max": 1.0, "mean": 1.0, "update_ratio": 0.0, "skipped": 0}
    assert seen["params[0]"] == {"min": 1.25, "max": 1.25, "mean": 1.25, "update_ratio": 0.0, "skipped": 0}


def test_a_parameter_of_zeros_that_moves_has_an_infinite_ratio() -> None:
    opt, _, params = problem()
    opt.momenta[1][0] = 1.0
    params[1][...] = 0
    assert opt.curvature()["params[1]"]["update_ratio"] == math.inf


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_beyond_float32_are_not_lost(scale: float) -> None:
    opt, _, params = problem(lr=1.0, beta=0.0)
    opt.momenta[1][...] = 3 * scale
    params[1][...] = scale
    assert opt.curvature()["params[1]"]["update_ratio"] == pytest.approx(3, rel=1e-6)  # float32 rounds both


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_skipped_refreshes_are_counted(framework: str) -> None:
    opt, layer, params = problem(framework, TCov=1)
    for _ in range(2):
        opt.accumulate(layer, make(framework, np.full((2, 5), math.nan)), make(framework, np.ones((2, 3))))
        opt.step([make(framework, np.zeros(p.shape)) for p in params])
    seen = opt.curvature()
    assert [values["skipped"] for values in seen.values()] == [2, 0]
    assert type(seen["params[0]"]["skipped"]) is int


def test_it_tells_of_the_moment_when_it_was_made() -> None:
    opt, layer, params = problem(TCov=1)
    seen, again = opt.curvature(), opt.curvature()
    opt.accumulate(layer, np.ones((2, 5), "f4"), np.ones((2, 3), "f4"))
    opt.step([np.ones_like(p) for p in params])
    assert dict(seen) == dict(again) != dict(opt.curvature())


class Block:
    """An array that tells when it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def tolist(self) -> list[list[float]]:
        self.reads += 1
        return [[1.0, 2.0, 1.5, 0.25, 3.0], [4.0, 5.0, 4.5, 0.5, 0.0]]


def test_numbers_are_fetched_once_and_not_before_one_is_read() -> None:
    block = Block()
    seen = Curvature([(["a", "b"], block)], ["a", "b"])
    assert (list(seen), len(seen), "a" in seen, "c" in seen, block.reads) == (["a", "b"], 2, True, False, 0)
    assert seen["b"]["mean"] == 4.5 and block.reads == 1
    assert seen.flat("opt")["opt/a/skipped"] == 3 and len(seen.flat()) == 10 and block.reads == 1
    with pytest.raises(KeyError):
        seen["c"]


def test_the_order_is_that_of_the_names_whatever_the_devices() -> None:
    block, other = Block(), Block()
    seen = Curvature([(["a", "d"], block), (["b", "c"], other)], ["a", "b", "c", "d"])
    assert [values["max"] for values in seen.values()] == [2.0, 2.0, 5.0, 5.0]


def test_empty_parameters_are_left_out() -> None:
    empty, full = np.zeros((0, 3), "f4"), np.ones(2, "f4")
    assert list(AdaFisher([empty, full]).curvature()) == ["params[1]"]


def test_nothing_is_changed() -> None:
    opt, _, params = problem()
    opt.step([np.ones_like(p) for p in params])
    arrays = [*params, *opt.momenta, *opt._factors.H, *opt._factors.S]
    before = [a.copy() for a in arrays]
    opt.curvature().flat()
    opt.summary()
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before)) and opt.steps == 1


def test_scalars_that_a_step_would_refuse_are_refused() -> None:
    opt, *_ = problem()
    opt.Lambda = 0
    with pytest.raises(CafinError, match="curvature: `Lambda` must be > 0, got 0"):
        opt.curvature()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_extremes_and_mean_need_no_product(data: Any) -> None:
    """The law that the module states, for factors >= 0 of any size."""
    numbers = st.floats(0, 1e3, width=32)
    H, S = (np.array(data.draw(st.lists(numbers, min_size=1, max_size=6)), "f4") for _ in range(2))
    opt = AdaFisher([p := np.ones((len(S), len(H)), "f4")], [Linear(p)], Lambda=0.5)
    opt._factors.load(0, H, S)
    F = np.outer(S.astype(float), H.astype(float)) + 0.5
    want = {"min": F.min(), "max": F.max(), "mean": F.mean()}
    seen = opt.curvature()["params[0]"]
    assert {name: seen[name] for name in want} == pytest.approx(want, rel=CLOSE)
