"""The options of both forms of the optimizer, checked, and what they make of trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.rule import Averaging, Hyper, Scalars, at_least, flag, whole

from . import jax_kernels
from .jax_layers import Use
from .jax_refresh import refreshed
from .jax_taps import Layers, by_path, check_layers, path_name
from .jax_update import Factors, State, first_factors, scalars_at, taken


class Leaf(NamedTuple):
    """A parameter and what belongs to it; `decays`: weight decay applies."""

    path: str
    p: Any
    g: Any
    m: Any
    decays: bool


@dataclass(frozen=True)
class Rule:
    """The options of both forms, checked."""

    where: str
    lr: Any
    beta: Any
    Lambda: Any
    weight_decay: Any
    TCov: Any
    layers: Layers
    decoupled: bool
    averaging: Averaging
    mask: Any
    momentum_dtype: Any

    @classmethod
    def checked(
        cls,
        where: str,
        lr: Any,
        beta: Any,
        Lambda: Any,
        gamma: Any,
        TCov: Any,
        weight_decay: Any,
        layers: Any,
        decoupled: Any,
        averaging: Any,
        mask: Any,
        momentum_dtype: Any,
    ) -> Rule:
        for name, value in (("decoupled", decoupled), ("gamma", gamma), ("TCov", TCov)):
            if isinstance(value, jax.core.Tracer):
                got = "a value that is traced"
                refuse(
                    where, name, "be a number", got, "name it in `static_args` of inject_hyperparams", CafinTypeError
                )
        decoupled = flag(where, "decoupled", decoupled)
        given = {"lr": lr, "beta": beta, "Lambda": Lambda, "weight_decay": weight_decay}
        known = {
            name: value for name, value in given.items() if not isinstance(value, jax.Array) and not callable(value)
        }
        whole_set = {"lr": 0.0, "beta": 0.0, "Lambda": 1.0, "weight_decay": 0.0, **known}
        hyper = Hyper.checked(where, decoupled=decoupled, **whole_set)
        for name in given:
            if name in known:
                given[name] = getattr(hyper, name)
            elif not callable(given[name]):
                _check_scalar(where, name, given[name])
            elif name != "lr":
                refuse(
                    where, name, "be a number", "a function", "schedule it by optax.inject_hyperparams", CafinTypeError
                )
        _check_dtype(where, momentum_dtype)
        if mask is not None and not callable(mask):
            _bools(where, mask)
        return cls(
            where,
            **given,
            TCov=whole(where, "TCov", TCov, 1),
            layers=Layers({}, {}) if layers is None else check_layers(where, layers),
            decoupled=decoupled,
            averaging=Averaging.named(averaging, gamma),
            mask=mask,
            momentum_dtype=momentum_dtype,
        )

    def init(self, params: Any) -> State:
        """The state before the first step: momenta of 0 and factors of 1."""
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        for path, p in leaves:
            _check_floating(self.where, path_name(path), p)
        if leaves:
            self._owned(params)
        momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, self._momentum_of(p)), params)
        return State(jnp.zeros((), jnp.int32), momentum, first_factors(self.layers, self.averaging))

    def _momentum_of(self, p: Any) -> Any:
        return self.momentum_dtype or jnp.promote_types(p.dtype, jnp.float32)

    def _owned(self, params: Any) -> None:
        """Refuse parameters that are not those of the layers; what optax.masked hides is absent from the leaves."""
        found = by_path(params)
        hidden = {
            path_name(path)
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
            )[0]
            if isinstance(leaf, optax.MaskedNode)
        }
        for path, (name, _) in self.layers.uses.items():
            if path not in found and not any(path == each or path.startswith(f"{each}/") for each in hidden):
                known = ", ".join(sorted(found)[:8])
                refuse(
                    self.where,
                    "params",
                    f"hold {path!r} of layer {name!r}",
                    known,
                    "pass the tree that Layers was given",
                )
            shape = self.layers.parameters[path]
            if path in found and tuple(found[path].shape) != shape:
                rule, got = f"hold {path!r} of shape {shape}", tuple(found[path].shape)
                refuse(self.where, "params", rule, got, "pass the tree that Layers was given")

    def leaves(self, params: Any, grads: Any, state: State) -> list[Leaf]:
        """The parameters with what belongs to each, in the order of the tree."""
        self._check_state(state)
        if jax.tree.leaves(params):
            self._owned(params)
        found, structure = jax.tree_util.tree_flatten_with_path(params)
        for name, tree in (("grads", grads), ("state.momentum", state.momentum)):
            got: Any = jax.tree.structure(tree)
            if got != structure:
                refuse(
                    self.where,
                    name,
                    "have the structure of the parameters",
                    got,
                    f"those have {structure}",
                    CafinTypeError,
                )
        for name, tree in (("params", params), ("grads", grads), ("state.momentum", state.momentum)):
            for (path, _), x in zip(found, jax.tree.leaves(tree)):
                _check_floating(self.where, f"{name}[{path_name(path)!r}]", x)
        leaves = [
            Leaf(path_name(path), jnp.asarray(p), jnp.asarray(g), m, d)
            for (path, p), g, m, d in zip(
                found, jax.tree.leaves(grads), jax.tree.leaves(state.momentum), self._decays(params)
            )
        ]
        for leaf in leaves:
            for letter, x in (("grads", leaf.g), ("state.momentum", leaf.m)):
                if x.shape != leaf.p.shape:
                    refuse(self.where, f"{letter}[{leaf.path!r}]", f"have shape {leaf.p.shape}", x.shape)
        return leaves

    def _decays(self, params: Any) -> list[bool]:
        """Of each parameter, whether weight decay applies."""
        if self.mask is None:
            return [True] * len(jax.tree.leaves(params))
        mask = self.mask(params) if callable(self.mask) else self.mask
        _bools(self.where, mask)
        try:
            return jax.tree.leaves(jax.tree.broadcast(mask, params))
        except ValueError:
            got: Any = jax.tree.structure(mask)
            mend = f"they are {jax.tree.structure(params)}"
            refuse(self.where, "mask", "be a tree of bools like the parameters", got, mend, CafinTypeError)

    def _check_state(self, state: Any) -> None:
        """Refuse what is no state of these layers and this averaging rule."""
        if not isinstance(state, State):
            refuse(self.where, "state", "be State", type(state).__name__, "pass what `init` returned", CafinTypeError)
        like = jax.eval_shape(partial(first_factors, self.layers, self.averaging))
        known = {f"factors.{name}": (getattr(state.factors, name, None), x) for name, x in zip(Factors._fields, like)}
        known["count"] = state.count, jax.ShapeDtypeStruct((), jnp.int32)
        for name, (x, want) in known.items():
            if _described(x) != _described(want):
                mend = "pass a state of the same layers and averaging rule, as `init` made it"
                refuse(self.where, f"state.{name}", f"be {_described(want)}", _described(x), mend)

    def refreshed(self, state: State, sums: Any, grad_scale: Any, backend: str | None = "reference") -> Factors:
        """The factors that this step uses. `backend`: as of `fused_adafisher`; the formulas can be differentiated."""
        _check_scale(self.where, grad_scale)
        if sums is None:
            return state.factors
        due = jnp.asarray(True) if self.TCov == 1 else state.count % self.TCov == 0
        self.layers.check(self.where, "factors", sums)
        return refreshed(self.layers, state.factors, sums, self.averaging, due, grad_scale, backend)

    def scalars(self, count: Any) -> tuple[Scalars, Scalars]:
        """Of the step behind `count` completed ones, without weight decay and with it."""
        lr = self.lr
        if callable(lr):
            lr = lr(count)
            if hasattr(lr, "dtype"):
                _check_scalar(self.where, "lr(count)", lr)
            else:
                at_least(self.where, "lr(count)", lr, 0.0)
        return scalars_at(lr, self.beta, self.Lambda, self.weight_decay, self.decoupled, count)

    def taken(self, leaf: Leaf, factors: Factors, scalars: tuple[Scalars, Scalars], grad_scale: Any) -> tuple[Any, Any]:
        """(what the step takes from a parameter, new momentum) by the reference."""
        use, stack = self._use(leaf)
        g = leaf.g if _is_one(grad_scale) else leaf.g.astype(jnp.promote_types(leaf.g.dtype, jnp.float32)) / grad_scale
        return taken(leaf.p, g, leaf.m, factors.used, use, stack, scalars[leaf.decays])

    def _use(self, leaf: Leaf) -> tuple[Use | None, int]:
        """(which factors the parameter takes, how many of its axes number layers)."""
        name, use = self.layers.uses.get(leaf.path, ("", None))
        return use, len(self.layers[name].stack) if use else 0

    def stepped(self, leaves: list[Leaf], factors: Factors, count: Any, grad_scale: Any) -> tuple[list[Any], list[Any]]:
        """New parameters and momenta by the reference."""
        new_p, new_m, scalars = [], [], self.scalars(count)
        for leaf in leaves:
            step, momentum = self.taken(leaf, factors, scalars, grad_scale)
            new_p.append((leaf.p.astype(step.dtype) - step).astype(leaf.p.dtype))
            new_m.append(momentum.astype(leaf.m.dtype))
        return new_p, new_m

    def hypers(self, count: Any, grad_scale: Any) -> Any:
        """Scalars as the kernel takes them, (2, 8): for parameters without weight decay, and for those with it."""
        inverse = jnp.float32(1.0) / grad_scale
        rows = [(*each, inverse, 0.0) for each in self.scalars(count)]
        return jnp.stack([jnp.stack([jnp.asarray(x, jnp.float32) for x in row]) for row in rows])

    def described(self, leaves: list[Leaf]) -> list[jax_kernels.Leaf]:
        """The parameters for the kernel."""
        return [jax_kernels.Leaf.of(leaf.p, leaf.m, *self._use(leaf), int(leaf.decays)) for leaf in leaves]


def _check_scale(where: str, grad_scale: Any) -> None:
    if isinstance(grad_scale, jax.Array):
        _check_scalar(where, "grad_scale", grad_scale)
    else:
        at_least(where, "grad_scale", grad_scale, 0.0, strict=True)


def _check_scalar(where: str, name: str, value: Any) -> None:
    """Refuse an array that is no single number."""
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.number):
        refuse(where, name, "be a single number", f"{value.dtype} of shape {value.shape}", kind=CafinTypeError)


def _check_floating(where: str, name: str, x: Any) -> None:
    if not jnp.issubdtype(getattr(x, "dtype", np.void), jnp.floating):
        refuse(where, name, "be an array of floating-point numbers", _described(x), kind=CafinTypeError)


def _described(x: Any) -> str:
    """Type and shape of an array; of all else what it is."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype} of shape {tuple(x.shape)}"
    return "()" if x == () else type(x).__name__


def _check_dtype(where: str, dtype: Any) -> None:
    try:
        known = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # the name of none
        known = False
    if not known:
        refuse(where, "momentum_dtype", "be a floating-point type or None", dtype, kind=CafinTypeError)


def _bools(where: str, mask: Any) -> None:
    """Refuse a mask with other leaves."""
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            mend = "or a function of the parameters that returns one"
            refuse(where, "mask", "be a tree of bools", type(leaf).__name__, mend, CafinTypeError)


def _is_one(grad_scale: Any) -> bool:
    return isinstance(grad_scale, (int, float)) and grad_scale == 1
