"""The kernel inside XLA's programs on a GPU: the formulas' numbers, memory updated in place, many leaves, loops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp

from cafin_cupy.adapters import jax as cafin
from cafin_cupy.adapters import jax_kernels, jax_ptx

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "mask": lambda params: {name: name != "plain" for name in params}}
# One rounding of each type; float32: sums and a division in another order, fused by the GPU.
CLOSE = {"float32": 2.0**-20, "bfloat16": 2.0**-7, "float16": 2.0**-9}


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Whatever other tests have made the default device of the process."""
    with jax.default_device(jax.devices("cuda")[0]):
        yield


def params_of(shapes: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, (shape, dtype) in shapes.items()}


SHAPES = {
    "dense": ((7, 5), "float32"),
    "dense_bias": ((5,), "float32"),
    "stack": ((3, 5, 7), "float32"),  # layers that begin at odd places
    "stack_bias": ((3, 7), "float32"),
    "conv": ((3, 3, 2, 6), "bfloat16"),
    "norm": ((6,), "float16"),
    "large": ((70, 1237), "float32"),
    "plain": ((11,), "float32"),
    "empty": ((0, 4), "float32"),
    "scalar": ((), "bfloat16"),
}
LAYERS = {
    "dense": cafin.Dense(weight="dense", bias="dense_bias"),
    "stack": cafin.Dense(weight="stack", bias="stack_bias", stack=1),
    "conv": cafin.Conv(weight="conv"),
    "norm": cafin.ChannelNorm(weight="norm"),
    "large": cafin.Dense(weight="large", input_major=False),
}


def sums_of(layers: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape) + 0.5, x.dtype), layers.zeros())


def steepness(layers: Any, state: Any) -> float:
    """How much more a rounding of a moving average counts where it is normalised, as (F~ - min) / (max - min)."""
    if isinstance(state.factors.averages, tuple):
        return 1.0
    averages = layers.factors(state._replace(factors=state.factors._replace(used=state.factors.averages)))
    every = [x for pair in averages.values() for x in pair]
    ranges = [(jnp.max(x, axis=-1), jnp.max(x, axis=-1) - jnp.min(x, axis=-1)) for x in every]
    return max(float(jnp.max(high / jnp.maximum(wide, 1e-6))) for high, wide in ranges)


@pytest.mark.parametrize("momentum", [None, "bfloat16"], ids=str)
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_the_kernel_follows_the_formulas(averaging: str, decoupled: bool, momentum: str | None) -> None:
    shapes = dict(SHAPES)
    if momentum:  # the kernel knows no float16 with a momentum of bfloat16
        shapes["norm"] = shapes["norm"][0], "bfloat16"
    params = params_of(shapes)
    layers = cafin.Layers(params, LAYERS)
    results = []
    for backend in ("cuda", "reference"):
        optimizer = cafin.fused_adafisher(
            0.1,
            Lambda=0.5,
            TCov=2,
            layers=layers,
            averaging=averaging,
            decoupled=decoupled,
            momentum_dtype=momentum,
            backend=backend,
            **OPTIONS,
        )
        step = jax.jit(optimizer.step)
        p, state = params, optimizer.init(params)
        for k in range(4):
            p, state = step(p, params_of(shapes, k + 1), state, factors=sums_of(layers, k), grad_scale=2.0)
        results.append((p, state))
    used = results[1][1].factors.used
    for got, want in zip(*map(jax.tree.leaves, results)):
        scale = float(jnp.max(jnp.abs(want.astype(jnp.float32)), initial=0.0))
        # Of four steps. A momentum that is rounded to another neighbour moves a parameter by 2^-8 of its step.
        close = 2.0**-14 if momentum and want.dtype == jnp.float32 else CLOSE.get(str(want.dtype), 0)
        slack = 4 * close * scale * (steepness(layers, results[1][1]) if want is used else 1.0)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=slack)


def stepping(**options: Any) -> Any:
    params = params_of({name: (shape, "float32") for name, (shape, _) in SHAPES.items()})
    layers = cafin.Layers(params, LAYERS)
    optimizer = cafin.fused_adafisher(0.1, layers=layers, backend="cuda", **options)
    return params, optimizer, optimizer.init(params)


