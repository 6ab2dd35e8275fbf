"""A stand-in for CuPy on one emulated GPU: NumPy's memory counts as the device's, and kernels run when launched.

It has what the library and the tests on CuPy arrays use. As on a GPU, host arrays are refused where device arrays are
wanted, results without axes are arrays, and new memory holds anything: here NaN.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import compiler


class CUDARuntimeError(RuntimeError):
    pass


class _Current(threading.local):
    """Of each thread its device, as in CUDA."""

    device = 0


_current = _Current()


class Device:
    """All devices have the same memory."""

    count = 1

    def __init__(self, number: Any = 0) -> None:
        self.id = int(number)
        self.compute_capability = "90"
        self._before: list[int] = []
        if not 0 <= self.id < self.count:
            raise CUDARuntimeError(f"cudaErrorInvalidDevice: there are {self.count} devices, got {self.id}")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self._before.append(_current.device)
        _current.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        _current.device = self._before.pop()

    def synchronize(self) -> None:
        pass


class Stream:
    """A number: whatever is ordered on it has happened."""

    _current: list[Stream] = []  # noqa: RUF012

    def __init__(self, ptr: int | None = None, non_blocking: bool = False) -> None:
        self.ptr = id(self) if ptr is None else ptr

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(stream.__cuda_stream__()[1])

    def __enter__(self) -> Stream:
        self._current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._current.pop()

    def synchronize(self) -> None:
        pass


class Event:
    done, ptr = True, 1

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Pinned(np.ndarray):
    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


# ---- Arrays ----


class ndarray(np.ndarray):
    """NumPy memory that counts as memory of device 0."""

    __module__ = "cupy"  # by this, others know CuPy's arrays

    @property
    def device(self) -> Device:  # type: ignore[override]
        return Device()

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = _host(self).__array_interface__  # broadcast arrays are writable in CuPy
        return {**host, "data": (host["data"][0], False), "version": 3, "stream": 1}

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: Any) -> Any:
        return _host(self).__dlpack__()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        _refuse_host(inputs)
        if out is None:
            return _device(getattr(ufunc, method)(*map(_host, inputs), **options))
        _refuse_host(out)
        getattr(ufunc, method)(*map(_host, inputs), out=tuple(map(_host, out)), **options)
        return out[0]

    def __getitem__(self, key: Any) -> Any:
        return _device(super().__getitem__(_host(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_host([value])
        super().__setitem__(_host(key), _host(value))

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(_host(self))


def _host(x: Any) -> Any:
    """NumPy's views of the device arrays in x."""
    if isinstance(x, ndarray):
        return x.view(np.ndarray)
    return type(x)(map(_host, x)) if type(x) in (tuple, list) else x


def _device(x: Any) -> Any:
    """Device arrays for the arrays and scalars in x."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x).view(ndarray)
    return type(x)(map(_device, x)) if type(x) in (tuple, list) else x


def _refuse_host(arguments: Any) -> None:
    for x in arguments:
        if isinstance(x, np.ndarray) and not isinstance(x, ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")


def _of_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy on device arrays."""

    @functools.wraps(function, updated=())
    def call(*arguments: Any, device: Any = None, **options: Any) -> Any:
        _refuse_host(arguments)
        return _device(function(*map(_host, arguments), **{name: _host(value) for name, value in options.items()}))

    return call


class _Lent:
    """Device memory as NumPy takes it, without a copy."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self.owner.__cuda_array_interface__, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def __dlpack__(self, **_: Any) -> Any:
        return self.owner.__dlpack__()


def asarray(x: Any, dtype: Any = None, *, copy: bool | None = None, device: Any = None) -> Any:
    """`x` itself, a view of another library's device memory, or a copy of what lies on the host."""
    if not isinstance(x, ndarray) and hasattr(x, "__cuda_array_interface__"):
        x = np.asarray(_Lent(x)).view(ndarray)
    if not isinstance(x, ndarray) or copy:
        return np.array(_host(x), dtype).view(ndarray)
    return x if dtype is None or x.dtype == dtype else _device(_host(x).astype(dtype))


