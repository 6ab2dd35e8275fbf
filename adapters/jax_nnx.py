"""Flax NNX: find the layers of a model, and tap them while it runs.

layers = find(model, x)
graph, params, rest = nnx.split(model, nnx.Param, ...)

def loss(params, taps, x, y):
    model = nnx.merge(graph, params, rest, copy=True)  # a copy, as BatchNorm writes its statistics
    with tapped(model, layers, taps):
        return cross_entropy(model(x), y)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from flax import nnx

from cafin_cupy.errors import CafinTypeError, refuse

from .jax_flax import kind_of, layer_of, traced, warn_without_factors
from .jax_layers import Layer
from .jax_taps import Layers, by_path, check_layers, tap

__all__ = ["find", "tapped"]

Act = Callable[[Any, Any, Any], Any]  # of a module, its input and its output; returns what is put out
ACT = "_cafin_act"  # the attribute of a watched module that holds it


def find(model: nnx.Module, *args: Any, **options: Any) -> Layers:
    """The layers of a model that have factors: Linear, LinearGeneral, Conv, BatchNorm, LayerNorm, RMSNorm, GroupNorm
    and InstanceNorm, subclasses too, by their paths in `nnx.state(model, nnx.Param)`. One warning names the parameters
    of no layer, which are updated with F = 1: those of other kinds, and of modules that `nnx.scan` or `nnx.vmap` lifts
    (tap those by hand, see `jax.tap`).

    Args:
        model: the module.
        args, options: as for a call of it; for arrays their shapes do. Nothing is computed, and the model stays as it
            is.

    Raises:
        CafinError: `model` is no module of NNX.
    """
    _check_model("find", model)
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    known = by_path(params)
    found: dict[str, Layer] = {}

    def run(params: Any, rest: Any, args: Any, options: Any) -> Any:
        copy = nnx.merge(graph, params, rest)

        def note(path: tuple[Any, ...], kind: str) -> Act:
            def act(module: Any, h: Any, y: Any) -> Any:
                layer = layer_of(module, kind, path, tuple(h.shape), known)
                # A module that is lifted sees one layer of a stack.
                if layer and getattr(module, layer.weight.rpartition("/")[2]).shape == known[layer.weight].shape:
                    found.setdefault("/".join(map(str, path)) or kind, layer)
                return y

            return act

        with _watching([(module, note(path, kind)) for path, kind, module in _modules(copy)]):
            return copy(*args, **options)

    traced(run, params, rest, args, options)
    warn_without_factors("find", params, found)
    return Layers(params, found)


@contextmanager
def tapped(model: nnx.Module, layers: Layers, taps: Any) -> Iterator[None]:
    """Within, calls of the model pass the layers' taps. Its modules have another class meanwhile, a subclass of their
    own.

    Args:
        model: the module, as merged within the loss.
        layers: of `find`.
        taps: `layers.zeros()`.

    Raises:
        CafinError: the model or the taps are others.
    """
    _check_model("tapped", model)
    check_layers("tapped", layers).check("tapped", "taps", taps)
    by_module = {bound.layer.weight.rpartition("/")[0]: name for name, bound in layers.items()}

    def through(name: str) -> Act:
        return lambda _, h, y: tap(layers[name], h, y, taps[name])

    pairs = [(by_module.get("/".join(map(str, path))), module) for path, _, module in _modules(model)]
    missing = set(layers) - {name for name, _ in pairs}
    if missing:
        refuse("tapped", "model", f"hold the layers {sorted(layers)}", f"none of {sorted(missing)}", "find them again")
    with _watching([(module, through(name)) for name, module in pairs if name is not None]):
        yield


def _check_model(where: str, model: Any) -> None:
    if not isinstance(model, nnx.Module):
        refuse(where, "model", "be a module of flax.nnx", type(model).__name__, kind=CafinTypeError)


def _modules(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """(path, kind, module) of all that may have factors, each once."""
    for path, module in getattr(nnx, "iter_modules", nnx.iter_graph)(model):  # the latter before Flax 0.12.1
        kind = kind_of(module, nnx)
        if kind is not None:
            yield path, kind, module


@contextmanager
def _watching(acts: list[tuple[Any, Act]]) -> Iterator[None]:
    """Within, a call of a module returns what its act makes of input and output. The act is an attribute of the module,
    so it stays with the copies that `nnx.remat`, `nnx.jit` and the like make of it."""
    if any(hasattr(module, ACT) for module, _ in acts):
        mend = "leave the other context first, or merge a copy of it"
        refuse("tapped", "model", "not be tapped already", "one within another", mend)
    before = [(module, type(module)) for module, _ in acts]
    try:
        for module, act in acts:
            object.__setattr__(module, ACT, act)
            object.__setattr__(module, "__class__", _watched(type(module)))  # type: ignore[arg-type]
        yield
    finally:
        for module, kind in before:
            object.__setattr__(module, "__class__", kind)
            vars(module).pop(ACT, None)


@cache
def _watched(kind: type) -> type:
    """A subclass whose calls are watched."""
    arguments = inspect.signature(kind.__call__)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        y = kind.__call__(self, *args, **options)
        _, h, *_ = arguments.bind(self, *args, **options).args
        return getattr(self, ACT)(self, h, y)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
