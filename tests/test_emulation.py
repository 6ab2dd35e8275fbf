"""The emulated GPU catches what it is there for: planted faults, each beside the same kernel without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is a program

from emulation import compiler, device

needs_compiler = pytest.mark.skipif(compiler.compiler() is None, reason="needs a C++ compiler: g++, or that of CXX")

Args = np.dtype([("x", "u8"), ("n", "i8")])
SOURCE = """#line 1 "kernels/planted.cu"
typedef long long i64;
struct Args {{ float* x; i64 n; }};
struct alignas(16) Pack {{ float at[4]; }};
template <typename F> inline F shared(int shift) {{
    __shared__ F s[64];
    F* volatile p = s;  // hides the size of s
    p[threadIdx.x + shift] = 1;
    return *p;
}}
extern "C" __global__ void __launch_bounds__(64, 1) planted(const Args args) {{
    const int t = threadIdx.x;
    float* x = args.x + 64 * blockIdx.x;
    {body}
}}
"""


def launch(body: str, grid: int = 1, options: tuple[str, ...] = (), size: int = 0) -> np.ndarray[Any, Any]:
    """What `grid` blocks of 64 threads make of an array x of 64 floats each, which starts as NaN."""
    kernel = compiler.Kernel(compiler.build(SOURCE.format(body=body), options), "planted")
    x = device.empty(size or 64 * grid, "f4")
    args = np.array((x.data.ptr, x.size), Args)
    kernel(grid, 64, addresses(args).ctypes.data)
    return x.get()


def addresses(*arguments: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where each lies, as the driver takes them."""
    return np.array([argument.ctypes.data for argument in arguments], "u8")


# ---- What it computes ----


@needs_compiler
@pytest.mark.parametrize("options", [(), ("-DPORTABLE",)], ids=["assembly", "portable"])
@pytest.mark.parametrize("seed", ["0", "7"])
def test_sound_kernels(seed: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATION_ORDER", seed)
    lanes = np.arange(64)
    reverse = "__shared__ float s[64]; s[t] = t; __syncthreads(); x[t] = s[63 - t] + 100 * blockIdx.x;"
    np.testing.assert_array_equal(
        launch(reverse, 3, options), np.concatenate([lanes[::-1] + 100 * b for b in range(3)])
    )
    butterfly = "double v = t; for (int o = 16; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o); x[t] = v;"
    np.testing.assert_array_equal(launch(butterfly, 1, options), np.repeat([496, 1520], 32))
    votes = "x[t] = __syncthreads_or(t == 50) + 2 * __syncthreads_or(t == 64);"
    np.testing.assert_array_equal(launch(votes, 1, options), 1)
    np.testing.assert_array_equal(
        launch("x[t] = min(i64(t), args.n - 60) + max(t, 2);"), np.minimum(lanes, 4) + np.maximum(lanes, 2)
    )


@needs_compiler
def test_arguments_of_several_types() -> None:
    """Each comes from its own address, and what is constant is there."""
    source = """
    __constant__ float tenths[] = {0.1f, 0.2f, 0.3f};
    extern "C" __global__ void __launch_bounds__(32)
        several(float* x, const double* y, int n, const Pair pair) {
        if (threadIdx.x < n) x[threadIdx.x] = y[threadIdx.x] + tenths[threadIdx.x] + 10 * pair.a + 100 * pair.b;
    }"""
    kernel = compiler.Kernel(compiler.build("struct Pair { char a; long long b; };" + source), "several")
    x, y = device.empty(4, "f4"), device.asarray(np.array([1.0, 2.0, 3.0]))
    pair = np.array((4, 5), np.dtype([("a", "i1"), ("b", "i8")], align=True))
    pointers = [np.array(array.data.ptr, "u8") for array in (x, y)]
    kernel(1, 32, addresses(*pointers, np.array(3, "i4"), pair).ctypes.data)
    np.testing.assert_allclose(x.get(), [541.1, 542.2, 543.3, np.nan], rtol=1e-6)


@needs_compiler
def test_every_half() -> None:
    got = launch("for (int k = t; k < args.n; k += 64) args.x[k] = half_to_float(k);", size=65536)
    want = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got.view("u4")[number], want.view("u4")[number])


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="denormals are kept on other machines")
def test_denormals_are_zero() -> None:
    assert (launch("volatile float tiny = 1e-39f; x[t] = tiny * 1e10f;") == 0).all()
    assert np.float32(1e-39) * np.float32(1e10) > 0  # and Python's are as before


# ---- What shows in results ----


