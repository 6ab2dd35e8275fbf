"""Checks of sharded training (FSDP2), run on every rank by `ranks.py`: they are one process with the whole batch."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
from rank_checks import WHOLE, assert_near, counted, loss_of, plain, train
from ranks import EXACT, HOME, PRECISE, only
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint as recomputed
from torch_helpers import Net, Tokens, everything, images, mlp, net, rows

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW


def whole(found: dict[str, Any]) -> dict[str, Any]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in plain(found).items()}


def assert_law(got: AdaFisher, alone: AdaFisher, tolerance: float = EXACT) -> None:
    assert_near(whole(everything(got)), everything(alone), tolerance)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each layer by itself, and what is left by the root, as transformers are sharded block by block."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def doubles() -> Net:
    return net(HOME, norm=False).to(PRECISE)


def check_law(rank: int, ranks: int) -> None:
    """Every layer type, with rows that no number of ranks divides (3, 4, 6 and 8 of them); whole modules and layers."""
    batches = [x.to(PRECISE) for x in images(HOME, *[WHOLE] * 5)]
    for options, kind in (({}, AdaFisher), ({"averaging": "paper"}, AdaFisherW)):
        options = {"TCov": 2, "weight_decay": 1e-2, **options}
        alone = train(kind(doubles(), dist=False, **options), batches, 0, 1)
        for wrap in (fully_shard, sharded):
            optimizer = kind(wrap(doubles()), **options)
            with counted() as sent:
                train(optimizer, batches, rank, ranks)
            assert len(sent) == 3 + 2, sent  # sampled steps, agreement and the length of layer norms
            assert_law(optimizer, alone)
            momentum = optimizer.state[optimizer.model.fc.weight]["exp_avg"]
            assert momentum.placements == (Shard(0),) and momentum.to_local().shape[0] == -(-8 // ranks)


def check_compiled(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    model = sharded(mlp(HOME).to(PRECISE))
    model.compile(backend="aot_eager")
    assert_law(train(AdaFisher(model, TCov=2), batches, rank, ranks), alone)


def check_more_ranks_than_rows(rank: int, ranks: int) -> None:
    """Some hold nothing of a parameter; and parameters that no layer owns."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 3), nn.ConvTranspose1d(1, 2, 2)).to(PRECISE)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = made(), nn.Parameter(torch.ones(3, dtype=PRECISE))

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = self.layers
            return three((two(one(x)) * self.scale).unsqueeze(1))

    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(Model(), TCov=1, dist=False), batches, 0, 1)
    assert_law(train(AdaFisher(fully_shard(Model()), TCov=1), batches, rank, ranks), alone)


def check_sharded_along_another_axis(rank: int, ranks: int) -> None:
    """Columns of weights whose second axis the ranks divide."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Embedding(9, 8), nn.Linear(8, 4), nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(16, 3)
        first, second, third, flat, last = layers

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([first, second, third, flat, last])

            def forward(self, x: Tensor) -> Tensor:
                return last(flat(third(second(first(x)).transpose(1, 2))))

        return Model().to(PRECISE)

    torch.manual_seed(3)
    batches = list(torch.randint(9, (3, WHOLE, 4)))
    alone = train(AdaFisher(made(), TCov=1, dist=False), batches, 0, 1)

    def placement(p: Tensor) -> Shard:
        return Shard(1 if p.dim() > 1 and p.shape[1] % ranks == 0 else 0)

    model = fully_shard(made(), shard_placement_fn=placement)
    assert model.layers[2].weight.placements == (Shard(1),)
    assert_law(train(AdaFisher(model, TCov=1), batches, rank, ranks), alone)


@only(4)
def check_hybrid_mesh(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in images(HOME, *[WHOLE] * 3)]
    alone = train(AdaFisher(doubles(), TCov=2, dist=False), batches, 0, 1)
    mesh = init_device_mesh(HOME, (2, 2), mesh_dim_names=("replicas", "shards"))
    assert_law(train(AdaFisher(sharded(doubles(), mesh=mesh), TCov=2), batches, rank, ranks), alone)


@only(4)
def check_mesh_of_some_ranks(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(HOME, (2, 2), mesh_dim_names=("models", "shards"))["shards"]
    batches = [x.to(PRECISE) + rank // 2 for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1)
    got = train(AdaFisher(fully_shard(mlp(HOME).to(PRECISE), mesh=mesh), TCov=1), batches, rank % 2, 2)
    assert_law(got, alone)


def check_accumulation(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, 2 * WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    for quiet in (True, False):
        model = sharded(mlp(HOME).to(PRECISE))
        optimizer = AdaFisher(model, TCov=2)
        with counted() as sent:
            for x in batches:
                optimizer.zero_grad()
                for number, part in enumerate(x.tensor_split(ranks)[rank].chunk(3)):
                    model.set_requires_gradient_sync(number == 2 or not quiet)
                    (loss_of(model, part) / 3).backward()
                within = len(sent)
                optimizer.step()
        assert within == len(sent)
        assert len(sent) == 3 + 2 * (1 if quiet else 3) - 1, sent  # as in DistributedDataParallel
        assert_law(optimizer, alone)


class Recomputing(nn.Module):
    """Activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(HOME)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = recomputed(layer, x, use_reentrant=False)
        return x


