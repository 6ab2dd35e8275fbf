"""The structs that kernels take, as NumPy dtypes, and their way to the device.

Each dtype mirrors the struct of the same name in `kernels/`: same order, C alignment. The loader passes the sizes to
the compiler, where a `static_assert` compares them.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np

from .arrays import allocate, on_device

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
HYPER = struct.Struct("7fi")  # packs a Hyper faster than NumPy does
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


_one_upload = threading.Lock()  # from the choice of a piece of pinned memory to the event that guards it
_pinned: dict[tuple[int, int], list[tuple[Any, np.ndarray[Any, Any], Any]]] = {}


def _staging(size: int, device: int) -> tuple[Any, np.ndarray[Any, Any], Any]:
    """(pinned memory, bytes of it, event): `size` bytes that no copy is still reading.

    Kept for good and shared by all tables of a device: CuPy's own pool would hand pinned memory out again while a copy
    from it still waits. The host never waits: where all pieces are in use, another is taken.
    """
    import cupy

    pieces = _pinned.setdefault((size, device), [])
    for piece in pieces:
        if piece[2].done:
            return piece
    memory = cupy.cuda.alloc_pinned_memory(size)
    pieces.append((memory, np.frombuffer(memory, dtype=np.uint8, count=size), cupy.cuda.Event(disable_timing=True)))
    return pieces[-1]


class DeviceTable:
    """An array of structs on a device, refreshed by one asynchronous copy from pinned memory."""

    def __init__(self, dtype: np.dtype[np.void], length: int, like: Any, device: int) -> None:
        """`length` structs on `device`, from the allocator of the framework that owns the array `like`."""
        self.rows = np.zeros(length, dtype)
        self._content = self.rows.view(np.uint8)
        self._device = device
        self._memory, self.ptr = allocate(like, max(1, self._content.size))

    def upload(self, stream: int) -> None:
        """Copy `rows` to the device, ordered on `stream`."""
        import cupy

        size = self._content.size
        if not size:
            return
        runtime = cupy.cuda.runtime
        with on_device(self._device), _one_upload:
            pinned, staged, event = _staging(1 << (size - 1).bit_length(), self._device)  # a power of two, to share
            staged[:size] = self._content
            runtime.memcpyAsync(self.ptr, pinned.ptr, size, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(event.ptr, stream)