def test_donated_arrays_keep_their_memory_and_others_their_numbers() -> None:
    params, optimizer, state = stepping()
    grads = jax.tree.map(jnp.ones_like, params)
    before = jax.tree.map(np.array, params)
    jax.block_until_ready(jax.jit(optimizer.step)(params, grads, state))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(before)):
        np.testing.assert_array_equal(x, y)
    places = {name: x.unsafe_buffer_pointer() for name, x in params.items() if x.size}
    of_momenta = {name: x.unsafe_buffer_pointer() for name, x in state.momentum.items() if x.size}
    params, state = jax.jit(optimizer.step, donate_argnums=(0, 2))(params, grads, state)
    assert {name: params[name].unsafe_buffer_pointer() for name in places} == places
    assert {name: state.momentum[name].unsafe_buffer_pointer() for name in of_momenta} == of_momenta


def test_nothing_is_copied_and_there_is_one_launch() -> None:
    params, optimizer, state = stepping()
    compiled = jax.jit(optimizer.step, donate_argnums=(0, 2)).lower(params, params, state).compile()
    text = compiled.as_text()
    assert text.count("gpu.ptx") == 1
    assert not re.search(r"\[[1-9][\d,]*\]\S* copy\(", text)  # but for what is empty
    size = sum(x.nbytes for x in jax.tree.leaves((params, state.momentum)))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def test_steps_within_a_loop_and_a_condition() -> None:
    params, optimizer, state = stepping()
    grads = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def scanned(params: Any, state: Any) -> Any:
        def body(carry: Any, k: Any) -> Any:
            return jax.lax.cond(k % 3 == 2, lambda c: c, lambda c: optimizer.step(c[0], grads, c[1]), carry), None

        return jax.lax.scan(body, (params, state), jnp.arange(6))[0]

    step = jax.jit(optimizer.step)
    want = params, state
    for _ in range(4):
        want = step(want[0], grads, want[1])
    for a, b in zip(*map(jax.tree.leaves, (scanned(params, state), want))):
        np.testing.assert_array_equal(a, b)


def test_more_leaves_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer, state = stepping()
    want = jax.jit(optimizer.step)(params, params, state)
    monkeypatch.setattr(jax_kernels, "ARGUMENTS", 20)
    compiled = jax.jit(lambda *args: optimizer.step(*args)).lower(params, params, state).compile()
    assert compiled.as_text().count("gpu.ptx") == 3
    for a, b in zip(*map(jax.tree.leaves, (compiled(params, params, state), want))):
        np.testing.assert_array_equal(a, b)


def test_a_thousand_leaves() -> None:
    params = {f"p{k}": jnp.full((k % 5 + 1, 3), float(k)) for k in range(1000)}
    optimizer = cafin.fused_adafisher(0.5, beta=0.0, layers=None, backend="cuda")
    params, _ = jax.jit(optimizer.step)(params, jax.tree.map(jnp.ones_like, params), optimizer.init(params))
    for k in range(1000):
        assert bool((params[f"p{k}"] == k - 0.5).all())


def test_the_choice_that_is_left_to_us_takes_the_kernel() -> None:
    assert jax_kernels.problem() is None
    params, *_ = stepping()
    optimizer = cafin.fused_adafisher(0.1, layers=None)
    assert "gpu.ptx" in jax.jit(optimizer.step).lower(params, params, optimizer.init(params)).as_text()


def test_two_runs_agree_bit_for_bit() -> None:
    params, optimizer, state = stepping()
    step = partial(
        jax.jit(optimizer.step), params, params_of({n: (s, "float32") for n, (s, _) in SHAPES.items()}, 3), state
    )
    for a, b in zip(*map(jax.tree.leaves, (step(), step()))):
        np.testing.assert_array_equal(a, b)


# ---- Raw sums ----

