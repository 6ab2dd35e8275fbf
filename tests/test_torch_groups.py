"""Parameter groups of the PyTorch optimizer: by parameters, names and patterns, added later, with other signs and names
of their scalars; and the arguments of other optimizers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    loss_of,
    mlp,
    near,
    net,
    record,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402
from cafin_cupy.adapters.torch_groups import Group  # noqa: E402


def names_of(optimizer: AdaFisher) -> list[list[str]]:
    names = {id(p): name for name, p in optimizer.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# Who is in which group

EVERY = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]  # of `mlp`

ASKED: dict[str, tuple[Callable[[nn.Module], list[dict[str, Any]]], list[list[str]]]] = {
    "a name": (lambda m: [{"params": "3.bias"}], [["3.bias"], EVERY[:5]]),
    "a pattern": (lambda m: [{"params": "*.bias"}], [EVERY[1::2], EVERY[0::2]]),
    "patterns that meet": (lambda m: [{"params": ["*.bias", "2.*"]}], [[*EVERY[1::2], "2.weight"], EVERY[::4]]),
    "a set of letters": (lambda m: [{"params": "[03].*"}], [[*EVERY[:2], *EVERY[4:]], EVERY[2:4]]),
    "a parameter": (lambda m: [{"params": m[0].weight}], [EVERY[:1], EVERY[1:]]),
    "an iterator": (lambda m: [{"params": m[3].parameters()}], [EVERY[4:], EVERY[:4]]),
    "named parameters": (lambda m: [{"params": m.named_parameters()}], [EVERY]),
    "both": (lambda m: [{"params": [m[0].bias, "3.*"]}], [[EVERY[1], *EVERY[4:]], [EVERY[0], *EVERY[2:4]]]),
    "two groups": (lambda m: [{"params": "0.*"}, {"params": "3.*"}], [EVERY[:2], EVERY[4:], EVERY[2:4]]),
    "everything": (lambda m: [{"params": "*"}], [EVERY]),
    "no group": (lambda m: [], [EVERY]),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_parameters_by_name_and_by_themselves(name: str) -> None:
    """What is not asked for makes the last group."""
    ask, wanted = ASKED[name]
    model = mlp("cpu")
    asked = ask(model)
    assert names_of(AdaFisher(model, param_groups=asked)) == wanted


@given(st.lists(st.sampled_from(["none", "a", "b"]), min_size=6, max_size=6))
def test_every_parameter_is_in_one_group(homes: list[str]) -> None:
    groups = [
        {"params": [n for n, home in zip(EVERY, homes) if home == g], "lr": lr} for g, lr in (("a", 0.1), ("b", 0.2))
    ]
    optimizer = AdaFisher(mlp("cpu"), param_groups=[group for group in groups if group["params"]])
    found = {name: group["lr"] for names, group in zip(names_of(optimizer), optimizer.param_groups) for name in names}
    assert found == {name: {"a": 0.1, "b": 0.2, "none": 1e-3}[home] for name, home in zip(EVERY, homes)}
    assert sum(map(len, names_of(optimizer))) == 6


def test_a_tied_parameter_answers_to_all_its_names() -> None:
    model = nn.ModuleDict({"table": nn.Linear(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["table"].weight
    for name in ("table.weight", "head.weight"):
        assert names_of(AdaFisher(model, param_groups=[{"params": name}])) == [["table.weight"], ["table.bias"]]
    with pytest.raises(CafinError, match=r"of no other group, got `table.weight`, as param_groups\[0\]"):
        AdaFisher(model, param_groups=[{"params": "table.weight"}, {"params": "head.weight"}])


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_each_group_has_its_own_scalars(kind: type[AdaFisher], device: str) -> None:
    """Every parameter moves as in an optimizer that has its group's scalars for all."""
    own: list[dict[str, Any]] = [
        {"lr": 5e-4, "weight_decay": 0.0},
        {"beta": 0.5, "Lambda": 0.01},
        {"maximize": True},
    ]
    common: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "TCov": 1}
    groups = [{"params": pattern, **more} for pattern, more in zip(("*.bias", "0.weight", "3.weight"), own)]
    optimizer = run(kind(mlp(device), param_groups=groups, **common), rows(device, 1))
    for names, more in zip(names_of(optimizer), [*own, {}]):
        alone = everything(run(kind(mlp(device), **{**common, **more}), rows(device, 1)))
        for name, p in optimizer.model.named_parameters():
            if name in names:
                assert torch.equal(p, alone[name]), name
                assert torch.equal(optimizer.state[p]["exp_avg"], alone[f"momentum of {name}"])


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown name": ([{"params": "fc.weight"}], ("`param_groups[0]['params']`", "'fc.weight'", "0.weight, 0.bias")),
    "unknown pattern": ([{"params": ["*.bias", "x*"]}], ("name parameters of the model", "'x*'")),
    "empty": ([{"params": "0.*"}, {"params": []}], ("`param_groups[1]['params']` must hold a parameter",)),
    "doubled": ([{"params": "0.*"}, {"params": "*.bias"}], ("no other group", "`0.bias`", "param_groups[0]")),
    "foreign": ([{"params": [torch.zeros(2)]}], ("parameters of the model", "(2,)", "add_param_group")),
    "no params": ([{"lr": 0.1}], ("the key 'params'",)),
    "a set": ([{"params": {"0.bias"}}], ("an order", "pass a list")),
    "a number": ([{"params": [3]}], ("parameters or names of them", "int")),
    "one number": ([{"params": 3}], ("parameters or names of them", "int")),
    "no list": ({"params": "0.*"}, ("`param_groups` must be a list of dicts",)),
    "a tensor": (torch.tensor(1.0), ("`param_groups` must be a list of dicts",)),
    "no dict": (["0.*"], ("`param_groups[0]` must be a dict",)),
    "bad lr": ([{"params": "0.*", "lr": -1.0}], ("`param_groups[0]['lr']` must be >= 0",)),
    "bad Lambda": ([{"params": "0.*", "Lambda": 0}], ("`param_groups[0]['Lambda']` must be > 0",)),
    "bad maximize": ([{"params": "0.*", "maximize": "yes"}], ("`param_groups[0]['maximize']` must be True or False",)),
    "betas": ([{"params": "0.*", "betas": (0.9, 0.999)}], ("`param_groups[0]['betas']`", "pass beta=betas[0]")),
    "eps": ([{"params": "0.*", "eps": 1e-8}], ("`param_groups[0]['eps']`", "damping is called Lambda")),
    "an option of all": ([{"params": "0.*", "TCov": 5}], ("`param_groups[0]['TCov']`", "one for all groups")),
    "differentiable": ([{"params": "0.*", "differentiable": True}], ("`param_groups[0]['differentiable']`", "False")),
    "names of its own": ([{"params": "0.*", "param_names": ["a"]}], ("['param_names']", "model knows the names")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_are_refused(name: str) -> None:
    groups, words = REFUSED[name]
    model = mlp("cpu")
    with pytest.raises(CafinError) as caught:
        AdaFisher(model, param_groups=groups)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not any(module._forward_hooks for module in model.modules())


def test_the_scripts_dicts_stay_as_they_are() -> None:
    groups = [{"params": "*.bias", "weight_decay": 0.0}]
    AdaFisher(mlp("cpu"), param_groups=groups)
    assert groups == [{"params": "*.bias", "weight_decay": 0.0}]


# Groups that are added later


def test_a_layer_that_joins_later_has_factors(device: str) -> None:
    """And the others keep theirs, to the bit."""
    model = mlp(device)
    optimizer = run(AdaFisher(model, TCov=1, averaging=RAW), rows(device, 2))
    before = everything(optimizer)
    model.insert(0, nn.Identity())  # names and places change
    model.append(nn.Linear(3, 2).to(device))
    optimizer.add_param_group({"params": "5.*", "lr": 0.01})
    assert list(optimizer.factors()) == ["1", "3", "4", "5"]
    for new, old in (("1", "0"), ("3", "2"), ("4", "3")):
        for letter, mine in zip("HS", optimizer.factors()[new]):
            assert torch.equal(mine, before[f"{letter} of {old}"])
    assert all(torch.equal(F, torch.ones_like(F)) for F in optimizer.factors()["5"])
    seen = record(model)
    run(optimizer, rows(device, 1))
    assert_moments(optimizer, seen)
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [3] * 6 + [1] * 2


def test_a_later_layer_trains_as_one_that_was_there(device: str) -> None:
    whole = nn.Sequential(*mlp(device), nn.Linear(3, 2).to(device))
    grown = nn.Sequential(*copy.deepcopy(whole)[:4])
    optimizer = AdaFisher(grown, TCov=1, weight_decay=0.1)
    optimizer.factors()  # which have to move, then
    grown.append(copy.deepcopy(whole[4]))
    optimizer.add_param_group({"params": "4.*"})
    assert_same(run(optimizer, rows(device, 4)), run(AdaFisher(whole, TCov=1, weight_decay=0.1), rows(device, 4)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_grown_optimizers_can_be_copied_and_saved(duplicate: Callable[[Any], Any], device: str) -> None:
    optimizer = run(AdaFisher(mlp(device), TCov=2), rows(device, 1))
    optimizer.model.append(nn.Linear(3, 2).to(device))
    optimizer.add_param_group({"params": "4.*", "lr": 0.01})
    run(optimizer, rows(device, 2))
    twin = duplicate(optimizer)
    other = AdaFisher(copy.deepcopy(optimizer.model), TCov=2, param_groups=[{"params": "[0-3].*"}])
    other.load_state_dict(optimizer.state_dict())
    for each in (twin, other, optimizer):
        run(each, rows(device, 3))
    assert_same(twin, optimizer)
    assert_same(other, optimizer)


def test_a_layer_does_not_join_between_backward_and_step(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device), TCov=1), rows(device, 1))
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    head = nn.Linear(3, 2).to(device)
    optimizer.model.append(head)
    before = everything(optimizer)
    with pytest.raises(CafinError, match="between steps, got one between backward and step; call step"):
        optimizer.add_param_group({"params": "4.*"})
    assert len(optimizer.param_groups) == 1
    assert_same(optimizer, before)
    optimizer.step()
    optimizer.add_param_group({"params": "4.*"})


def test_what_no_layer_owns_joins_with_a_warning(device: str) -> None:
    optimizer = run(AdaFisher(mlp(device)), rows(device, 1))
    with pytest.warns(UserWarning, match=r"add_param_group: no factors \(F = 1\) for what the model does not hold"):
        optimizer.add_param_group({"params": nn.Parameter(torch.ones(2, device=device))})


LATER: dict[str, tuple[Callable[[nn.Module], Any], tuple[str, ...]]] = {
    "taken": (lambda m: {"params": "0.bias"}, ("param_group['params']", "another group holds")),
    "bad lr": (lambda m: {"params": torch.ones(2), "lr": "fast"}, ("`lr` must be a number",)),
    "a result": (lambda m: {"params": m[0].weight * 2}, ("the result of an operation",)),
    "integers": (lambda m: {"params": torch.ones(2, dtype=torch.int64)}, ("floating-point",)),
    "no dict": (lambda m: [m[0].bias], ("`param_group` must be a dict",)),
}


@pytest.mark.parametrize("name", LATER)
def test_later_groups_that_are_refused(name: str, device: str) -> None:
    make, words = LATER[name]
    optimizer = run(AdaFisher(mlp(device)), rows(device, 1))
    with refused(optimizer, "add_param_group", *words):
        optimizer.add_param_group(make(optimizer.model))
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_that_thaw(device: str) -> None:
    """They are in their group from the start; momentum and count begin with their first gradient, factors with their
    first sampled step."""
    model = mlp(device)
    model[0].requires_grad_(False)
    optimizer = run(AdaFisher(model, TCov=1), rows(device, 2))
    assert model[0].weight not in optimizer.state
    assert all(torch.equal(F, torch.ones_like(F)) for F in optimizer.factors()["0"])
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    run(optimizer, rows(device, 1))
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1, 1, 3, 3, 3, 3]
    H, S = optimizer.factors()["0"]
    assert not torch.equal(H, torch.ones_like(H))
    near(model[0].weight, before - 1e-3 * model[0].weight.grad / (S[:, None] * H[None, :5] + 1e-3))


