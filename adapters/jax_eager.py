"""JAX arrays in programs that compute with other libraries too: the core on their memory, outside of `jax.jit`. What
keeps both in order is in jax_streams.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cafin_cupy.arrays import View, contiguous_strides, stream_address, view
from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.interrupts import uninterrupted
from cafin_cupy.nonfinite import refuse_nonfinite
from cafin_cupy.rule import flag
from cafin_cupy.update import SKIP, Step, checked

from .jax_streams import behind, between, let_wait, moved, on, owned, run
from .jax_taps import path_name

__all__ = ["borrowed", "fused_step"]


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
    stochastic_rounding: bool = False,
    seed: int = 0,
    donate: bool = False,
    backend: str | None = None,
    stream: Any = None,
    error_if_nonfinite: bool = False,
) -> tuple[Any, Any]:
    """`cafin_cupy.fused_step` of JAX arrays, outside of `jax.jit`: one AdaFisher update of all parameters, in one
    kernel launch on a GPU.

    JAX arrays never change, so the result is new arrays. With `donate` they are made of the old ones' memory, which are
    deleted then, as those that are donated to `jax.jit`; else the device copies first, and the old ones stay. On a CPU
    each call copies.

    The step comes behind all that JAX has been given before, those that still read the old arrays too, and ahead of all
    that it is given later; other work on the stream keeps its place, and the host waits for nothing (on a CPU for the
    step). Other arrays of JAX that are one with an old one, such as `x.addressable_data(0)`, are deleted with it. The
    memory of an array that another library still sees through DLPack is not donated: JAX copies that array, or refuses.

    Args:
        params: tree of JAX arrays on one device, float32, bfloat16 or float16; other floating-point types by the
            reference. bfloat16 on a GPU wants CuPy 14.
        grads: same structure, shapes and dtypes; JAX arrays, or those of other libraries on that device.
        momenta: same structure and shapes, JAX arrays; each of its parameter's dtype, or float32 for one of 16 bits, or
            of 16 bits for a float32 one.
        factors: None, or the same structure with None or a pair (H, S) for each parameter, where
            `len(S) * len(H)` is the parameter's size: it is seen as a (S, H) matrix in row-major order.
        lr, beta, Lambda, weight_decay, decoupled, step, stochastic_rounding, seed, backend, error_if_nonfinite: as in
            `cafin_cupy.fused_step`. Parameters are numbered as `jax.tree.leaves` has them.
        donate: let the new arrays take the memory of the old parameters and momenta.
        stream: CUDA stream or its address; CuPy's current one if None.

    Returns:
        (new params, new momenta), trees like the old ones. Arrays without elements are returned as they are.

    Raises:
        CafinError: an argument is refused, as within `jax.jit`, or memory that cannot be donated; nothing has been
            changed then.
        NonFiniteError: with `error_if_nonfinite`, a gradient is inf or NaN; nothing has been changed then.
        Exception: the launch itself failed, or Ctrl-C came. What was donated is not lost: `error.donated` is (params,
            momenta), as they were, or behind Ctrl-C as they are after the step.
    """
    where = "fused_step"
    donate = flag(where, "donate", donate)
    looks = flag(where, "error_if_nonfinite", error_if_nonfinite)
    found, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, _ in found]
    if len(set(names)) < len(names):  # keys with "/" in them
        names = [jax.tree_util.keystr(path) for path, _ in found]
    p, g, m = (
        _parts(where, name, tree, structure, names)
        for name, tree in (("params", params), ("grads", grads), ("momenta", momenta))
    )
    pairs = None if factors is None else _parts(where, "factors", factors, structure, names)
    for path, arrays in (("params", p), ("momenta", m)):
        for name, x in arrays.items():
            if not isinstance(x, jax.Array):
                mend = "convert it, or see cafin_cupy.fused_step for arrays that are updated in place"
                refuse(where, f"{path}[{name!r}]", "be a JAX array", type(x).__name__, mend, CafinTypeError)
    if stream is not None:
        stream_address(stream, where)
    options = lr, beta, Lambda, weight_decay, decoupled, step, stochastic_rounding, seed, backend, False
    call = checked(where, p, g, m, pairs, None, *options, _seen)
    own = [*p.values(), *m.values()]
    read = [x for x in jax.tree.leaves((g, pairs)) if isinstance(x, jax.Array)]
    _refuse_several(where, "params", own + read)
    if looks:
        refuse_nonfinite(where, [(f"gradient of params[{name!r}]", x) for name, x in g.items()], SKIP)

    def back(arrays: list[Any]) -> tuple[Any, Any]:
        return jax.tree.unflatten(structure, arrays[: len(p)]), jax.tree.unflatten(structure, arrays[len(p) :])

    return _stepped(call, own, read, back, donate, stream)


@contextmanager
def borrowed(arrays: Any, stream: Any = None) -> Iterator[Any]:
    """Context in which other libraries may read JAX arrays where they lie: `cafin_cupy.AdaFisher`, whose parameters are
    CuPy's or PyTorch's, takes activations and gradients of JAX so.

        with borrowed((h, s)) as (h, s):
            optimizer.accumulate(layer, h, s)

    Within, work on the stream comes behind all that JAX has been given before, and what it is given after the context
    comes behind that work; the host waits for nothing (on a CPU for the arrays). The core takes JAX arrays without it
    as well, but waits for both then.

    Args:
        arrays: tree of JAX arrays on one device; what else is in it is passed on. Nobody may write to them, and on a
            GPU nobody may donate them within.
        stream: CUDA stream or its address; CuPy's current one if None. Within, it is CuPy's current one.

    Yields:
        The tree with CuPy arrays on the same memory, of no use any more after the context; on a CPU with NumPy's,
        read-only, which keep it alive.

    Raises:
        CafinError: an array is refused, as within `jax.jit`.
    """
    where = "borrowed"
    if stream is not None:
        stream_address(stream, where)
    found, structure = jax.tree_util.tree_flatten_with_path(arrays)
    seen = [_seen(x, where, path_name(at) or "arrays") if isinstance(x, jax.Array) else None for at, x in found]
    mine = [x for (_, x), v in zip(found, seen) if v]
    _refuse_several(where, "arrays", mine)
    device = next((v.device for v in seen if v), "cpu")
    if isinstance(device, int):
        with between(where, mine, device, stream):
            yield jax.tree.unflatten(structure, [v.owner if v else x for (_, x), v in zip(found, seen)])
        return
    # NumPy's view holds the memory, also of an array that is donated. JAX keeps that view as long as the array that it
    # is made of, so it is made of another one, of the same buffer.
    yield jax.tree.unflatten(
        structure, [np.asarray(x.addressable_data(0)) if v else x for (_, x), v in zip(found, seen)]
    )


def _stepped(
    call: Step, own: list[Any], read: list[Any], back: Callable[[list[Any]], tuple[Any, Any]], donate: bool, stream: Any
) -> tuple[Any, Any]:
    """`back` of what becomes of parameters and momenta, `own`; arrays without elements have no part in it."""
    sized = [x for x in own if x.size]
    if not sized:
        return back(own)
    device, count = call.p[0].device, len(call.p)

    def whole(new: list[Any]) -> list[Any]:
        made = iter(new)
        return [next(made) if x.size else x for x in own]

    new = sized
    try:
        with uninterrupted():  # between donation and return nobody else has the numbers
            new, mark = owned(call.where, sized, read, donate and device != "cpu")
            views = [_lent(x, device, call.where, "params") for x in whole(new)]
            step = call._replace(p=views[:count], m=views[count:])
            if isinstance(device, int):
                with on(device, stream) as address:
                    let_wait(address, mark)
                    try:
                        step(stream)
                    finally:
                        new, _ = run(moved, new, (read, behind(address, device)), call.where)
            else:
                step()
            if donate:
                for x in sized:
                    x.delete()  # those that JAX has had to copy; on a CPU all
    except BaseException as error:
        if new is not sized and sized[0].is_deleted():
            error.donated = back(whole(new))  # type: ignore[attr-defined]
        raise
    return back(whole(new))


def _parts(where: str, path: str, tree: Any, structure: Any, names: list[str]) -> dict[str, Any]:
    """What stands in `tree` where the parameters have their arrays, by these arrays' names."""
    try:
        return dict(zip(names, structure.flatten_up_to(tree)))
    except ValueError:
        got: Any = jax.tree.structure(tree)
        refuse(where, path, "have the structure of the parameters", got, f"those have {structure}", CafinTypeError)


