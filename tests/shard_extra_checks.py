"""Checks of what needs more than a rank's own part of sharded parameters, run on every rank by `ranks.py`."""

from __future__ import annotations

import pytest
import torch
from rank_checks import WHOLE, counted, loss_of
from ranks import EXACT, HOME, PRECISE, only, sends_from_cpus
from shard_checks import assert_law, sharded, train
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch_helpers import mlp, rows

from cafin_cupy import CafinError, NonFiniteError
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW
from cafin_cupy.adapters.torch_ranks import compare_ranks


class Attending(nn.Module):
    """To itself, and to what has another width."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(6, 2, batch_first=True)
        self.other = nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x, x, x, need_weights=False)[0]
        return self.other(x, x[..., :4], x[..., 2:], need_weights=False)[0]


def check_attention(rank: int, ranks: int) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Attending().to(PRECISE)

    torch.manual_seed(3)
    batches = list(torch.randn(3, WHOLE, 5, 6, dtype=PRECISE))
    alone = train(AdaFisher(made(), TCov=1, dist=False), batches, 0, 1)
    for wrap in (fully_shard, sharded):
        optimizer = train(AdaFisher(wrap(made()), TCov=1), batches, rank, ranks)
        assert_law(optimizer, alone)


def meshes(ranks: int) -> list[DeviceMesh]:
    """Of shards, and of two replicas of shards."""
    hybrid = init_device_mesh(HOME, (2, 2), mesh_dim_names=("replicas", "shards")) if ranks == 4 else None
    return [init_device_mesh(HOME, (ranks,)), *([hybrid] if hybrid is not None else [])]


def check_error_if_nonfinite(rank: int, ranks: int) -> None:
    """The NaN lies in the part of one rank; all raise, and have changed nothing."""
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    for mesh in meshes(ranks):
        optimizer = AdaFisher(sharded(mlp(HOME).to(PRECISE), mesh=mesh), TCov=2, error_if_nonfinite=True)
        with counted() as sent:
            train(optimizer, batches[:2], rank, ranks)
        if mesh.ndim == 1:  # else fully_shard adds up over replicas
            assert len(sent) == 1 + 2 + 2, sent  # agreement, sums with the length of the norm's, a number each step
        alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches[:2], 0, 1)
        optimizer.zero_grad()
        loss_of(optimizer.model, batches[2].tensor_split(ranks)[rank]).backward()
        if rank == 1:
            optimizer.model[3].weight.grad.to_local()[-1:] = float("nan")
        told = "inf or NaN in" if rank == 1 else "inf or NaN on another rank"
        with pytest.raises(NonFiniteError, match=f"`gradient of 3.weight` must be finite, got {told}"):
            optimizer.step()
        assert_law(optimizer, alone)
        optimizer.zero_grad()
        assert_law(train(optimizer, batches[3:], rank, ranks), train(alone, batches[3:], 0, 1))


def check_curvature(rank: int, ranks: int) -> None:
    """Every rank has that of the whole parameters; one alone may read it."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    options = {"TCov": 2, "weight_decay": 1e-2}
    alone = train(AdaFisherW(mlp(HOME).to(PRECISE), dist=False, **options), batches, 0, 1)
    for mesh in meshes(ranks):
        optimizer = AdaFisherW(sharded(mlp(HOME).to(PRECISE), mesh=mesh), **options)
        assert optimizer.curvature()["0.weight"]["update_ratio"] == 0.0
        seen = train(optimizer, batches, rank, ranks).curvature()
        if rank == 0:
            assert seen.flat() == pytest.approx(alone.curvature().flat(), rel=10 * EXACT)  # a ratio of long sums


@only(4)
def check_comparison_of_replicas(rank: int, ranks: int) -> None:
    """Of what two ranks hold of four."""
    mesh = meshes(4)[1]
    for where, named in ((0, "parameter 0.weight"), (1, "exp_avg of 0.weight")):
        optimizer = AdaFisher(sharded(mlp(HOME), mesh=mesh), TCov=1, check_every=1)
        train(optimizer, rows(HOME, 2, WHOLE), rank, ranks)
        p = optimizer.model[0].weight
        changed = optimizer.state[p]["exp_avg"] if where else p
        changed.detach().to_local().view(-1)[-1] += float(rank == 1)
        with pytest.raises(CafinError, match=f"step: {named} must be the same on all"):
            compare_ranks(optimizer, distributed.group.WORLD)


@sends_from_cpus
def check_offload_to_the_cpu(rank: int, ranks: int) -> None:
    """Parameters, gradients and factors lie there; layers compute where `HOME` is. Accumulation too."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    model = sharded(mlp(HOME).to(PRECISE), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = AdaFisher(model, TCov=2)
    for x in batches:
        optimizer.zero_grad()
        for part in x.tensor_split(ranks)[rank].chunk(2):
            (loss_of(model, part) * (len(part) * ranks / WHOLE)).backward()
        optimizer.step()
    assert_law(optimizer, alone)


def check_mixed_precision_policies(rank: int, ranks: int) -> None:
    """Layers in float64, parameters in float32: factors are those of what the layers see."""
    batches = rows(HOME, 3, WHOLE)
    for options in (
        {"param_dtype": torch.float64, "reduce_dtype": torch.float32},
        {"param_dtype": torch.float64, "output_dtype": torch.float32},
    ):
        policy = MixedPrecisionPolicy(**options)
        alone = train(AdaFisher(mlp(HOME), TCov=1, dist=False), batches, 0, 1)
        got = AdaFisher(sharded(mlp(HOME), mp_policy=policy), TCov=1)
        assert_law(train(got, batches, rank, ranks), alone, 1e-5)  # float32 parameters, three steps
    assert distributed.get_rank() == rank
