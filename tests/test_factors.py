"""The factors of all layer types through the public optimizer: reference and kernels, every geometry and layout."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import pytest
from helpers import (
    EXAMPLES,
    LAYOUTS,
    RAW,
    Case,
    Device,
    bounds,
    cases,
    close,
    convolutions,
    example_id,
    layer_norms,
    moments,
    numpy_of,
    pair_of_layers,
    refuses,
    run_raw,
    same_bits,
    seeds,
    take,
)
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy import (
    AdaFisher,
    Averaging,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    CafinTypeError,
    CafinValueError,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    Embedding,
    LayerNorm,
    Linear,
    NonFiniteError,
    TransposedLinear,
    reference,
)
from cafin_cupy.factors import ReferenceFactors


def agrees(device: Device, case: Case, h: np.ndarray, s: np.ndarray, first: str, second: str) -> None:
    got = run_raw(device, case, [(device.array(h, first), device.array(s, second))])
    for mine, want, bound in zip(got, moments(case, h, s), bounds(case, h, s)):
        close(mine, want, device.tolerance, bound)


@given(cases, seeds, st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_moments_are_the_reference_ones(device: Device, case: Case, seed: int, first: str, second: str) -> None:
    h, s = case.data(seed)
    agrees(device, case, h, s, first, second)


BIG = [
    Case(Linear, (3, 300), True, (8191, 300), (8191, 3)),  # a long batch of few columns
    Case(Linear, (1031, 1021), False, (1031, 1021), (1031, 1031)),  # primes
    Case(Conv2d, (7, 3, 3, 3), True, (5, 3, 293, 271), (5, 7, 147, 136), {"stride": 2, "padding": 1}),
    Case(Conv2d, (64, 1, 3, 3), True, (9, 64, 47, 41), (9, 64, 47, 41), {"padding": 1, "groups": 64}),
    Case(Conv1d, (8, 3, 9), True, (31, 6, 8191), (31, 8, 4096), {"stride": 2, "padding": 4, "groups": 2}),
    Case(Conv3d, (7, 3, 3, 3, 3), True, (5, 3, 17, 47, 41), (5, 7, 9, 24, 21), {"stride": 2, "padding": 1}),
    Case(
        ConvTranspose2d, (32, 3, 4, 4), True, (9, 32, 47, 41), (9, 6, 94, 82), {"stride": 2, "padding": 1, "groups": 2}
    ),
    Case(Embedding, (30011, 37), False, (8, 1031), (8, 1031, 37), {"padding_idx": 0}),
    Case(TransposedLinear, (300, 3), True, (8191, 300), (8191, 3)),
    Case(BatchNorm1d, (1031,), True, (1031, 1031), (1031, 1031)),
    Case(BatchNorm2d, (37,), True, (31, 37, 31, 31), (31, 37, 31, 31)),
    Case(BatchNorm3d, (37,), True, (31, 37, 5, 13, 13), (31, 37, 5, 13, 13)),
    Case(LayerNorm, (1031,), True, (8, 129, 1031), (8, 129, 1031)),
]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "offset"])
@pytest.mark.parametrize("case", BIG, ids=lambda case: f"{case.kind.__name__}-{'x'.join(map(str, case.h))}")
def test_moments_of_large_layers(device: Device, case: Case, layout: str) -> None:
    h, s = case.data()
    agrees(device, case, h, s, layout, layout)


@given(convolutions(), seeds)
def test_convolution_of_one_sample(device: Device, case: Case, seed: int) -> None:
    """A batch of one leaves the axis of samples without a stride to read it by."""
    case = case._replace(h=(1, *case.h[1:]), s=(1, *case.s[1:]))
    h, s = case.data(seed)
    for layout in ("contiguous", "channels_last"):
        agrees(device, case, h, s, layout, layout)


def test_layer_norm_over_channels_last_images(device: Device) -> None:
    case = Case(LayerNorm, (3, 4, 5), True, (2, 3, 4, 5), (2, 3, 4, 5))
    h, s = case.data()
    agrees(device, case, h, s, "channels_last", "channels_last")


def test_rows_taken_out_of_a_sequence(device: Device) -> None:
    """The first token of each sequence, as classifiers use it: rows far apart."""
    case = Case(Linear, (3, 8), True, (6, 8), (6, 3))
    h, s = case.data()
    tokens, grads = device.zeros(6, 5, 8) + 7.0, device.zeros(6, 5, 3) + 7.0
    tokens[:, 0], grads[:, 2] = device.array(h), device.array(s)
    for mine, want in zip(run_raw(device, case, [(tokens[:, 0], grads[:, 2])]), moments(case, h, s)):
        close(mine, want, device.tolerance)


def test_expanded_arrays(device: Device) -> None:
    """The gradient of a sum is one number, expanded."""
    xp = import_module(device.framework)
    for case in EXAMPLES:
        h, s = case.of(np.full(case.h, 3.0)), np.broadcast_to(np.arange(1.0, case.s[-1] + 1), case.s)
        pair = (
            xp.broadcast_to(device.array(case.of(3.0)), case.h),
            xp.broadcast_to(device.array(s[(0,) * (s.ndim - 1)]), case.s),
        )
        for mine, want in zip(run_raw(device, case, [pair]), moments(case, h, s)):
            close(mine, want, device.tolerance)


@given(layer_norms(), seeds)
def test_sequences_of_different_lengths_in_one_step(device: Device, case: Case, seed: int) -> None:
    """Calls whose geometry changes back and forth add up as the reference's sums do."""
    shapes = [(2, length, *case.weight) for length in (3, 7, 3, 1)]
    pairs = [case._replace(h=shape, s=shape).data(seed + k) for k, shape in enumerate(shapes)]
    longest = [np.pad(h, [(0, 0), (0, 7 - h.shape[1])] + [(0, 0)] * len(case.weight)) for h, _ in pairs]
    H, S = run_raw(device, case, [(device.array(h), device.array(s)) for h, s in pairs])
    u = sum(np.sum(h, axis=0) for h in longest).reshape(7, -1).sum(axis=1) / np.prod(case.weight) ** 2
    total = sum(np.sum(s, axis=(0, 1)) for _, s in pairs).reshape(-1)
    size = sum(np.sum(abs(h)) for h, _ in pairs) / np.prod(case.weight) ** 2
    weight = sum(np.sum(abs(s), axis=(0, 1)) for _, s in pairs).reshape(-1)
    close(H, [np.sum(u**2) / 64, 7 / 64], device.tolerance, [size**2 / 64, 7 / 64])
    close(S, total**2 / 8, device.tolerance, weight**2 / 8)


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
@pytest.mark.parametrize("rule", [Averaging.parity(), Averaging.paper()], ids=["parity", "paper"])
def test_a_nan_in_one_batch_costs_one_refresh(device: Device, case: Case, rule: Averaging) -> None:
    layer, other = (case.layer(lambda shape: device.zeros(*shape)) for _ in range(2))
    opt = AdaFisher([layer.weight, other.weight], [layer, other], averaging=rule, TCov=1, backend=device.backend)
    h, s = (device.array(x) for x in case.data())
    zeros = [device.zeros(*case.weight)] * 2
    zeros = [z + 0 for z in zeros]
    for array in (h, s) if case.kind is not Embedding else (s,):
        before = [numpy_of(F) for F in opt.factors()["0"]]
        flat = array.reshape(-1)
        kept = float(flat[-1])
        flat[-1] = math.nan
        opt.accumulate(layer, h, s)
        flat[-1] = kept
        opt.accumulate(other, h, s)
        opt.step(zeros)
        for now, then in zip(opt.factors()["0"], before):
            same_bits(now, then)
        opt.accumulate(layer, h, s)  # a later batch counts as if nothing had been
        opt.step(zeros)
        assert np.all(np.isfinite(numpy_of(opt.factors()["0"][1])))
        assert numpy_of(opt.factors()["0"][1]).tobytes() != before[1].tobytes() or len(before[1]) == 1
    assert all(np.all(np.isfinite(numpy_of(F))) for F in opt.factors()["1"])