@needs_compiler
def test_what_is_not_written_is_nan() -> None:
    assert np.isnan(launch("if (t != 5) x[t] = 1;")).nonzero()[0].tolist() == [5]
    assert np.isnan(device.empty_like(device.asarray(np.zeros((3, 2), "f4"))).get()).all()


@needs_compiler
def test_shared_memory_is_nan_in_every_block() -> None:
    assert np.isnan(
        launch("alignas(16) __shared__ float s[64], u[2]; x[t] = s[t] + u[0]; s[t] = u[0] = 0;", grid=3)
    ).all()


@needs_compiler
@pytest.mark.parametrize("barrier", ["__syncthreads();", ""], ids=["barrier", "no barrier"])
def test_a_missing_barrier_shows_in_random_order(barrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that threads in order do not miss."""
    body = f"__shared__ float s[64]; s[t] = t; {barrier} x[t] = t ? s[t - 1] : 0;"
    in_order = launch(body)
    monkeypatch.setenv("EMULATION_ORDER", "1")
    assert np.array_equal(in_order, launch(body)) is bool(barrier)


@needs_compiler
def test_blocks_run_in_order_or_in_a_random_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "static int next; if (t == 0) x[0] = next++;"
    assert launch(body, 50)[::64].tolist() == list(range(50))
    monkeypatch.setenv("EMULATION_ORDER", "1")
    found = launch(body, 50)[::64].tolist()
    assert sorted(found) == list(range(50)) and found not in (sorted(found), sorted(found, reverse=True))


# ---- What ends a launch ----

IN_VAIN = {
    "barrier that some threads skip": ("if (t < 40) return;\n __syncthreads();", "barrier in line 14 .* has ended"),
    "two different barriers": ("if (t < 32) __syncthreads(); else\n __syncthreads();", "barrier in line 13 .* barrier"),
    "barrier in a part of a warp": (
        "if (t > 3) __syncthreads(); else x[t] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "shuffle in line 13 .* barrier",
    ),
    "shuffle with a lane that has ended": (
        "if (t == 5) return; x[t] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "shuffle in line 13 .* thread 5 has ended",
    ),
    "shuffle of a part of a warp": ("x[t] = __shfl_xor_sync(0xffffu, 1.0f, 1);", "whole warps"),
}


@needs_compiler
@pytest.mark.parametrize("fault", IN_VAIN)
def test_threads_that_wait_in_vain(fault: str) -> None:
    body, words = IN_VAIN[fault]
    with pytest.raises(RuntimeError, match=f"planted of 2 x 64 threads: .*{words}"):
        launch(body, grid=2)


@needs_compiler
def test_what_does_not_compile_is_located() -> None:
    with pytest.raises(compiler.CompileError, match=r"kernels/planted.cu:13:.*nonsense"):
        launch("nonsense;")
    with pytest.raises(compiler.CompileError, match="4 KiB of arguments"):
        compiler.build('struct A { char x[5000]; };\nextern "C" __global__ void big(const A args) {}')
    many = ", ".join(f"float* x{k}" for k in range(4096))
    with pytest.raises(compiler.CompileError, match="32,764 bytes of arguments"):
        compiler.build(f'extern "C" __global__ void many({many}) {{}}')


# ---- What sanitizers see ----

SANITIZED = {
    "read past an array": ("float y = args.x[args.n]; x[t] = y;", "x[t] = args.x[args.n - 1];", "READ of size 4"),
    "read before an array": ("float y = args.x[-1]; x[t] = y;", "x[t] = args.x[0];", "READ of size 4"),
    "write past an array": ("x[t + 1] = 1;", "x[t] = 1;", "WRITE of size 4"),
    "write past shared memory": (
        "__shared__ float s[64]; s[t + 1] = 1; x[t] = s[t];",
        "__shared__ float s[64]; s[t] = 1; x[t] = s[t];",
        "index 64 out of bounds",
    ),
    "write past shared memory of a template": (
        "x[t] = shared<float>(1);",
        "x[t] = shared<float>(0);",
        "global-buffer-overflow",
    ),
    "unaligned access": (
        "if (t < 8) *reinterpret_cast<Pack*>(x + 4 * t + 1) = Pack{};",
        "if (t < 8) *reinterpret_cast<Pack*>(x + 4 * t) = Pack{};",
        "misaligned address",
    ),
    "read past the arguments": ("x[t] = (&args)[1].n;", "x[t] = args.n;", "READ of size 8"),
}


def sanitized(body: str, folder: Path, order: str) -> subprocess.CompletedProcess[str]:
    """A process that prints what `launch` makes of the body, under sanitizers."""
    environment = compiler.sanitized_environment()
    if environment is None:
        pytest.skip("this compiler brings no shared library of its sanitizers")
    # The folder is for what the process leaves behind.
    env = {**os.environ, **environment, "TMPDIR": str(folder), "EMULATION_ORDER": order}
    return subprocess.run([sys.executable, __file__, body], env=env, capture_output=True, text=True, check=False)


@needs_compiler
@pytest.mark.parametrize("fault", SANITIZED)
def test_sanitizers_end_the_process(fault: str, tmp_path: Path) -> None:
    wrong, right, words = SANITIZED[fault]
    for body, sound in ((right, True), (wrong, False)):
        ran = sanitized(body, tmp_path, order="1")
        assert (ran.returncode == 0) is sound, ran.stderr
        assert sound or words in ran.stderr, ran.stderr


@needs_compiler
@pytest.mark.parametrize("barrier", ["__syncthreads();", ""], ids=["barrier", "no barrier"])
def test_a_missing_barrier_shows_under_sanitizers(barrier: str, tmp_path: Path) -> None:
    body = f"__shared__ float s[64]; s[t] = t; {barrier} x[t] = t ? s[t - 1] : 0;"
    in_order, random = (sanitized(body, tmp_path, order) for order in "01")
    assert in_order.returncode == random.returncode == 0, in_order.stderr + random.stderr
    assert len(in_order.stdout.split()) == 64
    assert (in_order.stdout == random.stdout) is bool(barrier)


# ---- The run of the tests ----


def emulated(folder: Path, text: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest on the emulated GPU, with a test file of this text."""
    (folder / "test_planted.py").write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{text}")
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "emulation.plugin",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        *options,
    ]
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


