"""What the host tells the kernels of a layer, also after a failure. Launches are recorded; no GPU is touched."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from cafin_cupy import Averaging, BackendError, Linear, cuda_factors, cuda_sums, table
from cafin_cupy.cuda_factors import CudaFactors


class Recorder:
    """Takes the place of `Launch`: keeps the argument struct of every launch, by kernel."""

    launches: dict[str, list[Any]]

    def __init__(self, stem: str, name: str, device: Any, block: int) -> None:
        self.name = name

    def __call__(self, arguments: Any, grid: int, stream: int, then: Any = None) -> None:
        self.launches.setdefault(self.name, []).append(arguments.values.copy())
        then()


class Table:
    def __init__(self, dtype: Any, length: int, like: Any, device: Any) -> None:
        self.rows, self.ptr = np.zeros(length, dtype), 1

    def upload(self, stream: int) -> bool:
        return True

    def like(self) -> Table:
        return Table(self.rows.dtype, len(self.rows), None, None)


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> CudaFactors:
    monkeypatch.setattr(Recorder, "launches", {}, raising=False)
    monkeypatch.setattr(cuda_factors, "Launch", Recorder)
    monkeypatch.setattr(cuda_factors, "prepare", lambda device: None)
    monkeypatch.setattr(cuda_factors, "current_stream", lambda array, device: 0)
    monkeypatch.setattr(table, "DeviceTable", Table)
    return CudaFactors([Linear(torch.ones(3, 5))], Averaging.parity(), "cpu")  # type: ignore[arg-type]


def pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 5), torch.ones(rows, 3)


def test_memory_that_runs_out_leaves_no_half_described_layer(
    factors: CudaFactors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the earlier shape after one that failed must not be read with the failed one's rows."""
    small, large = pair(4), pair(4096)
    factors.accumulate(0, *small)
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def allocate(like: Any, size: int) -> Any:
            calls.append(size)
            if len(calls) == 2:  # the input is described, its output gradient is not
                raise MemoryError("no workspace")
            return None, 64

        patch.setattr(cuda_sums, "allocate", allocate)
        with pytest.raises(MemoryError):
            factors.accumulate(0, *large)
    factors.accumulate(0, *small)
    seen = [v["operand"][:2] for v in Recorder.launches["column_sums"]]
    assert [operands["rows"].tolist() for operands in seen] == [[4, 4], [4, 4]]
    assert factors._sums[0].count == 8  # the failed call has added nothing


def test_a_repeated_geometry_is_described_once(factors: CudaFactors) -> None:
    for _ in range(3):
        factors.accumulate(0, *pair(7))
    assert factors._sums[0].version == 1
    assert [int(v["operand"]["add"][0]) for v in Recorder.launches["column_sums"]] == [0, 1, 1]


def test_an_array_that_changes_while_it_waits_is_not_read(factors: CudaFactors) -> None:
    """Its layer keeps its factors on this step, the others do not; and nothing waits any more."""
    (h, s), (k, t) = pair(4), pair(6)
    factors.defer(0, h, s)
    factors.flush()
    factors.defer(0, k, t)
    t.mul_(0)
    with pytest.warns(UserWarning, match="changed in place before they were read"):
        factors.flush()
    assert factors._sums[0].count == 0 and len(Recorder.launches["column_sums"]) == 1
    factors.discard()
    factors.defer(0, k, t)
    assert len(Recorder.launches["column_sums"]) == 2 and not factors._waiting
    assert Recorder.launches["column_sums"][1]["operand"]["add"][0] == 0  # nothing is left of the dropped sums


def test_graphs_keep_what_they_read_and_nothing_else(factors: CudaFactors) -> None:
    def step(rows: int) -> None:
        factors.accumulate(0, *pair(rows))
        factors.update()

    step(128)
    before = factors._fold_table, factors._sums[0].halves[0].memory
    factors.hold()
    for rows in (4096, 128, 4096, 2048, 128):
        step(rows)
    assert factors._fold_table is not before[0]  # its rows are another geometry's now
    assert len(factors._held) == 7  # three tables, and workspace and sums of both arrays
    assert all(any(x is held for held in factors._held.values()) for x in before)


def test_a_spoiled_layer_counts_nothing_more_on_this_step(factors: CudaFactors) -> None:
    """Also where only `update` finds out, as after a backward pass that failed."""
    h, s = pair(4)
    factors.defer(0, h, s)
    s.mul_(0)
    with pytest.warns(UserWarning, match="changed in place"):
        factors.update()  # nothing is left to refresh
    assert "average" not in Recorder.launches
    factors.defer(0, *pair(4))
    factors.flush()
    factors.update()
    assert len(Recorder.launches["average"]) == 1  # the next step counts again
    factors._may_wait = True
    factors.defer(0, h, s)
    s.mul_(0)
    with pytest.warns(UserWarning, match="changed in place"):
        factors.flush()
    factors.defer(0, *pair(4))  # a second micro-batch of the step
    assert factors._sums[0].count == 0
    factors.update()
    assert len(Recorder.launches["average"]) == 1
    factors.discard()
    factors.defer(0, *pair(4))
    assert factors._sums[0].count == 4


def test_a_warning_that_is_an_error_leaves_nothing_waiting(factors: CudaFactors) -> None:
    h, s = pair(4)
    factors.defer(0, h, s)
    s.mul_(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="changed in place"):
            factors.flush()
    factors.flush()
    assert not factors.pending


def test_streams_that_could_not_be_ordered_are_ordered_by_the_next_call(
    factors: CudaFactors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read on another stream is not folded before it is there."""
    ordered: list[tuple[int, int]] = []
    fails = [True]

    def order(first: int, second: int, device: Any) -> None:
        if fails:
            fails.clear()
            raise MemoryError("no event")
        ordered.append((first, second))

    monkeypatch.setattr(cuda_factors, "order", order)
    monkeypatch.setattr(cuda_factors, "current_stream", lambda array, device: 7)
    factors.defer(0, *pair(4))
    monkeypatch.setattr(cuda_factors, "current_stream", lambda array, device: 8)
    with pytest.raises(MemoryError):
        factors.flush()
    assert len(Recorder.launches["column_sums"]) == 1 and factors._sums[0].count == 4
    factors.update()
    assert ordered == [(7, 8)]
    assert [len(Recorder.launches[name]) for name in ("column_sums", "fold", "average")] == [1, 1, 1]


def test_what_the_driver_does_not_take_still_waits(factors: CudaFactors, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise BackendError("the driver must take it")

    with monkeypatch.context() as patch:
        patch.setattr(factors, "_column_sums", refuse)
        factors.defer(0, *pair(4))
        with pytest.raises(BackendError):
            factors.flush()
        assert factors._sums[0].count == 4 and factors._waiting
        with pytest.raises(BackendError):
            factors.accumulate(0, *pair(4))
    assert factors._sums[0].count == 4  # what waited does, the call that failed has added nothing
    factors.update()
    assert factors.refreshed and not factors.pending
    assert len(Recorder.launches["column_sums"]) == len(Recorder.launches["average"]) == 1