def _seen(array: Any, where: str, name: str) -> View:
    """What the core sees of an array. JAX's must be whole, and lie row-major on one device."""
    if not isinstance(array, jax.Array):
        return view(array, where, name)
    if isinstance(array, jax.core.Tracer):
        mend = "call it outside of jax.jit; inside, see fused_adafisher"
        refuse(where, name, "hold numbers", "a value that is traced", mend, CafinTypeError)
    if array.is_deleted():
        refuse(where, name, "be alive", "a deleted array", "it has been donated")
    if len(array.devices()) > 1:
        got, mend = f"an array on {len(array.devices())}", "inside jax.shard_map see fused_adafisher"
        refuse(where, name, "lie on one device", got, mend)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # keys
        refuse(where, name, "hold numbers", array.dtype, kind=CafinTypeError)
    if _packed(array.dtype):
        refuse(where, name, "have whole bytes for its entries", array.dtype, "convert it", CafinTypeError)
    order_of_axes = getattr(getattr(getattr(array, "format", None), "layout", None), "major_to_minor", None)
    if order_of_axes not in (None, tuple(range(array.ndim))):
        mend = "jax.device_put it to the default format"
        refuse(where, name, "be row-major in memory", f"axes in the order {order_of_axes}", mend)
    return _lent(array, _home(array, where, name), where, name)


