"""The tap that reads what a layer sees, and the layers of a model by name.

JAX has no hooks. A tap is an identity placed behind a layer, `y = tap(layer, h, y, t)`: it returns `y`, and in the
backward pass gives the raw sums of the layer's input `h` and of the output gradient as the "gradient" of its dummy
argument `t`. So one `jax.grad` with respect to parameters and taps returns gradients and sums together, under `jit`,
`jax.checkpoint` and `lax.scan`; sums of several calls add up. Where taps are not differentiated nothing of it remains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

import cafin_cupy as cafin
from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.reference import RawSums

from .jax_layers import Layer, Part, Shape, Use
from .jax_sums import nothing


@dataclass(frozen=True, eq=False)
class Bound:
    """A `Layer` of a certain model, whose shapes are known.

    Attributes:
        stack: lengths of the axes that number layers.
        start: where its factors begin among those of all: H (*stack, H_size), then S (*stack, S_size).
    """

    name: str
    layer: Layer
    core: cafin.Layer
    stack: Shape
    start: int

    @property
    def H(self) -> Part:
        return Part(self.start, self.core.H_size, 0, self.core.H_size)

    @property
    def S(self) -> Part:
        size = self.core.S_size
        return Part(self.start + math.prod(self.stack) * self.core.H_size, size, 0, size)

    @property
    def stop(self) -> int:
        """Where the next layer's factors begin."""
        return self.S.start + math.prod(self.stack) * self.core.S_size

    @property
    def units(self) -> int:
        return self.layer.units(self.core)

    @property
    def uses(self) -> dict[str, Use]:
        """Of each parameter, by its path."""
        weight, bias = self.layer.uses(self.core, self.H, self.S)
        return {self.layer.weight: weight} | ({self.layer.bias: bias} if self.layer.bias is not None else {})

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """Of the raw sums: H, S and the count."""
        return (*self.stack, self.units), (*self.stack, self.core.S_size), self.stack

    def sums(self, h: Any, s: Any) -> RawSums:
        """Of one call: H (units,), S (S_size,), and the count as an array."""
        found = self.layer.sums(self.core, h, s)
        if found.H.shape[0] != self.units:
            refuse(
                "tap",
                f"h of {self.name}",
                f"have an axis 1 of {self.units}, as when its layers were found",
                tuple(h.shape),
                "find them again with an input of this shape",
            )
        return RawSums(found.H, found.S, jnp.asarray(found.n, found.S.dtype))


