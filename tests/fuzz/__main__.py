"""`PYTHONPATH=tests python -m fuzz [--seconds S | --rounds N] [--seed N]`: a process for each target, all at once; the
report."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulation import compiler
from emulation.__main__ import gpus

PATIENCE = 300  # seconds beyond its time after which a process counts as hanging; shrinking takes some


@dataclass
class Target:
    """What one process plays, and the variables of its environment."""

    name: str
    environment: dict[str, str]


def targets(seed: int) -> list[Target]:
    """All that can run here."""
    found = [
        Target("numpy", {}),  # the reference on arrays of NumPy
        Target("torch", {}),  # and of PyTorch
        Target("adapter", {}),  # the PyTorch optimizer
    ]
    if gpus():
        return [*found, Target("cupy", {})]
    if compiler.compiler() is None:
        print("fuzz: without the kernels, as there is no C++ compiler; install g++, or set CXX")
        return found
    order = {"EMULATION_ORDER": str(1 + seed % 1000)}
    # CuPy arrays; the PyTorch optimizer; of a model on two devices.
    found += [Target(name, order) for name in ("emulated", "lent", "spread")]
    sanitized = compiler.sanitized_environment()
    if sanitized is not None:
        found.append(Target("sanitized", {**order, **sanitized}))
    return found


class Process:
    """One target's process, its output and its trace of calls."""

    def __init__(self, target: Target, arguments: list[str], folder: Path) -> None:
        self.target, self.trace = target, folder / f"{target.name}.trace"
        self.out, self.err = folder / f"{target.name}.out", folder / f"{target.name}.err"
        command = [sys.executable, "-m", "fuzz", "--trace", str(self.trace), "--target", target.name, *arguments]
        env = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **target.environment}
        env.pop("CAFIN_BACKEND", None)
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env)

    def wait(self, until: float) -> tuple[str, dict[str, Any]]:
        """(what went wrong, if anything; the figures)."""
        try:
            code = self.process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return self._words("hangs"), {}
        lines = self.out.read_text().splitlines()
        report = lines[-1] if lines else ""
        if not report.startswith("{"):  # it did not come to its end
            return self._words(f"died with exit code {code}"), {}
        return (self._words("failed") if code else ""), json.loads(report)

    def _words(self, what: str) -> str:
        calls = self.trace.read_text() if self.trace.exists() and what != "failed" else ""
        after = f"\nits last calls:\n{calls[-2000:]}" if calls else ""
        return f"fuzz: {self.target.name} {what}\n{self.err.read_text()[-20000:]}{after}"


COLUMNS = ("rounds", "sequences", "calls", "right", "refused", "shapes", "entries", "bounded")


def show(results: list[tuple[Target, dict[str, Any]]]) -> None:
    """A line for each target, and one for all."""
    rows = [(target.name, {**report, "shapes": set(map(tuple, report["shapes"]))}) for target, report in results]
    sums = {name: sum(row[name] for _, row in rows) for name in ("rounds", "sequences", "right", "refused")}
    sums |= {name: sum(row[name] for _, row in rows) for name in ("entries", "bounded")}
    rows.append(("all", {**sums, "shapes": set().union(*(row["shapes"] for _, row in rows))}))
    print("fuzz:", "target".ljust(10), *(name.rjust(12) for name in COLUMNS))
    for name, row in rows:
        row["calls"], row["shapes"] = row["right"] + row["refused"], len(row["shapes"])
        share = f"{row['bounded'] / max(1, row['entries']):.0%}"
        print("fuzz:", name.ljust(10), *(f"{row[column]:,}".rjust(12) for column in COLUMNS[:-1]), share.rjust(12))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m fuzz", description="Random calls of the public functions.")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all; default: 600")
    parser.add_argument("--rounds", type=int, help="so many of each target, whatever the time: always the same calls")
    parser.add_argument("--seed", type=int, help="makes the run repeatable; default: random")
    parser.add_argument("--target", help="only this one")
    parser.add_argument("--round", type=int, help="only this round of the target")
    parser.add_argument("--trace", help=argparse.SUPPRESS)  # given to a target's process
    options = parser.parse_args(arguments)
    until = time.time() + (options.seconds if options.rounds is None else 3600.0)
    if options.trace:
        from .worker import main as work

        rounds = range(options.rounds or 10**9) if options.round is None else [options.round]
        return work(options.target, options.seed, rounds, until, options.trace)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    chosen = [target for target in targets(seed) if options.target in (None, target.name)]
    if not chosen:
        parser.error(f"there is no target {options.target!r} here")
    length = f"{options.seconds:g} s" if options.rounds is None else f"{options.rounds} rounds"
    print(f"fuzz: seed {seed}, {length}, {', '.join(t.name for t in chosen)}", flush=True)
    given = ["--seed", str(seed), "--seconds", str(options.seconds)]
    for name in ("rounds", "round"):
        value = getattr(options, name)
        given += [] if value is None else [f"--{name}", str(value)]
    failures, results = [], []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        processes = [Process(target, given, Path(folder)) for target in chosen]
        for process in processes:
            failure, report = process.wait(until + PATIENCE)
            failures += [failure] if failure else []
            results += [(process.target, report)] if report else []
    show(results)
    print("\n".join(failures) or "fuzz: nothing found", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
