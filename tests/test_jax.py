"""Both forms of the optimizer against the formulas in float64: options, schedules, precision, NaN, odd trees."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import close
from jax_helpers import both_forms, cross_entropy, same_trees, x64

from cafin_cupy import Averaging, reference
from cafin_cupy.adapters import jax as adapter
from cafin_cupy.adapters.jax import (
    ChannelNorm,
    Conv,
    Dense,
    Layers,
    State,
    fused_adafisher,
)
from cafin_cupy.reference import RawSums

FORMS = ["fused", "optax"]
ROUNDINGS = 2e-6  # float32: a few roundings of four steps
SHAPES = {
    "dense": (4, 3),
    "dense_bias": (3,),
    "stack": (2, 3, 4),
    "stack_bias": (2, 4),
    "conv": (2, 2, 3, 4),
    "norm": (4,),
    "head": (5, 6),
    "plain": (7,),
    "scalar": (),
    "empty": (0, 3),
}
KINDS = {
    "dense": Dense(weight="dense", bias="dense_bias"),
    "stack": Dense(weight="stack", bias="stack_bias", stack=1),
    "conv": Conv(weight="conv"),
    "norm": ChannelNorm(weight="norm"),
    "head": Dense(weight="head", input_major=False),
}
NAMES = list(SHAPES)


def tree(seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


LAYERS = Layers(tree(0), KINDS)


def sums(seed: int, layers: Layers = LAYERS) -> Any:
    """As a sampled step may see them; no count is 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape) + 0.5, x.dtype), layers.zeros())


class Twin:
    """The rule in float64, parameter by parameter, by the pure functions."""

    def __init__(self, params: Any, averaging: Averaging) -> None:
        self.p = {name: np.asarray(x, float) for name, x in params.items()}
        self.m = {name: np.zeros(x.shape) for name, x in self.p.items()}
        self.averaging, self.t = averaging, 0
        self.F = {name: [self._ones(bound)] * self._copies(bound) for name, bound in LAYERS.items()}

    @staticmethod
    def _ones(bound: Any) -> Any:
        return np.ones(bound.core.H_size), np.ones(bound.core.S_size)

    @staticmethod
    def _copies(bound: Any) -> int:
        return int(np.prod(bound.stack, dtype=int))

    def refresh(self, seen: Any, grad_scale: float) -> None:
        for name, bound in LAYERS.items():
            for k in range(self._copies(bound)):
                H, S, n = (np.asarray(x, float)[k] if bound.stack else np.asarray(x, float) for x in seen[name])
                raw = reference.moments(bound.core, RawSums(H, S, float(n)), grad_scale)
                self.F[name][k] = reference.refresh(*self.F[name][k], *raw, self.averaging)

    def step(self, grads: Any, grad_scale: float, decays: Any, weight_decay: float, **options: Any) -> None:
        self.t += 1
        uses: dict[str, list[Any]] = {name: [(None, None)] for name in self.p}
        for name, bound in LAYERS.items():
            pairs = [[reference.effective(F, self.averaging) for F in pair] for pair in self.F[name]]
            width, first = bound.core.width, name in ("dense", "stack", "conv")  # rows of the weight are its input's
            uses[bound.layer.weight] = [(S, H[:width]) if first else (H[:width], S) for H, S in pairs]
            if bound.layer.bias:
                uses[bound.layer.bias] = [(H[width:], S) for H, S in pairs]
        for name, p in self.p.items():
            g = np.asarray(grads[name], float) / grad_scale
            wd = weight_decay if decays(name) else 0.0
            parts = [(p, g, self.m[name])] if len(uses[name]) == 1 else list(zip(p, g, self.m[name]))
            new = [
                reference.update(*arrays, H, S, weight_decay=wd, step=self.t, **options)
                for arrays, (H, S) in zip(parts, uses[name])
            ]
            self.p[name], self.m[name] = new[0] if len(new) == 1 else tuple(np.stack(each) for each in zip(*new))


