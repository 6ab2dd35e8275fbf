"""The first step: what importing and, on a GPU, compiling cost a fresh process, with a cold and a warm kernel cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from .context import Run
from .environment import ROOT
from .timing import MICRO, summary

REPEATS = 5
STEP = ("torch", "cupy", "cafin_cupy", "cafin_cupy.adapters.torch")


def fresh(*words: str, **variables: str) -> dict[str, Any]:
    """What `python -m bench.fresh` prints, with these environment variables besides the present ones.  Raises
    RuntimeError with the end of its messages where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.fresh", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bench: `python -m bench.fresh {' '.join(words)}` failed: {done.stderr.strip()[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return figures


def first(run: Run) -> dict[str, Any]:
    """Import of the library beyond NumPy's; and the first step, in two processes that share an empty kernel cache."""
    imports = [fresh("numpy", "cafin_cupy")["imports"]["cafin_cupy"] * MICRO for _ in range(REPEATS)]
    data: dict[str, Any] = {"import": summary(imports)}
    if run.cuda:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                with run.guard("first", f"ours, {cache} cache"):
                    data[cache] = fresh(*STEP, "--step", str(run.device), CUPY_CACHE_DIR=folder)
    return data
