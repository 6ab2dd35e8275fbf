"""CUDA C in XLA's programs: kernels that are compiled to PTX while a program is traced, and handed to XLA's own target
for PTX. No build step, no handler to register, and XLA puts the calls into its CUDA graphs.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cafin_cupy import runtime

TARGET = "__gpu$xla.gpu.ptx"
OLDEST = (0, 8)  # of jax, that has it
BITS = jnp.uint16  # what a callback is given for bfloat16, which it could not tell the address of
WITHOUT_GPU = "80"  # architecture of a program that is lowered where there is no GPU


@cache
def architecture() -> str:
    """The compute capability, as "90", that PTX is made for: the least of JAX's GPUs, as PTX runs on all later ones."""
    try:
        found = {str(device.compute_capability).replace(".", "") for device in jax.devices("cuda")}
    except RuntimeError:  # there is none
        return WITHOUT_GPU
    return min(found, key=int)


class Kernel(NamedTuple):
    """A kernel of kernels/<name>.cu, called from within a program.

    Attributes:
        name: of file and function.
        defined: what is written into the source, by the names of its macros.
        blocks, threads: of the launch.
        results: shapes and types of what it writes.
        aliases: which operands lie in the memory of which results.
    """

    name: str
    defined: dict[str, str]
    blocks: int
    threads: int
    results: list[Any]
    aliases: dict[int, int] = {}  # noqa: RUF012  # never changed

    @property
    def source(self) -> str:
        return "".join(f"#define {name} {text}\n" for name, text in self.defined.items()) + runtime.source(self.name)

    def __call__(self, *operands: Any) -> Any:
        """The results, within a program that is traced."""
        if _route.callback:
            return self._called_back(operands)
        n = len(operands)
        call = jax.ffi.ffi_call(TARGET, self.results, input_output_aliases=self.aliases)
        return call(
            *operands,
            **{f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", (self.blocks, 1, 1))},
            **{f"block_{axis}": np.int32(size) for axis, size in zip("xyz", (self.threads, 1, 1))},
            name=self.name,
            kernel_type="ptx",
            kernel_data=self.ptx,
            shared_mem_bytes=np.int32(0),
            output_indices=tuple(range(n, n + len(self.results))),
        )

    @property
    def ptx(self) -> str:
        return _ptx(self.source, f"{self.name}.cu", architecture())

    def _called_back(self, operands: tuple[Any, ...]) -> Any:
        """As `__call__`, where XLA calls Python, which launches."""
        from jax.experimental.buffer_callback import buffer_callback

        as_bits = [jax.lax.bitcast_convert_type(x, BITS) if x.dtype == jnp.bfloat16 else x for x in operands]
        results = [jax.ShapeDtypeStruct(x.shape, BITS if x.dtype == jnp.bfloat16 else x.dtype) for x in self.results]
        call = buffer_callback(
            partial(_launched, self.ptx, self.name, self.blocks, self.threads),
            results,
            input_output_aliases=self.aliases,
            command_buffer_compatible=True,
        )
        return [
            jax.lax.bitcast_convert_type(x, like.dtype) if x.dtype == BITS else x
            for x, like in zip(call(*as_bits), self.results)
        ]


def vmapped_by(formulas: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, in whose place the formulas serve under `jax.vmap`."""
    guarded = jax.custom_batching.custom_vmap(kernel)

    @guarded.def_vmap
    def batched(size: int, is_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda each: 0 if each else None, is_batched)
        results = jax.vmap(formulas, in_axes=axes, axis_size=size)(*args)
        return results, jax.tree.map(lambda _: True, results)

    return guarded


class _Route:
    """How XLA comes to the kernels: by its own target, or by a callback."""

    callback = False


_route = _Route()


def take_callback(yes: bool) -> None:
    """Let kernels of programs that are traced from now on be launched by a callback, or again by XLA itself."""
    _route.callback = yes


def _launched(ptx: str, name: str, blocks: int, threads: int, context: Any, results: Any, *operands: Any) -> None:
    """Launch on the stream of the context."""
    from cupy.cuda import driver, runtime

    values = np.array([x.__cuda_array_interface__["data"][0] for x in (*operands, *results)], np.uint64)
    device = runtime.pointerGetAttributes(int(values.max())).device
    function = _loaded(ptx, name, device)
    addresses = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
    sizes = blocks, 1, 1, threads, 1, 1, 0
    driver.launchKernel(function.ptr, *sizes, context.stream, addresses.ctypes.data, 0)


@cache
def _loaded(ptx: str, name: str, device: int) -> Any:
    from cupy.cuda import Device, Module

    with Device(device):
        module = Module()
        module.load(ptx.encode() + b"\0")
        return module.get_function(name)


@cache
def _ptx(text: str, file: str, arch: str) -> str:
    return lowered(runtime.ptx(text, file, arch), driver_version())


def driver_version() -> tuple[int, int] | None:
    """CUDA version of the driver; None without one."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def lowered(ptx: str, driver: tuple[int, int] | None) -> str:
    """PTX that names no later version of the language than the driver knows: a later compiler than the driver writes
    its own, whether it needs it or not."""
    if driver is None:
        return ptx
    major, minor = driver
    # CUDA 12.0 to 12.9 know PTX 8.0 to 8.8, and from 13.0 on the numbers run side by side.
    known = (8, (0, 1, 2, 3, 4, 5, 5, 6, 7, 8)[min(minor, 9)]) if major == 12 else (major - 4, minor)

    def least(match: re.Match[str]) -> str:
        return ".version {}.{}".format(*min(known, (int(match[1]), int(match[2]))))

    return re.sub(r"\.version (\d+)\.(\d+)", least, ptx, count=1)
