"""Checks that run on several ranks at once: a launch of processes runs many, as starting them takes longest.

pytest: results = launch(2, tmp_path, "rank_checks")      # {name of a check: what went wrong on which rank}
a launch: python -m ranks 2 FOLDER rank_checks            # imports once, and is forked into the ranks
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest

PATIENCE = 60.0  # seconds that a rank waits for the others, which may have failed a check
Check = Callable[[int, int], None]


def checks_of(modules: Sequence[str], ranks: int) -> dict[str, Check]:
    """The functions `check_...` of modules, but for those whose attribute `ranks` names other numbers."""
    found = [pair for module in modules for pair in vars(importlib.import_module(module)).items()]
    named = {name.removeprefix("check_"): check for name, check in found if name.startswith("check_")}
    return {name: check for name, check in named.items() if ranks in getattr(check, "ranks", (2, 4))}


def only(*ranks: int) -> Callable[[Check], Check]:
    """Run a check on this many ranks alone."""

    def decorate(check: Check) -> Check:
        check.ranks = ranks  # type: ignore[attr-defined]
        return check

    return decorate


def environment() -> dict[str, str]:
    """Of a rank on this machine, whatever its name resolves to."""
    return {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def launch(ranks: int, folder: Path, *modules: str) -> dict[str, str]:
    """What the ranks' checks have found: nothing for those that passed on all."""
    command = [sys.executable, "-m", "ranks", str(ranks), str(folder), *modules]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment()}
    text = subprocess.run(command, timeout=600, **options).stdout  # type: ignore[call-overload]
    found: dict[str, str] = {}
    for rank in range(ranks):
        file = folder / f"{rank}.json"
        assert file.exists(), f"rank {rank} ended: {text}"
        for name, error in json.loads(file.read_text()).items():
            found[name] = found.get(name, "") + (f"rank {rank}: {error}\n" if error else "")
    return found


def forked(ranks: int, run: Callable[[int], None]) -> list[int]:
    """Run a function on each of so many ranks, forked from this process, which must not have used a GPU or autograd's
    threads; returns their exit codes."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _end_with(run, rank)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _end_with(run: Callable[[int], None], rank: int) -> NoReturn:
    """Run a rank, and end it at once: at the end of an interpreter, gloo's threads may still hold tensors, whose
    release then aborts the process."""
    try:
        run(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(ranks: int, folder: str, *modules: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    checks = checks_of(modules, ranks)

    def run(rank: int) -> None:
        backend = "nccl" if modules[0].endswith("_gpu") else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(rank)
        results: dict[str, str] = {}
        for name, check in checks.items():
            method = f"file://{folder}/{name}"
            options = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=PATIENCE)}
            distributed.init_process_group(backend, init_method=method, **options)
            try:
                torch.manual_seed(0)
                check(rank, ranks)
                results[name] = ""
            except (Exception, pytest.fail.Exception):
                results[name] = traceback.format_exc()
            distributed.destroy_process_group()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))

    forked(ranks, run)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
