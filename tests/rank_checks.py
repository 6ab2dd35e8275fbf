"""Checks of data parallel training, run on every rank by `ranks.py`: the ranks are one process with the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import RAW
from ranks import EXACT, HOME, PRECISE, only
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch_cases import LAYERS, drawn
from torch_helpers import Net, assert_same, everything, images, mlp, near, net, rows

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW
from cafin_cupy.adapters.torch_ranks import compare_ranks

# Relative to each tensor's largest entry. Sums of the same numbers in another order: float32 to its rounding, five
# steps long; the paper's rule divides small moments by small ones, so it is held to float64 alone.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
WHOLE = 12  # the batch that all ranks share


def replica(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("module.", "").replace("_orig_mod.", ""): value for name, value in found.items()}


def assert_law(got: AdaFisher, alone: AdaFisher, tolerance: float) -> None:
    """All state is that of one process, and the same bits on all ranks."""
    compare_ranks(got, distributed.group.WORLD)
    assert_near(plain(everything(got)), everything(alone), tolerance)


def assert_near(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    """Tensors within the tolerance, all else equal."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, Tensor):
            near(one[name], value, name, tolerance)
        else:
            assert one[name] == value, name


def train(optimizer: AdaFisher, batches: list[Tensor], rank: int, ranks: int) -> AdaFisher:
    """Each rank with its share of every batch; ranks with fewer rows weight their means by counts."""
    for x in batches:
        optimizer.zero_grad()
        mine = x.tensor_split(ranks)[rank]
        (loss_of(optimizer.model, mine) * (ranks * len(mine) / len(x))).backward()
        optimizer.step()
    return optimizer


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def net_of(dtype: torch.dtype) -> Net:
    return net(HOME, norm=False).to(dtype)  # BatchNorm normalises each rank's share by itself


def check_law(rank: int, ranks: int) -> None:
    for dtype, averaging, kind in (
        (torch.float32, "parity", AdaFisher),
        (torch.float64, "parity", AdaFisherW),
        (torch.float64, "paper", AdaFisher),
    ):
        options: dict[str, Any] = {"TCov": 2, "averaging": averaging, "weight_decay": 1e-2}
        batches = [x.to(dtype) for x in images(HOME, *[WHOLE] * 5)]
        model = replica(net_of(dtype), gradient_as_bucket_view=True)
        got = train(kind(model, check_every=1, **options), batches, rank, ranks)
        assert_law(got, train(kind(net_of(dtype), dist=False, **options), batches, 0, 1), TOLERANCES[dtype])


def check_law_without_a_wrapper(rank: int, ranks: int) -> None:
    """The script averages gradients itself."""
    optimizer = AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=True)
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    for x in batches:
        optimizer.zero_grad()
        loss_of(optimizer.model, x.tensor_split(ranks)[rank]).backward()
        for p in optimizer.model.parameters():
            distributed.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
    assert_law(optimizer, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1), EXACT)


def check_uneven_batches(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for size in (WHOLE, WHOLE + 1, 2 * ranks - 1) for x in rows(HOME, 1, size)]
    got = train(AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=1), batches, rank, ranks)
    assert_law(got, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1), EXACT)