def check_activation_checkpointing(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(Recomputing().to(PRECISE), TCov=1, dist=False), batches, 0, 1)
    model = Recomputing().to(PRECISE)
    sharded(model.inner)
    assert_law(train(AdaFisher(fully_shard(model), TCov=1), batches, rank, ranks), alone)


def check_mixed_precision(rank: int, ranks: int) -> None:
    """bfloat16 in the layers, float32 shards: as near to float32 as bfloat16 is."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batches = rows(HOME, 3, WHOLE)
    alone = train(AdaFisher(mlp(HOME), TCov=1, dist=False), batches, 0, 1)
    got = train(AdaFisher(sharded(mlp(HOME), mp_policy=policy), TCov=1), batches, rank, ranks)
    assert_law(got, alone, 0.05)


def check_sixteen_bits_with_masters(rank: int, ranks: int) -> None:
    batches = [x.bfloat16() for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).bfloat16(), TCov=1, dist=False, master_weights=True), batches, 0, 1)
    got = train(AdaFisher(fully_shard(mlp(HOME).bfloat16()), TCov=1, master_weights=True), batches, rank, ranks)
    assert_law(got, alone, 0.05)


def check_a_scaler_skips_on_all_ranks(rank: int, ranks: int) -> None:
    """The inf lies in the part of one rank; the verdict is that of all."""
    optimizer = AdaFisher(sharded(mlp(HOME)), TCov=1)
    scaler = torch.amp.GradScaler(HOME, init_scale=1024.0)
    batches = rows(HOME, 4, WHOLE)
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_of(optimizer.model, x.tensor_split(ranks)[rank])).backward()
        if step in (0, 2) and rank == 1:
            optimizer.model[3].weight.grad.to_local()[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 2
    alone = train(AdaFisher(mlp(HOME), TCov=1, dist=False), [batches[1], batches[3]], 0, 1)
    assert_law(optimizer, alone, 1e-5)


def check_clipped_gradients(rank: int, ranks: int) -> None:
    batches, got = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)], AdaFisher(sharded(mlp(HOME).to(PRECISE)), TCov=1)
    alone = AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False)
    for x in batches:
        for optimizer, mine in ((got, x.tensor_split(ranks)[rank]), (alone, x)):
            optimizer.zero_grad()
            loss_of(optimizer.model, mine).backward()
            nn.utils.clip_grad_norm_(optimizer.model.parameters(), 0.01)
            optimizer.step()
    assert_law(got, alone)


def check_parameters_that_no_layer_owns_and_frozen_ones(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    made = [Tokens().to(PRECISE) for _ in range(2)]
    for model in made:
        model.fc.weight.requires_grad_(False)
    alone = train(AdaFisher(made[0], TCov=1, dist=False), batches, 0, 1)
    assert_law(train(AdaFisher(fully_shard(made[1]), TCov=1), batches, rank, ranks), alone)


def check_comparison_of_ranks(rank: int, ranks: int) -> None:
    optimizer = AdaFisher(fully_shard(mlp(HOME)), TCov=1, check_every=1)
    train(optimizer, rows(HOME, 2, WHOLE), rank, ranks)
    optimizer.factors()["3"][1][0] += float(rank == 1)
    with pytest.raises(CafinError, match="step: S of 3 must be the same on all"):
        train(optimizer, rows(HOME, 1, WHOLE), rank, ranks)


def saved(optimizer: AdaFisher) -> dict[str, Any]:
    model, state = state_dicts.get_state_dict(optimizer.model, optimizer)
    return {"model": model, "optimizer": state}


def load(optimizer: AdaFisher, folder: str, **options: Any) -> AdaFisher:
    given = saved(optimizer)
    dcp.load(given, checkpoint_id=folder, **options)
    state_dicts.set_state_dict(
        optimizer.model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"]
    )
    return optimizer


@only(4)
def check_checkpoints_of_other_numbers_of_ranks(rank: int, ranks: int) -> None:
    """Saved by n ranks and loaded by m, a run ends where one without interruption does."""
    batches = [x.to(PRECISE) for x in images(HOME, *[WHOLE] * 5)]
    alone = train(AdaFisher(doubles(), TCov=2, dist=False), batches, 0, 1)
    halves = init_device_mesh(HOME, (2, 2), mesh_dim_names=("models", "shards"))["shards"]
    pair: Any = {"process_group": halves.get_group()}

    def by(number: int) -> tuple[AdaFisher, tuple[int, int], dict[str, Any]]:
        """Untrained, this rank's share of the batch, and what torch.distributed.checkpoint must know."""
        if number == 1:
            return AdaFisher(doubles(), TCov=2, dist=False), (0, 1), {"no_dist": True}
        if number == 2:
            return AdaFisher(sharded(doubles(), mesh=halves), TCov=2), (rank % 2, 2), pair
        return AdaFisher(sharded(doubles()), TCov=2), (rank, 4), {}

    for before, after in ((2, 1), (1, 2), (2, 4), (4, 2), (4, 4)):
        shared = [tempfile.mkdtemp() if rank == 0 else ""]
        distributed.broadcast_object_list(shared)
        optimizer, share, options = by(before)
        train(optimizer, batches[:3], *share)
        if rank < before:
            dcp.save(saved(optimizer), checkpoint_id=shared[0], **options)
        distributed.barrier()
        if rank == 0:
            held = dcp.FileSystemReader(shared[0]).read_metadata().storage_data
            assert len([key for key in held if "factors" in key.fqn]) == 2 * len(optimizer.factors())
        optimizer, share, options = by(after)
        train(load(optimizer, shared[0], **options), batches[3:], *share)
        assert_law(optimizer, alone)
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(shared[0])


