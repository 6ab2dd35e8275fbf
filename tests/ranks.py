"""Checks that run on several ranks at once: a launch of processes runs many, as starting them takes longest.

pytest: results = launch(2, tmp_path, "rank_checks")      # {name of a check: what went wrong on which rank}
a launch: python -m ranks 2 FOLDER rank_checks            # imports once, and is forked into the ranks

On CPUs ranks speak over gloo and compute in float64. With RANKS_ON=cuda in the environment they have a GPU each, or
share one where there are fewer, speak over NCCL and compute in float32, which the kernels know.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch

ON_GPUS = os.environ.get("RANKS_ON") == "cuda"
HOME, BACKEND = ("cuda", "nccl") if ON_GPUS else ("cpu", "gloo")
PRECISE = torch.float32 if ON_GPUS else torch.float64
EXACT = 1e-5 if ON_GPUS else 1e-12  # relative to a tensor's largest entry: sums in another order, some steps long
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


def sends_from_cpus(check: Check) -> Check:
    """Run a check on GPUs with a process group that serves CPUs as well."""
    check.both = True  # type: ignore[attr-defined]
    return check


def backend_of(check: Check) -> str:
    return "cpu:gloo,cuda:nccl" if ON_GPUS and getattr(check, "both", False) else BACKEND


def environment() -> dict[str, str]:
    """Of a rank on this machine, whatever its name resolves to."""
    return {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def launch(ranks: int, folder: Path, *modules: str, on: str = "cpu") -> dict[str, str]:
    """What the ranks' checks have found: nothing for those that passed on all."""
    if on == "cuda" and not torch.cuda.is_available():
        pytest.skip("NCCL needs a real GPU")
    command = [sys.executable, "-m", "ranks", str(ranks), str(folder), *modules]
    env = {**environment(), "RANKS_ON": on}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
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
    from torch import distributed

    torch.set_num_threads(1)
    checks = checks_of(modules, ranks)

    def run(rank: int) -> None:
        results: dict[str, str] = {}
        with on_a_gpu(rank, ranks) if ON_GPUS else nullcontext():
            for name, check in checks.items():
                results[name] = "ended the process"
                Path(folder, f"{rank}.json").write_text(json.dumps(results))
                method = f"file://{folder}/{name}"
                options = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=PATIENCE)}
                distributed.init_process_group(backend_of(check), init_method=method, **options)
                try:
                    torch.manual_seed(0)
                    check(rank, ranks)
                    results[name] = ""
                except (Exception, pytest.fail.Exception):
                    results[name] = traceback.format_exc()
                distributed.destroy_process_group()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))

    forked(ranks, run)


@contextmanager
def on_a_gpu(rank: int, ranks: int) -> Iterator[None]:
    """New tensors are made on this rank's GPU, and computed with without TF32."""
    from torch_helpers import exact_float32

    torch.cuda.set_device(rank % torch.cuda.device_count())
    if torch.cuda.device_count() < ranks:
        # NCCL refuses ranks of one host that share a GPU. Those of several hosts speak through sockets.
        os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
    with torch.device("cuda"), exact_float32():
        yield


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
