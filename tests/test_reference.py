"""The reference against explicit computations in float64, loops and patches, written from the rule's table alone."""

from __future__ import annotations

import math
import tracemalloc
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    EXAMPLES,
    Case,
    cases,
    close,
    convolutions,
    example_id,
    integral,
    make,
    moments,
    numpy_of,
    problem,
    refuses,
    same_bits,
    seeds,
    strided,
    updated,
)
from hypothesis import given
from loops import expected

from cafin_cupy import AdaFisher, Averaging, CafinTypeError, CafinValueError, LayerNorm, Linear, reference
from cafin_cupy.rule import Hyper

EXACT = 1e-12  # float64, other order of summation
NAMESPACES = ["numpy", "torch", "jax"]


@given(cases, seeds)
def test_raw_moments(case: Case, seed: int) -> None:
    h, s = case.data(seed)
    layer = case.layer()
    H, S = moments(case, h, s)
    want_H, want_S = expected(case, h, s)
    bound_H, bound_S = expected(case, abs(h), abs(s))  # signs cancel in the sums of norm layers
    assert (len(H), len(S)) == (layer.H_size, layer.S_size)
    close(H, want_H, EXACT, bound_H)
    close(S, want_S, EXACT, bound_S)


@given(convolutions(2, 2), seeds)
def test_convolution_is_what_im2col_gives(case: Case, seed: int) -> None:
    h, s = case.data(seed)
    groups, (kernel, count) = case.options["groups"], (case.weight[2:], s.shape[0] * s.shape[2] * s.shape[3])
    behind = [
        (out - 1) * t + d * (k - 1) + 1 - p - size
        for out, t, d, k, p, size in zip(
            s.shape[2:],
            case.options["stride"],
            case.options["dilation"],
            kernel,
            case.options["padding"],
            h.shape[2:],
        )
    ]  # rows and columns behind the image that the last output sees; negative where it does not reach the end
    before = case.options["padding"]
    padded = torch.nn.functional.pad(torch.tensor(h), (before[1], behind[1], before[0], behind[0]))
    patches = [
        torch.nn.functional.unfold(part, kernel, dilation=case.options["dilation"], stride=case.options["stride"])
        for part in padded.chunk(groups, dim=1)
    ]
    want = sum((p**2).sum(dim=(0, 2)) for p in patches).numpy() / (count * math.prod(case.weight[1:]))
    H, _ = moments(case, h, s)
    close(H[: len(want)], want, EXACT)


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
@pytest.mark.parametrize("framework", NAMESPACES)
def test_results_stay_in_their_namespace(framework: str, case: Case) -> None:
    h, s = case.data()
    layer = case.layer(lambda shape: make(framework, np.zeros(shape)))
    ours, theirs = make(framework, h), make(framework, s)
    sums = reference.raw_sums(layer, ours, theirs)
    raw = reference.raw_moments(layer, reference.add_sums(sums, sums))
    H, S = reference.refresh(*(r * 0 + 1 for r in raw), *raw, Averaging.parity())
    p = make(framework, np.ones((len(S), len(H))))
    moved = reference.update(p, p, p, H, S, lr=0.1, weight_decay=0.1)
    for result in (*sums[:2], *raw, H, S, *moved, reference.effective(H, Averaging.paper())):
        assert type(result) is type(ours)
        assert str(result.dtype).removeprefix("torch.") == "float32"
    twice = moments(case, np.concatenate([h, h]), np.concatenate([s, s]))
    for got, want in zip(raw, twice):
        close(got, want, 1e-6)  # float32


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
@pytest.mark.parametrize(
    ("framework", "dtype"),
    [("numpy", "float16"), ("torch", "float16"), ("torch", "bfloat16"), ("jax", "float16"), ("jax", "bfloat16")],
)
def test_half_types_are_summed_in_float32(framework: str, dtype: str, case: Case) -> None:
    exact = case.data()
    h, s = (make(framework, x) for x in exact)
    h, s = (
        given if integral(x) else given.to(getattr(torch, dtype)) if framework == "torch" else given.astype(dtype)
        for given, x in zip((h, s), exact)
    )
    sums = reference.raw_sums(case.layer(), h, s)
    raw = reference.raw_moments(case.layer(), sums)
    rounded = [numpy_of(x.float() if framework == "torch" else x.astype("float32")) for x in (h, s)]
    for got, want in zip(raw, moments(case, *rounded)):
        assert "float32" in str(got.dtype)
        close(got, want, 1e-6)  # the rounding of the inputs is part of them


