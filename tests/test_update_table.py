"""The table of the update on the host: what is written, when, and after a failure. No GPU is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cafin_cupy import table, update
from cafin_cupy.rule import Hyper
from cafin_cupy.update import CudaUpdate, Layout, scalars


class Table:
    """Takes the place of `DeviceTable`: keeps what each upload would have sent, and fails on request."""

    fail = False

    def __init__(self, dtype: Any, length: int, like: Any, device: int) -> None:
        self.rows, self.ptr, self.sent = np.zeros(length, dtype), 1, []

    def upload(self, stream: int) -> None:
        if Table.fail:
            raise MemoryError("no pinned memory")
        self.sent.append(self.rows.copy())


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> CudaUpdate:
    monkeypatch.setattr(table, "DeviceTable", Table)
    monkeypatch.setattr(update, "prepare", lambda device: None)
    monkeypatch.setattr(update, "Launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(Table, "fail", False)
    return CudaUpdate([Layout(6, 3, 0, 0), Layout(8, 0, 0, 0)], [(16, 32), (0, 0)], None, 0)


SETS = [scalars(Hyper(0.1, 0.9, 1e-3, 0.0, False), 1)]


def call(launch: CudaUpdate, p: list[int], g: list[int], m: list[int]) -> None:
    launch(p, g, m, SETS, [0, 0], 0)


def test_only_what_moved_is_uploaded(launch: CudaUpdate) -> None:
    p, g, m = [64, 128], [192, 256], [320, 384]
    for _ in range(3):
        call(launch, list(p), list(g), list(m))
    assert len(launch._table.sent) == 1
    call(launch, p, [192, 512], m)
    call(launch, p, [192, 0], m)
    assert [tuple(rows["g"]) for rows in launch._table.sent] == [(192, 256), (192, 512), (192, 0)]


def test_four_elements_at_once_only_where_all_three_allow_it(launch: CudaUpdate) -> None:
    for p, g, m in (([64, 128], [192, 260], [320, 384]), ([64, 132], [192, 256], [324, 384])):
        call(launch, p, g, m)
        want = [(a | b | c) % 16 == 0 for a, b, c in zip(p, g, m)]
        assert launch._table.sent[-1]["vector"].astype(bool).tolist() == want


def test_after_a_failed_upload_everything_is_written_again(launch: CudaUpdate, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([64, 128], [192, 256], [320, 384]), ([1024, 1088], [1152, 1216], [1280, 1344])
    call(launch, *first)
    with monkeypatch.context() as patch:
        patch.setattr(Table, "fail", True)
        with pytest.raises(MemoryError):
            call(launch, *second)
    call(launch, first[0], [2048, 2112], first[2])
    rows = launch._table.sent[-1]
    assert [rows[k].tolist() for k in "pgm"] == [first[0], [2048, 2112], first[2]]
