"""Ctrl-C, where a half-done job could be neither finished nor taken back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block is over: the handler of SIGINT is called then.

    Python runs it in the main thread alone, so in others there is nothing to do. What handlers of other signals raise
    is not held back. Costs some microseconds.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[Any] = []
    try:
        signal.signal(signal.SIGINT, lambda *signal: came.append(signal))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
