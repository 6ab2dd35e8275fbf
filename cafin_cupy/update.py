"""The update of all parameters: one launch on the GPU, a loop over `reference.update` elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import reference, table
from .arrays import (
    View,
    allocate,
    beside,
    copy_like,
    current_stream,
    known,
    leaves,
    leaves_like,
    on_stream,
    place,
    refuse_overlap,
    same_strides,
    view,
)
from .backend import choose
from .errors import CafinTypeError, refuse
from .rule import Hyper, whole
from .runtime import Arguments, Launch, prepare

BLOCK = 256  # as in update.cu
_NOTHING = (None, None, None)  # of p, m and which: the table holds none that are known
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Layout(NamedTuple):
    """What the update needs to know of a parameter beside its address.

    Attributes:
        size: number of elements.
        columns: length of `H`; 0 without factors.
        channels, taps: above 0 for weights in channels_last memory, whose `H` is ordered (channel, tap).
    """

    size: int
    columns: int
    channels: int
    taps: int


def layout(where: str, name: str, p: View, columns: int) -> Layout:
    """The `Layout` of a parameter, contiguous or channels_last; anything else is refused."""
    if columns >= 2**32:
        refuse(where, name, f"have fewer than {2**32} columns", columns, "the kernel counts them in 32 bits")
    if p.contiguous:
        return Layout(p.size, columns, 0, 0)
    if len(p.shape) == 4:
        _, c, height, width = p.shape
        if same_strides(p.shape, p.strides, (c * height * width, 1, width * c, c)):
            if columns not in (0, c * height * width):
                rule = f"be contiguous, or have {c * height * width} columns in channels_last memory"
                refuse(where, name, rule, f"{columns} columns", "pass .contiguous()")
            return Layout(p.size, columns, c, height * width)
    refuse(
        where, name, "be contiguous or channels_last", f"shape {p.shape} with strides {p.strides}", "pass .contiguous()"
    )


class CudaUpdate:
    """One launch for a fixed list of parameters; pointers and scalars may change with every call.

    Scalars and the gradients' addresses are arguments of the launch as long as they fit, about 500 parameters; beyond
    that, and for parameters that move, one asynchronous copy refreshes a table on the device. Nothing is allocated and
    nothing waits.
    """

    def __init__(self, layouts: Sequence[Layout], factors: Sequence[tuple[int, int]], like: Any, device: int) -> None:
        """`factors`: addresses of each parameter's (H, S), (0, 0) without; `like`: an array of the same framework."""
        prepare(device)
        self._launch = Launch("update", "update", device, BLOCK)
        self._arguments = Arguments(table.Update)
        self._table = table.DeviceTable(table.Parameter, len(layouts), like, device)
        for row, layout, (H, S) in zip(self._table.rows, layouts, factors):
            row["H"], row["S"], row["size"], row["columns"] = H, S, layout.size, layout.columns
            row["channels"], row["taps"] = layout.channels, layout.taps
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
    ) -> None:
        """Update all parameters on `stream`.

        Args:
            p, g, m: addresses; a gradient of 0 leaves its parameter alone.
            scalars: the sets of scalars in use (see `scalars`), or the address of sets on the device, and
            which: the index of each parameter's set.
        """
        if not self._uploaded:
            self._shares.upload(stream)
            self._uploaded = True
        if (p, m, which) != self._last:
            self._last = _NOTHING  # known again once the upload is under way
            rows = self._table.rows
            rows["p"], rows["m"], rows["hyper"] = p, m, which
            rows["vector"] = (rows["p"] | rows["m"]) & 15 == 0
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
            self._arguments.values["hypers"], self._fits = scalars, None
            self._launch(self._arguments, self._blocks, stream)
            return
        fits = len(scalars) <= self._room
        into: Any = self._words if fits else self._hypers.rows.view("u8")
        for number, values in enumerate(scalars):
            table.HYPER.pack_into(into, number * table.HYPER.size, *values)
        if not fits:
            self._hypers.upload(stream)
        if fits is not self._fits:
            self._fits = fits
            self._arguments.values["hypers"] = 0 if fits else self._hypers.ptr
        self._launch(self._arguments, self._blocks, stream)