# Signs, and names of scalars


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_maximizing_is_minimizing_the_opposite(kind: type[AdaFisher], capturable: bool, device: str) -> None:
    """To the bit, as only signs differ; factors are of squares."""
    options: dict[str, Any] = {"TCov": 2, "weight_decay": 0.1, "capturable": capturable}
    up, down = kind(mlp(device), maximize=True, **options), kind(mlp(device), **options)
    for x in rows(device, 5):
        for optimizer, sign in ((up, 1), (down, -1)):
            optimizer.zero_grad()
            (sign * loss_of(optimizer.model, x)).backward()
            optimizer.step()
    assert_same(up, down)
    start = mlp(device)
    x = rows(device, 1)[0]
    assert loss_of(up.model, x) > loss_of(start, x)


def test_torch_maximizes_the_same_way(device: str) -> None:
    """SGD with dampening has the rule for F = 1 and without bias correction: its second step's."""
    p, q = (nn.Parameter(torch.linspace(-1, 1, 7, device=device)) for _ in range(2))
    model = nn.Module()
    model.p = p
    with pytest.warns(UserWarning, match="no factors"):
        optimizer = AdaFisher(model, lr=0.1, beta=0.0, weight_decay=0.3, maximize=True)
    theirs = torch.optim.SGD([q], lr=0.1, weight_decay=0.3, maximize=True)
    for _ in range(3):
        for each, parameter in ((optimizer, p), (theirs, q)):
            each.zero_grad()
            parameter.sin().sum().backward()
            each.step()
    near(p, q, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": None}, {"differentiable": False}]
)
def test_arguments_that_change_nothing(options: dict[str, Any]) -> None:
    assert_same(run(AdaFisher(mlp("cpu"), **options), rows("cpu", 3)), run(AdaFisher(mlp("cpu")), rows("cpu", 3)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9, 0.999)}, ("`betas`", "(0.9, 0.999)", "pass beta=betas[0]")),
        ({"momentum": 0.9}, ("`momentum`", "it is called beta")),
        ({"eps": 1e-8}, ("`eps`", "Lambda")),
        ({"amsgrad": True}, ("`amsgrad`", "no second moment")),
        ({"weigth_decay": 0.1}, ("`weigth_decay`", "no such argument")),
        ({"differentiable": True}, ("`differentiable` must be False",)),
        ({"differentiable": torch.ones(2)}, ("`differentiable` must be True or False",)),
        ({"foreach": "yes"}, ("`foreach` must be True or False",)),
        ({"fused": [True]}, ("`fused` must be True or False",)),
        ({"maximize": "yes"}, ("`maximize` must be True or False",)),
    ],
)
def test_arguments_of_other_optimizers(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CafinError) as caught:
        AdaFisher(net("cpu"), **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_momentum_is_another_name_of_beta() -> None:
    """For schedulers, which look for it, read it and set it; one value is stored, and saved."""
    group = Group({"lr": 0.1}, momentum=0.9)
    assert dict(group) == {"lr": 0.1, "beta": 0.9}
    assert "momentum" in group and "betas" not in group and group["momentum"] == group.get("momentum") == 0.9
    group["momentum"] = 0.8
    assert group["beta"] == group.setdefault("momentum", 0.1) == 0.8
    group.update(momentum=0.7)
    for twin in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert type(twin) is Group and dict(twin) == {"lr": 0.1, "beta": 0.7} and twin["momentum"] == 0.7
    with pytest.raises(KeyError, match="betas"):
        group["betas"]
    assert "momentum" not in Group(lr=0.1) and Group().get("momentum", 3) == 3
