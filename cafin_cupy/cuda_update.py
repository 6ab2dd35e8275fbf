"""The update of all parameters by the kernels update and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import table
from .arrays import View, allocate, channels_last_strides, item_size, same_strides
from .errors import refuse
from .rounding import step_noise
from .rule import Hyper, Scalars
from .runtime import Arguments, Launch, prepare
from .verdict import Verdict

BLOCK = 256  # as in update.cuh
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # of parameters and momenta, by the numbers of update_mixed.cu
_NOTHING = (None, None, None)  # of p, m and which: the table holds none that are known


class Layout(NamedTuple):
    """What the update needs to know of a parameter beside its address.

    Attributes:
        size: number of elements.
        columns: length of `H`; 0 without factors.
        channels, taps: above 0 for weights in channels_last memory, whose `H` is ordered (channel, tap).
        dtype: of the parameter and its gradient.
        momentum: dtype of the momentum.
    """

    size: int
    columns: int
    channels: int
    taps: int
    dtype: str = "float32"
    momentum: str = "float32"


def kernel_for(layouts: Sequence[Layout], masters: Sequence[int]) -> str:
    """The kernel that updates parameters of these kinds in one launch."""
    kinds = {(layout.dtype, layout.momentum, master != 0) for layout, master in zip(layouts, masters)}
    if kinds <= {("float32", "float32", False)}:
        return "update"
    if len(kinds) > 1:
        return "update_mixed"
    ((dtype, momentum, master),) = kinds
    return f"update_{dtype}_{momentum}{'_master' if master else ''}"


def layout(where: str, name: str, p: View, columns: int, momentum: str = "float32") -> Layout:
    """The `Layout` of a parameter, contiguous or channels_last; anything else is refused."""
    if columns >= 2**32:
        refuse(where, name, f"have fewer than {2**32} columns", columns, "the kernel counts them in 32 bits")
    if p.contiguous:
        return Layout(p.size, columns, 0, 0, p.dtype, momentum)
    if len(p.shape) >= 3:
        _, c, *kernel = p.shape
        taps = math.prod(kernel)
        if same_strides(p.shape, p.strides, channels_last_strides(p.shape)):
            if columns not in (0, c * taps):
                rule = f"be contiguous, or have {c * taps} columns in channels_last memory"
                refuse(where, name, rule, f"{columns} columns", "pass .contiguous()")
            return Layout(p.size, columns, c, taps, p.dtype, momentum)
    refuse(
        where, name, "be contiguous or channels_last", f"shape {p.shape} with strides {p.strides}", "pass .contiguous()"
    )


class CudaUpdate:
    """One launch for a fixed list of parameters; pointers and scalars may change with every call.

    Scalars and the gradients' addresses are arguments of the launch as long as they fit, about 500 parameters; beyond
    that, and for parameters that move, one asynchronous copy refreshes a table on the device. Nothing is allocated and
    nothing waits.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        factors: Sequence[tuple[int, int]],
        like: Any,
        device: int,
        masters: Sequence[int] = (),
        keys: Sequence[int] = (),
    ) -> None:
        """
        Args:
            factors: addresses of each parameter's (H, S), (0, 0) without.
            like: an array of the same framework.
            masters: addresses of each parameter's master, 0 without; empty where none has any.
            keys: what tells each parameter's random numbers from those of others; by default its place.
        """
        masters = masters or [0] * len(layouts)
        kernel = kernel_for(layouts, masters)
        mixed = kernel != "update"
        prepare(device, mixed=mixed)
        self._launch = Launch("update_mixed" if mixed else "update", kernel, device, BLOCK)
        self._arguments = Arguments(table.Update)
        self._table = table.DeviceTable(table.Parameter, len(layouts), like, device)
        rows = self._table.rows
        rows["master"], rows["key"] = masters, keys or range(len(layouts))
        for row, layout, (H, S) in zip(rows, layouts, factors):
            row["H"], row["S"], row["size"], row["columns"] = H, S, layout.size, layout.columns
            row["channels"], row["taps"] = layout.channels, layout.taps
            row["kind"] = TYPES[layout.dtype] | TYPES[layout.momentum] << 2 | (row["master"] != 0) << 4
        # Of addresses, the bits that are 0 where four elements can be read at once.
        self._p_quad, self._m_quad = (
            np.array([4 * item_size(dtype) - 1 for dtype in dtypes], "u8")
            for dtypes in ([x.dtype for x in layouts], [x.momentum for x in layouts])
        )
        self._shares = table.shares([-(-layout.size // table.CHUNK) for layout in layouts], like, device)
        self._blocks = len(self._shares.rows)
        self._uploaded = False
        self._last: tuple[Any, ...] = _NOTHING
        count, room = len(layouts), table.WORDS
        self._gradients = table.DeviceTable(np.dtype("u8"), count, like, device)
        self._hypers = table.DeviceTable(table.Hyper, count, like, device)  # never more sets than parameters
        values = self._arguments.values
        values["parameters"], values["shares"] = self._table.ptr, self._shares.ptr
        self._words: Any = values["words"]
        self._gradient_words = self._words[::-1][:count]  # where the kernel looks for them
        self._last_g: list[int] | None = None  # what the table on the device holds
        self._captured = False  # a CUDA graph writes to it
        self._uploads_gradients = count > room
        if self._uploads_gradients:
            values["gradients"] = self._gradients.ptr
        else:
            room -= count
        self._room = room * 8 // table.HYPER.size  # sets of scalars
        self._fits: bool | None = True  # `words` hold the scalars

    def reserve(self) -> None:
        """Provide pinned memory for what a CUDA graph will capture of one call."""
        if self._uploads_gradients:
            self._gradients.reserve()

    def expect_capture(self) -> None:
        """Let the coming call, which a CUDA graph captures, bring all it needs: replays cannot count on what the table
        on the device holds by chance."""
        self._last_g = None

    def __call__(
        self,
        p: list[int],
        g: list[int],
        m: list[int],
        scalars: Sequence[tuple[float, ...]] | int,
        which: list[int],
        stream: int,
        ahead: Callable[[], None] | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Update all parameters on `stream`.

        What may fail comes first, the launches last: after an error all is as before but for what `ahead` launched.

        Args:
            p, g, m: addresses; a gradient of 0 leaves its parameter alone.
            scalars: the sets of scalars in use (see `scalars`), or the address of sets on the device, and
            which: the index of each parameter's set.
            ahead: launches what the update reads.
            then: keeps the books of the update, see `Launch`.
        """
        if not self._uploaded:
            self._shares.upload(stream)
            self._uploaded = True
        if (p, m, which) != self._last:
            self._last = _NOTHING  # known again once the upload is under way
            rows = self._table.rows
            rows["p"], rows["m"], rows["hyper"] = p, m, which
            rows["vector"] = (rows["p"] & self._p_quad | rows["m"] & self._m_quad | rows["master"] & 15) == 0
            self._table.upload(stream)
            self._last = (p, m, which)
        if not self._uploads_gradients:
            self._gradient_words[:] = g
        elif g != self._last_g:
            self._last_g = None
            self._gradients.rows[:] = g
            if not self._gradients.upload(stream):
                self._captured = True
            elif not self._captured:  # else a replay may bring its own addresses at any time
                self._last_g = g
        if isinstance(scalars, int):
            self._fits = None
            self._arguments.values["hypers"] = scalars
        else:
            fits = len(scalars) <= self._room
            into: Any = self._words if fits else self._hypers.rows.view("u8")
            for number, values in enumerate(scalars):
                table.HYPER.pack_into(into, number * table.HYPER.size, *values)
            if not fits:
                self._hypers.upload(stream)
            if fits is not self._fits:
                self._fits = None  # known again once the arguments say it
                self._arguments.values["hypers"] = 0 if fits else self._hypers.ptr
                self._fits = fits
        if ahead is not None:
            ahead()
        self._launch(self._arguments, self._blocks, stream, then)


class CudaSchedule:
    """Counters and scalars of a `CudaUpdate` that live on the device, for CUDA graphs and loss scalers: a small launch
    ahead of it."""

    def __init__(self, groups: Sequence[int], steps: int, like: Any, device: int) -> None:
        """`groups`: of each parameter; `steps`: address of as many int64 counters."""
        self.count = len(groups)
        self._launch = Launch("update", "schedule", device, BLOCK)
        self._arguments = Arguments(table.Schedule)
        self._groups = table.DeviceTable(np.dtype("i4"), self.count, like, device)
        self._groups.rows[:] = groups
        self._rates = table.DeviceTable(table.Rate, max(groups, default=0) + 1, like, device)
        self._memory, self.hypers = allocate(like, max(1, self.count * table.Hyper.itemsize))
        self._uploaded: list[tuple[float, ...]] | None = None
        self._counted: dict[int, Any] = {}  # what was counted ahead of an update that is not launched yet
        values = self._arguments.values
        values["rates"], values["groups"], values["steps"] = self._rates.ptr, self._groups.ptr, steps
        values["hypers"], values["count"] = self.hypers, self.count

    def refresh(self, rates: list[tuple[float, ...]], stream: int) -> None:
        """Tell the device the groups' scalars (see `rate`), if they have changed."""
        if rates == self._uploaded:
            return
        if self._uploaded is None:
            self._groups.upload(stream)
        self._uploaded = None
        self._rates.rows[:] = rates[: len(self._rates.rows)]  # of later groups no parameter takes part yet
        self._rates.upload(stream)
        self._uploaded = rates

    def __call__(self, present: Sequence[bool], stream: int, verdict: Verdict = Verdict()) -> None:  # noqa: B008
        """Count a step of each parameter that is `present`, and set its scalars, on `stream`."""
        if self._counted:  # for an update that never came
            self.take_back(stream)
        flags = np.zeros(-(-self.count // 64) * 64, np.uint8)
        flags[: self.count] = present
        words = np.packbits(flags, bitorder="little").view("u8")
        for first in range(0, len(words), table.FLAGS):
            part = words[first : first + table.FLAGS]
            then = partial(self._counted.__setitem__, first, (part, verdict))
            self._count(first, part, verdict, 1, stream, then)

    def _count(self, first: int, part: Any, verdict: Verdict, by: int, stream: int, then: Callable[[], object]) -> None:
        values = self._arguments.values
        values["present"][: len(part)], values["first"], values["by"] = part, 64 * first, by
        values["found_inf"], values["scale"], values["skipped"] = verdict.found_inf, verdict.scale, verdict.skipped
        self._launch(self._arguments, -(-64 * len(part) // BLOCK), stream, then)

    def updated(self) -> None:
        """The update that was counted has been launched."""
        self._counted.clear()

    def take_back(self, stream: int) -> None:
        """Count back: the update that was counted could not be launched."""
        for first, (part, verdict) in list(self._counted.items()):
            self._count(first, part, verdict, -1, stream, partial(self._counted.pop, first, None))


def rate(hyper: Hyper, grad_scale: float = 1.0, lr_at: int = 0, begin: int = 0) -> tuple[float, ...]:
    """A `Hyper` as the schedule takes it. `lr_at`: address of a float32 `lr` on the device, or 0; `begin`: see
    `scalars`."""
    decay = hyper.weight_decay
    l2, decoupled = (0.0, decay) if hyper.decoupled else (decay, 0.0)
    return hyper.lr, hyper.beta, hyper.Lambda, l2, decoupled, hyper.scale(grad_scale), lr_at, begin


def scalars(hyper: Hyper, step: int, grad_scale: float = 1.0, begin: int = 0) -> tuple[float, ...]:
    """What the kernel needs of the hyperparameters at a parameter's `step`, computed in float64. `begin`: of the random
    numbers (see `rounding.start`), or 0."""
    noise = step_noise(begin, step) if begin else 0
    return (*Scalars.of(hyper, step), 1.0 / hyper.scale(grad_scale), noise)
