"""What each kernel takes of a multiprocessor, read from its machine code (a "cubin").

A cubin is an ELF file. NVIDIA does not document the sections that are its own; what is read here has been the same in
all versions so far, and is compared with what ptxas itself reports (`-Xptxas -v`): by tests/test_resources.py on every
architecture, and once by hand with nvcc 13.0, all kernels for sm_75, sm_80, sm_86, sm_90, sm_100 and sm_120.

    .symtab           symbols; kernels have a bit of their own in `st_other`
    .nv.info          attributes, each of a symbol: registers, stack
    .nv.info.<name>   attributes of one kernel: the threads of its __launch_bounds__
    .nv.shared.<name> as long as its static shared memory
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NOBITS = 8  # sh_type of a section without content
ENTRY = 0x10  # the bit in st_other: a kernel, no device function

# Attributes: a format, the attribute, 16 bits; those of format SIZED have so many bytes of content behind them.
SIZED = 4
MAX_THREADS, MIN_STACK_SIZE, REGCOUNT = 0x05, 0x12, 0x2F

# From sm_90 on the section of a kernel's shared memory begins with what the driver reserves, and a section of this
# name tells so. ptxas does not count it as the kernel's, and neither does this.
RESERVED = ".nv.shared.reserved.0"
RESERVED_BYTES = 1024


class Resources(NamedTuple):
    registers: int  # of a thread
    shared: int  # bytes of static shared memory, of a block
    threads: int  # of a block at most, as __launch_bounds__ says; 0 if it says nothing
    local: int  # bytes of a thread's stack, callees' included: spilled registers, and arrays that have no registers


class _Section(NamedTuple):
    content: bytes
    size: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """The resources of each kernel in `cubin`, by its name.

    Raises:
        ValueError: not an ELF file.
        KeyError: a section or an attribute is missing.
    """
    sections = dict(_sections(cubin))
    symbols = list(_symbols(sections))
    found: dict[int, dict[int, int]] = {REGCOUNT: {}, MIN_STACK_SIZE: {}}
    for attribute, content in _attributes(sections[".nv.info"].content):
        if attribute in found:
            symbol, value = struct.unpack("<II", content)
            found[attribute][symbol] = value
    return {
        name: Resources(
            registers=found[REGCOUNT][index],
            shared=_shared(sections, name),
            threads=_threads(sections, name),
            local=found[MIN_STACK_SIZE][index],
        )
        for index, (name, other) in enumerate(symbols)
        if other & ENTRY
    }


def _shared(sections: dict[str, _Section], name: str) -> int:
    section = sections.get(f".nv.shared.{name}")
    if section is None:
        return 0
    return section.size - (RESERVED_BYTES if RESERVED in sections else 0)


def _threads(sections: dict[str, _Section], name: str) -> int:
    for attribute, content in _attributes(sections[f".nv.info.{name}"].content):
        if attribute == MAX_THREADS:
            x, y, z = struct.unpack("<III", content)
            return x * y * z
    return 0


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes that have content."""
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == SIZED:
            yield attribute, content[at : at + size]
            at += size


def _symbols(sections: dict[str, _Section]) -> Iterator[tuple[str, int]]:
    """(name, st_other) of each symbol."""
    names = sections[".strtab"].content
    for name, _, other, *_ in struct.iter_unpack("<IBBHQQ", sections[".symtab"].content):
        yield _text(names, name), other


def _sections(cubin: bytes) -> Iterator[tuple[str, _Section]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin must be a 64-bit ELF file, got one that begins with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    length, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + k * length) for k in range(count)]
    names = cubin[headers[of_names][4] :]
    for name, kind, _, _, at, size, *_ in headers:
        yield _text(names, name), _Section(b"" if kind == NOBITS else cubin[at : at + size], size)


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()