SEEN: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {  # layer, shapes of weight, h and s
    "dense": (cafin.Dense(weight="w"), (65, 33), (9, 130, 65), (9, 130, 33)),
    "dense, long": (cafin.Dense(weight="w"), (64, 128), (70000, 64), (70000, 128)),
    "dense, output first": (cafin.Dense(weight="w", input_major=False), (33, 65), (7, 65), (7, 33)),
    "heads": (cafin.Dense(weight="w", inputs=2), (4, 8, 5), (3, 6, 4, 8), (3, 6, 5)),
    "conv": (cafin.Conv(weight="w"), (3, 3, 4, 6), (5, 12, 11, 4), (5, 12, 11, 6)),
    "conv, groups, stride": (cafin.Conv(weight="w", stride=2, groups=2), (3, 5, 2, 6), (5, 12, 11, 4), (5, 6, 6, 6)),
    "conv, wide": (cafin.Conv(weight="w", padding="VALID"), (1, 1, 64, 64), (64, 16, 16, 64), (64, 16, 16, 64)),
    "conv, channels first": (
        cafin.Conv(weight="w", padding="VALID", dilation=2, channels_last=False),
        (6, 4, 3, 3),
        (5, 4, 12, 11),
        (5, 6, 8, 7),
    ),
    "conv, circular": (cafin.Conv(weight="w", padding="CIRCULAR"), (3, 4, 6), (5, 12, 4), (5, 12, 6)),
    "batch norm": (cafin.ChannelNorm(weight="w"), (24,), (16, 8, 8, 24), (16, 8, 8, 24)),
    "batch norm, channels first": (cafin.ChannelNorm(weight="w", channels_last=False), (24,), (16, 24, 9), (16, 24, 9)),
    "layer norm": (cafin.LayerNorm(weight="w", length=50), (96,), (8, 50, 96), (8, 50, 96)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SEEN)
def test_sums_by_the_kernels_follow_the_formulas(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight, *shapes = SEEN[name]
    bound = cafin.Layers({"w": jax.ShapeDtypeStruct(weight, jnp.float32)}, {"layer": layer})["layer"]
    rng = np.random.default_rng(0)
    h, s = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    got, text = {}, {}
    for backend in ("cuda", "reference"):
        monkeypatch.setenv("CAFIN_BACKEND", backend)
        sums = jax.jit(lambda h, s: bound.sums(h, s))  # traced anew
        got[backend], text[backend] = sums(h, s), sums.lower(h, s).as_text()
    assert text["cuda"].count("gpu.ptx") == 2 and "gpu.ptx" not in text["reference"]
    for kernel, formula in zip(got["cuda"], got["reference"]):
        scale = float(jnp.max(jnp.abs(formula)))  # plain sums of norm layers cancel: compare with what was added
        count = h.size if bound.core.norm else 1
        np.testing.assert_allclose(kernel, formula, rtol=0, atol=2.0**-20 * max(scale, np.sqrt(count)))


def gradients(batch: int) -> tuple[Any, Any, Any]:
    """(a function of parameters, taps and inputs, its arguments, its layers)."""
    params = params_of({"c": ((3, 3, 3, 8), "float32"), "d": ((128, 10), "float32")})
    layers = cafin.Layers(params, {"c": cafin.Conv(weight="c", stride=2), "d": cafin.Dense(weight="d")})
    x = jnp.asarray(np.random.default_rng(1).standard_normal((batch, 8, 8, 3)), jnp.float32)

    def loss(params: Any, taps: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, params["c"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = jax.nn.relu(cafin.tap(layers["c"], x, y, taps["c"])).reshape(len(x), -1)
        return (cafin.tap(layers["d"], h, h @ params["d"], taps["d"]) ** 2).mean()

    return loss, (params, layers.zeros(), x), layers


def test_a_sampled_step_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, sums, factors and update in one program: two launches a layer for the sums, one for all factors, and
    one for the update."""
    loss, (params, taps, x), layers = gradients(32)
    results = {}
    for backend in ("cuda", "reference"):
        monkeypatch.setenv("CAFIN_BACKEND", backend)
        optimizer = cafin.fused_adafisher(0.1, layers=layers)

        def step(params: Any, state: Any, x: Any, optimizer: Any = optimizer) -> Any:
            grads, sums = jax.grad(loss, argnums=(0, 1))(params, taps, x)
            return optimizer.step(params, grads, state, factors=sums)

        compiled = jax.jit(step).lower(params, optimizer.init(params), x).compile()
        assert compiled.as_text().count("gpu.ptx") == (6 if backend == "cuda" else 0)
        results[backend] = compiled(params, optimizer.init(params), x)
    for a, b in zip(*map(jax.tree.leaves, results.values())):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(b), initial=0)))


def test_a_sampled_step_is_one_command_buffer(tmp_path: Path) -> None:
    """Gradients, sums, factors and update start by one call of the driver. XLA writes down what it launches where the
    environment of the process asks for it."""
    program = "import test_jax_gpu; test_jax_gpu.a_step_of_dense_layers()"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    paths = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "XLA_FLAGS": flags, "CAFIN_BACKEND": "cuda", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=300)
    (written,) = tmp_path.glob("*jit_step.thunk_sequence_after_thunk_passes.txt")
    launched = [line for line in written.read_text().splitlines() if re.match(r"\s*\d+: ", line)]
    (outermost,) = (line for line in launched if not line.startswith(" "))
    assert "kCommandBuffer" in outermost
    for kernel in ("column_sums_xla", "fold_xla", "average_xla", "update_xla"):
        assert any(kernel in line for line in launched), kernel


def a_step_of_dense_layers() -> None:
    params = params_of({"a": ((64, 32), "float32"), "b": ((32, 16), "float32")})
    layers = cafin.Layers(params, {name: cafin.Dense(weight=name) for name in params})
    optimizer = cafin.fused_adafisher(0.1, layers=layers)

    def loss(params: Any, taps: Any, x: Any) -> Any:
        for name in params:
            x = jnp.tanh(cafin.tap(layers[name], x, x @ params[name], taps[name]))
        return (x**2).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any) -> Any:
        grads, sums = jax.grad(loss, argnums=(0, 1))(params, layers.zeros(), x)
        return optimizer.step(params, grads, state, factors=sums)

    jax.block_until_ready(step(params, optimizer.init(params), jnp.ones((24, 64))))


def test_sums_of_a_batch_by_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAFIN_BACKEND", "cuda")
    params = params_of({"d": ((6, 5), "float32")})
    layers = cafin.Layers(params, {"d": cafin.Dense(weight="d")})
    x = jnp.asarray(np.random.default_rng(1).standard_normal((9, 6)), jnp.float32)

    def loss(taps: Any, batched: bool) -> Any:
        one = lambda x: cafin.tap(layers["d"], x, x @ params["d"], taps["d"])  # noqa: E731
        return (jax.vmap(one)(x) if batched else one(x)).sum()

    each, whole = (jax.grad(loss)(layers.zeros(), batched) for batched in (True, False))
    for a, b in zip(*map(jax.tree.leaves, (each, whole))):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---- By a callback ----


def test_kernels_by_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XLA has no target for PTX: the same bits."""
    monkeypatch.setenv("CAFIN_BACKEND", "cuda")
    params = params_of(SHAPES)
    layers = cafin.Layers(params, LAYERS)
    optimizer = cafin.fused_adafisher(0.1, layers=layers)
    state = optimizer.init(params)
    loss, arguments, _ = gradients(32)
    results = []
    for callback in (False, True):
        jax_ptx.take_callback(callback)
        try:
            step, sums = (jax.jit(lambda *args, f=f: f(*args)) for f in (optimizer.step, jax.grad(loss, argnums=1)))
            assert ("gpu.ptx" in step.lower(params, params, state).as_text()) is not callback
            results.append((step(params, params, state), sums(*arguments)))
        finally:
            jax_ptx.take_callback(False)
    for a, b in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_array_equal(a, b)


def test_the_callback_serves_where_the_target_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    jax_kernels.problem.cache_clear()
    monkeypatch.setattr(jax_kernels, "OLDEST", (99, 0))
    try:
        assert jax_kernels.problem() is None and jax_ptx._route.callback
    finally:
        jax_ptx.take_callback(False)
        jax_kernels.problem.cache_clear()
