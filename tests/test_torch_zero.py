"""State that ranks divide: `zero_checks.py` and `zero_fault_checks.py` on two and four processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import launch
from torch import nn
from torch_helpers import DEVICES, assert_same, either_device, everything, kernels_device, mlp, rows, run  # noqa: F401

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_all_ranks(ranks: int, on: str, tmp_path: Path) -> None:
    """One launch for all checks, each of which has a name of its own in the message."""
    found = launch(ranks, tmp_path, "zero_checks", "zero_fault_checks", on=on)
    failed = {name: said for name, said in found.items() if said}
    assert len(found) > 5 and not failed, "\n".join(f"{name}, {said}" for name, said in failed.items())


def test_parameters_that_are_laid_flat_are_refused() -> None:
    """As a wrapper would that puts one copy of all parameters, one behind the other, into the groups."""
    optimizer = AdaFisher(mlp("cpu"), TCov=1)
    run(optimizer, rows("cpu", 1))
    params = optimizer.param_groups[0]["params"]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    flat.grad = torch.ones_like(flat)
    before = everything(optimizer)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(CafinError, match="step: `param_groups` must hold parameters of the model, got others alone"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = params
    assert_same(optimizer, before)
    assert flat.detach().equal(torch.cat([p.detach().flatten() for p in params]))
    run(optimizer, rows("cpu", 1))
    assert optimizer.steps == 2


@pytest.mark.gpu
def test_by_the_kernels_on_an_emulated_gpu(gpu: str, tmp_path: Path) -> None:
    """On GPUs `rank_checks_gpu.py` has it."""
    if gpu == "cuda":
        pytest.skip("on the emulated GPU")
    found = launch(2, tmp_path, "zero_checks_emulated")
    assert len(found) > 3 and not any(found.values()), "".join(found.values())


def test_one_process_has_nothing_to_divide(device: str) -> None:
    alone = run(AdaFisher(mlp(device), TCov=1), rows(device, 2))
    assert_same(run(AdaFisher(mlp(device), TCov=1, shard_state=True), rows(device, 2)), alone)