def check_names_behind_a_forward_without_backward(rank: int, ranks: int) -> None:
    """Which leaves whole parameters in the places of the sharded ones."""
    optimizer = train(AdaFisher(fully_shard(mlp(HOME)), TCov=1), rows(HOME, 1), 0, 1)
    with torch.no_grad():
        optimizer.model(rows(HOME, 1)[0])
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["param_names"] == [f"{k}.{role}" for k in (0, 2, 3) for role in ("weight", "bias")]
    summary = optimizer.summary()
    assert "3.weight" in str(summary)
    held = [state["exp_avg"].to_local().nbytes for state in optimizer.state.values()]
    assert summary.momentum == sum(held) < 4 * summary.parameters  # of this rank


def check_state_dicts_of_whole_tensors(rank: int, ranks: int) -> None:
    """A checkpoint of one process serves sharded parameters; the other way round it has to be gathered first."""
    batches = [x.to(PRECISE) for x in rows(HOME, 5, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches[:3], 0, 1)
    model = mlp(HOME).to(PRECISE)
    model.load_state_dict(alone.model.state_dict())
    optimizer = AdaFisher(sharded(model), TCov=2)
    optimizer.load_state_dict(alone.state_dict())
    assert_law(optimizer, alone)
    train(alone, batches[3:], 0, 1)
    assert_law(train(optimizer, batches[3:], rank, ranks), alone)
    with pytest.raises(CafinError, match=r"state\[0\]\['exp_avg'\].*be whole, as its parameter is"):
        alone.load_state_dict(optimizer.state_dict())
    options = state_dicts.StateDictOptions(full_state_dict=True)
    gathered = state_dicts.get_optimizer_state_dict(optimizer.model, optimizer, options=options)
    if rank == 0:
        fresh = AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False)
        state_dicts.set_optimizer_state_dict(fresh.model, fresh, gathered)
        fresh.model.load_state_dict(alone.model.state_dict())
        assert_law(fresh, alone)


def check_what_cannot_be_served_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(CafinError, match="`model` must have parameters of layers, got FullyShardedDataParallel"):
        AdaFisher(FullyShardedDataParallel(mlp(HOME), device_id=torch.device(HOME)))
    mesh = init_device_mesh(HOME, (ranks,))
    model = fully_shard(mlp(HOME))
    with pytest.raises(CafinError, match="`stochastic_rounding` must be False with sharded parameters"):
        AdaFisher(model, stochastic_rounding=True)
    with pytest.raises(CafinError, match="`dist` must not be False in DistributedDataParallel or fully_shard"):
        AdaFisher(model, dist=False)
    optimizer = AdaFisher(model)
    loss_of(model, rows(HOME, 1)[0]).backward()
    model[0].weight.grad = model[0].weight.grad.redistribute(mesh, [torch.distributed.tensor.Replicate()])
    with pytest.raises(CafinError, match="be sharded as its parameter"):
        optimizer.step()
    assert distributed.get_rank() == rank
