"""Compiling and launching: NVRTC without a GPU, and what a missing part is called."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from cafin_cupy import BackendError, runtime

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
        resumed = next(line for line in lines if line.endswith(f'"kernels/{stem}.cu"') and line != lines[0])
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
                runtime.prepare(0)
        else:
            runtime.prepare(0)
            runtime.prepare(0)  # knows all of them
    assert {name for _, name, _, _ in runtime._functions} == {n for names in runtime.KERNELS.values() for n in names}


@pytest.mark.gpu
def test_a_kernel_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_functions", {})
    monkeypatch.setattr(runtime, "_modules", {})
    monkeypatch.setattr(runtime, "source", lambda stem: "nonsense")
    with pytest.raises(BackendError, match=r"(?s)kernel `update` must compile for cuda:0.*doctor"):
        runtime.function("update", "update", 0)
