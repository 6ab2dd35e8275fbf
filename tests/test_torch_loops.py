"""The PyTorch optimizer where AdamW was: what training loops do with an optimizer, and what they get."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import lr_scheduler, swa_utils  # noqa: E402
from torch_helpers import (  # noqa: E402
    DEVICES,
    TOLERANCE,
    Tokens,
    assert_same,
    everything,
    hook_count,
    loss_of,
    mlp,
    near,
    net,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

# Gradient accumulation


@pytest.mark.parametrize("device", DEVICES[:1])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([AdaFisher, AdaFisherW]))
@settings(deadline=None)
def test_micro_batches_weighted_by_their_counts_equal_the_full_batch(
    device: str, sizes: list[int], kind: type[AdaFisher]
) -> None:
    """As the loss's mean does it: the last micro-batch may be smaller. Parameters, momentum and factors."""
    check_accumulation(device, sizes, kind)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [4, 4, 1], [1, 1, 1, 1], [5]])
def test_micro_batches_on_each_device(sizes: list[int], device: str) -> None:
    check_accumulation(device, sizes, AdaFisher)


def check_accumulation(device: str, sizes: list[int], kind: type[AdaFisher]) -> None:
    total = sum(sizes)
    whole, parts = (kind(mlp(device), TCov=2, averaging=RAW, weight_decay=0.1, lr=1e-2, Lambda=0.1) for _ in range(2))
    for x in rows(device, 3, batch=total):
        run(whole, [x])
        parts.zero_grad()
        for part in x.split(sizes):
            (loss_of(parts.model, part) * (len(part) / total)).backward()
        parts.step()
    assert_same(parts, whole, 5 * TOLERANCE)  # three steps, each from gradients summed in another order


# Gradients that the loop changes


@pytest.mark.parametrize(
    "clip", [lambda p: nn.utils.clip_grad_norm_(p, 0.05), lambda p: nn.utils.clip_grad_value_(p, 0.01)]
)
def test_clipped_gradients_are_what_the_step_sees(clip: Callable[[Any], Any], device: str) -> None:
    """Momentum is theirs; factors are those of the loss as it was."""
    plain, clipped = (AdaFisher(mlp(device), TCov=1, beta=0.0) for _ in range(2))
    for optimizer in (plain, clipped):
        loss_of(optimizer.model, rows(device, 1)[0] * 10).backward()
    clip(clipped.model.parameters())
    grads = [p.grad.clone() for p in clipped.model.parameters()]
    assert not all(torch.equal(g, p.grad) for g, p in zip(grads, plain.model.parameters()))
    for optimizer in (plain, clipped):
        optimizer.step()
    for p, g in zip(clipped.model.parameters(), grads):
        assert torch.equal(clipped.state[p]["exp_avg"], g)
    for mine, theirs in zip(clipped.factors().values(), plain.factors().values()):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_the_total_norm_of_gradients(device: str) -> None:
    total_norm = getattr(nn.utils, "get_total_norm", None)
    if total_norm is None:
        pytest.skip("this PyTorch has none")
    results = []
    for watched in (False, True):
        optimizer = AdaFisher(mlp(device), TCov=1)
        for x in rows(device, 3):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
            if watched:
                grads = [p.grad for p in optimizer.model.parameters()]
                norm = total_norm(grads)
                near(norm.square(), sum(g.double().square().sum() for g in grads))
                nn.utils.clip_grads_with_norm_(optimizer.model.parameters(), 1e9, norm)
            optimizer.step()
        results.append(optimizer)
    assert_same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(set_to_none: bool, device: str) -> None:
    """A gradient of zeros is one: it is counted, and momentum goes on; None is none."""
    optimizer = run(AdaFisher(mlp(device), TCov=1), rows(device, 2))
    before = everything(optimizer)
    optimizer.zero_grad(set_to_none)
    assert all((p.grad is None) == set_to_none for p in optimizer.model.parameters())
    optimizer.step()
    for name, p in optimizer.model.named_parameters():
        assert torch.equal(p, before[name]) == set_to_none
        assert optimizer.state[p]["step"] == (2 if set_to_none else 3)
    both = [AdaFisher(mlp(device), TCov=2) for _ in range(2)]
    for x in rows(device, 4):
        for each, none in zip(both, (True, False)):
            each.zero_grad(none)
            loss_of(each.model, x).backward()
            each.step()
    assert_same(*both)


def test_a_closure(device: str) -> None:
    plain, closed = (AdaFisher(mlp(device), TCov=2) for _ in range(2))
    for x in rows(device, 4):

        def closure(x: Tensor = x) -> Tensor:
            closed.zero_grad()
            loss = loss_of(closed.model, x)
            loss.backward()
            return loss

        with torch.no_grad():
            wanted = loss_of(plain.model, x)
        assert torch.equal(closed.step(closure), wanted)
        run(plain, [x])
    assert_same(plain, closed)


class Paths(nn.Module):
    """Of two branches, of which each batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 2)
        self.way = "left"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(getattr(self, self.way)(x)))


def test_each_parameter_counts_the_steps_with_a_gradient(device: str) -> None:
    """Bias correction goes by a parameter's own steps, so a branch trains as it would alone."""
    optimizer = AdaFisher(Paths().to(device), TCov=1, weight_decay=0.1)
    for x, way in zip(rows(device, 5), ("left", "left", "right", "left", "right")):
        optimizer.model.way = way
        before = everything(optimizer)
        run(optimizer, [x])
        other = "right" if way == "left" else "left"
        for name, value in everything(optimizer).items():
            if other in name:
                assert value is before[name] or torch.equal(torch.as_tensor(value), torch.as_tensor(before[name]))
    counts = {name: optimizer.state[p]["step"] for name, p in optimizer.model.named_parameters()}
    assert counts == {
        f"{layer}.{p}": n for layer, n in (("left", 3), ("right", 2), ("head", 5)) for p in ("weight", "bias")
    }


