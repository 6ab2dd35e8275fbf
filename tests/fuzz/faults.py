"""What may be wrong with the arguments of `fused_step`, by names that print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from array_api_compat import array_namespace

from .arrays import Held, dtype_of
from .bad import NO_ARRAYS, bad_scalars

Lists = dict[str, list[Any]]  # params, grads, momenta, factors and masters of a call, still without structure


class Arguments:
    """The arrays of a call."""

    def __init__(
        self,
        p: list[Held],
        g: list[Held],
        m: list[Held],
        pairs: list[tuple[Held, Held] | None],
        masters: list[Held] | None = None,
    ) -> None:
        self.p, self.g, self.m, self.pairs, self.w = p, g, m, pairs, masters

    @property
    def dtype(self) -> str:
        return dtype_of(self.p[0].array)

    def lists(self) -> Lists:
        return {
            "params": [x.given for x in self.p],
            "grads": [x.given for x in self.g],
            "momenta": [x.given for x in self.m],
            "factors": [pair and (pair[0].given, pair[1].given) for pair in self.pairs],
            "masters": [None] * len(self.p) if self.w is None else [x.given for x in self.w],
        }


# Spoils the lists at one place; False if there is nothing to spoil.
ArrayFault = Callable[[Arguments, Lists, int], bool]


def _put(which: str, change: Callable[[Any], Any]) -> ArrayFault:
    def fault(a: Arguments, lists: Lists, k: int) -> bool:
        array = getattr(a, which[0])[k].array
        lists[which][k] = change(array)
        return True

    return fault


def _pair(change: Callable[[Any, Any], Any]) -> ArrayFault:
    def fault(a: Arguments, lists: Lists, k: int) -> bool:
        pair = a.pairs[k]
        if pair is None or 0 in a.p[k].array.shape:
            return False
        lists["factors"][k] = change(pair[0].array, pair[1].array)
        return True

    return fault


def _master(change: Callable[[Any], Any]) -> ArrayFault:
    def fault(a: Arguments, lists: Lists, k: int) -> bool:
        """Where a parameter has none, and may have none, that of a copy is too much."""
        if a.w is None and a.dtype in ("float16", "bfloat16"):
            return False
        lists["masters"][k] = a.p[k].array + 0 if a.w is None else change(a.w[k].array)
        return True

    return fault


def _share(which: str, other: str) -> ArrayFault:
    """Two arguments in one memory."""

    def fault(a: Arguments, lists: Lists, k: int) -> bool:
        if 0 in a.p[k].array.shape:
            return False  # arrays without entries share no memory
        lists[which][k] = lists[other][k]
        return True

    return fault


def _twice(a: Arguments, lists: Lists, k: int) -> bool:
    if 0 in a.p[k].array.shape:
        return False
    for items in lists.values():
        items.append(items[k])
    return True


def _read_only(a: Arguments, lists: Lists, k: int) -> bool:
    array = lists["params"][k]
    if type(array) is not np.ndarray:
        return False
    lists["params"][k] = array.view()
    lists["params"][k].flags.writeable = False
    return True


def _overlapping(a: Arguments, lists: Lists, k: int) -> bool:
    """A momentum begins at the second entry of its parameter."""
    array = a.p[k].array
    if len(array.shape) != 1 or array.shape[0] < 2:
        return False
    memory = _cat(array, array)
    lists["params"][k], lists["momenta"][k] = memory[: array.shape[0]], memory[1 : array.shape[0] + 1]
    return True


def _cat(a: Any, b: Any) -> Any:
    return torch.cat([a, b]) if hasattr(a, "detach") else array_namespace(a).concat([a, b])


def _converted(a: Any, dtype: str) -> Any:
    return a.to(getattr(torch, dtype)) if hasattr(a, "detach") else a.astype(dtype)


def integers(a: Any) -> Any:
    return _converted(a, "int32")


def _other_float(a: Any) -> Any:
    return _converted(a, "float32" if dtype_of(a) == "float64" else "float64")


ARRAY_FAULTS: dict[str, ArrayFault] = {
    "params: read-only": _read_only,
    "params: integers": _put("params", integers),
    "params: twice": _twice,
    "params, momenta: overlapping": _overlapping,
    "grads: the parameter": _share("grads", "params"),
    "grads: the momentum": _share("grads", "momenta"),
    "momenta: the parameter": _share("momenta", "params"),
    "momenta: the gradient": _share("momenta", "grads"),
    "grads: integers": _put("grads", integers),
    "grads: another precision": _put("grads", _other_float),
    "momenta: another precision": _put("momenta", _other_float),
    "grads: one axis more": _put("grads", lambda a: a[None]),
    "momenta: one axis more": _put("momenta", lambda a: a[None]),
    "masters: one axis more": _master(lambda a: a[None]),
    "masters: integers": _master(integers),
    "masters: another precision": _master(lambda a: _other_float(a)),
    "masters: a number": _master(lambda a: 1.0),
    "factors: one vector": _pair(lambda H, S: H),
    "factors: three vectors": _pair(lambda H, S: (H, S, S)),
    "factors: too long": _pair(lambda H, S: (H, _cat(S, S))),
    "factors: a matrix": _pair(lambda H, S: (H[None], S)),
    "factors: integers": _pair(lambda H, S: (integers(H), S)),
    "factors: another precision": _pair(lambda H, S: (_other_float(H), S)),
    "factors: a number": _pair(lambda H, S: (H, 1.0)),
}
for _which in ("params", "grads", "momenta"):
    for _name, _wrong in NO_ARRAYS.items():
        ARRAY_FAULTS[f"{_which}: {_name}"] = _put(_which, lambda a, wrong=_wrong: wrong)
for _name, _wrong in NO_ARRAYS.items():
    if _wrong is not None:
        ARRAY_FAULTS[f"factors: {_name}"] = _pair(lambda H, S, wrong=_wrong: wrong)
        ARRAY_FAULTS[f"H: {_name}"] = _pair(lambda H, S, wrong=_wrong: (wrong, S))


def _one_more(x: Any) -> Any:
    items = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple)) else [x]
    return [*items, np.ones(1)]


_WRONG: dict[str, Callable[[Any], Any]] = {
    "None": lambda x: None,
    "a number": lambda x: 5,
    "a string": lambda x: "grads",
    "one more": _one_more,
    "a generator": lambda x: (y for y in [x]),
    "other keys": lambda x: {"other": x},
}
# Spoil a whole argument.
STRUCTURE_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    f"all {which}: {name}": lambda given, which=which, change=change: given.update({which: change(given[which])})
    for which in ("grads", "momenta")
    for name, change in _WRONG.items()
}
OPTION_FAULTS: dict[str, dict[str, Any]] = {
    f"{name}: {kind}": {name: wrong}
    for name in ("lr", "beta", "Lambda", "weight_decay", "step")
    for kind, wrong in bad_scalars(name).items()
    if not (name == "step" and isinstance(wrong, (list, tuple)))
} | {
    "backend: gpu": {"backend": "gpu"},
    "backend: a number": {"backend": 3},
    "backend: a list": {"backend": []},
    "backend: an array": {"backend": np.array(["cuda", "reference"])},
    "decoupled: an array": {"decoupled": np.ones(2)},
    "decoupled: a string": {"decoupled": "False"},
    "decoupled: None": {"decoupled": None},
    "error_if_nonfinite: a string": {"error_if_nonfinite": "False"},
    "stochastic_rounding: a string": {"stochastic_rounding": "no"},
    "seed: below 0": {"seed": -1},
    "seed: a fraction": {"seed": 0.5},
    "step: too many": {"step": [1] * 9},
    "step: strings": {"step": ["1", "1"]},
}
FAULTS = [*ARRAY_FAULTS, *STRUCTURE_FAULTS, *OPTION_FAULTS]


# Of the constructors.
PRECISION_FAULTS: dict[str, dict[str, Any]] = {
    "momentum_dtype: integers": {"momentum_dtype": "int32"},
    "momentum_dtype: 8 bits": {"momentum_dtype": torch.float8_e4m3fn},
    "momentum_dtype: a number": {"momentum_dtype": 16},
    "momentum_dtype: a list": {"momentum_dtype": ["bfloat16"]},
    "momentum_dtype: an array": {"momentum_dtype": np.ones(2)},
    "master_weights: a string": {"master_weights": "no"},
    "stochastic_rounding: None": {"stochastic_rounding": None},
    "stochastic_rounding: of masters": {"stochastic_rounding": True, "master_weights": True},
    "seed: below 0": {"seed": -1},
    "seed: too large": {"seed": 2**64},
    "seed: a fraction": {"seed": 0.5},
    "seed: None": {"seed": None},
    "seed: an array": {"seed": np.arange(2)},
}


# ---- Of the constructor of AdaFisher ----


def _set(**options: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: arguments.update(options)


def _params(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: arguments.update(params=change(arguments["params"]))


def _first_filled(params: list[Any]) -> int | None:
    return next((k for k, p in enumerate(params) if 0 not in p.shape), None)


def _params_twice(arguments: dict[str, Any]) -> bool | None:
    params = arguments["params"]
    k = _first_filled(params)
    if k is None:
        return False
    params.append(params[k])
    return None


def _params_read_only(arguments: dict[str, Any]) -> bool | None:
    params = arguments["params"]
    if type(params[0]) is not np.ndarray:
        return False
    arguments["layers"] = []
    params[0] = params[0].view()
    params[0].flags.writeable = False
    return None


def _layers(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], bool | None]:
    def fault(arguments: dict[str, Any]) -> bool | None:
        if not arguments["layers"]:
            return False
        arguments["layers"] = change(arguments["layers"])
        return None

    return fault


def _renamed(layers: list[Any]) -> list[Any]:
    """Two layers of one name."""
    return [replace(layer, name="the same") for layer in [*layers, layers[0]]]


# Spoil the constructor's arguments; False if there is nothing to spoil.
CONSTRUCTION_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "params: none": _params(lambda p: []),
    "params: nested nothing": _params(lambda p: {"a": [], "b": ({},)}),
    "params: a generator": _params(lambda p: (x for x in p)),
    "params: a set": _params(lambda p: {1.0}),
    "params: integers": _params(lambda p: [*p, integers(p[0])]),
    "params: another precision": _params(lambda p: [*p, _other_float(p[0])]),
    "params: twice": _params_twice,
    "params: read-only": _params_read_only,
    "layers: None": _set(layers=None),
    "layers: a dict": _set(layers={}),
    "layers: a string": _set(layers="fc"),
    "layers: one": _layers(lambda layers: layers[0]),
    "layers: a generator": _layers(lambda layers: (x for x in layers)),
    "layers: a type": _layers(lambda layers: [*layers, type(layers[0])]),
    "layers: a number": _layers(lambda layers: [*layers, 5]),
    "layers: twice": _layers(lambda layers: [*layers, layers[0]]),
    "layers: one name": _layers(_renamed),
    "layers: of other arrays": _layers(
        lambda layers: [*layers, replace(layers[0], weight=layers[0].weight + 0, bias=None)]
    ),
    "averaging: a name": _set(averaging="mean"),
    "averaging: None": _set(averaging=None),
    "averaging: a list": _set(averaging=["parity"]),
    "averaging: an array": _set(averaging=np.array(["parity", "paper"])),
    **{name: _set(**wrong) for name, wrong in PRECISION_FAULTS.items()},
    **{name: _set(**options) for name, options in OPTION_FAULTS.items() if not name.startswith("step: ")},
    **{
        f"{name}: {kind}": _set(**{name: wrong})
        for name in ("gamma", "TCov")
        for kind, wrong in bad_scalars(name).items()
    },
    **{f"params: {name}": _params(lambda p, wrong=wrong: [*p, wrong]) for name, wrong in NO_ARRAYS.items()},
}
