"""Checks of what several ranks must have in common, run on every rank by `ranks.py`: it is refused, or told, on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_checks import WHOLE, assert_law, loss_of, replica, train, train_apart
from ranks import EXACT, HOME, PRECISE
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import assert_same, everything, mlp, near, rows

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher
from cafin_cupy.adapters.torch_ranks import compare_ranks


def check_ranks_that_differ_are_told(rank: int, ranks: int) -> None:
    """By the first tensor that does, on all ranks."""
    optimizer = AdaFisher(mlp(HOME), check_every=2)
    for x in rows(HOME, 2):
        train_apart(optimizer, x)
    with torch.no_grad():
        optimizer.model[3].weight[0, 0] += float(rank == 1)
    optimizer.step()
    with pytest.raises(CafinError, match=rf"step: parameter 3.weight must be the same on all {ranks} ranks"):
        optimizer.step()
    if rank == 0:
        del optimizer.state[optimizer.model[3].bias]
        optimizer.model[3].bias.grad = None
    with pytest.raises(CafinError, match=r"must have the state of the same parameters and layers"):
        compare_ranks(optimizer, distributed.group.WORLD)


def check_other_models_and_options_are_refused(rank: int, ranks: int) -> None:
    """On all ranks, before anything is sent that would not fit, or drift."""
    first = rank == 0
    for what, width, options in (
        ("layers", 7 + rank, {}),
        ("TCov and averaging", 7, {"TCov": 1 + rank}),
        ("parameter groups", 7, {"lr": 1e-3 * (1 + rank)}),
        ("parameter groups", 7, {"param_groups": [{"params": ["bias" if first else "weight"]}]}),
        ("precision, seed and other options", 7, {"stochastic_rounding": True, "seed": rank}),
        ("precision, seed and other options", 7, {"momentum_dtype": torch.bfloat16 if first else None}),
        ("precision, seed and other options", 7, {"check_every": 1 if first else None}),
    ):
        optimizer = AdaFisher(nn.Linear(5, width), **{"TCov": 1, **options})
        before = everything(optimizer)
        loss_of(optimizer.model, rows(HOME, 1)[0]).backward()
        with pytest.raises(CafinError, match=f"must have the same {what}"):
            optimizer.step()
        assert_same(optimizer, before)
        apart = AdaFisher(nn.Linear(5, width), dist=False, **{"TCov": 1, **options})
        train_apart(apart, rows(HOME, 1)[0])


def check_a_state_that_one_rank_alone_has_loaded_is_refused(rank: int, ranks: int) -> None:
    """Its coming step is not a sampled one, that of the others is."""
    source = train(AdaFisher(mlp(HOME), TCov=2, dist=False), rows(HOME, 3), 0, 1)
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=2)
    if rank == 0:
        optimizer.load_state_dict(source.state_dict())
    with pytest.raises(CafinError, match=r"must have the same steps taken"):
        train(optimizer, rows(HOME, 1, WHOLE), rank, ranks)
    optimizer.zero_grad()
    optimizer.load_state_dict(source.state_dict())  # on all, in the middle of a run
    train(optimizer, rows(HOME, 2, WHOLE), rank, ranks)
    compare_ranks(optimizer, distributed.group.WORLD)


class Parted(nn.Module):
    """Each layer in a wrapper of its own."""

    def __init__(self, *groups: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 7).to(PRECISE), nn.Linear(7, 3).to(PRECISE)
        if groups:
            self.a, self.b = (DistributedDataParallel(x, process_group=g) for x, g in zip((self.a, self.b), groups))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def check_wrappers_within_the_model(rank: int, ranks: int) -> None:
    """Their group is that of the factors, too."""
    half = ranks // 2
    groups = [distributed.new_group(list(range(first, first + half))) for first in (0, half)]
    mine, everyone = groups[rank // half], distributed.group.WORLD
    batches = [x.to(PRECISE) + rank // half for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(Parted(), TCov=1, dist=False), batches, 0, 1)
    got = train(AdaFisher(Parted(mine, mine), TCov=1), batches, rank % half, half)
    for one, other in zip(got.factors().values(), alone.factors().values()):
        for letter, x, y in zip("HS", one, other):
            near(x, y, letter, EXACT)
    with pytest.raises(CafinError, match="`dist` must not be False in DistributedDataParallel"):
        AdaFisher(Parted(everyone, everyone), dist=False)
    with pytest.raises(CafinError, match="`model` must be shared by the same ranks in all its Distributed"):
        AdaFisher(Parted(everyone, mine))


def check_what_cannot_be_served_is_refused(rank: int, ranks: int) -> None:
    model = replica(mlp(HOME))
    with pytest.raises(CafinError, match="`dist` must not be False in DistributedDataParallel or fully_shard"):
        AdaFisher(model, dist=False)
    optimizer = AdaFisher(model, TCov=1)
    with model.join(), pytest.raises(CafinError, match=r"outside of DistributedDataParallel's join\(\)"):
        loss_of(model, rows(HOME, 1)[0])
    assert optimizer.steps == 0


def check_nonfinite_is_refused_on_all_ranks(rank: int, ranks: int) -> None:
    """With the batch left out, training goes on."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    optimizer = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=1, error_if_nonfinite=True)
    with optimizer.model.no_sync():
        loss_of(optimizer.model, batches[0]).backward()
    optimizer._factors.accumulate(
        0, torch.full((1, 5), float("inf") if rank else 1.0).to(PRECISE), torch.ones(1, 7).to(PRECISE)
    )
    before = everything(optimizer)
    with pytest.raises(CafinError, match=r"raw H of module\.0"):
        optimizer.step()
    assert_same(optimizer, before)
    train(optimizer, batches, rank, ranks)
    assert_law(optimizer, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1), EXACT)
