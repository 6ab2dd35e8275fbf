"""Compiling and launching: NVRTC without a GPU, and what a missing part is called."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from faults import ctrl_c  # noqa: F401

from cafin_cupy import BackendError, environment, runtime

STEMS = sorted(runtime.KERNELS)


class Compiles(Exception):
    """With which options CuPy compiles."""


def test_cupy_compiles_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled without CuPy is what it compiles for the library."""
    from cupy.cuda import compiler, nvrtc

    def compile_program(program: int, options: tuple[str, ...]) -> None:
        if "-arch=sm_90" in options:  # and no question about the compiler itself
            raise Compiles(*options)
        compile_program_(program, options)

    compile_program_ = nvrtc.compileProgram
    monkeypatch.setattr(nvrtc, "compileProgram", compile_program)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    name = "_get_arch_for_options_for_nvrtc"  # its answer is kept for each device, and here may be none
    monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)
    with pytest.raises(Compiles) as caught:  # what RawModule calls
        compiler._compile_module_with_cache(runtime.source("update"), runtime.options(), arch="90")
    assert sorted(caught.value.args) == sorted(runtime.cubin_options("sm_90"))


def test_includes_are_pasted_in_with_their_lines() -> None:
    for stem in STEMS:
        text = runtime.source(stem)
        assert '#include "' not in text
        lines = text.split("\n")
        assert lines[0] == f'#line 1 "kernels/{stem}.cu"'
        start, end = lines.index('#line 1 "kernels/common.cuh"'), lines.index("typedef ELEMENT T;")
        assert start < end
        resumed = [line for line in lines if line.endswith(f'"kernels/{stem}.cu"')][-1]
        rest = lines[lines.index(resumed) + 1 :]
        original = runtime._read(f"{stem}.cu").split("\n")
        assert rest == original[int(resumed.split()[1]) - 1 :]


@pytest.mark.parametrize("stem", STEMS)
def test_a_compile_error_names_file_and_line(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = runtime._read(f"{stem}.cu").count("\n")
    text = runtime.source(stem)
    monkeypatch.setattr(runtime, "source", lambda stem: text + "nonsense;\n")
    with pytest.raises(BackendError) as caught:
        runtime.compile_cubin(stem, "sm_90")
    assert f"kernels/{stem}.cu({lines + 1})" in str(caught.value)
    assert "nonsense" in str(caught.value)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(BackendError, match=r"sm_1\b"):
        runtime.compile_cubin("update", "sm_1")


def fails(error: Exception) -> Any:
    def raise_it() -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to load libnvrtc.so.13\nmore"), ["NVRTC", "libnvrtc.so.13", "nvidia-cuda-nvrtc"]),
        (RuntimeError("cudaErrorNoDevice: no CUDA-capable device"), ["GPU", "cudaErrorNoDevice", "nvidia-smi"]),
        (RuntimeError(""), ["GPU", "nvidia-smi"]),
    ],
)
def test_each_problem_names_its_mend(error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_cuda_works", fails(error))
    problem = runtime.cuda_problem()
    assert problem is not None
    assert all(word in problem for word in words), problem
    assert "\n" not in problem


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime._cuda_works.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)  # import then raises ImportError
    problem = runtime.cuda_problem()
    assert problem is not None
    assert "CuPy" in problem and "cafin-cupy[cuda12]" in problem and "cafin-cupy[cuda13]" in problem
    monkeypatch.undo()
    runtime._cuda_works.cache_clear()


@pytest.mark.gpu
def test_kernels_load_and_are_kept() -> None:
    runtime.prepare(0)
    for stem, names in runtime.KERNELS.items():
        for name in names:
            assert runtime.function(stem, name, 0) is runtime.function(stem, name, 0)
            assert runtime.function(stem, name, 0).ptr


def test_sources_are_compiled_side_by_side_and_failures_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, seen = threading.Barrier(len(runtime.KERNELS), timeout=30), set()

    def function(stem: str, name: str, device: int, dtype: str) -> str:
        if stem not in seen:
            seen.add(stem)
            meet.wait()  # all at once, or never
        if stem == "fold" and fails:
            raise BackendError("fold must compile")
        runtime._functions[stem, name, device, dtype] = name
        return name

    monkeypatch.setattr(runtime, "function", function)
    monkeypatch.setattr(runtime, "_functions", {})
    for fails in (True, False):
        seen.clear()
        if fails:
            with pytest.raises(BackendError, match="fold must compile"):
                runtime.prepare(0, mixed=True)
        else:
            runtime.prepare(0, mixed=True)
            runtime.prepare(0, mixed=True)  # knows all of them
            runtime.prepare(0)
    assert {name for _, name, _, _ in runtime._functions} == {n for names in runtime.KERNELS.values() for n in names}


def test_kernels_that_few_models_need_are_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(runtime, "function", lambda stem, *_: asked.append(stem))
    monkeypatch.setattr(runtime, "_functions", {})
    runtime.prepare(0)
    assert set(asked) == set(runtime.KERNELS) - runtime.ON_DEMAND
    runtime.prepare(0, mixed=True)
    assert set(asked) == set(runtime.KERNELS)


@pytest.mark.gpu
def test_a_kernel_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_functions", {})
    monkeypatch.setattr(runtime, "_modules", {})
    monkeypatch.setattr(runtime, "source", lambda stem: "nonsense")
    with pytest.raises(BackendError, match=r"(?s)kernel `update` must compile for cuda:0.*doctor"):
        runtime.function("update", "update", 0)


