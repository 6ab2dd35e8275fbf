"""Checks of state that the ranks divide (ZeRO), run on every rank by `ranks.py`: they are plain data parallel training,
to the bit, and so one process with the whole batch."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
from rank_checks import TOLERANCES, WHOLE, loss_of, net_of, replica, train
from ranks import HOME, PRECISE, only
from shard_checks import assert_law, load, saved, whole
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_helpers import Tokens, everything, images, mlp, rows

from cafin_cupy import CafinError
from cafin_cupy.adapters import torch_zero
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW
from cafin_cupy.adapters.torch_ranks import compare_ranks


def assert_bits(got: AdaFisher, plain: AdaFisher) -> None:
    """Parameters, gathered state, factors and counters are those of another run."""
    one, other = whole(everything(got)), whole(everything(plain))
    assert one.keys() == other.keys()
    for name, value in other.items():
        same = torch.equal(one[name], value) if isinstance(value, Tensor) else one[name] == value
        assert same, name


def pair(make: Any, kind: Any = AdaFisher, **options: Any) -> tuple[AdaFisher, AdaFisher]:
    """The same model twice: state divided, and not."""
    return kind(replica(make()), shard_state=True, **options), kind(replica(make()), **options)


def check_law(rank: int, ranks: int) -> None:
    """Rows that the ranks do not divide, biases, several types of layers and dtypes."""
    for dtype, averaging, kind in (
        (torch.float32, "parity", AdaFisher),
        (torch.float64, "parity", AdaFisherW),
        (torch.float64, "paper", AdaFisher),
    ):
        options: dict[str, Any] = {"TCov": 2, "averaging": averaging, "weight_decay": 1e-2}
        batches = [x.to(dtype) for x in images(HOME, *[WHOLE] * 5)]
        got, plain = pair(lambda dtype=dtype: net_of(dtype), kind, check_every=1, **options)
        for optimizer in (got, plain):
            train(optimizer, batches, rank, ranks)
        assert_bits(got, plain)
        compare_ranks(got, distributed.group.WORLD)
        alone = train(kind(net_of(dtype), dist=False, **options), batches, 0, 1)
        assert_law(got, alone, TOLERANCES[dtype])


def check_each_rank_keeps_its_share(rank: int, ranks: int) -> None:
    """Of momentum and masters 1/n of the bytes, and what rows do not divide evenly; `summary` tells it."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16, bias=False), nn.Linear(16, 3)).bfloat16()

    optimizers = pair(made, master_weights=True)
    told = [optimizer.summary() for optimizer in optimizers]
    held = []
    for optimizer, before in zip(optimizers, told):
        train(optimizer, [torch.randn(WHOLE, 64).bfloat16()], rank, ranks)
        parts = [x._local_tensor if isinstance(x, DTensor) else x for s in optimizer.state.values() for x in s.values()
                 if isinstance(x, Tensor)]  # fmt: skip
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in parts)  # they keep nothing larger alive
        after = optimizer.summary()
        assert sum(x.nbytes for x in parts) == after.momentum + after.masters == before.momentum + before.masters
        held.append(after)
    mine, plain = held
    rows = {128: 128 // ranks, 16: 16 // ranks, 3: max(0, min(-(-3 // ranks), 3 - rank * -(-3 // ranks)))}
    elements = rows[128] * (64 + 1) + rows[16] * 128 + rows[3] * (16 + 1)
    assert mine.momentum == mine.masters == 4 * elements
    assert mine.factors == plain.factors and mine.parameters == plain.parameters
    assert ranks * mine.momentum < 1.02 * plain.momentum


@only(2)
def check_sixteen_bits_with_masters_and_momenta(rank: int, ranks: int) -> None:
    batches = [x.bfloat16() for x in rows(HOME, 4, WHOLE)]
    for options in ({"master_weights": True}, {"momentum_dtype": torch.bfloat16}, {}):
        got, plain = pair(lambda: mlp(HOME).bfloat16(), TCov=2, **options)
        assert_bits(train(got, batches, rank, ranks), train(plain, batches, rank, ranks))


@only(4)
def check_many_buckets(rank: int, ranks: int) -> None:
    """Smaller than parameters, so that these are sent in pieces, and both buffers are used again."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    for elements in (2, 5, 10):
        room = elements * PRECISE.itemsize
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_zero, "BUCKET", room * ranks)
            patch.setattr(torch_zero, "LEAST", room)
            got, plain = pair(lambda: mlp(HOME).to(PRECISE), TCov=2)
            assert_bits(train(got, batches, rank, ranks), train(plain, batches, rank, ranks))
            exchange = got._plan.shares.exchange
            assert len(exchange._buckets) > 2 and all(b.sent.nbytes <= room for b in exchange._buckets)
            assert len({b.gathered.data_ptr() for b in exchange._buckets}) == 2


class Odd(nn.Module):
    """Parameters of other layouts, and of none: a scalar, a transposed one, channels_last, one that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.shift = nn.Parameter(torch.zeros(1, 4))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.turned.t() * self.scale + self.shift


@only(4)
def check_parameters_of_other_layouts(rank: int, ranks: int) -> None:
    # Not PRECISE: the kernels refuse the transposed one, the reference serves it.
    batches = [x.double() for x in images(HOME, *[WHOLE] * 3)]
    made = [replica(Odd().double(), find_unused_parameters=True) for _ in range(2)]
    got = train(AdaFisher(made[0], TCov=1, shard_state=True), batches, rank, ranks)
    assert_bits(got, train(AdaFisher(made[1], TCov=1), batches, rank, ranks))
    divided = {name: isinstance(got.state.get(p, {}).get("exp_avg"), DTensor) for name, p in made[0].named_parameters()}
    whole_ones = {"module.scale", "module.turned", "module.unused.weight", "module.unused.bias"}
    assert {name for name, is_divided in divided.items() if not is_divided} == whole_ones


@only(4)
def check_groups_and_layers_that_join(rank: int, ranks: int) -> None:
    """Several groups, one frozen parameter that thaws, and a layer that is added behind the first steps."""
    batches = [x.to(PRECISE) for x in rows(HOME, 6, WHOLE)]
    runs = []
    for share in (True, False):
        model = mlp(HOME).to(PRECISE)
        model[3].weight.requires_grad_(False)
        groups = [{"params": ["*bias"], "weight_decay": 0.1, "lr": 0.01}]
        optimizer = AdaFisher(model, TCov=2, param_groups=groups, shard_state=share)
        for number, x in enumerate(batches):
            if number == 2:
                model[3].weight.requires_grad_(True)
            if number == 4:
                torch.manual_seed(2)
                model.append(nn.Linear(model[3].out_features, 3).to(PRECISE))
                optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})
            averaged(optimizer, x, rank, ranks)
        runs.append(optimizer)
    assert_bits(*runs)


