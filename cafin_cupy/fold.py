"""What the kernel fold is told of the partial sums of an array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import table
from .layers import Patches
from .matrix import Matrix

FOLD_BLOCK, FOLD_LANES = 256, 8  # as in fold.cuh
WARPS = FOLD_BLOCK // 32
FEW = 32, 4  # pixels that a lane adds, and times that a warp adds its lanes up, where more warps would gain nothing


def plain_job(laid: Matrix, slices: int, parts: int, tile: int) -> tuple[Any, int]:
    """(job, blocks) for partial sums: one result for each segment."""
    job = np.zeros((), table.FoldJob)
    job["run"], job["slices"], job["parts"], job["tile"] = laid.run, slices, parts, tile
    job["outputs"] = laid.segments
    return job, -(-laid.segments * FOLD_LANES // FOLD_BLOCK)


def patches_job(laid: Matrix, slices: int, image: Patches) -> tuple[Any, int]:
    """(job, blocks) for partial sums of pixels: one result for each kernel tap."""
    job = np.zeros((), table.FoldJob)
    job["slices"], job["pixels"] = slices, laid.segments
    job["channel_step"], job["depth_step"], job["row_step"], job["column_step"] = laid.steps
    for name, (z, y, x) in (("stride", image.stride), ("padding", image.padding), ("dilation", image.dilation)):
        job[f"{name}_z"], job[f"{name}_y"], job[f"{name}_x"] = z, y, x
    for name, lengths in (("", image.image), ("out_", image.output), ("kernel_", image.kernel)):
        job[f"{name}depth"], job[f"{name}height"], job[f"{name}width"] = lengths
    job["scale"] = image.scale
    job["across"], job["down"] = across, down = _warps(image)
    channels = image.groups * image.channels
    job["outputs"] = channels * math.prod(image.kernel)
    kernel_rows = channels * image.kernel[0] * image.kernel[1]
    return job, -(-kernel_rows * across * down // WARPS)


def _warps(image: Patches) -> tuple[int, int]:
    """Of a channel's kernel row, side by side and one below the other: powers of two."""
    rows, times = image.output[1], -(-image.image[2] // 32)
    down = next((n for n in (1, 2, 4) if rows * times <= FEW[0] * n), WARPS)
    while down > rows:
        down //= 2
    across = 1 if rows >= WARPS else next((n for n in (1, 2, 4) if times <= FEW[1] * n), WARPS)
    return min(across, WARPS // down), down
