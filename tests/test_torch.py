"""The PyTorch optimizer: its signature, the life of its hooks, its state, groups, schedules, closures and scalers."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    Tokens,
    assert_same,
    everything,
    hook_count,
    images,
    loss_of,
    mlp,
    near,
    net,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

# Construction


def test_signature_is_that_of_the_public_implementation() -> None:
    parameters = list(inspect.signature(AdaFisher).parameters.values())
    shared = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert shared == [
        ("model", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("beta", 0.9),
        ("Lambda", 1e-3),
        ("gamma", 0.8),
        ("TCov", 100),
        ("weight_decay", 0),
        ("dist", None),  # False there: ranks are never found
    ]
    assert {p.name for p in parameters[8:]} == {
        *("averaging", "backend", "capturable", "grad_scaler", "error_if_nonfinite", "param_groups"),
        *("maximize", "foreach", "fused", "differentiable", "others"),
        *("momentum_dtype", "master_weights", "stochastic_rounding", "seed", "gradient_divide_factor", "check_every"),
        "shard_state",
    }
    assert {p.kind for p in parameters[8:-1]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_arguments_by_place_and_by_name(kind: type[AdaFisher]) -> None:
    named = {"lr": 0.02, "beta": 0.8, "Lambda": 0.01, "gamma": 0.9, "TCov": 2, "weight_decay": 0.1, "dist": True}
    by_place = run(kind(mlp("cpu"), *named.values()), rows("cpu", 3))
    assert_same(by_place, run(kind(mlp("cpu"), **named), rows("cpu", 3)))
    assert isinstance(by_place, torch.optim.Optimizer)


BAD = [
    ({"lr": -1.0}, "`lr` must be >= 0"),
    ({"lr": float("nan")}, "`lr` must be finite"),
    ({"lr": torch.ones(2)}, "`lr` must be a single number"),
    ({"beta": 1.0}, r"`beta` must lie in \[0, 1\)"),
    ({"Lambda": 0.0}, "`Lambda` must be > 0"),
    ({"gamma": 1.5}, r"`gamma` must lie in \[0, 1\]"),
    ({"TCov": 0}, "`TCov` must be a whole number >= 1"),
    ({"TCov": 2.5}, "`TCov` must be a whole number >= 1, got 2.5"),
    ({"weight_decay": -0.1}, "`weight_decay` must be >= 0"),
    ({"averaging": "mean"}, '`averaging` must be "parity", "paper"'),
    ({"backend": "tpu"}, '`backend` must be "cuda", "reference"'),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp("cpu")
    with pytest.raises(CafinError, match=message):
        AdaFisher(model, **options)
    assert hook_count(model) == 0


@pytest.mark.parametrize("what", [lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: m.state_dict()])
def test_parameters_instead_of_the_model(what: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(CafinError, match=r"`model` must be a torch.nn.Module, got .*; pass the model itself") as caught:
        AdaFisher(what(mlp("cpu")))
    assert isinstance(caught.value, TypeError)


def test_a_model_without_parameters() -> None:
    with pytest.raises(CafinError, match="`model` must have parameters"):
        AdaFisher(nn.ReLU())


def test_cuda_backend_is_refused_for_a_model_on_the_cpu() -> None:
    optimizer = AdaFisher(mlp("cpu"), backend="cuda")
    with pytest.raises(CafinError, match="`backend` must be able to reach the arrays, got 'cuda'"):
        run(optimizer, rows("cpu", 1))


# Hooks


@pytest.mark.parametrize("every", [1, 3])
def test_hooks_live_on_sampled_steps_only(every: int, device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=every)
    for t in range(8):
        sampled = t % every == 0
        assert optimizer.samples is sampled
        assert hook_count(optimizer.model) == (3 if sampled else 0)
        run(optimizer, rows(device, 1))
    assert optimizer.steps == 8


def test_factors_change_on_sampled_steps_only(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=3)
    for t, x in enumerate(rows(device, 7)):
        before = [f.clone() for pair in optimizer.factors().values() for f in pair]
        run(optimizer, [x])
        after = [f for pair in optimizer.factors().values() for f in pair]
        assert all(torch.equal(a, b) != (t % 3 == 0) for a, b in zip(after, before))


def test_sampling_leaves_nothing_behind() -> None:
    """Hooks come and go for as long as the training lasts."""
    optimizer = AdaFisher(mlp("cpu"), TCov=2)
    batch = rows("cpu", 1)
    run(optimizer, batch * 4)
    gc.collect()
    before = weakref.getweakrefcount(optimizer), len(weakref.finalize._registry)
    run(optimizer, batch * 20)
    gc.collect()
    assert (weakref.getweakrefcount(optimizer), len(weakref.finalize._registry)) == before


def test_a_deleted_optimizer_leaves_the_model() -> None:
    model = mlp("cpu")
    optimizer = run(AdaFisher(model, TCov=1), rows("cpu", 2))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert hook_count(model) == 0


def test_forward_without_backward_leaves_no_trace(device: str) -> None:
    a, b = (AdaFisher(mlp(device), TCov=1) for _ in range(2))
    x, y, z = rows(device, 3)
    a.model(y)
    assert_same(run(a, [x, z]), run(b, [x, z]))


def test_zero_grad_after_forward_keeps_and_after_backward_forgets(device: str) -> None:
    a, b = (AdaFisher(mlp(device), TCov=1) for _ in range(2))
    x, y, z = rows(device, 3)
    loss_of(a.model, y).backward()  # a batch that the script throws away
    loss = loss_of(a.model, x)
    a.zero_grad()
    loss.backward()
    a.step()
    assert_same(run(a, [z]), run(b, [x, z]))


def test_a_backward_after_its_step_adds_nothing_to_later_samples(device: str) -> None:
    """A graph built on a sampled step may be used on the next one, by a script that never calls `zero_grad`."""
    a, b = (AdaFisher(nn.Linear(5, 3).to(device), TCov=2) for _ in range(2))
    b.model.load_state_dict(a.model.state_dict())
    x, y = rows(device, 2)
    late = loss_of(a.model, y)
    for optimizer in (a, b):
        loss_of(optimizer.model, x).backward()
        optimizer.step()
    late.backward()
    for optimizer in (a, b):
        optimizer.step()
        optimizer.model.zero_grad()
        b.model.load_state_dict(a.model.state_dict())
    for optimizer in (a, b):
        loss_of(optimizer.model, x).backward()
        optimizer.step()
    for mine, true in zip(a.factors()[""], b.factors()[""]):
        assert torch.equal(mine, true)


# Parameters and state


@pytest.mark.filterwarnings("ignore:.*no factors")
def test_the_order_of_a_model_does_not_matter(device: str) -> None:
    one = AdaFisher(Tokens().to(device), TCov=2)
    other = AdaFisher(Tokens(("head", "scale", "norm", "cls", "fc")).to(device), TCov=2)
    assert_same(run(one, rows(device, 4)), run(other, rows(device, 4)))


def test_state_is_step_and_momentum(device: str) -> None:
    optimizer = run(AdaFisher(net(device).to(memory_format=torch.channels_last)), images(device, 2, 2))
    for p in optimizer.model.parameters():
        state = optimizer.state[p]
        assert set(state) == {"step", "exp_avg"}
        assert type(state["step"]) is int and state["step"] == 2
        average = state["exp_avg"]
        assert (average.shape, average.stride(), average.dtype) == (p.shape, p.stride(), p.dtype)
        assert not average.requires_grad


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_parameters_without_gradient_keep_their_own_count(kind: type[AdaFisher], device: str) -> None:
    """On a step without gradient a parameter, its momentum and its count rest; decay rests too."""
    optimizer = kind(mlp(device), lr=1e-3, weight_decay=0.1, TCov=100)
    head = optimizer.model[3]
    x, y, z = rows(device, 3)
    run(optimizer, [x])
    before = everything(optimizer)
    optimizer.zero_grad()
    optimizer.model[:3](y).square().mean().backward()
    optimizer.step()
    for name, value in everything(optimizer).items():
        if "3." in name and isinstance(value, Tensor):
            assert torch.equal(value, before[name]), name
    run(optimizer, [z])
    assert [optimizer.state[p]["step"] for p in optimizer.model.parameters()] == [3, 3, 3, 3, 2, 2]
    H, S = optimizer.factors()["3"]
    F = (S.double()[:, None] * H.double()[None, :7]) + 1e-3
    p, m, g = before["3.weight"].double(), before["momentum of 3.weight"].double(), head.weight.grad.double()
    m = 0.9 * m + 0.1 * (g + (0.1 * p if kind is AdaFisher else 0))
    near(head.weight, p - 1e-3 * (m / (1 - 0.9**2) / F + (0.1 * p if kind is AdaFisherW else 0)))


RESETS: dict[str, Callable[[Any, Any], Any]] = {
    "deleted": lambda state, p: state.pop(p),
    "an empty dict": lambda state, p: state.update({p: {}}),
    "a new dict": lambda state, p: state.update({p: {"step": 0, "exp_avg": torch.zeros_like(p)}}),
    "in place": lambda state, p: (state[p].update(step=0), state[p]["exp_avg"].zero_()),
}


@pytest.mark.parametrize("name", RESETS)
def test_a_script_may_reset_the_state_of_a_parameter(name: str, device: str) -> None:
    """Its next step is then as a first one."""
    x, y = rows(device, 2)
    optimizer = run(AdaFisher(mlp(device), lr=0.1), [x])
    p = optimizer.model[0].weight
    RESETS[name](optimizer.state, p)
    before = p.detach().clone()
    run(optimizer, [y])
    H, S = optimizer.factors()["0"]
    near(p, before - 0.1 * p.grad / (S[:, None] * H[None, :5] + 1e-3))
    assert [optimizer.state[q]["step"] for q in optimizer.model.parameters()] == [1, 2, 2, 2, 2, 2]


def test_step_without_any_gradient_changes_nothing(device: str) -> None:
    optimizer = AdaFisher(mlp(device), weight_decay=0.1)
    before = everything(optimizer)
    optimizer.step()
    assert_same(optimizer, {**before, "steps": 1})


def test_parameters_may_join_later(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device)), rows(device, 2))
    extra = nn.Parameter(torch.ones(4, device=device))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.full_like(extra, 2.0)
    optimizer.step()
    near(extra + 1, torch.ones(4))  # 1 - 0.5 * 2 = 0, with F = 1
    assert optimizer.state[extra]["step"] == 1


def test_more_groups_than_a_launch_has_room_for(device: str) -> None:
    torch.manual_seed(6)
    model = nn.ModuleList(nn.Linear(3, 2) for _ in range(150)).to(device)
    optimizer = AdaFisher(model, lr=0.0)
    optimizer.param_groups[0]["params"] = []
    for k, layer in enumerate(model):
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3 * k})
    before = [layer.weight.detach().clone() for layer in model]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for k, (layer, old) in enumerate(zip(model, before)):
        near(layer.weight, old - 1e-3 * k / (1 + 1e-3))  # no layer was seen: all factors are still 1


def test_hooks_of_a_subclass_with_a_step_of_its_own_run_once() -> None:
    class Mine(AdaFisher):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    seen: list[str] = []
    optimizer = Mine(mlp("cpu"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, rows("cpu", 2))
    assert seen == ["before", "after"] * 2


def test_global_hooks_and_the_profiler_see_the_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    optimizer, seen = AdaFisher(mlp("cpu")), []
    (x,) = rows("cpu", 1)
    run(optimizer, [x])
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        run(optimizer, [x])
    finally:
        handle.remove()
    run(optimizer, [x])
    assert seen == [1]
    with torch.profiler.profile() as profile:
        run(optimizer, [x])
    assert "Optimizer.step#AdaFisher.step" in {event.name for event in profile.events()}


def test_true_is_no_learning_rate_even_where_one_was() -> None:
    optimizer = run(AdaFisher(mlp("cpu"), lr=1), rows("cpu", 1))
    optimizer.param_groups[0]["lr"] = True
    with refused(optimizer, "`lr` must be a number"):
        optimizer.step()


@pytest.mark.parametrize("change", [lambda p: p[:2], lambda p: p.view(7, 3), lambda p: p.t()])
def test_a_parameter_that_changes_under_its_address_is_refused(device: str, change: Callable[[Tensor], Tensor]) -> None:
    """Though its gradient of before is still there, and fits what it was."""
    optimizer = AdaFisher(mlp(device))
    for x in rows(device, 3):
        optimizer.zero_grad()
        loss_of(optimizer.model, x).backward()
        optimizer.step()
    weight = optimizer.model[3].weight  # (3, 7)
    weight.data = change(weight.data)
    before = {name: p.detach().clone() for name, p in optimizer.model.named_parameters()}
    with pytest.raises(CafinError):
        optimizer.step()
    for name, p in optimizer.model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_gradients_with_the_negative_bit(device: str) -> None:
    one, other = (AdaFisher(mlp(device)) for _ in range(2))
    for x in rows(device, 3):
        for optimizer in (one, other):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
        for p in one.model.parameters():
            p.grad = torch._neg_view(-p.grad)
        one.step()
        other.step()
    assert_same(one, other)


def test_a_parameter_that_leaves_its_group_is_not_trained(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device)), rows(device, 2))
    bias = optimizer.param_groups[0]["params"].pop()
    before = bias.detach().clone()
    run(optimizer, rows(device, 1))
    assert torch.equal(bias, before)


def test_a_capturable_state_without_a_step_is_saved_as_zero() -> None:
    optimizer = run(AdaFisher(mlp("cpu"), capturable=True), rows("cpu", 1))
    del next(iter(optimizer.state.values()))["step"]
    assert optimizer.state_dict()["state"][0]["step"] == 0


def test_a_step_that_is_wrapped_by_hand_keeps_its_hooks() -> None:
    class Mine(AdaFisher):
        @functools.wraps(AdaFisher.step)
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    seen: list[int] = []
    optimizer = Mine(mlp("cpu"))
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    run(optimizer, rows("cpu", 2))
    assert seen == [1, 1]


def test_a_parameter_that_takes_the_place_of_another_is_trained(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device)), rows(device, 2))
    old = optimizer.model[3].weight
    new = optimizer.model[3].weight = nn.Parameter(old.detach().clone())
    params = optimizer.param_groups[0]["params"]
    params[[p is old for p in params].index(True)] = new
    before = new.detach().clone()
    run(optimizer, rows(device, 1))
    assert not torch.equal(new, before)


def test_parameters_that_change_places_between_groups(device: str) -> None:
    """Each follows the rate of the group it is in by now."""
    optimizer = AdaFisher(mlp(device), lr=1e-3)
    first = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [first.pop()], "lr": 0.0})
    run(optimizer, rows(device, 2))
    second = optimizer.param_groups[1]["params"]
    frozen = first[-1]
    first[-1], second[0] = second[0], first[-1]
    before = frozen.detach().clone()
    run(optimizer, rows(device, 1))
    assert torch.equal(frozen, before) and not torch.equal(first[-1], torch.zeros_like(first[-1]))


def test_a_state_without_a_count_starts_anew(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device)), rows(device, 2))
    state = next(iter(optimizer.state.values()))
    del state["step"]
    run(optimizer, rows(device, 1))
    assert state["step"] == 1