def averaged(optimizer: AdaFisher, x: Tensor, rank: int, ranks: int) -> None:
    """A step of a script that averages gradients itself."""
    optimizer.zero_grad()
    loss_of(optimizer.model, x.tensor_split(ranks)[rank]).backward()
    for p in optimizer.model.parameters():
        if p.grad is not None:
            distributed.all_reduce(p.grad)
            p.grad /= ranks
    optimizer.step()


@only(2)
def check_accumulation_without_synchronisation(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, 2 * WHOLE)]
    runs = pair(lambda: mlp(HOME).to(PRECISE), TCov=2)
    for optimizer in runs:
        for x in batches:
            optimizer.zero_grad()
            first, second = x.tensor_split(ranks)[rank].chunk(2)
            with optimizer.model.no_sync():
                (loss_of(optimizer.model, first) / 2).backward()
            (loss_of(optimizer.model, second) / 2).backward()
            nn.utils.clip_grad_norm_(optimizer.model.parameters(), 0.01)
            optimizer.step()
    assert_bits(*runs)


@only(2)
def check_a_scaler_skips_on_all_ranks(rank: int, ranks: int) -> None:
    """The averages hold the inf of one rank, so that all decide alike, and none waits for an update of another."""
    runs = pair(lambda: mlp(HOME), TCov=2)
    for optimizer in runs:
        scaler = torch.amp.GradScaler(HOME, init_scale=1024.0)
        for step, x in enumerate(rows(HOME, 6, WHOLE)):
            optimizer.zero_grad()
            bad = step in (0, 2, 3) and rank == ranks - 1
            mine = loss_of(optimizer.model, x.tensor_split(ranks)[rank])
            scaler.scale(mine * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.steps == 3
    assert_bits(*runs)


@only(4)
def check_a_group_of_some_ranks(rank: int, ranks: int) -> None:
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    group = groups[rank % 2]
    batches = [x.to(PRECISE) + rank % 2 for x in rows(HOME, 3, WHOLE)]
    runs = []
    for share in (True, False):
        model = replica(mlp(HOME).to(PRECISE), process_group=group)
        runs.append(train(AdaFisher(model, TCov=1, shard_state=share), batches, rank // 2, 2))
    assert_bits(*runs)
    momentum = runs[0].state[runs[0].model.module[0].weight]["exp_avg"]
    assert momentum.to_local().shape[0] == (4 if rank < 2 else 3)


@only(2)
def check_parameters_without_layers_and_frozen_ones(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]

    def made() -> nn.Module:
        model = Tokens().to(PRECISE)
        model.fc.weight.requires_grad_(False)
        return model

    got, plain = pair(made, TCov=1)
    assert_bits(train(got, batches, rank, ranks), train(plain, batches, rank, ranks))


def check_state_dicts_of_whole_tensors(rank: int, ranks: int) -> None:
    """Of one process, or of ranks that do not divide; and the other way round, gathered on the first rank."""
    batches = [x.to(PRECISE) for x in rows(HOME, 5, WHOLE)]
    plain = train(AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=2), batches[:3], rank, ranks)
    source, given = plain, copy.deepcopy(plain.state_dict())
    got, plain = pair(lambda: mlp(HOME).to(PRECISE), TCov=2)  # both new, as old wrappers add in another order
    for optimizer in (got, plain):
        optimizer.model.load_state_dict(source.model.state_dict())
        optimizer.load_state_dict(given)
        assert_bits(optimizer, source)
    assert all(isinstance(state["exp_avg"], DTensor) for state in got.state.values())
    with pytest.raises(CafinError, match=r"state\[0\]\['exp_avg'\].*be whole, as its parameter is"):
        plain.load_state_dict(got.state_dict())
    for optimizer in (got, plain):
        train(optimizer, batches[3:], rank, ranks)
    assert_bits(got, plain)
    options = state_dicts.StateDictOptions(full_state_dict=True)
    state = state_dicts.get_optimizer_state_dict(got.model, got, options=options)
    back = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=2)
    state_dicts.set_optimizer_state_dict(back.model, back, state, options=options)
    back.model.load_state_dict(got.model.state_dict())
    assert_bits(back, plain)
    again = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=2, shard_state=True)
    state_dicts.set_optimizer_state_dict(again.model, again, state, options=options)
    again.model.load_state_dict(got.model.state_dict())
    assert_bits(again, plain)
    other = torch.optim.AdamW(mlp(HOME).to(PRECISE).parameters())
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    for optimizer in (got, plain):
        optimizer.load_momentum(other.state_dict())
        train(optimizer, batches[:1], rank, ranks)
    assert_bits(got, plain)


