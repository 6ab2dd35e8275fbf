"""A call, and the comparison of what was before it with what is after it."""

from __future__ import annotations

import faulthandler
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from hypothesis.stateful import RuleBasedStateMachine

from cafin_cupy import CafinError

from .arrays import Held, around, bits, fingerprint

HANGS_AFTER = 120  # seconds of one sequence of calls, which usually takes some milliseconds


class Figures:
    """What one process has done."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()  # calls of each function that gave the right result
        self.refused: Counter[str] = Counter()  # and that were refused
        self.sequences = 0
        self.shapes: set[tuple[int, ...]] = set()
        self.trace: TextIO | None = None  # the calls of the present sequence, for when the process dies

    def begin(self) -> None:
        """A new sequence of calls."""
        self.sequences += 1
        if self.trace is not None:
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            self.trace.seek(0)
            self.trace.truncate()

    def about_to(self, name: str) -> None:
        if self.trace is not None:
            print(name, file=self.trace, flush=True)

    def seen(self, shape: Any) -> None:
        self.shapes.add(tuple(shape))


figures = Figures()


class Machine(RuleBasedStateMachine):
    """A state machine whose sequences are watched for hanging."""

    framework = "numpy"

    def __init__(self) -> None:
        super().__init__()
        figures.begin()


class Outcome(NamedTuple):
    done: bool
    result: Any  # or the error


def attempt(
    name: str,
    call: Callable[[], Any],
    *,
    valid: bool | None,
    inputs: Any = (),
    state: Any = (),
    kind: type[CafinError] = CafinError,
    also: tuple[type[Exception], ...] = (),
) -> Outcome:
    """Call, and see that what must not change has not.

    Args:
        name: of the function, for the figures and messages.
        call: makes the call.
        valid: what must happen: True a result, False a `CafinError`, None either.
        inputs: what never changes, or a function that gives it.
        state: what a call that is refused leaves as it is, down to the memory around arrays; or a function that gives
            it.
        kind: the error that a call which is not valid must raise.
        also: errors that count as a refusal, where another library has the word.
    """
    figures.about_to(name)
    look, read = (x if callable(x) else lambda x=x: x for x in (state, inputs))
    before, then = fingerprint(read()), fingerprint(look())
    memories = [(held, bits(held.memory)) for held in _held(look()) if held.memory is not None]
    try:
        outcome = Outcome(True, call())
    except (CafinError, *also) as error:
        outcome = Outcome(False, error)
    changed = _difference(before, fingerprint(read()))
    assert not changed, f"{name} has changed what it may only read: {changed}"
    if outcome.done:
        assert valid is not False, f"{name} must be refused"
        figures.right[name] += 1
        for held, memory in memories:
            assert around(held, memory), f"{name} has written beside an array"
    else:
        assert not valid, f"{name} must not be refused: {outcome.result!r}"
        assert valid is None or isinstance(outcome.result, (kind, *also)), f"{name} raises {outcome.result!r}"
        assert str(outcome.result), f"{name} is refused without a word"
        figures.refused[name] += 1
        changed = _difference(then, fingerprint(look()))
        assert not changed, f"{name} was refused and has changed {changed}: {outcome.result!r}"
    return outcome


def _difference(a: Any, b: Any, path: str = "") -> str:
    """Where two fingerprints differ, and how; empty if they do not."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return next(filter(None, (_difference(x, y, f"{path}[{k}]") for k, (x, y) in enumerate(zip(a, b)))), "")
    return "" if a == b else f"{path}: {str(a)[:80]} -> {str(b)[:80]}"


def _held(x: Any) -> Iterator[Held]:
    if isinstance(x, Held):
        yield x
    elif isinstance(x, dict):
        for item in x.values():
            yield from _held(item)
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _held(item)
