"""Compiling and launching: CUDA C sources to functions of the device in use.

Sources are compiled by CuPy's NVRTC on first use, for the device at hand, and kept on disk (kernel_cache.py). Not by
`cupy.RawModule`: it wants CUDA's headers to be installed, and ends with an error where its cache cannot be written. No
header is included here, so none must be installed. Local includes are pasted in, so that the source is all that the
cache must know; `#line` keeps the compiler's messages pointing at the repository's files.

As CuPy does, `-ftz=true` is set: float32 denormals count as 0 on the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from . import environment, forks, kernel_cache, table
from .errors import BackendError

KERNELS: dict[str, tuple[str, ...]] = {
    "column_sums": ("column_sums",),
    "fold": ("fold",),
    "average": ("average",),
    "update": ("update", "schedule"),
    "update_mixed": (
        "update_mixed",
        *("update_float32_bfloat16", "update_float32_float16"),
        *(f"update_bfloat16_{m}{master}" for m in ("float32", "bfloat16") for master in ("", "_master")),
        *(f"update_float16_{m}{master}" for m in ("float32", "float16") for master in ("", "_master")),
    ),
}
ON_DEMAND = {"update_mixed"}  # few models need it
# Stem and kernel; adapters/jax_ptx.py completes their sources.
IN_XLA = ("average_xla", "column_sums_xla", "fold_xla", "update_xla")
DTYPES = {"float32": ("float", "float")}  # element type T, arithmetic type A

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


def _read(file: str) -> str:
    checkout = Path(__file__).resolve().parent.parent / "kernels" / file
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    return resources.files("cafin_cupy.kernels").joinpath(file).read_text(encoding="utf-8")


@cache
def source(stem: str) -> str:
    """The CUDA C of `kernels/<stem>.cu` with its local includes pasted in."""
    return f'#line 1 "kernels/{stem}.cu"\n{_pasted(f"{stem}.cu")}'


def _pasted(file: str) -> str:
    text = _read(file)

    def paste(include: re.Match[str]) -> str:
        line = text.count("\n", 0, include.start()) + 2
        return f'#line 1 "kernels/{include[1]}"\n{_pasted(include[1])}\n#line {line} "kernels/{file}"'

    return _INCLUDE.sub(paste, text)


def options(dtype: str = "float32") -> tuple[str, ...]:
    """Compiler options of every kernel for tensors of `dtype`."""
    element, arithmetic = DTYPES[dtype]
    sizes = tuple(f"-DSIZEOF_{name}={struct.itemsize}" for name, struct in table.STRUCTS.items())
    return ("--std=c++17", f"-DELEMENT={element}", f"-DARITHMETIC={arithmetic}", f"-DCHUNK={table.CHUNK}", *sizes)


def cubin_options(arch: str, dtype: str = "float32") -> tuple[str, ...]:
    """`options`, and what CuPy adds to them where it compiles for a device of `arch` ("sm_90")."""
    return (*options(dtype), "-ftz=true", f"-arch={arch}", "--device-as-default-execution-space")


def compile_cubin(stem: str, arch: str, dtype: str = "float32") -> bytes:
    """Machine code of one source for `arch` ("sm_90"), by NVRTC alone: needs no GPU.

    Raises:
        BackendError: the source does not compile, and the message is the compiler's log; or NVRTC is missing.
    """
    return bytes(_compiled("compile_cubin", source(stem), f"{stem}.cu", cubin_options(arch, dtype), "getCUBIN"))


def ptx(text: str, file: str, arch: str, dtype: str = "float32") -> str:
    """PTX of CUDA C with its includes pasted in, for a compute capability ("90") and later ones; kept on disk.

    Raises:
        BackendError: as `compile_cubin`.
    """
    wanted = (*options(dtype), "-ftz=true", f"-arch=compute_{arch}", "--device-as-default-execution-space")

    def compiled() -> bytes:
        code = _compiled("ptx", text, file, wanted, "getPTX")
        return code.encode() if isinstance(code, str) else bytes(code)

    return _kept("ptx", f"{file}.ptx", (wanted, text), compiled).decode().rstrip("\0")


def _compiled(where: str, text: str, file: str, wanted: tuple[str, ...], get: str) -> Any:
    """What NVRTC makes of CUDA C, by the name of its function."""
    from cupy.cuda import nvrtc

    try:
        program = nvrtc.createProgram(text, file, (), ())
    except Exception as error:  # the library is not found, or does not load
        raise BackendError(f"{where}: {_nvrtc_problem(error)}") from error
    try:
        nvrtc.compileProgram(program, wanted)
        return getattr(nvrtc, get)(program)
    except nvrtc.NVRTCError as error:
        arch = next(word for word in wanted if word.startswith("-arch=")).removeprefix("-arch=")
        raise BackendError(f"{where}: {file} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def cubin(stem: str, arch: str, dtype: str = "float32") -> bytes:
    """As `compile_cubin`, but what a process has compiled before is read from the disk."""
    content = cubin_options(arch, dtype), source(stem)
    return _kept("cubin", f"{stem}.cubin", content, lambda: compile_cubin(stem, arch, dtype))


def _kept(where: str, file: str, content: tuple[Any, ...], compiled: Callable[[], bytes]) -> bytes:
    """What is compiled of `content`, or read from the disk."""
    from cupy.cuda import nvrtc

    try:
        version = nvrtc.getVersion()
    except Exception as error:  # as in `_compiled`
        raise BackendError(f"{where}: {_nvrtc_problem(error)}") from error
    stem, _, kind = file.rpartition(".")
    key = f"cafin_cupy-{stem}-{hashlib.sha256(repr((version, *content)).encode()).hexdigest()[:40]}.{kind}"
    code = kernel_cache.load(key)
    if code is None:
        code = compiled()
        kernel_cache.save(key, code)
    return code


_modules: dict[tuple[str, int, str], Any] = {}
_functions: dict[tuple[str, str, int, str], Any] = {}


def function(stem: str, name: str, device: int, dtype: str = "float32") -> Any:
    """The kernel `name` of `kernels/<stem>.cu` on a device, compiled on first use; its address is `.ptr`.

    Raises:
        BackendError: it does not compile or load there.
    """
    key = (stem, name, device, dtype)
    if key not in _functions:
        from cupy.cuda import Device, Module

        try:
            _driver()
            with Device(device) as here:
                if (stem, device, dtype) not in _modules:
                    module = Module()
                    module.load(cubin(stem, f"sm_{here.compute_capability}", dtype))
                    _modules[stem, device, dtype] = module
                _functions[key] = _modules[stem, device, dtype].get_function(name)
        except Exception as error:  # of NVRTC and the driver: all of them end here, named
            mend = environment.driver_mend(str(error)) or "`python -m cafin_cupy doctor` tells what is missing"
            got = f"{type(error).__name__}: {error}"
            raise BackendError(
                f"function: kernel `{name}` must compile for cuda:{device}, got {got}; {mend}"
            ) from error
    return _functions[key]


def prepare(device: int, dtype: str = "float32", mixed: bool = False) -> None:
    """Compile the kernels that every model needs for a device, so that a failure shows before anything has changed. The
    compiler runs without Python's lock, so the sources are compiled side by side.

    Args:
        mixed: `update_mixed` as well.

    Raises:
        BackendError: one does not compile or load there, or this process must not use CUDA.
    """
    forks.refuse_child("prepare")
    stems = [stem for stem in KERNELS if mixed or stem not in ON_DEMAND]
    wanted = [(stem, name) for stem in stems for name in KERNELS[stem]]
    if all((stem, name, device, dtype) in _functions for stem, name in wanted):
        return
    forks.watch()
    with ThreadPoolExecutor(len(stems)) as threads:
        for done in [threads.submit(function, stem, KERNELS[stem][0], device, dtype) for stem in stems]:
            done.result()
    for stem, name in wanted:
        function(stem, name, device, dtype)
    kernel_cache.warn()


@cache
def _cuda_works() -> bool:
    forks.watch()
    cupy = kernel_cache.import_cupy()
    cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.nvrtc.getVersion()
    return True


def cuda_problem() -> str | None:
    """Why the CUDA backend cannot run here, with the mend; None if it can."""
    try:
        _cuda_works()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); install the extra cafin-cupy[cuda12] or cafin-cupy[cuda13]"
    except Exception as error:  # CuPy raises its own kinds for a missing driver, device or NVRTC
        text = (str(error).strip().splitlines() or [""])[0]
        if "nvrtc" in str(error).lower():
            return _nvrtc_problem(error)
        mend = environment.driver_mend(text)
        if mend is not None:
            return f"the driver is older than CuPy's CUDA ({text}); {mend}"
        return f"no usable NVIDIA GPU ({text}); check the driver with nvidia-smi"
    return None


def _nvrtc_problem(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"NVRTC cannot be loaded ({text}); install nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc"


class Arguments:
    """The one struct that a kernel takes, filled in place through `values`. CUDA copies it during each launch."""

    def __init__(self, struct: np.dtype[np.void]) -> None:
        self.values = np.zeros((), dtype=struct)
        self._pointers = (ctypes.c_void_p * 1)(self.values.ctypes.data)
        self.address = ctypes.addressof(self._pointers)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of which one kind is used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = _Attribute(6, 0, 1)


@cache
def _driver() -> Any:
    """The CUDA driver's library. CuPy has no call that passes launch attributes."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernelEx  # noqa: B018  # an old driver lacks it
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


