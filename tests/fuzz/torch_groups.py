"""Parameter groups as scripts ask for them, and what must be in them."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

# Of each group what is given as its "params", by the names of a model; a list of lists makes several groups.
DIVISIONS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "whole": lambda named: [],
    "biases": lambda named: [["*bias"]],
    "a pattern": lambda named: ["*.[a-m]*"],
    "patterns that meet": lambda named: [["body.*bias*", "*bias", "*norm*.bias"]],
    "kinds": lambda named: [["*.weight"], "*bias"],
    "one name": lambda named: [next(iter(named))],
    "one parameter": lambda named: [list(named.values())[-1]],
    "every other": lambda named: [list(named.values())[::2]],
    "pairs": lambda named: [list(named.items())[1:3], (name for name in list(named)[:1])],
}


def divide(model: nn.Module, division: str) -> tuple[list[Any], list[list[Any]]]:
    """(what the groups are asked for, the parameters of each, the rest behind them)."""
    every = list(model.named_parameters(remove_duplicate=False))
    given = DIVISIONS[division](dict(model.named_parameters()))
    given = [list(each) if not isinstance(each, (str, torch.Tensor)) else each for each in given]
    groups = []
    for each in given:
        found: list[Any] = []
        for item in [each] if isinstance(each, (str, torch.Tensor)) else each:
            if isinstance(item, str):
                named = [p for name, p in every if name == item]
                found += named or [p for name, p in every if fnmatchcase(name, item)]
            else:
                found.append(item[1] if isinstance(item, tuple) else item)
        groups.append(list({id(p): p for p in found}.values()))
    taken = {id(p) for group in groups for p in group}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return given, [*groups, *([rest] if rest else [])]


def possible(model: nn.Module, groups: list[list[Any]], given: list[Any]) -> bool:
    """Each pattern names a parameter, and none is in two groups."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    asked = [item for each in given for item in ([each] if isinstance(each, str) else each)]
    found = all(any(fnmatchcase(name, item) for name in names) for item in asked if isinstance(item, str))
    return found and len({id(p) for group in groups for p in group}) == sum(map(len, groups))


# Refused as `param_groups`, by what is wrong.
NO_DIVISIONS: dict[str, Callable[[nn.Module], Any]] = {
    "a number": lambda model: 5,
    "a dict": lambda model: {"params": list(model.parameters())},
    "a string": lambda model: "*bias",
    "a group is a number": lambda model: [5],
    "a group is a list": lambda model: [list(model.parameters())],
    "no params": lambda model: [{"lr": 0.1}],
    "none in it": lambda model: [{"params": []}],
    "no such name": lambda model: [{"params": ["nothing.*"]}],
    "twice": lambda model: [{"params": "*"}, {"params": next(model.parameters())}],
    "a set": lambda model: [{"params": set(model.parameters())}],
    "a number in it": lambda model: [{"params": [3]}],
    "not of the model": lambda model: [{"params": [nn.Parameter(torch.ones(2))]}],
    "betas": lambda model: [{"params": "*", "betas": (0.9, 0.999)}],
    "a rate below 0": lambda model: [{"params": "*", "lr": -1.0}],
    "Lambda 0": lambda model: [{"params": "*", "Lambda": 0.0}],
    "maximize a string": lambda model: [{"params": "*", "maximize": "no"}],
}
