"""How column_sums reads an array: as the rows and columns of a matrix, cut into slices of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arrays import View, contiguous_strides, same_strides
from .layers import Columns

COLUMN_SUMS_BLOCK = 256  # threads, as in column_sums.cu
ENOUGH_BLOCKS = 264  # split long batches until a launch has so many; a constant, so results agree across GPUs
LEAST_ROWS = 128  # per block, so that partial sums stay few


@dataclass(frozen=True)
class Matrix:
    """An array as column_sums reads it: `rows` at a distance of `stride`, each `segments * run` neighbouring columns.
    `steps` leads from (channel, y, x) to a column, for images."""

    rows: int
    stride: int
    segments: int
    run: int
    steps: tuple[int, int, int] = (0, 0, 0)


def matrix(v: View, columns: Columns) -> Matrix | None:
    """How to read `v` without a copy: contiguous samples at any distance, or channels_last images; None if neither."""
    width = columns.segments * columns.run
    lead = columns.lead
    inner = v.shape[lead:]
    steps: Any = contiguous_strides(inner) if len(inner) == 3 else (0, 0, 0)
    if same_strides(inner, v.strides[lead:], contiguous_strides(inner)):
        stride = _row_stride(v.shape[:lead], v.strides[:lead], width)
        return None if stride is None else Matrix(columns.rows, stride, columns.segments, columns.run, steps)
    if lead != 1 or len(v.shape) != 4:
        return None
    channels, height, width_ = inner
    last = (height * width_ * channels, 1, width_ * channels, channels)
    if not same_strides(inner, v.strides[1:], last[1:]):
        return None
    if columns.patches is not None:  # a convolution's input keeps its pixels, whatever their order
        return Matrix(columns.rows, v.strides[0] if v.shape[0] > 1 else width, width, 1, last[1:])
    if columns.run != height * width_ or (v.shape[0] > 1 and v.strides[0] != last[0]):
        return None
    return Matrix(columns.rows * columns.run, channels, channels, 1)


def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> int | None:
    """The one distance between rows of the leading axes, or None if they do not merge into one axis."""
    axes = [(n, s) for n, s in zip(shape, strides) if n > 1]
    if any(s != n_next * s_next for (_, s), (n_next, s_next) in zip(axes, axes[1:])):
        return None
    return axes[-1][1] if axes else width


def split(rows: int, tiles: int) -> tuple[int, int]:
    """(slices, rows of a slice): enough blocks to fill a GPU, none with too few rows."""
    slices = max(1, min(-(-ENOUGH_BLOCKS // tiles), rows // LEAST_ROWS))
    height = -(-rows // slices)
    warps = COLUMN_SUMS_BLOCK // 32
    height = -(-height // warps) * warps  # whole rounds of a block
    return -(-rows // height), height