def test_longer_sequences_extend_the_sums_of_a_layer_norm() -> None:
    layer = LayerNorm(np.ones(2))
    short, long = np.ones((1, 1, 2)), np.full((1, 3, 2), 2.0)
    for first, second in ((short, long), (long, short)):
        sums = reference.add_sums(reference.raw_sums(layer, first, first), reference.raw_sums(layer, second, second))
        # u = sum / Q^2 with Q = 2: 2/4 from the short one, 4/4 from the long one
        np.testing.assert_array_equal(sums.H, [1.5, 1.0, 1.0])
        np.testing.assert_array_equal(sums.S, [7.0, 7.0])
        assert sums.n == 2
    H, S = reference.raw_moments(layer, sums)
    np.testing.assert_array_equal(H, [(1.5**2 + 1 + 1) / 4, 3 / 4])
    np.testing.assert_array_equal(S, [49 / 2, 49 / 2])


def test_grad_scale_divides_S_by_its_square() -> None:
    for case in EXAMPLES:
        h, s = case.data()
        layer = case.layer()
        plain = reference.raw_moments(layer, reference.raw_sums(layer, h, s))
        scaled = reference.raw_moments(layer, reference.raw_sums(layer, h, s * 1024.0), 1024.0)
        for a, b in zip(plain, scaled):
            same_bits(a, b)  # exact: a power of two


def test_normalize_takes_infinities_as_one_and_zero() -> None:
    x = np.array([math.inf, 0.25, -math.inf, 0.5])
    np.testing.assert_array_equal(reference.clean(x), [1.0, 0.25, 0.0, 0.5])
    np.testing.assert_allclose(reference.normalize(x), np.array([1.0, 0.25, 0.0, 0.5]) / (1 + 1e-6), rtol=1e-15)
    assert math.isnan(reference.clean(np.array([math.nan]))[0])


def test_normalize_small_and_constant_vectors() -> None:
    np.testing.assert_array_equal(reference.normalize(np.full(3, 7.0)), np.zeros(3))
    np.testing.assert_array_equal(reference.normalize(np.array([5.0])), [0.0])
    assert reference.normalize(np.zeros(0)).shape == (0,)
    # 1e-6 is added to the range: a range of 1e-6 is normalised to [0, 1/2], one of 1e-9 to [0, 1e-3 / 1.001]
    np.testing.assert_allclose(reference.normalize(np.array([0.0, 1e-6])), [0.0, 0.5], rtol=1e-12)
    np.testing.assert_allclose(reference.normalize(np.array([0.0, 1e-9])), [0.0, 1e-3 / 1.001], rtol=1e-12)


@pytest.mark.parametrize("framework", NAMESPACES)
def test_a_nan_leaves_both_factors_alone(framework: str) -> None:
    F, good, bad = (make(framework, v) for v in ([0.5, 0.25], [1.0, 3.0], [math.nan, 3.0]))
    for raw in ((good, bad), (bad, good), (bad, bad)):
        for kept in reference.refresh(F, F, *raw, Averaging.parity()):
            same_bits(kept, F)
    changed, _ = reference.refresh(F, F, good, good, Averaging.parity())
    assert numpy_of(changed)[0] != 0.5


