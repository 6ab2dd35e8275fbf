"""CUDA C to functions of this process, by a C++ compiler.

The environment decides: CXX names the compiler; EMULATION_SANITIZE=1 adds AddressSanitizer and
UndefinedBehaviorSanitizer, in a process that was started with `sanitized_environment()`; EMULATION_ORDER is the seed of
a random order of blocks, and of threads within them, 0 for none; EMULATION_FOLDER is a folder where processes share
what they compile, in half a second a source. Without it each compiles for itself, into a temporary folder.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-w", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-strict-aliasing"),
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")

_KERNEL = re.compile(r"__global__[^;{(]*(?:__launch_bounds__\([^)]*\))?\s*\b(\w+)\s*\(")
_STRUCT = re.compile(r"(__global__[^;{(]*(?:__launch_bounds__\([^)]*\))?\s*\b\w+\s*\(const \w+) (\w+\))")
_SHARED = re.compile(r"__shared__ ([^;]+);")

_numbers = itertools.count()
launches: Counter[str] = Counter()  # of each kernel, in this process


@cache
def compiler() -> str | None:
    """A C++ compiler: that of CXX, a name without options, or one that is there; or None."""
    given = os.environ.get("CXX")
    return next((name for name in ([given] if given else ["g++", "c++", "clang++"]) if shutil.which(name)), None)


@cache
def _folder() -> Path:
    """Where the libraries lie."""
    if shared := os.environ.get("EMULATION_FOLDER"):
        return Path(shared)
    made = tempfile.mkdtemp(prefix="emulation-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _made(name: str, program: str, *flags: str) -> tuple[Path, str]:
    """(file of this name, log) of a C++ program, or of a header named in `flags`; no file where it does not compile."""
    command = [compiler() or "g++", *FLAGS, *flags]
    if "EMULATION_FOLDER" not in os.environ:
        return _run(command, program, _folder() / str(next(_numbers)) / name)
    made = _folder() / hashlib.sha256(repr((command, program)).encode()).hexdigest()[:40] / name
    with made.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who wants the same waits, instead of compiling it too
        return (made, "") if made.exists() else _run(command, program, made)


def _run(command: list[str], program: str, made: Path) -> tuple[Path, str]:
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # the compiler is not sanitized
    made.parent.mkdir(exist_ok=True)
    part = made.with_suffix(".part")
    command = [*command, "-o", str(part)]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False, env=env)
    if part.exists():
        part.replace(made)
    return made, done.stderr


def _compile(program: str, *flags: str) -> tuple[Path, str]:
    """(library, log) of a C++ program; no library where it does not compile."""
    if "EMULATION_FOLDER" in os.environ:  # cuda.h is compiled once: its standard headers take as long as a kernel
        header, log = _made("cuda.h.gch", "", *flags, "-x", "c++-header", str(HERE / "cuda.h"))
        if not header.exists():
            return header, log
        flags = *flags, f"-I{header.parent}"
    return _made("library.so", program, *flags, f"-I{HERE}", "-shared", "-x", "c++", "-")


@cache
def sanitized_environment() -> dict[str, str] | None:
    """What a Python process needs in its environment to load sanitized libraries; None where there is no way."""
    # `new` makes the library need libstdc++, which the sanitizer must find loaded.
    library, _ = _compile("int* probe() { return new int; }", *SANITIZERS)
    if not library.exists() or not shutil.which("ldd"):
        return None
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
    found = [re.search(rf"{name}\.so\S* => (\S+)", needed) for name in ("libasan", r"libstdc\+\+")]
    if not all(found):
        return None
    return {
        "EMULATION_SANITIZE": "1",
        "LD_PRELOAD": ":".join(match[1] for match in found if match),
        "ASAN_OPTIONS": "detect_leaks=0,detect_stack_use_after_return=0",  # Python leaks; fibers have their own stacks
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _poisoned(shared: re.Match[str]) -> str:
    """The declaration of shared variables, and POISON for each of them."""
    declaration = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", shared[1])
    while "<" in declaration:
        declaration = re.sub(r"<[^<>]*>", "", declaration)
    names = [part.split()[-1] for part in declaration.split(",")]
    return shared[0] + "".join(f" POISON({name});" for name in names)


def translate(source: str) -> str:
    """C++ of a CUDA source."""
    names = _KERNEL.findall(source)
    names = [name for name in names if name.endswith("_xla")] or names  # XLA launches no other of its sources
    kernels = "".join(f"EMULATE({name})\n" for name in names)
    # As on a GPU, all threads read the same arguments; a copy of 4 KiB for each of them takes longer than most kernels.
    source = _STRUCT.sub(r"\1& \2", source)
    # In a namespace without a name, templates' shared variables are the library's own: else no sanitizer guards them.
    return f'#include "cuda.h"\nnamespace {{\n{_SHARED.sub(_poisoned, source)}\n}}\n{kernels}'


class CompileError(RuntimeError):
    """The compiler's log."""


def build(source: str, options: tuple[str, ...] = ()) -> ctypes.PyDLL:
    """The library of a CUDA source, with `emulate_<name>` for each kernel; of `options`, the macros count.

    Raises:
        CompileError: it does not compile.
    """
    if compiler() is None:
        raise CompileError("build: a C++ compiler must be on the PATH, got none; install g++ or set CXX")
    flags = [option for option in options if option.startswith("-D")]
    program = translate(source)
    if os.environ.get("EMULATION_SANITIZE") == "1":
        flags += SANITIZERS
        if "_xla)" in program:  # one of many sources, each launched once or twice: to optimise it takes much longer
            flags.append("-O0")
    library, log = _compile(program, *flags)
    if not library.exists():
        raise CompileError(f"build: the source must compile, got\n{log}")
    return ctypes.PyDLL(str(library))  # keeps Python's lock: one launch at a time


class Kernel:
    """A compiled kernel; `ptr` stands for CUDA's handle of it."""

    known: dict[int, Kernel] = {}  # noqa: RUF012

    def __init__(self, library: ctypes.PyDLL, name: str) -> None:
        self.name = name
        self._run = library[f"emulate_{name}"]
        self._run.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint]
        self._run.restype = ctypes.c_char_p
        self._seed = int(os.environ.get("EMULATION_ORDER", "0"))
        self.ptr = ctypes.cast(self._run, ctypes.c_void_p).value or 0
        self.known[self.ptr] = self

    def __call__(self, grid: int, block: int, arguments: int) -> None:
        """Run `grid` blocks of `block` threads to their end.

        Args:
            arguments: address of an array with the address of each argument, as the driver takes it.

        Raises:
            RuntimeError: threads wait in vain.
        """
        launches[self.name] += 1
        problem = self._run(grid, block, arguments, self._seed and self._seed + launches.total())
        if problem:
            raise RuntimeError(f"emulation: {self.name} of {grid} x {block} threads: {problem.decode()}")
