"""DeepSpeed's engine on two CPU processes: without ZeRO it trains as one process does; with it, it is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages(stage: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(Path(__file__).with_name("deepspeed_ranks.py")), str(stage)]
    env = {**environment(), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    if stage == 0:
        assert done.returncode == 0, done.stderr
        assert all(f"rank {rank} is one process after 5 steps" in done.stdout for rank in range(2))
    else:
        assert "step: `param_groups` must hold parameters of the model, got others alone" in done.stderr
