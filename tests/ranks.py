"""Checks that run on several ranks at once: a launch of processes runs many, as starting them takes longest.

pytest: results = launch(2, "rank_checks", tmp_path)      # {name of a check: what went wrong on which rank}
a rank: python -m ranks rank_checks FOLDER RANK RANKS
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

PATIENCE = 60.0  # seconds that a rank waits for the others, which may have failed a check
Check = Callable[[int, int], None]


def checks_of(module: str, ranks: int) -> dict[str, Check]:
    """The functions `check_...` of a module, but for those whose attribute `ranks` names other numbers."""
    found = vars(importlib.import_module(module)).items()
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
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def start(module: str, folder: Path, rank: int, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ranks", module, str(folder), str(rank), str(ranks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


def launch(ranks: int, module: str, folder: Path) -> dict[str, str]:
    """What the ranks' checks have found: nothing for those that passed on all."""
    processes = [start(module, folder, rank, ranks) for rank in range(ranks)]
    said = [process.communicate(timeout=300)[0] for process in processes]
    found: dict[str, str] = {}
    for rank, text in enumerate(said):
        file = folder / f"{rank}.json"
        assert file.exists(), f"rank {rank} ended: {text}"
        for name, error in json.loads(file.read_text()).items():
            found[name] = found.get(name, "") + (f"rank {rank}: {error}\n" if error else "")
    return found


def main(module: str, folder: str, rank: int, ranks: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    backend = "nccl" if module.endswith("_gpu") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    results: dict[str, str] = {}
    for name, check in checks_of(module, ranks).items():
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
