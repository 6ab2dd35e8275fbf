"""One process: plays the machines of one target, round after round.

A round is one machine with some sequences of calls. Its seed follows from the run's seed and its number, so each can be
played again alone.
"""

from __future__ import annotations

import faulthandler
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import run_state_machine_as_test
from same_examples import leave_modules_unread

from .calls import Machine, figures
from .rounded import compared

SEQUENCES, CALLS = 5, 25  # of a round, and at most of a sequence


def machines(target: str) -> list[type[Machine]]:
    """The machines of a target, with their framework."""
    from .functions import Functions
    from .optimizer import Optimizer
    from .torch_optimizer import TorchOptimizer
    from .values import Values

    devices = 2 if target == "spread" else 1
    if target in ("emulated", "sanitized", "lent", "spread"):
        from emulation import device

        device.install()
    if target in ("lent", "spread"):
        device.lend_torch(pytest.MonkeyPatch(), devices)
    if target in ("adapter", "lent", "spread"):
        framework, found = ("torch" if target == "adapter" else "lent"), [TorchOptimizer]
    elif target in ("cupy", "emulated", "sanitized"):
        framework, found = "cupy", [Functions, Optimizer]
    else:
        framework, found = target, [Functions, Optimizer, Values]
    own = {"framework": framework, "devices": devices}
    return [type(machine.__name__, (machine,), own) for machine in found]


def play(machine: type[Machine], seed: Any, sequences: int = SEQUENCES, shrink: bool = True) -> None:
    """One round, the same for the same seed, whatever is loaded.

    Raises:
        Exception: a call has ended in another way than it must; notes tell how to make the sequence again.
    """
    settings = hypothesis.settings(
        max_examples=sequences,
        stateful_step_count=CALLS,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])],
        report_multiple_bugs=shrink,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    leave_modules_unread()
    hypothesis.seed(random.Random(seed).getrandbits(64))(machine)
    run_state_machine_as_test(machine, settings=settings)


def main(target: str, seed: int, rounds: Sequence[int], until: float, trace: str) -> int:
    """Play those of `rounds` that begin before `until`.

    Returns:
        Exit code: 0, or 1 after a failure, which is printed. The last line is a JSON object of figures.
    """
    warnings.simplefilter("ignore")
    engine.MAX_SHRINKING_SECONDS = 60  # that are spent on a failing sequence, to make it short
    faulthandler.enable()
    figures.trace = open(trace, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
    found = machines(target)
    played, longest, code = 0, 0.0, 0
    for number in rounds:
        begin = time.time()
        if played and begin + longest > until:
            break
        try:
            play(found[number % len(found)], f"{target} {seed} {number}")
        except Exception:
            traceback.print_exc()
            print(f"fuzz: again with --target {target} --seed {seed} --round {number}", file=sys.stderr)
            code = 1
            break
        played, longest = played + 1, max(longest, time.time() - begin)
    faulthandler.cancel_dump_traceback_later()
    report = {
        "rounds": played,
        "sequences": figures.sequences,
        "right": sum(figures.right.values()),
        "refused": sum(figures.refused.values()),
        "shapes": sorted(figures.shapes),
        "entries": compared["all"],
        "bounded": compared["bounded"],
    }
    print(json.dumps(report), flush=True)
    return code