def check_static_graph_and_unused_parameters(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 4, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    for option in ("static_graph", "find_unused_parameters"):
        model = replica(mlp(HOME).to(PRECISE), **{option: True})
        assert_law(train(AdaFisher(model, TCov=2), batches, rank, ranks), alone, EXACT)


def check_compiled(rank: int, ranks: int) -> None:
    """Within the wrapper, where its hook starts the collective in backward, and around it."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    inner = replica(torch.compile(mlp(HOME).to(PRECISE), backend="aot_eager"))
    assert_law(train(AdaFisher(inner, TCov=2), batches, rank, ranks), alone, EXACT)
    outer = torch.compile(replica(mlp(HOME).to(PRECISE)), backend="aot_eager")
    assert_law(train(AdaFisher(outer, TCov=2), batches, rank, ranks), alone, EXACT)


def check_accumulation(rank: int, ranks: int) -> None:
    """Micro-batches under no_sync, and with a collective for each."""
    batches = [x.to(PRECISE) for x in rows(HOME, 3, 2 * WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1)
    for silent, calls in (((True, True, False), 1), ((False, False, False), 3)):
        model = replica(mlp(HOME).to(PRECISE))
        optimizer = AdaFisher(model, TCov=2)
        with counted() as sent:
            for x in batches:
                optimizer.zero_grad()
                for part, quiet in zip(x.tensor_split(ranks)[rank].chunk(3), silent):
                    with model.no_sync() if quiet else nullcontext():
                        (loss_of(model, part) / 3).backward()
                optimizer.step()
        assert len(sent) == 3 + 2 * calls - 1, sent  # agreement, repeat for the length of layer norms, two steps
        assert_law(optimizer, alone, EXACT)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of the collectives that are not DistributedDataParallel's own, which are started in C++."""
    sent: list[int] = []
    real = distributed.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *arguments, **options)

    with mock.patch.object(distributed, "all_reduce", all_reduce):
        yield sent


def check_one_collective_on_sampled_steps_within_backward(rank: int, ranks: int) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = AdaFisher(replica(model), TCov=3)
    sizes = []
    with counted() as sent:
        for step, x in enumerate(rows(HOME, 9)):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
            sizes.append(list(sent))
            sent.clear()
            optimizer.step()
            assert not sent, step  # it was started in backward
    flat = 2 + 5 + 7 + 7 + 3  # two counts, and H and S sums of two layers
    assert sizes == [[10, flat], [], [], [flat], [], [], [flat], [], []]


def check_every_layer_type(rank: int, ranks: int) -> None:
    """Raw moments of a batch that the ranks share are those of one process."""
    for name, (make, shape) in LAYERS.items():
        if len(shape) < 2 or shape[0] < ranks or "unbatched" in name or "sync" in name:
            continue
        torch.manual_seed(0)
        layer, x = make().to(HOME), drawn(make(), shape, HOME)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval().track_running_stats = True  # the same for all shares
        s = torch.randn_like(layer(x))
        factors = []
        for dist, share, by in ((False, slice(None), 1), (None, slice(rank, None, ranks), 1 / ranks)):
            model = nn.Sequential(copy.deepcopy(layer))
            optimizer = AdaFisher(model, TCov=1, averaging=RAW, dist=dist)
            (model(x[share]) * s[share]).sum().div(by).backward()
            optimizer.step()
            factors.append(next(iter(optimizer.factors().values())))
        for letter, got, want in zip("HS", factors[1], factors[0]):
            near(got, want, f"{letter} of {name}")


def check_sequences_of_different_lengths(rank: int, ranks: int) -> None:
    """H of a layer norm sums over the positions of the longest sequence, wherever that is."""
    torch.manual_seed(1)
    calls = [[torch.randn(2, length, 6, dtype=PRECISE) for length in lengths] for lengths in LENGTHS]
    got, alone = (AdaFisher(nn.LayerNorm(6).to(PRECISE), TCov=1, averaging=RAW, dist=dist) for dist in (None, False))
    for lengths in calls:
        got.zero_grad()
        alone.zero_grad()
        (got.model(lengths[rank]).sin().sum() * ranks).backward()
        for x in lengths[:ranks]:
            alone.model(x).sin().sum().backward()
        for p in got.model.parameters():
            distributed.all_reduce(p.grad)
            p.grad /= ranks
        got.step()
        alone.step()
        assert_law(got, alone, 3 * EXACT)  # S squares sums that cancel


LENGTHS = [(3, 5, 1, 2), (2, 2, 1, 1), (9, 4, 4, 4), (5, 9, 9, 1)]