STEP = """
def test_step():
    import cupy
    from cafin_cupy import fused_step
    x = cupy.zeros(3, cupy.float32)
    fused_step([x], [x + 1], [x + 2], lr=0.1)
"""
BROKEN = """
@pytest.fixture(autouse=True)
def broken(monkeypatch):
    from cafin_cupy import runtime
    monkeypatch.setattr(runtime, "source", lambda stem: "nonsense")
"""


@needs_compiler
@pytest.mark.parametrize(
    ("text", "all_kernels", "status", "words"),
    [
        (STEP, "", 0, "emulated launches: update 1"),
        (STEP, "1", 1, "not launched: average, average_xla, column_sums, column_sums_xla, fold, fold_xla, schedule"),
        ("def test_nothing():\n    pass\n", "", 1, "emulated launches: none"),
        ("", "", 5, "emulated launches: none"),
        (BROKEN + STEP, "", 1, "the reference backend runs on the GPU"),
    ],
    ids=["sound", "other kernels unused", "no kernel used", "no test", "reference instead"],
)
def test_a_run_without_kernels_fails(text: str, all_kernels: str, status: int, words: str, tmp_path: Path) -> None:
    ran = emulated(tmp_path, text, "-n", "1", EMULATION_ALL=all_kernels)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert words in ran.stdout, ran.stdout


# ---- The kernel that no test on CuPy arrays launches otherwise ----


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 31, 1023, 31_000])
def test_schedule(count: int) -> None:
    """It counts the steps of the parameters that have a gradient, and sets their scalars. 30,720 fit a launch."""
    import cupy

    from cafin_cupy import table
    from cafin_cupy.cuda_update import CudaSchedule, rate, scalars
    from cafin_cupy.rule import Hyper

    rng = np.random.default_rng(count)
    groups, present, start = rng.integers(0, 2, count), rng.random(count) < 0.6, rng.integers(0, 50, count)
    hypers = [Hyper(0.1, 0.9, 1e-3, 0.02, False), Hyper(0.03, 0.8, 0.5, 0.1, True)]
    steps = cupy.asarray(start)
    schedule = CudaSchedule(groups.tolist(), steps.data.ptr, steps, 0)
    schedule.refresh([rate(hyper, 2.0) for hyper in hypers[: max(groups) + 1]], 0)
    schedule(present.tolist(), 0)
    back = np.zeros(count, table.Hyper)
    runtime = cupy.cuda.runtime
    runtime.memcpy(back.ctypes.data, schedule.hypers, back.nbytes, runtime.memcpyDeviceToHost)
    np.testing.assert_array_equal(steps.get(), start + present)
    for k in np.flatnonzero(present)[:2000]:
        want = scalars(hypers[groups[k]], int(start[k]) + 1, 2.0)
        np.testing.assert_allclose(back[k].item(), want, rtol=2e-7)  # rounded once to float32


if __name__ == "__main__":
    print(*launch(sys.argv[1]))
