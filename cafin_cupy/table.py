"""The structs that kernels take, as NumPy dtypes, and their way to the device.

Each dtype mirrors the struct of the same name in `kernels/`: same order, C alignment. The loader passes the sizes to
the compiler, where a `static_assert` compares them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import allocate

TILE = 128  # columns of a block, as in kernels/common.cuh
CHUNK = 4096  # elements of a block of the update
HYPERS = 120  # different sets of scalars in one launch of the update

_PTR, _LONG, _INT, _REAL = "u8", "i8", "i4", "f4"


def _struct(**fields: Any) -> np.dtype[np.void]:
    return np.dtype(list(fields.items()), align=True)


def _fields(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


Operand = _struct(
    **_fields(_PTR, "x sums"),
    **_fields(_LONG, "rows stride columns run slice"),
    **_fields(_INT, "tiles slices parts square add vector"),
    **_fields(_REAL, "scale"),
    **_fields(_INT, "unused"),
)
ColumnSums = np.dtype([("operand", Operand, 2)], align=True)

FoldJob = _struct(
    **_fields(_PTR, "columns sums"),
    **_fields(_LONG, "first outputs run channel_step row_step column_step pixels"),
    **_fields(_INT, "slices parts add patches height width out_height out_width kernel_height kernel_width"),
    **_fields(_INT, "stride_y stride_x padding_y padding_x dilation_y dilation_x"),
)
Fold = _struct(jobs=_PTR, outputs=_LONG, count=_LONG)

Vector = _struct(
    **_fields(_PTR, "sums factor effective"), **_fields(_LONG, "units size groups"), **_fields(_REAL, "mean entry")
)
AverageJob = _struct(H=Vector, S=Vector, norm=_INT, unused=_INT)
Average = _struct(jobs=_PTR, keep="f8", add="f8", after=_INT, unused=_INT)

Parameter = _struct(
    **_fields(_PTR, "p g m H S"), **_fields(_LONG, "size columns"), **_fields(_INT, "channels taps hyper vector")
)
Hyper = _struct(**_fields(_REAL, "step_size decay l2 beta rest Lambda grad_scale"), unused=_INT)
Chunk = _struct(parameter=_INT, number=_INT)
Update = np.dtype([("parameters", _PTR), ("chunks", _PTR), ("hypers", Hyper, HYPERS)], align=True)

STRUCTS = {
    "ColumnSums": ColumnSums,
    "FoldJob": FoldJob,
    "Fold": Fold,
    "AverageJob": AverageJob,
    "Average": Average,
    "Parameter": Parameter,
    "Update": Update,
}


class DeviceTable:
    """An array of structs on a device, refreshed by one asynchronous copy from pinned memory.

    The host never waits: pinned memory that a copy may still be reading is left alone, and another piece is taken.
    """

    def __init__(self, dtype: np.dtype[np.void], length: int, like: Any) -> None:
        """`length` structs beside the array `like`: on its device, from its framework's allocator."""
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._dtype = dtype
        self._bytes = dtype.itemsize * max(1, length)
        self.rows = np.zeros(length, dtype)
        self._memory, self.ptr = allocate(like, self._bytes)
        self._staging: list[tuple[Any, np.ndarray[Any, Any], Any]] = []  # (pinned memory, array on it, event)

    def upload(self, stream: int) -> None:
        """Copy `rows` to the device, ordered on `stream`."""
        if not len(self.rows):
            return
        pinned, staged, event = self._free_staging()
        staged[...] = self.rows
        self._runtime.memcpyAsync(self.ptr, pinned.ptr, self._bytes, self._runtime.memcpyHostToDevice, stream)
        self._runtime.eventRecord(event.ptr, stream)

    def _free_staging(self) -> tuple[Any, np.ndarray[Any, Any], Any]:
        for staging in self._staging:
            if staging[2].done:
                return staging
        pinned = self._cupy.cuda.alloc_pinned_memory(self._bytes)
        array = np.frombuffer(pinned, dtype=self._dtype, count=len(self.rows))
        self._staging.append((pinned, array, self._cupy.cuda.Event(disable_timing=True)))
        return self._staging[-1]
