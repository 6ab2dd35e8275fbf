"""The table of what the kernels take of a multiprocessor, by every NVRTC on every architecture: kernels/RESOURCES.md.

`make resources`, or `python tests/resources.py`, writes it; tests/test_resources.py compares it with what the compilers
give. Kernels are compiled as the library does it when it runs: its sources, its options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from cubin import Resources, resources
from nvrtc import WHEELS, Nvrtc, find

from cafin_cupy import runtime

PATH = Path(__file__).resolve().parent.parent / "kernels" / "RESOURCES.md"
STEMS = (*runtime.KERNELS, *runtime.IN_XLA)
OLDEST, NEWEST = 60, 120  # architectures, as numbers

HEAD = """# Registers and shared memory of the kernels

Written by `make resources`; every run of the tests compares it with what the compilers give. A cell holds the registers
of a thread / the bytes of static shared memory of a block. *Elements*: of the parameters; activations and output
gradients of 16 bits are read by the same functions. *Threads*: of a block. Nothing is in local memory: no kernel spills
a register on any architecture. The kernels for JAX, named `..._xla`, are written anew for each model: these are of one
whose parameters are of four types, with and without factors, of a convolution, and of the factors of three layers.
"""


class Key(NamedTuple):
    """What a cell is of."""

    version: str  # of NVRTC
    dtype: str
    kernel: str
    arch: str


Cells = dict[Key, Resources]


def architectures(nvrtc: Nvrtc) -> list[str]:
    """Those of the table."""
    return [arch for arch in nvrtc.architectures if OLDEST <= int(arch.removeprefix("sm_")) <= NEWEST]


def kernels(stem: str) -> tuple[str, ...]:
    """Those of the table in one source."""
    return runtime.KERNELS.get(stem, (stem,))


@cache
def source(stem: str) -> str:
    """What is compiled. Of the kernels for JAX, which must be installed for them, an example."""
    if stem not in runtime.IN_XLA:
        return runtime.source(stem)
    from xla_helpers import examples

    return next(kernel.source for kernel in examples() if kernel.name == stem)


def measure(nvrtc: Nvrtc, dtype: str, stem: str, arch: str) -> Cells:
    """The cells of one source, compiled for one architecture."""
    code, _ = nvrtc.compile(source(stem), f"{stem}.cu", runtime.cubin_options(arch, dtype))
    found = resources(code)
    if stem in runtime.IN_XLA:  # which include the others
        found = {kernel: found[kernel] for kernel in kernels(stem)}
    return {Key(nvrtc.version, dtype, kernel, arch): taken for kernel, taken in found.items()}


def in_local_memory(cells: Cells) -> list[str]:
    """A sentence for each kernel that spills registers, or has an array that needs an address."""
    return [
        f"NVRTC {key.version} puts {taken.local} bytes a thread of `{key.kernel}` in local memory on {key.arch}"
        for key, taken in cells.items()
        if taken.local
    ]


def render(cells: Cells) -> str:
    """The table as text."""
    parts = [HEAD]
    for version, of_version in groupby(cells, key=lambda key: key.version):
        keys = list(of_version)
        archs = list(dict.fromkeys(key.arch for key in keys))
        parts.append(f"## NVRTC {version}\n")
        parts.append(
            f"The architectures from sm_{OLDEST} to sm_{NEWEST} that it compiles for; its oldest is {archs[0]}.\n"
        )
        parts.append(_line(["kernel", "elements", "threads", *archs]))
        parts.append(_line(["---", "---", *["---:"] * (1 + len(archs))]))
        for dtype, kernel in dict.fromkeys((key.dtype, key.kernel) for key in keys):
            row = [cells[Key(version, dtype, kernel, arch)] for arch in archs]
            taken = [f"{cell.registers} / {cell.shared}" for cell in row]
            parts.append(_line([kernel, dtype, str(row[0].threads), *taken]))
        parts.append("")
    return "\n".join(parts)


def read(text: str) -> Cells:
    """The cells of a table that `render` has written."""
    cells: Cells = {}
    version, archs = "", []
    for line in text.splitlines():
        words = [word.strip() for word in line.strip("|").split("|")]
        if line.startswith("## NVRTC "):
            version = line.removeprefix("## NVRTC ")
        elif words[0] == "kernel":
            archs = words[3:]
        elif line.startswith("| ") and words[0] != "---":
            kernel, dtype, threads, *row = words
            for arch, cell in zip(archs, row):
                registers, shared = map(int, cell.split(" / "))
                cells[Key(version, dtype, kernel, arch)] = Resources(registers, shared, int(threads), local=0)
    return cells


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def main() -> int:
    compilers = {wheel: find(major) for major, wheel in WHEELS.items()}
    missing = [wheel for wheel, nvrtc in compilers.items() if nvrtc is None]
    if missing:
        print(f"resources: needs {' and '.join(missing)}; `make resources` installs them", file=sys.stderr)
        return 1
    jobs = [
        (nvrtc, dtype, stem, arch)
        for nvrtc in compilers.values()
        if nvrtc is not None
        for dtype in runtime.DTYPES
        for stem in STEMS
        for arch in architectures(nvrtc)
    ]
    with ThreadPoolExecutor() as threads:  # the compiler runs without Python's lock
        cells = {key: taken for part in threads.map(lambda job: measure(*job), jobs) for key, taken in part.items()}
    spilled = in_local_memory(cells)
    if spilled:
        print("\n".join(spilled), f"\n{PATH} is left as it was", file=sys.stderr)
        return 1
    PATH.write_text(render(cells), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
