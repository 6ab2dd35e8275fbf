"""State dicts that the PyTorch optimizer refuses: truncated ones, foreign ones; and what hooks make of a good one."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import array_api_compat.torch as xp
import pytest
from altered import ARRAYS, PLAIN, REMOVED, altered, is_array, named, paths, value_at
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    DEVICES,
    Net,
    assert_equal_trees,
    assert_same,
    everything,
    loss_of,
    mlp,
    refused,
    rows,
    run,
    split_groups,
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "in bfloat16": lambda x: x.bfloat16(),
    "in float8": lambda x: x.to(torch.float8_e4m3fn),
    "nowhere": lambda x: x.to("meta"),
    "on the CPU": lambda x: x.cpu(),
    "sparse": lambda x: x.to_sparse(),
    "a parameter": lambda x: nn.Parameter(x.clone()),
    "of a graph": lambda x: x.clone().requires_grad_() * 2,
    "with the negative bit": torch._neg_view,
    "expanded": lambda x: x.flatten()[:1].expand(x.shape),
    "of NumPy": lambda x: x.cpu().numpy(),
    "a list": lambda x: x.tolist(),
}


def trained(device: str, averaging: str = "parity", steps: int = 4) -> AdaFisher:
    """Of two groups, the second for vectors; its last layer is frozen, and its parameters without momentum."""
    model = mlp(device)
    model[3].requires_grad_(False)
    optimizer = split_groups(AdaFisher(model, lr=1e-3, TCov=3, weight_decay=0.1, averaging=averaging))
    return run(optimizer, rows(device, steps))


@cache
def kept(device: str, averaging: str) -> tuple[AdaFisher, dict[str, Any]]:
    """An optimizer, and a state dict of another that fits it."""
    return trained(device, averaging), copy.deepcopy(trained(device, averaging, 2).state_dict())


def scalars_in(group: dict[str, Any]) -> dict[str, Any]:
    """Of a state dict, without what names and factors say once more."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "factors", "steps")}


def numbers_in(state: dict[str, Any]) -> dict[str, int]:
    """Of the parameters, by name; by number where a dict has no names."""
    groups = state["param_groups"]
    names = [
        group.get("param_names", kept("cpu", "parity")[1]["param_groups"][k]["param_names"])
        for k, group in enumerate(groups)
    ]
    return {name: index for group, each in zip(groups, names) for name, index in zip(each, group["params"])}


def scalars_of(optimizer: AdaFisher) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def in_words(path: tuple[Any, ...]) -> str:
    """As `state[3]['exp_avg']`."""
    return f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}" if path else "state_dict"


def assert_names(message: str, path: tuple[Any, ...], value: Any) -> None:
    """The message names the entry in `path`, what holds it, or something in it."""
    name, place = named(message), in_words(path)
    if value is REMOVED and place.startswith(name):
        return
    if value is REMOVED and len(path) == 1:
        assert name == "state_dict" and repr(path[0]) in message
    elif value is REMOVED and path[0] in ("H_D", "S_D"):  # those behind it have moved up
        assert name in {f"{path[0]}[{index}]" for index in range(path[1], 9)}, message
    elif path[-1:] == ("factors",) and name.startswith(("H_D[", "S_D[")):  # which hold the same, in the order of layers
        assert isinstance(value, dict), message
    elif (
        {"params", "param_names"} & set(path) and not name.startswith(place) and not place.startswith(name)
    ):  # whose entries are elsewhere
        assert name.startswith(("state[", "param_groups[1]['params']")), message
    else:
        assert name.startswith(place) or place.startswith(name), message


