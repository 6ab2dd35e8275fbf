"""Compiled kernels on disk, in the folder of CuPy's own: CUPY_CACHE_DIR, or else ~/.cupy/kernel_cache.

The folder may be read-only, full, or shared by processes that start at once. That may cost time, never a run: what
cannot be kept is compiled anew, and one warning says why. An entry is a digest and the code behind it; what does not
agree with its digest counts as missing and is replaced. It is written under a name of its own and renamed, so nobody
reads half of one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

MEND = "make room there, or set CUPY_CACHE_DIR to a folder that can be written"
PROBE = 1 << 17  # bytes: the largest kernel has fewer
_DIGEST = hashlib.sha256().digest_size

_left: str | None = None  # why nothing is kept any more
_warned = False


def folder() -> str:
    return os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))


def _path() -> Path:
    if not folder():
        raise FileNotFoundError(errno.ENOENT, "CUPY_CACHE_DIR is empty")
    return Path(folder())


def in_memory() -> bool:
    """True if nothing shall be kept on disk, by CuPy's own switch."""
    return os.environ.get("CUPY_CACHE_IN_MEMORY", "").strip() == "1"


def problem() -> str | None:
    """Why nothing is or can be kept in the folder; None if it can be written. Makes nothing that stays."""
    if _left is not None:
        return _left
    try:
        path = _path()
        there = next(place for place in (path, *path.absolute().parents) if _is_there(place))
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(PROBE))
    except OSError as error:
        return _reason(error)
    return None


def _is_there(path: Path) -> bool:
    """False if it could be made; a link to nowhere could not."""
    if os.path.lexists(path):
        return True
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True  # another error, of too long a name say, is raised


def _reason(error: OSError) -> str:
    return f"{folder() or 'the cache'} cannot be written: {error.strerror or error}"


def leave(reason: str) -> None:
    """Keep nothing on disk in this process any more: neither these kernels nor CuPy's."""
    global _left
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    _left = _left or reason


def warn() -> None:
    """Say once why nothing is kept, if so."""
    global _warned
    if _left is not None and not _warned:
        _warned = True
        warnings.warn(f"cafin_cupy: kernels are compiled anew in each process, as {_left}; {MEND}", stacklevel=2)


def load(key: str) -> bytes | None:
    """The code that was saved under this name; None if there is none that is whole and can be read."""
    if in_memory():
        return None
    try:
        entry = (_path() / key).read_bytes()
    except OSError:  # none there, or another user's
        return None
    code = entry[_DIGEST:]
    return code if hashlib.sha256(code).digest() == entry[:_DIGEST] else None


def save(key: str, code: bytes) -> None:
    """Keep the code under this name, for all processes; if that fails, nothing is kept from now on."""
    if in_memory():
        return
    try:
        _path().mkdir(parents=True, exist_ok=True)
        passing = _path() / f"{key}.{secrets.token_hex(8)}"  # processes of several machines may share the folder
        try:
            with open(passing, "xb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            passing.replace(_path() / key)
        except BaseException:
            passing.unlink(missing_ok=True)
            raise
    except OSError as error:
        leave(_reason(error))


def import_cupy() -> Any:
    """`import cupy`, also where its cache is no use.

    CuPy makes the folder when it is imported. Where it cannot, the import fails, and every later one in this process
    too. So the folder is tried first; if it is no use, CuPy is told to keep nothing, and gets another folder to find.

    Raises:
        ImportError: CuPy is missing or broken, in whatever way.
    """
    if "cupy" not in sys.modules and (reason := problem()) is not None:
        if not in_memory():
            leave(reason)
        given = os.environ.get("CUPY_CACHE_DIR")
        os.environ["CUPY_CACHE_DIR"] = os.sep  # it is there
        try:
            return _cupy()
        finally:
            if given is None:
                del os.environ["CUPY_CACHE_DIR"]
            else:
                os.environ["CUPY_CACHE_DIR"] = given
    return _cupy()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise
    except Exception as error:  # of whatever its start does
        raise ImportError(f"{type(error).__name__}: {error}") from error
    if not hasattr(cupy, "cuda"):
        raise ImportError("only a part of it is there")
    return cupy
