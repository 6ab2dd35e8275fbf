"""Parameters that a wrapper has laid flat, as DeepSpeed's ZeRO does in stages 1 and 2: whatever elements a rank has,
all together are one optimizer of whole parameters, to the bit. `test_trainer_deepspeed.py` has the engine itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat import Rank, assert_whole, laid_flat, one_behind_the_other, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch_cases import LAYERS, drawn
from torch_helpers import (
    either_device,  # noqa: F401
    images,
    kernels_device,  # noqa: F401
    loss_of,
    mlp,
    near,
    net,
    refused,
    rows,
    run,
    weighted,
)

from cafin_cupy import CafinError
from cafin_cupy.adapters import torch as adapter
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW
from cafin_cupy.adapters.torch_flat import rectangles

CUT_LAYERS = sorted(LAYERS.keys() - {"embedding, norm"})  # which writes into the model alone, behind the copies' back
GROUPS: list[dict[str, Any]] = [{"params": ["*.bias"], "weight_decay": 0.0, "lr": 5e-4}]


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_rectangles_are_the_elements_in_their_order(rows: int, columns: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, rows * columns))
    last = data.draw(st.integers(first, rows * columns))
    every = torch.arange(rows * columns).view(rows, columns)
    found = list(rectangles(first, last, columns))
    assert len(found) <= 3
    pieces = [every[across, along].flatten() for across, along in found]
    assert torch.cat([*pieces, every.flatten()[:0]]).tolist() == list(range(first, last))


@pytest.mark.filterwarnings("ignore:AdaFisher. no factors")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(CUT_LAYERS), st.lists(st.floats(0, 1), max_size=3), st.integers(0, 5))
def test_any_layer_is_cut_anywhere(device: str, name: str, places: list[float], pad: int) -> None:
    kind, shape = LAYERS[name]

    def made() -> AdaFisher:
        torch.manual_seed(1)
        return AdaFisher(nn.Sequential(kind(), nn.PReLU()).to(device), TCov=2, weight_decay=0.1)

    plain = made()
    size = sum(p.numel() for p in plain.model.parameters())
    ranks = laid_flat(made, [sorted(int(place * size) for place in places)], pad)
    torch.manual_seed(2)
    batches = [drawn(plain.model[0], shape, device) for _ in range(3)]
    losses = [lambda model, x=x: weighted(model(x).float()) for x in batches]
    train(ranks, losses)
    for loss in losses:
        plain.zero_grad()
        loss(plain.model).backward()
        plain.step()
    assert_whole(ranks, plain)


def losses_of(batches: list[torch.Tensor]) -> list[Callable[[nn.Module], torch.Tensor]]:
    return [lambda model, x=x: loss_of(model, x) for x in batches]


def parts_of(optimizer: AdaFisher, ranks: int) -> list[list[int]]:
    """Where to cut each group into parts of one size, as DeepSpeed does."""
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return [[number * -(-size // ranks) for number in range(1, ranks)] for size in sizes]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize(("averaging", "groups"), [("parity", None), ("paper", GROUPS)], ids=["group", "groups"])
def test_whole_models(device: str, ranks: int, kind: Any, averaging: str, groups: Any) -> None:
    def made() -> AdaFisher:
        optimizer: AdaFisher = kind(net(device), TCov=2, weight_decay=0.1, averaging=averaging, param_groups=groups)
        return optimizer

    plain, batches = made(), images(device, *[5] * 5)
    for group in plain.param_groups:  # a GPU's libraries choose how to compute by where a weight begins
        one_behind_the_other(group["params"])
    for at_once in (True, False):
        parts = laid_flat(made, parts_of(plain if at_once else made(), ranks), pad=3)
        train(parts, losses_of(batches), at_once)
        if at_once:
            run(plain, batches)
        assert_whole(parts, plain)


def test_sixteen_bits_have_float32_copies(device: str) -> None:
    """As with master weights: gradients of 16 bits, the update in float32, and parameters rounded from it. The
    reference's order of operations is another one for parameters of 16 bits, so the last bit of momentum may be."""
    plain = AdaFisher(mlp(device).bfloat16(), TCov=2, master_weights=True)
    ranks = laid_flat(lambda: AdaFisher(mlp(device).bfloat16(), TCov=2), parts_of(plain, 3))
    batches = [x.bfloat16() for x in rows(device, 4)]
    train(ranks, losses_of(batches))
    run(plain, batches)
    assert_whole(ranks, plain, tolerance=1e-6)
    masters = torch.cat([state["master"].flatten() for state in plain.state.values()])
    near(torch.cat([rank.flats[0] for rank in ranks])[: len(masters)], masters, "masters", 1e-6)


