"""Which backend runs: the kernels, or the reference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection

from . import forks
from .errors import BackendError, refuse, shown
from .rounding import SIXTEEN
from .runtime import cuda_problem, prepare

VARIABLE = "CAFIN_BACKEND"
BACKENDS = ("cuda", "reference")
DTYPES = ("float32", *SIXTEEN)  # of parameters, that the kernels take

_warned: set[str] = set()
_failed: dict[int, str] = {}  # device: why the kernels cannot run there, as a choice that was left to us found


def _request(backend: str | None, where: str) -> tuple[str, str | None]:
    """(name of the argument or variable, the backend that it asks for)."""
    name, value = ("backend", backend) if backend is not None else (VARIABLE, os.environ.get(VARIABLE) or None)
    if value is None or (isinstance(value, str) and value == "auto"):
        return name, None
    if not isinstance(value, str) or value not in BACKENDS:
        refuse(where, name, 'be "cuda", "reference" or None', shown(value))
    return name, value


def requested(backend: str | None, where: str) -> str | None:
    """The backend that the caller or else the environment variable CAFIN_BACKEND asks for; None leaves the choice."""
    return _request(backend, where)[1]


def choose(backend: str | None, device: int | str, dtypes: set[str], where: str) -> str:
    """ "cuda" or "reference" for arrays of `dtypes` on `device` ("cpu" or the number of a CUDA device).

    A GPU that could not be set up is not tried again, unless "cuda" is asked for.

    Raises:
        BackendError: "cuda" is asked for and cannot run. Left to choose, the reference serves, with one warning. Or no
            backend can reach the GPU, as this process was forked after CUDA had been used.
    """
    name, asked = _request(backend, where)
    if device != "cpu":
        forks.refuse_child(where)
    if asked == "reference":
        return "reference"
    if device == "cpu":
        if asked == "cuda":
            got = "'cuda' for arrays on the CPU"
            refuse(where, name, "be able to reach the arrays", got, "move them to a GPU", BackendError)
        return "reference"
    problem = _problem(int(device), dtypes, again=asked == "cuda")
    if problem is None:
        return "cuda"
    if asked == "cuda":
        raise BackendError(f"{where}: `{name}` must be able to run, got 'cuda', but {problem}")
    _warn(problem)
    return "reference"


def choose_for_all(backend: str | None, devices: Collection[int | str], dtypes: set[str], where: str) -> str:
    """As `choose`, for arrays on any of `devices`: the kernels run where they can reach all."""
    if "cpu" not in devices:
        return "cuda" if all(choose(backend, device, dtypes, where) == "cuda" for device in devices) else "reference"
    choice = choose(backend, "cpu", dtypes, where)
    if len(devices) > 1 and requested(backend, where) is None:
        _warn("a part of the model is on the CPU")
    return choice


def _warn(problem: str) -> None:
    """Once in a process."""
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(f"cafin_cupy: the reference backend runs on the GPU, slowly, because {problem}", stacklevel=4)


def _problem(device: int, dtypes: set[str], again: bool) -> str | None:
    unsupported = sorted(dtypes - set(DTYPES))
    if unsupported:
        return f"the kernels take {', '.join(DTYPES)} and these arrays are {', '.join(unsupported)}"
    if device in _failed and not again:
        return _failed[device]
    problem = cuda_problem() or _set_up(device, not dtypes.isdisjoint(SIXTEEN))
    if problem is None:
        _failed.pop(device, None)
    else:
        _failed[device] = problem
    return problem


def _set_up(device: int, mixed: bool) -> str | None:
    try:
        prepare(device, mixed=mixed)
    except BackendError as error:
        return str(error)
    return None
