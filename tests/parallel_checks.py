"""Checks of tensor parallel training, run on every rank by `ranks.py`: it is one process with the whole batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RAW
from rank_checks import counted
from ranks import EXACT, HOME, PRECISE, only
from shard_checks import assert_law, load, saved
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint as recomputed

from cafin_cupy import CafinError, NonFiniteError
from cafin_cupy.adapters import torch_compiled
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW
from cafin_cupy.adapters.torch_parallel import settled

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}  # as in rank_checks.py
BATCH, LENGTH, WORDS, WIDTH, HIDDEN = 4, 4, 11, 8, 12


class Block(nn.Module):
    """What a transformer's is, as far as its layers go."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.first, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.last, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.down(torch.tanh(self.up(self.first(x))))
        return self.head(self.last(x))


def block(dtype: torch.dtype = PRECISE) -> Block:
    torch.manual_seed(2)
    return Block().to(dtype)


def data(steps: int, batch: int = BATCH, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(5)
    return list(torch.randint(WORDS, (steps, batch, length)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The next word of each is the one behind it, around the end."""
    out = model(x)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    return nn.functional.cross_entropy(out.flatten(0, 1), x.roll(1, -1).flatten())


def train(optimizer: AdaFisher, batches: list[Tensor], part: int = 0, parts: int = 1) -> AdaFisher:
    for x in batches:
        optimizer.zero_grad()
        loss_of(optimizer.model, x.tensor_split(parts)[part]).backward()
        optimizer.step()
    return optimizer


def plain_plan() -> dict[str, Any]:
    """Norms on every rank."""
    return {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, Any]:
    """Norms see a part of the sequence."""
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def mixed_plan() -> dict[str, Any]:
    """The table's columns; a head that leaves a DTensor; inputs that a module prepares."""
    return {
        "words": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "last": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True),
        "head": ColwiseParallel(use_local_output=False),
    }


PLANS: list[Callable[[], dict[str, Any]]] = [plain_plan, sequence_plan, mixed_plan]


def check_law(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(HOME, (ranks,))
    for dtype, averaging, kind, plans in (
        (torch.float32, "parity", AdaFisher, PLANS[1:2]),
        (torch.float64, "parity", AdaFisherW, PLANS[:1]),
        (torch.float64, "paper", AdaFisher, PLANS),
    ):
        options: dict[str, Any] = {"TCov": 2, "averaging": averaging, "weight_decay": 1e-2}
        alone = train(kind(block(dtype), dist=False, **options), data(3))
        for plan in plans:
            optimizer = kind(parallelize_module(block(dtype), mesh, plan()), check_every=1, **options)
            assert_law(train(optimizer, data(3)), alone, TOLERANCES[dtype])


@only(4)
def check_with_shards(rank: int, ranks: int) -> None:
    """`fully_shard` on the other axis of the mesh: two losses, each of a team of two ranks."""
    mesh = init_device_mesh(HOME, (2, 2), mesh_dim_names=("data", "team"))
    for dtype, options in ((torch.float64, {"averaging": "paper"}), (torch.float32, {})):
        alone = train(AdaFisher(block(dtype), dist=False, TCov=2, **options), data(3))
        for plan in PLANS:
            model = parallelize_module(block(dtype), mesh["team"], plan())
            for layer in model.children():
                fully_shard(layer, mesh=mesh["data"])
            optimizer = AdaFisher(fully_shard(model, mesh=mesh["data"]), TCov=2, **options)
            with counted() as sent:
                train(optimizer, data(3), rank // 2, 2)
            assert len(sent) == 2 + 2, sent  # sampled steps, agreement and the length of layer norms
            assert_law(optimizer, alone, TOLERANCES[dtype])
            up = optimizer.state[optimizer.model.up.weight]["exp_avg"]
            assert up.to_local().shape == (HIDDEN // 4, WIDTH)


@only(4)
def check_features_that_the_ranks_do_not_divide(rank: int, ranks: int) -> None:
    """Some ranks have fewer, or none."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1), nn.Linear(1, 7)).to(PRECISE)

    plan = {
        "0": ColwiseParallel(use_local_output=False),  # local ones would count as equally long
        "2": RowwiseParallel(),
        "3": ColwiseParallel(output_layouts=Replicate()),
    }
    torch.manual_seed(3)
    batches = list(torch.randn(3, 6, 5, dtype=PRECISE))
    mesh = init_device_mesh(HOME, (ranks,))
    got, alone = AdaFisher(parallelize_module(made(), mesh, plan), TCov=1), AdaFisher(made(), TCov=1, dist=False)
    for x in batches:
        for optimizer in (got, alone):
            optimizer.zero_grad()
            optimizer.model(x).square().mean().backward()
            optimizer.step()
    assert_law(got, alone)


def check_accumulation_over_sequences_of_different_lengths(rank: int, ranks: int) -> None:
    """A norm's part of the sequence then lies elsewhere in each micro-batch."""
    lengths = 2 * ranks, ranks, 3 * ranks
    mesh = init_device_mesh(HOME, (ranks,))
    got = AdaFisher(parallelize_module(block(), mesh, sequence_plan()), TCov=1, averaging=RAW)
    alone = AdaFisher(block(), TCov=1, averaging=RAW, dist=False)
    for optimizer in (got, alone):
        for step in range(2):
            optimizer.zero_grad()
            for length in lengths[step:]:
                loss_of(optimizer.model, data(1, length=length)[0]).backward()
            optimizer.step()
    assert_law(got, alone)


@only(2)
def check_compiled(rank: int, ranks: int) -> None:
    """Graphs hand over what lies in memory, and the layouts go beside them."""
    alone = train(AdaFisher(block(), TCov=2, dist=False), data(2))
    plan = sequence_plan()
    if not torch_compiled.FOLLOWS:  # PyTorch then forgets to undo what it has traced of a table's rows
        plan["words"] = ColwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(block(), init_device_mesh(HOME, (ranks,)), plan)
    model.compile(backend="aot_eager")
    assert_law(train(AdaFisher(model, TCov=2), data(2)), alone)


@only(4)
def check_activation_checkpointing(rank: int, ranks: int) -> None:
    """What backward needs is computed again, and counts once."""

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: Tensor) -> Tensor:
            return recomputed(self.inner, x, use_reentrant=False)

    got, alone = Recomputing(), Recomputing()
    parallelize_module(got.inner, init_device_mesh(HOME, (ranks,)), sequence_plan())
    alone_too = train(AdaFisher(alone, TCov=1, dist=False), data(2))
    assert_law(train(AdaFisher(got, TCov=1), data(2)), alone_too)


@only(4)
def check_gradients_that_the_script_averages(rank: int, ranks: int) -> None:
    """Over the teams, on the other axis of the mesh, by hand and by DistributedDataParallel."""
    mesh = init_device_mesh(HOME, (2, 2), mesh_dim_names=("data", "team"))
    alone = train(AdaFisher(block(), TCov=1, dist=False), data(2))
    optimizer = AdaFisher(parallelize_module(block(), mesh["team"], plain_plan()), TCov=1)
    for x in data(2):
        optimizer.zero_grad()
        loss_of(optimizer.model, x.tensor_split(2)[rank // 2]).backward()
        for p in optimizer.model.parameters():
            g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            distributed.all_reduce(g, group=mesh["data"].get_group())
            g /= 2
        optimizer.step()
    assert_law(optimizer, alone)


@only(4)
def check_state_dicts(rank: int, ranks: int) -> None:
    """A checkpoint of one process serves a team, and the other way round by torch.distributed.checkpoint."""
    alone = train(AdaFisher(block(), TCov=2, dist=False), data(3))
    mesh = init_device_mesh(HOME, (ranks,))
    optimizer = AdaFisher(parallelize_module(block(), mesh, plain_plan()), TCov=2)
    options = state_dicts.StateDictOptions(full_state_dict=True)
    state_dicts.set_model_state_dict(optimizer.model, alone.model.state_dict(), options=options)
    optimizer.load_state_dict(alone.state_dict())
    assert_law(optimizer, alone)
    train(alone, data(5)[3:])
    assert_law(train(optimizer, data(5)[3:]), alone)
    gathered = state_dicts.get_optimizer_state_dict(optimizer.model, optimizer, options=options)
    if rank == 0:
        fresh = AdaFisher(block(), TCov=2, dist=False)
        state_dicts.set_optimizer_state_dict(fresh.model, fresh, gathered)
        fresh.model.load_state_dict(alone.model.state_dict())
        assert_law(fresh, alone)


@only(4)
def check_checkpoints_of_other_meshes(rank: int, ranks: int) -> None:
    """Saved by shards of teams, loaded by one team."""
    alone = train(AdaFisher(block(), TCov=2, dist=False), data(5))
    mesh = init_device_mesh(HOME, (2, 2), mesh_dim_names=("data", "team"))
    model = fully_shard(parallelize_module(block(), mesh["team"], plain_plan()), mesh=mesh["data"])
    before = train(AdaFisher(model, TCov=2), data(5)[:3], rank // 2, 2)
    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    distributed.broadcast_object_list(shared)
    dcp.save(saved(before), checkpoint_id=shared[0])
    flat = init_device_mesh(HOME, (4,))
    after = load(AdaFisher(parallelize_module(block(), flat, sequence_plan()), TCov=2), shared[0])
    assert_law(train(after, data(5)[3:]), alone)
    distributed.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])


def check_what_cannot_be_served_is_refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(HOME, (ranks,))
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(6, 4))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(CafinError, match=r"`model \(0\)` must be Linear or Embedding to be divided, got Conv1d"):
        AdaFisher(model)
    partial = nn.Linear(6, 4)
    partial.weight = nn.Parameter(DTensor.from_local(partial.weight.detach(), mesh, [Partial()]))
    with pytest.raises(CafinError, match=r"`model \(weight\)` must be sharded or replicated"):
        AdaFisher(partial)
    model = parallelize_module(block(), mesh, plain_plan())
    with pytest.raises(CafinError, match=r"`dist` must not be False .* with tensor parallelism"):
        AdaFisher(model, dist=False)
    mine = [distributed.new_group([k]) for k in range(ranks)][rank]
    other = init_device_mesh(HOME, (ranks // 2, 2), mesh_dim_names=("data", "team"))["team"]
    if ranks > 2:
        model.head = parallelize_module(nn.Linear(WIDTH, WORDS).to(PRECISE), other, ColwiseParallel())
        with pytest.raises(CafinError, match=r"`model \(head.weight\)` must have the mesh of the others"):
            AdaFisher(model)
        model = parallelize_module(block(), mesh, plain_plan())
    optimizer = AdaFisher(model, TCov=1)
    loss_of(model, data(1)[0]).backward()
    before = [p.detach().clone() for p in map(settled, model.parameters())]
    model.up.weight.grad = distribute_tensor(model.up.weight.grad.full_tensor(), other, [Shard(0)])
    if ranks > 2:
        with pytest.raises(CafinError, match="`gradient` must be a DTensor of its parameter's mesh"):
            optimizer.step()
        assert not optimizer.steps and all(map(torch.equal, before, map(settled, model.parameters())))
    with pytest.raises(CafinError, match=r"`dist` must hold the ranks \[0, 1.*\], which compute layers together"):
        AdaFisher(model, dist=mine)


@only(2)
def check_layers_that_join_are_checked_as_the_first_ones(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(HOME, (ranks,))
    optimizer = AdaFisher(parallelize_module(block(), mesh, plain_plan()), TCov=1)
    train(optimizer, data(1), 0, 1)
    late = optimizer.model.late = nn.Conv1d(2, 4, 3, bias=False).to(PRECISE)
    late.weight = nn.Parameter(distribute_tensor(late.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(CafinError, match=r"add_param_group: `model \(late\)` must be Linear or Embedding"):
        optimizer.add_param_group({"params": late.parameters()})
    assert len(optimizer.param_groups) == 1
    del optimizer.model.late
    train(optimizer, data(1), 0, 1)
    assert optimizer.steps == 2


@only(2)
def check_clipped_gradients(rank: int, ranks: int) -> None:
    """And what is decided and measured over the team."""
    model = parallelize_module(block(), init_device_mesh(HOME, (ranks,)), sequence_plan())
    got, alone = AdaFisher(model, TCov=1, error_if_nonfinite=True), AdaFisher(block(), dist=False, TCov=1)
    for x in data(2):
        for optimizer in (alone, got):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
        # The same norm for both: that of PyTorch 2.11 is 0.3 % off over a team.
        norm = float(nn.utils.get_total_norm(p.grad for p in alone.model.parameters()))
        for optimizer in (alone, got):
            for p in optimizer.model.parameters():
                p.grad *= 0.01 / norm
            optimizer.step()
    assert_law(got, alone)
    assert got.curvature().flat() == pytest.approx(alone.curvature().flat(), rel=10 * EXACT)  # a ratio of long sums
    loss_of(model, data(1)[0]).backward()
    if rank == 1:
        model.first.weight.grad.to_local()[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"gradient of first.weight` must be finite"):
        got.step()
    assert_law(got, alone)


@only(2)
def check_scalers_are_refused(rank: int, ranks: int) -> None:
    """PyTorch's would find the inf on one rank alone, as its verdict goes by how the first gradient is laid out."""
    model = parallelize_module(block(), init_device_mesh(HOME, (ranks,)), sequence_plan())
    optimizer, scaler = AdaFisher(model, TCov=1), torch.amp.GradScaler(HOME, init_scale=1024.0)
    scaler.scale(loss_of(model, data(1)[0])).backward()
    if rank == 1:
        model.up.weight.grad.to_local()[0] = float("inf")
    with pytest.raises(CafinError, match="step: `GradScaler` must be left out with tensor parallelism"):
        scaler.step(optimizer)
    assert not optimizer.steps
    assert_law(optimizer, AdaFisher(block(), dist=False, TCov=1))
