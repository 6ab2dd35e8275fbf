"""The structs that kernels take: the same bytes in Python and in CUDA C; and their way to the device."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cafin_cupy import BackendError, cuda_factors, cuda_update, fold, matrix, runtime, table

STEMS = sorted(runtime.KERNELS)


def structs_of(stem: str) -> list[str]:
    """The structs that come from Python: in each file those in front of the comparisons of sizes, if it has any."""
    names = []
    for part in re.split("^#line ", runtime.source(stem), flags=re.MULTILINE):
        head = part.rpartition("static_assert(sizeof")[0] or part
        names += re.findall(r"^struct (\w+) \{", head, re.MULTILINE)
    return names


@pytest.mark.parametrize("stem", STEMS)
def test_every_field_lies_where_python_puts_it(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler compares sizes and offsets, field by field (`__INTADDR__` is what its own offsetof is made of)."""
    names = structs_of(stem)
    assert names
    checks = []
    for name in names:
        struct = getattr(table, name)
        checks.append(f'static_assert(sizeof({name}) == {struct.itemsize}, "size of {name}");')
        for field, (_, offset) in struct.fields.items():
            checks.append(f'static_assert(__INTADDR__(&(({name}*)0)->{field}) == {offset}, "{name}.{field}");')
    text = runtime.source(stem)
    monkeypatch.setattr(runtime, "source", lambda stem: text + "\n".join(checks))
    assert runtime.compile_cubin(stem, "sm_90")
    monkeypatch.setattr(runtime, "source", lambda stem: text + checks[-1].replace("== ", "== 1 + "))
    with pytest.raises(BackendError, match=f"{names[-1]}"):  # the comparison is able to fail
        runtime.compile_cubin(stem, "sm_90")


def test_every_struct_of_a_kernel_is_listed() -> None:
    found = {name for stem in STEMS for name in structs_of(stem)}
    assert found == {name for name, value in vars(table).items() if isinstance(value, np.dtype)}


@pytest.mark.parametrize("name", sorted(table.STRUCTS))
def test_a_struct_of_another_size_does_not_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stems = [stem for stem in STEMS if f"SIZEOF_{name}" in runtime.source(stem)]
    assert stems
    wrong = np.dtype([("bytes", "u1", table.STRUCTS[name].itemsize + 8)])
    monkeypatch.setitem(table.STRUCTS, name, wrong)
    for stem in stems:
        with pytest.raises(BackendError, match=f"disagree on {name}"):
            runtime.compile_cubin(stem, "sm_90")


def test_arguments_fit_every_device() -> None:
    """4 KiB of arguments a launch, and each struct a whole number of 8-byte words, as arrays of it are read."""
    for struct in (table.ColumnSums, table.Fold, table.Average, table.Schedule, table.Update):
        assert struct.itemsize <= 4096
    for struct in (table.FoldJob, table.AverageJob, table.Parameter, table.Share, table.Hyper, table.Rate):
        assert struct.itemsize % 8 == 0


def test_constants_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def constants(stem: str) -> dict[str, int]:
        return {name: int(n) for name, n in re.findall(r"^constexpr int (\w+) = (\d+);", runtime.source(stem), re.M)}

    assert constants("column_sums")["THREADS"] == matrix.COLUMN_SUMS_BLOCK
    assert constants("column_sums")["WIDE"] == table.WIDE
    assert constants("fold")["THREADS"] == fold.FOLD_BLOCK
    assert constants("fold")["LANES"] == fold.FOLD_LANES
    assert constants("update")["WORDS"] == table.WORDS
    assert constants("average")["THREADS"] == cuda_factors.AVERAGE_BLOCK
    assert constants("update")["THREADS"] == cuda_update.BLOCK
    assert f"-DCHUNK={table.CHUNK}" in runtime.options()
    assert table.Operand.fields["x"][1] == 0  # an address is written there
    tile = 'static_assert(TILE<T> == {0} && TILE<Half> == 2 * {0} && TILE<Bfloat16> == 2 * {0}, "TILE");'
    text = runtime.source("column_sums") + tile.format(table.TILE)
    monkeypatch.setattr(runtime, "source", lambda stem: text)
    assert runtime.compile_cubin("column_sums", "sm_90")


def test_packed_scalars_are_a_hyper() -> None:
    packed = np.frombuffer(table.HYPER.pack(1, 2, 3, 4, 5, 6, 7, 8), table.Hyper)[0]
    assert table.HYPER.size == table.Hyper.itemsize and packed.item() == (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.gpu
def test_rows_reach_the_device() -> None:
    import cupy

    like = cupy.zeros(1)
    rows = table.DeviceTable(table.Share, 5, like, 0)
    rows.rows["item"], rows.rows["number"] = np.arange(5), 7
    stream = cupy.cuda.Stream(non_blocking=True)
    rows.upload(stream.ptr)
    stream.synchronize()
    back = np.zeros(5, table.Share)
    cupy.cuda.runtime.memcpy(back.ctypes.data, rows.ptr, back.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    np.testing.assert_array_equal(back, rows.rows)
    table.DeviceTable(table.Share, 0, like, 0).upload(0)  # nothing to do


@pytest.mark.gpu
def test_uploads_behind_a_busy_stream_keep_their_own_content() -> None:
    """The host runs ahead: later rows must not overwrite pinned memory that an earlier copy has yet to read."""
    import cupy
    import torch

    stream = torch.cuda.Stream()
    rows = table.DeviceTable(table.Share, 3, torch.zeros(1, device="cuda"), 0)
    seen = torch.zeros(8, 3, 2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
    for k in range(8):
        rows.rows["item"], rows.rows["number"] = k, -k
        rows.upload(stream.cuda_stream)
        runtime_ = cupy.cuda.runtime
        runtime_.memcpyAsync(seen[k].data_ptr(), rows.ptr, 24, runtime_.memcpyDeviceToDevice, stream.cuda_stream)
    stream.synchronize()
    for k in range(8):
        assert seen[k].tolist() == [[k, -k]] * 3