def test_an_infinite_moment_counts_as_one(device: Device) -> None:
    """float32 squares overflow above 1.8e19; so do float64 ones above 1.3e154."""
    huge = 1e30 if device.dtype == "float32" else 1e200
    case = Case(Linear, (3, 2), False, (4, 2), (4, 3))
    h, s = np.ones(case.h), np.ones(case.s) * [0.5, huge, 0.25]
    with np.errstate(over="ignore"):
        H, S = run_raw(device, case, [(device.array(h), device.array(s))])
    np.testing.assert_array_equal(H, [1.0, 1.0])
    np.testing.assert_array_equal(S, [0.25, 1.0, 0.0625])


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [1e-3, 2e-3, 1.5e-3], [1e-5, 0.0, 3e-5]])
@pytest.mark.parametrize("rule", ["parity", "paper"])
def test_factors_by_hand(device: Device, values: list[float], rule: str) -> None:
    """One row, so the raw moments are squares. Small ones show the 1e-6 of the normalisation."""
    weight = device.zeros(3, 3)
    layer = Linear(weight)
    opt = AdaFisher([weight], [layer], averaging=rule, gamma=0.5, TCov=1, backend=device.backend)
    x = np.array(values)
    opt.accumulate(layer, device.array(x), device.array(x[::-1].copy()))
    opt.step([device.zeros(3, 3)])
    square = x**2
    normal = (square - min(square)) / (max(square) - min(square) + 1e-6)
    want = 0.05 + 0.005 * normal if rule == "parity" else 0.5 + 0.5 * square
    for F, expected in zip(opt.factors()["0"], (want, want[::-1])):
        close(F, expected, max(1e-6, device.tolerance / 10) if device.dtype == "float32" else 1e-12)


