"""State as a plain tree, and the optimizer among optax's: chains, masks, injected hyperparameters, orbax, export."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.export
import jax.numpy as jnp
import optax
from helpers import refuses
from jax_helpers import both_forms, same_trees

from cafin_cupy import CafinTypeError
from cafin_cupy.adapters.jax import ChannelNorm, Dense, Factors, Layers, State, adafisher, fused_adafisher

OPTIONS: dict[str, Any] = {"Lambda": 0.5, "TCov": 2}
STATIC = ("TCov", "gamma", "layers", "decoupled", "averaging", "mask", "momentum_dtype")


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, Any] = {"dense": {"kernel": (4, 3), "bias": (3,)}, "norm": {"scale": (3,)}, "rest": (5,)}
    return jax.tree.map(lambda n: jnp.asarray(rng.standard_normal(n), jnp.float32), shapes, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


LAYERS = Layers(
    tree(0),
    {"dense": Dense(weight="dense/kernel", bias="dense/bias"), "norm": ChannelNorm(weight="norm/scale")},
)


def sums(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape) + 0.5, x.dtype), LAYERS.zeros())


def trained(transform: Any, steps: int = 3, clip: float | None = None) -> tuple[Any, Any]:
    """(parameters, state) after steps of a transformation of optax."""
    params = tree(0)
    state = transform.init(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any, seen: Any) -> Any:
        updates, state = transform.update(grads, state, params, factors=seen)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        grads = tree(t + 1)
        if clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g, norm=norm: g * clip / jnp.maximum(norm, clip), grads)
        params, state = step(params, state, grads, sums(t))
    return params, state


def test_chain_passes_factors_on() -> None:
    """Momentum is that of the clipped gradients; factors are those of the loss as it was."""
    alone, state = trained(adafisher(0.1, layers=LAYERS, **OPTIONS), clip=1.0)
    chained, (_, of_chain) = trained(
        optax.chain(optax.clip_by_global_norm(1.0), adafisher(0.1, layers=LAYERS, **OPTIONS))
    )
    same_trees((chained, of_chain), (alone, state), 1e-6)
    assert (of_chain.factors.used != 1).all()


def test_masked_leaves_the_others_alone() -> None:
    mask = {"dense": True, "norm": False, "rest": False}
    others = {"dense": False, "norm": True, "rest": True}
    dense = Layers(tree(0), {"dense": LAYERS["dense"].layer})
    whole = Layers(tree(0), {name: bound.layer for name, bound in LAYERS.items()})
    ours = adafisher(0.1, layers=whole, **OPTIONS)
    transform = optax.chain(optax.masked(ours, mask), optax.masked(optax.set_to_zero(), others))
    params, state = trained(transform)
    want, _ = trained(adafisher(0.1, layers=LAYERS, **OPTIONS))
    same_trees(params["dense"], want["dense"])
    same_trees([params[name] for name in ("norm", "rest")], [tree(0)[name] for name in ("norm", "rest")])
    assert jax.tree.structure(state[0].inner_state.momentum["norm"]) == jax.tree.structure(optax.MaskedNode())
    assert dense.size < whole.size == state[0].inner_state.factors.used.size


def test_partition_gives_each_part_its_own() -> None:
    labels = {"dense": "ours", "norm": "theirs", "rest": "theirs"}
    partition = getattr(optax, "partition", None) or optax.multi_transform
    transform = partition({"ours": adafisher(0.1, layers=LAYERS, **OPTIONS), "theirs": optax.sgd(0.5)}, labels)
    params, _ = trained(transform, steps=1)
    want, _ = trained(adafisher(0.1, layers=LAYERS, **OPTIONS), steps=1)
    same_trees(params["dense"], want["dense"])
    same_trees(params["rest"], tree(0)["rest"] - 0.5 * tree(1)["rest"], 1e-6)


def test_injected_hyperparameters() -> None:
    """As arrays of the state: set by hand, or by schedules."""
    make = optax.inject_hyperparams(adafisher, static_args=STATIC)
    _, state = trained(make(lr=lambda count: 0.1 / (count + 1), layers=LAYERS, weight_decay=0.1, **OPTIONS))
    params, inner = trained(adafisher(lambda count: 0.1 / (count + 1), layers=LAYERS, weight_decay=0.1, **OPTIONS))
    same_trees(state.inner_state, inner, 1e-6)
    assert {"lr", "beta", "Lambda", "weight_decay"} <= set(state.hyperparams)

    transform = make(lr=0.1, layers=LAYERS, **OPTIONS)
    state = transform.init(params)
    state.hyperparams["lr"] = jnp.float32(0.0)
    updates, _ = jax.jit(partial(transform.update, factors=sums(0)))(tree(1), state, params)
    assert not any(x.any() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["TCov", "gamma"])
def test_an_injected_number_that_must_be_static(name: str) -> None:
    make = optax.inject_hyperparams(adafisher, static_args=[each for each in STATIC if each != name])
    transform = make(lr=0.1, layers=LAYERS, **OPTIONS)
    with refuses(CafinTypeError, f"`{name}`", "traced", "static_args"):
        jax.jit(transform.update)(tree(1), transform.init(tree(0)), tree(0))


def test_state_is_a_tree_of_arrays() -> None:
    for averaging, count in (("parity", 4 + 3), ("paper", 4 + 4)):
        init, _ = both_forms(layers=LAYERS, averaging=averaging)["fused"]
        state = init(tree(0))
        leaves = jax.tree.leaves(state)
        assert all(isinstance(x, jax.Array) for x in leaves) and len(leaves) == count
        assert isinstance(state, State) and isinstance(state.factors, Factors)
        assert (state.count.dtype, state.factors.used.dtype, state.factors.skipped.dtype) == (
            jnp.int32,
            jnp.float32,
            jnp.int32,
        )
        shapes = jax.eval_shape(init, jax.eval_shape(lambda: tree(0)))  # of parameters that are not there yet
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_orbax_restores_a_run_to_the_same_bits(averaging: str, tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    optimizer = fused_adafisher(0.1, layers=LAYERS, averaging=averaging, **OPTIONS)
    step = jax.jit(optimizer.step)

    def after(params: Any, state: State, steps: range) -> tuple[Any, State]:
        for t in steps:
            params, state = step(params, tree(t + 1), state, factors=sums(t))
        return params, state

    params, state = after(tree(0), optimizer.init(tree(0)), range(3))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": params, "state": state})
        checkpointer.wait_until_finished()
        like = {"params": tree(0), "state": optimizer.init(tree(0))}
        restored = checkpointer.restore(tmp_path / "run", like)
    same_trees((restored["params"], restored["state"]), (params, state))
    same_trees(after(restored["params"], restored["state"], range(3, 6)), after(params, state, range(3, 6)))


def test_export_round_trips() -> None:
    """Of the whole step, sampled, as plain array code."""
    pytest.importorskip("flatbuffers")  # what it is saved as
    optimizer = fused_adafisher(0.1, layers=LAYERS, backend="reference", **OPTIONS)
    step = jax.jit(lambda p, g, state, seen: optimizer.step(p, g, state, factors=seen))
    arguments = tree(0), tree(1), optimizer.init(tree(0)), sums(0)
    exported = jax.export.export(step, platforms=["cpu", "cuda"])(*arguments)
    again = jax.export.deserialize(exported.serialize())
    same_trees(again.call(*arguments), step(*arguments))


def test_a_saved_state_of_bfloat16_momentum_stays_so() -> None:
    optimizer = fused_adafisher(0.1, layers=LAYERS, momentum_dtype=jnp.bfloat16)
    state = optimizer.init(tree(0))
    for _ in range(2):
        _, state = jax.jit(optimizer.step)(tree(0), tree(1), state)
    assert {x.dtype for x in jax.tree.leaves(state.momentum)} == {jnp.dtype(jnp.bfloat16)}


def test_donated_buffers_are_taken() -> None:
    """Parameters and state are updated in place where they are donated, by plain array code too."""
    optimizer = fused_adafisher(0.1, layers=LAYERS)
    step = jax.jit(optimizer.step, donate_argnums=(0, 2))
    params, state = tree(0), optimizer.init(tree(0))
    compiled = step.lower(params, tree(1), state).compile()
    size = sum(x.nbytes for x in jax.tree.leaves((params, state.momentum)))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_have_the_types_of_parameters(dtype: str) -> None:
    """So that those of optax's transformations which may leave a step out can stand around it."""
    params = jax.tree.map(lambda x: x.astype(dtype), tree(0))
    for transform in (
        optax.apply_if_finite(adafisher(layers=LAYERS, TCov=1), 2),
        optax.MultiSteps(adafisher(layers=LAYERS, TCov=1), 1),
        optax.partition({"ours": adafisher(layers=LAYERS, TCov=1)}, "ours"),
    ):
        state = transform.init(params)
        updates, _ = jax.jit(transform.update)(params, state, params, factors=sums(0))
        for x in jax.tree.leaves(updates):
            assert x.dtype == dtype and x.all()