@only(2)
def check_state_that_was_whole_when_it_was_loaded(rank: int, ranks: int) -> None:
    """As where the process group is made behind the optimizer, or a script replaces a momentum."""
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    got, plain = pair(lambda: mlp(HOME).to(PRECISE), TCov=2)
    for optimizer in (got, plain):
        train(optimizer, batches[:2], rank, ranks)
    for p, state in got.state.items():
        state["exp_avg"] = state["exp_avg"].full_tensor()
        assert state["exp_avg"].shape == p.shape
    for optimizer in (got, plain):
        train(optimizer, batches[2:], rank, ranks)
    assert all(isinstance(state["exp_avg"], DTensor) for state in got.state.values())
    assert_bits(got, plain)


@only(4)
def check_checkpoints_of_other_numbers_of_ranks(rank: int, ranks: int) -> None:
    """Saved by n ranks and loaded by m, with and without division, a run ends where one without interruption does."""
    batches = [x.to(PRECISE) for x in images(HOME, *[WHOLE] * 5)]
    alone = train(AdaFisher(net_of(PRECISE), TCov=2, dist=False), batches, 0, 1)
    halves = [distributed.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    pair_of: dict[str, Any] = {"process_group": halves}

    def by(number: int, share: bool) -> tuple[AdaFisher, tuple[int, int], dict[str, Any]]:
        model: Any = net_of(PRECISE)
        if number == 1:
            return AdaFisher(model, TCov=2, dist=False), (0, 1), {"no_dist": True}
        some = {"process_group": halves} if number == 2 else {}
        optimizer = AdaFisher(replica(model, **some), TCov=2, shard_state=share)
        return optimizer, (rank % 2, 2) if number == 2 else (rank, 4), pair_of if number == 2 else {}

    for before, after in (
        ((2, True), (4, True)),
        ((4, True), (2, True)),
        ((4, True), (1, False)),
        ((1, False), (4, True)),
        ((4, True), (4, False)),
        ((4, False), (2, True)),
    ):
        shared = [tempfile.mkdtemp() if rank == 0 else ""]
        distributed.broadcast_object_list(shared)
        optimizer, share, options = by(*before)
        train(optimizer, batches[:3], *share)
        if rank < before[0]:
            dcp.save(saved(optimizer), checkpoint_id=shared[0], **options)
        distributed.barrier()
        optimizer, share, options = by(*after)
        train(load(optimizer, shared[0], **options), batches[3:], *share)
        assert_law(optimizer, alone)
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(shared[0])


@only(2)
def check_copies(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    got, plain = (AdaFisher(mlp(HOME).to(PRECISE), TCov=2, shard_state=share) for share in (True, False))
    for x in batches[:2]:
        averaged(got, x, rank, ranks)
    twin = copy.deepcopy(got)
    assert_bits(twin, got)
    for optimizer, taken in ((twin, batches[2:]), (plain, batches)):
        for x in taken:
            averaged(optimizer, x, rank, ranks)
    assert_bits(twin, plain)
    assert isinstance(twin.state[twin.model[0].weight]["exp_avg"], DTensor)


@only(2)
def check_comparison_of_ranks(rank: int, ranks: int) -> None:
    """Parts of momentum differ, as they should; what should not is told."""
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=1, check_every=1, shard_state=True)
    train(optimizer, rows(HOME, 2, WHOLE), rank, ranks)
    optimizer.factors()["module.3"][1][0] += float(rank == 1)
    with pytest.raises(CafinError, match="must be the same on all"):
        train(optimizer, rows(HOME, 1, WHOLE), rank, ranks)


@only(2)
def check_nonfinite_is_refused_on_all_ranks(rank: int, ranks: int) -> None:
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=4, error_if_nonfinite=True, shard_state=True)
    (x,) = rows(HOME, 1, WHOLE)
    train(optimizer, [x], rank, ranks)
    before = whole(everything(optimizer))
    with pytest.raises(CafinError, match="gradient of module"):
        train(optimizer, [x * float("inf") if rank else x], rank, ranks)
    after = whole(everything(optimizer))
    assert all(torch.equal(after[name], x) for name, x in before.items() if isinstance(x, Tensor))
    train(optimizer, [x], rank, ranks)
    assert optimizer.steps == 2


