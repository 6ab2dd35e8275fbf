"""The factors by the kernels column_sums, fold and average.

A launch of column_sums adds both column sums of a layer, or of several, to partial sums that wait in a workspace.
`update` is two launches for all layers: fold the partial sums, then average. The workspace belongs to the geometry of a
layer's last call; when the geometry changes within a step, what waits is folded first.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from . import table
from .arrays import View, allocate, beside, copy_like, current_stream, item_size, order, view
from .errors import refuse
from .factors import Factors
from .fold import FOLD_BLOCK, patches_job, plain_job
from .layers import Columns, Layer
from .matrix import COLUMN_SUMS_BLOCK, Matrix, matrix, split
from .reference import RawSums
from .rule import Averaging
from .runtime import Arguments, Launch, prepare
from .streams import joined
from .unchanged import Unchanged, version

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # what column_sums reads, by its number there
FEW_ROWS = 64  # below, a block covers more columns
BATCH_BYTES = 64 << 20  # of arrays that wait for one launch: enough to make little of its start and end
AVERAGE_BLOCK = 1024  # as in average.cu
_POINTER = struct.Struct("Q")


class _Half:
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
        width = laid.segments * laid.run
        wide, neighbours = laid.rows < FEW_ROWS, 16 // item_size(dtype)
        tile = table.WIDE if wide else 32 * neighbours
        if not aligned:
            tile -= neighbours
        tiles = -(-width // tile)
        slices, height = split(laid.rows, tiles)
        parts = 1 if laid.run == 1 else (laid.run - 1) // tile + 2
        self.memory, ptr = allocate(self.like, 4 * slices * parts * laid.segments)
        self.operand[...] = (
            *(0, ptr, laid.rows, laid.stride, width, laid.run, height, 0),
            *(tiles, slices, parts, columns.power == 2, 0, ELEMENTS[dtype], wide, tile, columns.scale),
        )
        self.blocks = tiles * slices
        if columns.patches:
            self.jobs = [patches_job(ptr, laid, slices, patches) for patches in columns.patches]
        else:
            self.jobs = [plain_job(ptr, laid, slices, parts, tile)]
        self.outputs = sum(int(job["outputs"]) for job, _ in self.jobs)

    def room(self, keep: bool) -> None:
        """Raw sums for this geometry's results; with `keep`, behind those already there (a longer sequence)."""
        outputs = self.outputs
        if self.sums is None or outputs > self.sums.shape[0]:
            xp = array_namespace(self.like)
            longer = xp.zeros((outputs,), dtype=xp.float32, device=self.like.device)
            if keep:
                longer[: self.units] = self.sums[: self.units]
            self.sums = longer
            self.ptr = view(longer).ptr
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


class _Sums:
    """Both halves of a layer, and how far its sums have come."""

    def __init__(self, like: Any) -> None:
        self.halves = (_Half(like), _Half(like))
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


