"""JAX: AdaFisher as a pure function of trees, inside `jax.jit`.

Outside of `jax.jit`, in programs that compute with CuPy or PyTorch too, `fused_step` is the core's update of JAX
arrays, and `borrowed` lets the core read them.

`adafisher(...)` is an optax transformation; `fused_adafisher(...)` returns new parameters instead, and on an NVIDIA GPU
writes them, all leaves in one kernel launch, into the memory of the old ones if those are donated. Both take the same
options and the same state. The factors come from taps, see `Layers` and `tap`, and for Flax and Equinox models from
`jax_linen`, `jax_nnx` and `jax_equinox`, which find the layers and leave the model as it is.

    layers = jax_linen.find(model, variables, x)                     # once
    optimizer = fused_adafisher(1e-3, layers=layers)
    state = optimizer.init(params)

    def loss(params, taps, x, y):
        with jax_linen.tapped(layers, taps):
            return cross_entropy(model.apply({"params": params}, x), y)

    @partial(jax.jit, donate_argnums=(0, 1), static_argnames="sampled")
    def step(params, state, x, y, sampled):
        taps = layers.zeros()
        if sampled:
            grads, sums = jax.grad(loss, argnums=(0, 1))(params, taps, x, y)
        else:
            grads, sums = jax.grad(loss)(params, taps, x, y), None
        return optimizer.step(params, grads, state, factors=sums)

Importing this module imports jax and optax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from cafin_cupy.backend import requested
from cafin_cupy.errors import BackendError, CafinTypeError, CafinValueError, refuse
from cafin_cupy.rule import DEFAULT_GAMMA, Averaging

from . import jax_kernels
from .jax_eager import borrowed, fused_step
from .jax_layers import ChannelNorm, Conv, Dense, Layer, LayerNorm
from .jax_rule import Leaf, Rule
from .jax_taps import Layers, tap
from .jax_update import Factors, State, counted

__all__ = [
    "ChannelNorm",
    "Conv",
    "Dense",
    "Factors",
    "Fused",
    "Layer",
    "LayerNorm",
    "Layers",
    "State",
    "adafisher",
    "borrowed",
    "fused_adafisher",
    "fused_step",
    "tap",
]

Schedule = Callable[[Any], Any]


class Fused(NamedTuple):
    """What `fused_adafisher` returns.

    Attributes:
        init: `init(params)` -> `State`.
        step: `step(params, grads, state, factors=None, grad_scale=1.0)` -> (new params, new state).
    """

    init: Callable[[Any], State]
    step: Callable[..., tuple[Any, State]]


def adafisher(
    lr: float | Any | Schedule = 1e-3,
    beta: Any = 0.9,
    Lambda: Any = 1e-3,
    gamma: Any = DEFAULT_GAMMA,
    TCov: int = 100,
    weight_decay: Any = 0.0,
    *,
    layers: Layers | None,
    decoupled: bool = False,
    averaging: str | Averaging = "parity",
    mask: Any = None,
    momentum_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdaFisher as an optax transformation, for `optax.chain`, `optax.masked` and `optax.inject_hyperparams`.

        g <- g + wd p;  m <- beta m + (1 - beta) g;  update = - lr / (1 - beta^t) m / F,   F[r, c] = S[r] H[c] + Lambda

    `update(grads, state, params, factors=None, grad_scale=1.0)`: `factors` are the gradients of the taps on a sampled
    step, None on others. The formulas are plain array code on every platform, which XLA fuses leaf by leaf.

    Args:
        lr: learning rate; a number, an array without axes, or a schedule of the number of completed steps.
        beta: decay of the momentum, in [0, 1).
        Lambda: damping, > 0.
        gamma: decay of the factors, in [0, 1].
        TCov: the factors are refreshed on every TCov-th step, the first among them; factors given on other steps are
            left aside. Where the caller decides by itself which steps are sampled, 1.
        weight_decay: >= 0.
        layers: which parameters have factors, see `Layers`; None: none has, which is SGD with momentum. All others are
            updated with F = 1.
        decoupled: True for AdaFisherW: the decay is `- lr wd p`, apart from the gradient.
        averaging: "parity" (the public implementation's rule), "paper", or an `Averaging`.
        mask: tree of bools like the parameters, or a function of them that returns one: where weight decay applies.
        momentum_dtype: of the momentum; None for float32, or float64 for float64 parameters.

    Raises:
        CafinError: an argument is refused, here, by `init` or while `update` is traced.
    """
    rule = Rule.checked(
        "adafisher", lr, beta, Lambda, gamma, TCov, weight_decay, layers, decoupled, averaging, mask, momentum_dtype
    )

    def update(
        updates: Any, state: State, params: Any = None, *, factors: Any = None, grad_scale: Any = 1.0, **_: Any
    ) -> tuple[Any, State]:
        if params is None:
            refuse(
                "adafisher", "params", "be given to `update`", None, "pass them as its third argument", CafinTypeError
            )
        leaves = rule.leaves(params, updates, state)
        new = rule.refreshed(state, factors, grad_scale)
        scalars = rule.scalars(state.count)
        pairs = [rule.taken(leaf, new, scalars, grad_scale) for leaf in leaves]
        back = partial(jax.tree.unflatten, jax.tree.structure(params))
        momentum = [m.astype(leaf.m.dtype) for leaf, (_, m) in zip(leaves, pairs)]
        updates = [(-step).astype(leaf.p.dtype) for leaf, (step, _) in zip(leaves, pairs)]
        return back(updates), State(counted(state.count), back(momentum), new)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def fused_adafisher(
    lr: float | Any | Schedule = 1e-3,
    beta: Any = 0.9,
    Lambda: Any = 1e-3,
    gamma: Any = DEFAULT_GAMMA,
    TCov: int = 100,
    weight_decay: Any = 0.0,
    *,
    layers: Layers | None,
    decoupled: bool = False,
    averaging: str | Averaging = "parity",
    mask: Any = None,
    momentum_dtype: Any = None,
    backend: str | None = None,
) -> Fused:
    """AdaFisher whose step returns new parameters. Arguments and state are those of `adafisher`.

    On a GPU all leaves are updated by one kernel, in place where parameters and state are donated to `jax.jit`; else
    XLA copies them first. The kernel reads gradient, parameter and momentum and writes the latter two: 20 bytes a
    parameter of float32. On sampled steps another refreshes all factors, in place too.

    Args:
        backend: "cuda": the kernel; "reference": plain array code that XLA fuses leaf by leaf and partitions over
            devices; None: the kernel for NVIDIA GPUs where it can run and one device holds the arrays: there is only
            one, or the step is traced within `jax.shard_map`.

    Raises:
        CafinError: an argument is refused.
        BackendError: "cuda" is asked for, and the parameters are of types that the kernel does not know.
    """
    rule = Rule.checked(
        "fused_adafisher",
        lr,
        beta,
        Lambda,
        gamma,
        TCov,
        weight_decay,
        layers,
        decoupled,
        averaging,
        mask,
        momentum_dtype,
    )
    requested(backend, "fused_adafisher")

    def step(params: Any, grads: Any, state: State, *, factors: Any = None, grad_scale: Any = 1.0) -> tuple[Any, State]:
        leaves = rule.leaves(params, grads, state)
        new = rule.refreshed(state, factors, grad_scale, backend)
        if _takes_kernel(backend, rule, leaves):
            p, m = jax.lax.platform_dependent(
                *([getattr(leaf, x) for leaf in leaves] for x in "pgm"),
                new.used,
                rule.hypers(state.count, grad_scale),
                cuda=_not_vmapped(partial(jax_kernels.update, rule.described(leaves))),
                default=lambda *_: rule.stepped(leaves, new, state.count, grad_scale),
            )
        else:
            p, m = rule.stepped(leaves, new, state.count, grad_scale)
        back = partial(jax.tree.unflatten, jax.tree.structure(params))
        return back(p), State(counted(state.count), back(m), new)

    return Fused(rule.init, step)


def _takes_kernel(backend: str | None, rule: Rule, leaves: list[Leaf]) -> bool:
    """Whether the step is to be the kernel's where the program is for NVIDIA GPUs."""
    if not leaves or not jax_kernels.wanted(backend):
        return False
    strange = next((pair for pair in zip(leaves, rule.described(leaves)) if not jax_kernels.takes(pair[1])), None)
    if strange is not None and requested(backend, "fused_adafisher") is not None:
        leaf, seen = strange
        kinds = f"be of a type that the kernel knows, in a stack of at most {jax_kernels.ITEMS}"
        got = f"{seen.dtype} with momentum of {seen.momentum}, in a stack of {seen.stack}"
        refuse("fused_adafisher", leaf.path, kinds, got, 'see backend="reference"', BackendError)
    return strange is None


def _not_vmapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which `jax.vmap` refuses: one launch updates one model."""
    guarded = jax.custom_batching.custom_vmap(call)

    @guarded.def_vmap
    def refused(*_: Any) -> Any:
        refuse(
            "fused_adafisher",
            "step",
            "be outside of `jax.vmap` where the kernel runs",
            "a batch",
            'use adafisher, or backend="reference"',
            CafinValueError,
        )

    return guarded
