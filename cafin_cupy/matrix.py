"""How column_sums reads an array: as the rows and columns of a matrix, cut into slices of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .arrays import View, contiguous_strides, same_strides
from .layers import Columns

COLUMN_SUMS_BLOCK = 256  # threads, as in column_sums.cuh
ENOUGH_BLOCKS = 264  # split long batches until a launch has so many; a constant, so results agree across GPUs
LEAST_ROWS = 128  # per block, so that partial sums stay few


@dataclass(frozen=True)
class Matrix:
    """An array as column_sums reads it: `rows` at a distance of `stride`, each `segments * run` neighbouring columns.
    `steps` leads from (channel, z, y, x) to a column, for images."""

    rows: int
    stride: int
    segments: int
    run: int
    steps: tuple[int, int, int, int] = (0, 0, 0, 0)


def matrix(v: View, columns: Columns) -> Matrix | None:
    """How to read `v` without a copy: contiguous samples at any distance, or images in channels_last memory (of any
    number of axes: a transposed sequence is one); None if neither."""
    width = columns.segments * columns.run
    lead = columns.lead
    inner = v.shape[lead:]
    dense = contiguous_strides(inner)
    if same_strides(inner, v.strides[lead:], dense):
        stride = _row_stride(v.shape[:lead], v.strides[:lead], width)
        steps = _steps(dense, columns)
        return None if stride is None else Matrix(columns.rows, stride, columns.segments, columns.run, steps)
    if lead != 1 or len(inner) < 2:
        return None
    channels, pixels = inner[0], math.prod(inner[1:])
    last = (1, *(channels * step for step in contiguous_strides(inner[1:])))
    if not same_strides(inner, v.strides[1:], last):
        return None
    if columns.patches:  # the pixels are kept, whatever their order
        stride = v.strides[0] if v.shape[0] > 1 else width
        return Matrix(columns.rows, stride, width, 1, _steps(last, columns))
    if columns.run != pixels or (v.shape[0] > 1 and v.strides[0] != pixels * channels):
        return None
    return Matrix(columns.rows * columns.run, channels, channels, 1)


def _steps(strides: tuple[int, ...], columns: Columns) -> tuple[int, int, int, int]:
    """From (channel, z, y, x) to a column, for pixels with these strides; 0 along the axes that the image lacks."""
    if not columns.patches:
        return 0, 0, 0, 0
    channel, *pixel = strides
    z, y, x = (0,) * (3 - len(pixel)) + tuple(pixel)
    return channel, z, y, x


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