def test_a_rank_may_have_nothing_but_padding(device: str) -> None:
    plain = AdaFisher(mlp(device), TCov=2)
    size = sum(p.numel() for p in plain.model.parameters())
    ranks = laid_flat(lambda: AdaFisher(mlp(device), TCov=2), [[0, 10, size, size]], pad=4)
    train(ranks, losses_of(rows(device, 3)))
    run(plain, rows(device, 3))
    assert_whole(ranks, plain)


def test_frozen_parameters_are_left_out(device: str) -> None:
    def made() -> AdaFisher:
        model = mlp(device)
        model[0].bias.requires_grad_(False)
        return AdaFisher(model, TCov=2)

    plain = made()
    ranks = laid_flat(made, [[20, 44]])
    train(ranks, losses_of(rows(device, 3)))
    run(plain, rows(device, 3))
    assert_whole(ranks, plain)


# Plans


def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made, plan = [], adapter.Plan

    def make(*arguments: Any) -> Any:
        made.append(plan(*arguments))
        return made[-1]

    monkeypatch.setattr(adapter, "Plan", make)
    return made


@pytest.mark.parametrize("at_once", [True, False])
def test_plans_last(device: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each call of a step; made anew where the wrapper has linked parameters anew."""
    made = plans(monkeypatch)
    ranks = laid_flat(lambda: AdaFisher(mlp(device), param_groups=GROUPS), [[], []])
    losses = losses_of(rows(device, 8))
    train(ranks, losses[:2], at_once)
    first = len(made)
    assert first <= (1 if at_once else 3)  # the first one does not know that state of other groups will join
    train(ranks, losses[2:6], at_once)
    assert len(made) == first
    ranks[0].link()
    train(ranks, losses[6:7], at_once)
    assert len(made) == first + (1 if at_once else 2)
    train(ranks, losses[7:], at_once)
    assert len(made) == first + (1 if at_once else 2)


def test_calls_of_a_step_share_its_refresh(device: str) -> None:
    ranks = laid_flat(lambda: AdaFisher(mlp(device), TCov=2, param_groups=GROUPS), [[], []])
    rank, loss = ranks[0], losses_of(rows(device, 1))[0]
    optimizer = rank.optimizer
    rank.feed(loss)
    groups = rank.groups
    optimizer.param_groups = groups[:1]
    optimizer.step()
    assert optimizer.steps == 0 and not optimizer.samples
    factors = copy.deepcopy(optimizer.factors())
    optimizer.param_groups = groups[1:]
    optimizer.step()
    assert optimizer.steps == 1
    for name, pair in optimizer.factors().items():
        assert all(map(torch.equal, pair, factors[name]))


def test_copies_that_move_are_followed(device: str) -> None:
    """As by `offload_states` and `reload_states`."""
    plain = AdaFisher(mlp(device), TCov=2)
    ranks = laid_flat(lambda: AdaFisher(mlp(device), TCov=2), [[17, 50]])
    losses = losses_of(rows(device, 4))
    train(ranks, losses[:2])
    for rank in ranks:
        for flat in rank.flats:
            flat.data = flat.detach().clone()
            state = rank.optimizer.state[flat]
            state["exp_avg"] = state["exp_avg"].clone()
        rank.link()
    train(ranks, losses[2:])
    run(plain, rows(device, 4))
    assert_whole(ranks, plain)


# State


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["one group", "two groups"])
def test_a_resumed_run_ends_where_one_without_interruption_does(device: str, groups: Any) -> None:
    def made() -> AdaFisher:
        return AdaFisher(mlp(device), TCov=3, weight_decay=0.1, param_groups=groups)

    losses, cuts = losses_of(rows(device, 5)), parts_of(made(), 2)
    through, first, again = (laid_flat(made, cuts, pad=2) for _ in range(3))
    train(through, losses, at_once=False)
    train(first, losses[:2], at_once=False)
    for old, new in zip(first, again):
        for mine, theirs in zip(new.flats, old.flats):
            mine.detach().copy_(theirs.detach())
        new.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))
        new.link()
    for rank in again:
        rank.receive(again)
    train(again, losses[2:], at_once=False)
    for a, b in zip(through, again):
        assert a.optimizer.steps == b.optimizer.steps == 5
        for number, (x, y) in enumerate(zip(a.flats, b.flats)):
            assert torch.equal(x, y) and torch.equal(a.momentum(number), b.momentum(number))


def test_the_state_of_another_rank_is_refused(device: str) -> None:
    def made() -> AdaFisher:
        return AdaFisher(mlp(device), TCov=2)

    ranks = laid_flat(made, parts_of(made(), 2))
    train(ranks, losses_of(rows(device, 1)))
    theirs, whole = ranks[1].optimizer.state_dict(), run(made(), rows(device, 1)).state_dict()
    names = theirs["param_groups"][0]["param_names"]
    assert names == ["0.bias[5] to 3.bias[2]"]
    optimizer = ranks[0].optimizer
    for state in (theirs, whole):
        with refused(optimizer, "load_state_dict: `param_groups` must be those of this rank", "0.weight[0] to"):
            optimizer.load_state_dict(state)


def test_momentum_of_adam_goes_on() -> None:
    rank = laid_flat(lambda: AdaFisher(mlp("cpu")), [[40]])[1]
    adam = torch.optim.Adam([rank.flats[0].detach().clone().requires_grad_()])
    adam.param_groups[0]["params"][0].grad = torch.randn_like(rank.flats[0])
    adam.step()
    rank.optimizer.load_momentum(adam.state_dict())
    assert torch.equal(rank.momentum(0), adam.state_dict()["state"][0]["exp_avg"])


def test_zero_grad_forgets_a_batch_that_is_left_out(device: str) -> None:
    """A wrapper that finds inf or NaN does not call `step`, and nobody else tells the optimizer."""
    plain = AdaFisher(mlp(device), TCov=1)
    ranks = laid_flat(lambda: AdaFisher(mlp(device), TCov=1), [[30]])
    losses = losses_of(rows(device, 3))
    for rank in ranks:
        rank.feed(lambda model: losses[2](model) * float("inf"))
        rank.optimizer.zero_grad()
    train(ranks, losses[:2])
    run(plain, rows(device, 3)[:2])
    assert_whole(ranks, plain)


# What is refused, before anything has changed


def assert_refused(rank: Rank, *words: str) -> None:
    rank.feed(losses_of(rows("cpu", 1))[0])
    before = [flat.detach().clone() for flat in rank.flats]
    with refused(rank.optimizer, *words):
        rank.step()
    assert all(map(torch.equal, before, [flat.detach() for flat in rank.flats])) and not rank.optimizer.state


@pytest.mark.parametrize("option", ["shard_state", "master_weights", "stochastic_rounding", "capturable"])
def test_options_that_are_not_served(option: str) -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu"), TCov=2, **{option: True}), [[]])
    assert_refused(rank, f"step: `{option}` must be False with parameters that are laid flat", "leave it out")


def test_a_model_of_float16() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu").half()), [[]])
    rank.model.float()
    rank.feed(losses_of(rows("cpu", 1))[0])
    rank.model.half()
    with refused(rank.optimizer, "step: `model (0.weight)` must be float32 or bfloat16", "torch.float16", "bfloat16"):
        rank.step()


def test_copies_of_sixteen_bits() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    rank.groups[0]["params"] = [rank.flats[0].detach().bfloat16().requires_grad_()]
    rank.link()
    assert_refused(rank, "step: `model (0.weight)` must have its flat copy in torch.float32, got torch.bfloat16")


def test_copies_on_another_device() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    rank.optimizer.factors()
    for p in rank.params[0]:
        torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="meta")))
    rank.link()
    rank.flats[0].grad = torch.ones_like(rank.flats[0])
    with pytest.raises(CafinError, match="its flat copy on meta, got one on cpu; leave offload_optimizer out"):
        rank.step()


def test_links_to_what_is_not_there() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    rank.groups[0]["params"] = [rank.flats[0].detach().clone().requires_grad_()]
    assert_refused(rank, "step: `model (0.weight)` must have its flat copy in the groups, got one elsewhere")
    for p in rank.params[0]:
        p._hp_mapping.hp_fragment = None  # type: ignore[attr-defined]
    assert_refused(rank, "step: `model (0.weight)` must have its flat copy in memory, got none", "reload_states()")


def test_links_in_another_order_than_the_memory() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    first, second, *_ = rank.params[0]
    first.data, second.data = first.detach().clone(), second.detach().clone()
    assert_refused(rank, "step: `model (0.bias)` must lie in the order of its flat copies", "round_robin_gradients")


def test_a_step_without_gradients(device: str) -> None:
    """As by hand, beside the wrapper's: it would count, and refresh the factors of a batch that is not stepped."""
    plain = AdaFisher(mlp(device), TCov=2)
    ranks = laid_flat(lambda: AdaFisher(mlp(device), TCov=2), [[30]])
    for loss in losses_of(rows(device, 3)):
        for rank in ranks:
            rank.feed(loss)
            grad, rank.flats[0].grad = rank.flats[0].grad, None
            words = "step: `param_groups` must have gradients of parameters that are laid flat", "engine.step()"
            with refused(rank.optimizer, *words):
                rank.step()
            rank.flats[0].grad = grad
            rank.step()
        for rank in ranks:
            rank.receive(ranks)
    run(plain, rows(device, 3))
    assert_whole(ranks, plain)


def test_a_scaler_behind_steps_without() -> None:
    """A plan that holds knows that it is flat."""
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    losses = losses_of(rows("cpu", 2))
    train([rank], losses[:1])
    rank.feed(losses[1])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with refused(rank.optimizer, "step: `GradScaler` must be left out with parameters that are laid flat"):
        scaler.step(rank.optimizer)


def test_a_scaler_costs_whole_parameters_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first step nothing goes through the model's parameters."""
    optimizer, scaler = AdaFisher(mlp("cpu")), torch.amp.GradScaler("cpu")
    for number, x in enumerate(rows("cpu", 3)):
        optimizer.zero_grad()
        scaler.scale(loss_of(optimizer.model, x)).backward()
        if number:
            monkeypatch.setattr(type(optimizer.model), "named_parameters", None)
        scaler.step(optimizer)
        monkeypatch.undo()
        scaler.update()
    assert optimizer.steps == 3


def test_a_scaler() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    rank.feed(losses_of(rows("cpu", 1))[0])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with refused(rank.optimizer, "step: `GradScaler` must be left out with parameters that are laid flat"):
        scaler.step(rank.optimizer)


def test_checks_of_gradients_that_come_group_by_group() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu"), param_groups=GROUPS, error_if_nonfinite=True), [[], []])
    assert_refused(rank, "step: `error_if_nonfinite` must be False with several groups", "one after the other")


def test_nonfinite_gradients_of_one_group() -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu"), error_if_nonfinite=True), [[]])
    rank.feed(lambda model: loss_of(model, rows("cpu", 1)[0]) * float("nan"))
    with refused(rank.optimizer, "must be finite"):
        rank.step()


@pytest.mark.parametrize("call", ["summary", "curvature", "add_param_group"])
def test_what_needs_parameters_one_by_one(call: str) -> None:
    (rank,) = laid_flat(lambda: AdaFisher(mlp("cpu")), [[]])
    arguments = [{"params": [nn.Parameter(torch.ones(2))]}] if call == "add_param_group" else []
    with refused(rank.optimizer, f"{call}: `param_groups` must hold the model's parameters", "deepspeed.initialize"):
        getattr(rank.optimizer, call)(*arguments)
