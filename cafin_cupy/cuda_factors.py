"""The factors by the kernels column_sums, fold and average.

A launch of column_sums adds both column sums of a layer, or of several, to partial sums that wait in a workspace.
`update` is two launches for all layers: fold the partial sums, then average. The workspace belongs to the geometry of a
layer's last call; when the geometry changes within a step, what waits is folded first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from . import forks, table
from .arrays import View, beside, copy_like, current_stream, item_size, order, view
from .cuda_sums import ELEMENTS, Sums
from .errors import refuse
from .factors import Factors
from .fold import FOLD_BLOCK
from .layers import Layer
from .matrix import COLUMN_SUMS_BLOCK, matrix
from .reference import RawSums
from .rule import Averaging
from .runtime import Arguments, Launch, prepare
from .streams import joined
from .unchanged import Unchanged, version
from .verdict import Verdict

BATCH_BYTES = 64 << 20  # of arrays that wait for one launch: enough to make little of its start and end
AVERAGE_BLOCK = 1024  # as in average.cuh


class CudaFactors(Factors):
    """The factors on one CUDA device, float32, from float32, bfloat16 or float16 arrays."""

    kernels = True

    def __init__(self, layers: Sequence[Layer], averaging: Averaging, device: int) -> None:
        for layer in layers:
            v = view(layer.home, type(layer).__name__, "weight")
            if v.dtype == "float64" or v.device != device:  # a frozen weight may be of half precision
                rule, got = f"be float32 on cuda:{device}", f"{v.dtype} on {v.device}"
                refuse("AdaFisher", f"weight of {layer.label}", rule, got, "convert it, or use backend='reference'")
        prepare(device)
        super().__init__(layers, averaging)
        self.device = device
        self._sums = [Sums(H) for H in self.H_effective]
        self._waiting: list[tuple[Sums, Any, Any, Any]] = []  # for a launch: their arrays, and those arrays' versions
        self._taken: dict[int, RawSums] | None = None  # what several ranks have summed, in the place of `_sums`
        self._may_wait = True
        self._waiting_bytes = 0
        self._waiting_on = 0  # the stream that their arrays are ready on
        self._read_on: int | None = None  # the stream of a launch that the current one does not wait for yet
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
        return bool(self._taken) or any(sums.count for sums in self._sums)

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        with joined([h, s, self.H[index]], self.device, current_stream(h, self.device)):
            self._enter(index, h, s, layer)
            try:
                self.flush()
            except BaseException:  # the call adds nothing then, as its arrays need not stay
                sums = self._sums[index]
                if sums.waits:
                    sums.waits, sums.unfolded, sums.count = False, sums.adds, sums.count - sums.per_call
                    self._keep_waiting(lambda each: each is not sums)
                raise

    def defer(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        self._enter(index, h, s, layer)
        full = self._waiting_bytes >= BATCH_BYTES or 2 * len(self._waiting) == table.OPERANDS
        if full or not self._may_wait:
            self.flush()

    def _enter(self, index: int, h: Any, s: Any, layer: Layer | None) -> None:
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
        entry = sums, h, s, (version(h), version(s))
        count, size = sums.count + sums.per_call, self._waiting_bytes + sums.bytes
        # One assignment without a call, which Ctrl-C cannot divide.
        sums.waits, sums.unfolded, sums.count, self._waiting, self._waiting_on, self._waiting_bytes = (
            *(True, True, count),
            *([*self._waiting, entry], stream, size),
        )

    def _keep_waiting(self, keep: Callable[[Sums], bool]) -> None:
        waiting = [each for each in self._waiting if keep(each[0])]
        self._waiting, self._waiting_bytes = waiting, sum(each[0].bytes for each in waiting)

    def flush(self) -> None:
        """After an error nothing is lost: what the driver has not taken still waits."""
        if self._waiting:
            forks.refuse_child("accumulate")
            self._drop_spoiled()
        if self._waiting:
            block = place = 0
            for sums, *_ in self._waiting:
                block = sums.start_at(block)
                self._operands[place : place + sums.content.size] = sums.content
                place += sums.content.size
            self._column_arguments.values["count"] = 2 * len(self._waiting)
            self._column_sums(self._column_arguments, block, self._waiting_on, self._read)
        if self._read_on is not None:
            order(self._read_on, current_stream(self.H[0], self.device), self.device)
            self._read_on = None

    def _read(self) -> None:
        """A launch of column_sums reads all that waits."""
        for sums, *_ in self._waiting:
            sums.waits, self._read_on = False, self._waiting_on
        self._waiting, self._waiting_bytes = [], 0

    def _drop_spoiled(self) -> None:
        """Forget the sums of layers whose arrays have been changed while they waited."""
        spoiled = [sums for sums, h, s, seen in self._waiting if (version(h), version(s)) != seen]
        if not spoiled:
            return
        self._may_wait = False
        labels = [layer.label for layer, sums in zip(self.layers, self._sums) if any(sums is x for x in spoiled)]
        for sums in spoiled:
            sums.forget()
            sums.spoiled = True
        self._keep_waiting(lambda each: not each.spoiled)
        warnings.warn(
            f"AdaFisher: inputs or output gradients were changed in place before they were read: {', '.join(labels)}. "
            "Their factors stay as they are on this step, and from now on nothing waits; a hook or a custom backward "
            "changes what it is given",
            stacklevel=3,
        )

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

    def _plan(self, layer: Layer, sums: Sums, h: View, s: View, stream: int) -> list[View]:
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
        self._fold_now(self._describe_fold(stream), stream)

    def _describe_fold(self, stream: int) -> list[Sums]:
        """Tell the device what there is to fold, and return it."""
        unfolded = [sums for sums in self._sums if sums.unfolded]
        if not unfolded:
            return []
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
        return unfolded

    def _fold_now(self, unfolded: list[Sums], stream: int) -> None:
        def folded() -> None:
            for sums in unfolded:
                sums.unfolded, sums.folded = False, True

        if unfolded:
            self._fold(self._fold_arguments, len(self._fold_shares.rows), stream, folded)

    def sums(self) -> list[tuple[int, RawSums]]:
        if self._taken is not None:
            return list(self._taken.items())
        if not self.layers:
            return []
        self._fold_all(current_stream(self.H[0], self.device))
        return [(index, self._raw_sums(index)) for index, sums in enumerate(self._sums) if sums.count]

    def take(self, sums: Sequence[tuple[int, RawSums]]) -> None:
        self.discard()
        self._taken = dict(sums)

    def _raw_sums(self, index: int) -> RawSums:
        """What the kernels have summed, as the reference takes it."""
        layer = self.layers[index]
        H, S = (half.sums[: half.units] for half in self._sums[index].halves)
        xp, (H_groups, S_groups), weight = array_namespace(H), layer.shares, S.shape[0] - layer.tail
        if H_groups > 1:
            H = xp.sum(xp.reshape(H, (H_groups, -1)), axis=0)
        if S_groups > 1:
            S = xp.concat([xp.sum(xp.reshape(S[:weight], (S_groups, -1)), axis=0), S[weight:]])
        return RawSums(H, S, self._sums[index].count)

    def ready(self, grad_scale: float = 1.0, verdict: Verdict | None = None) -> Callable[[], None] | None:
        """See `Factors.ready`. A `verdict` is read on the device: it may keep the factors as they are, though the sums
        are forgotten, and what counts as refreshed on the host may not be."""
        self.flush()  # which may drop a layer
        seen = [k for k, sums in enumerate(self._sums) if sums.count] if self._taken is None else list(self._taken)
        if not seen:
            self.discard()
            return None
        stream = current_stream(self.H[0], self.device)
        unfolded = self._describe_fold(stream)
        jobs = list(map(self._job, seen))
        if jobs != self._average_key:
            self._average_key = None
            self._average_table = self._writable(self._average_table)
            for row, job in enumerate(jobs):
                self._average_table.rows[row] = self._average_job(*job)
            self._average_table.upload(stream)
            self._average_key = jobs
        rule, said = self.averaging, verdict or Verdict()
        missed = said.skipped if said.known >= 0 else 0
        self._average_arguments.values[...] = (
            *(self._average_table.ptr, rule.keep, rule.add, grad_scale),
            *(said.found_inf, said.loss_scale, missed, said.known),
            *(rule.normalize == "after", 0),
        )

        def refresh() -> None:
            self._fold_now(unfolded, stream)
            self._average(self._average_arguments, len(jobs), stream, self._averaged)

        return refresh

    def _averaged(self) -> None:
        self.refreshed = True
        self.discard()

    def _job(self, index: int) -> tuple[int, tuple[int, int, int], tuple[int, int, int], int]:
        """Place of a layer; address, length and groups of its H and S sums; what they are divided by."""
        if self._taken is not None:
            H, S, count = self._taken[index]
            return index, (view(H).ptr, H.shape[0], 1), (view(S).ptr, S.shape[0], 1), count
        h, s = self._sums[index].halves
        H_groups, S_groups = self.layers[index].shares
        return index, (h.ptr, h.units, H_groups), (s.ptr, s.units, S_groups), self._sums[index].count

    def _average_job(self, index: int, h: tuple[int, int, int], s: tuple[int, int, int], count: int) -> Any:
        layer = self.layers[index]
        H, H_effective, S, S_effective, skipped = self._pointers[index]
        (h_at, h_units, H_groups), (s_at, s_units, S_groups), tail = h, s, layer.tail
        H_mean, S_mean = layer.mean(count)
        entry = layer.bias_entry(count, h_units)
        H_units, S_units = h_units // H_groups, (s_units - tail) // S_groups
        return (
            (h_at, H, H_effective, H_units, layer.H_size, H_groups, 0, H_mean, entry or 0.0),
            (s_at, S, S_effective, S_units, layer.S_size, S_groups, tail, S_mean, 0.0),
            *(skipped, layer.norm, layer.counted),
        )

    def discard(self) -> None:
        self._taken = None
        self._waiting, self._waiting_bytes = [], 0
        for sums in self._sums:
            sums.forget()
