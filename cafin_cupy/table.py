"""The structs that kernels take, as NumPy dtypes, and their way to the device.

Each dtype mirrors the struct of the same name in `kernels/`: same order, C alignment. The loader passes the sizes to
the compiler, where a `static_assert` compares them.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import forks
from .arrays import allocate, on_device
from .errors import BackendError

TILE, WIDE = 128, 512  # columns that a block of column_sums reads; TILE is in float32, twice as many in 16-bit types
CHUNK = 4096  # elements of a block of the update
OPERANDS = 32  # arrays in one launch of column_sums
WORDS = 504  # room for scalars and addresses in the arguments of an update, in 8 bytes
FLAGS = 480  # words of flags in the arguments of a schedule

_PTR, _LONG, _INT, _REAL = "u8", "i8", "i4", "f4"


def _struct(**fields: Any) -> np.dtype[np.void]:
    return np.dtype(list(fields.items()), align=True)


def _fields(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


Operand = _struct(
    **_fields(_PTR, "x sums"),
    **_fields(_LONG, "rows stride columns run slice"),
    **_fields(_INT, "first tiles slices parts square add element wide length"),
    scale=_REAL,
)
ColumnSums = np.dtype([("operand", Operand, OPERANDS), ("count", _INT), ("unused", _INT)], align=True)

FoldJob = _struct(
    **_fields(_PTR, "columns sums"),
    **_fields(_LONG, "outputs run channel_step depth_step row_step column_step pixels"),
    **_fields(_INT, "slices parts tile add across down depth height width out_depth out_height out_width"),
    **_fields(_INT, "kernel_depth kernel_height kernel_width stride_z stride_y stride_x padding_z padding_y padding_x"),
    **_fields(_INT, "dilation_z dilation_y dilation_x"),
    scale=_REAL,
    unused=_INT,
)
Fold = _struct(**_fields(_PTR, "jobs shares"))

Vector = _struct(
    **_fields(_PTR, "sums factor effective"), **_fields(_LONG, "units size groups tail"), **_fields(_REAL, "mean entry")
)
AverageJob = _struct(H=Vector, S=Vector, skipped=_PTR, norm=_INT, counted=_INT)
Average = _struct(
    jobs=_PTR,
    **_fields("f8", "keep add grad_scale"),
    **_fields(_PTR, "found_inf scale missed"),
    known=_LONG,
    **_fields(_INT, "after unused"),
)

Parameter = _struct(
    **_fields(_PTR, "p m master H S"),
    **_fields(_LONG, "size columns"),
    **_fields(_INT, "channels taps hyper vector kind key"),
)
Hyper = _struct(**_fields(_REAL, "step_size decay l2 beta rest Lambda grad_scale"), noise="u4")
HYPER = struct.Struct("7fI")  # packs a Hyper faster than NumPy does
Share = _struct(item=_INT, number=_INT)  # what a block works on: an item, and its place within it
Rate = _struct(**_fields("f8", "lr beta Lambda l2 decay grad_scale"), lr_at=_PTR, begin="u8")
Schedule = np.dtype(
    [
        *_fields(_PTR, "rates groups steps hypers").items(),
        *_fields(_LONG, "first count by").items(),
        *_fields(_PTR, "found_inf scale skipped").items(),
        ("present", "u8", FLAGS),
    ],
    align=True,
)
Update = np.dtype([*_fields(_PTR, "parameters shares hypers gradients").items(), ("words", "u8", WORDS)], align=True)

STRUCTS = {
    "ColumnSums": ColumnSums,
    "FoldJob": FoldJob,
    "Fold": Fold,
    "AverageJob": AverageJob,
    "Average": Average,
    "Parameter": Parameter,
    "Rate": Rate,
    "Schedule": Schedule,
    "Update": Update,
}


class _Piece:
    """Pinned memory, and when it can be written again."""

    def __init__(self, size: int) -> None:
        import cupy

        self.memory = cupy.cuda.alloc_pinned_memory(size)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8, count=size)
        self.read: Any = cupy.cuda.Event(disable_timing=True)  # behind the last copy from it
        self.busy = False  # a copy may be under way that no event guards, as one that was interrupted


_one_upload = threading.Lock()  # from the choice of a piece to the event that guards it
_pinned: dict[tuple[int, int], list[_Piece]] = {}


def _staging(size: int, device: int) -> _Piece:
    """`size` bytes that no copy is still reading.

    Kept for good and shared by all tables of a device: CuPy's own pool would hand pinned memory out again while a copy
    from it still waits. The host never waits: where all pieces are in use, another is taken.
    """
    pieces = _pinned.setdefault((size, device), [])
    for piece in pieces:
        if not piece.busy and piece.read.done:
            return piece
    pieces.append(_Piece(size))
    return pieces[-1]


def lent(size: int, device: int) -> _Piece:
    """Pinned memory for one who keeps it, until `busy` is set back; a copy that its event guards may be under way."""
    with on_device(device), _one_upload:
        piece = _staging(size, device)
        piece.busy = True
    return piece


_captured: list[Any] = []  # pinned memory that graphs read, kept for good


class DeviceTable:
    """An array of structs on a device, refreshed by one asynchronous copy from pinned memory."""

    def __init__(self, dtype: np.dtype[Any], length: int, like: Any, device: int) -> None:
        """`length` structs on `device`, from the allocator of the framework that owns the array `like`."""
        self.rows = np.zeros(length, dtype)
        self._made_like = like
        self._content = self.rows.view(np.uint8)
        self._device = device
        self._reserved: Any = None
        self._memory, self.ptr = allocate(like, max(1, self._content.size))

    def like(self) -> DeviceTable:
        """Another table of this size."""
        return DeviceTable(self.rows.dtype, len(self.rows), self._made_like, self._device)

    def reserve(self) -> None:
        """Provide pinned memory for one upload that a CUDA graph will capture, and may repeat for ever."""
        import cupy

        with on_device(self._device):
            self._reserved = cupy.cuda.alloc_pinned_memory(max(1, self._content.size))

    def upload(self, stream: int) -> bool:
        """Copy `rows` to the device, ordered on `stream`.

        Returns:
            False if a CUDA graph has captured the copy: the rows are there after each replay, not now.

        Raises:
            BackendError: a CUDA graph captures the stream, and no memory was reserved for the copy; or this process
                must not use CUDA.
        """
        import cupy

        size = self._content.size
        if not size:
            return True
        forks.refuse_child("upload")
        runtime = cupy.cuda.runtime
        if runtime.streamIsCapturing(stream):
            pinned, self._reserved = self._reserved, None
            if pinned is None:
                raise BackendError(
                    "upload: what a CUDA graph captures must have run before with the same shapes and memory, got new "
                    "ones; run a few iterations first, both sampled and unsampled ones"
                )
            _captured.append(pinned)
            np.frombuffer(pinned, dtype=np.uint8, count=size)[:] = self._content
            runtime.memcpyAsync(self.ptr, pinned.ptr, size, runtime.memcpyHostToDevice, stream)
            return False
        with on_device(self._device), _one_upload:
            piece = _staging(1 << (size - 1).bit_length(), self._device)  # a power of two, to share
            piece.bytes[:size] = self._content
            piece.busy = True
            runtime.memcpyAsync(self.ptr, piece.memory.ptr, size, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(piece.read.ptr, stream)
            piece.busy = False
        return True


def shares(blocks: Sequence[int], like: Any, device: int) -> DeviceTable:
    """The share of each block of a launch, where item `i` takes `blocks[i]` blocks; not yet uploaded."""
    total = sum(blocks)
    made = DeviceTable(Share, total, like, device)
    firsts = np.cumsum([0, *blocks])[:-1]
    made.rows["item"] = np.repeat(np.arange(len(blocks)), blocks)
    made.rows["number"] = np.arange(total) - np.repeat(firsts, blocks)
    return made
