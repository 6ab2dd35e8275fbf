"""Faults on purpose: every call of a step that may fail does, one after the other; and Ctrl-C at every line."""

from __future__ import annotations

import linecache
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cafin_cupy

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "30"))

PACKAGE = Path(cafin_cupy.__file__).parent
SOURCES = tuple(str(folder) for folder in (PACKAGE, PACKAGE.parent / "adapters"))


class Gate:
    """Counts calls that may fail, while it is armed, and lets one of them fail."""

    def __init__(self) -> None:
        self.armed, self.seen = False, 0
        self.at, self.fail = -1, "memory"

    def refuses(self) -> bool:
        """True for the one call that must fail; it is armed no more then, and what follows works."""
        if not self.armed:
            return False
        self.seen += 1
        if self.seen != self.at:
            return False
        self.armed = False
        return True

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which fails in place of its work, or where Ctrl-C comes meanwhile, behind it."""

        def gated(*arguments: Any, **options: Any) -> Any:
            if self.refuses():
                if self.fail == "Ctrl-C behind":
                    call(*arguments, **options)
                raise FAULTS[self.fail]("on purpose")
            return call(*arguments, **options)

        return gated

    @contextmanager
    def open(self, at: int, fail: str = "memory") -> Iterator[None]:
        """Within, call number `at` (from 1) fails; none if it is 0."""
        self.at, self.fail, self.seen, self.armed = at, fail, 0, True
        try:
            yield
        finally:
            self.armed = False


FAULTS: dict[str, type[BaseException]] = {
    "memory": MemoryError,
    "driver": RuntimeError,
    "Ctrl-C": KeyboardInterrupt,
    "Ctrl-C behind": KeyboardInterrupt,
}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """In front of the driver and of what allocates on the device. Launches that are made from now on pass it."""
    import cupy

    from cafin_cupy import cuda_factors, cuda_sums, cuda_update, runtime, table, update
    from cafin_cupy.layers import linear

    made = Gate()
    for module, name in [
        *((module, "allocate") for module in (table, cuda_sums, cuda_update)),
        *((module, "copy_like") for module in (cuda_factors, update)),
        *((module, "array_namespace") for module in (cuda_sums, linear)),  # of which comes memory for sums
        (cupy.cuda, "alloc_pinned_memory"),
        *((cupy.cuda.runtime, name) for name in ("memcpyAsync", "eventRecord")),
    ]:
        monkeypatch.setattr(module, name, made.wrap(getattr(module, name)))
    cupy.cuda.Device().synchronize()
    table._pinned.clear()  # else only the first test would take memory

    init = runtime.Launch.__init__

    def gated_init(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        launch = self._launch

        def call(*arguments: Any) -> None:
            if made.refuses():
                if made.fail == "driver":
                    self._answers.append(719)  # cudaErrorLaunchFailure
                    return
                if made.fail == "Ctrl-C behind":
                    launch(*arguments)
                raise FAULTS[made.fail]("on purpose")
            launch(*arguments)

        self._launch = call

    monkeypatch.setattr(runtime.Launch, "__init__", gated_init)
    return made


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a program that leaves its handler alone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def some(numbers: int) -> range:
    """Of the numbers from 1 on, some that lie evenly; all of them where HYPOTHESIS_EXAMPLES is large enough."""
    return range(1, numbers + 1, max(1, numbers // (2 * EXAMPLES)))


def interrupted_at(line: int, call: Callable[[], object]) -> tuple[int, bool]:
    """Run `call`, with a real SIGINT when the library reaches its line number `line` (from 1) of those that it runs.

    Lines that begin a `with` block do not count: they come again at its end, where Python, unless traced, takes no
    signal before the block has released what it holds.

    Returns:
        How many lines have run, and whether KeyboardInterrupt came.
    """
    seen, came = 0, False

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        came = True
    finally:
        sys.settrace(None)
    return seen, came
