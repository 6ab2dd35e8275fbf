"""Flax Linen: find the layers of a model, and tap them while it runs. The model itself stays as it is.

layers = find(model, variables, x)
with tapped(layers, taps):
    logits = model.apply(variables, x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn

from cafin_cupy.errors import CafinTypeError, refuse

from .jax_flax import kind_of, layer_of, traced, warn_without_factors
from .jax_layers import Layer
from .jax_taps import Layers, by_path, check_layers, tap

__all__ = ["find", "tapped"]


def find(model: nn.Module, variables: Mapping[str, Any], *args: Any, **options: Any) -> Layers:
    """The layers of a model that have factors: Dense, DenseGeneral, Conv, BatchNorm, LayerNorm, RMSNorm, GroupNorm and
    InstanceNorm, subclasses too. One warning names the parameters of no layer, which are updated with F = 1: those of
    other kinds, and of modules that `nn.scan` or `nn.vmap` lifts (tap those by hand, see `jax.tap`).

    Args:
        model: the module.
        variables: as for `model.apply`; parameters under "params".
        args, options: as for `model.apply`; for arrays their shapes do. Nothing is computed.

    Raises:
        CafinError: the first two are no module and no variables.
    """
    if not isinstance(model, nn.Module):
        refuse("find", "model", "be a module of flax.linen", type(model).__name__, kind=CafinTypeError)
    if not isinstance(variables, Mapping) or "params" not in variables:
        refuse("find", "variables", 'be a mapping with "params"', type(variables).__name__, kind=CafinTypeError)
    params = by_path(variables["params"])
    found: dict[str, Layer] = {}

    def note(module: nn.Module, h: Any, y: Any) -> Any:
        kind = kind_of(module, nn)
        if kind is None:
            return y
        layer = layer_of(module, kind, module.path, tuple(h.shape), params)
        # A module that is lifted sees one layer of a stack.
        if layer and module.get_variable("params", layer.weight.rpartition("/")[2]).shape == params[layer.weight].shape:
            found.setdefault("/".join(module.path) or kind, layer)
        return y

    def run(variables: Any, args: Any, options: Any) -> Any:
        with nn.intercept_methods(_behind(note)):
            return model.apply(variables, *args, **options)

    traced(run, variables, args, options)
    warn_without_factors("find", variables["params"], found)
    return Layers(variables["params"], found)


@contextmanager
def tapped(layers: Layers, taps: Any) -> Iterator[None]:
    """Within, calls of `model.apply` pass the layers' taps. Let no other model run there: layers are known by their
    paths.

    Args:
        layers: of `find`.
        taps: `layers.zeros()`.

    Raises:
        CafinError: the taps are others.
    """
    check_layers("tapped", layers).check("tapped", "taps", taps)
    by_module = {bound.layer.weight.rpartition("/")[0]: name for name, bound in layers.items()}

    def through(module: nn.Module, h: Any, y: Any) -> Any:
        name = by_module.get("/".join(module.path)) if module.scope is not None else None
        return y if name is None else tap(layers[name], h, y, taps[name])

    with nn.intercept_methods(_behind(through)):
        yield


def _behind(act: Callable[[nn.Module, Any, Any], Any]) -> Any:
    """An interceptor that hands module, input and output of each call to `act`."""

    def interceptor(call: Any, args: Any, options: Any, context: Any) -> Any:
        y = call(*args, **options)
        h = next((x for x in (*args, *options.values()) if hasattr(x, "shape")), None)
        return y if context.method_name != "__call__" or h is None else act(context.module, h, y)

    return interceptor
