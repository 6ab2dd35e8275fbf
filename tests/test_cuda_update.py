"""The table of the update on the host: what is written, when, and after a failure. No GPU is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cafin_cupy import cuda_update, table
from cafin_cupy.cuda_update import CudaUpdate, Layout, scalars
from cafin_cupy.rule import Hyper


class Table:
    """Takes the place of `DeviceTable`: keeps what each upload would have sent, and fails on request."""

    fail = False
    captured = False  # what an upload says of itself

    def __init__(self, dtype: Any, length: int, like: Any, device: int) -> None:
        self.rows, self.ptr, self.sent = np.zeros(length, dtype), 1, []

    def upload(self, stream: int) -> bool:
        if Table.fail:
            raise MemoryError("no pinned memory")
        self.sent.append(self.rows.copy())
        return not self.captured


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> CudaUpdate:
    return made(monkeypatch, [Layout(6, 3, 0, 0), Layout(8, 0, 0, 0)])


def made(monkeypatch: pytest.MonkeyPatch, layouts: list[Layout], masters: Sequence[int] = ()) -> CudaUpdate:
    """A launch of parameters that all have factors but the second."""
    monkeypatch.setattr(table, "DeviceTable", Table)
    monkeypatch.setattr(cuda_update, "prepare", lambda device, mixed: None)
    monkeypatch.setattr(cuda_update, "Launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(Table, "fail", False)
    factors = [(0, 0) if k == 1 else (16, 32) for k in range(len(layouts))]
    return CudaUpdate(layouts, factors, None, 0, masters)


SETS = [scalars(Hyper(0.1, 0.9, 1e-3, 0.0, False), 1)]


def call(launch: CudaUpdate, p: list[int], g: list[int], m: list[int]) -> None:
    launch(p, g, m, SETS, [0, 0], 0)


def test_only_what_moved_is_uploaded(launch: CudaUpdate) -> None:
    p, g, m = [64, 128], [192, 256], [320, 384]
    for _ in range(3):
        call(launch, list(p), list(g), list(m))
    assert len(launch._table.sent) == 1
    call(launch, [64, 512], g, m)
    assert [tuple(rows["p"]) for rows in launch._table.sent] == [(64, 128), (64, 512)]


def test_gradients_are_arguments(launch: CudaUpdate) -> None:
    for g in ([192, 256], [192, 512], [192, 0]):
        call(launch, [64, 128], g, [320, 384])
        values = launch._arguments.values
        assert values["words"][::-1][:2].tolist() == g and values["gradients"] == 0
    assert len(launch._table.sent) == 1 and launch._gradients.sent == []


def test_more_gradients_than_arguments_hold_are_uploaded_when_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    count = table.WORDS + 1
    launch = made(monkeypatch, [Layout(6, 3, 0, 0)] * count)
    p, m = list(range(16, 16 * count + 1, 16)), list(range(16 * count, 32 * count, 16))
    for g in (p, list(p), m):
        launch(p, g, m, SETS, [0] * count, 0)
        assert launch._gradients.sent[-1].tolist() == g
        assert launch._arguments.values["gradients"] != 0 and launch._arguments.values["hypers"] == 0
    assert len(launch._gradients.sent) == 2


def test_after_a_capture_gradients_are_always_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay brings its own addresses to the table, at any time."""
    count = table.WORDS + 1
    launch = made(monkeypatch, [Layout(6, 3, 0, 0)] * count)
    p, g = list(range(16, 16 * count + 1, 16)), list(range(16 * count, 32 * count, 16))
    for captured, addresses in ((False, g), (True, g), (False, g), (False, p), (False, p)):
        monkeypatch.setattr(Table, "captured", captured)
        if captured:
            launch.expect_capture()
        launch(p, addresses, p, SETS, [0] * count, 0)
    assert [sent.tolist() for sent in launch._gradients.sent] == [g, g, g, p, p]


def test_more_scalars_than_arguments_hold_are_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    count = table.WORDS // 4
    launch = made(monkeypatch, [Layout(6, 3, 0, 0)] * count)
    sets = [scalars(Hyper(0.1, 0.9, 1e-3, 0.0, False), t + 1) for t in range(count)]
    p = list(range(16, 16 * count + 1, 16))
    launch(p, p, p, sets, list(range(count)), 0)
    want = np.array(sets, dtype=np.float32)
    np.testing.assert_array_equal(launch._hypers.sent[-1]["step_size"], want[:, 0])
    assert launch._arguments.values["hypers"] != 0 and launch._arguments.values["gradients"] == 0


def test_four_elements_at_once_only_where_both_allow_it(launch: CudaUpdate) -> None:
    """The kernel looks at the gradient's address itself."""
    for p, m in (([64, 128], [320, 388]), ([64, 132], [324, 384])):
        call(launch, p, [192, 256], m)
        want = [(a | b) % 16 == 0 for a, b in zip(p, m)]
        assert launch._table.sent[-1]["vector"].astype(bool).tolist() == want


def test_four_elements_at_once_by_the_sizes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 16 bits take 8 bytes; those of a master take 16."""
    kinds = [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
    layouts = [Layout(8, 0, 0, 0, dtype, momentum) for dtype, momentum in kinds]
    launch = made(monkeypatch, layouts, [0, 0, 0, 4096])
    for p, m, master, want in (
        ([8, 8, 16, 8], [16, 8, 8, 16], 4096, [1, 1, 1, 1]),
        ([4, 4, 8, 8], [16, 8, 8, 16], 4096, [0, 0, 0, 1]),
        ([8, 8, 16, 8], [8, 4, 4, 16], 4096, [0, 0, 0, 1]),
        ([8, 8, 16, 8], [16, 8, 8, 16], 4104, [1, 1, 1, 0]),
    ):
        launch._table.rows["master"][3] = master
        launch(p, [64] * 4, m, SETS, [0] * 4, 0)
        assert launch._table.sent[-1]["vector"].tolist() == want


def test_after_a_failed_upload_everything_is_written_again(launch: CudaUpdate, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([64, 128], [192, 256], [320, 384]), ([1024, 1088], [1152, 1216], [1280, 1344])
    call(launch, *first)
    with monkeypatch.context() as patch:
        patch.setattr(Table, "fail", True)
        with pytest.raises(MemoryError):
            call(launch, *second)
    call(launch, first[0], [2048, 2112], first[2])
    rows = launch._table.sent[-1]
    assert [rows[k].tolist() for k in "pm"] == [first[0], first[2]]
