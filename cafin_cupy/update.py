"""The update of all parameters: one launch on the GPU, a loop over `reference.update` elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from . import reference
from .arrays import (
    View,
    beside,
    copy_like,
    current_stream,
    known,
    place,
    same_strides,
    stream_address,
    torch_of,
    view,
)
from .backend import choose, requested
from .cuda_update import CudaUpdate, Layout, layout, scalars
from .errors import CafinTypeError, refuse
from .interrupts import uninterrupted
from .memory import refuse_overlap
from .nonfinite import refuse_nonfinite
from .precision import Precision, momenta_of
from .rounding import SIXTEEN, Noise, step_noise
from .rule import Hyper, flag, whole
from .streams import joined, on_stream
from .trees import leaves, leaves_like

FLOATS = ("float16", "bfloat16", "float32", "float64")
SKIP = "leave the batch out"

Kind = TypeVar("Kind", bound=Hashable)
See = Callable[[Any, str, str], View]  # of an array, the function that was called, and the argument's name


def gather(kinds: Sequence[Kind]) -> tuple[list[Kind], list[int]]:
    """(the different kinds in order of appearance, which of them each item is)."""
    places: dict[Kind, int] = {}
    which = [places.setdefault(kind, len(places)) for kind in kinds]
    return list(places), which


class ReferenceUpdate:
    """The reference's update of a step's parameters, in place, one after the other and piece by piece.

    What is done cannot be taken back. So where it ends in the middle, as memory runs out for what a piece needs besides
    its arrays, the next attempt at the step goes on from there: every parameter is updated once.
    """

    def __init__(self) -> None:
        self._done: dict[int, int] = {}  # pieces, by parameter

    def __call__(
        self,
        key: int,
        p: Any,
        g: Any,
        m: Any,
        factors: tuple[Any, Any] | None,
        hyper: Hyper,
        step: int,
        grad_scale: float = 1.0,
        master: Any = None,
        noise: Noise | None = None,
    ) -> None:
        """`reference.update_in_place` of the parameter that is called `key`, or of what is left to do of it."""
        H, S = factors or (None, None)
        done = self._done.get(key, 0)
        for _ in reference.updates_in_place(p, g, m, H, S, hyper, step, grad_scale, master, noise, done):
            done += 1
            self._done[key] = done

    def over(self) -> None:
        """The step is complete, or given up."""
        self._done.clear()


def fused_step(
    params: Any,
    grads: Any,
    momenta: Any,
    factors: Any = None,
    masters: Any = None,
    *,
    lr: float,
    beta: float = 0.9,
    Lambda: float = 1e-3,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    step: int | Sequence[int] = 1,
    stochastic_rounding: bool = False,
    seed: int = 0,
    backend: str | None = None,
    stream: Any = None,
    error_if_nonfinite: bool = False,
) -> None:
    """One AdaFisher update of all parameters, in place, in one kernel launch.

        m <- beta m + (1 - beta) g;   p <- p - lr / (1 - beta^step) m / (outer(S, H) + Lambda)

    with `g + weight_decay p` for `g`, or with `decoupled` the decay `lr weight_decay p` apart (see
    `reference.update`). Holds no state: for one that owns momentum, factors and counters see `AdaFisher`.

    Args:
        params: arrays, or nested lists, tuples and mappings of arrays: anything with `__dlpack__` or
            `__cuda_array_interface__`, all on one device. Changed in place. On the CUDA backend each is float32,
            bfloat16 or float16, contiguous or channels_last; on the reference backend any floating dtype and strides.
        grads: same structure, shapes and dtypes. Strided gradients are copied first.
        momenta: same structure and shapes; on the CUDA backend with the parameters' strides. Changed in place. Each is
            of its parameter's dtype, or float32 for one of 16 bits, or of 16 bits for a float32 one.
        factors: None, or the same structure with None or a pair (H, S) for each parameter, where
            `len(S) * len(H)` is the parameter's size: it is seen as a (S, H) matrix in row-major order.
        masters: None, or the same structure with None or a float32 array for each parameter of 16 bits, of its shape
            and strides: the weights that the parameter is a rounded copy of. They are updated in place, and then
            rounded to the nearest. Where a parameter is another number than that copy, it has been written since, and
            counts.
        lr, beta, Lambda, weight_decay, decoupled: see `Hyper`.
        step: 1-based number of the update, one for all or a list with one for each parameter.
        stochastic_rounding: parameters of 16 bits without a master are rounded up or down at random, so that the mean
            of many roundings is the number itself; to the nearest otherwise. Arithmetic is that of float32 either way.
        seed: of these random numbers, which also depend on `step`, on the parameter's place in the list, and on the
            element's in memory; the same ones give the same bits, on either backend.
        backend: "cuda", "reference", or None to choose.
        stream: CUDA stream or its address; the current stream of the framework that owns the first parameter if None.
        error_if_nonfinite: look at the gradients first; waits for the device.

    Raises:
        CafinError: an argument is refused; nothing has been changed then.
        NonFiniteError: with `error_if_nonfinite`, a gradient is inf or NaN; nothing has been changed then.
        MemoryError, or the framework's own kind: on the reference backend some parameters may be updated by then.
    """
    if stream is not None:
        stream_address(stream)
    options = lr, beta, Lambda, weight_decay, decoupled, step, stochastic_rounding, seed, backend, error_if_nonfinite
    checked("fused_step", params, grads, momenta, factors, masters, *options)(stream)


class Step(NamedTuple):
    """A call of `fused_step` whose arguments are checked; called, it changes `p`, `m` and `w`.

    Attributes:
        where: the function that was called.
        p, g, m, w: parameters, gradients, momenta and masters, None without.
        pairs: (H, S) of each parameter, None without.
        hyper: the scalars.
        steps: number of the update, of each parameter.
        begin: of the random numbers, see `rounding.start`; 0 rounds to the nearest.
        looked_at: gradients that must be finite, with their names.
        backend: "cuda" or "reference".
        layouts: of each parameter, for the kernel.
    """

    where: str
    p: list[View]
    g: list[View]
    m: list[View]
    w: list[View | None]
    pairs: list[tuple[View, View] | None]
    hyper: Hyper
    steps: list[int]
    begin: int
    looked_at: list[tuple[str, Any]]
    backend: str
    layouts: list[Layout]

    def __call__(self, stream: Any = None) -> None:
        if self.p:
            self._launched(stream) if self.backend == "cuda" else self._by_reference()

    def _by_reference(self) -> None:
        where, calls = self.where, []
        for k, (a, b, c, d, pair, t) in enumerate(zip(self.p, self.g, self.m, self.w, self.pairs, self.steps)):
            target = known(a.owner, where, "params")
            grad = beside(b.owner, target, where, "grads")
            momentum = beside(c.owner, target, where, "momenta", written=True)
            master = d and beside(d.owner, target, where, "masters", written=True)
            given = pair and tuple(beside(f.owner, target, where, "factors") for f in pair)
            noise = Noise(step_noise(self.begin, t), k) if self.begin else None
            calls.append((target, grad, momentum, given, self.hyper, t, 1.0, master, noise))
        refuse_nonfinite(where, self.looked_at, SKIP)
        update = ReferenceUpdate()
        with uninterrupted():
            for key, call in enumerate(calls):
                update(key, *call)

    def _launched(self, stream: Any) -> None:
        p, g, m, w, pairs = self[1:6]
        device = p[0].device
        assert isinstance(device, int)
        address = current_stream(p[0].owner, device, stream)
        pointers = [(pair[0].ptr, pair[1].ptr) if pair else (0, 0) for pair in pairs]
        sets, which = gather([scalars(self.hyper, t, 1.0, self.begin) for t in self.steps])
        owners = [v.owner for v in (*p, *g, *m, *filter(None, w), *(f for pair in pairs if pair for f in pair))]
        with on_stream(p[0].owner, device, stream), joined(owners, device, address), _one_call:
            held = [matching(a, b) for a, b in zip(g, p)]
            at = tuple(v.ptr if v else 0 for v in w) if any(w) else ()
            launch = _launcher((tuple(self.layouts), tuple(pointers), device, address, at), p[0].owner)
            refuse_nonfinite(self.where, self.looked_at, SKIP)
            launch([v.ptr for v in p], [v.ptr for v in held], [v.ptr for v in m], sets, which, address)


def checked(
    where: str,
    params: Any,
    grads: Any,
    momenta: Any,
    factors: Any,
    masters: Any,
    lr: float,
    beta: float,
    Lambda: float,
    weight_decay: float,
    decoupled: bool,
    step: int | Sequence[int],
    stochastic_rounding: bool,
    seed: int,
    backend: str | None,
    error_if_nonfinite: bool,
    see: See = view,
) -> Step:
    """The arguments of `fused_step`, or a `CafinError`. `see`: how an array is looked at."""
    hyper = Hyper.checked(where, lr, beta, Lambda, weight_decay, decoupled)
    error_if_nonfinite = flag(where, "error_if_nonfinite", error_if_nonfinite)
    named = list(leaves(params, "params", where))
    p = [see(array, where, name) for name, array in named]
    for (name, _), v in zip(named, p):
        writable(where, name, v)
    g = like_params(where, p, params, grads, "grads", see=see)
    m = like_params(where, p, params, momenta, "momenta", momenta_of, see)
    w = _masters_like(where, p, params, masters)
    begin = Precision.checked(where, None, False, stochastic_rounding, seed).begin
    pairs = _factors_like(where, p, params, factors, see)
    steps = _steps(where, step, len(p))
    written = named_views("momenta", m) + named_views("masters", w)
    for name, v in written:
        writable(where, name, v)
    mine = [(name, v) for (name, _), v in zip(named, p)] + written
    read = [(f"factors[{k}].{letter}", f) for k, pair in enumerate(pairs) if pair for letter, f in zip("HS", pair)]
    refuse_overlap(where, mine, named_views("grads", g) + read)
    looked_at = [(f"gradient of {name}", v.owner) for (name, _), v in zip(named, g)] if error_if_nonfinite else []
    layouts: list[Layout] = []
    if not p:
        chosen = requested(backend, where) or "reference"
    else:
        chosen = choose(backend, p[0].device, {v.dtype for v in p}, where)
    if p and chosen == "cuda":
        columns = [pair[0].size if pair else 0 for pair in pairs]
        layouts = [layout(where, name, v, n, b.dtype) for (name, _), v, n, b in zip(named, p, columns, m)]
        same_order(where, p, "momenta", m)
        same_order(where, p, "masters", w)
    return Step(where, p, g, m, w, pairs, hyper, steps, begin, looked_at, chosen, layouts)


# Layouts, factors, device, stream, masters.
_Call = tuple[tuple[Layout, ...], tuple[tuple[int, int], ...], int, int, tuple[int, ...]]
_launchers: dict[_Call, CudaUpdate] = {}
_one_call = threading.Lock()  # a remembered launcher has one table and one set of arguments


def _launcher(call: _Call, like: Any) -> CudaUpdate:
    """The tables of recent calls: a training loop calls with the same arrays on the same stream again and again."""
    launch = _launchers.pop(call, None) or CudaUpdate(*call[:2], like, call[2], call[4])
    _launchers[call] = launch  # last in order
    if len(_launchers) > 8:
        del _launchers[next(iter(_launchers))]  # its memory was allocated on its own stream, and is freed in that order
    return launch


def matching(v: View, like: View) -> View:
    """`v` itself if its memory is ordered as that of `like`, else a copy that is."""
    return v if same_strides(v.shape, v.strides, like.strides) else view(copy_like(v.owner, like.owner))


def like_params(
    where: str,
    p: list[View],
    params: Any,
    tree: Any,
    path: str,
    dtypes: Callable[[str], tuple[str, ...]] = lambda dtype: (dtype,),
    see: See = view,
) -> list[View]:
    """Views of `tree`, checked to have the parameters' structure, shapes and device, and the `dtypes` that go with
    theirs."""
    found = []
    for (name, array), v in zip(leaves_like(params, tree, where, path), p):
        if array is None:
            refuse(
                where, name, "be an array for each listed parameter", "None", "leave the parameter out, or pass zeros"
            )
        if v.device != p[0].device:
            refuse(where, name, f"belong to a parameter on {place(p[0].device)}", place(v.device))
        found.append(_like(where, name, see(array, where, name), v, dtypes(v.dtype)))
    return found


def _like(where: str, name: str, a: View, v: View, dtypes: Sequence[str]) -> View:
    """`a`, checked to have the shape and device of `v`, and one of `dtypes`."""
    if a.shape != v.shape or a.device != v.device:
        refuse(where, name, f"have shape {v.shape} on {place(v.device)}", f"{a.shape} on {place(a.device)}")
    if a.dtype not in dtypes:
        refuse(where, name, f"be {' or '.join(dtypes)} for its {v.dtype} parameter", a.dtype, "convert it")
    return a


def _masters_like(where: str, p: list[View], params: Any, masters: Any) -> list[View | None]:
    if masters is None:
        return [None] * len(p)
    found: list[View | None] = []
    for (name, array), v in zip(leaves_like(params, masters, where, "masters"), p):
        if array is not None and v.dtype not in SIXTEEN:
            refuse(where, name, f"be None for a {v.dtype} parameter", "an array", "only 16 bits have a master")
        found.append(None if array is None else _like(where, name, view(array, where, name), v, ("float32",)))
    return found


def same_order(where: str, p: list[View], path: str, views: Sequence[View | None]) -> None:
    """Refuse momenta or masters that lie in memory otherwise than their parameters: the kernels walk over all in one
    order."""
    for index, (a, b) in enumerate(zip(p, views)):
        if b is not None and not same_strides(a.shape, a.strides, b.strides):
            rule = f"have the parameter's strides {a.strides}"
            refuse(where, f"{path}[{index}]", rule, b.strides, "make it with zeros_like(parameter)")


def writable(where: str, name: str, v: View) -> None:
    """Refuse an array that cannot be updated in place."""
    if not v.writable or not hasattr(v.owner, "__setitem__"):
        mend = "pass a copy, or for JAX, whose arrays are immutable, see cafin_cupy.adapters.jax"
        refuse(where, name, "be writable, as it is updated in place", "a read-only array", mend, CafinTypeError)
    if v.dtype not in FLOATS:
        rule = f"hold real floating-point numbers ({', '.join(FLOATS)})"
        refuse(where, name, rule, v.dtype, "convert it", CafinTypeError)
    outside_inference_mode(where, name, v.owner)
    if v.overlaps_itself:
        refuse(where, name, "have one element of memory for each entry", f"strides {v.strides}", "pass a copy")


def outside_inference_mode(where: str, name: str, array: Any) -> None:
    """Refuse a tensor that was made in PyTorch's inference mode, and is to be changed outside of it."""
    torch = torch_of(array)
    if torch is not None and array.is_inference() and not torch.is_inference_mode_enabled():
        mend = "make it outside of torch.inference_mode()"
        refuse(where, name, "be writable, as it is updated in place", "an inference tensor", mend, CafinTypeError)


def named_views(path: str, views: Sequence[View | None]) -> list[tuple[str, View]]:
    return [(f"{path}[{index}]", v) for index, v in enumerate(views) if v is not None]


def _factors_like(where: str, p: list[View], params: Any, factors: Any, see: See) -> list[tuple[View, View] | None]:
    if factors is None:
        return [None] * len(p)
    pairs: list[tuple[View, View] | None] = []
    for (name, pair), v in zip(leaves_like(params, factors, where, "factors"), p):
        if pair is None:
            pairs.append(None)
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse(where, name, "be None or a pair (H, S)", type(pair).__name__, kind=CafinTypeError)
        H, S = (see(f, where, f"{name}.{letter}") for f, letter in zip(pair, "HS"))
        for letter, f in (("H", H), ("S", S)):
            if len(f.shape) != 1 or not f.contiguous or f.device != v.device:
                rule, got = f"be a contiguous vector on {place(v.device)}", f"shape {f.shape} on {place(f.device)}"
                refuse(where, f"{name}.{letter}", rule, f"{got} with strides {f.strides}", "pass a contiguous copy")
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