def test_the_two_rules_step_by_step() -> None:
    """First steps by hand, for raw moments 1, 3 and then 5, 2."""
    F, first, second = np.ones(2), np.array([1.0, 3.0]), np.array([5.0, 2.0])
    parity, paper = Averaging.parity(0.8), Averaging.paper(0.8)
    one = reference.average(F, first, parity)
    np.testing.assert_allclose(one, [0.08, 0.08 + 0.008 * 2 / 2.000001], rtol=1e-14)
    two = reference.average(one, second, parity)
    np.testing.assert_allclose(two, [0.0064 + 0.008 * 3 / 3.000001, 0.08 * one[1]], rtol=1e-14)
    np.testing.assert_array_equal(reference.effective(two, parity), two)

    one = reference.average(F, first, paper)
    np.testing.assert_allclose(one, [0.8 + 0.2, 0.8 + 0.6], rtol=1e-14)
    two = reference.average(one, second, paper)
    np.testing.assert_allclose(two, [0.8 + 1.0, 1.12 + 0.4], rtol=1e-14)
    np.testing.assert_allclose(reference.effective(two, paper), [0.28 / (0.28 + 1e-6), 0.0], rtol=1e-9)
    np.testing.assert_array_equal(reference.effective(F, paper), [0.0, 0.0])  # before the first sample: F~ = Lambda


@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
@pytest.mark.parametrize("factors", [False, True], ids=["plain", "factors"])
def test_update_by_its_formula(decoupled: bool, factors: bool) -> None:
    rng = np.random.default_rng(0)
    p, g, m = rng.normal(size=(3, 2, 3))
    S, H = rng.random(2), rng.random(3)
    lr, beta, lam, wd, t = 0.1, 0.8, 0.01, 0.3, 4
    pair = (H, S) if factors else (None, None)
    new_p, new_m = reference.update(
        p, g, m, *pair, lr=lr, beta=beta, Lambda=lam, weight_decay=wd, decoupled=decoupled, step=t
    )
    for r in range(2):
        for c in range(3):
            F = S[r] * H[c] + lam if factors else 1.0
            slope = g[r, c] + (0.0 if decoupled else wd * p[r, c])
            momentum = beta * m[r, c] + (1 - beta) * slope
            step = momentum / (1 - beta**t) / F + (wd * p[r, c] if decoupled else 0.0)
            assert new_m[r, c] == pytest.approx(momentum, rel=1e-13)
            assert new_p[r, c] == pytest.approx(p[r, c] - lr * step, rel=1e-12)


@pytest.mark.parametrize("framework", NAMESPACES)
def test_update_keeps_half_types(framework: str) -> None:
    """The factors are float32, and so is the step until it is rounded into the parameter."""
    x = problem((4, 3))
    p, g, m = (make(framework, x[k], "float16") for k in "pgm")
    moved = reference.update(p, g, m, *(make(framework, x[k]) for k in "HS"), lr=0.1, Lambda=0.01)
    for got, want in zip(moved, updated(x, lr=0.1, Lambda=0.01)):
        assert str(got.dtype).removeprefix("torch.") == "float16"
        close(got, want, 2e-3)  # 11 bits


def test_update_leaves_its_arguments_alone() -> None:
    for framework in NAMESPACES:
        given = [make(framework, v) for v in ([[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]], [0.5, 0.25], [2.0])]
        before = [numpy_of(x) for x in given]
        reference.update(*given, lr=0.1, weight_decay=0.1)
        for now, then in zip(given, before):
            same_bits(now, then)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
