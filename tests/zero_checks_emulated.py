"""Checks of state that the ranks divide, by the kernels on an emulated GPU, run on every rank by `ranks.py`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from emulation import device
from rank_checks import WHOLE, loss_of, replica, train
from shard_checks import sharded
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch_helpers import images, mlp, net, rows
from zero_checks import assert_bits, pair

from cafin_cupy.adapters.torch import AdaFisher


@contextmanager
def emulated() -> Iterator[None]:
    device.install()
    with pytest.MonkeyPatch.context() as patch:
        device.lend_torch(patch)
        yield


def check_law(rank: int, ranks: int) -> None:
    """Rows that begin anywhere in memory, so that some parts are read by four elements at once and others are not."""
    with emulated():
        got, plain = pair(lambda: net("cpu", norm=False), TCov=2, weight_decay=1e-2)
        for optimizer in (got, plain):
            train(optimizer, images("cpu", *[WHOLE] * 4), rank, ranks)
            assert optimizer.backend == "cuda"
        assert_bits(got, plain)


def check_sixteen_bits_and_channels_last(rank: int, ranks: int) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(216, 5))
        return model.to(torch.bfloat16, memory_format=torch.channels_last)

    batches = [torch.randn(WHOLE, 3, 8, 8, dtype=torch.bfloat16) for _ in range(4)]
    with emulated():
        for options in ({"master_weights": True}, {"momentum_dtype": torch.bfloat16}):
            got, plain = pair(made, TCov=2, **options)
            assert_bits(train(got, batches, rank, ranks), train(plain, batches, rank, ranks))


def check_a_scaler_whose_verdict_the_device_reads(rank: int, ranks: int) -> None:
    with emulated():
        runs = pair(lambda: mlp("cpu"), TCov=3)
        for optimizer in runs:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step, x in enumerate(rows("cpu", 7, WHOLE)):
                optimizer.zero_grad()
                bad = step in (0, 2, 5) and rank == ranks - 1
                mine = loss_of(optimizer.model, x.tensor_split(ranks)[rank])
                scaler.scale(mine * (float("inf") if bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert optimizer._skips is not None and optimizer.steps == 4
        assert_bits(*runs)


def check_a_parameter_without_gradient(rank: int, ranks: int) -> None:
    with emulated():
        runs = [AdaFisher(mlp("cpu"), TCov=2, shard_state=share) for share in (True, False)]
        for optimizer in runs:
            for step, x in enumerate(rows("cpu", 4, WHOLE)):
                optimizer.zero_grad()
                loss_of(optimizer.model, x).backward()
                if step in (0, 2):
                    optimizer.model[3].weight.grad = None
                optimizer.step()
        assert_bits(*runs)


def check_fully_shard(rank: int, ranks: int) -> None:
    """The parts of FSDP2 by the same kernels."""
    with emulated():
        got = train(AdaFisher(sharded(mlp("cpu")), TCov=2), rows("cpu", 4, WHOLE), rank, ranks)
        assert got.backend == "cuda"
        plain = train(AdaFisher(replica(mlp("cpu")), TCov=2), rows("cpu", 4, WHOLE), rank, ranks)
        assert_bits(got, plain)  # sums of two, in whatever order


def check_momentum_that_a_script_replaces(rank: int, ranks: int) -> None:
    """By a whole one, of another layout than the parameter's or divided along columns: a rank takes its part of it, in
    the parameter's layout, and keeps no more alive."""

    def made(memory_format: torch.memory_format) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(216, 5)).to(memory_format=memory_format)

    batches = [torch.randn(WHOLE, 4, 8, 8) for _ in range(4)]
    columns = {"shard_placement_fn": lambda p: Shard(min(1, p.dim() - 1))}
    with emulated():
        last, first = made(torch.channels_last), made(torch.contiguous_format)
        for got, plain in (
            (AdaFisher(replica(last), TCov=2, shard_state=True), AdaFisher(replica(copy.deepcopy(last)), TCov=2)),
            (AdaFisher(sharded(copy.deepcopy(first), **columns), TCov=2), AdaFisher(replica(first), TCov=2)),
        ):
            for optimizer in (got, plain):
                train(optimizer, batches[:2], rank, ranks)
                for state in optimizer.state.values():
                    average = state["exp_avg"]
                    whole = average.full_tensor() if isinstance(average, DTensor) else average
                    state["exp_avg"] = whole.clone(memory_format=torch.contiguous_format)
                train(optimizer, batches[2:], rank, ranks)
            assert_bits(got, plain)  # sums of two, in whatever order
            parts = [state["exp_avg"].to_local() for state in got.state.values()]
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in parts)
