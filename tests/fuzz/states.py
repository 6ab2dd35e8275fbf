"""State dicts that must be refused: of `AdaFisher` on arrays, and of the PyTorch optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .bad import NO_ARRAYS, NO_NUMBERS, OUTSIDE

WRONG_STEPS = [-1, 1.5, *NO_NUMBERS.values()]


def spoiled_arrays(state: dict[str, Any], fault: int) -> Any:
    """A `state_dict` of `AdaFisher` with a fault, by its number; nothing of the given one is changed."""
    kind, pick = fault % 8, fault // 8
    key = ("momenta", "H", "S")[pick % 3]
    arrays = state[key]
    if kind == 0:
        return [None, 3, [], "state", {}][pick % 5]
    if kind == 1:
        return {k: v for k, v in state.items() if k != ("steps", *state)[pick % 5]}
    if kind == 2:
        return {**state, "steps": WRONG_STEPS[pick % len(WRONG_STEPS)]}
    if kind == 3:
        return {**state, key: [None, 5, "arrays", {}, iter(arrays)][pick % 5]}
    if kind == 4 or not arrays:
        return {**state, key: [*arrays, np.ones(3)]}
    if kind == 5:
        return {**state, key: arrays[1:]}
    place, wrong = pick % len(arrays), list(NO_ARRAYS.values())
    other = wrong[fault % len(wrong)] if kind == 6 else np.ones((1, *arrays[place].shape))
    return {**state, key: [*arrays[:place], other, *arrays[place + 1 :]]}


# ---- Of the PyTorch optimizer ----

_NO_TENSORS: tuple[Any, ...] = (None, 3.0, "H", [1.0], torch.ones(1, 1, 1, 1), torch.ones(2, dtype=torch.int64))
_NO_LISTS: tuple[Any, ...] = (None, 5, "groups", {}, iter([]))


KEYS = ("H_D", "S_D", "steps", "state", "param_groups")


def told_twice(pick: int) -> bool:
    """True if the key that is missing may be, as the first group says the same."""
    return KEYS[pick % len(KEYS)] in ("H_D", "S_D", "steps")


def spoiled(state: dict[str, Any], kind: str, pick: int) -> Any:
    """A copy of the dicts and lists of `state` with one fault in it, or None if the fault has no place there."""
    s = {**state, "param_groups": [dict(g) for g in state["param_groups"]], "state": dict(state["state"])}
    groups, entries = s["param_groups"], s["state"]
    group = groups[pick % len(groups)]
    number = sorted(entries)[pick % len(entries)] if entries else None
    key = ("H_D", "S_D")[pick % 2]
    if kind == "no dict":
        return (None, 3, [], "state", {})[pick % 5]
    if kind == "a key is missing":
        del s[KEYS[pick % len(KEYS)]]
    elif kind == "steps":
        s["steps"] = WRONG_STEPS[pick % len(WRONG_STEPS)]
    elif kind == "no lists":
        s[(key, "param_groups")[pick % 3 == 0]] = _NO_LISTS[pick % len(_NO_LISTS)]
    elif kind == "no mapping":
        s["state"] = (None, 5, [], "state")[pick % 4]
    elif kind == "groups":
        s["param_groups"] = [[], groups[1:], [*groups, group], [None, *groups[1:]], [{}, *groups[1:]]][pick % 5]
    elif kind == "params":
        group["params"] = (None, 5, [*group["params"], 99], group["params"][1:], [None] * len(group["params"]))[
            pick % 5
        ]
    elif kind == "scalars":
        name = ("lr", "beta", "Lambda", "weight_decay")[pick % 4]
        wrong = [*OUTSIDE[name].values(), *NO_NUMBERS.values()]
        group[name] = wrong[pick // 4 % len(wrong)]
    elif kind == "foreign entry":
        entries[(12345, "weight", None)[pick % 3]] = {"step": 1}
    elif kind == "entry" and number is not None:
        entries[number] = (None, 5, [1], "entry")[pick % 4]
    elif kind == "step" and number is not None:
        entries[number] = {**entries[number], "step": WRONG_STEPS[pick % len(WRONG_STEPS)]}
    elif kind == "exp_avg" and number is not None:
        entries[number] = {**entries[number], "exp_avg": _NO_TENSORS[pick % len(_NO_TENSORS)]}
    elif kind == "factors" and s[key]:
        place = pick % len(s[key])
        F = s[key][place]
        wrong = [*_NO_TENSORS, F.to_sparse(), F.to("meta"), F * float("nan"), F - 1e3, F * 1j, F[:0]]
        if F.numel() == 0:
            wrong = list(_NO_TENSORS)
        s[key] = [*s[key][:place], wrong[pick // 2 % len(wrong)], *s[key][place + 1 :]]
    elif kind == "number of factors":
        s[key] = [*s[key], torch.ones(3)]
    elif kind == "names":
        names = group["param_names"]
        wrong = [[*names[1:], "?", "?"], ["body.?", *names[1:]], [1, *names[1:]], "names", 5]
        group["param_names"] = wrong[pick // 2 % len(wrong)]
    elif kind == "seed" and "seed" in s:
        s["seed"] = (-1, 2**64, 0.5, None, "1")[pick % 5]
    elif kind == "master" and number is not None and "master" in entries[number]:
        entries[number] = {**entries[number], "master": _NO_TENSORS[pick % len(_NO_TENSORS)]}
    else:
        return None
    return s


KINDS = (
    *("no dict", "a key is missing", "steps", "no lists", "no mapping", "groups", "params", "scalars"),
    *("foreign entry", "entry", "step", "exp_avg", "factors", "number of factors", "names", "seed", "master"),
)


# Ways to write down the same state.
FORMS = ("as it is", "without names", "turned", "by names alone")


def in_form(state: dict[str, Any], form: str, pick: int) -> dict[str, Any]:
    """The same state in another form; parameters and layers are found by their names, or by order without."""
    s = {**state, "param_groups": [dict(g) for g in state["param_groups"]]}
    groups, first = s["param_groups"], s["param_groups"][0]
    if form == "without names":
        for group in groups:
            del group["param_names"]
    elif form == "turned":  # as of a model with its modules in another order
        order = np.random.default_rng(pick)
        for group in groups:
            places = order.permutation(len(group["params"]))
            group["params"], group["param_names"] = ([group[k][i] for i in places] for k in ("params", "param_names"))
        names = list(first["factors"])
        places = order.permutation(len(names))
        first["factors"] = {names[i]: first["factors"][names[i]] for i in places}
        s["H_D"], s["S_D"] = ([s[key][i] for i in places] for key in ("H_D", "S_D"))
    elif form == "by names alone":  # as torch.distributed.checkpoint has it
        names = {number: name for g in groups for number, name in zip(g["params"], g["param_names"])}
        for group in groups:
            group["params"] = group.pop("param_names")
        s = {"state": {names[number]: entry for number, entry in s["state"].items()}, "param_groups": groups}
    return s


# What may be wrong with the state dict of another optimizer.
MOMENTA = ("no dict", "no groups", "of ours", "empty", "shape", "step", "no step", "one more", "no list", "integers")


def of_adam(
    groups: list[list[Any]], names: dict[int, str] | None, fault: str | None, pick: int, dtype: str
) -> tuple[Any, list[tuple[Any, int, Any]]]:
    """(a state dict as of AdamW, with a fault; parameters that have an entry, with its step and momentum)."""
    every = [p for group in groups for p in group]
    entries = [
        (p, 1 + (pick + k) % 5, torch.full(tuple(p.shape), 0.3 * k - pick, dtype=getattr(torch, dtype)))
        for k, p in enumerate(every)
        if p.is_floating_point() and ((pick + k) % 3 or not k)
    ]
    place = {id(p): number for number, p in enumerate(every)}
    state: dict[Any, Any] = {
        place[id(p)]: {"step": torch.tensor(float(count)), "exp_avg": average, "exp_avg_sq": average**2}
        for p, count, average in entries
    }
    listed: list[Any] = [{"lr": 0.1, "params": [place[id(p)] for p in group]} for group in groups]
    if names is not None:
        listed[0]["param_names"] = [names[id(p)] for p in every]
    given: Any = {"state": state, "param_groups": listed}
    first = state[0]
    if fault == "no dict":
        given = (None, 3, [], "state", {})[pick % 5]
    elif fault == "no groups":
        del given["param_groups"]
    elif fault == "of ours":
        given["H_D"] = []
    elif fault == "empty":
        given["state"] = {}
    elif fault == "shape":
        first["exp_avg"] = torch.ones(1, 1, 1, 1, 1)
    elif fault == "step":
        first["step"] = (-1, 0.5, "1", None, torch.ones(2))[pick % 5]
    elif fault == "no step":
        del first["step"]
    elif fault == "one more":
        listed[0]["params"].append(len(every))
        listed[0].pop("param_names", None)
    elif fault == "no list":
        given["param_groups"] = (None, 5, "groups", [3], [{}])[pick % 5]
    elif fault == "integers":
        first["exp_avg"] = torch.zeros(tuple(every[0].shape), dtype=torch.int64)
    return given, entries
