"""Checks of what befalls ranks that divide their state, run on every rank by `ranks.py`: files of another rank, another
process group, gradients that differ. It must go on or be told, and never be taken for the right thing."""

from __future__ import annotations

import io
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_checks import WHOLE, loss_of, replica, train
from ranks import BACKEND, HOME, PATIENCE, PRECISE, only
from shard_checks import whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_helpers import everything, mlp, rows, run
from zero_checks import assert_bits, averaged

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher


@only(2)
def check_files_of_another_rank_are_refused(rank: int, ranks: int) -> None:
    """`torch.save` on each rank saves its part, and is loaded by the same rank. That of another one has the right
    shape where rows are divided evenly, and would be taken for one's own."""
    for made in (lambda: nn.Linear(5, 4), lambda: nn.Linear(5, 3)):
        batches = [torch.randn(WHOLE, 5) for _ in range(4)]
        got = train(AdaFisher(replica(made()), TCov=2, shard_state=True), batches[:2], rank, ranks)
        buffer = io.BytesIO()
        torch.save(got.state_dict(), buffer)
        files = [b""] * ranks
        distributed.all_gather_object(files, buffer.getvalue())
        again = AdaFisher(replica(made()), TCov=2, shard_state=True)
        again.model.load_state_dict(got.model.state_dict())
        first, own = (torch.load(io.BytesIO(files[k]), weights_only=False) for k in (0, rank))
        before = everything(again)
        if rank:
            with pytest.raises(CafinError, match=r"state\[0\]\['exp_avg'\]` must be this rank's part .*each rank"):
                again.load_state_dict(first)
            assert everything(again).keys() == before.keys() and not again.steps
        again.load_state_dict(own)
        for optimizer in (got, again):
            train(optimizer, batches[2:], rank, ranks)
        assert_bits(again, got)


@only(2)
def check_a_step_within_join_is_refused(rank: int, ranks: int) -> None:
    """Though it is not a sampled one: ranks that have run out of data do not answer the all-gather."""
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=100, shard_state=True)
    (x,) = rows(HOME, 1, WHOLE)
    train(optimizer, [x], rank, ranks)
    before = whole(everything(optimizer))
    model: Any = optimizer.model
    model._join_config = model._join_config._replace(enable=True)  # as within `join()`, from which no rank returns now
    with pytest.raises(CafinError, match=r"outside of DistributedDataParallel's join\(\)"):
        train(optimizer, [x], rank, ranks)
    model._join_config = model._join_config._replace(enable=False)
    after = whole(everything(optimizer))
    assert all(torch.equal(after[name], value) for name, value in before.items() if isinstance(value, Tensor))
    train(optimizer, [x], rank, ranks)
    assert optimizer.steps == 2


class Restarted:
    """Without a process group, and behind it with another one of the same ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        name = [tempfile.mktemp() if rank == 0 else ""]
        distributed.broadcast_object_list(name)
        self.options: dict[str, Any] = {"init_method": f"file://{name[0]}", "rank": rank, "world_size": ranks}

    def __enter__(self) -> None:
        distributed.destroy_process_group()

    def __exit__(self, *_: Any) -> None:
        distributed.init_process_group(BACKEND, timeout=timedelta(seconds=PATIENCE), **self.options)


@only(2)
def check_sharded_layers_that_join_are_refused(rank: int, ranks: int) -> None:
    """As they are by the constructor; and the others train on."""
    got, plain = (AdaFisher(mlp(HOME).to(PRECISE), TCov=2, shard_state=share) for share in (True, False))
    first, second = (x.to(PRECISE) for x in rows(HOME, 2, WHOLE))
    for optimizer in (got, plain):
        averaged(optimizer, first, rank, ranks)
    got.model.append(fully_shard(nn.Linear(got.model[3].out_features, 3).to(PRECISE)))
    with pytest.raises(CafinError, match="`shard_state` must be False in a model that is sharded itself"):
        got.add_param_group({"params": got.model[4].parameters()})
    del got.model[4]
    for optimizer in (got, plain):
        averaged(optimizer, second, rank, ranks)
    assert_bits(got, plain)


@only(2)
def check_another_process_group(rank: int, ranks: int) -> None:
    """Steps follow it though none is sampled; and without one a process does not take its parts for all."""
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    runs = [AdaFisher(mlp(HOME).to(PRECISE), TCov=100, shard_state=share) for share in (True, False)]
    got, plain = runs
    for optimizer in runs:
        for x in batches[:2]:
            averaged(optimizer, x, rank, ranks)
    before = [p.detach().clone() for p in got.model.parameters()]
    with Restarted(rank, ranks):
        loss_of(got.model, batches[2]).backward()
        with pytest.raises(CafinError, match=r"momentum of 0.weight` must be whole"):
            got.step()
        assert got.steps == 2 and all(map(torch.equal, before, got.model.parameters()))
    for optimizer in runs:
        for x in batches[2:]:
            averaged(optimizer, x, rank, ranks)
    assert got._plan.shares.exchange.group is distributed.group.WORLD
    assert_bits(got, plain)  # whose momenta are gathered by the new one


@only(2)
def check_a_process_group_behind_the_first_steps(rank: int, ranks: int) -> None:
    """The state that was whole is divided at once, not when something else has moved."""
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    runs = [AdaFisher(mlp(HOME).to(PRECISE), TCov=100, shard_state=share) for share in (True, False)]
    with Restarted(rank, ranks):
        for optimizer in runs:
            run(optimizer, batches[:2])
    for optimizer in runs:
        for x in batches[2:]:
            averaged(optimizer, x, rank, ranks)
    assert all(isinstance(state["exp_avg"], DTensor) for state in runs[0].state.values())
    assert_bits(*runs)


@only(2)
def check_gradients_that_differ_are_told(rank: int, ranks: int) -> None:
    """Behind the all-gather parameters are the same on all ranks, whatever gradients they have followed."""
    (x,) = rows(HOME, 1, WHOLE)
    for spoil in ("different", "missing"):
        optimizer = AdaFisher(mlp(HOME), TCov=100, check_every=1, shard_state=True)
        averaged(optimizer, x, rank, ranks)
        optimizer.zero_grad()
        loss_of(optimizer.model, x + float(rank and spoil == "different")).backward()
        if rank and spoil == "missing":
            optimizer.model[3].weight.grad = None
        said = "gradient of 0.weight must be the same" if spoil == "different" else "state of the same parameters"
        with pytest.raises(CafinError, match=f"step: .*{said}"):
            optimizer.step()