def _packed(dtype: Any) -> bool:
    """True of int4, say, of which JAX lays two into a byte."""
    if dtype.itemsize > 1 or dtype.kind == "b":
        return False
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits < 8


def _refuse_several(where: str, name: str, arrays: list[Any]) -> None:
    """Refuse arrays on several devices; the core does not tell one CPU of JAX from another."""
    devices = {device for x in arrays for device in x.devices()}
    if len(devices) > 1:
        got = " and ".join(sorted(map(str, devices)))
        refuse(where, name, "lie on one device, with all that goes with them", got, "jax.device_put them to one")


def _home(array: Any, where: str, name: str) -> int | str:
    """ "cpu", or the number of the CUDA device."""
    try:
        kind, number = array.__dlpack_device__()
    except Exception as error:  # which JAX raises for TPUs, say
        refuse(where, name, "lie in CPU or CUDA memory", f"{array.sharding} ({error})", kind=CafinTypeError)
    if kind not in (1, 2):  # kDLCPU, kDLCUDA
        refuse(where, name, "lie in CPU or CUDA memory", f"DLPack device type {kind}", kind=CafinTypeError)
    return "cpu" if kind == 1 else int(number)


def _lent(array: Any, device: int | str, where: str, name: str) -> View:
    """The memory of a JAX array in one of NumPy's or CuPy's, which does not keep it alive. On a CPU it waits for the
    array."""
    shape, size = tuple(array.shape), array.size
    address = array.unsafe_buffer_pointer() if size else 0
    owner: Any
    if device == "cpu":
        jax.block_until_ready(array)
        buffer = (ctypes.c_char * array.nbytes).from_address(address) if size else b""
        owner = np.ndarray(shape, array.dtype, buffer) if size else np.empty(shape, array.dtype)
    else:
        import cupy

        bits = np.dtype(f"u{array.dtype.itemsize}")
        owner = cupy.asarray(_Memory(shape, address, bits)) if size else cupy.empty(shape, bits)
        try:
            owner = owner.view(array.dtype)
        except (TypeError, ValueError) as error:
            refuse(where, name, "have a dtype of CuPy's", f"{array.dtype} ({error})", "convert it", CafinTypeError)
    return View(address, shape, contiguous_strides(shape), array.dtype.name, device, True, owner)


class _Memory:
    """Memory of a GPU, in the protocol by which CuPy takes it over."""

    def __init__(self, shape: tuple[int, ...], address: int, dtype: np.dtype[Any]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": dtype.str, "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip
