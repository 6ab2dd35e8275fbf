"""The refresh of all factors by one kernel for JAX: launched without XLA, against the formulas, and as XLA has it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import jax_helpers
from helpers import close, same_bits, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from cafin_cupy import Averaging
from cafin_cupy.adapters import jax_kernels, jax_ptx, jax_refresh, jax_update
from cafin_cupy.adapters.jax import ChannelNorm, Conv, Dense, LayerNorm, Layers, fused_adafisher
from cafin_cupy.adapters.jax_update import Factors
from cafin_cupy.reference import RawSums

RULES = {
    "parity": Averaging.named("parity", 0.8),
    "paper": Averaging.named("paper", 0.8),
    "general": Averaging(keep=0.5, add=2.0, normalize="before"),
}
# Of factors of at most 2, from moments that differ by more than they are long: some ten roundings of float32.
CLOSE = 2e-6
PARAMS = {
    "dense": (7, 5),
    "dense_bias": (5,),
    "stack": (3, 1025, 4),
    "stack_bias": (3, 4),
    "nested": (2, 2, 6, 33),
    "conv": (3, 3, 2, 6),
    "conv_bias": (6,),
    "norm": (2049,),
    "norm_bias": (2049,),
    "layer_norm": (16,),
    "one": (1, 1),
    "plain": (11,),
}
LAYERS = {
    "dense": Dense(weight="dense", bias="dense_bias"),
    "stack": Dense(weight="stack", bias="stack_bias", stack=1),
    "nested": Dense(weight="nested", stack=2),
    "conv": Conv(weight="conv", bias="conv_bias", groups=2),
    "norm": ChannelNorm(weight="norm", bias="norm_bias"),
    "layer_norm": LayerNorm(weight="layer_norm", length=37),
    "one": Dense(weight="one"),
}
SMALL = ("conv", "dense", "layer_norm", "nested", "one")


def layers_of(names: Any = tuple(LAYERS)) -> Layers:
    params = {name: jnp.zeros(shape) for name, shape in PARAMS.items()}
    return Layers(params, {name: LAYERS[name] for name in names})


def sums_of(layers: Layers, seed: int) -> dict[str, RawSums]:
    """Of some hundred samples, exact in float32."""
    rng = np.random.default_rng(seed)

    def one(bound: Any) -> RawSums:
        H, S, n = bound.shapes
        counts = np.asarray(rng.integers(1, 300, n), np.float32)
        return RawSums(*(rng.random(s, np.float32) * counts[..., None] for s in (H, S)), counts)

    return {name: one(bound) for name, bound in layers.items()}


def begun(layers: Layers, averaging: Averaging, seed: int) -> Factors:
    """Factors in the middle of a run."""
    rng = np.random.default_rng(seed)
    used, averages = rng.random((2, layers.size), np.float32)
    skipped = np.arange(len(layers), dtype=np.int32)
    if averaging.normalize == "before":
        return Factors(used, (), skipped)
    found = exact(layers, Factors(used, averages, skipped), sums_of(layers, 0), averaging, due=False)
    return Factors(np.float32(found.used), averages, skipped)  # what these averages are when they are normalised


def by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`jax_update.refreshed` by the kernel; how many launches it took is in the list `launches` of it."""
    from xla_helpers import launched, to_gpu

    launches: list[Any] = []

    def call(kernel: Any, *operands: Any) -> list[Any]:
        launches.append(kernel)
        made = launched(kernel, *(to_gpu(np.array(x)) for x in operands))
        return [jnp.asarray(x.get().view(like.dtype)) for x, like in zip(made, kernel.results)]

    monkeypatch.setattr(jax_ptx.Kernel, "__call__", call)

    def refreshed(layers: Layers, old: Factors, sums: Any, averaging: Averaging, due: Any, grad_scale: Any) -> Factors:
        arguments = jax.tree.map(jnp.asarray, (old, sums, due, grad_scale))
        return jax_refresh._launched(layers, averaging, *arguments)

    refreshed.launches = launches  # type: ignore[attr-defined]
    return refreshed


def exact(
    layers: Layers, old: Factors, sums: Any, averaging: Averaging, due: bool = True, grad_scale: float = 1.0
) -> Factors:
    """By the formulas in float64."""
    with jax_helpers.x64():
        wide = jax.tree.map(lambda x: jnp.asarray(x, float if x.dtype == np.float32 else x.dtype), (old, sums))
        formulas = jax.jit(lambda *args: jax_update.refreshed(layers, *args[:2], averaging, *args[2:]))
        return jax.tree.map(np.asarray, formulas(*wide, jnp.asarray(due), jnp.asarray(grad_scale, float)))


