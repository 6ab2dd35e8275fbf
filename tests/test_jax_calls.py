"""However a Flax model calls its layers, the taps see it: by keyword, behind flags, under Flax's own transformations,
from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from jax_helpers import ORDER, normal, same_trees

from cafin_cupy.adapters.jax import adafisher

nn = pytest.importorskip("flax.linen")
from flax import nnx  # noqa: E402

from cafin_cupy.adapters import jax_linen, jax_nnx  # noqa: E402

X = jnp.asarray(normal(0, 8, 5), jnp.float32)


class Linen(nn.Module):
    """`call(layer, x)`: how the first layer is called."""

    call: Callable[[Any, Any], Any]
    wrap: Callable[[Any], Any] = staticmethod(lambda kind: kind)

    @nn.compact
    def __call__(self, x: Any, twice: bool = False) -> Any:
        h = self.call(self.wrap(nn.Dense)(4, name="first"), x)
        return nn.Dense(2, name="second")(jnp.tanh(h if not twice else 2 * h))


def plainly(layer: Any, x: Any) -> Any:
    return layer(x)


def by_keyword(layer: Any, x: Any) -> Any:
    return layer(inputs=x)


def linen_sums(model: Any, variables: Any, layers: Any, *args: Any) -> Any:
    def loss(params: Any, taps: Any) -> Any:
        with jax_linen.tapped(layers, taps):
            return (model.apply({"params": params}, X, *args) ** 2).mean()

    return jax.jit(jax.grad(loss, argnums=1))(variables["params"], layers.zeros())


LINEN: dict[str, Any] = {
    "keyword": (by_keyword, lambda kind: kind),
    "remat": (plainly, nn.remat),
    "jit": (plainly, nn.jit),
}


@pytest.mark.parametrize("case", LINEN)
def test_linen(case: str) -> None:
    plain, model = Linen(plainly), Linen(*LINEN[case])
    variables = plain.init(jax.random.key(0), X)
    layers = jax_linen.find(model, variables, X)
    assert set(layers) == {"first", "second"}
    want = linen_sums(plain, variables, jax_linen.find(plain, variables, X))
    for _ in range(2):  # the second finds what Flax has kept of the first
        same_trees(linen_sums(model, variables, layers), want, ORDER)


@pytest.mark.parametrize("shape_alone", [False, True])
def test_linen_finds_layers_behind_flags(shape_alone: bool) -> None:
    """A flag is no array to be traced, whichever way it comes, and shapes stand for arrays both ways."""
    model = Linen(plainly)
    variables = model.init(jax.random.key(0), X)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype) if shape_alone else X
    for args, options in (((x, True), {}), ((x,), {"twice": True}), ((), {"x": x, "twice": False})):
        assert set(jax_linen.find(model, variables, *args, **options)) == {"first", "second"}


class Nnx(nnx.Module):
    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.call = call

    def __call__(self, x: Any, twice: bool = False) -> Any:
        h = self.call(self.first, x)
        return self.second(jnp.tanh(h if not twice else 2 * h))


def nnx_sums(model: Any, layers: Any) -> Any:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, taps: Any) -> Any:
        copy = nnx.merge(graph, params, rest, copy=True)
        with jax_nnx.tapped(copy, layers, taps):
            return (copy(X) ** 2).mean()

    return jax.jit(jax.grad(loss, argnums=1))(params, layers.zeros())


kept = nnx.jit(plainly)  # whose programs are kept from one call to the next
NNX: dict[str, Any] = {
    "keyword": by_keyword,
    "remat": nnx.remat(plainly),
    "jit": lambda layer, x: kept(layer, x),
    "remat of jit": nnx.remat(lambda layer, x: kept(layer, x)),
}


@pytest.mark.parametrize("case", NNX)
def test_nnx(case: str) -> None:
    """Under NNX's transformations a layer is called as a copy."""
    plain, model = Nnx(plainly), Nnx(NNX[case])
    want = nnx_sums(plain, jax_nnx.find(plain, X))
    layers = jax_nnx.find(model, X)
    assert set(layers) == {"first", "second"}
    for _ in range(2):
        same_trees(nnx_sums(model, layers), want, ORDER)


def test_nnx_finds_layers_behind_flags() -> None:
    model = Nnx(plainly)
    for args, options in (
        ((X, True), {}),
        ((X,), {"twice": True}),
        ((), {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}),
    ):
        assert set(jax_nnx.find(model, *args, **options)) == {"first", "second"}


@pytest.mark.parametrize("case", NNX)
def test_nnx_models_are_left_as_they_were(case: str) -> None:
    model = Nnx(NNX[case])
    layers = jax_nnx.find(model, X)
    before = nnx.graphdef(model)
    with jax_nnx.tapped(model, layers, layers.zeros()):
        model(X)
    assert nnx.graphdef(model) == before


def test_nnx_stacks_under_scan_have_no_factors() -> None:
    """A layer that `nnx.scan` lifts is called with one layer's parameters."""

    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.blocks = nnx.vmap(lambda key: nnx.Linear(5, 5, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            )
            self.head = nnx.Linear(5, 2, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            scanned = nnx.scan(plainly, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return self.head(scanned(self.blocks, x))

    model = Stack()
    with pytest.warns(UserWarning, match="F = 1.*blocks/bias, blocks/kernel"):
        layers = jax_nnx.find(model, X)
    assert set(layers) == {"head"}
    assert nnx_sums(model, layers)["head"].n == len(X)


def test_nnx_in_several_threads() -> None:
    model = Nnx(plainly)
    layers = jax_nnx.find(model, X)
    want, wrong = nnx_sums(model, layers), []

    def work() -> None:
        try:
            for _ in range(5):
                same_trees(nnx_sums(model, layers), want)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_optimizer_of_nnx() -> None:
    model = Nnx(plainly)
    layers = jax_nnx.find(model, X)
    transform = adafisher(0.1, TCov=2, layers=layers)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    state, sums = transform.init(params), nnx_sums(model, layers)
    for _ in range(3):
        updates, state = transform.update(params, state, params, factors=sums)
        optimizer.update(model, params, factors=sums)
        params = jax.tree.map(jnp.add, params, updates)
        same_trees(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(params), ORDER)
    for name, (H, S) in layers.factors(state).items():
        for got, one in zip(layers.factors(optimizer.opt_state)[name], (H, S)):
            np.testing.assert_allclose(got, one, rtol=ORDER)
