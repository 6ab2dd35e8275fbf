"""Training that is killed again and again, and resumed from its last checkpoint, ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from resumable import EVERY, PLACES, STEPS, Job  # noqa: E402
from torch_helpers import assert_equal_trees  # noqa: E402

gpu = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("resumable.py")
KINDS = [("AdaFisher", "parity"), ("AdaFisherW", "paper")]


def deaths(seed: int) -> list[tuple[int, str]]:
    """At random steps, one in each place: in forward, backward and step, while a checkpoint is written, and before it
    takes the place of the old one."""
    chance = random.Random(seed)
    return list(zip(sorted(chance.choices(range(STEPS - EVERY), k=len(PLACES))), chance.sample(PLACES, len(PLACES))))


def train(jobs: list[Job]) -> None:
    for job in jobs:
        Path(job.folder).mkdir()
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), json.dumps([job._asdict() for job in jobs])]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("device", "capturable"),
    [
        pytest.param("cpu", False, id="cpu"),
        pytest.param("cuda", False, id="cuda", marks=gpu),
        pytest.param("cuda", True, id="cuda-capturable", marks=gpu),
    ],
)
def test_a_killed_run_ends_bit_for_bit_as_an_unbroken_one(device: str, capturable: bool, tmp_path: Path) -> None:
    """Weights, momentum, factors, counters, schedule and random numbers."""
    pairs = []
    for seed, (kind, averaging) in enumerate(KINDS):
        options = {"averaging": averaging, "capturable": capturable}
        ends: list[list[tuple[int, str]]] = [[], deaths(seed)]
        pairs.append([Job(kind, options, device, str(tmp_path / f"{kind}-{len(end)}"), end) for end in ends])
    train([job for pair in pairs for job in pair])
    for pair in pairs:
        unbroken, killed = (torch.load(f"{job.folder}/end.pt", weights_only=True) for job in pair)
        starts = [int(line) for line in Path(pair[1].folder, "lives").read_text().splitlines()]
        assert starts == sorted(starts) and len(starts) == len(pair[1].deaths) + 1
        assert starts[0] == 0 < starts[-1] and all(start % EVERY == 0 for start in starts)
        assert unbroken["done"] == STEPS
        assert not any(torch.equal(F, torch.ones_like(F)) for F in unbroken["optimizer"]["H_D"])
        assert_equal_trees(unbroken, killed)
