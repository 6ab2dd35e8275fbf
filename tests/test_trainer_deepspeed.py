"""DeepSpeed's engine on CPU processes: with ZeRO's stages 1 and 2 as without it they train as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_cases(ranks: int, tmp_path: Path) -> None:
    """One launch for all, as importing takes longest."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(Path(__file__).with_name("deepspeed_ranks.py")), str(tmp_path)]
    env = {**environment(), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank}: done" in done.stdout for rank in range(ranks))
    assert done.stdout.count("is one process") == 12 * ranks and done.stdout.count("is resumed") == 4 * ranks