@pytest.mark.parametrize("form", ["fused", "optax"])
def test_the_count_stays_at_the_largest(form: str) -> None:
    """Where it turned negative, steps would be of nothing."""
    init, step = both_forms(layers=LAYERS)[form]
    largest = jnp.int32(2**31 - 1)
    params, state = tree(0), init(tree(0))._replace(count=largest)
    for _ in range(2):
        before = params
        params, state = jax.jit(step)(params, tree(1), state)
        assert state.count == largest
        assert not np.allclose(params["rest"], before["rest"], rtol=0, atol=1e-6)


def test_multisteps_with_the_sums_of_all_its_micro_batches() -> None:
    """As one step with the mean gradient."""
    inner = adafisher(layers=LAYERS, **OPTIONS)
    several = optax.MultiSteps(inner, 2)
    params = tree(0)
    grads = tree(1), tree(2)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    want, state = inner.update(mean, inner.init(params), params, factors=sums(0))
    first, begun = several.update(grads[0], several.init(params), params)
    assert not any(x.any() for x in jax.tree.leaves(first))
    got, done = several.update(grads[1], begun, params, factors=sums(0))
    same_trees(got, want, 1e-6)  # MultiSteps takes a running mean
    same_trees(done.inner_opt_state.factors, state.factors)
    assert done.inner_opt_state.count == 1
