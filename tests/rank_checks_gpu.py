"""Checks of data parallel training with the kernels, on one GPU for each rank, run by `ranks.py` over NCCL."""

from __future__ import annotations

from typing import Any

import torch
from rank_checks import assert_law, counted, loss_of, train
from shard_checks import assert_law as assert_sharded_law
from shard_checks import sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import exact_float32, images, net, rows

from cafin_cupy.adapters.torch import AdaFisher


def replica(model: nn.Module, rank: int, **options: Any) -> Any:
    return DistributedDataParallel(model, device_ids=[rank], **options)


def check_law(rank: int, ranks: int) -> None:
    device, batches = f"cuda:{rank}", [x.to(f"cuda:{rank}") for x in images("cpu", *[12] * 5)]
    with exact_float32():
        for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
            model = replica(net(device, norm=False), rank, **options)
            got = train(AdaFisher(model, TCov=2, check_every=1), batches, rank, ranks)
            assert got.backend == "cuda"
            alone = train(AdaFisher(net(device, norm=False), TCov=2, dist=False), batches, 0, 1)
            assert_law(got, alone, 1e-5)  # float32, five steps


def check_fully_shard(rank: int, ranks: int) -> None:
    """The update runs on each rank's part, by the kernels; parts of some ranks are smaller."""
    device, batches = f"cuda:{rank}", [x.to(f"cuda:{rank}") for x in images("cpu", *[12] * 5)]
    with exact_float32():
        got = train(AdaFisher(sharded(net(device, norm=False)), TCov=2), batches, rank, ranks)
        assert got.backend == "cuda"
        assert_sharded_law(got, train(AdaFisher(net(device, norm=False), TCov=2, dist=False), batches, 0, 1), 1e-5)


def check_unsampled_steps_wait_for_nothing_and_send_nothing(rank: int, ranks: int) -> None:
    device = f"cuda:{rank}"
    optimizer = AdaFisher(replica(net(device, norm=False), rank), TCov=4)
    for step, x in enumerate(images("cpu", *[12] * 8)):
        optimizer.zero_grad()
        loss_of(optimizer.model, x.to(device)).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step % 4 else "default")
        with counted() as sent:
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        assert len(sent) == (step == 0), step  # once more for the length of layer norms


def check_a_scaler(rank: int, ranks: int) -> None:
    device, scaler = f"cuda:{rank}", torch.amp.GradScaler("cuda", init_scale=1024.0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    optimizer = AdaFisher(replica(model, rank), TCov=2, check_every=1)
    for step, x in enumerate(rows(device, 6)):
        optimizer.zero_grad()
        bad = step in (0, 3) and rank == ranks - 1
        scaler.scale(loss_of(optimizer.model, x) * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 4
