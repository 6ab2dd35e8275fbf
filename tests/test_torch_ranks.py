"""Data parallel training: `rank_checks.py` on two and four processes over gloo, and faults of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import environment, launch
from torch_helpers import DEVICES, assert_same, mlp, rows, run

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher
from cafin_cupy.adapters.torch_ranks import fingerprint


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_all_ranks(ranks: int, on: str, tmp_path: Path) -> None:
    """One launch for all checks, each of which has a name of its own in the message."""
    found = launch(ranks, tmp_path, "rank_checks", "rank_differences", on=on)
    failed = {name: said for name, said in found.items() if said}
    assert len(found) > 10 and not failed, "\n".join(f"{name}, {said}" for name, said in failed.items())


@pytest.mark.gpu
def test_streams_and_waits(tmp_path: Path) -> None:
    """Over NCCL, on a GPU for each rank; on one that they share where there are fewer."""
    found = launch(2, tmp_path, "rank_checks_gpu", on="cuda")
    assert found and not any(found.values()), "".join(found.values())


@pytest.mark.parametrize("fault", ["dead", "late", "compare"])
def test_a_rank_that_does_not_come_is_told_with_the_collective(fault: str, tmp_path: Path) -> None:
    """Whether it has died or hangs: the other one names what it waited for, and its step has changed nothing. A step
    that is not sampled waits for nobody."""
    command = [sys.executable, "-m", "rank_faults", fault, str(tmp_path / "store")]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    said = subprocess.run(command, timeout=120, **options).stdout  # type: ignore[call-overload]
    step, steps, same, error = said.splitlines()[-1].split("|", 3)
    if fault == "compare":
        assert (step, steps) == ("3", "4")
        assert "step: the comparison of the ranks' state over 2 ranks failed on rank 0" in error
    else:
        assert (step, steps, same) == ("2", "2", "True")
        assert "step: the all-reduce of the factors' sums over 2 ranks failed on rank 0" in error


@pytest.mark.parametrize("dist", [1, "nccl", [0, 1]])
def test_dist_must_be_a_group(dist: object) -> None:
    with pytest.raises(CafinError, match="AdaFisher: `dist` must be None, True, False or a process group"):
        AdaFisher(mlp("cpu"), dist=dist)


@pytest.mark.parametrize(("name", "value"), [("gradient_divide_factor", 0.0), ("check_every", 0)])
def test_arguments_of_ranks_are_checked(name: str, value: object) -> None:
    with pytest.raises(CafinError, match=f"AdaFisher: `{name}` must"):
        AdaFisher(mlp("cpu"), **{name: value})


def test_without_ranks_there_is_nothing_to_reduce() -> None:
    """With dist=True neither, and `check_every` has nothing to compare."""
    alone = run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2))
    assert_same(run(AdaFisher(mlp("cpu"), TCov=1, dist=True, check_every=1), rows("cpu", 2)), alone)


def test_a_fingerprint_tells_bits_and_places() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        x = torch.arange(7).to(dtype)
        same, other, moved = x.clone(), x.clone(), x.flip(0)
        other[3] += 1
        assert fingerprint(x) == fingerprint(same)
        assert fingerprint(x) != fingerprint(other)
        assert fingerprint(x) != fingerprint(moved)
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
