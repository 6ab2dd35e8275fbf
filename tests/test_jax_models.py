"""Flax and Equinox models: which layers are found, and that their sums are those of inputs and output gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import refuses
from jax_helpers import ORDER, normal, patch_sums, patches, same_sums, same_trees

from cafin_cupy import CafinTypeError, CafinValueError
from cafin_cupy.adapters.jax import ChannelNorm, Conv, Dense, LayerNorm, Layers, fused_adafisher

X = jnp.asarray(normal(0, 4, 6, 6, 3), jnp.float32)
Y = jnp.asarray(normal(1, 4, 5), jnp.float32)


def squares(h: Any, s: Any) -> tuple[Any, Any, Any]:
    """Raw sums of a dense layer."""
    h, s = (np.asarray(x, float).reshape(-1, x.shape[-1]) for x in (h, s))
    return (h**2).sum(0), (s**2).sum(0), len(h)


def plain(h: Any, s: Any, axis: int = -1) -> tuple[Any, Any, Any]:
    """Raw sums of a norm; `axis`: whose entries of h have sums of their own."""
    h, s = (np.asarray(x, float) for x in (h, s))
    of_h = np.moveaxis(h, axis, 1)
    u = of_h.sum(axis=(0, *range(2, h.ndim))) / (h[0].size / of_h.shape[1]) ** 2
    return u, s.reshape(-1, s.shape[-1]).sum(0), len(h)


def convolved(h: Any, s: Any, kernel: Any, stride: Any, pads: Any, last: bool = True) -> tuple[Any, Any, Any]:
    h, s = (np.moveaxis(np.asarray(x, float), -1, 1) if last else np.asarray(x, float) for x in (h, s))
    return patch_sums(patches(h, kernel, stride, (1, 1), pads), s, 1, last)


def gradients(run: Callable[..., Any], *shifted: Any) -> tuple[Any, Any]:
    """(what `run` returns beside the loss, gradients of the loss with respect to what is added to outputs)."""
    gradient = jax.grad(run, argnums=tuple(range(len(shifted))), has_aux=True)
    s, seen = gradient(*map(jnp.zeros, shifted))  # not jitted: XLA of jax 0.8 folds a convolution of constants wrongly
    return seen, s


def unlike(got: Any, want: Any) -> dict[str, Any]:
    assert set(got) == set(want)
    for name in want:
        same_sums(got[name], want[name], 10 * ORDER)  # sums of signed numbers lose a digit
    return got


# ---- Flax Linen ----

nn = pytest.importorskip("flax.linen")
from cafin_cupy.adapters import jax_linen  # noqa: E402


class Dense2(nn.Dense):
    """A subclass counts."""


class Linen(nn.Module):
    """`shifts`: what is added behind each layer, to differentiate by hand."""

    @nn.compact
    def __call__(self, x: Any, shifts: Any = None, seen: Any = None) -> Any:
        shared = Dense2(8, name="shared")

        def call(layer: Any, h: Any) -> Any:
            y = layer(h)
            if seen is None:
                return y
            seen.append(h)
            return y + shifts[len(seen) - 1]

        h = call(nn.Conv(8, (3, 3), strides=2, name="conv"), x)
        h = nn.relu(call(nn.BatchNorm(use_running_average=False, name="bn"), h))
        h = jnp.tanh(call(shared, h))
        h = jnp.tanh(call(shared, h))
        h = call(nn.LayerNorm(name="ln"), h.reshape(len(h), -1, 8))
        h = call(nn.DenseGeneral((2, 4), name="split"), h)
        h = call(nn.DenseGeneral(5, axis=(-2, -1), name="join"), h)
        return h.mean(1)


def test_linen() -> None:
    """Convolution, statistics that change, a subclass, a module called twice, DenseGeneral of both directions."""
    model = Linen()
    variables = jax.jit(model.init)(jax.random.key(0), X)  # as it comes, each operation would be compiled alone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = jax_linen.find(model, variables, X, mutable=["batch_stats"])
    assert {name: type(bound.layer) for name, bound in layers.items()} == {
        "conv": Conv,
        "bn": ChannelNorm,
        "shared": Dense,
        "ln": LayerNorm,
        "split": Dense,
        "join": Dense,
    }

    def loss(params: Any, taps: Any) -> Any:
        with jax_linen.tapped(layers, taps):
            z, _ = model.apply({**variables, "params": params}, X, mutable=["batch_stats"])
        return ((z - Y) ** 2).mean()

    grads, got = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], layers.zeros())

    def by_hand(*shifts: Any) -> Any:
        seen: list[Any] = []
        z, _ = model.apply(variables, X, shifts, seen, mutable=["batch_stats"])
        return ((z - Y) ** 2).mean(), seen

    h, s = gradients(by_hand, *[(4, 3, 3, 8)] * 4, (4, 9, 8), (4, 9, 2, 4), (4, 9, 5))
    twice = [squares(h[k], s[k]) for k in (2, 3)]
    want = {
        "conv": convolved(h[0], s[0], (3, 3), (2, 2), [(0, 1), (0, 1)]),
        "bn": plain(h[1], s[1]),
        "shared": tuple(a + b for a, b in zip(*twice)),
        "ln": plain(h[4], s[4], 1),
        "split": squares(h[5], s[5].reshape(4, 9, 8)),
        "join": squares(h[6].reshape(4, 9, 8), s[6]),
    }
    unlike(got, want)
    same_trees(grads, jax.jit(jax.grad(lambda p: loss(p, layers.zeros())))(variables["params"]), 1e-6)


def test_linen_modules_that_are_lifted_or_unknown_stay_without_factors() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Embed(7, 4, name="tokens")(x)
            block = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = block(name="blocks")(x, None)
            x = nn.ConvTranspose(4, (3,), name="up")(x)
            return nn.Dense(5, name="head")(x.mean(1))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return jnp.tanh(nn.Dense(4, name="inner")(x)), None

    model, tokens = Model(), jnp.arange(8).reshape(2, 4) % 7
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    with pytest.warns(UserWarning, match=re.escape("F = 1")) as caught:
        layers = jax_linen.find(model, variables, tokens)
    assert len(caught) == 1
    assert list(layers) == ["head"]
    for name in ("blocks/inner/kernel", "tokens/embedding", "up/kernel"):
        assert name in str(caught[0].message)
    optimizer = fused_adafisher(layers=layers)

    def loss(params: Any, taps: Any) -> Any:
        with jax_linen.tapped(layers, taps):
            return (model.apply({"params": params}, tokens) ** 2).mean()

    grads, sums = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], layers.zeros())
    optimizer.step(variables["params"], grads, optimizer.init(variables["params"]), factors=sums)
    assert sums["head"].n == 2 and sums["head"].H.any()


def test_linen_refusals() -> None:
    model, x = nn.Dense(3), jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x)
    with refuses(CafinTypeError, "find", "`model`", "flax.linen", "dict"):
        jax_linen.find({}, variables, x)  # type: ignore[arg-type]
    with refuses(CafinTypeError, "find", "`variables`", '"params"'):
        jax_linen.find(model, variables["params"], x)
    layers = jax_linen.find(model, variables, x)
    with refuses(CafinTypeError, "tapped", "`taps`"), jax_linen.tapped(layers, {}):
        pass
    with refuses(CafinTypeError, "tapped", "`layers`", "dict"), jax_linen.tapped({}, {}):  # type: ignore[arg-type]
        pass


# ---- Flax NNX ----

from flax import nnx  # noqa: E402

from cafin_cupy.adapters import jax_nnx  # noqa: E402


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs, padding="VALID")
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.tanh(self.bn(self.conv(x))).mean((1, 2)))


def nnx_parts(model: Any) -> Any:
    return nnx.split(model, nnx.Param, ...)


def test_nnx() -> None:
    model = Nnx()
    layers = jax_nnx.find(model, X)
    assert set(layers) == {"conv", "bn", "head"}
    graph, params, rest = nnx_parts(model)

    def loss(params: Any, taps: Any) -> Any:
        copy = nnx.merge(graph, params, rest, copy=True)
        with jax_nnx.tapped(copy, layers, taps):
            return ((copy(X) - Y) ** 2).mean()

    _, got = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, layers.zeros())

    def by_hand(*shifts: Any) -> Any:
        copy = nnx.merge(graph, params, rest, copy=True)
        first = copy.conv(X) + shifts[0]
        second = copy.bn(first) + shifts[1]
        third = jnp.tanh(second).mean((1, 2))
        return ((copy.head(third) + shifts[2] - Y) ** 2).mean(), (X, first, third)

    h, s = gradients(by_hand, (4, 4, 4, 8), (4, 4, 4, 8), (4, 5))
    unlike(
        got,
        {
            "conv": convolved(h[0], s[0], (3, 3), (1, 1), [(0, 0), (0, 0)]),
            "bn": plain(h[1], s[1]),
            "head": squares(h[2], s[2]),
        },
    )
    optimizer = fused_adafisher(layers=layers)
    new, _ = jax.jit(optimizer.step)(params, params, optimizer.init(params), factors=got)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    nnx.update(model, new)


def test_nnx_modules_have_their_classes_back() -> None:
    """After an exception too; and one context within another is refused."""
    model = Nnx()
    layers = jax_nnx.find(model, X)
    taps = layers.zeros()
    with pytest.raises(ZeroDivisionError), jax_nnx.tapped(model, layers, taps):
        assert type(model.head) is not nnx.Linear and isinstance(model.head, nnx.Linear)
        raise ZeroDivisionError
    assert (type(model.conv), type(model.bn), type(model.head)) == (nnx.Conv, nnx.BatchNorm, nnx.Linear)
    with jax_nnx.tapped(model, layers, taps):
        with (
            refuses(CafinValueError, "tapped", "`model`", "not be tapped already"),
            jax_nnx.tapped(model, layers, taps),
        ):
            pass
        model(X)
    assert type(model.head) is nnx.Linear
    with refuses(CafinTypeError, "find", "`model`", "flax.nnx", "int"):
        jax_nnx.find(3)  # type: ignore[arg-type]
    other = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with refuses(CafinValueError, "tapped", "`model`", "conv"), jax_nnx.tapped(other, layers, taps):
        pass


# ---- Equinox ----


def test_equinox() -> None:
    """Of samples under vmap; BatchNorm with a state of its own."""
    eqx = pytest.importorskip("equinox")
    from cafin_cupy.adapters import jax_equinox

    class Model(eqx.Module):
        conv: Any
        bn: Any
        ln: Any
        fc: Any

        def __init__(self) -> None:
            first, second = jax.random.split(jax.random.key(0))
            self.conv = eqx.nn.Conv2d(3, 8, 3, stride=2, padding=1, key=first)
            self.bn = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
            self.ln = eqx.nn.LayerNorm(8)
            self.fc = eqx.nn.Linear(8, 5, key=second)

        def __call__(self, x: Any, state: Any, shifts: Any = (0, 0, 0, 0)) -> Any:
            first = self.conv(x) + shifts[0]
            y, state = self.bn(first, state)
            second = jnp.tanh(y + shifts[1]).mean((1, 2))
            third = self.ln(second) + shifts[2]
            return self.fc(third) + shifts[3], (first, second, third), state

    model, state = eqx.nn.make_with_state(Model)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = jax_equinox.find(model)
    assert {name: type(bound.layer) for name, bound in layers.items()} == {
        "conv": Conv,
        "bn": ChannelNorm,
        "ln": LayerNorm,
        "fc": Dense,
    }
    images = jnp.moveaxis(X, -1, 1)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, taps: Any) -> Any:
        whole = jax_equinox.tapped(eqx.combine(params, static), layers, taps)
        z, _, _ = jax.vmap(whole, axis_name="batch", in_axes=(0, None), out_axes=(0, 0, None))(images, state)
        return ((z - Y) ** 2).mean()

    _, got = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, layers.zeros())

    def by_hand(*shifts: Any) -> Any:
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, 0, None))
        z, seen, _ = mapped(images, state, shifts)
        return ((z - Y) ** 2).mean(), seen

    h, s = gradients(by_hand, (4, 8, 3, 3), (4, 8, 3, 3), (4, 8), (4, 5))
    of_channels = (np.moveaxis(np.asarray(x), 1, -1) for x in (h[0], s[1]))
    unlike(
        got,
        {
            "conv": convolved(images, s[0], (3, 3), (2, 2), [(1, 1), (1, 1)], last=False),
            "bn": plain(*of_channels),
            "ln": plain(h[1], s[2]),
            "fc": squares(h[2], s[3]),
        },
    )
    optimizer = fused_adafisher(layers=layers)
    new, _ = jax.jit(optimizer.step)(params, params, optimizer.init(params), factors=got)
    assert isinstance(eqx.combine(new, static), Model)
    with refuses(CafinTypeError, "find", "`model`", "equinox", "int"):
        jax_equinox.find(3)
    with refuses(CafinValueError, "tapped", "`model`", "hold the layers"):
        jax_equinox.tapped(model.fc, layers, layers.zeros())
    with pytest.warns(UserWarning, match=r"F = 1.* weight"):
        assert not jax_equinox.find(eqx.nn.Embedding(7, 4, key=jax.random.key(0)))
    assert isinstance(layers, Layers)
