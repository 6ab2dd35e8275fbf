"""What reaches a step of the PyTorch optimizer: schedules, closures, gradients of every layout, scales, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    hook_count,
    images,
    loss_of,
    mlp,
    near,
    net,
    record,
    refused,
    rows,
    run,
    scaled_run,
    scaler_of,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

# Scalars

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_set_the_rate_of_each_step(schedule: str, tensor: bool, device: str) -> None:
    """As setting the rate by hand; a scheduler fills a tensor in place."""
    batches = rows(device, 5)
    optimizer = AdaFisher(mlp(device), lr=torch.tensor(1e-3) if tensor else 1e-3, TCov=2)
    scheduler = SCHEDULES[schedule](optimizer)
    rates = []
    for x in batches:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        run(optimizer, [x])
        scheduler.step()
    assert len(set(rates)) > 2
    by_hand = AdaFisher(mlp(device), TCov=2)
    for x, rate in zip(batches, rates):
        by_hand.param_groups[0]["lr"] = rate
        run(by_hand, [x])
    assert_same(optimizer, by_hand)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", -1.0, ("`lr` must be >= 0, got -1",)),
        ("lr", float("inf"), ("`lr` must be finite",)),
        ("Lambda", 0.0, ("`Lambda` must be > 0, got 0",)),
        ("beta", 1.0, ("`beta` must lie in [0, 1), got 1.0",)),
        ("weight_decay", "0.1", ("`weight_decay` must be a number, got '0.1'",)),
        ("beta", [0.9], ("`beta` must be a number, got [0.9]",)),
    ],
)
def test_scalars_are_checked_on_each_step(name: str, value: Any, words: tuple[str, ...], device: str) -> None:
    optimizer = run(AdaFisher(mlp(device), TCov=1), rows(device, 2))
    good = optimizer.param_groups[0][name]
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    optimizer.param_groups[0][name] = value
    with refused(optimizer, "step", *words):
        optimizer.step()
    optimizer.param_groups[0][name] = good
    optimizer.step()
    assert optimizer.steps == 3


def test_the_interval_may_change_between_steps(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device), TCov=100), rows(device, 2))
    optimizer.TCov = 2  # the third step is sampled now
    before = [f.clone() for pair in optimizer.factors().values() for f in pair]
    run(optimizer, rows(device, 1))
    after = [f for pair in optimizer.factors().values() for f in pair]
    assert not any(torch.equal(a, b) for a, b in zip(after, before))
    with pytest.raises(CafinError, match="`TCov` must be a whole number >= 1, got 0"):
        optimizer.TCov = 0


def test_an_interval_that_unsamples_the_coming_step_drops_its_sums(device: str) -> None:
    a, b = (run(AdaFisher(mlp(device), TCov=1), rows(device, 1)) for _ in range(2))
    loss_of(a.model, rows(device, 2)[1]).backward()
    a.TCov = 2
    a.step()
    copy.deepcopy(a)  # between steps, so nothing is pending
    a.model.load_state_dict(b.model.state_dict())
    for optimizer in (a, b):
        optimizer.TCov = 1
        optimizer.model.zero_grad()
        loss_of(optimizer.model, rows(device, 3)[2]).backward()
        optimizer.step()
    for mine, true in zip(a.factors().values(), b.factors().values()):
        assert torch.equal(mine[0], true[0]) and torch.equal(mine[1], true[1])


def test_the_number_of_steps_may_be_set(device: str) -> None:
    """By a script that has replayed a graph of its own, say: whether the coming step is sampled follows the number."""
    optimizer = run(AdaFisher(mlp(device), TCov=4), rows(device, 1))
    optimizer.steps = 4
    before = everything(optimizer)
    run(optimizer, rows(device, 1))
    assert not any(torch.equal(before[f"H of {name}"], H) for name, (H, _) in optimizer.factors().items())
    optimizer.steps = 8
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    optimizer.steps = 9
    assert hook_count(optimizer.model) == 0
    before = everything(optimizer)
    optimizer.step()
    assert all(torch.equal(before[f"S of {name}"], S) for name, (_, S) in optimizer.factors().items())
    for bad in (-1, 1.5, "2", None):
        with refused(optimizer, "`steps` must be a"):
            optimizer.steps = bad


# Gradients


def test_sparse_gradients_are_refused(device: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)).to(device)
    optimizer = AdaFisher(model)
    loss_of(model, torch.tensor([1, 3], device=device)).backward()
    with refused(optimizer, "step: `gradient of 0.weight` must be dense", "got layout torch.sparse_coo", ".to_dense()"):
        optimizer.step()


def test_gradients_of_another_dtype_are_refused(device: str) -> None:
    optimizer = AdaFisher(mlp(device))
    p = optimizer.model[0].weight
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this PyTorch allows no gradient of another dtype")
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    p.grad, p.grad_dtype = None, None
    p.grad = torch.ones_like(p, dtype=torch.float64)
    with refused(optimizer, "step: `gradient of 0.weight` must be torch.float32", "got torch.float64", "convert it"):
        optimizer.step()


# Loss scales


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_a_loss_scale_changes_nothing(kind: type[AdaFisher], micro: int, device: str) -> None:
    """Scales are powers of two, which rounding does not see; the scale grows on the way."""
    optimizer = kind(mlp(device), TCov=2, weight_decay=0.1)
    scaled_run(optimizer, scaler_of(device), rows(device, 6), micro=micro)
    plain = run(kind(mlp(device), TCov=2, weight_decay=0.1), rows(device, 6), micro)
    assert_same(optimizer, plain, TOLERANCE)


def test_disabled_scaler(device: str) -> None:
    scaler = torch.amp.GradScaler(device, enabled=False)
    optimizer = AdaFisher(mlp(device), TCov=2, grad_scaler=scaler)
    scaled_run(optimizer, scaler, rows(device, 3), clip=1e9)
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=2), rows(device, 3)))


def test_unscale_and_clip(device: str) -> None:
    scaler = scaler_of(device)
    optimizer = AdaFisher(mlp(device), TCov=2, grad_scaler=scaler)
    scaled_run(optimizer, scaler, rows(device, 4), clip=0.05)
    plain = AdaFisher(mlp(device), TCov=2)
    for x in rows(device, 4):
        plain.zero_grad()
        loss_of(plain.model, x).backward()
        assert nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05) > 0.05
        plain.step()
    assert_same(optimizer, plain, TOLERANCE)


def test_unscale_without_the_scaler_is_refused_on_a_sampled_step(device: str) -> None:
    """The gradients no longer tell the scale that the factors need."""
    scaler = scaler_of(device)
    optimizer = AdaFisher(mlp(device), TCov=2)
    scaler.scale(loss_of(optimizer.model, rows(device, 1)[0])).backward()
    scaler.unscale_(optimizer)
    with refused(optimizer, "step: `grad_scaler` must be known", "AdaFisher(model, ..., grad_scaler=scaler)"):
        scaler.step(optimizer)


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_moments_under_autocast(dtype: torch.dtype, device: str) -> None:
    model = net(device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    for x in images(device, 4, 4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            out = model(x)
        assert out.dtype == dtype
        (out.float() * torch.arange(4, device=device)).mean().backward()
        optimizer.step()
        assert_moments(optimizer, seen)


def test_half_precision_parameters_on_the_reference() -> None:
    """bfloat16 parameters: momentum and factors in float32."""
    optimizer = run(AdaFisher(mlp("cpu").bfloat16(), TCov=1), [x.bfloat16() for x in rows("cpu", 2)])
    assert {f.dtype for pair in optimizer.factors().values() for f in pair} == {torch.float32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    exact = run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2))
    for p, q in zip(optimizer.model.parameters(), exact.model.parameters()):
        near(p, q, tolerance=0.05)  # eight bits of mantissa, through two steps
