"""The rule on trees of JAX arrays: factors after a sampled step, and the update of every parameter. Pure functions,
from the formulas of `cafin_cupy.reference`; jax_kernels.py does the update in one launch instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from cafin_cupy import reference
from cafin_cupy.reference import RawSums
from cafin_cupy.rule import Averaging, Scalars

from .jax_layers import Use
from .jax_taps import Bound, Layers, part


class Factors(NamedTuple):
    """Of all layers; `Layers.factors` tells them apart.

    Attributes:
        used: float32 (size,), as the preconditioner takes them.
        averages: float32 (size,), before they are normalised, where the averaging rule normalises afterwards; else ().
        skipped: int32 (layers,), sampled steps on which a layer's moments held a NaN and were left out.
    """

    used: Any
    averages: Any
    skipped: Any


class State(NamedTuple):
    """Of the optimizer; a tree of arrays.

    Attributes:
        count: int32 (), completed steps.
        momentum: like the parameters.
        factors: `Factors`.
    """

    count: Any
    momentum: Any
    factors: Factors


for kind in (State, Factors, RawSums):  # so that exported programs may be saved
    jax.export.register_namedtuple_serialization(kind, serialized_name=f"cafin_cupy.{kind.__name__}")


def counted(count: Any) -> Any:
    """The count behind one more step; it stays at the largest int32, where an overflow would turn it negative."""
    return count + (count < jnp.iinfo(jnp.int32).max).astype(jnp.int32)


def first_factors(layers: Layers, averaging: Averaging) -> Factors:
    """Ones, as before the first sampled step."""
    ones, skipped = jnp.ones(layers.size, jnp.float32), jnp.zeros(len(layers), jnp.int32)
    if averaging.normalize == "before":
        return Factors(ones, (), skipped)
    return Factors(jnp.zeros_like(ones), ones, skipped)  # what ones are when they are normalised


def refreshed(
    layers: Layers, old: Factors, sums: Mapping[str, RawSums], averaging: Averaging, due: Any, grad_scale: Any
) -> Factors:
    """Factors after a step that saw `sums`, where `due`; a layer that was not called keeps its own."""
    after = averaging.normalize == "after"
    averages, used, broken = [], [], []
    for name, bound in layers.items():
        H, S = (part(old.averages if after else old.used, where, bound.stack) for where in (bound.H, bound.S))
        *new, bad = _refreshed(bound, H, S, sums[name], averaging, due, grad_scale)
        averages += new
        used += [_of_each(partial(reference.effective, averaging=averaging), bound)(F) for F in new] if after else new
        broken.append(jnp.any(bad))
    if not broken:
        return old
    one = [jnp.concatenate([F.reshape(-1) for F in each]) for each in (used, averages)]
    return Factors(one[0], one[1] if after else (), old.skipped + jnp.stack(broken).astype(jnp.int32))


def _refreshed(
    bound: Bound, H: Any, S: Any, sums: RawSums, averaging: Averaging, due: Any, grad_scale: Any
) -> tuple[Any, Any, Any]:
    """(H, S, whether the moments held a NaN), of each layer of a stack."""

    def one(H: Any, S: Any, sums: RawSums) -> tuple[Any, Any, Any]:
        H_raw, S_raw = (x.astype(H.dtype) for x in reference.moments(bound.core, sums, grad_scale))
        seen = due & (sums.n > 0)
        new_H, new_S = reference.refresh(H, S, H_raw, S_raw, averaging)
        return jnp.where(seen, new_H, H), jnp.where(seen, new_S, S), seen & reference.broken(H_raw, S_raw)

    return _of_each(one, bound)(H, S, sums)


def _of_each(call: Callable[..., Any], bound: Bound) -> Callable[..., Any]:
    """`call` for each layer of a stack."""
    for _ in bound.stack:
        call = jax.vmap(call)
    return call


def taken(p: Any, g: Any, m: Any, F: Any, use: Use | None, stack: int, scalars: Scalars) -> tuple[Any, Any]:
    """(what the step takes from a parameter, new momentum), both in the precision of the computation: float32, or that
    of the parameter if it is finer.

    Args:
        F: all factors.
        use: which of them are the parameter's; None: none.
        stack: how many of its axes number layers.
    """
    one: Callable[..., tuple[Any, Any]] = reference.direction
    dtype = jnp.promote_types(jnp.promote_types(p.dtype, m.dtype), jnp.float32)
    x, g, m = (a.astype(dtype) for a in (p, g, m))
    if use is None:
        return one(x, g, m, None, None, scalars)
    for _ in range(stack):
        one = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None))
    columns, rows = (part(F, where, p.shape[:stack]) for where in use)
    return one(x, g, m, columns, rows, scalars)


def scalars_at(
    lr: Any, beta: Any, Lambda: Any, weight_decay: Any, decoupled: bool, count: Any
) -> tuple[Scalars, Scalars]:
    """At the step behind `count` completed ones: for parameters without weight decay, and for those with it.

    `1 - beta^t` is `-expm1(t log beta)`: the difference itself would lose the digits that float32 has to spare for a
    beta near 1."""
    log = math.log(beta) if isinstance(beta, float) and beta else jnp.log(jnp.asarray(beta, jnp.float32))
    step_size = lr / -jnp.expm1((count.astype(jnp.float32) + 1.0) * log)
    without = Scalars(step_size, 0.0, 0.0, beta, 1.0 - beta, Lambda)
    if decoupled:
        return without, without._replace(decay=lr * weight_decay)
    return without, without._replace(l2=weight_decay)
