"""Checks of what is a GPU's alone: streams, waits and kernels, run by `ranks.py` over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_checks import WHOLE, assert_law, counted, loss_of, train
from ranks import EXACT, HOME
from shard_checks import assert_law as assert_sharded_law
from shard_checks import sharded
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import images, mlp, net, rows
from zero_checks import assert_bits

from cafin_cupy import CafinError
from cafin_cupy.adapters import torch_zero
from cafin_cupy.adapters.torch import AdaFisher


def replica(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], **options)


def check_the_kernels_serve(rank: int, ranks: int) -> None:
    """Parameters that are whole, and in parts."""
    for model in (replica(mlp(HOME)), sharded(mlp(HOME))):
        assert train(AdaFisher(model, TCov=1), rows(HOME, 2, WHOLE), rank, ranks).backend == "cuda"


def check_shard_state(rank: int, ranks: int) -> None:
    """The same bits as without, in float32 and with masters, through several buckets; of one process to rounding."""
    batches = images(HOME, *[WHOLE] * 5)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BUCKET", "LEAST"):
            patch.setattr(torch_zero, name, 100)
        for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"master_weights": True})):
            runs = []
            for share in (True, False):
                model = replica(net(HOME, norm=False).to(dtype))
                optimizer = AdaFisher(model, TCov=2, check_every=1, shard_state=share, **options)
                runs.append(train(optimizer, [x.to(dtype) for x in batches], rank, ranks))
            assert runs[0].backend == "cuda" and len(runs[0]._plan.shares.exchange._buckets) > 2
            assert_bits(*runs)
            if dtype is torch.float32:
                alone = train(AdaFisher(net(HOME, norm=False), TCov=2, dist=False), batches, 0, 1)
                assert_sharded_law(runs[0], alone, EXACT)


def check_shard_state_under_a_scaler(rank: int, ranks: int) -> None:
    """On unsampled steps the device alone knows the verdict: all send their rows, changed or not."""
    runs: list[AdaFisher] = []
    for share in (True, False):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        optimizer = AdaFisher(replica(mlp(HOME)), TCov=3, shard_state=share)
        for step, x in enumerate(rows(HOME, 7)):
            optimizer.zero_grad()
            bad = step in (0, 2, 5) and rank == ranks - 1
            scaler.scale(loss_of(optimizer.model, x) * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.steps == 4
        runs.append(optimizer)
    assert_bits(*runs)


def check_accumulation_without_synchronisation(rank: int, ranks: int) -> None:
    """Within no_sync() nothing is sent: one all-reduce of sums in the last backward."""
    batches = rows(HOME, 4, 24)
    model = replica(mlp(HOME))
    optimizer = AdaFisher(model, TCov=2)
    with counted() as sent:
        for x in batches:
            optimizer.zero_grad()
            first, second = x.tensor_split(ranks)[rank].chunk(2)
            with model.no_sync():
                (loss_of(model, first) / 2).backward()
            (loss_of(model, second) / 2).backward()
            optimizer.step()
    assert len(sent) == 4, sent  # agreement, two sampled steps, one repeat for the length of layer norms
    alone = train(AdaFisher(mlp(HOME), TCov=2, dist=False), batches, 0, 1)
    assert_law(optimizer, alone, EXACT)


def check_the_sums_are_sent_beside_the_backward_stream(rank: int, ranks: int) -> None:
    """The kernel of the factors' all-reduce runs on a stream of its own, that of DistributedDataParallel's."""
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=1)
    (x,) = rows(HOME, 1, 12)
    train(optimizer, [x, x], rank, ranks)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        optimizer.zero_grad()
        loss_of(optimizer.model, x).backward()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    streams: dict[bool, set[int]] = {True: set(), False: set()}
    for event in events:
        if not event.name.startswith(("Memcpy", "Memset")):
            streams["nccl" in event.name.lower()].add(event.device_resource_id)
    assert streams[True] and streams[False] and not streams[True] & streams[False], streams


def check_unsampled_steps_wait_for_nothing_and_send_nothing(rank: int, ranks: int) -> None:
    optimizer = AdaFisher(replica(net(HOME, norm=False)), TCov=4)
    for step, x in enumerate(images(HOME, *[WHOLE] * 8)):
        optimizer.zero_grad()
        loss_of(optimizer.model, x).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step % 4 else "default")
        with counted() as sent:
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        assert len(sent) == (step == 0), step  # once more for the length of layer norms


def check_offload_over_nccl_alone_is_refused(rank: int, ranks: int) -> None:
    """NCCL sends nothing from the CPU; the error says so, and what to do."""
    model = sharded(mlp(HOME), offload_policy=CPUOffloadPolicy())
    optimizer = AdaFisher(model, TCov=1)
    with pytest.raises(CafinError, match=r"a backend for tensors on cpu.*\"cpu:gloo,cuda:nccl\""):
        train(optimizer, rows(HOME, 1, WHOLE), rank, ranks)
    assert not optimizer.steps