# Schedulers

MADE: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-3, step_size_up=2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: t / 4),  # warm-up from 0
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-4, 3),
}


def test_no_scheduler_is_forgotten() -> None:
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= MADE.keys() - {"SWALR"}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("error::UserWarning", "ignore:The epoch parameter")  # SequentialLR in PyTorch 2.6
def test_every_scheduler_of_torch(name: str, tensor: bool, device: str) -> None:
    """As setting rate and momentum by hand; the rates are those that it gives SGD."""
    batches = rows(device, 6)
    lr: Any = torch.tensor(1e-3, dtype=torch.float64) if tensor else 1e-3
    optimizer = AdaFisher(mlp(device), lr=lr, TCov=2)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3, momentum=0.9)
    scheduler, other = MADE[name](optimizer), MADE[name](theirs)
    used = []
    for x in batches:
        (group,), (sgd,) = optimizer.param_groups, theirs.param_groups
        used.append((float(group["lr"]), group["beta"]))
        assert used[-1] == pytest.approx((sgd["lr"], sgd["momentum"]))
        run(optimizer, [x])
        theirs.step()
        metric = [1.0] if name == "ReduceLROnPlateau" else []
        scheduler.step(*metric)
        other.step(*metric)
    assert len({rate for rate, _ in used}) > 1
    assert (len({beta for _, beta in used}) > 1) == (name in ("CyclicLR", "OneCycleLR"))
    by_hand = AdaFisher(mlp(device), TCov=2)
    for x, (rate, beta) in zip(batches, used):
        by_hand.param_groups[0].update(lr=rate, beta=beta)
        run(by_hand, [x])
    assert_same(optimizer, by_hand)


@pytest.mark.parametrize("name", MADE)
def test_schedulers_go_on_from_checkpoints(name: str) -> None:
    """Of the optimizer and of the scheduler, in the order that PyTorch asks for."""
    batches = rows("cpu", 8)
    optimizer = AdaFisher(mlp("cpu"), TCov=3)
    scheduler = MADE[name](optimizer)

    def train(optimizer: AdaFisher, scheduler: Any, batches: list[Tensor]) -> None:
        for x in batches:
            run(optimizer, [x])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    train(optimizer, scheduler, batches[:4])
    again = AdaFisher(mlp("cpu"), TCov=3)
    twin = MADE[name](again)
    again.model.load_state_dict(optimizer.model.state_dict())
    twin.load_state_dict(scheduler.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, scheduler, batches[4:7])
    train(again, twin, batches[4:7])
    assert_same(again, optimizer)
    assert again.param_groups[0]["beta"] == optimizer.param_groups[0]["beta"]


def test_rates_that_a_loop_sets(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=2)
    for t, x in enumerate(rows(device, 4)):
        before = everything(optimizer)
        optimizer.param_groups[0]["lr"] = 0.0 if t % 2 else 1e-3
        run(optimizer, [x])
        for name, p in optimizer.model.named_parameters():
            assert torch.equal(p, before[name]) == bool(t % 2)


def test_a_cycle_may_not_leave_the_allowed_momentum(device: str) -> None:
    optimizer = AdaFisher(mlp(device))
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    optimizer.param_groups[0]["momentum"] = 1.5
    with refused(optimizer, "step: `beta` must lie in [0, 1), got 1.5"):
        optimizer.step()


# Averages of weights

AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "mean": lambda m: swa_utils.AveragedModel(m),
    "exponential": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name: str, device: str) -> None:
    """The average takes its part in no step, and the optimizer none in it."""
    optimizer = AdaFisher(net(device), TCov=2)
    averaged = AVERAGES[name](optimizer.model)  # copied with hooks in it
    torch.manual_seed(2)
    batches = [torch.randn(4, 3, 9, 8, device=device) for _ in range(5)]
    history = []
    for x in batches:
        run(optimizer, [x])
        averaged.update_parameters(optimizer.model)
        history.append([p.detach().double().clone() for p in optimizer.model.parameters()])
        with torch.no_grad():
            averaged(x)
    before = everything(optimizer)
    swa_utils.update_bn([x for x in batches], averaged, device=device)  # noqa: C416
    loss_of(averaged, batches[0])
    assert hook_count(averaged) == 0
    assert_same(optimizer, before)
    plain = AdaFisher(net(device), TCov=2)
    assert_same(run(plain, batches), optimizer)
    for k, p in enumerate(averaged.module.parameters()):
        wanted = history[0][k]
        for n, each in enumerate(history[1:], 2):
            wanted = wanted + (each[k] - wanted) / n if name == "mean" else 0.9 * wanted + 0.1 * each[k]
        near(p, wanted)


# The idiom of language models


def test_no_decay_for_biases_and_norms(device: str) -> None:
    """By lists of parameters, as scripts have them, and by names: the same run."""
    results = []
    for by_name in (False, True):
        model = Tokens().to(device)
        vectors = [p for p in model.parameters() if p.dim() < 2]
        given = ["*.bias", "norm.*", "cls", "scale"] if by_name else vectors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `cls` and `scale`, which no layer owns
            optimizer = AdaFisherW(model, weight_decay=0.5, param_groups=[{"params": given, "weight_decay": 0.0}])
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in vectors}
        results.append(run(optimizer, rows(device, 3)))
    assert_same(*results)
