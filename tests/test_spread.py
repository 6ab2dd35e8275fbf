"""Shares of a model on several devices act as one; here the devices are one and the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cafin_cupy import Averaging, Linear, spread
from cafin_cupy.arrays import view
from cafin_cupy.cuda_update import CudaUpdate, layout, scalars
from cafin_cupy.factors import ReferenceFactors
from cafin_cupy.rule import Hyper

SHAPES = [(4, 3), (2, 4), (5, 2), (3, 3), (1, 6)]


def layers() -> list[Linear]:
    return [Linear(np.ones(shape, np.float32), name=str(k)) for k, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("rule", ["parity", "paper"])
def test_factors(rule: str) -> None:
    averaging = Averaging.named(rule, 0.8)
    one, every = layers(), layers()
    whole = ReferenceFactors(one, averaging)
    places = [[3, 0], [1, 4], [2]]
    shares = [(mine, ReferenceFactors([every[k] for k in mine], averaging)) for mine in places]
    factors = spread.SpreadFactors(every, averaging, shares)
    rng = np.random.default_rng(0)
    for step in range(3):
        for k, (rows, columns) in enumerate(SHAPES):
            if (step + k) % 4 == 0:
                continue
            h, s = (rng.standard_normal((7, n)).astype(np.float32) for n in (columns, rows))
            whole.accumulate(k, h, s)
            (factors.defer if k % 2 else factors.accumulate)(k, h, s)
        assert factors.pending
        factors.flush()
        for (k, mine), (other, theirs) in zip(factors.sums(), whole.sums(), strict=True):
            assert k == other and mine.n == theirs.n
            np.testing.assert_array_equal(mine.H, theirs.H)
        for each in (whole, factors):
            if step == 1:
                each.discard()
            each.update(2.0)
        assert not factors.pending
    for k in range(len(SHAPES)):
        for mine, theirs in zip((*factors.of_weight(k), *factors.of_bias(k)), (*whole.of_weight(k), *whole.of_bias(k))):
            np.testing.assert_array_equal(mine, theirs)
    factors.load(2, np.full(2, 0.5), np.full(5, 0.25))
    assert shares[2][1].H[0].tolist() == [0.5, 0.5] and factors.S[2].tolist() == [0.25] * 5


@pytest.mark.gpu
def test_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second parameter on "another device"; each share gets its own sets of scalars."""
    import cupy as xp

    rng = np.random.default_rng(1)
    sizes = [5, 1, 300, 40, 7]
    p, g, m = ([xp.asarray(rng.standard_normal(n).astype(np.float32)) for n in sizes] for _ in "pgm")
    copies = [[x.copy() for x in every] for every in (p, m)]
    layouts = [layout("test", "p", view(x), 0) for x in p]
    factors = [(0, 0)] * len(sizes)
    sets = [scalars(Hyper(lr, 0.9, 1e-3, 0.1, False), t) for lr, t in ((0.1, 1), (0.2, 3), (0.3, 2))]
    which = [2, 0, 1, 0, 2]

    def at(arrays: list[Any]) -> list[int]:
        return [view(x).ptr for x in arrays]

    made = []

    class OnFirst(CudaUpdate):
        def __init__(self, layouts: Any, factors: Any, like: Any, device: int) -> None:
            made.append(device)
            super().__init__(layouts, factors, like, 0)

    monkeypatch.setattr(spread, "CudaUpdate", OnFirst)
    monkeypatch.setattr(spread, "current_stream", lambda like, device: 0)
    update = spread.SpreadUpdate(layouts, factors, p, [0, 1, 0, 1, 0])
    assert made == [0, 1]
    update(at(p), at(g), at(m), sets, which)
    CudaUpdate(layouts, factors, p[0], 0)(at(copies[0]), at(g), at(copies[1]), sets, which, 0)
    for mine, theirs in zip((*p, *m), (*copies[0], *copies[1])):
        np.testing.assert_array_equal(mine.get(), theirs.get())
