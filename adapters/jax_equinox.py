"""Equinox: find the layers of a model, and a copy of it that passes taps.

    layers = find(model)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, taps, x, y):
        model = tapped(eqx.combine(params, static), layers, taps)
        return cross_entropy(jax.vmap(model)(x), y)

Equinox's layers take one sample, and `jax.vmap` brings the batch; sums add up over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from equinox import nn

from cafin_cupy.errors import CafinTypeError, refuse

from .jax_flax import warn_without_factors
from .jax_layers import ChannelNorm, Conv, Dense, Layer, LayerNorm
from .jax_taps import Bound, Layers, RawSums, check_layers, path_name, tap

__all__ = ["find", "tapped"]


def _conv(module: Any, own: dict[str, Any]) -> Layer | None:
    if module.padding_mode not in ("ZEROS", "CIRCULAR") or module.num_spatial_dims > 3:
        return None
    padding = "CIRCULAR" if module.padding_mode == "CIRCULAR" else module.padding
    if padding == "CIRCULAR" and module.padding != "SAME":
        return None
    geometry = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
    return Conv(**own, padding=padding, channels_last=False, **geometry)


def _linear(module: Any, own: dict[str, Any]) -> Layer | None:
    return Dense(**own, input_major=False) if isinstance(module.in_features, int) else None


def _norm(module: Any, own: dict[str, Any]) -> Layer | None:
    return ChannelNorm(**own, channels_last=False, batched=False)


def _layer_norm(module: Any, own: dict[str, Any]) -> Layer | None:
    return LayerNorm(**own)


KINDS: dict[type, Callable[[Any, dict[str, Any]], Layer | None]] = {
    nn.Linear: _linear,
    nn.Conv: _conv,
    nn.BatchNorm: _norm,
    nn.GroupNorm: _norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
}


def find(model: Any) -> Layers:
    """The layers of a model that have factors: Linear, Conv1d to 3d, BatchNorm, GroupNorm, LayerNorm and RMSNorm,
    subclasses too. One warning names the parameters of no layer, which are updated with F = 1.

    A layer that is shared lies at several paths of the tree, which are parameters of their own to JAX.

    Args:
        model: the module; paths are those of its arrays.

    Raises:
        CafinError: it is no module.
    """
    if not isinstance(model, eqx.Module):
        refuse("find", "model", "be a module of equinox", type(model).__name__, kind=CafinTypeError)
    found = {}
    for at, module in _modules(model):
        own = {
            role: f"{at}/{role}" if at else role
            for role in ("weight", "bias")
            if eqx.is_inexact_array(getattr(module, role, None))
        }
        layer = _kind(module)(module, own) if "weight" in own else None
        if layer is not None:
            found[at or type(module).__name__] = layer
    params = eqx.filter(model, eqx.is_inexact_array)
    warn_without_factors("find", params, found)
    return Layers(params, found)


def tapped(model: Any, layers: Layers, taps: Any) -> Any:
    """A copy of the model that passes the layers' taps when it is called.

    Args:
        model: the module, as combined within the loss.
        layers: of `find`.
        taps: `layers.zeros()`.

    Raises:
        CafinError: the model or the taps are others.
    """
    check_layers("tapped", layers).check("tapped", "taps", taps)
    by_module = {bound.layer.weight.rpartition("/")[0]: name for name, bound in layers.items()}
    seen: set[str] = set()

    def wrapped(path: tuple[Any, ...], x: Any) -> Any:
        name = by_module.get(path_name(path)) if _is_layer(x) else None
        if name is None:
            return x
        seen.add(name)
        return _Tapped(x, layers[name], taps[name])

    copy = jax.tree_util.tree_map_with_path(wrapped, model, is_leaf=_is_layer)
    missing = set(layers) - seen
    if missing:
        refuse("tapped", "model", f"hold the layers {sorted(layers)}", f"none of {sorted(missing)}", "find them again")
    return copy


class _Tapped(eqx.Module):
    """A layer with a tap behind it."""

    layer: Any
    bound: Bound = eqx.field(static=True)
    taps: RawSums

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        y = self.layer(x, *args, **options)
        if isinstance(y, tuple):  # with a new state
            return tap(self.bound, x, y[0], self.taps), *y[1:]
        return tap(self.bound, x, y, self.taps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _is_layer(x: Any) -> bool:
    return isinstance(x, tuple(KINDS))


def _kind(module: Any) -> Callable[[Any, dict[str, Any]], Layer | None]:
    return next(make for kind, make in KINDS.items() if isinstance(module, kind))


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_layer)[0]:
        if _is_layer(x):
            yield path_name(path), x