@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10 * settings().max_examples)
@given(st.data())
def test_one_altered_entry_is_named_and_nothing_taken_over(device: str, averaging: str, data: Any) -> None:
    """Or the dict is good as it is, all of it is taken over, and the optimizer trains on."""
    optimizer, good = kept(device, averaging)
    path = data.draw(st.sampled_from(paths(good)))
    old = value_at(good, path)
    kinds = {**PLAIN, **({**ARRAYS, **TENSORS} if is_array(old) else {})}
    kind = data.draw(st.sampled_from(sorted(kinds)))
    value = kinds[kind](xp, old) if kind in ARRAYS else kinds[kind](old)
    given = altered(good, path, value)
    pristine, groups, before = altered(good, path, value), scalars_of(optimizer), everything(optimizer)
    try:
        optimizer.load_state_dict(given)
    except CafinError as error:
        assert_names(str(error), path, value)
        assert_same(optimizer, before)
        assert scalars_of(optimizer) == groups
    else:
        taken = optimizer.state_dict()
        assert taken["steps"] == given.get("steps", good["steps"])  # which a group holds as well
        numbers = numbers_in(taken)
        for name, index in numbers_in(given).items():
            entry, mine = given["state"][index], taken["state"][numbers[name]]
            assert mine.keys() == entry.keys()
            if entry:
                assert type(mine["step"]) is int and mine["step"] == entry["step"]
                torch.testing.assert_close(
                    mine["exp_avg"], entry["exp_avg"].detach().to(mine["exp_avg"]), equal_nan=True
                )
                assert not mine["exp_avg"].requires_grad
        for key in ("H_D", "S_D"):
            assert all(torch.equal(mine, F.detach().to(mine)) for mine, F in zip(taken[key], given[key]))
        for mine in taken["param_groups"]:
            names = sorted(mine["param_names"])
            (group,) = [g for g in given["param_groups"] if sorted(g.get("param_names", names)) == names]
            filled = {"Lambda": 1e-3, "maximize": False, **group}  # what the public implementation does not keep there
            assert scalars_in(filled) == scalars_in(mine)
        run(optimizer, rows(device, 1))
        optimizer.model.load_state_dict(mlp(device).state_dict())
        optimizer.load_state_dict(good)
    assert_equal_trees(given, pristine)


def state_of(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    """Of another optimizer, two steps on."""
    model = mlp("cpu")
    optimizer = make(model.parameters())
    for x in rows("cpu", 2):
        loss_of(model, x).backward()
        optimizer.step()
    return optimizer.state_dict()


FOREIGN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "SGD": (lambda: state_of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), "state_dict", "'H_D'"),
    "Adam": (lambda: state_of(lambda p: torch.optim.Adam(p)), "state_dict", "'H_D'"),
    "AdamW": (lambda: state_of(lambda p: torch.optim.AdamW(p)), "state_dict", "'H_D'"),
    "a model": (lambda: mlp("cpu").state_dict(), "state_dict", "'state'"),
    "an empty dict": (dict, "state_dict", "'state'"),
    "None": (lambda: None, "state_dict", "NoneType"),
    "a list": (lambda: [1, 2], "state_dict", "list"),
    "a file that was not read": (lambda: "run.pt", "state_dict", "str"),
    "another model": (
        lambda: run(AdaFisher(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 2))), rows("cpu", 1))
        .state_dict(),
        "param_groups",
        "none called '3.bias'",
    ),
    "a larger model": (lambda: AdaFisher(Net()).state_dict(), "param_groups[0]['params']", "6 numbers"),
    "the same parameters in another number of groups": (
        lambda: trained("cpu").state_dict(),
        "param_groups",
        "1 groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("device", DEVICES)
def test_a_foreign_state_dict_is_refused(name: str, device: str) -> None:
    make, argument, word = FOREIGN[name]
    given = make()
    before = copy.deepcopy(given)
    optimizer = run(AdaFisher(mlp(device), TCov=3), rows(device, 4))
    scalars = scalars_of(optimizer)
    with refused(optimizer, f"load_state_dict: `{argument}` must", word):
        optimizer.load_state_dict(given)
    assert scalars_of(optimizer) == scalars
    assert_equal_trees(given, before)
    run(optimizer, rows(device, 1))


def test_adams_state_is_refused_though_somebody_added_our_keys() -> None:
    foreign = {**state_of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), "steps": 2}
    optimizer = run(AdaFisher(mlp("cpu")), rows("cpu", 1))
    foreign = {**optimizer.state_dict(), **foreign}
    with refused(optimizer, "`param_groups[0]` must have the key 'beta'"):
        optimizer.load_state_dict(foreign)


