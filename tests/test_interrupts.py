"""Ctrl-C that waits: for real signals, in the main thread and beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cafin_cupy.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_waits_until_the_block_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        for k in range(3):
            interrupt()
            done.append(k)
    assert done == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        interrupt()  # as ever


def test_nothing_happens_without_it() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_the_block_is_not_lost() -> None:
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        interrupt()
        raise ValueError("mine")
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_may_be_nested() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_the_handler_of_the_script_is_called() -> None:
    calls: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: calls.append(arguments))
    with uninterrupted():
        interrupt()
        assert not calls
    ((number, frame),) = calls
    assert number == signal.SIGINT and frame is not None


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_stays(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) == handler


def test_other_threads_have_nothing_to_wait_for() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


TRAIN = """
import signal, sys
import numpy as np
from cafin_cupy import AdaFisher
signal.signal(signal.SIGINT, signal.default_int_handler)

def run(steps, say):
    p, g = np.ones((400, 1000), "f4"), np.ones((400, 1000), "f4")
    opt = AdaFisher([p[k : k + 1] for k in range(400)], lr=1e-3)
    grads = [g[k : k + 1] for k in range(400)]
    interrupts = 0
    while opt.steps < steps:
        try:
            if say:
                print(opt.steps, flush=True)
            opt.step(grads)
        except KeyboardInterrupt:
            interrupts += 1
    return p, interrupts

disturbed, interrupts = run(20, True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("interrupts" if interrupts else "none came", bool((disturbed == run(20, False)[0]).all()))
"""


def test_a_run_that_is_interrupted_again_and_again_trains_as_if_it_were_not() -> None:
    """Signals from outside, at whatever moment of a step."""
    process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said, sent = "", 0
    for line in process.stdout:
        said = line
        if sent < 40:
            time.sleep(0.001 * (sent % 7))
            process.send_signal(signal.SIGINT)
            sent += 1
    _, error = process.communicate(timeout=60)
    assert said == "interrupts True\n", error
