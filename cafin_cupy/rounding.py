"""Rounding of float32 numbers to 16 bits: to the nearest, or at random, and the random numbers for it.

Stochastic rounding goes up or down with the probabilities that make the mean of many roundings the number itself:
steps that are too small for 16 bits are then taken now and then, instead of never (Gupta et al., arXiv 1502.02551). The
random numbers are SplitMix64's (Steele, Lea, Flood 2014) of seed, step, parameter and place in memory, so no generator
has a state: the same four give the same bits, and kernels/rounding.cuh computes the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

SIXTEEN = ("bfloat16", "float16")

_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
_FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


class Noise(NamedTuple):
    """What tells the random numbers of one update of one parameter from all others.

    Attributes:
        number: of the step, see `step_noise`.
        key: of the parameter among those that are updated together.
    """

    number: int
    key: int


def _mixed(z: Any) -> Any:
    """The finaliser of SplitMix64, of an int or of uint64 arrays."""
    for shift, factor in _FACTORS:
        z = (z ^ z >> shift) * factor & _MASK
    return z ^ z >> 31


def start(seed: int) -> int:
    """Where a seed's steps begin; never 0, which stands for rounding to the nearest."""
    return _mixed(seed + _GOLDEN & _MASK) or 1


def step_noise(begin: int, step: int) -> int:
    """A number of 32 bits for one step after `start`; never 0. With a begin of 0 it is 0: to the nearest."""
    return (_mixed(begin + _GOLDEN * step & _MASK) >> 32 or 1) if begin else 0


def random_bits(noise: Noise, first: int, count: int) -> np.ndarray[Any, Any]:
    """16 random bits for each of `count` elements from the place `first` in memory on: int32 (count)."""
    begin = first // 4
    quads = np.arange(begin + 1, (first + count + 3) // 4 + 1, dtype=np.uint64)
    bits = _mixed(np.uint64(noise.number << 32 | noise.key) + np.uint64(_GOLDEN) * quads)
    each = bits.astype("<u8").view("<u2")  # of four elements, the lowest first
    return each[first - 4 * begin :][:count].astype(np.int32)


def noise_like(x: Any, noise: Noise, first: int) -> Any:
    """`random_bits` in the shape of an array whose first element is number `first` of a parameter, beside it. Places
    are those in memory if that is contiguous or channels_last, else those of the same array made contiguous."""
    from .arrays import channels_last_strides, same_strides, view

    shape, xp = tuple(x.shape), array_namespace(x)
    bits = random_bits(noise, first, int(np.prod(shape)))
    if len(shape) >= 3:
        v = view(x)
        if not v.contiguous and same_strides(shape, v.strides, channels_last_strides(shape)):
            bits = np.moveaxis(bits.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
    return xp.asarray(bits.reshape(shape), device=device(x))


def widened(x: Any) -> Any:
    """Numbers of 16 bits as float32; any others as they are."""
    xp = array_namespace(x)
    return xp.astype(x, xp.float32) if x.dtype.itemsize == 2 else x


def rounded(x: Any, dtype: Any, noise: Any = None) -> Any:
    """Numbers in another type: the nearest, ties to even, or float32 ones at random.

    NaN stays NaN. What lies beyond the largest number of the type becomes infinite, and at random so may what lies
    between it and the next that there would be.

    Args:
        x: numbers; float32 for those of 16 bits.
        dtype: of the array's framework.
        noise: 16 random bits for each, int32 of the same shape; None for the nearest.
    """
    xp = array_namespace(x)
    with np.errstate(over="ignore"):  # meant
        nearest = xp.astype(x, dtype, copy=False)
        if noise is None or x.dtype == dtype:
            return nearest
        bits = x.view(xp.int32)
        if str(dtype).removeprefix("torch.") == "float16":
            near = _half_at_random(xp, x, bits, noise)
        else:
            near = ((bits + noise) & -0x10000).view(xp.float32)
        # All of `near` are numbers of the type, or the infinity behind them.
        return xp.where(xp.isfinite(x), xp.astype(near, dtype), nearest)


def _half_at_random(xp: Any, x: Any, bits: Any, noise: Any) -> Any:
    """Half-precision numbers as float32: multiples of 2^-24 below 2^-14, above of 2^13 units in the last place."""
    size, sign = bits & 0x7FFFFFFF, bits & -0x80000000
    small = size < 0x38800000
    units = xp.astype(xp.abs(xp.where(small, x, xp.zeros_like(x))) * 2.0**40, xp.int32)
    low = xp.astype((units + noise) >> 16, xp.float32) * 2.0**-24
    high = size + (noise >> 3) & -0x2000
    return (xp.where(small, low.view(xp.int32), high) | sign).view(xp.float32)