def test_empty_batches_add_nothing(device: Device) -> None:
    for case in EXAMPLES:
        h, s = case.data()
        none = device.array(case.of(np.zeros((0, *case.h[1:])))), device.zeros(0, *case.s[1:])
        full = device.array(h), device.array(s)
        for got, want in zip(run_raw(device, case, [none, full, none]), run_raw(device, case, [full])):
            same_bits(got, want)
        for got in run_raw(device, case, [none]):
            np.testing.assert_array_equal(got, 1.0)  # as they started


@pytest.mark.parametrize("padding", [None, 0])
def test_an_embedding_counts_what_was_read(device: Device, padding: int | None) -> None:
    """By hand: 3 is read twice, 0 and 1 once; row 2 never. A batch of nothing but padding leaves the factors alone."""
    case = Case(Embedding, (4, 2), False, (2, 2), (2, 2, 2), {"padding_idx": padding})
    h = np.array([[3, 0], [1, 3]])
    s = np.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    H, S = run_raw(device, case, [(device.array(h), device.array(s))])
    if padding is None:
        want = [0.25, 0.25, 0.0, 0.5], [(1 + 9 + 25 + 49) / 4, (4 + 16 + 36 + 64) / 4]
    else:
        want = [0.0, 1 / 3, 0.0, 2 / 3], [(1 + 25 + 49) / 3, (4 + 36 + 64) / 3]
    for got, exact in zip((H, S), want):
        close(got, exact, device.tolerance)
    nothing = run_raw(device, case, [(device.array(0 * h), device.array(s))])
    if padding is not None:
        assert all(np.all(F == 1.0) for F in nothing)


