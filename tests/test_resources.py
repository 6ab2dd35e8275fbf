"""Every kernel by NVRTC 12 and 13 for every GPU from sm_60 to sm_120: it compiles, spills nothing, and takes what
kernels/RESOURCES.md says."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import cubin
import pytest
import resources
from nvrtc import WHEELS, Nvrtc, find

from cafin_cupy import runtime

LISTED = resources.read(resources.PATH.read_text(encoding="utf-8"))
VERSIONS = sorted({key.version for key in LISTED})
DTYPES = sorted(runtime.DTYPES)


def compilers(parts: Sequence[tuple[str, ...]], only: Container[str] | None = None) -> list[Any]:
    """(compiler, architecture, *part) for each of `parts`; one case that is skipped for a version that is missing."""
    cases: list[Any] = []
    for major, wheel in WHEELS.items():
        nvrtc = find(major)
        if nvrtc is None:
            skip = pytest.mark.skip(reason=f"needs NVRTC {major}: pip install {wheel}")
            cases.append(pytest.param(None, "", *[""] * len(parts[0]), marks=skip, id=f"{major}"))
            continue
        for arch in resources.architectures(nvrtc):
            if only is None or arch in only:
                cases += [pytest.param(nvrtc, arch, *part, id="-".join([str(major), arch, *part])) for part in parts]
    return cases


@pytest.mark.parametrize(
    ("nvrtc", "arch", "stem", "dtype"),
    compilers([(stem, dtype) for stem in sorted(resources.STEMS) for dtype in DTYPES]),
)
def test_kernels_take_what_the_table_says(nvrtc: Nvrtc, arch: str, stem: str, dtype: str) -> None:
    if stem in runtime.IN_XLA:
        pytest.importorskip("jax")
    cells = resources.measure(nvrtc, dtype, stem, arch)
    assert {key.kernel for key in cells} == set(resources.kernels(stem))
    assert resources.in_local_memory(cells) == []
    if nvrtc.version not in VERSIONS:
        pytest.skip(f"the table is of NVRTC {' and '.join(VERSIONS)}, this is {nvrtc.version}: registers not compared")
    listed = {key: LISTED.get(key) for key in cells}
    assert cells == listed, "kernels/RESOURCES.md (right) is out of date; if this change is meant: make resources"


def test_the_table_is_of_the_versions_that_make_installs() -> None:
    """A pin that is raised without the table would leave the registers uncompared."""
    lines = (Path(__file__).resolve().parent.parent / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert [pins[wheel] for wheel in WHEELS.values()] == VERSIONS


def test_the_table_holds_each_kernel_once_and_nothing_else() -> None:
    """So it is what `make resources` writes, and no row of a former kernel is left."""
    kernels = {(dtype, kernel) for dtype in DTYPES for stem in resources.STEMS for kernel in resources.kernels(stem)}
    for version in VERSIONS:
        assert {(key.dtype, key.kernel) for key in LISTED if key.version == version} == kernels
    for nvrtc in filter(None, map(find, WHEELS)):
        if nvrtc.version in VERSIONS:
            listed = {key.arch for key in LISTED if key.version == nvrtc.version}
            assert listed == set(resources.architectures(nvrtc))
    assert resources.render(LISTED) == resources.PATH.read_text(encoding="utf-8")


# ---- The reader of machine code, against what ptxas reports ----

KERNELS_OF_ALL_KINDS = """
extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {  // 64 registers a thread at most
    float kept[96];
#pragma unroll
    for (int k = 0; k < 96; ++k) kept[k] = x[1024 * k + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 96; ++k) y[1024 * k + threadIdx.x] = kept[k] * kept[(k + 1) % 96];
}
extern "C" __global__ void indexes(const int* x, int* y) {  // registers have no addresses
    int kept[50];
    for (int k = 0; k < 50; ++k) kept[k] = x[k];
    for (int k = 0; k < 50; ++k) kept[x[k] % 50] += k;
    for (int k = 0; k < 50; ++k) y[k] = kept[k];
}
__device__ __noinline__ int callee(const int* x, int n) {
    int kept[20];
    for (int k = 0; k < 20; ++k) kept[k] = x[k];
    for (int k = 0; k < n; ++k) kept[x[k] % 20] += k;
    return kept[n];
}
extern "C" __global__ void __launch_bounds__(96) calls(const int* x, int* y) { *y = callee(x, *x) + callee(x + 1, 3); }
extern "C" __global__ void __launch_bounds__(256) shares(const int* x, int* y) {
    __shared__ int all[1000];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = all[999 - threadIdx.x];
}
"""


FLAVOURS = ("sm_60", "sm_75", "sm_90", "sm_120")  # from here on, cubins have other sections


def reported(log: str) -> dict[str, tuple[int, int, int]]:
    """(registers, bytes of shared memory, bytes of local memory) of each kernel, as ptxas says under `-v`."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        kernel = part.partition("'")[0]
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        stack = re.search(r"(\d+) bytes cumulative stack size", part)
        assert registers is not None, part
        found[kernel] = (int(registers[1]), int(shared[1]) if shared else 0, int(stack[1]) if stack else 0)
    return found


@pytest.mark.parametrize(("nvrtc", "arch"), compilers([()], only=FLAVOURS))
def test_resources_are_those_that_ptxas_reports(nvrtc: Nvrtc, arch: str) -> None:
    options = (*runtime.cubin_options(arch), "--ptxas-options=-v")
    code, log = nvrtc.compile(KERNELS_OF_ALL_KINDS, "kinds.cu", options)
    found = cubin.resources(code)
    assert {name: (taken.registers, taken.shared, taken.local) for name, taken in found.items()} == reported(log)
    assert {name: taken.threads for name, taken in found.items()} == {
        "spills": 1024,
        "indexes": 0,
        "calls": 96,
        "shares": 256,
    }
    assert found["shares"].shared == 4000 and found["indexes"].shared == 0
    assert found["shares"].local == 0
    assert found["indexes"].local >= 200 and found["calls"].local >= 80  # the arrays
    assert found["spills"].registers <= 64 and found["spills"].local > 0

    cells = {resources.Key(nvrtc.version, "float32", name, arch): taken for name, taken in found.items()}
    complaints = resources.in_local_memory(cells)
    assert len(complaints) == 3
    assert any(f"{found['spills'].local} bytes a thread of `spills`" in line and arch in line for line in complaints)


def test_only_cubins_are_read() -> None:
    with pytest.raises(ValueError, match="64-bit ELF"):
        cubin.resources(b"//\n// Generated by NVIDIA NVVM Compiler\n")


@pytest.mark.parametrize("major", WHEELS)
def test_errors_of_the_compiler_are_its_log(major: int) -> None:
    nvrtc = find(major)
    if nvrtc is None:
        pytest.skip(f"needs NVRTC {major}: pip install {WHEELS[major]}")
    with pytest.raises(RuntimeError, match=r"(?s)wrong\.cu with .*-arch=sm_90.*wrong\.cu\(2\).*nonsense"):
        nvrtc.compile("\nnonsense;", "wrong.cu", runtime.cubin_options("sm_90"))