@cache
def _overlaps(device: int) -> bool:
    """True if a kernel on `device` may be launched while the one before it ends: programmatic dependent launch, which
    needs compute capability 9.0, and a driver that captures it in graphs (CUDA 12.3)."""
    from cupy.cuda import Device, runtime

    return int(Device(device).compute_capability) >= 90 and runtime.driverGetVersion() >= 12030


class Launch:
    """A kernel on a device, launched without any conversion of arguments."""

    def __init__(self, stem: str, name: str, device: int, block: int) -> None:
        from cupy.cuda import runtime

        self._name = name
        self._device = device
        self._function = function(stem, name, device)
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice
        self._config = _Config(1, 1, 1, block, 1, 1)
        if _overlaps(device):
            self._config.attributes, self._config.count = ctypes.pointer(_PROGRAMMATIC_STREAM_SERIALIZATION), 1
        self._at = ctypes.addressof(self._config)
        self._ptr = self._function.ptr
        # A signal that comes during the call raises KeyboardInterrupt as soon as Python goes on, before it can assign a
        # result. So ctypes itself puts the driver's answer into a list, which tells whether the launch was taken.
        self._answers: list[int] = []
        self._launch = _driver()["cuLaunchKernelEx"]
        self._launch.argtypes, self._launch.restype = [ctypes.c_void_p] * 4, self._answers.append

    def __call__(self, arguments: Arguments, grid: int, stream: int, then: Callable[[], object] | None = None) -> None:
        """Launch `grid` blocks on `stream`; nothing for 0 blocks. The caller's current device stays current.

        Args:
            then: keeps the books of the launch: is called if the driver has taken it (or there are no blocks), and only
                then, also where Ctrl-C interrupts in between; then perhaps twice, the first time in part.

        Raises:
            BackendError: the driver refuses.
        """
        answers = self._answers
        answers.clear()
        try:
            if grid > 0:
                config = self._config
                config.grid_x, config.stream = grid, stream
                if (current := self._get_device()) == self._device:
                    self._launch(self._at, self._ptr, arguments.address, None)
                else:
                    self._launch_from(current, arguments.address)
            else:
                answers.append(0)
            if answers[0]:
                raise self._refused(answers[0])
            if then is not None:
                then()
        except BaseException:
            if then is not None and answers == [0]:
                then()
            raise

    def _launch_from(self, current: int, arguments: int) -> None:
        """Launch while another device is current."""
        try:
            self._set_device(self._device)
            self._launch(self._at, self._ptr, arguments, None)
        finally:
            self._set_device(current)

    def _refused(self, error: int) -> BackendError:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        return BackendError(f"launch: the driver must take kernel `{self._name}`, got error {error}: {reason}")
