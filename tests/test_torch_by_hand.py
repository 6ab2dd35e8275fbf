"""Groups, state and attributes that a script edits by hand: the next step refuses them, and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_helpers import (  # noqa: E402
    assert_same,
    everything,
    loss_of,
    mlp,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

Edit = Callable[[AdaFisher], None]


def in_group(key: str, value: Any) -> Edit:
    return lambda optimizer: optimizer.param_groups[0].__setitem__(key, value)


def without(key: str) -> Edit:
    return lambda optimizer: optimizer.param_groups[0].pop(key)


def appended(*left_out: str) -> Edit:
    """The last parameter moves into a new group of its own."""

    def edit(optimizer: AdaFisher) -> None:
        params = [optimizer.param_groups[0]["params"].pop()]
        scalars = {key: value for key, value in optimizer.defaults.items() if key not in left_out}
        optimizer.param_groups.append({"params": params, **scalars})

    return edit


def in_state(key: str, value: Any) -> Edit:
    return lambda optimizer: optimizer.state[optimizer.model[0].weight].__setitem__(key, value)


def as_state(value: Any) -> Edit:
    return lambda optimizer: optimizer.state.__setitem__(optimizer.model[0].weight, value)


def attribute(name: str, value: Any) -> Edit:
    return lambda optimizer: setattr(optimizer, name, value)


REFUSED: dict[str, tuple[Edit, tuple[str, ...]]] = {
    **{
        f"no {key}": (without(key), (f"`param_groups[0]` must have the key {key!r}", "add_param_group"))
        for key in ("params", "lr", "beta", "Lambda", "weight_decay", "maximize")
    },
    "appended without beta": (appended("beta"), ("`param_groups[1]` must have the key 'beta'", "add_param_group")),
    "a list for a group": (
        lambda optimizer: optimizer.param_groups.append([1]),  # type: ignore[arg-type]
        ("`param_groups[1]` must be a dict, got list",),
    ),
    "no groups": (attribute("param_groups", None), ("`param_groups` must stay a list of groups, got NoneType",)),
    "names for params": (in_group("params", ["*"]), ("`param_groups[0]['params']` must be a list of tensors", "names")),
    "None for params": (in_group("params", None), ("`param_groups[0]['params']` must be a list of tensors, got None",)),
    "None for a state": (as_state(None), ("`state of 0.weight` must be a dict, got NoneType", "to start anew")),
    "a list for a state": (as_state([]), ("`state of 0.weight` must be a dict, got list",)),
    "a word for momentum": (in_state("exp_avg", "x"), ("'exp_avg' in the state of 0.weight", "must be a tensor")),
    "a sparse momentum": (
        lambda optimizer: in_state("exp_avg", optimizer.state[optimizer.model[0].weight]["exp_avg"].to_sparse())(
            optimizer
        ),
        ("`momentum of 0.weight` must be dense",),
    ),
    **{
        f"step {value!r}": (in_state("step", value), ("`step of 0.weight` must be a", shown))
        for value, shown in [
            (None, "None"), ("x", "'x'"), (-1, "-1"), (1.5, "1.5"), (torch.ones(2), "tensor("), (2**63, "below")
        ]
    },
    "error_if_nonfinite": (attribute("error_if_nonfinite", "x"), ("`error_if_nonfinite` must be True or False",)),
}  # fmt: skip


@pytest.mark.parametrize("complete", [True, False], ids=["all gradients", "one without"])
@pytest.mark.parametrize("name", REFUSED)
def test_the_next_step_refuses(name: str, complete: bool, device: str) -> None:
    edit, words = REFUSED[name]
    optimizer = run(AdaFisher(mlp(device), TCov=1), rows(device, 2))
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    if not complete:
        optimizer.model[2].weight.grad = None
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    state = {p: dict(entry) for p, entry in optimizer.state.items()}
    before = everything(optimizer)
    edit(optimizer)
    with pytest.raises(CafinError) as caught:
        optimizer.step()
    assert all(word in str(caught.value) for word in ("step: ", *words)), caught.value
    optimizer.param_groups, optimizer.error_if_nonfinite = groups, False
    optimizer.state.update(state)
    assert_same(optimizer, before)
    optimizer.step()
    assert optimizer.steps == 3


def test_a_group_may_be_appended_whole(device: str) -> None:
    plain, optimizer = (run(AdaFisher(mlp(device), TCov=2), rows(device, 2)) for _ in range(2))
    appended()(optimizer)
    assert_same(run(optimizer, rows(device, 3)), run(plain, rows(device, 3)))


@pytest.mark.parametrize("call", ["zero_grad", "state_dict", "curvature"])
def test_other_methods_refuse_bad_groups(call: str) -> None:
    optimizer = run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 1))
    (without("params") if call == "zero_grad" else appended("beta"))(optimizer)
    with pytest.raises(CafinError, match=rf"{call}: `param_groups\[\d\]` must have the key"):
        getattr(optimizer, call)()


def test_messages_say_which_group_has_the_bad_scalar() -> None:
    optimizer = run(AdaFisher(mlp("cpu"), param_groups=[{"params": "*.bias"}]), rows("cpu", 1))
    optimizer.param_groups[1]["lr"] = -1.0
    for call in (optimizer.step, optimizer.curvature):
        with pytest.raises(CafinError, match=r"`param_groups\[1\]\['lr'\]` must be >= 0, got -1"):
            call()


def test_an_optimizer_whose_groups_are_emptied_has_nothing_to_do() -> None:
    optimizer = AdaFisher(mlp("cpu"))
    optimizer.param_groups[0]["params"].clear()
    optimizer.step()
    assert (optimizer.steps, len(optimizer.curvature())) == (1, 0)
    assert "total" in str(optimizer.summary())


def test_what_is_not_a_function_is_refused() -> None:
    optimizer = AdaFisher(mlp("cpu"))
    with pytest.raises(CafinError, match="step: `closure` must be a function, got str"):
        optimizer.step("again")
    with pytest.raises(CafinError, match="capture: `iteration` must be a function, got NoneType"):
        optimizer.capture(None)


def test_a_scaler_that_is_none_is_refused_when_it_is_needed() -> None:
    optimizer = AdaFisher(mlp("cpu"))
    optimizer.grad_scaler = "x"
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(optimizer.model, rows("cpu", 1)[0])).backward()
    scaler.unscale_(optimizer)
    before = everything(optimizer)
    with pytest.raises(CafinError, match="step: `grad_scaler` must be a GradScaler, got str"):
        scaler.step(optimizer)
    assert_same(optimizer, before)


# Inference mode


@pytest.mark.parametrize("call", ["step", "factors", "load_state_dict"])
def test_what_is_made_in_inference_mode_serves_outside_of_it(call: str, device: str) -> None:
    """Momenta, masters and factors are changed later; PyTorch refuses that for tensors of the mode."""
    options: dict[str, Any] = {"TCov": 2, "master_weights": True}
    plain = AdaFisher(mlp(device).bfloat16(), **options)
    optimizer = AdaFisher(mlp(device).bfloat16(), **options)
    for t, x in enumerate(rows(device, 4)):
        for each in (plain, optimizer):
            each.zero_grad()
            loss_of(each.model, x.bfloat16()).backward()
        plain.step()
        with torch.inference_mode(mode=t % 2 == 0):
            if call == "factors":
                optimizer.factors()
            if call == "step":
                optimizer.step()
        if call != "step":
            optimizer.step()
        if call == "load_state_dict":
            with torch.inference_mode():
                optimizer.load_state_dict(plain.state_dict())
    assert_same(optimizer, plain)
