"""Taps give the raw sums that an explicit computation gives, under every transformation of JAX, and leave no trace
where nobody asks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from jax_helpers import (
    ORDER,
    gradient_sums,
    normal,
    one,
    patch_sums,
    patches,
    same_sums,
    same_trees,
    tapped_sums,
    x64,
)

from cafin_cupy.adapters.jax import ChannelNorm, Conv, Dense, LayerNorm, Layers, tap

SHAPES = settings(max_examples=15)  # each compiles a program


# ---- Each kind of layer ----


@pytest.mark.parametrize("input_major", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [((5,), (3,)), ((2, 3), (4,)), ((5,), (2, 3)), ((2, 3), (1, 2))], ids=str
)
@pytest.mark.parametrize("lead", [(), (4,), (4, 7)], ids=str)
def test_dense(lead: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], input_major: bool) -> None:
    """Of any axes on either side, as DenseGeneral has them."""
    weight = inputs + outputs if input_major else outputs + inputs
    layers = one(Dense, weight, outputs, inputs=len(inputs), input_major=input_major)
    h, s = normal(0, *lead, *inputs), normal(1, *lead, *outputs)
    with x64():
        got = tapped_sums(layers, jnp.asarray(h), jnp.asarray(s))
    rows = math.prod(lead)
    H, S = (np.square(x.reshape(rows, -1)).sum(0) for x in (h, s))
    same_sums(got, (H, S, rows))
    bound = layers["layer"]
    width = math.prod(inputs)
    (of_weight, of_bias) = bound.uses["w"], bound.uses["b"]
    assert {of_weight.rows.length, of_weight.columns.length} == {width, S.size} or width == S.size
    assert (of_weight.rows if input_major else of_weight.columns).start == bound.H.start
    assert of_bias.columns == bound.H._replace(offset=width, length=1)


def explicit_pads(mode: Any, image: Any, span: Any, stride: Any) -> Any:
    """Pairs for each axis, from the definition of each mode."""
    if mode == "VALID":
        return [(0, 0)] * len(image)
    if mode == "CAUSAL":
        return [(n - 1, 0) for n in span]
    if mode == "CIRCULAR":
        return "wrap", [((n - 1) // 2, n // 2) for n in span]
    if mode == "SAME":  # as many outputs as strides fit, what is missing split evenly, the odd one behind
        missing = [max(0, (-(-n // t) - 1) * t + wide - n) for n, t, wide in zip(image, stride, span)]
        return [(n // 2, n - n // 2) for n in missing]
    each = (mode,) * len(image) if isinstance(mode, int) else mode
    return [p if isinstance(p, tuple) else (p, p) for p in each]


@st.composite
def convolutions(draw: Any) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    image = tuple(n + more for n, more in zip(span, each(0, 4 if axes < 3 else 2)))
    modes = ["SAME", "VALID", "CIRCULAR", "same", *(["CAUSAL"] if axes == 1 else [])]
    numbers = st.integers(0, 4)
    padding = draw(
        st.one_of(
            st.sampled_from(modes),
            numbers,
            st.tuples(*[numbers] * axes),
            st.tuples(*[st.tuples(numbers, numbers)] * axes),
            st.tuples(*[numbers] * axes).map(list),
        )
    )
    return {
        "kernel": kernel,
        "image": image,
        "padding": padding,
        "stride": draw(st.sampled_from([stride, stride[0]])),
        "dilation": draw(st.sampled_from([dilation, 1])),
        "groups": draw(st.integers(1, 3)),
        "c_in": draw(st.integers(1, 2)),
        "c_out": draw(st.integers(1, 2)),
        "channels_last": draw(st.booleans()),
        "batch": draw(st.sampled_from([1, 3])),
    }


@SHAPES
@given(convolutions())
def test_convolutions(case: dict[str, Any]) -> None:
    axes, last, groups = len(case["kernel"]), case["channels_last"], case["groups"]
    stride, dilation = ((x,) * axes if isinstance(x, int) else x for x in (case["stride"], case["dilation"]))
    padding = case["padding"].upper() if isinstance(case["padding"], str) else case["padding"]
    span = [(k - 1) * d + 1 for k, d in zip(case["kernel"], dilation)]
    pads = explicit_pads(padding, case["image"], span, stride)
    h = normal(0, case["batch"], groups * case["c_in"], *case["image"])
    W = normal(1, groups * case["c_out"], case["c_in"], *case["kernel"])
    seen = patches(h, case["kernel"], stride, dilation, pads)
    y = np.einsum(
        "bgc...t,goct->bgo...",
        seen.reshape(len(h), groups, case["c_in"], *seen.shape[2:]),
        W.reshape(groups, case["c_out"], case["c_in"], -1),
    ).reshape(len(h), groups * case["c_out"], *seen.shape[2:-1])
    weight = (*case["kernel"], *W.shape[1::-1]) if last else W.shape
    layers = one(
        Conv,
        weight,
        (len(W),),
        **{name: case[name] for name in ("stride", "padding", "dilation", "groups", "channels_last")},
    )
    s = normal(2, *y.shape)
    h_, s_ = (np.moveaxis(x, 1, -1) if last else x for x in (h, s))
    with x64():
        if not isinstance(padding, str) or padding in ("SAME", "VALID"):  # that the patches are what JAX multiplies
            of_jax = padding if isinstance(padding, str) else pads
            product = jax.lax.conv_general_dilated(
                jnp.asarray(h), jnp.asarray(W), stride, of_jax, rhs_dilation=dilation, feature_group_count=groups
            )
            np.testing.assert_allclose(product, y, rtol=1e-12, atol=1e-12)
        got = tapped_sums(layers, jnp.asarray(h_), jnp.asarray(s_))
    same_sums(got, patch_sums(seen, s, groups, last))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("pixels", [(), (5,), (3, 4), (2, 3, 2)], ids=str)
def test_channel_norms(pixels: tuple[int, ...], channels_last: bool) -> None:
    h, s = normal(0, 4, 3, *pixels), normal(1, 4, 3, *pixels)
    layers = one(ChannelNorm, (3,), (3,), channels_last=channels_last)
    place = (lambda x: np.moveaxis(x, 1, -1)) if channels_last else (lambda x: x)
    with x64():
        got = tapped_sums(layers, jnp.asarray(place(h)), jnp.asarray(place(s)))
    others = (0, *range(2, h.ndim))
    P = math.prod(pixels)
    absolute = np.abs(h).sum(others) / P**2, np.abs(s).sum(others), 4
    same_sums(got, (h.sum(others) / P**2, s.sum(others), 4), scale=absolute)


@pytest.mark.parametrize("lead", [(4,), (4, 5), (4, 5, 2)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_layer_norms(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    h, s = normal(0, *lead, *shape), normal(1, *lead, *shape)
    layers = one(LayerNorm, shape, shape, length=h.shape[1])
    with x64():
        got = tapped_sums(layers, jnp.asarray(h), jnp.asarray(s))
    Q = math.prod(h.shape[2:])
    u = h.sum(axis=(0, *range(2, h.ndim))) / Q**2
    of_lead = tuple(range(len(lead)))
    absolute = np.abs(h).sum(axis=(0, *range(2, h.ndim))) / Q**2, np.abs(s).sum(of_lead).reshape(-1), 4
    same_sums(got, (u, s.sum(of_lead).reshape(-1), 4), scale=absolute)


# ---- Under JAX's transformations ----


def dense(params: Any, h: Any) -> Any:
    return h @ params["w"] + params["b"]


PARAMS = {"w": jnp.asarray(normal(0, 5, 5), jnp.float32), "b": jnp.asarray(normal(1, 5), jnp.float32)}
LAYERS = Layers(PARAMS, {"layer": Dense(weight="w", bias="b")})
X = jnp.asarray(normal(2, 8, 5), jnp.float32)


def net(params: Any, taps: Any, h: Any, calls: int = 2) -> Any:
    """One layer called several times."""
    for _ in range(calls):
        h = jnp.tanh(tap(LAYERS["layer"], h, dense(params, h), taps["layer"]))
    return h


def loss(params: Any, taps: Any, h: Any) -> Any:
    return (net(params, taps, h) ** 2).mean()


def want_of_two_calls(h: Any) -> Any:
    """Sums of `loss`, from inputs and output gradients that JAX differentiates by hand."""

    def split(shifts: Any) -> Any:
        first = jnp.tanh(dense(PARAMS, h) + shifts[0])
        return (jnp.tanh(dense(PARAMS, first) + shifts[1]) ** 2).mean(), first

    s, first = jax.grad(split, has_aux=True)([jnp.zeros_like(h)] * 2)
    inputs, outputs = (np.asarray(x, float) for x in ([h, first], s))
    return np.square(inputs).sum((0, 1)), np.square(outputs).sum((0, 1)), 2 * len(h)


def test_calls_of_a_shared_layer_add_up() -> None:
    same_sums(jax.jit(jax.grad(loss, argnums=1))(PARAMS, LAYERS.zeros(), X)["layer"], want_of_two_calls(X), ORDER)


@pytest.mark.parametrize("wrap", ["eager", "jit", "checkpoint", "remat of jit", "value_and_grad"])
def test_each_transformation_gives_the_same(wrap: str) -> None:
    taps = LAYERS.zeros()
    if wrap == "eager":
        got = jax.grad(loss, argnums=1)(PARAMS, taps, X)
    elif wrap == "jit":
        got = jax.jit(jax.grad(loss, argnums=1))(PARAMS, taps, X)
    elif wrap == "checkpoint":
        got = jax.grad(lambda p, t, x: (jax.checkpoint(net)(p, t, x) ** 2).mean(), argnums=1)(PARAMS, taps, X)
    elif wrap == "remat of jit":
        got = jax.jit(jax.grad(jax.checkpoint(jax.jit(loss)), argnums=1))(PARAMS, taps, X)
    else:
        _, (_, got) = jax.value_and_grad(loss, argnums=(0, 1))(PARAMS, taps, X)
    same_sums(got["layer"], want_of_two_calls(X), ORDER)


def test_a_stack_of_layers_under_scan() -> None:
    """Three layers, each with sums of its own, as three separate ones have."""
    stacked = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p, -p]), PARAMS)
    layers = Layers(stacked, {"layer": Dense(weight="w", bias="b", stack=1)})
    alone = {f"{k}{name}": p[k] for name, p in stacked.items() for k in range(3)}
    singly = Layers(alone, {str(k): Dense(weight=f"{k}w", bias=f"{k}b") for k in range(3)})

    def scanned(params: Any, taps: Any) -> Any:
        def body(h: Any, of_one: Any) -> Any:
            p, t = of_one
            return jnp.tanh(tap(layers["layer"], h, dense(p, h), t)), None

        return (jax.lax.scan(body, X, (params, taps["layer"]))[0] ** 2).mean()

    def unrolled(params: Any, taps: Any) -> Any:
        h = X
        for k in range(3):
            y = h @ params[f"{k}w"] + params[f"{k}b"]
            h = jnp.tanh(tap(singly[str(k)], h, y, taps[str(k)]))
        return (h**2).mean()

    for wrapped in (scanned, jax.checkpoint(scanned)):
        got = jax.jit(jax.grad(wrapped, argnums=1))(stacked, layers.zeros())["layer"]
        want = jax.jit(jax.grad(unrolled, argnums=1))(alone, singly.zeros())
        assert got.H.shape == (3, 5) and got.n.shape == (3,)
        for k in range(3):
            same_sums(type(got)(*(x[k] for x in got)), want[str(k)], ORDER)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_micro_batches_add_up_to_the_full_batch(k: int) -> None:
    gradient = jax.jit(jax.grad(lambda p, t, x: loss(p, t, x) / k, argnums=(0, 1)))
    parts = [gradient(PARAMS, LAYERS.zeros(), x) for x in jnp.split(X, k)]
    total = parts[0]
    for part in parts[1:]:
        total = jax.tree.map(jnp.add, total, part)
    same_trees(total, jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, LAYERS.zeros(), X), ORDER)


def test_micro_batches_within_scan() -> None:
    def summed(total: Any, x: Any) -> Any:
        grads = jax.grad(lambda t: loss(PARAMS, t, x) / 4)(LAYERS.zeros())
        return jax.tree.map(jnp.add, total, grads), None

    got, _ = jax.jit(lambda x: jax.lax.scan(summed, LAYERS.zeros(), x))(X.reshape(4, 2, 5))
    same_sums(got["layer"], want_of_two_calls(X), ORDER)


@pytest.mark.parametrize("axes", [1, 2])
def test_vmap_counts_every_sample(axes: int) -> None:
    def one_sample(params: Any, taps: Any, h: Any) -> Any:
        return net(params, taps, h)

    mapped: Any = one_sample
    for _ in range(axes):
        mapped = jax.vmap(mapped, in_axes=(None, None, 0))
    x = X if axes == 1 else X.reshape(2, 4, 5)
    got = jax.jit(jax.grad(lambda t: (mapped(PARAMS, t, x) ** 2).mean()))(LAYERS.zeros())
    same_sums(got["layer"], want_of_two_calls(X), ORDER)


def test_vmap_of_samples_without_an_axis_of_their_own() -> None:
    """Convolutions and norms that see one sample at a time sum as with the whole batch."""
    h, s = (jnp.asarray(normal(k, 6, 3, 4, 4), jnp.float32) for k in (0, 1))
    cases = [
        (Conv, (5, 3, 1, 1), {"padding": 0, "channels_last": False}, {}),
        (ChannelNorm, (3,), {"channels_last": False}, {"batched": False}),
        (LayerNorm, (3, 4, 4), {}, {}),
    ]
    for kind, shape, options, alone in cases:
        of_batch, of_sample = one(kind, shape, **options), one(kind, shape, **options, **alone)
        out = jnp.tile(s[:, :1], (1, 5, 1, 1)) if kind is Conv else s

        def run(t: Any, layers: Layers = of_sample, out: Any = out) -> Any:
            y = jax.vmap(lambda h, s: tap(layers["layer"], h, 0.0 * s, t["layer"]) * s)(h, out)
            return y.sum()

        want = tapped_sums(of_batch, h, out, dtype=jnp.float32)
        same_sums(gradient_sums(of_sample, run)["layer"], want, ORDER)


def test_an_output_that_no_loss_reads_counts_as_a_call() -> None:
    """Its gradients are zeros; and a layer that is not called has seen nothing."""
    got = jax.grad(lambda t: 0.0 * net(PARAMS, t, X).sum())(LAYERS.zeros())["layer"]
    assert got.n == 2 * len(X) and not got.S.any() and got.H.any()
    same_trees(jax.grad(lambda t: jnp.sum(X))(LAYERS.zeros()), LAYERS.zeros())


def test_activations_of_16_bits_are_summed_in_float32() -> None:
    """2^12 ones: bfloat16 would stop at 256."""
    for dtype in (jnp.bfloat16, jnp.float16):
        h, s = jnp.ones((4096, 5), dtype), jnp.full((4096, 5), 0.5, dtype)
        got = tapped_sums(LAYERS, h, s, dtype=jnp.float32)
        assert got.H.dtype == got.S.dtype == jnp.float32
        same_sums(got, (np.full(5, 4096.0), np.full(5, 1024.0), 4096), 1e-7)


def test_the_output_and_its_gradient_pass_unchanged() -> None:
    def plain(params: Any, h: Any) -> Any:
        for _ in range(2):
            h = jnp.tanh(dense(params, h))
        return (h**2).mean()

    got = jax.jit(jax.value_and_grad(lambda p, x: loss(p, LAYERS.zeros(), x), argnums=(0, 1)))(PARAMS, X)
    same_trees(got, jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(PARAMS, X))


def test_taps_that_are_not_differentiated_leave_no_trace() -> None:
    """The compiled gradient is the same program as that of the model without taps."""

    def plain(params: Any, taps: Any, h: Any) -> Any:
        for _ in range(2):
            h = jnp.tanh(dense(params, h))
        return (h**2).mean()

    def compiled(of: Any, argnums: Any) -> Any:
        return jax.jit(jax.grad(of, argnums)).lower(PARAMS, LAYERS.zeros(), X).compile()

    def cost(program: Any) -> Any:
        found = program.cost_analysis()
        found = found[0] if isinstance(found, list) else found
        return found["flops"], found["bytes accessed"]

    assert cost(compiled(loss, 0)) == cost(compiled(plain, 0))
    assert cost(compiled(loss, (0, 1)))[0] > cost(compiled(plain, 0))[0]
