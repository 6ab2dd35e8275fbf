"""A loss scaler's verdict and scale, which the kernel average reads on the device; and a number on its way back."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from helpers import CUDA, EXAMPLES, RAW, close, integral, numpy_of
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy import Averaging, reference, table
from cafin_cupy.arrays import current_stream, view
from cafin_cupy.cuda_factors import CudaFactors
from cafin_cupy.verdict import Readback, Verdict

pytestmark = pytest.mark.gpu

RULES = {"before": Averaging.named("parity", 0.8), "after": Averaging.named("paper", 0.8)}
FOUND = [1.0, 2.0, np.inf, np.nan]  # a scaler adds up what it has found on each device


def made(rule: Averaging) -> CudaFactors:
    """Factors of one layer of each kind, norm layers and counted ones among them."""
    return CudaFactors([case.layer(lambda shape: CUDA.zeros(*shape)) for case in EXAMPLES], rule, 0)


def see(factors: CudaFactors, seed: int, scale: float = 1.0) -> None:
    """A backward pass of a loss times `scale`."""
    for index, case in enumerate(EXAMPLES):
        h, s = case.data(seed)
        factors.accumulate(index, CUDA.array(h), CUDA.array(np.float32(scale) * np.float32(s)))


def number(x: Any, dtype: str = "float32") -> Any:
    import cupy

    return cupy.asarray(np.array([x], dtype))


def verdict(found: float = 0.0, scale: float | None = None, skipped: int = 0, known: int = -1) -> tuple[Verdict, Any]:
    """And what it points to."""
    held = number(found), None if scale is None else number(scale), number(skipped, "int64")
    found_at, scale_at, skipped_at = (0 if x is None else view(x).ptr for x in held)
    return Verdict(found_at, 0, skipped_at, scale_at, known), held


def refresh(factors: CudaFactors, grad_scale: float, said: tuple[Verdict, Any]) -> None:
    ready = factors.ready(grad_scale, said[0])
    assert ready is not None
    ready()
    assert factors.refreshed and not factors.pending
    factors.refreshed = False


def state(factors: CudaFactors) -> list[bytes]:
    every = (factors.H, factors.S, factors.H_effective, factors.S_effective, factors.skipped)
    return [numpy_of(F).tobytes() for arrays in every for F in arrays]


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.7])
@pytest.mark.parametrize("rule", RULES)
def test_a_scale_on_the_device_has_the_bits_of_one_that_the_host_knows(rule: str, scale: float) -> None:
    scale = float(np.float32(scale))
    by_host, by_device, by_both = made(RULES[rule]), made(RULES[rule]), made(RULES[rule])
    for seed in range(2):
        for factors in (by_host, by_device, by_both):
            see(factors, seed, scale)
        by_host.update(scale)
        refresh(by_device, 1.0, verdict(scale=scale))
        refresh(by_both, scale / 4, verdict(scale=4.0))
    assert state(by_device) == state(by_host)
    assert state(by_both) == state(by_host)


def test_the_scale_is_divided_out_twice() -> None:
    """Raw moments against float64: of the loss itself, whatever it was multiplied by."""
    factors = made(RAW)
    see(factors, 5, 1000.0)
    refresh(factors, 1.0, verdict(scale=1000.0))
    for index, case in enumerate(EXAMPLES):
        layer, (h, s) = case.layer(), case.data(5)
        want = reference.raw_moments(layer, reference.raw_sums(layer, h, s))
        bound = reference.raw_moments(layer, reference.raw_sums(layer, h if integral(h) else abs(h), abs(s)))
        for got, exact, largest in zip((factors.H[index], factors.S[index]), want, bound):
            # RAW normalises what enters the preconditioner, not these. s * 1000 is rounded once more.
            close(got, exact, CUDA.tolerance, largest)


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_does_not_happen_changes_no_bit(rule: str, found: float) -> None:
    """Nor counts a NaN; and its sums are no part of the next."""
    factors, other = made(RULES[rule]), made(RULES[rule])
    for each in (factors, other):
        see(each, 0)
        each.update()
    before = state(factors)
    see(factors, 1, np.nan)
    refresh(factors, 1.0, verdict(found, 8.0))
    assert state(factors) == before
    for each in (factors, other):
        see(each, 2)
        refresh(each, 1.0, verdict())
    assert state(factors) == state(other) != before


@pytest.mark.parametrize(("skipped", "known", "happens"), [(4, 4, True), (5, 4, False), (5, -1, True), (0, 0, True)])
def test_steps_that_have_not_happened_put_a_refresh_off(skipped: int, known: int, happens: bool) -> None:
    factors = made(RULES["before"])
    before = state(factors)
    see(factors, 3)
    refresh(factors, 1.0, verdict(skipped=skipped, known=known))
    assert (state(factors) != before) is happens


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1.0, 2.0**10, 0.3])), max_size=6), st.sampled_from([*RULES]))
def test_any_sequence_of_verdicts(steps: list[tuple[bool, float]], rule: str) -> None:
    """As where the host reads them, and leaves out what does not happen."""
    by_device, by_host = made(RULES[rule]), made(RULES[rule])
    for seed, (skips, scale) in enumerate(steps):
        scale = float(np.float32(scale))
        see(by_device, seed, scale)
        refresh(by_device, 1.0, verdict(float(skips), scale))
        if not skips:
            see(by_host, seed, scale)
            by_host.update(scale)
    assert state(by_device) == state(by_host)


# On its way back


def stream() -> int:
    return current_stream(number(0), 0)


def test_a_number_is_read_as_it_was_when_the_stream_came_to_it() -> None:
    readback, x = Readback(0), number(3, "int64")
    readback.start(view(x).ptr, stream())
    x += 2**40
    assert readback.wait() == readback.wait() == 3
    readback.start(view(x).ptr, stream())
    assert readback.wait() == 2**40 + 3


def test_memory_is_lent_to_one_at_a_time_and_comes_back() -> None:
    table._pinned.clear()
    first, second = Readback(0), Readback(0)
    numbers = [number(n, "int64") for n in (1, 2)]
    for readback, x in zip((first, second), numbers):
        readback.start(view(x).ptr, stream())
    assert (first.wait(), second.wait()) == (1, 2)
    pieces = [piece for pieces in table._pinned.values() for piece in pieces]
    assert len(pieces) == 2 and all(piece.busy for piece in pieces)
    del first, second, readback
    gc.collect()
    assert not any(piece.busy for piece in pieces)
    Readback(0)
    assert len([piece for pieces in table._pinned.values() for piece in pieces]) == 2