class CudaFactors(Factors):
    """The factors on one CUDA device, float32, from float32, bfloat16 or float16 arrays."""

    kernels = True

    def __init__(self, layers: Sequence[Layer], averaging: Averaging, device: int) -> None:
        for layer in layers:
            v = view(layer.weight, type(layer).__name__, "weight")
            if v.dtype == "float64" or v.device != device:  # a frozen weight may be of half precision
                rule, got = f"be float32 on cuda:{device}", f"{v.dtype} on {v.device}"
                refuse("AdaFisher", f"weight of {layer.label}", rule, got, "convert it, or use backend='reference'")
        prepare(device)
        super().__init__(layers, averaging)
        self.device = device
        self._sums = [_Sums(H) for H in self.H_effective]
        self._waiting: list[tuple[_Sums, Any, Any, Any]] = []  # for a launch: their arrays, and those arrays' versions
        self._may_wait = True
        self._waiting_bytes = 0
        self._waiting_on = 0  # the stream that their arrays are ready on
        self._column_sums = Launch("column_sums", "column_sums", device, COLUMN_SUMS_BLOCK)
        self._column_arguments = Arguments(table.ColumnSums)
        self._operands = self._column_arguments.values["operand"].view(np.uint8)
        self._fold = Launch("fold", "fold", device, FOLD_BLOCK)
        self._average = Launch("average", "average", device, AVERAGE_BLOCK)
        self._fold_arguments, self._average_arguments = Arguments(table.Fold), Arguments(table.Average)
        if self.layers:
            like, count = self.H[0], len(self.layers)
            self._fold_table = table.DeviceTable(table.FoldJob, 3 * count, like, device)  # S may have two
            self._average_table = table.DeviceTable(table.AverageJob, count, like, device)
            state = (self.H, self.H_effective, self.S, self.S_effective, self.skipped)
            self._pointers = [[view(a[i]).ptr for a in state] for i in range(count)]
        self._fold_key: Any = None
        self._fold_shares: Any = None
        self._held: dict[int, Any] = {}  # what CUDA graphs read, by id
        self._average_key: Any = None

    @property
    def pending(self) -> bool:
        return any(sums.count for sums in self._sums)

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        with joined([h, s, self.H[index]], self.device, current_stream(h, self.device)):
            self.defer(index, h, s, layer)
            self.flush()

    def defer(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        layer = layer or self.layers[index]
        sums = self._sums[index]
        if sums.spoiled:
            return
        if layer.counted:
            h, s = self._counted(layer, h, s)
        stream = current_stream(h, self.device)
        if sums.waits or (self._waiting and stream != self._waiting_on):
            self.flush()
        known = sums.unchanged is not None and layer is sums.layer and sums.unchanged((h, s))
        if not (known and sums.point(h.data_ptr(), s.data_ptr())):  # known are torch's tensors only
            first, second = self._checked(layer, "h", h), self._checked(layer, "s", s)
            if not layer.counted:
                layer.check(first.shape, second.shape)
            if first.size == 0 or second.size == 0:
                return
            read = self._plan(layer, sums, first, second, stream)
            if read[0] is first and read[1] is second:
                sums.layer, sums.unchanged = layer, Unchanged((h, s))
            h, s = (v.owner for v in read)
        sums.waits = sums.unfolded = True
        sums.count += sums.per_call
        self._waiting.append((sums, h, s, (version(h), version(s))))
        self._waiting_on = stream
        self._waiting_bytes += sums.bytes
        full = self._waiting_bytes >= BATCH_BYTES or 2 * len(self._waiting) == table.OPERANDS
        if full or not self._may_wait:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        waiting = self._unspoiled(waiting)
        if not waiting:
            return
        block = place = 0
        for sums, *_ in waiting:
            sums.waits = False
            block = sums.start_at(block)
            self._operands[place : place + sums.content.size] = sums.content
            place += sums.content.size
        self._column_arguments.values["count"] = 2 * len(waiting)
        try:
            self._column_sums(self._column_arguments, block, self._waiting_on)
            order(self._waiting_on, current_stream(self.H[0], self.device), self.device)
        except BaseException:
            self.discard()  # what the failed launch would have added is lost
            raise

    def _unspoiled(self, waiting: list[tuple[_Sums, Any, Any, Any]]) -> list[tuple[_Sums, Any, Any, Any]]:
        """Those whose arrays have not been changed while they waited. The others' sums are forgotten."""
        spoiled = [sums for sums, h, s, seen in waiting if (version(h), version(s)) != seen]
        if not spoiled:
            return waiting
        self._may_wait = False
        labels = [layer.label for layer, sums in zip(self.layers, self._sums) if any(sums is x for x in spoiled)]
        for sums in spoiled:
            sums.forget()
            sums.spoiled = True
        warnings.warn(
            f"AdaFisher: inputs or output gradients were changed in place before they were read: {', '.join(labels)}. "
            "Their factors stay as they are on this step, and from now on nothing waits; a hook or a custom backward "
            "changes what it is given",
            stacklevel=3,
        )
        return [each for each in waiting if not any(each[0] is sums for sums in spoiled)]

    def _counted(self, layer: Layer, h: Any, s: Any) -> tuple[Any, Any]:
        """Arrays of numbers, which the kernels can read, for indices."""
        s = self._checked(layer, "s", s).owner
        h = beside(h, s, "accumulate", f"h of {layer.label}")
        layer.check(tuple(h.shape), tuple(s.shape))
        return layer.read(h, s)

    def _checked(self, layer: Layer, name: str, array: Any) -> View:
        v = view(array, "accumulate", f"{name} of {layer.label}")
        if v.device != self.device or v.dtype not in ELEMENTS:
            rule, got = f"be {', '.join(ELEMENTS)} on cuda:{self.device}", f"{v.dtype} on {v.device}"
            refuse("accumulate", f"{name} of {layer.label}", rule, got, "convert it, or use backend='reference'")
        return v

    def _plan(self, layer: Layer, sums: _Sums, h: View, s: View, stream: int) -> list[View]:
        """Describe two arrays to the kernel, and return what it will read: one that it cannot read is copied."""
        sums.unchanged = None
        plans = layer.columns(h.shape, s.shape)
        arrays = [h, s]
        laid = []
        for place, columns in enumerate(plans):
            how = matrix(arrays[place], columns)
            if how is None:
                arrays[place] = view(copy_like(arrays[place].owner))
                how = matrix(arrays[place], columns)
            assert how is not None  # contiguous by now
            laid.append(how)
        aligned = [(v.ptr | how.stride * item_size(v.dtype)) % 16 == 0 for v, how in zip(arrays, laid)]
        geometry = plans, laid, h.dtype, s.dtype, aligned
        if geometry != sums.laid:
            if sums.unfolded:
                self._fold_all(stream)
            sums.laid = None  # known again once both arrays are described
            sums.adds = False  # as the new operands have it
            for place, (half, columns, how, v) in enumerate(zip(sums.halves, plans, laid, arrays)):
                half.plan(columns, how, v.dtype, aligned[place])
                sums.operands[place] = half.operand
            sums.laid, sums.aligned = geometry, aligned
            sums.bytes = sum(v.size * item_size(v.dtype) for v in (h, s))
            sums.version += 1
        sums.per_call = layer.count(h.shape, s.shape)
        sums.point(arrays[0].ptr, arrays[1].ptr)
        return arrays

    def hold(self) -> None:
        if not self.layers:
            return
        parts = [half for sums in self._sums for half in sums.halves]
        for memory in (
            self._fold_table,
            self._fold_shares,
            self._average_table,
            *(x for p in parts for x in (p.memory, p.sums)),
        ):
            if memory is not None:
                self._held[id(memory)] = memory

    def _writable(self, rows: table.DeviceTable) -> table.DeviceTable:
        """A table that no CUDA graph reads."""
        return rows.like() if id(rows) in self._held else rows

    def _fold_all(self, stream: int) -> None:
        """Fold all partial sums, in one launch."""
        self.flush()
        unfolded = [sums for sums in self._sums if sums.unfolded]
        if not unfolded:
            return
        for sums in unfolded:
            for half in sums.halves:
                half.room(sums.folded)
        key = [(id(sums), sums.version, sums.folded, sums.halves[0].ptr) for sums in unfolded]
        if key != self._fold_key:
            self._fold_key = None  # known again once the uploads are under way
            jobs = [job for sums in unfolded for half in sums.halves for job in half.placed(sums.folded)]
            self._fold_table = self._writable(self._fold_table)
            for place, (job, _) in enumerate(jobs):
                self._fold_table.rows[place] = job
            self._fold_table.upload(stream)
            self._fold_shares = table.shares([blocks for _, blocks in jobs], self.H[0], self.device)
            self._fold_shares.upload(stream)
            self._fold_arguments.values[...] = (self._fold_table.ptr, self._fold_shares.ptr)
            self._fold_key = key
        self._fold(self._fold_arguments, len(self._fold_shares.rows), stream)
        for sums in unfolded:
            sums.unfolded, sums.folded = False, True

    def sums(self) -> list[tuple[int, RawSums]]:
        if not self.layers:
            return []
        self._fold_all(current_stream(self.H[0], self.device))
        return [(index, self._raw_sums(index)) for index, sums in enumerate(self._sums) if sums.count]

    def _raw_sums(self, index: int) -> RawSums:
        """What the kernels have summed, as the reference takes it."""
        layer = self.layers[index]
        H, S = (half.sums[: half.units] for half in self._sums[index].halves)
        xp, (H_groups, S_groups), weight = array_namespace(H), layer.shares, S.shape[0] - layer.tail
        H = xp.sum(xp.reshape(H, (H_groups, -1)), axis=0)
        S = xp.concat([xp.sum(xp.reshape(S[:weight], (S_groups, -1)), axis=0), S[weight:]])
        return RawSums(H, S, self._sums[index].count)

    def update(self, grad_scale: float = 1.0) -> None:
        self.flush()  # which may drop a layer
        seen = [index for index, sums in enumerate(self._sums) if sums.count]
        if not seen:
            self.discard()
            return
        stream = current_stream(self.H[0], self.device)
        self._fold_all(stream)
        key = [
            (i, s.count, s.halves[0].ptr, s.halves[0].units, grad_scale) for i, s in enumerate(self._sums) if s.count
        ]
        if key != self._average_key:
            self._average_key = None
            self._average_table = self._writable(self._average_table)
            for row, index in enumerate(seen):
                self._average_table.rows[row] = self._average_job(index, grad_scale)
            self._average_table.upload(stream)
            self._average_key = key
        rule = self.averaging
        after = rule.normalize == "after"
        self._average_arguments.values[...] = (self._average_table.ptr, rule.keep, rule.add, after, 0)
        self._average(self._average_arguments, len(seen), stream)
        self.discard()

    def _average_job(self, index: int, grad_scale: float) -> Any:
        sums, layer = self._sums[index], self.layers[index]
        H, H_effective, S, S_effective, skipped = self._pointers[index]
        h, s = sums.halves
        (H_groups, S_groups), tail = layer.shares, layer.tail
        H_mean, S_mean = layer.mean(sums.count)
        entry = layer.bias_entry(sums.count, h.units)
        H_units, S_units, S_mean = h.units // H_groups, (s.units - tail) // S_groups, S_mean / grad_scale / grad_scale
        return (
            (h.ptr, H, H_effective, H_units, layer.H_size, H_groups, 0, H_mean, entry or 0.0),
            (s.ptr, S, S_effective, S_units, layer.S_size, S_groups, tail, S_mean, 0.0),
            *(skipped, layer.norm, layer.counted),
        )

    def discard(self) -> None:
        self._waiting, self._waiting_bytes = [], 0
        for sums in self._sums:
            sums.forget()
