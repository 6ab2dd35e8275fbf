"""Rounding to 16 bits: to the nearest it is everybody's; at random it hits both neighbours, is right on average,
repeats, and is the same in every framework."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy import rounding
from cafin_cupy.rounding import Noise, noise_like, random_bits, rounded, start, step_noise

TYPES: dict[str, Any] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
DTYPES = sorted(TYPES)
SPECIAL = np.array(
    [
        *(0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65504, 65519, 65520, 65535, 65536, 1e-8, 6.1e-5, 1e-40),
        *(2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, -2.5 * 2.0**-24, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11),
    ],
    np.float32,
)
any_floats = st.lists(st.floats(width=32), min_size=1, max_size=20).map(lambda xs: np.array(xs, np.float32))
numbers = st.integers(1, 2**32 - 1)


def placed(framework: str, x: np.ndarray[Any, Any]) -> Any:
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(x.copy())
    return pytest.importorskip("jax.numpy").asarray(x) if framework == "jax" else x


def dtype_in(framework: str, name: str) -> Any:
    if framework == "torch":
        return getattr(pytest.importorskip("torch"), name)
    return TYPES[name]


def bits_of(x: Any) -> np.ndarray[Any, Any]:
    if hasattr(x, "detach"):
        import torch

        return x.view(torch.int16).numpy().view(np.uint16)
    return np.asarray(x).view(np.uint16)


def around(x: np.ndarray[Any, Any], name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The next numbers of a type towards 0 and away from it, of finite float32 numbers, in float64. Found by truncation
    of the value's digits in float64, without a look at bits."""
    digits, smallest = (8, -133) if name == "bfloat16" else (11, -24)  # of significands; exponent of the last denormal
    size = np.abs(x.astype(np.float64))
    exponent = np.maximum(np.floor(np.log2(np.where(size > 0, size, 1.0))) - (digits - 1), smallest)
    unit = 2.0**exponent
    low = np.floor(size / unit) * unit
    high = np.where(low == size, low, low + unit)
    largest = float(ml_dtypes.finfo(TYPES[name]).max)
    low, high = (np.where(y > largest, np.inf, y) for y in (low, high))
    return np.copysign(low, x), np.copysign(high, x)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", DTYPES)
def test_to_the_nearest(name: str, framework: str) -> None:
    """Ties go to even; NaN, infinities and signs stay; too large is infinite; denormals have fewer digits."""
    low, high = around(np.where(np.isfinite(SPECIAL), SPECIAL, 0), name)
    got = np.asarray(
        rounded(placed(framework, SPECIAL), dtype_in(framework, name)).tolist(), np.float64
    )  # float32 denormals may be 0 in JAX
    for x, down, up, y in zip(SPECIAL, low, high, got):
        if np.isnan(x):
            assert np.isnan(y)
        elif np.isinf(x):
            assert y == x
        elif abs(x) >= 1e-38 and np.isfinite(up):
            assert y in (down, up)
            assert abs(y - np.float64(x)) == min(abs(down - np.float64(x)), abs(up - np.float64(x)))
            if down != up and abs(down - np.float64(x)) == abs(up - np.float64(x)):
                assert not int(bits_of(np.array(y, TYPES[name]))) & 1
        elif name == "float16" and abs(x) > 65504:
            assert y == np.copysign(65504 if abs(x) < 65520 else np.inf, x)  # halfway to 2^16, the next there would be
        assert np.isnan(x) or np.signbit(x) == np.signbit(y)


@pytest.mark.parametrize("name", DTYPES)
@given(any_floats, numbers, st.integers(0, 2**20))
def test_at_random_it_is_a_neighbour(name: str, x: np.ndarray[Any, Any], number: int, key: int) -> None:
    got = rounded(x, TYPES[name], random_bits(Noise(number, key), 0, x.size)).astype(np.float64)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(got[~finite], x[~finite].astype(np.float64))
    low, high = around(x[finite], name)
    assert np.all((got[finite] == low) | (got[finite] == high))
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(x[finite]))


