"""Shares of a model on several devices act as one; here the devices are one and the same."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from cafin_cupy import Averaging, Linear, cuda_factors, spread
from cafin_cupy import factors as module_of_factors
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
        if step == 2:  # as of several ranks
            factors.take(factors.sums())
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


def test_a_failure_on_one_device_refreshes_no_factors_twice() -> None:
    averaging = Averaging.named("parity", 0.8)
    one, every = layers()[:3], layers()[:3]
    whole = ReferenceFactors(one, averaging)
    shares = [([k], ReferenceFactors([every[k]], averaging)) for k in range(3)]
    factors = spread.SpreadFactors(every, averaging, shares)
    rng = np.random.default_rng(3)
    pairs = [[rng.standard_normal((7, n)).astype(np.float32) for n in reversed(shape)] for shape in SHAPES[:3]]

    def accumulate(to: Any) -> None:
        for k, (h, s) in enumerate(pairs):
            to.accumulate(k, h, s)

    accumulate(whole)
    whole.update()
    accumulate(factors)
    second = shares[1][1]
    attempt = second.ready

    def fails(grad_scale: float = 1.0) -> Any:
        def refresh() -> None:
            raise MemoryError

        attempt(grad_scale)
        return refresh

    second.ready = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        factors.update()
    assert shares[0][1].refreshed and not factors.refreshed
    second.ready = attempt  # type: ignore[method-assign]
    factors.discard()  # the script makes the gradients of this step once more
    accumulate(factors)
    factors.update()
    assert factors.refreshed and not factors.pending
    for mine, theirs in zip((*factors.H, *factors.S), (*whole.H, *whole.S)):
        np.testing.assert_array_equal(mine, theirs)
    factors.refreshed = False
    assert not any(share.refreshed for _, share in shares)


def test_a_frozen_layer_may_lie_where_nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the lower half of a spread model does: its factors are made beside its weight."""
    made = {}

    def factors(layers: Any, averaging: Averaging, device: int) -> ReferenceFactors:
        made[device] = [layer.name for layer in layers]
        return ReferenceFactors(layers, averaging)

    every = layers()
    places = {id(layer.weight): 3 if layer.name in ("1", "4") else 0 for layer in every}
    monkeypatch.setattr(cuda_factors, "CudaFactors", factors)
    monkeypatch.setattr(module_of_factors, "view", lambda array, *_: view(array)._replace(device=places[id(array)]))
    spread_out = module_of_factors.make_factors(every, Averaging.named("parity", 0.8), "cuda", {0})
    assert made == {0: ["0", "2", "3"], 3: ["1", "4"]}
    assert [tuple(H.shape) for H in spread_out.H] == [(columns,) for _, columns in SHAPES]


class Recorded:
    """In place of `CudaUpdate`: prepares, does what comes ahead, launches."""

    log: ClassVar[list[str]] = []
    failing: ClassVar[set[str]] = set()

    def __init__(self, layouts: Any, factors: Any, like: Any, device: int, *_: Any) -> None:
        self.device = device

    def _does(self, what: str) -> None:
        if what in self.failing:
            raise MemoryError
        self.log.append(what)

    def __call__(
        self, p: Any, g: Any, m: Any, scalars: Any, which: Any, stream: int, ahead: Any = None, then: Any = None
    ) -> None:
        self._does(f"prepare {self.device}")
        if ahead is not None:
            ahead()
        self._does(f"launch {self.device}")
        then()


def test_all_devices_are_prepared_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    log, failing = Recorded.log, Recorded.failing
    log.clear()
    monkeypatch.setattr(spread, "CudaUpdate", Recorded)
    monkeypatch.setattr(spread, "current_stream", lambda like, device: 0)
    update = spread.SpreadUpdate([None] * 3, [(0, 0)] * 3, [None] * 3, [0, 1, 2])  # type: ignore[list-item]

    def step() -> list[str]:
        log.clear()
        update([1, 2, 3], [1, 2, 3], [1, 2, 3], [(0.1,)], [0, 0, 0], 0, partial(log.append, "factors"), counted)
        return log

    def counted() -> None:
        log.append("count")

    expected = ["prepare 2", "prepare 1", "prepare 0", "factors", "launch 0", "launch 1", "launch 2", "count"]
    assert step() == expected
    failing.add("prepare 0")
    with pytest.raises(MemoryError):
        step()
    assert log == expected[:2]
    failing.clear()
    assert step() == expected
    failing.add("launch 1")
    with pytest.raises(MemoryError):
        step()
    assert log == expected[:5]
    failing.clear()
    assert step() == ["prepare 2", "prepare 1", "factors", "launch 1", "launch 2", "count"]  # not a second time
    assert step() == expected


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
        def __init__(self, layouts: Any, factors: Any, like: Any, device: int, *_: Any) -> None:
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
