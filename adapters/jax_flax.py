"""What Flax's layers are to us, for Linen and NNX alike: both give the same attributes the same names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from .jax_layers import ChannelNorm, Conv, Dense, Layer, LayerNorm
from .jax_taps import by_path

Shape = tuple[int, ...]


def _dense(module: Any, h: Shape, own: dict[str, Any]) -> Layer | None:
    return Dense(**own)


def _dense_general(module: Any, h: Shape, own: dict[str, Any]) -> Layer | None:
    axes = module.axis if isinstance(module.axis, (tuple, list)) else (module.axis,)
    batch = getattr(module, "batch_dims", None) or getattr(module, "batch_axis", None)
    last = tuple(range(len(h) - len(axes), len(h)))
    if batch or tuple(axis % len(h) for axis in axes) != last:
        return None
    return Dense(**own, inputs=len(axes))


def _conv(module: Any, h: Shape, own: dict[str, Any]) -> Layer | None:
    strides, dilation = (1 if given is None else given for given in (module.strides, module.kernel_dilation))
    inner = module.input_dilation
    axes = len(module.kernel_size) if isinstance(module.kernel_size, (tuple, list)) else 1
    known = axes <= 3 and len(h) == axes + 2  # else there are several batch axes, or none
    if not known or module.mask is not None or inner not in (None, 1, (1,) * axes):
        return None
    if isinstance(module.padding, str) and module.padding.upper() not in ("SAME", "VALID", "CIRCULAR", "CAUSAL"):
        return None
    groups = module.feature_group_count
    return Conv(**own, stride=strides, padding=module.padding, dilation=dilation, groups=groups)


def _channel_norm(module: Any, h: Shape, own: dict[str, Any]) -> Layer | None:
    last = getattr(module, "axis", -1) in (-1, len(h) - 1)
    return ChannelNorm(**own) if last and len(h) > 1 else None


def _layer_norm(module: Any, h: Shape, own: dict[str, Any]) -> Layer | None:
    last = all(axes in (-1, (-1,), [-1], len(h) - 1) for axes in (module.reduction_axes, module.feature_axes))
    return LayerNorm(**own, length=h[1]) if last and len(h) > 1 else None


# By the names of Flax's classes: (name of the weight, the layer, None where it is used in a way that has no factors).
KINDS: dict[str, tuple[str, Callable[[Any, Shape, dict[str, Any]], Layer | None]]] = {
    "Dense": ("kernel", _dense),
    "Linear": ("kernel", _dense),
    "DenseGeneral": ("kernel", _dense_general),
    "LinearGeneral": ("kernel", _dense_general),
    "Conv": ("kernel", _conv),
    "BatchNorm": ("scale", _channel_norm),
    "GroupNorm": ("scale", _channel_norm),
    "InstanceNorm": ("scale", _channel_norm),
    "LayerNorm": ("scale", _layer_norm),
    "RMSNorm": ("scale", _layer_norm),
}


def kind_of(module: Any, package: Any) -> str | None:
    """The name of Flax's class that a module is an instance of; None if of none that is known."""
    return next((name for name in KINDS if isinstance(module, getattr(package, name, ()))), None)


def layer_of(module: Any, kind: str, path: Iterable[Any], h: Shape, params: Mapping[str, Any]) -> Layer | None:
    """The layer that a call of a module with an input of shape `h` is; None if it has no factors.

    Args:
        path: of the module's parameters.
        params: all parameters by their paths.
    """
    weight, make = KINDS[kind]
    at = "/".join(map(str, path))
    own = {role: f"{at}/{name}" if at else name for role, name in (("weight", weight), ("bias", "bias"))}
    if own["weight"] not in params:
        return None
    own = {role: path for role, path in own.items() if path in params}
    return make(module, h, own)


def traced(run: Callable[..., Any], *trees: Any) -> None:
    """Call `run` on trees whose arrays, or shapes in their place, are traced; flags and texts stay what they are."""
    leaves, structure = jax.tree.flatten(trees)
    arrays = {k: leaf for k, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def on(arrays: dict[int, Any]) -> Any:
        return run(*jax.tree.unflatten(structure, [arrays.get(k, leaf) for k, leaf in enumerate(leaves)]))

    jax.eval_shape(on, arrays)


def warn_without_factors(where: str, params: Any, found: Mapping[str, Layer]) -> None:
    """One warning that names the parameters of no layer."""
    owned = {path for layer in found.values() for path in (layer.weight, layer.bias)}
    others = [path for path in by_path(params) if path not in owned]
    if others:
        named = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        warnings.warn(f"{where}: no factors (F = 1) for {named}", stacklevel=3)