class Choice(nn.Module):
    """A layer for each rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.own = nn.ModuleList([nn.Linear(5, 5) for _ in range(ranks)])

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.own[choice](torch.tanh(self.stem(x)))


def check_a_layer_on_one_rank(rank: int, ranks: int) -> None:
    def made() -> Choice:
        torch.manual_seed(1)
        return Choice(ranks).to(PRECISE)

    warnings.simplefilter("error")  # a layer that another rank has seen is not called unseen
    got = AdaFisher(replica(made(), find_unused_parameters=True), TCov=1)
    alone = AdaFisher(made(), TCov=1, dist=False)
    for x in rows(HOME, 3, 4 * ranks):
        got.zero_grad()
        alone.zero_grad()
        parts = x.to(PRECISE).chunk(ranks)
        got.model(parts[rank], rank).square().mean().backward()
        for choice, part in enumerate(parts):
            (alone.model(part, choice).square().mean() / ranks).backward()
        got.step()
        alone.step()
    assert_law(got, alone, EXACT)


def check_a_layer_on_no_rank(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    model = Choice(ranks + 1)
    optimizer = AdaFisher(replica(model, find_unused_parameters=True), TCov=1)
    optimizer.model(rows(HOME, 1)[0], rank).square().mean().backward()
    optimizer.step()
    H, S = optimizer.factors()[f"module.own.{ranks}"]
    assert H.eq(1).all() and S.eq(1).all()
    compare_ranks(optimizer, distributed.group.WORLD)


def check_a_nan_on_one_rank(rank: int, ranks: int) -> None:
    """Every rank keeps the factors of that layer, and goes on."""
    model = mlp(HOME)
    optimizer = AdaFisher(model, TCov=1, check_every=1)
    train_apart(optimizer, rows(HOME, 1)[0])
    before = everything(optimizer)
    optimizer.zero_grad()
    loss_of(model, rows(HOME, 1)[0]).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if rank == 1:
        optimizer._factors.accumulate(0, torch.full((1, 5), float("nan")), torch.ones(1, 7))
    optimizer.step()
    assert optimizer.skipped_refreshes() == {"0": 1, "2": 0, "3": 0}
    after = everything(optimizer)
    assert torch.equal(before["H of 0"], after["H of 0"]) and not torch.equal(before["H of 3"], after["H of 3"])


def train_apart(optimizer: AdaFisher, x: Tensor) -> None:
    """A step on the same batch on all ranks, whose gradients need no average."""
    optimizer.zero_grad()
    loss_of(optimizer.model, x).backward()
    optimizer.step()


def check_a_scaler_skips_on_all_ranks(rank: int, ranks: int) -> None:
    optimizer = AdaFisher(replica(mlp(HOME)), TCov=1, check_every=1)
    scaler = torch.amp.GradScaler(HOME, init_scale=1024.0)
    alone = AdaFisher(mlp(HOME), TCov=1, dist=False)
    for step, x in enumerate(rows(HOME, 4, WHOLE)):
        optimizer.zero_grad()
        mine = x.tensor_split(ranks)[rank]
        bad = step in (0, 2) and rank == ranks - 1
        scaler.scale(loss_of(optimizer.model, mine) * (float("inf") if bad else 1.0)).backward()
        before = everything(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step in (0, 2):
            assert_same(optimizer, before)
        else:
            train(alone, [x], 0, 1)
    assert optimizer.steps == 2
    assert_law(optimizer, alone, 1e-5)


def check_a_hook_that_adds_gradients_up(rank: int, ranks: int) -> None:
    def adding(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
        return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1)
    for hook, factor, scale in ((adding, 1.0, 1 / ranks), (default_hooks.allreduce_hook, None, 1.0)):
        model = replica(mlp(HOME).to(PRECISE))
        model.register_comm_hook(None, hook)
        got = AdaFisher(model, TCov=1, gradient_divide_factor=factor)
        for x in batches:
            got.zero_grad()
            (loss_of(model, x.tensor_split(ranks)[rank]) * scale).backward()
            got.step()
        assert_law(got, alone, EXACT)


@only(4)
def check_a_group_of_some_ranks(rank: int, ranks: int) -> None:
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    group, place = groups[rank % 2], rank // 2
    batches = [x.to(PRECISE) + rank % 2 for x in rows(HOME, 3, WHOLE)]
    alone = train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1)
    wrapped = replica(mlp(HOME).to(PRECISE), process_group=group)
    bare = mlp(HOME).to(PRECISE)
    for optimizer in (AdaFisher(wrapped, TCov=1), AdaFisher(bare, TCov=1, dist=group)):
        for x in batches:
            optimizer.zero_grad()
            loss_of(optimizer.model, x.tensor_split(2)[place]).backward()
            for p in bare.parameters() if optimizer.model is bare else ():
                distributed.all_reduce(p.grad, group=group)
                p.grad /= 2
            optimizer.step()
        one, other = plain(everything(optimizer)), everything(alone)
        for name, value in other.items():
            near(one[name], value, name, EXACT) if isinstance(value, Tensor) else None
    twin = copy.deepcopy(optimizer)
    assert twin._dist.group is group
    assert_same(twin, optimizer)
    with pytest.raises(CafinError, match="process group"):
        pickle.dumps(optimizer)


def check_stochastic_rounding_draws_the_same_on_all_ranks(rank: int, ranks: int) -> None:
    model = replica(mlp(HOME).bfloat16())
    torch.manual_seed(rank)
    optimizer = AdaFisher(model, TCov=2, stochastic_rounding=True, check_every=1)
    train(optimizer, [x.bfloat16() for x in rows(HOME, 3, WHOLE)], rank, ranks)


def check_what_one_rank_does_behind_the_backward_pass(rank: int, ranks: int) -> None:
    """As for a picture of saliency: its gradients are averaged by nobody, and its sums do not count."""
    optimizer = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=1)
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    for x in batches:
        optimizer.zero_grad()
        loss_of(optimizer.model, x.tensor_split(ranks)[rank]).backward()
        if rank == 0:
            torch.autograd.grad(optimizer.model.module(x.requires_grad_()).sum(), x)
        optimizer.step()
    batches = [x.detach() for x in batches]
    assert_law(optimizer, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1), EXACT)


class Heads(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.stem(x))
        return {"a": self.a(x), "b": self.b(x)}


def check_an_output_that_the_loss_leaves_out(rank: int, ranks: int) -> None:
    """DistributedDataParallel then hands the layer None for a gradient."""

    def made() -> Heads:
        torch.manual_seed(1)
        return Heads().to(PRECISE)

    got = AdaFisher(replica(made(), find_unused_parameters=True), TCov=1)
    alone = AdaFisher(made(), TCov=1, dist=False)
    for x in rows(HOME, 3, 4 * ranks):
        got.zero_grad()
        alone.zero_grad()
        parts = x.to(PRECISE).chunk(ranks)
        got.model(parts[rank])["ab"[rank % 2]].square().mean().backward()
        for other, part in enumerate(parts):
            (alone.model(part)["ab"[other % 2]].square().mean() / ranks).backward()
        got.step()
        alone.step()
    assert_law(got, alone, EXACT)


def check_copies_and_resumed_runs(rank: int, ranks: int) -> None:
    batches = [x.to(PRECISE) for x in rows(HOME, 5, WHOLE)]
    optimizer = train(AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=2), batches[:3], rank, ranks)
    fresh = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=2)
    fresh.model.load_state_dict(optimizer.model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(fresh, batches[3:], rank, ranks)
    assert_law(fresh, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=2, dist=False), batches, 0, 1), EXACT)


def check_a_step_that_is_called_off(rank: int, ranks: int) -> None:
    """zero_grad() forgets what the ranks have added up, and what is under way."""
    optimizer = AdaFisher(replica(mlp(HOME).to(PRECISE)), TCov=1)
    batches = [x.to(PRECISE) for x in rows(HOME, 3, WHOLE)]
    for _ in range(2):
        loss_of(optimizer.model, batches[0][rank:]).backward()
    assert optimizer._factors.pending
    train(optimizer, batches, rank, ranks)
    assert_law(optimizer, train(AdaFisher(mlp(HOME).to(PRECISE), TCov=1, dist=False), batches, 0, 1), EXACT)