@pytest.mark.parametrize("seed", range(8))
def test_a_truncated_file_is_refused_by_torch(seed: int) -> None:
    """And so it never comes here."""
    file = io.BytesIO()
    torch.save(run(AdaFisher(mlp("cpu")), rows("cpu", 1)).state_dict(), file)
    cut = random.Random(seed).randrange(len(file.getvalue()))
    with pytest.raises((RuntimeError, EOFError, ValueError)):
        torch.load(io.BytesIO(file.getvalue()[:cut]), weights_only=True)


# Hooks of the script


def test_a_hook_may_mend_a_foreign_dict() -> None:
    """It runs before the checks, on all of the dict; the caller's stays as it is."""
    source = run(AdaFisher(mlp("cpu"), TCov=2), rows("cpu", 3))
    foreign = {f"optimizer.{key}": value for key, value in source.state_dict().items()}
    target = AdaFisher(mlp("cpu"), TCov=2)
    target.register_load_state_dict_pre_hook(
        lambda _, given: {key.removeprefix("optimizer."): value for key, value in given.items()}
    )
    target.load_state_dict(foreign)
    target.model.load_state_dict(source.model.state_dict())
    assert_same(target, source)
    assert all(key.startswith("optimizer.") for key in foreign)


def test_a_hook_that_breaks_a_dict_is_noticed() -> None:
    source, target = (run(AdaFisher(mlp("cpu")), rows("cpu", steps)) for steps in (1, 3))
    target.register_load_state_dict_pre_hook(lambda _, given: {**given, "S_D": given["S_D"][1:]})
    with refused(target, "`S_D[1]` must"):
        target.load_state_dict(source.state_dict())


def test_hooks_see_the_whole_state() -> None:
    source = run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2))
    target = AdaFisher(mlp("cpu"), TCov=1)
    seen: list[Any] = []
    source.register_state_dict_post_hook(lambda _, saved: seen.append(sorted(saved)))
    target.register_load_state_dict_post_hook(lambda optimizer: seen.append(everything(optimizer)))
    target.model.load_state_dict(source.model.state_dict())
    target.load_state_dict(source.state_dict())
    assert seen[0] == ["H_D", "S_D", "param_groups", "state", "steps"]
    assert_same(source, seen[1])


def test_hooks_of_ours_do_not_stay() -> None:
    optimizer = run(AdaFisher(mlp("cpu")), rows("cpu", 1))
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(CafinError):
        optimizer.load_state_dict({})
    assert not optimizer._optimizer_state_dict_post_hooks and not optimizer._optimizer_load_state_dict_pre_hooks
    assert optimizer._loading is None


# What a script may have done to the state


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "deleted": lambda state, p: state.pop(p),
    "emptied": lambda state, p: state[p].clear(),
    "without a step": lambda state, p: state[p].pop("step"),
    "without momentum": lambda state, p: state[p].pop("exp_avg"),
    "with more": lambda state, p: state[p].update(ema=torch.ones(3), note="text"),
}


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_can_be_loaded(device: str, name: str, capturable: bool, kind: type[AdaFisher]) -> None:
    """And goes on as it would have done."""
    first = run(kind(mlp(device), TCov=3, capturable=capturable), rows(device, 4))
    CHANGES[name](first.state, first.model[0].weight)
    again = kind(mlp(device), TCov=3, capturable=capturable)
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    if name == "with more":
        assert again.state[again.model[0].weight]["note"] == "text"
        assert torch.equal(again.state[again.model[0].weight]["ema"], torch.ones(3, device=device))
    for optimizer in (first, again):
        run(optimizer, rows(device, 2))
    assert_same(first, again)
