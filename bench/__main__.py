"""`python -m bench`: time every contender on one device, write results, tables and plots."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import report
from .accuracy import accuracy
from .contenders import contenders
from .context import CPU, FULL, QUICK, SMOKE, SMOKE_TCOVS, TCOVS, Run, Sizes
from .environment import ROOT, conditions, environment, stem
from .first import first
from .graphs import graphs
from .growth import growth
from .memory import launches, memory
from .sections import copy_speed, fim, iteration, large, step, transformer, vit
from .timing import Clock

Section = Callable[[Run], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "copy": copy_speed,
    "step": step,
    "fim": fim,
    "iteration": iteration,
    "graphs": graphs,
    "transformer": transformer,
    "vit": vit,
    "memory": memory,
    "launches": launches,
    "accuracy": accuracy,
    "large": large,
    "growth": growth,
    "first": first,
}
NEEDS_CUDA = {"graphs", "memory", "launches"}
ON_CPU = ["copy", "step", "fim"]  # of the real sizes on a CPU
ROOMY = 16 << 30  # bytes of memory for the ResNet's batch on a CPU; with less it is a quarter
NO_GPU = "bench: PyTorch finds no CUDA device; run it on an NVIDIA GPU, or with `--device cpu` as a smoke test"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (small sizes: a smoke test)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: about a third of the time")
    parser.add_argument(
        "--full", action="store_true", help=f"with `--device cpu`: the real ResNet-18, by default in {','.join(ON_CPU)}"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of a CPU; default: 1, with `--full` PyTorch's choice")
    parser.add_argument("--tf32", action="store_true", help="let matrix products and convolutions use TF32")
    parser.add_argument("--other", metavar="PATH:CLASS", help="one more optimizer, made as CLASS(model), to time")
    parser.add_argument("--sections", metavar="A,B", help=f"only these of {','.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    parser.add_argument("--readme", type=Path, help="file whose benchmark section is to be replaced")
    chosen = parser.parse_args(argv)
    unknown = set((chosen.sections or "").split(",")) - set(SECTIONS) - {""}
    if unknown:
        parser.error(f"`--sections` must name some of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    if chosen.threads is not None and chosen.threads < 1:
        parser.error(f"`--threads` must be at least 1, got {chosen.threads}")
    return chosen


def plan(chosen: argparse.Namespace, cuda: bool) -> tuple[str, Sizes]:
    """Mode and sizes of the run."""
    if cuda:
        return ("quick", QUICK) if chosen.quick else ("full", FULL)
    if not chosen.full:
        return "smoke", SMOKE
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "cpu", CPU if memory >= ROOMY else dataclasses.replace(CPU, batch=32)


def main(argv: list[str] | None = None) -> int:
    """0: all sections ran; 1: some failed, the others are written; 2: nothing could run."""
    chosen = arguments(argv)
    if chosen.device.partition(":")[0] not in ("cuda", "cpu"):
        print(f"bench: `--device` must be cuda, cuda:N or cpu, got {chosen.device}", file=sys.stderr)
        return 2
    device = torch.device(chosen.device)
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    try:
        listed = contenders(chosen.other)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    mode, sizes = plan(chosen, cuda)
    if cuda:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if chosen.threads or mode == "smoke":
        torch.set_num_threads(chosen.threads or 1)  # one for small sizes: steadier beside other work
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = chosen.tf32

    run = Run(device, sizes, listed, Clock(device), SMOKE_TCOVS if mode == "smoke" else TCOVS)
    facts = environment(device)
    record: dict[str, Any] = {"environment": facts, "conditions": conditions(run, mode, chosen.tf32), "sections": {}}
    every = ON_CPU if mode == "cpu" else list(SECTIONS)
    names = chosen.sections.split(",") if chosen.sections else every
    part = "" if set(names) >= set(every) else "-partial"  # must not take the place of a whole run's results
    path = chosen.out / f"{stem(facts, mode)}{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        record["sections"][name] = section(run, name)
        path.write_text(json.dumps(record, indent=1) + "\n")  # after each, so that an end by force loses little
    print(f"results: {path}")
    report.write(path, chosen.readme)
    for failure in run.failures:
        print(f"FAILED {failure['section']} ({failure['contender']}): {failure['error']}", file=sys.stderr)
    return 1 if run.failures else 0


def section(run: Run, name: str) -> dict[str, Any]:
    """Run one section: its status, what failed in it, how long it took, and its figures."""
    if name in NEEDS_CUDA and not run.cuda:
        return {"status": "not applicable", "reason": "needs CUDA", "failures": [], "seconds": 0.0, "data": None}
    first, start, data = len(run.failures), time.perf_counter(), None
    with run.guard(name):
        data = SECTIONS[name](run)
        run.clock.synchronize()
    seconds = time.perf_counter() - start
    with run.guard(name, "release"):
        run.release()
    failures = run.failures[first:]
    status = "failed" if failures else "ok"
    print(f"{name:11} {status:7} {seconds:6.1f} s", flush=True)
    return {"status": status, "failures": failures, "seconds": round(seconds, 2), "data": data}


if __name__ == "__main__":
    sys.exit(main())