def test_nothing_but_padding_is_no_call(device: Device) -> None:
    """No refresh that was skipped, no number that is not finite; but a NaN in what was read is both."""
    case = Case(Embedding, (4, 2), False, (3,), (3, 2), {"padding_idx": 0})
    opt, (layer, _) = pair_of_layers(device, case, RAW, error_if_nonfinite=True)
    s = np.full(case.s, np.nan)
    take(opt, device, (np.array([0, 0, 0]), s))
    assert opt.skipped_refreshes() == {"0": 0, "1": 0}
    assert all(np.all(numpy_of(F) == 1.0) for F in opt.factors()["0"])
    opt.accumulate(layer, device.array(np.array([0, 1, 0])), device.array(s))
    with pytest.raises(NonFiniteError, match="raw S of Embedding"):
        take(opt, device)
    opt.error_if_nonfinite = False
    take(opt, device)
    assert opt.skipped_refreshes() == {"0": 1, "1": 0}


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_indices_of_any_size(device: Device, dtype: str) -> None:
    """A table longer than its indices can tell."""
    case = Case(Embedding, (300, 2), False, (4,), (4, 2))
    h = np.array([0, 5, 100, 5])
    xp = import_module(device.framework)
    _, s = case.data()
    H, _ = run_raw(device, case, [(xp.asarray(h, dtype=dtype), device.array(s))])
    np.testing.assert_array_equal(np.flatnonzero(H), [0, 5, 100])


def test_indices_that_are_no_whole_numbers_are_refused(device: Device) -> None:
    layer = Embedding(device.zeros(4, 2), name="tokens")
    opt = AdaFisher([layer.weight], [layer], backend=device.backend)
    with refuses(CafinTypeError, "accumulate: `h of tokens` must hold whole numbers, got float"):
        opt.accumulate(layer, device.zeros(3), device.zeros(3, 2))
    with refuses(
        CafinValueError, "accumulate: `h, s of tokens` must have shapes (...) and (..., 2), got (3,) and (4, 2)"
    ):
        opt.accumulate(layer, device.array(np.zeros(3, int)), device.zeros(4, 2))


def test_views_of_the_factors_stay_valid() -> None:
    layer = EXAMPLES[0].layer()
    factors = ReferenceFactors([layer], RAW)
    (H, S), (bias_H, bias_S) = factors.of_weight(0), factors.of_bias(0)
    assert (len(H), len(S), len(bias_H), len(bias_S)) == (5, 3, 1, 3)
    np.testing.assert_array_equal(H, 0.0)  # normalize(ones)
    assert not factors.pending
    factors.accumulate(0, *EXAMPLES[0].data())
    assert factors.pending
    factors.update()
    assert not factors.pending
    raw = moments(EXAMPLES[0], *EXAMPLES[0].data())
    for F, want in zip((np.concatenate([H, bias_H]), S), raw):
        np.testing.assert_allclose(F, reference.normalize(want), rtol=1e-12)
    factors.accumulate(0, *EXAMPLES[0].data())
    factors.discard()
    assert not factors.pending


def test_sums_that_were_taken_elsewhere() -> None:
    """They count as those taken here, behind and ahead of them."""
    case = EXAMPLES[0]
    one, other = (ReferenceFactors([case.layer()], RAW) for _ in range(2))
    for k in range(3):
        one.accumulate(0, *case.data())
        if k == 1:
            other.accumulate(0, *case.data())
        else:
            other.add(0, reference.raw_sums(case.layer(), *case.data()))
    for got, want in zip(other.sums()[0][1], one.sums()[0][1]):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_precision_of_the_factors(dtype: str) -> None:
    """float64 for float64 weights, and for averages of raw moments: the ones they start from would drown small ones."""
    working = "float64" if dtype == "float64" else "float32"
    for rule in (Averaging.parity(), Averaging.paper()):
        factors = ReferenceFactors([Linear(np.zeros((2, 3), dtype))], rule)
        state = "float64" if rule.normalize == "after" else working
        assert {str(F.dtype) for F in (*factors.H, *factors.S)} == {state}
        assert {str(F.dtype) for F in (*factors.H_effective, *factors.S_effective)} == {working}