CASES = [
    {},
    {"decoupled": True, "mask": {name: name not in ("plain", "conv") for name in NAMES}, "TCov": 2},
    {"averaging": "paper", "mask": lambda params: {name: name != "dense" for name in params}, "gamma": 0.6},
    {"averaging": Averaging(0.5, 0.25, "after"), "decoupled": True, "TCov": 3},
    {"grad_scale": 8.0, "beta": 0.0},
    {"weight_decay": 0.0, "momentum": "float64", "lr": 0.0},
]


@pytest.mark.parametrize(("form", "wide"), [("fused", False), ("optax", True)], ids=["fused-float32", "optax-float64"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_four_steps_follow_the_formulas(case: dict[str, Any], form: str, wide: bool) -> None:
    """Momentum included; factors are float32 throughout."""
    options = {"lr": 0.1, "beta": 0.9, "Lambda": 0.5, "weight_decay": 0.1, "TCov": 1, **case}
    scale, mask = options.pop("grad_scale", 1.0), options.get("mask")
    options.pop("momentum", None)
    rule = options.get("averaging", "parity")
    averaging = Averaging.named(rule, options.get("gamma", 0.8))
    decays = (mask(SHAPES) if callable(mask) else mask) or dict.fromkeys(SHAPES, True)
    with x64():
        params = tree(0, jnp.float64 if wide else jnp.float32)
        init, step = both_forms(layers=LAYERS, **options)[form]
        step, state, twin = jax.jit(step), init(params), Twin(params, averaging)
        for t in range(4):
            grads, seen = tree(t + 1, params["dense"].dtype), sums(t)
            params, state = step(params, grads, state, factors=seen, grad_scale=scale)
            if t % options["TCov"] == 0:
                twin.refresh(seen, scale)
            scalars = {name: options[name] for name in ("lr", "beta", "Lambda")}
            twin.step(
                grads, scale, decays.get, options["weight_decay"], decoupled=options.get("decoupled", False), **scalars
            )
    assert state.count == 4 and not state.factors.skipped.any()
    for name in SHAPES:
        assert state.momentum[name].dtype == params[name].dtype == (np.float64 if wide else np.float32)
        close(np.asarray(params[name]), twin.p[name], ROUNDINGS)
        close(np.asarray(state.momentum[name]), twin.m[name], ROUNDINGS)
    for name, pair in LAYERS.factors(state).items():
        for k, F in enumerate(pair):
            want = [reference.effective(of[k], averaging) for of in twin.F[name]]
            # Normalised behind the average: a difference of averages over a difference of averages.
            slack = ROUNDINGS if averaging.normalize == "before" else 4 * ROUNDINGS
            close(np.asarray(F).reshape(len(want), -1), np.stack(want), slack)


def run(form: str, steps: int = 3, params: Any = None, layers: Any = LAYERS, **options: Any) -> tuple[Any, State]:
    """Some steps with the same gradients and sums each time."""
    params = tree(0) if params is None else params
    init, step = both_forms(layers=layers, **{"lr": 0.1, "Lambda": 0.5, "TCov": 2, **options})[form]
    step, state = jax.jit(step), init(params)
    for t in range(steps):
        grads = {name: x.astype(params[name].dtype) for name, x in tree(t + 1).items()}
        params, state = step(params, grads, state, factors=None if layers is None else sums(t))
    return params, state


@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_is_read_at_completed_steps(form: str) -> None:
    seen: list[float] = []

    def schedule(count: Any) -> Any:
        jax.debug.callback(lambda n: seen.append(int(n)), count)
        return 0.1 * 0.5**count

    params, state = run(form, lr=schedule)
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    by_hand, by_hand_state = tree(0), run(form, 0)[1]

    @jax.jit
    def step_by(lr: Any, *args: Any) -> Any:
        return both_forms(layers=LAYERS, lr=lr, Lambda=0.5, TCov=2)[form][1](*args[:3], factors=args[3])

    for t in range(3):
        by_hand, by_hand_state = step_by(0.1 * 0.5**t, by_hand, tree(t + 1), by_hand_state, sums(t))
    same_trees((params, state), (by_hand, by_hand_state), 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scalars_may_be_arrays(form: str) -> None:
    got = run(form, lr=jnp.float32(0.1), beta=jnp.float32(0.9), Lambda=jnp.float32(0.5), weight_decay=jnp.float32(0.1))
    same_trees(got, run(form, weight_decay=0.1), 1e-6)  # 1 - beta^t of float32's beta


def test_both_forms_take_the_same_step() -> None:
    """As close as an update that is added by itself can be."""
    (fused, state), (optaxes, other) = (run(form) for form in FORMS)
    same_trees(fused, optaxes, 2.0**-22)
    same_trees(state, other)


@pytest.mark.parametrize("form", FORMS)
def test_factors_between_sampled_steps_are_left_aside(form: str) -> None:
    init, step = both_forms(layers=LAYERS, TCov=3)[form]
    params, state, step = tree(0), init(tree(0)), jax.jit(step)
    for t in range(4):
        given = step(params, tree(1), state, factors=sums(t))
        same_trees(given, step(params, tree(1), state)) if t % 3 else None
        assert bool((given[1].factors.used != state.factors.used).any()) == (t % 3 == 0)
        params, state = given


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_a_layer_with_a_nan_is_skipped_and_counted(averaging: str) -> None:
    """Of a stack each layer by itself; the others are refreshed."""
    optimizer = fused_adafisher(layers=LAYERS, averaging=averaging, TCov=1)
    params = tree(0)
    state = optimizer.init(params)
    good, bad = sums(0), sums(0)
    bad["conv"] = bad["conv"]._replace(S=bad["conv"].S.at[1].set(jnp.nan))
    bad["head"] = bad["head"]._replace(H=bad["head"].H.at[0].set(jnp.inf))  # +inf counts as 1
    step = jax.jit(optimizer.step)
    _, after_good = step(params, tree(1), state, factors=good)
    _, after_bad = step(params, tree(1), state, factors=bad)
    skipped = {name: int(n) for name, n in zip(LAYERS, after_bad.factors.skipped)}
    assert skipped == {"dense": 0, "stack": 0, "conv": 1, "norm": 0, "head": 0}
    first, healthy, broken = map(LAYERS.factors, (state, after_good, after_bad))
    for name in LAYERS:
        same_trees(broken[name], first[name] if name == "conv" else healthy[name]) if name != "head" else None
    assert all(np.isfinite(F).all() for F in broken["head"])
    _, again = step(params, tree(1), after_bad, factors=bad)
    assert again.factors.skipped.sum() == 2
    _, healed = step(params, tree(1), again, factors=good)
    assert (LAYERS.factors(healed)["conv"][1] != first["conv"][1]).any() and healed.factors.skipped.sum() == 2


def test_a_layer_that_was_not_called_keeps_its_factors() -> None:
    optimizer = fused_adafisher(layers=LAYERS, TCov=1)
    state = optimizer.init(tree(0))
    seen = sums(0) | {"dense": LAYERS.zeros()["dense"]}
    _, after = jax.jit(optimizer.step)(tree(0), tree(1), state, factors=seen)
    same_trees(LAYERS.factors(after)["dense"], LAYERS.factors(state)["dense"])
    assert (LAYERS.factors(after)["head"][0] != 1).all() and not after.factors.skipped.any()


@pytest.mark.parametrize("form", FORMS)
def test_without_layers_it_is_sgd_with_a_mean_momentum(form: str) -> None:
    params, state = run(form, layers=None, lr=0.1, beta=0.9)
    want, m = tree(0), jax.tree.map(jnp.zeros_like, tree(0))
    for t in range(3):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, tree(t + 1))
        want = jax.tree.map(lambda p, m, t=t: p - 0.1 / (1 - 0.9 ** (t + 1)) * m, want, m)
    same_trees(params, want, 1e-6)
    assert state.factors.used.shape == (0,)


DTYPES = [
    ("bfloat16", None, "float32", 2.0**-8),
    ("bfloat16", "bfloat16", "bfloat16", 2.0**-7),
    ("float16", None, "float32", 2.0**-11),
    ("float32", "bfloat16", "bfloat16", 2.0**-8),
    ("float32", "float16", "float16", 2.0**-11),
]


@pytest.mark.parametrize(("dtype", "asked", "kept", "one_rounding"), DTYPES)
def test_numbers_of_16_bits(dtype: str, asked: str | None, kept: str, one_rounding: float) -> None:
    """One step by the fused form: computed in float32, rounded once."""
    params, grads = tree(0, dtype), tree(1, dtype)
    optimizer = fused_adafisher(0.1, Lambda=0.5, weight_decay=0.1, layers=LAYERS, momentum_dtype=asked, TCov=1)
    new, state = jax.jit(optimizer.step)(params, grads, optimizer.init(params), factors=sums(0))
    wide = fused_adafisher(0.1, Lambda=0.5, weight_decay=0.1, layers=LAYERS, TCov=1)
    p, g = (jax.tree.map(lambda x: x.astype(jnp.float32), each) for each in (params, grads))
    want, wide_state = jax.jit(wide.step)(p, g, wide.init(p), factors=sums(0))
    assert {str(x.dtype) for x in new.values()} == {dtype}
    assert {str(x.dtype) for x in state.momentum.values()} == {kept}
    same_trees(new, jax.tree.map(lambda x: x.astype(dtype), want), one_rounding if dtype != "float32" else 1e-6)
    same_trees(state.momentum, jax.tree.map(lambda x: x.astype(kept), wide_state.momentum), one_rounding)
    same_trees(state.factors, wide_state.factors)


def test_gradients_of_another_precision_than_the_parameters() -> None:
    """bfloat16 gradients of float32 parameters count as what they are."""
    optimizer = fused_adafisher(0.1, layers=LAYERS)
    grads = tree(1, jnp.bfloat16)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    state = optimizer.init(tree(0))
    same_trees(optimizer.step(tree(0), grads, state), optimizer.step(tree(0), wide, state))


def test_trees_of_any_kind() -> None:
    """Lists, tuples, no leaf at all, and NumPy's arrays."""
    params = [np.ones((3, 2), np.float32), (np.ones(2, np.float32), {})]
    layers = Layers(params, {"only": Dense(weight="0", bias="1/0")})
    optimizer = fused_adafisher(0.5, beta=0.0, layers=layers)
    new, state = optimizer.step(params, params, optimizer.init(params))
    same_trees(new, [jnp.full((3, 2), 1 - 0.5 / 1.001), (jnp.full(2, 1 - 0.5 / 1.001), {})], 1e-6)
    for form in FORMS:
        init, step = both_forms(layers=None)[form]
        new, state = step({}, {}, init({}))
        assert new == {} and state.count == 1


def test_the_example_of_the_module_runs() -> None:
    nn = pytest.importorskip("flax.linen")
    from cafin_cupy.adapters import jax_linen

    text = (adapter.__doc__ or "").split("\n\n    layers = ")[1].split("\n\nImporting")[0]
    code = textwrap.dedent("    layers = " + text)
    ast.parse(code)
    model, x, y = nn.Dense(3), jnp.ones((8, 5)), jnp.zeros(8, int)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    names: dict[str, Any] = {**vars(adapter), "jax_linen": jax_linen, "cross_entropy": cross_entropy}
    names |= {"model": model, "variables": variables, "x": x, "params": jax.tree.map(jnp.copy, variables["params"])}
    exec(code, names)
    params, state = names["params"], names["state"]
    losses = []
    for t in range(20):
        losses.append(names["loss"](params, names["layers"].zeros(), x, y))
        params, state = names["step"](params, state, x, y, sampled=t % 10 == 0)
    assert losses[-1] < 0.1 * losses[0] and state.count == 20
    assert (names["layers"].factors(state)["Dense"][0] != 1).all()
