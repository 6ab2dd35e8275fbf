"""The kernels for JAX without XLA: examples of sources that are written for a model, and launches on CuPy arrays."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from cafin_cupy import Averaging, Conv2d, GroupNorm, runtime
from cafin_cupy.adapters import jax_kernels, jax_layers, jax_ptx, jax_refresh, jax_sums
from cafin_cupy.adapters.jax_kernels import Leaf, Part, Use
from cafin_cupy.adapters.jax_taps import Layers
from cafin_cupy.arrays import view
from cafin_cupy.layers import Layer

# ---- Sources ----


def examples() -> list[jax_ptx.Kernel]:
    """The update of every kind of leaf, the two kernels of a convolution and of a norm, and the refresh of factors, as
    programs have them."""
    kinds = [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "bfloat16")]
    part = Part(3, 7, 1, 5)
    leaves = [Leaf(35, 3, *each, Use(part, part) if k % 2 else None, k % 2) for k, each in enumerate(kinds)]
    results = [jax.ShapeDtypeStruct((3, 35), dtype) for names in zip(*kinds) for dtype in names]
    made = [jax_kernels.kernel(leaves, results)]
    norm = GroupNorm(np.ones(6))
    conv = Conv2d(np.ones((6, 4, 3, 2)), np.ones(6), stride=2, padding=1, groups=2)
    for core, h, s, dtype in (
        (conv, (4, 9, 9, 8), (4, 5, 5, 6), "bfloat16"),
        (norm, (4, 5, 5, 6), (4, 5, 5, 6), "float32"),
    ):
        planned = plan(core, *(jax.ShapeDtypeStruct(shape, dtype) for shape in (h, s)), channels_last=True)
        made += jax_sums.sources(planned)
    params = {"conv": np.ones((3, 2, 2, 6)), "bias": np.ones(6), "norm": np.ones(6), "stack": np.ones((3, 5, 7))}
    kinds_of_layers = {
        "conv": jax_layers.Conv(weight="conv", bias="bias", groups=2),
        "norm": jax_layers.ChannelNorm(weight="norm"),
        "stack": jax_layers.Dense(weight="stack", stack=1),
    }
    layers = Layers(params, kinds_of_layers)
    made.append(jax_refresh.kernel(list(layers.values()), layers.size, Averaging.named("paper", 0.8)))
    return made


def plan(core: Layer, h: Any, s: Any, channels_last: bool) -> jax_sums.Plan:
    """What the kernels are told of a layer's arrays, which they must be able to read."""
    found = jax_sums._plan(core, *(jax_sums._view(x, channels_last) for x in (h, s)))
    assert found is not None
    return found


# ---- Launches ----


class Bits(NamedTuple):
    """An array of 16-bit floats on the GPU, where CuPy may not know their type."""

    bits: Any
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    def astype(self, dtype: Any) -> Bits:
        assert str(dtype) == self.dtype
        return self

    def get(self) -> np.ndarray[Any, Any]:
        return self.bits.get().view(np.dtype(self.dtype))


def to_gpu(x: np.ndarray[Any, Any]) -> Any:
    """A CuPy array of float32, or `Bits`."""
    import cupy

    return cupy.asarray(x) if x.itemsize == 4 else Bits(cupy.asarray(x.view(np.uint16)), str(x.dtype))


class _Parameters:
    """Arguments of a launch, each of them the address of an array."""

    def __init__(self, pointers: list[int]) -> None:
        self._values = np.array(pointers, np.uint64)
        self._places = self._values.ctypes.data + 8 * np.arange(len(pointers), dtype=np.uint64)
        self.address = self._places.ctypes.data


def launched(kernel: jax_ptx.Kernel, *operands: Any) -> list[Any]:
    """In place of `Kernel.__call__`: the results, as XLA would make them for a caller that keeps the operands.

    An operand that shares the memory of a result is copied there, and passed twice.
    """
    import cupy

    read = [x.bits if isinstance(x, Bits) else x for x in operands]
    written = [cupy.empty(x.shape, np.float32 if x.dtype.itemsize == 4 else np.uint16) for x in kernel.results]
    for operand, result in kernel.aliases.items():
        written[result][...] = read[operand]
        read[operand] = written[result]
    parameters = _Parameters([view(x).ptr for x in (*read, *written)])
    _launch(kernel.source, kernel.name, kernel.threads)(parameters, kernel.blocks, cupy.cuda.get_current_stream().ptr)
    return [x if x.itemsize == 4 else Bits(x, str(like.dtype)) for x, like in zip(written, kernel.results)]


@cache
def _launch(source: str, name: str, threads: int) -> runtime.Launch:
    from cupy.cuda import Device, Module

    options = runtime.cubin_options(f"sm_{Device(0).compute_capability}")
    module = Module()
    module.load(bytes(runtime._compiled("launched", source, f"{name}.cu", options, "getCUBIN")))
    # As XLA, launch when the one ahead is over: these kernels do not wait for it themselves.
    found = {"function": lambda *_: module.get_function(name), "_overlaps": lambda _: False}
    with mock.patch.multiple(runtime, **found):
        return runtime.Launch(name, name, 0, threads)
