"""Work of ours on the memory of JAX arrays, in order with JAX's own.

JAX runs what it is given some time later, on streams of its own, and frees or reuses memory as soon as nothing that it
knows of needs it. So the work is put between two programs of JAX that do nothing (`_sequenced`): the first comes behind
all that JAX has been given, the second waits for the work, and all arrays are arguments of both. The host waits for
neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from cafin_cupy.arrays import current_stream, on_device, order, synchronize
from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.streams import on_stream

LEGACY = 1  # DLPack's name for CUDA's default stream, whose address is 0


def _sequenced(own: list[Any], read: Any) -> tuple[list[Any], Any]:
    """(`own`, something to wait for), behind all that JAX has been given, and behind `read`."""
    return jax.lax.optimization_barrier(own), jnp.zeros(1, jnp.float32)


moved = jax.jit(_sequenced, donate_argnums=0, keep_unused=True)
copied = jax.jit(_sequenced, keep_unused=True)


def run(program: Any, own: list[Any], read: Any, where: str) -> tuple[list[Any], Any]:
    """On the arrays' device, also where JAX would bring them to another. Results are not searched for inf and NaN,
    whatever JAX is set to: an error would lose what is donated."""
    device = next(iter(jax.tree.leaves((own, read))[0].devices()))
    with jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
        new, mark = program(own, read)
    if isinstance(mark, jax.core.Tracer):  # of a program that has not run
        got, mend = "those of a program that is traced", "call it outside of jax.jit; inside, see fused_adafisher"
        refuse(where, "params" if own else "arrays", "be JAX's numbers by now", got, mend, CafinTypeError)
    return new, mark


def owned(where: str, arrays: list[Any], read: Any, donate: bool) -> tuple[list[Any], Any]:
    """Arrays that nobody else has: made of the donated ones, or copies."""
    try:
        return run(moved if donate else copied, arrays, read, where)
    except (ValueError, RuntimeError) as error:
        if donate and not any(x.is_deleted() for x in arrays):
            got = str(error).partition("\n")[0]
            mend = "drop what else sees their memory, or pass donate=False"
            refuse(where, "params", "be JAX's to donate, with the momenta", f"from JAX: {got}", mend)
        raise


@contextmanager
def between(where: str, read: list[Any], device: int, stream: Any) -> Iterator[None]:
    """Context for work that reads JAX arrays."""
    _, mark = run(copied, [], read, where)
    with on(device, stream) as address:
        let_wait(address, mark)
        try:
            yield
        finally:
            run(copied, [], (read, behind(address, device)), where)


@contextmanager
def on(device: int, stream: Any) -> Iterator[int]:
    """Context in which CuPy works on `stream`, whose address is given."""
    with on_device(device), on_stream(None, device, stream):
        yield current_stream(None, device, stream)


def let_wait(stream: int, array: Any) -> None:
    """Let what a stream does from now on wait until an array of JAX is there. (JAX lets it wait for what writes the
    array, not for what reads it: hence `_sequenced`.)"""
    array.__dlpack__(stream=stream or LEGACY)


def behind(stream: int, device: int) -> Any:
    """An array of JAX that is there once a stream has done what it has been given."""
    return jax.dlpack.from_dlpack(_Mark(stream, device))


class _Mark:
    """What `behind` hands over: JAX names a stream of its own, and takes the array as ready when that one has come so
    far."""

    def __init__(self, stream: int, device: int) -> None:
        self.stream, self.device = stream, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device  # kDLCUDA

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is None:  # JAX's GPU client knows no such stream, and will take the array as ready
            synchronize(self.stream)
        else:
            order(self.stream, stream, self.device)
        return _cell(self.device).__dlpack__(stream=-1)  # in order already


@cache
def _cell(device: int) -> Any:
    import cupy

    return cupy.empty(1, cupy.float32)