@pytest.mark.parametrize("name", DTYPES)
@given(st.floats(2.0**-30, 60000, width=32), st.booleans(), numbers)
def test_at_random_it_is_right_on_average(name: str, size: float, negative: bool, number: int) -> None:
    """The share of roundings away from 0 is the place between the neighbours. 16 random bits (13 for half precision)
    tell 2^-13 apart at least; of n draws the share has a deviation of at most 1 / (2 sqrt(n)), here within 6 of these:
    wrong once in 10^9."""
    n = 2**14
    x = np.full(n, -size if negative else size, np.float32)
    got = rounded(x, TYPES[name], random_bits(Noise(number, 3), 0, n)).astype(np.float64)
    low, high = around(x[:1], name)
    place = 0.0 if low[0] == high[0] else (np.float64(x[0]) - low[0]) / (high[0] - low[0])
    share = float(np.mean(got == high[0])) if low[0] != high[0] else 0.0
    assert abs(share - place) <= 6 * np.sqrt(place * (1 - place) / n) + 6 / n + 2.0**-13


def test_the_planted_bias_would_be_seen() -> None:
    """Truncation, and noise that is too small, fail the bound above."""
    n, x = 2**14, np.full(2**14, 1 + 2.0**-9, np.float32)  # a quarter of the way to the next bfloat16
    for spoil in (lambda bits: bits * 0, lambda bits: bits // 2):
        got = rounded(x, TYPES["bfloat16"], spoil(random_bits(Noise(5, 3), 0, n))).astype(np.float64)
        assert abs(np.mean(got > 1) - 0.25) > 6 * np.sqrt(0.25 * 0.75 / n) + 6 / n + 2.0**-13


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", DTYPES)
@given(any_floats, numbers)
def test_all_frameworks_round_alike(name: str, framework: str, x: np.ndarray[Any, Any], number: int) -> None:
    """But for float32 denormals, which JAX may take for 0, and the bits of a NaN."""
    x = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    noise = random_bits(Noise(number, 0), 0, x.size)
    mine = rounded(x, TYPES[name], noise)
    theirs = rounded(placed(framework, x), dtype_in(framework, name), placed(framework, noise))
    number_at = ~np.isnan(x)
    np.testing.assert_array_equal(bits_of(theirs)[number_at], bits_of(mine)[number_at])
    assert np.isnan(mine[~number_at].astype(np.float32)).all()


@given(numbers, st.integers(0, 1000), st.integers(0, 50), st.integers(0, 50))
def test_a_part_has_the_bits_of_the_whole(number: int, key: int, first: int, count: int) -> None:
    whole = random_bits(Noise(number, key), 0, first + count + 5)
    part = random_bits(Noise(number, key), first, count)
    np.testing.assert_array_equal(part, whole[first : first + count])
    assert whole.min() >= 0 and whole.max() < 2**16


def test_bits_look_random() -> None:
    """Uniform, and unrelated between neighbours, parameters, steps and seeds: correlations of n pairs have a deviation
    of 1 / sqrt(n)."""
    n = 2**16
    begin = start(7)
    others = [
        random_bits(Noise(step_noise(begin, 1), 0), 1, n),
        random_bits(Noise(step_noise(begin, 1), 1), 0, n),
        random_bits(Noise(step_noise(begin, 2), 0), 0, n),
        random_bits(Noise(step_noise(start(8), 1), 0), 0, n),
    ]
    bits = random_bits(Noise(step_noise(begin, 1), 0), 0, n)
    assert abs(bits.mean() - 32767.5) < 5 * 2**16 / np.sqrt(12 * n)
    for other in others:
        assert abs(np.corrcoef(bits, other)[0, 1]) < 5 / np.sqrt(n)


def test_the_numbers_are_splitmix64() -> None:
    """The first outputs of the published generator (Vigna's splitmix64.c) from the state 1234567."""
    outputs, state = [], 1234567
    for _ in range(3):
        state = state + rounding._GOLDEN & rounding._MASK
        outputs.append(rounding._mixed(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_no_step_and_no_seed_stands_for_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_noise(0, 5) == 0
    assert step_noise(start(0), 0) > 0
    monkeypatch.setattr(rounding, "_mixed", lambda z: 0)
    assert start(3) == 1 and step_noise(1, 1) == 1


def test_bits_follow_memory() -> None:
    """As the kernels walk: the same numbers in channels_last memory get the same bits where they lie."""
    noise = Noise(9, 2)
    for shape in ((3, 4, 5), (3, 4, 2, 5), (2, 3, 2, 2, 3)):
        plain = np.zeros((shape[0], *shape[2:], shape[1]), np.float32)
        last = np.moveaxis(plain, -1, 1)
        np.testing.assert_array_equal(np.moveaxis(noise_like(last, noise, 0), 1, -1), noise_like(plain, noise, 0))
        assert noise_like(np.moveaxis(plain[::2], -1, 1), noise, 0).shape == (-(-shape[0] // 2), *shape[1:])