# Launching, with a function of the C library in place of the driver's


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `Launch` whose driver is the C library's `raise`: each launch sends this process SIGINT, in the middle of the
    call, and is taken."""
    pytest.importorskip("cupy")
    if sys.platform == "win32":
        pytest.skip("signals are another matter there")
    monkeypatch.setattr(runtime, "function", lambda *_: types.SimpleNamespace(ptr=0))
    monkeypatch.setattr(runtime, "_overlaps", lambda device: False)
    monkeypatch.setattr(runtime, "_driver", lambda: {"cuLaunchKernelEx": ctypes.CDLL(None)["raise"]})
    made: Any = runtime.Launch("update", "update", 0, 32)
    made._get_device, made._at = lambda: 0, signal.SIGINT.value
    return made


def arguments() -> runtime.Arguments:
    return runtime.Arguments(np.dtype("u8"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("ctrl_c")
def test_a_launch_that_ctrl_c_comes_into_is_known_to_be_taken(launch: Any) -> None:
    booked: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        launch(arguments(), 1, 0, lambda: booked.append(1))
    assert booked == [1]


def test_a_launch_that_is_refused_is_not_booked(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuGetErrorString(self, error: int, text: Any) -> None:
            text._obj.value = b"out of order"

    monkeypatch.setattr(runtime, "_driver", Driver)
    launch._launch = lambda *_: launch._answers.append(719)
    booked: list[int] = []
    for _ in range(2):
        with pytest.raises(BackendError, match="must take kernel `update`, got error 719: out of order"):
            launch(arguments(), 1, 0, lambda: booked.append(1))
    assert not booked


def test_no_blocks_are_booked_without_a_launch(launch: Any) -> None:
    booked: list[int] = []
    launch._launch = None
    launch(arguments(), 0, 0, lambda: booked.append(1))
    launch(arguments(), 0, 0)
    assert booked == [1]


def test_books_that_were_interrupted_are_done_again(launch: Any) -> None:
    booked: list[int] = []

    def book() -> None:
        booked.append(len(booked))
        if len(booked) == 1:
            raise KeyboardInterrupt

    launch._launch = lambda *_: launch._answers.append(0)
    with pytest.raises(KeyboardInterrupt):
        launch(arguments(), 1, 0, book)
    assert booked == [0, 1]


@pytest.mark.parametrize("earlier", [0, 719])
def test_what_comes_ahead_of_a_launch_books_nothing(earlier: int, launch: Any) -> None:
    """Whatever became of the launch before it."""
    booked: list[int] = []
    launch._answers.append(earlier)

    def interrupt() -> int:
        raise KeyboardInterrupt

    launch._get_device = interrupt
    with pytest.raises(KeyboardInterrupt):
        launch(arguments(), 1, 0, lambda: booked.append(1))
    assert not booked


@pytest.mark.parametrize("answer", [0, 719])
def test_the_current_device_stays_current(answer: int, launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [3]
    launch._get_device, launch._set_device = lambda: current[-1], current.append
    seen: list[int] = []
    launch._launch = lambda *_: (seen.append(current[-1]), launch._answers.append(answer))
    monkeypatch.setattr(launch, "_refused", lambda error: BackendError("refused"))
    try:
        launch(arguments(), 1, 0)
    except BackendError:
        assert answer
    assert seen == [0] and current == [3, 0, 3]


# A driver that is too old


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version", True),
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain.", True),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device", True),
        ("/usr/lib/libcuda.so.1: undefined symbol: cuLaunchKernelEx", True),
        ("cudaErrorNoDevice: no CUDA-capable device is detected", False),
        ("cudaErrorMemoryAllocation: out of memory", False),
    ],
)
def test_an_old_driver_is_told_by_what_cuda_says(text: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "driver", lambda: (12, 4))
    monkeypatch.setattr(runtime, "_cuda_works", fails(RuntimeError(text)))
    problem = runtime.cuda_problem()
    assert problem is not None and text in problem
    words = ["the driver serves CUDA 12.4", "cafin-cupy[cuda12]", "or a newer driver"]
    assert all((word in problem) == old for word in words), problem
    monkeypatch.setattr(environment, "driver", lambda: None)  # without any, CUDA says the same
    problem = runtime.cuda_problem()
    assert problem is not None and "no usable NVIDIA GPU" in problem and "newer" not in problem


def test_a_kernel_that_an_old_driver_does_not_load_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    def load(self: Any, code: bytes) -> None:
        raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with ...")

    monkeypatch.setattr(environment, "driver", lambda: (12, 4))
    monkeypatch.setattr(runtime, "_driver", lambda: None)
    monkeypatch.setattr(runtime, "cubin", lambda *_: b"")
    monkeypatch.setattr(runtime, "_functions", {})
    monkeypatch.setattr(runtime, "_modules", {})
    device = type("Device", (nullcontext,), {"compute_capability": "90", "__enter__": lambda self: self})
    monkeypatch.setattr(cupy.cuda, "Device", device)
    monkeypatch.setattr(cupy.cuda, "Module", type("Module", (), {"load": load}))
    with pytest.raises(BackendError, match=r"kernel `update`.*UNSUPPORTED_PTX.*the driver serves CUDA 12.4: install"):
        runtime.function("update", "update", 0)
