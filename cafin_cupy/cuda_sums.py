"""What a layer adds up on a sampled step: its share of the launches, its workspace, and how far its sums have come."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from . import table
from .arrays import allocate, item_size, view
from .fold import patches_job, plain_job
from .layers import Columns
from .matrix import Matrix, split
from .unchanged import Unchanged

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # what column_sums reads, by its number there
FEW_ROWS = 64  # below, a block covers more columns
_POINTER = struct.Struct("Q")


class Described(NamedTuple):
    """Arrays of one geometry, as the kernels are told of them; addresses are still to be filled in.

    Attributes:
        operand: of column_sums.
        blocks: that it takes there.
        partial: float32 numbers that it leaves.
        jobs: of fold, and the blocks of each.
    """

    operand: Any
    blocks: int
    partial: int
    jobs: list[tuple[Any, int]]

    @classmethod
    def of(cls, columns: Columns, laid: Matrix, dtype: str, aligned: bool) -> Described:
        """`aligned`: all rows start at multiples of 16 bytes."""
        width = laid.segments * laid.run
        wide, neighbours = laid.rows < FEW_ROWS, 16 // item_size(dtype)
        tile = table.WIDE if wide else 32 * neighbours
        if not aligned:
            tile -= neighbours
        tiles = -(-width // tile)
        slices, height = split(laid.rows, tiles)
        parts = 1 if laid.run == 1 else (laid.run - 1) // tile + 2
        operand = np.zeros((), table.Operand)
        operand[...] = (
            *(0, 0, laid.rows, laid.stride, width, laid.run, height, 0),
            *(tiles, slices, parts, columns.power == 2, 0, ELEMENTS[dtype], wide, tile, columns.scale),
        )
        if columns.patches:
            jobs = [patches_job(laid, slices, patches) for patches in columns.patches]
        else:
            jobs = [plain_job(laid, slices, parts, tile)]
        return cls(operand, tiles * slices, slices * parts * laid.segments, jobs)


class Half:
    """One array of a layer: H's or S's share of a launch, its workspace and its raw sums."""

    def __init__(self, like: Any) -> None:
        self.like = like
        self.memory: Any = None  # the workspace: partial sums
        self.sums: Any = None
        self.ptr = 0  # of the sums
        self.outputs = 0  # sums that the present geometry gives
        self.units = 0  # length of the sums; groups * K for the side of a grouped convolution that meets its taps
        self.operand = np.zeros((), table.Operand)
        self.blocks = 0
        self.jobs: list[tuple[Any, int]] = []  # of fold, and the blocks of each

    def plan(self, columns: Columns, laid: Matrix, dtype: str, aligned: bool) -> None:
        """Describe arrays of this geometry to the kernels, and provide the workspace."""
        described = Described.of(columns, laid, dtype, aligned)
        self.memory, ptr = allocate(self.like, 4 * described.partial)
        self.operand[...], self.blocks, self.jobs = described.operand, described.blocks, described.jobs
        self.operand["sums"] = ptr
        for job, _ in self.jobs:
            job["columns"] = ptr
        self.outputs = sum(int(job["outputs"]) for job, _ in self.jobs)

    def room(self, keep: bool) -> None:
        """Raw sums for this geometry's results; with `keep`, behind those already there (a longer sequence)."""
        outputs = self.outputs
        if self.sums is None or outputs > self.sums.shape[0]:
            xp = array_namespace(self.like)
            longer = xp.zeros((outputs,), dtype=xp.float32, device=self.like.device)
            if keep:
                longer[: self.units] = self.sums[: self.units]
            ptr = view(longer).ptr
            self.sums, self.ptr = longer, ptr
        elif keep and outputs > self.units:
            self.sums[self.units : outputs] = 0.0
        self.units = max(self.units, outputs) if keep else outputs

    def placed(self, add: bool) -> list[tuple[Any, int]]:
        """The fold jobs, (job, blocks), each with its results behind those of the one before."""
        place = self.ptr
        for job, _ in self.jobs:
            job["sums"], job["add"] = place, add
            place += 4 * int(job["outputs"])
        return self.jobs


class Sums:
    """Both halves of a layer, and how far its sums have come."""

    def __init__(self, like: Any) -> None:
        self.halves = (Half(like), Half(like))
        self.operands = np.zeros(2, table.Operand)
        self.content: Any = self.operands.view(np.uint8)
        self._add, self._first = self.operands["add"], self.operands["first"]
        self.layer: Any = None  # and
        self.unchanged: Unchanged | None = None  # know what `operands` describes
        self.laid: Any = None  # how they lie in memory
        self.aligned = [False, False]  # rows start at multiples of 16 bytes
        self.waits = False  # for a launch
        self.spoiled = False  # an array changed before it was read: nothing counts until the step is over
        self.unfolded = False  # partial sums wait in the workspace
        self.adds = False  # what `operands` say of that
        self.folded = False  # earlier partial sums of this step are in `sums`
        self.count = 0  # what the sums will be divided by
        self.per_call = 0  # what one call adds to it
        self.bytes = 0  # that one call reads
        self.version = 0  # changes with `laid`

    def point(self, h: int, s: int) -> bool:
        """Let `operands` read arrays at these addresses; False if they do not allow the accesses of 16 bytes that are
        planned."""
        if (h | s) % 16 and ((self.aligned[0] and h % 16) or (self.aligned[1] and s % 16)):
            return False
        _POINTER.pack_into(self.content, 0, h)  # x is the first field
        _POINTER.pack_into(self.content, table.Operand.itemsize, s)
        if self.unfolded != self.adds:
            self._add[:] = self.adds = self.unfolded
        return True

    def forget(self) -> None:
        """Forget all sums of this step."""
        self.count = 0
        self.waits = self.unfolded = self.folded = self.spoiled = False

    def start_at(self, block: int) -> int:
        """Let the first block be this one of a launch, and return the one behind the last."""
        h, s = self.halves
        self._first[0], self._first[1] = block, block + h.blocks
        return block + h.blocks + s.blocks