def check(got: Factors, want: Factors) -> None:
    for name, tolerance in (("used", CLOSE), ("averages", CLOSE)):
        a, b = getattr(got, name), getattr(want, name)
        if isinstance(b, tuple):
            assert a == b == ()
        else:
            close(a, b, tolerance, np.append(b, 1.0))
    np.testing.assert_array_equal(got.skipped, want.skipped)


# ---- Numbers ----


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_follows_the_formulas_in_float64(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, averaging = layers_of(), RULES[rule]
    old, sums = begun(layers, averaging, 1), sums_of(layers, 2)
    got = by_the_kernel(monkeypatch)(layers, old, sums, averaging, True, 4.0)
    check(got, exact(layers, old, sums, averaging, grad_scale=4.0))


@pytest.mark.gpu
@settings(max_examples=max(2, settings().max_examples // 4))  # each is a source of its own
@given(
    st.lists(st.sampled_from(SMALL), min_size=1, max_size=4, unique=True),
    st.sampled_from(sorted(RULES)),
    st.booleans(),
    st.sampled_from([1.0, 0.5, 1024.0]),
    st.floats(0.0, 1.0),
    seeds,
)
def test_any_layers_with_any_sums(
    names: list[str], rule: str, due: bool, grad_scale: float, odd: float, seed: int
) -> None:
    """Some of them not called, or with NaN or inf in their sums."""
    layers, averaging = layers_of(names), RULES[rule]
    old, sums = begun(layers, averaging, seed), sums_of(layers, seed + 1)
    rng = np.random.default_rng(seed + 2)
    for each in sums.values():
        flat = [x.reshape(-1) for x in each]
        for x, value in ((flat[2], 0.0), (flat[rng.integers(2)], math.nan), (flat[rng.integers(2)], math.inf)):
            if rng.random() < odd:
                x[rng.integers(len(x))] = value
    with pytest.MonkeyPatch.context() as patch:
        got = by_the_kernel(patch)(layers, old, sums, averaging, due, grad_scale)
    check(got, exact(layers, old, sums, averaging, due, grad_scale))
    if not due:
        jax.tree.map(same_bits, got, jax.tree.map(np.asarray, old))


@pytest.mark.gpu
def test_a_nan_keeps_both_factors_of_its_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, averaging = layers_of(), RULES["parity"]
    old, sums = begun(layers, averaging, 3), sums_of(layers, 4)
    for x in (sums["dense"].S, sums["stack"].H[1]):
        x[0] = math.nan
    got = by_the_kernel(monkeypatch)(layers, old, sums, averaging, True, 1.0)
    np.testing.assert_array_equal(got.skipped - old.skipped, [name in ("dense", "stack") for name in layers])
    moved = np.asarray(got.used) != old.used
    dense, stack = layers["dense"], layers["stack"]
    assert not moved[dense.start : dense.stop].any()
    for k in range(3):
        H, S = (slice(part.start + k * part.step, part.start + (k + 1) * part.step) for part in (stack.H, stack.S))
        assert moved[H].any() == moved[S].any() == (k != 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("items", "arguments", "launches"), [(4, 4000, 3), (1000, 14, 2)])
def test_more_layers_than_a_launch_takes(
    items: int, arguments: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, averaging = layers_of(), RULES["paper"]
    old, sums = begun(layers, averaging, 5), sums_of(layers, 6)
    call = by_the_kernel(monkeypatch)
    whole = call(layers, old, sums, averaging, True, 1.0)
    monkeypatch.setattr(jax_kernels, "ITEMS", items)
    monkeypatch.setattr(jax_kernels, "ARGUMENTS", arguments)
    call.launches.clear()
    jax.tree.map(same_bits, call(layers, old, sums, averaging, True, 1.0), whole)
    assert len(call.launches) == launches


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [(0, 2), (2, 0), (0,), (0, 0)])
def test_stacks_without_layers(lengths: tuple[int, ...], rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no block, and a launch without blocks is none; a NaN is that of the layer that has it."""
    params = {str(k): jnp.zeros((length, 5, 3)) for k, length in enumerate(lengths)}
    layers, averaging = Layers(params, {name: Dense(weight=name, stack=1) for name in params}), RULES[rule]
    old, sums = begun(layers, averaging, 7), sums_of(layers, 8)
    for each in sums.values():
        each.S[1:, 0] = math.nan
    call = by_the_kernel(monkeypatch)
    check(call(layers, old, sums, averaging, True, 1.0), exact(layers, old, sums, averaging))
    assert len(call.launches) == any(lengths)


# ---- Programs ----

CALL = re.compile(r'custom_call @"?__gpu\$xla\.gpu\.ptx"?\(')


def program(layers: Layers, averaging: str, backend: str | None = "cuda", sums: Any = None) -> str:
    """A sampled step's, for CUDA, but for the PTX in it."""
    optimizer = fused_adafisher(0.1, layers=layers, averaging=averaging, backend=backend, TCov=2)
    params = {name: jnp.zeros(shape) for name, shape in PARAMS.items()}
    sums = layers.zeros() if sums is None else sums
    step = jax.jit(lambda p, g, s, f: optimizer.step(p, g, s, factors=f), donate_argnums=(0, 2))
    traced = step.trace(params, params, optimizer.init(params), sums)
    return re.sub(r'kernel_data = "[^"]*"', "", traced.lower(lowering_platforms=("cuda",)).as_text())


needs_target = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < jax_ptx.OLDEST, reason="XLA's target for PTX came with jax 0.8"
)


@needs_target
@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_one_call_refreshes_all_in_place(averaging: str) -> None:
    layers = layers_of()
    text = program(layers, averaging)
    calls = [line for line in text.splitlines() if CALL.search(line)]
    assert ["average_xla" in line for line in calls] == [True, False]  # and the update
    n, states = len(layers), 1 if averaging == "parity" else 2
    pairs = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", calls[0])
    assert [(int(a), int(b)) for a, b in pairs] == [(k, 1 + 2 * n + k) for k in range(states)]
    donated = [x for x in text.split(") -> (")[0].split("%arg") if f"tensor<{layers.size}xf32>" in x]
    assert len(donated) == states and all("tf.aliasing_output" in x for x in donated)
    uses = [line for line in text.splitlines() if f"tensor<{layers.size}xf32>" in line]
    for line in uses:  # nothing joins, cuts or copies the factors
        assert "@main" in line or "return" in line or CALL.search(line) or line.strip().startswith("})"), line[:200]


@needs_target
def test_where_array_code_serves() -> None:
    layers = layers_of()
    assert len(CALL.findall(program(layers, "parity", "reference"))) == 0
    half = layers.zeros(jnp.bfloat16)
    assert "average_xla" not in program(layers, "parity", sums=half)
    assert len(CALL.findall(program(layers_of(()), "parity"))) == 1  # the update's


@needs_target
def test_one_sum_too_many_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of()
    monkeypatch.setattr(jax_kernels, "ITEMS", 3)
    assert not jax_refresh.takes(layers, layers.zeros())  # of four
    monkeypatch.setattr(jax_kernels, "ITEMS", 4)
    assert jax_refresh.takes(layers, layers.zeros())


def test_the_same_program_runs_on_a_cpu() -> None:
    layers, results = layers_of(), []
    params = {name: jnp.ones(shape) for name, shape in PARAMS.items()}
    for backend in ("cuda", "reference"):
        optimizer = fused_adafisher(0.1, layers=layers, backend=backend)
        step = jax.jit(optimizer.step)
        state = optimizer.init(params)
        results.append(step(params, params, state, factors=sums_of(layers, 7), grad_scale=jnp.float32(2.0)))
    jax_helpers.same_trees(*results)


def test_under_vmap_the_formulas_serve() -> None:
    """Of the refresh alone: the update's kernel refuses it."""
    layers, averaging = layers_of(("dense", "stack")), RULES["paper"]
    olds = [begun(layers, averaging, seed) for seed in (8, 9)]
    sums = [sums_of(layers, seed) for seed in (10, 11)]

    def one(old: Factors, sums: Any) -> Factors:
        return jax_refresh.refreshed(layers, old, sums, averaging, jnp.asarray(True), 1.0, "cuda")

    @jax.jit
    def by_formulas(old: Factors, sums: Any) -> Factors:
        return jax_update.refreshed(layers, old, sums, averaging, jnp.asarray(True), 1.0)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *zip(olds, sums))
    many = jax.jit(jax.vmap(one))(*stacked)
    for k, (old, each) in enumerate(zip(olds, sums)):
        check(jax.tree.map(lambda x, k=k: np.asarray(x[k]), many), by_formulas(old, each))
    if tuple(map(int, jax.__version__.split(".")[:2])) >= jax_ptx.OLDEST:
        text = jax.jit(jax.vmap(one)).trace(*stacked).lower(lowering_platforms=("cuda",)).as_text()
        assert "average_xla" not in text
