"""Sharded training: `shard_checks.py` and `shard_extra_checks.py` on two and four processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import launch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch_helpers import DEVICES, mlp, near, rows

from cafin_cupy.adapters.torch import AdaFisher


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_all_ranks(ranks: int, on: str, tmp_path: Path) -> None:
    """One launch for all checks, each of which has a name of its own in the message."""
    found = launch(ranks, tmp_path, "shard_checks", "shard_extra_checks", on=on)
    failed = {name: said for name, said in found.items() if said}
    assert len(found) > 10 and not failed, "\n".join(f"{name}, {said}" for name, said in failed.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies between a GPU and the CPU")
def test_parameters_offloaded_to_the_cpu(tmp_path: Path) -> None:
    """Layers compute on the GPU, which takes the sums; parameters, gradients and factors are on the CPU."""
    distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh, policy = init_device_mesh("cuda", (1,)), CPUOffloadPolicy()
        optimizer = AdaFisher(fully_shard(mlp("cpu").cuda(), mesh=mesh, offload_policy=policy), TCov=2)
        alone = AdaFisher(mlp("cpu"), TCov=2, dist=False)
        for x in rows("cpu", 3):
            for each, given in ((optimizer, x.cuda()), (alone, x)):
                each.zero_grad()
                each.model(given).square().mean().backward()
                each.step()
        assert optimizer.factors()["3"][0].device.type == "cpu"
        for name, found in alone.factors().items():
            for letter, got, want in zip("HS", optimizer.factors()[name], found):
                near(got, want, f"{letter} of {name}")
        for got, want in zip(optimizer.model.parameters(), alone.model.parameters()):
            near(got.detach().full_tensor(), want)
    finally:
        distributed.destroy_process_group()