class CudaSchedule:
    """Counters and scalars of a `CudaUpdate` that live on the device, for CUDA graphs: a small launch ahead of it."""

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
        for number, values in enumerate(rates):
            self._rates.rows[number] = values
        self._rates.upload(stream)
        self._uploaded = rates

    def __call__(self, present: Sequence[bool], stream: int) -> None:
        """Count a step of each parameter that is `present`, and set its scalars, on `stream`."""
        flags = np.zeros(-(-self.count // 64) * 64, np.uint8)
        flags[: self.count] = present
        words = np.packbits(flags, bitorder="little").view("u8")
        values = self._arguments.values
        for first in range(0, len(words), table.FLAGS):
            part = words[first : first + table.FLAGS]
            values["present"][: len(part)], values["first"] = part, 64 * first
            self._launch(self._arguments, -(-64 * len(part) // BLOCK), stream)


def rate(hyper: Hyper, grad_scale: float = 1.0, lr_at: int = 0) -> tuple[float, ...]:
    """A `Hyper` as the schedule takes it. `lr_at`: address of a float32 `lr` on the device, or 0."""
    decay = hyper.weight_decay
    l2, decoupled = (0.0, decay) if hyper.decoupled else (decay, 0.0)
    return hyper.lr, hyper.beta, hyper.Lambda, l2, decoupled, grad_scale, lr_at


def scalars(hyper: Hyper, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
    """What the kernel needs of the hyperparameters at a parameter's `step`, computed in float64."""
    return (
        hyper.lr / (1.0 - hyper.beta**step),
        hyper.lr * hyper.weight_decay if hyper.decoupled else 0.0,
        0.0 if hyper.decoupled else hyper.weight_decay,
        hyper.beta,
        1.0 - hyper.beta,
        hyper.Lambda,
        1.0 / grad_scale,
        0,
    )


Kind = TypeVar("Kind", bound=Hashable)


def gather(kinds: Sequence[Kind]) -> tuple[list[Kind], list[int]]:
    """(the different kinds in order of appearance, which of them each item is)."""
    places: dict[Kind, int] = {}
    which = [places.setdefault(kind, len(places)) for kind in kinds]
    return list(places), which


def reference_update(
    p: Any, g: Any, m: Any, factors: tuple[Any, Any] | None, hyper: Hyper, step: int, grad_scale: float = 1.0
) -> None:
    """`reference.update` in place, on any device."""
    H, S = factors or (None, None)
    reference.update_in_place(p, g, m, H, S, hyper, step, grad_scale)


def fused_step(
    params: Any,
    grads: Any,
    momenta: Any,
    factors: Any = None,
    *,
    lr: float,
    beta: float = 0.9,
    Lambda: float = 1e-3,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    step: int | Sequence[int] = 1,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """One AdaFisher update of all parameters, in place, in one kernel launch.

        m <- beta m + (1 - beta) g;   p <- p - lr / (1 - beta^step) m / (outer(S, H) + Lambda)

    with `g + weight_decay p` for `g`, or with `decoupled` the decay `lr weight_decay p` apart (see
    `reference.update`). Holds no state: for one that owns momentum, factors and counters see `AdaFisher`.

    Args:
        params: arrays, or nested lists, tuples and mappings of arrays: anything with `__dlpack__` or
            `__cuda_array_interface__`, all on one device. Changed in place. On the CUDA backend float32, contiguous or
            channels_last; on the reference backend any floating dtype and strides.
        grads: same structure, shapes and dtypes. Strided gradients are copied first.
        momenta: same structure, shapes and dtypes; on the CUDA backend with the parameters' strides. Changed in place.
        factors: None, or the same structure with None or a pair (H, S) for each parameter, where
            `len(S) * len(H)` is the parameter's size: it is seen as a (S, H) matrix in row-major order.
        lr, beta, Lambda, weight_decay, decoupled: see `Hyper`.
        step: 1-based number of the update, one for all or a list with one for each parameter.
        backend: "cuda", "reference", or None to choose.
        stream: CUDA stream or its address; the current stream of the framework that owns the first parameter if None.

    Raises:
        CafinError: an argument is refused; nothing has been changed then.
    """
    where = "fused_step"
    hyper = Hyper.checked(where, lr, beta, Lambda, weight_decay, decoupled)
    named = list(leaves(params, "params"))
    if not named:
        return
    p = [view(array, where, name) for name, array in named]
    g = like_params(where, p, params, grads, "grads")
    m = like_params(where, p, params, momenta, "momenta")
    pairs = _factors_like(where, p, params, factors)
    steps = _steps(where, step, len(p))
    for name, v in zip((name for name, _ in named), p):
        writable(where, name, v)
    for name, v in named_views("momenta", m):
        writable(where, name, v)
    mine = [(name, v) for (name, _), v in zip(named, p)] + named_views("momenta", m)
    read = [(f"factors[{k}].{letter}", f) for k, pair in enumerate(pairs) if pair for letter, f in zip("HS", pair)]
    refuse_overlap(where, mine, named_views("grads", g) + read)

    if choose(backend, p[0].device, {v.dtype for v in p}, where) == "reference":
        calls = []
        for a, b, c, pair, t in zip(p, g, m, pairs, steps):
            target = known(a.owner, where, "params")
            grad = beside(b.owner, target, where, "grads")
            momentum = beside(c.owner, target, where, "momenta", written=True)
            given = pair and tuple(beside(f.owner, target, where, "factors") for f in pair)
            calls.append((target, grad, momentum, given, hyper, t))
        for call in calls:
            reference_update(*call)
        return
    device = p[0].device
    assert isinstance(device, int)
    address = current_stream(p[0].owner, device, stream)
    columns = [pair[0].size if pair else 0 for pair in pairs]
    check_momenta(where, p, m)
    layouts = [layout(where, name, v, n) for (name, _), v, n in zip(named, p, columns)]
    pointers = [(pair[0].ptr, pair[1].ptr) if pair else (0, 0) for pair in pairs]
    sets, which = gather([scalars(hyper, t) for t in steps])
    with on_stream(p[0].owner, device, stream), _one_call:
        held = [matching(a, b) for a, b in zip(g, p)]
        launch = _launcher((tuple(layouts), tuple(pointers), device, address), p[0].owner)
        launch([v.ptr for v in p], [v.ptr for v in held], [v.ptr for v in m], sets, which, address)


_Call = tuple[tuple[Layout, ...], tuple[tuple[int, int], ...], int, int]  # layouts, factors, device, stream
_launchers: dict[_Call, CudaUpdate] = {}
_one_call = threading.Lock()  # a remembered launcher has one table and one set of arguments


def _launcher(call: _Call, like: Any) -> CudaUpdate:
    """The tables of recent calls: a training loop calls with the same arrays on the same stream again and again."""
    launch = _launchers.pop(call, None) or CudaUpdate(call[0], call[1], like, call[2])
    _launchers[call] = launch  # last in order
    if len(_launchers) > 8:
        del _launchers[next(iter(_launchers))]  # its memory was allocated on its own stream, and is freed in that order
    return launch


def matching(v: View, like: View) -> View:
    """`v` itself if its memory is ordered as that of `like`, else a copy that is."""
    return v if same_strides(v.shape, v.strides, like.strides) else view(copy_like(v.owner, like.owner))


def like_params(where: str, p: list[View], params: Any, tree: Any, path: str) -> list[View]:
    """Views of `tree`, checked to have the parameters' structure, shapes, device, and (gradients) dtype."""
    found = []
    for (name, array), v in zip(leaves_like(params, tree, where, path), p):
        if array is None:
            refuse(
                where, name, "be an array for each listed parameter", "None", "leave the parameter out, or pass zeros"
            )
        a = view(array, where, name)
        if a.shape != v.shape or a.device != p[0].device or v.device != p[0].device:
            rule = f"have shape {v.shape} on {place(p[0].device)}"
            refuse(where, name, rule, f"{a.shape} on {place(a.device)} (parameter on {place(v.device)})")
        if a.dtype != v.dtype:
            refuse(where, name, f"be {v.dtype} as its parameter", a.dtype, "convert it")
        found.append(a)
    return found


def check_momenta(where: str, p: list[View], m: list[View]) -> None:
    """The kernel walks over both in one order."""
    for (name, b), a in zip(named_views("momenta", m), p):
        if not same_strides(a.shape, a.strides, b.strides):
            rule = f"have the parameter's strides {a.strides}"
            refuse(where, name, rule, b.strides, "make it with zeros_like(parameter)")


def writable(where: str, name: str, v: View) -> None:
    """Refuse an array that cannot be updated in place."""
    if not v.writable or not hasattr(v.owner, "__setitem__"):
        refuse(
            where, name, "be writable, as it is updated in place", "a read-only array", "pass a copy", CafinTypeError
        )
    if v.dtype not in FLOATS:
        refuse(where, name, "hold real floating-point numbers", v.dtype, kind=CafinTypeError)
    if v.overlaps_itself:
        refuse(where, name, "have one element of memory for each entry", f"strides {v.strides}", "pass a copy")


def named_views(path: str, views: list[View]) -> list[tuple[str, View]]:
    return [(f"{path}[{index}]", v) for index, v in enumerate(views)]


def _factors_like(where: str, p: list[View], params: Any, factors: Any) -> list[tuple[View, View] | None]:
    if factors is None:
        return [None] * len(p)
    pairs: list[tuple[View, View] | None] = []
    for (name, pair), v in zip(leaves_like(params, factors, where, "factors"), p):
        if pair is None:
            pairs.append(None)
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse(where, name, "be None or a pair (H, S)", type(pair).__name__, kind=CafinTypeError)
        H, S = (view(f, where, f"{name}.{letter}") for f, letter in zip(pair, "HS"))
        for letter, f in (("H", H), ("S", S)):
            if len(f.shape) != 1 or not f.contiguous or f.device != v.device:
                rule = f"be a contiguous vector on {place(v.device)}"
                refuse(where, f"{name}.{letter}", rule, f"shape {f.shape} on {place(f.device)}")
            if f.dtype != ("float64" if v.dtype == "float64" else "float32"):
                refuse(where, f"{name}.{letter}", "be float32 (float64 for float64 parameters)", f.dtype, "convert it")
        if H.size * S.size != v.size:
            rule = f"have len(S) * len(H) == {v.size}, the parameter's size"
            refuse(where, name, rule, f"{S.size} * {H.size}", "a bias takes the last entry of H: H[-1:]")
        pairs.append((H, S))
    return pairs


def _steps(where: str, step: int | Sequence[int], count: int) -> list[int]:
    if not isinstance(step, (list, tuple)):
        return [whole(where, "step", step, 1)] * count
    if len(step) != count:
        refuse(where, "step", f"be one number or a list of {count}", f"a list of {len(step)}")
    return [whole(where, f"step[{index}]", t, 1) for index, t in enumerate(step)]