def test_pieces_of_an_update_are_the_whole(
    framework: str, dtype: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 7 elements: several rows, one row that is longer, a last one that is short, rows that S knows nothing
    of, and none. Each element has its own arithmetic, so not a bit may differ."""
    layouts = ["contiguous", "channels_last", "inner", "sliced"]
    scalars = {"lr": 0.1, "beta": 0.8, "Lambda": 0.01, "weight_decay": 0.3}
    hyper = Hyper(**scalars, decoupled=decoupled)
    shapes = [((), 1), ((0, 3), 3), ((1,), 1), ((23,), 1), ((23,), 23), ((5, 3), 3), ((3, 11), 11), ((6, 4), 2)]
    for shape, columns in [*shapes, ((4, 2, 3, 3), 18), ((4, 2, 3, 3), None)]:
        x = problem(shape, 1, columns or 1)
        pair = [make(framework, x[k], "float64" if dtype == "float64" else "float32") for k in "HS"]
        H, S = pair if columns else (None, None)
        for layout in layouts:
            p, g, m = (strided(framework, x[k], layout, dtype) for k in "pgm")
            with monkeypatch.context() as patch:
                patch.setattr(reference, "PIECE", 7)
                want = reference.update(p, g / 4.0, m, H, S, **scalars, decoupled=decoupled, step=3)
                reference.update_in_place(p, g, m, H, S, hyper, 3, 4.0)
            for got, whole in zip((p, m), want):
                same_bits(got, whole)


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
@pytest.mark.parametrize("framework", NAMESPACES)
def test_pieces_of_a_batch_are_the_batch(framework: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers have exact sums in any order."""
    arrays = [make(framework, x if integral(x) else np.round(x * 4)) for x in case.data()]
    want = reference.raw_sums(case.layer(), *arrays)
    for piece in (100, 37, 1):  # several samples, about one, less than one
        monkeypatch.setattr(reference, "PIECE", piece)
        for got, whole in zip(reference.raw_sums(case.layer(), *arrays)[:2], want[:2]):
            same_bits(got, whole)
    vector = Case(Linear, (3, 5), True, (5,), (3,))  # has no axis to cut
    h, s = (make(framework, x) for x in vector.data())
    for got, x in zip(reference.raw_sums(vector.layer(), h, s)[:2], (h, s)):
        same_bits(got, x * x)


def test_intermediate_results_stay_small() -> None:
    """16 MiB of numbers, of which no operation makes a second copy: some pieces of 2 MiB are alive at a time."""
    x = np.ones((2**10, 2**11))
    layer, pair = Linear(np.ones((2**11, 2**11))), (np.ones(2**11), np.ones(2**10))
    g, m = x.copy(), x.copy()
    tracemalloc.start()
    try:
        reference.raw_sums(layer, x, x)
        reference.update_in_place(x, g, m, *pair, Hyper(0.1, 0.9, 0.01, 0.1, False), 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes


def test_a_refused_update_changes_nothing() -> None:
    p, m, hyper = np.ones((4, 3)), np.ones((4, 3)), Hyper(0.1, 0.9, 0.01, 0.1, False)
    for g, H, S, words in [
        (np.ones((1, 3)), None, None, ["`g, m`", "(4, 3)", "(1, 3)"]),
        (np.ones((4, 3)), np.ones(3), None, ["`H, S`", "both be None", "alone"]),
        (np.ones((4, 3)), np.ones(3), np.ones(3), ["`H, S`", "== 12", "3 * 3"]),
    ]:
        with refuses(CafinValueError, "update", *words, unchanged=[p, m]):
            reference.update_in_place(p, g, m, H, S, hyper, 1)


def test_refusals() -> None:
    layer = Linear(np.ones((2, 3)))
    with refuses(CafinTypeError, "raw_sums", "floating-point", "int64"):
        reference.raw_sums(layer, np.ones((4, 3), np.int64), np.ones((4, 2)))
    with refuses(CafinValueError, "raw_sums", "(..., 3) and (..., 2)", "(4, 2) and (4, 2)"):
        reference.raw_sums(layer, np.ones((4, 2)), np.ones((4, 2)))
    empty = reference.raw_sums(layer, np.ones((0, 3)), np.ones((0, 2)))
    with refuses(CafinValueError, "raw_moments", "`sums`", "at least one row", "0"):
        reference.raw_moments(layer, empty)
    with refuses(CafinValueError, "update", "`beta`", "[0, 1)", "1.0"):
        reference.update(np.ones(1), np.ones(1), np.ones(1), lr=0.1, beta=1.0)
    with refuses(CafinValueError, "update", "`step`", ">= 1", "0"):
        reference.update(np.ones(1), np.ones(1), np.ones(1), lr=0.1, step=0)


NO_ARRAYS = [
    None,
    3.0,
    "h",
    [[1.0, 2.0, 3.0]],
    np.ndarray,
    np.array([["a", "b", "c"]]),
    torch.ones(1, 3, device="meta"),
]


@pytest.mark.parametrize("wrong", NO_ARRAYS, ids=lambda value: str(value)[:20])
def test_what_is_no_array_is_refused(wrong: Any) -> None:
    layer, h, s = Linear(np.ones((2, 3))), np.ones((1, 3)), np.ones((1, 2))
    for arrays, name in (((wrong, s), "h of Linear"), ((h, wrong), "s of Linear")):
        with refuses(CafinTypeError, f"raw_sums: `{name}` must"):
            reference.raw_sums(layer, *arrays)
    for place, name in enumerate("pgmHS"):
        arguments: list[Any] = [h, h, h, np.ones(3), np.ones(1)]
        arguments[place] = wrong
        kind, word = (CafinValueError, "alone") if wrong is None and name in "HS" else (CafinTypeError, f"`{name}`")
        with refuses(kind, "update: ", word):
            reference.update(*arguments, lr=0.1)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_only_real_floating_point_numbers_count(rows: int, dtype: str) -> None:
    """An empty batch of another kind is as wrong as a full one."""
    h, s = np.ones((rows, 3)), np.ones((rows, 2))
    for place, name in enumerate("hs"):
        arrays = [h, s]
        arrays[place] = arrays[place].astype(dtype)
        w = np.ones((2, 3))
        opt = AdaFisher([w], [layer := Linear(w)])
        for refused in (lambda x: reference.raw_sums(layer, *x), lambda x: opt.accumulate(layer, *x)):  # noqa: B023
            with refuses(CafinTypeError, f"`{name} of Linear` must hold real floating-point numbers", dtype):
                refused(arrays)
    with refuses(CafinTypeError, "update: `g` must hold real floating-point numbers", dtype):
        reference.update(np.ones(rows), np.ones(rows, dtype), np.ones(rows), lr=0.1)


def test_arrays_of_two_frameworks_are_refused() -> None:
    x = np.ones((4, 3))
    with refuses(CafinTypeError, "update: `m, p` must be arrays of one framework", "torch and numpy"):
        reference.update(x, x, torch.ones(4, 3), lr=0.1)


@pytest.mark.parametrize("F", [np.float64(1.0), np.ones((1, 12))], ids=["no axis", "two axes"])
def test_factors_are_vectors(F: Any) -> None:
    x = np.ones(12)
    with refuses(CafinValueError, "update: `H` must be a vector", str(np.shape(F))):
        reference.update(x, x, x, F, np.ones(1), lr=0.1)


@pytest.mark.parametrize("framework", NAMESPACES)
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_layer_norm_without_elements(framework: str, shape: tuple[int, ...]) -> None:
    layer = LayerNorm(make(framework, np.ones(shape)))
    h, s = (make(framework, np.ones((2, *shape))) for _ in "hs")
    sums = reference.raw_sums(layer, h, s)
    assert (tuple(sums.H.shape), tuple(sums.S.shape), sums.n) == (shape[:1], (0,), 2)
    assert np.all(numpy_of(sums.H) == 0.0)


def test_layers_and_sums_are_what_they_are_called() -> None:
    layer, h, s = Linear(np.ones((2, 3))), np.ones((1, 3)), np.ones((1, 2))
    sums = reference.raw_sums(layer, h, s)
    for refused in (lambda: reference.raw_sums(h, h, s), lambda: reference.raw_moments(Linear, sums)):
        with refuses(CafinTypeError, "`layer` must be a layer descriptor"):
            refused()
    with refuses(CafinTypeError, "raw_moments: `sums` must be RawSums, got tuple"):
        reference.raw_moments(layer, tuple(sums))  # type: ignore[arg-type]


def test_checks_bear_the_tracers_of_jax() -> None:
    """They look at no values."""
    jax = import_module("jax")
    p, layer = jax.numpy.ones((2, 3)), Linear(np.ones((2, 3)))
    new_p, _ = jax.jit(lambda p: reference.update(p, p, p, lr=0.1))(p)
    close(numpy_of(new_p), numpy_of(reference.update(p, p, p, lr=0.1)[0]), 1e-6)
    sums = jax.jit(lambda h, s: reference.raw_sums(layer, h, s)[:2])(jax.numpy.ones((4, 3)), jax.numpy.ones((4, 2)))
    close(numpy_of(sums[0]), np.full(3, 4.0), 1e-6)
