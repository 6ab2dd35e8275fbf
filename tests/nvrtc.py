"""NVRTC through ctypes, in every version that is installed as a wheel: side by side, without CuPy and without a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata

WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}  # of each major version of CUDA, on Linux


class Nvrtc:
    """One version of the compiler.

    Attributes:
        version: the wheel's, such as "12.9.86".
        architectures: what it makes machine code for, oldest first, such as "sm_90".
    """

    def __init__(self, major: int) -> None:
        wheel = metadata.distribution(WHEELS[major])
        self.version = wheel.version
        paths = {file.name: str(file.locate()) for file in wheel.files or ()}
        (builtins,) = (name for name in paths if re.fullmatch(r"libnvrtc-builtins\.so\.[\d.]+", name))
        ctypes.CDLL(paths[builtins])  # NVRTC opens it by its bare name, which finds what is loaded already
        self._library = ctypes.CDLL(paths[f"libnvrtc.so.{major}"])
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.architectures = self._architectures()

    def compile(self, source: str, file: str, options: Sequence[str]) -> tuple[bytes, str]:
        """(machine code, log) of CUDA C; `options` name one of the architectures.

        Raises:
            RuntimeError: it does not compile; the message is the compiler's log.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), file.encode(), 0, None, None)
        try:
            words = (ctypes.c_char_p * len(options))(*map(str.encode, options))
            failed = self._library.nvrtcCompileProgram(program, len(words), words)
            log = self._get("ProgramLog", program).rstrip(b"\0").decode()
            if failed:
                raise RuntimeError(f"{file} with {' '.join(options)}:\n{log}")
            return self._get("CUBIN", program), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _architectures(self) -> list[str]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return [f"sm_{number}" for number in sorted(numbers)]

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")


@cache
def find(major: int) -> Nvrtc | None:
    """The installed NVRTC of that major version; None if there is none. An installed one that does not load is an
    error: a test that skips what it cannot find would hide it."""
    try:
        return Nvrtc(major)
    except metadata.PackageNotFoundError:
        return None