def tap(layer: Bound, h: Any, y: Any, t: RawSums) -> Any:
    """`y`. In the backward pass the gradient of `t` is the raw sums of `h` and of the gradient of `y`.

    Args:
        layer: from `Layers`.
        h, y: the layer's input and output.
        t: zeros, from `Layers.zeros`; of a stack those of one layer, as `lax.scan` hands them out.

    Raises:
        CafinError: shapes that the layer cannot have.
    """
    if not isinstance(layer, Bound):
        refuse("tap", "layer", "be an entry of Layers", type(layer).__name__, "pass layers[name]", CafinTypeError)
    if not isinstance(t, RawSums):
        refuse("tap", "t", "be RawSums", type(t).__name__, "pass layers.zeros()[name]", CafinTypeError)
    jax.eval_shape(layer.sums, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (h, y)))  # the backward pass is late
    return _tap(layer, h, y, RawSums(*(x + nothing(y).astype(x.dtype) for x in t)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(layer: Bound, h: Any, y: Any, t: RawSums) -> Any:
    return y


def _forward(layer: Bound, h: Any, y: Any, t: RawSums) -> tuple[Any, Any]:
    return y, (h, t)


def _backward(layer: Bound, seen: tuple[Any, RawSums], s: Any) -> tuple[None, Any, RawSums]:
    h, t = seen
    sums = layer.sums(h, s)
    return None, s, RawSums(*((x + nothing(s)).astype(like.dtype) for x, like in zip(sums, t)))


_tap.defvjp(_forward, _backward)


class Layers(Mapping[str, Bound]):
    """The layers of a model by name.

    `taps = layers.zeros()` are what a tapped model takes; their gradients, the raw sums of a sampled step, are what the
    optimizer takes.
    """

    def __init__(self, params: Any, layers: Mapping[str, Layer]) -> None:
        """
        Args:
            params: the tree of parameters, or of anything with their shapes.
            layers: by names of your choice.

        Raises:
            CafinError: a path leads to no parameter, a shape is none of that layer's, two layers share a parameter.
        """
        leaves = by_path(params)
        names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        self._bound: dict[str, Bound] = {}
        self.size = 0  # of all factors together
        self.parameters: dict[str, Shape] = {}  # of the layers, by their paths
        owner: dict[str, str] = {}
        for name, layer in layers.items():
            if not isinstance(layer, Layer):
                refuse("Layers", f"layers[{name!r}]", "be a Layer", type(layer).__name__, "see Dense", CafinTypeError)
            for path in (layer.weight, layer.bias):
                if path is None:
                    continue
                if path not in leaves:
                    known = ", ".join(sorted(leaves)[:8])
                    refuse("Layers", f"layers[{name!r}]", "name parameters", repr(path), f"there are {known}")
                if names.count(path) > 1:
                    mend = 'rename them: keys with "/" in them read as two'
                    refuse("Layers", f"layers[{name!r}]", f"tell parameters apart by {path!r}", "several", mend)
                if path in owner:
                    rule = f"have parameters of its own, not {path!r} of {owner[path]!r}"
                    refuse("Layers", f"layers[{name!r}]", rule, "both", "tap one layer at both places: its sums add up")
                owner[path] = name
                self.parameters[path] = tuple(leaves[path].shape)
            shape = tuple(leaves[layer.weight].shape)
            stack, shape = shape[: layer.stack], shape[layer.stack :]
            core = layer.core(shape, layer.bias is not None)
            if layer.bias is not None:
                bias = tuple(leaves[layer.bias].shape)
                if math.prod(bias) != math.prod(stack) * core.outputs or bias[: layer.stack] != stack:
                    rule = (
                        f"have {core.outputs} entries for each of {stack}" if stack else f"have {core.outputs} entries"
                    )
                    refuse("Layers", layer.bias, rule, bias)
            self._bound[name] = Bound(name, layer, core, stack, self.size)
            self.size = self._bound[name].stop

    def __getitem__(self, name: str) -> Bound:
        return self._bound[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bound)

    def __len__(self) -> int:
        return len(self._bound)

    def __repr__(self) -> str:
        return f"Layers({', '.join(f'{name}: {type(bound.layer).__name__}' for name, bound in self.items())})"

    def zeros(self, dtype: Any = jnp.float32) -> dict[str, RawSums]:
        """Taps: zeros in the shapes of each layer's raw sums."""
        return {name: RawSums(*(jnp.zeros(shape, dtype) for shape in bound.shapes)) for name, bound in self.items()}

    def check(self, where: str, name: str, given: Any) -> None:
        """Refuse what is not in the shapes of `zeros`."""
        if not isinstance(given, Mapping) or set(given) != set(self):
            got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            refuse(where, name, "be like `layers.zeros()`", got, f"it has {sorted(self)}", CafinTypeError)
        for layer, bound in self.items():
            if not isinstance(given[layer], RawSums):
                got = type(given[layer]).__name__
                refuse(where, f"{name}[{layer!r}]", "be RawSums", got, "pass layers.zeros()", CafinTypeError)
            for letter, x, shape in zip("HSn", given[layer], bound.shapes):
                if getattr(x, "shape", None) != shape or not jnp.issubdtype(x.dtype, jnp.floating):
                    got = f"{x.dtype} of shape {tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__
                    refuse(where, f"{name}[{layer!r}].{letter}", f"be floating-point of shape {shape}", got)

    def factors(self, state: Any) -> dict[str, tuple[Any, Any]]:
        """(H, S) of each layer, float32 (*stack, H_size) and (*stack, S_size), as the preconditioner takes them;
        entries are ordered as the weight lies in memory. `state`: the optimizer's."""
        F = state.factors.used
        return {name: (part(F, bound.H, bound.stack), part(F, bound.S, bound.stack)) for name, bound in self.items()}

    @cached_property
    def uses(self) -> dict[str, tuple[str, Use]]:
        """(layer, use) of each parameter that has factors."""
        return {path: (name, use) for name, bound in self.items() for path, use in bound.uses.items()}


def check_layers(where: str, layers: Any) -> Layers:
    """`layers`, or a `CafinError`."""
    if not isinstance(layers, Layers):
        mend = "pass Layers(params, {...}), or what `find` of jax_linen, jax_nnx or jax_equinox returns"
        refuse(where, "layers", "be Layers", type(layers).__name__, mend, CafinTypeError)
    return layers


def part(F: Any, where: Part, stack: Shape) -> Any:
    """A vector of each layer of a stack, from all factors: (*stack, length)."""
    start, step, offset, length = where
    whole = F[start : start + math.prod(stack) * step].reshape(*stack, step)
    return whole[..., offset : offset + length]


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, keys joined by "/"."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def path_name(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree_util` as keys joined by "/", without the ".value" that Flax's NNX puts behind parameters."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    behind = len(keys) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return "/".join(keys[:-1] if behind else keys)