def array(x: Any, dtype: Any = None) -> Any:
    return asarray(x, dtype, copy=True)


def from_dlpack(x: Any) -> Any:
    return np.from_dlpack(_Lent(x)).view(ndarray)


def _poisoned(x: np.ndarray[Any, Any]) -> Any:
    if x.nbytes:
        ctypes.memset(x.ctypes.data, 0xFF, x.nbytes)
    return x.view(ndarray)


def empty(shape: Any, dtype: Any = float, *, device: Any = None) -> Any:
    return _poisoned(np.empty(shape, dtype))


def empty_like(x: Any, dtype: Any = None, *, device: Any = None) -> Any:
    return _poisoned(np.empty_like(_host(x), dtype))


class Generator:
    def __init__(self, seed: int) -> None:
        self._host = np.random.default_rng(seed)

    def standard_normal(self, shape: Any, dtype: Any = float) -> Any:
        return _device(self._host.standard_normal(shape, dtype))


# ---- Launches ----


class NVRTCError(RuntimeError):
    pass


class Program:
    """A program of NVRTC. Its machine code is a number, by which `Module` finds the library in this process."""

    libraries: dict[bytes, Any] = {}  # noqa: RUF012
    _numbers = itertools.count()

    def __init__(self, source: str, name: str, headers: tuple[()], include_names: tuple[()]) -> None:
        self.source, self.log, self.code = source, "", b""

    def compile(self, options: tuple[str, ...]) -> None:
        try:
            library = compiler.build(self.source, options)
        except compiler.CompileError as error:
            self.log = str(error)
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)") from error
        self.code = b"emulated %d" % next(self._numbers)
        self.libraries[self.code] = library


class Module:
    def load(self, code: bytes) -> None:
        self._library = Program.libraries[code]

    def get_function(self, name: str) -> compiler.Kernel:
        return compiler.Kernel(self._library, name)


class LaunchKernelEx:
    """cuLaunchKernelEx, as ctypes has it: `restype` takes the result."""

    argtypes: Any = ()
    restype: Any = int

    def __call__(self, config: int, function: int, parameters: int, extra: None) -> Any:
        from cafin_cupy.runtime import _Config

        shape = _Config.from_address(config)
        assert shape.grid_y == shape.grid_z == shape.block_y == shape.block_z == 1, "one axis is emulated"
        compiler.Kernel.known[function](shape.grid_x, shape.block_x, parameters)
        return self.restype(0)


class Driver:
    """Of libcuda, what launches."""

    def __getitem__(self, name: str) -> LaunchKernelEx:
        assert name == "cuLaunchKernelEx"
        return LaunchKernelEx()

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"of no launch that is emulated"
        return 0


# ---- In place of the real modules ----


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def _like_numpy(name: str, model: types.ModuleType, **members: Any) -> types.ModuleType:
    """A module with the functions, types and numbers of `model`, but for `members`."""
    public = {key: value for key, value in vars(model).items() if not key.startswith("__")}
    public = {key: value for key, value in public.items() if not isinstance(value, types.ModuleType)}
    wrap = lambda value: _of_numpy(value) if callable(value) and not isinstance(value, type) else value  # noqa: E731
    return _module(name, **{**{key: wrap(value) for key, value in public.items()}, **members})


def _nothing(*_: Any) -> None:
    pass


def _copy(to: int, source: int, size: int, kind: int, stream: int = 0) -> None:
    ctypes.memmove(to, source, size)


def install() -> None:
    """Put the stand-ins in place of `cupy`, of its namespace in array_api_compat, and of the driver."""
    import array_api_compat.numpy
    from array_api_compat.common import _helpers

    from cafin_cupy import runtime as ours

    runtime = _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: _current.device,
        setDevice=lambda number: setattr(_current, "device", number),
        getDeviceCount=lambda: Device.count,
        deviceGetAttribute=lambda *_: 132,  # number of multiprocessors
        driverGetVersion=lambda: 12080,
        memcpy=_copy,
        memcpyAsync=_copy,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        eventRecord=_nothing,
        streamSynchronize=_nothing,
        streamWaitEvent=_nothing,
        streamIsCapturing=lambda _: False,
        pointerGetAttributes=lambda _: types.SimpleNamespace(device=0),
    )
    nvrtc = _module(
        "cupy.cuda.nvrtc",
        NVRTCError=NVRTCError,
        getVersion=lambda: (12, 8),
        createProgram=Program,
        compileProgram=Program.compile,
        getCUBIN=lambda program: program.code,
        getProgramLog=lambda program: program.log,
        destroyProgram=_nothing,
    )
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # what is compiled here is of no use to others
    Stream._current[:] = [Stream(0)]
    cuda = _module(
        "cupy.cuda",
        runtime=runtime,
        nvrtc=nvrtc,
        Device=Device,
        Stream=Stream,
        Event=Event,
        Module=Module,
        get_current_stream=lambda *_: Stream._current[-1],
        alloc_pinned_memory=lambda size: np.zeros(size, np.uint8).view(Pinned),
    )
    made = {"ndarray": ndarray, "array": array, "asarray": asarray, "empty": empty, "empty_like": empty_like}
    made["from_dlpack"] = from_dlpack
    random = _module("cupy.random", default_rng=Generator)
    _like_numpy("cupy", np, **made, cuda=cuda, random=random)
    array_api_compat.cupy = _like_numpy("array_api_compat.cupy", array_api_compat.numpy, **made)  # type: ignore[attr-defined]

    # The device's arrays are a subclass of NumPy's, but not NumPy's.
    known = _helpers._issubclass_fast

    def issubclass_fast(cls: type, module: str, name: str) -> bool:
        return not (module == "numpy" and issubclass(cls, ndarray)) and known(cls, module, name)

    _helpers._issubclass_fast = issubclass_fast  # type: ignore[assignment]
    ours._driver = Driver  # type: ignore[assignment]


class Anywhere(int):
    """The device of a tensor of which nobody knows where it lies: equal to all."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, int)

    __hash__ = int.__hash__


def lend_torch(monkeypatch: Any, devices: int = 1) -> None:
    """Let PyTorch's tensors on the CPU count as tensors on the emulated GPU, for one test: the kernels' side of the
    adapter runs on them. PyTorch's own CUDA stays out: its streams and graphs are not emulated.

    With several `devices` a parameter's shape decides on which it lies, and other tensors lie where they are wanted.
    """
    import torch

    from cafin_cupy import arrays
    from cafin_cupy.adapters import torch_joining, torch_plan, torch_precision, torch_sampling

    look = arrays.torch_view

    def view(tensor: Any, where: str, name: str) -> Any:
        anywhere = devices > 1 and not isinstance(tensor, torch.nn.Parameter)
        home = Anywhere() if anywhere else sum(tensor.shape) % devices
        return look(tensor, where, name)._replace(device=home)

    monkeypatch.setattr(Device, "count", devices)
    for module in (arrays, torch_joining, torch_plan, torch_precision, torch_sampling):
        monkeypatch.setattr(module, "torch_view", view)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


def lend_jax(monkeypatch: Any) -> None:
    """Let JAX's arrays on the CPU count as arrays on the emulated GPU outside of `jax.jit`, for one test. JAX's streams
    are not emulated: each side waits for the other."""
    import jax
    import jax.numpy as jnp

    from cafin_cupy.adapters import jax_eager, jax_streams

    def let_wait(stream: int, array: Any) -> None:
        jax.block_until_ready(array)

    def behind(stream: int, device: int) -> Any:
        return jnp.zeros(1)

    monkeypatch.setattr(jax_eager, "_home", lambda *_: 0)
    for module in (jax_eager, jax_streams):
        monkeypatch.setattr(module, "let_wait", let_wait)
        monkeypatch.setattr(module, "behind", behind)
