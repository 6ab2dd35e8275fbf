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
    else:
        return None
    return s


KINDS = (
    *("no dict", "a key is missing", "steps", "no lists", "no mapping", "groups", "params", "scalars"),
    *("foreign entry", "entry", "step", "exp_avg", "factors", "number of factors"),
)