@only(2)
def check_what_cannot_be_served_is_refused(rank: int, ranks: int) -> None:
    for options, match in (
        ({"capturable": True}, "`shard_state` must be False with capturable=True"),
        ({"stochastic_rounding": True}, "`shard_state` must be False with stochastic_rounding=True"),
        ({"dist": False}, "`shard_state` must be False with dist=False"),
        ({"shard_state": "yes"}, "`shard_state` must be"),
    ):
        with pytest.raises(CafinError, match=match):
            AdaFisher(mlp(HOME), **{"shard_state": True, **options})
    with pytest.raises(CafinError, match="`shard_state` must be False in a model that is sharded itself"):
        AdaFisher(fully_shard(mlp(HOME)), shard_state=True)
    with pytest.raises(CafinError, match="curvature: momenta must be whole on each rank"):
        AdaFisher(replica(mlp(HOME)), shard_state=True).curvature()
    optimizer = AdaFisher(mlp(HOME), shard_state=rank == 0)  # not on all
    before = everything(optimizer)
    loss_of(optimizer.model, rows(HOME, 1)[0]).backward()
    with pytest.raises(CafinError, match="must have the same precision, seed and other options"):
        optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in everything(optimizer).items() if isinstance(x, Tensor))


@only(2)
def check_a_step_that_is_refused_changes_nothing(rank: int, ranks: int) -> None:
    """And the next one goes on, as nobody has sent anything."""
    got, plain = pair(lambda: mlp(HOME).to(PRECISE), TCov=2)
    first, second = (x.to(PRECISE) for x in rows(HOME, 2, WHOLE))
    train(got, [first], rank, ranks)
    before = whole(everything(got))
    got.param_groups[0]["lr"] = -1.0
    with pytest.raises(CafinError, match="lr"):
        train(got, [second], rank, ranks)
    got.param_groups[0]["lr"] = plain.param_groups[0]["lr"]
    after = whole(everything(got))
    assert all(torch.equal(after[name], x) for name, x in before.items() if isinstance(x, Tensor))
    assert_bits(train(got, [second], rank, ranks), train(plain, [first, second], rank, ranks))
