"""What the reference refuses before it computes: arrays that are none, and layers, inputs and gradients that do not
fit. From metadata alone, so under `jax.jit` too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from .arrays import known
from .errors import CafinTypeError, refuse
from .layers import Layer


def check_layer(where: str, layer: Any) -> None:
    """Refuse what is no descriptor."""
    if not isinstance(layer, Layer):
        refuse(where, "layer", "be a layer descriptor", type(layer).__name__, kind=CafinTypeError)


def check_arrays(where: str, arrays: Mapping[str, Any], whole: str = "") -> None:
    """Refuse what is no array, lies in no memory, or holds no real floating-point numbers; that by the name of `whole`
    must hold whole ones."""
    for name, x in arrays.items():
        x = known(x, where, name)
        if not is_array_api_obj(x):
            refuse(where, name, "be an array of NumPy, PyTorch, CuPy or JAX", type(x).__name__, kind=CafinTypeError)
        kinds, rule = ("float", "bfloat"), "hold real floating-point numbers"
        if name == whole:
            kinds, rule = ("int", "uint"), "hold whole numbers"
        if not str(x.dtype).removeprefix("torch.").startswith(kinds):
            refuse(where, name, rule, x.dtype, kind=CafinTypeError)
    first, *others = arrays
    for name in others:
        if array_namespace(arrays[name]) is not array_namespace(arrays[first]):
            got = f"{type(arrays[name]).__module__} and {type(arrays[first]).__module__}"
            refuse(where, f"{name}, {first}", "be arrays of one framework", got, "convert one", CafinTypeError)


def check_pair(where: str, layer: Layer, h: Any, s: Any) -> None:
    """Refuse what cannot be this layer's input and output gradient."""
    names = f"h of {layer.label}", f"s of {layer.label}"
    check_arrays(where, dict(zip(names, (h, s))), names[0] if layer.counted else "")
    layer.check(tuple(h.shape), tuple(s.shape), where)


def check_update(p: Any, g: Any, m: Any, H: Any, S: Any, master: Any = None) -> None:
    """Refuse what cannot be a parameter, its gradient, momentum, factors and master; their sizes are compared later."""
    factors = {name: F for name, F in (("H", H), ("S", S)) if F is not None}
    masters = {} if master is None else {"master": master}
    check_arrays("update", {"p": p, "g": g, "m": m, **factors, **masters})
    for name, F in factors.items():
        if len(F.shape) != 1:
            refuse("update", name, "be a vector", f"shape {tuple(F.shape)}")
