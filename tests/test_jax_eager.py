"""JAX arrays outside of `jax.jit`: the core's numbers, donated memory, and what others hold of it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import hypothesis
import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import jax_helpers  # the CPU is JAX's default device
from helpers import close, numpy_of, refuses, same_bits, updated
from hypothesis import strategies as st
from jax_eager_helpers import alive, emulated, given_arrays, jax_memory, of_jax, problem  # noqa: F401

import cafin_cupy
from cafin_cupy import AdaFisher, CafinValueError, Linear
from cafin_cupy.adapters import jax_streams
from cafin_cupy.adapters.jax import Dense, Layers, borrowed, fused_adafisher, fused_step

# Of a parameter or momentum of each type, of its largest entry: float32 as in helpers.check_update; 16 bits are rounded
# once, to one of two neighbours where the last bit of float32 decides.
CLOSE = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}
KINDS = {"float32": ("float32", "bfloat16", "float16"), "bfloat16": ("bfloat16", "float32"), "float16": ("float16",)}


def expected(x: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """What the core makes of NumPy's arrays."""
    p, m = (jax.tree.map(np.array, x[name]) for name in ("params", "momenta"))
    cafin_cupy.fused_step(p, x["grads"], m, x["factors"], **options)
    return p, m


def check_as_core(got: tuple[Any, Any], x: dict[str, Any], memory: str, **options: Any) -> None:
    """The same bits on a CPU; on a GPU what the reference gives, to rounding."""
    want = expected(x, **options)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want))):
        assert isinstance(a, jax.Array) and a.dtype == b.dtype
        if memory == "cpu":
            same_bits(a, b)
        else:
            close(a.astype("float32"), b.astype("float32"), CLOSE[str(b.dtype)])


# ---- The core's numbers ----


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "donated"])
@pytest.mark.parametrize(("dtype", "momentum"), [(p, m) for p, of in KINDS.items() for m in of])
def test_the_step_is_the_cores(memory: str, dtype: str, momentum: str, donate: bool) -> None:
    x = problem(1, dtype, momentum)
    options: dict[str, Any] = {"lr": 0.1, "beta": 0.7, "Lambda": 0.5, "weight_decay": 0.1, "decoupled": True, "step": 3}
    check_as_core(fused_step(**of_jax(x), **options, donate=donate), x, memory, **options)


@hypothesis.given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4),
    kind=st.sampled_from([(p, m) for p, of in KINDS.items() for m in of]),
    donate=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
    rounds=st.booleans(),
    data=st.data(),
)
def test_any_trees_are_updated_as_the_core_updates_them(
    shapes: list[tuple[int, ...]], kind: tuple[str, str], donate: bool, decay: float, seed: int, rounds: bool, data: Any
) -> None:
    """To the bit, on a CPU."""
    rng = np.random.default_rng(seed)
    p, g, m = ([rng.standard_normal(s).astype(jnp.dtype(kind[k])) for s in shapes] for k in (0, 0, 1))
    factors = [
        None if not (shape and data.draw(st.booleans())) else tuple(rng.random(n, np.float32) for n in (size // r, r))
        for shape, size, r in ((s, int(np.prod(s)), s[0] or 1 if s else 1) for s in shapes)
    ]
    x = {"params": p, "grads": g, "momenta": m, "factors": factors}
    steps = [data.draw(st.integers(1, 9)) for _ in shapes]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": decay, "step": steps}
    options |= {"stochastic_rounding": rounds, "seed": seed}
    check_as_core(fused_step(**of_jax(x), **options, donate=donate), x, "cpu", **options)


def test_in_float64_by_the_reference(memory: str) -> None:
    with jax_helpers.x64():
        x = problem(2, "float64", "float64")
        x["factors"] = jax.tree.map(lambda f: f.astype(float), x["factors"])
        call = partial(fused_step, lr=0.1, donate=True, backend="reference")
        for a, b in zip(*map(jax.tree.leaves, (call(**of_jax(x)), expected(x, lr=0.1)))):
            close(a, b, 1e-15)  # two roundings, in one order


def test_a_step_within_a_loop_is_that_of_the_jitted_form(memory: str) -> None:
    """Both in float32, each of 20 steps rounded some ten times; XLA fuses multiplications and additions."""
    x = of_jax(problem(3))
    params = {name: x["params"]["dense"][name] for name in "wb"}
    layers = Layers(params, {"dense": Dense(weight="w", bias=None, input_major=False)})
    optimizer = fused_adafisher(0.01, layers=layers, backend="reference")
    state = optimizer.init(params)
    jitted = jax.jit(optimizer.step)
    mine, m, theirs = params, jax.tree.map(jnp.zeros_like, params), params
    factors = {"w": layers.factors(state)["dense"], "b": None}
    for t in range(1, 21):
        grads = jax.tree.map(lambda p, t=t: jnp.sin(p * t), mine)
        theirs, state = jitted(theirs, jax.tree.map(lambda p, t=t: jnp.sin(p * t), theirs), state)
        mine, m = fused_step(mine, grads, m, factors, lr=0.01, step=t, donate=t > 1)
    for a, b in zip(*map(jax.tree.leaves, (mine, theirs))):
        close(a, b, 1e-5)


def test_programs_are_compiled_once(given: Any) -> None:
    options: dict[str, Any] = {"lr": 0.1, "donate": True}
    p, m = fused_step(**given, **options)
    p, m = fused_step(p, given["grads"], m, given["factors"], **options)
    before = jax_streams.moved._cache_size(), jax_streams.copied._cache_size()
    for t in range(3):
        p, m = fused_step(p, given["grads"], m, given["factors"], **options, step=t + 1)
    assert before == (jax_streams.moved._cache_size(), jax_streams.copied._cache_size())


@pytest.mark.parametrize("others", ["numpy", "torch"])
def test_gradients_of_another_library(others: str) -> None:
    torch = pytest.importorskip("torch")
    x = problem(4)
    make = torch.tensor if others == "torch" else np.array
    grads, factors = (jax.tree.map(make, x[name]) for name in ("grads", "factors"))
    params, momenta = (of_jax(x[name]) for name in ("params", "momenta"))
    check_as_core(fused_step(params, grads, momenta, factors, lr=0.1, donate=True), x, "cpu", lr=0.1)


@pytest.mark.gpu
def test_gradients_of_cupy(memory: str) -> None:
    if memory == "cpu":
        pytest.skip("on a GPU")
    import cupy

    x = problem(4)
    given = of_jax(x) | {"grads": jax.tree.map(cupy.asarray, x["grads"])}
    check_as_core(fused_step(**given, lr=0.1, donate=True), x, "gpu", lr=0.1)


def test_the_reference_in_float64_agrees(memory: str) -> None:
    x = problem(6)
    p, m = fused_step(**of_jax(x), lr=0.1, donate=True)
    H, S = x["factors"]["dense"]["w"]
    one = {name: x[tree]["dense"]["w"] for name, tree in (("p", "params"), ("g", "grads"), ("m", "momenta"))}
    want = updated({**one, "H": H, "S": S}, lr=0.1)
    for got, wide in zip((p, m), want):
        close(got["dense"]["w"], wide, 2e-6, np.append(wide, one["p"]))


def test_an_empty_tree() -> None:
    assert fused_step({}, {}, {}, lr=0.1, donate=True) == ({}, {})


# ---- Whose memory it is ----


def test_donated_arrays_are_deleted_and_others_are_not(given: Any) -> None:
    params, momenta = fused_step(**given, lr=0.1, donate=True)
    for x in jax.tree.leaves((given["params"], given["momenta"])):
        assert x.is_deleted() == (x.size > 0)
    assert alive(given["grads"], given["factors"], params, momenta)
    assert params["empty"] is given["params"]["empty"]


def test_without_donation_the_old_arrays_keep_their_numbers(given: Any) -> None:
    before = jax.tree.map(np.array, given)
    new = fused_step(**given, lr=0.1)
    jax.tree.map(same_bits, given, before)
    places, old = ({x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size} for tree in (new, given))
    assert len(places) == 8 and not places & old


@pytest.mark.gpu
def test_donated_memory_stays_where_it_is(memory: str, given: Any) -> None:
    if memory == "cpu":
        pytest.skip("a CPU copies")

    def places(*trees: Any) -> list[int]:
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(trees) if x.size]

    before = places(given["params"], given["momenta"])
    p, m = given["params"], given["momenta"]
    for _ in range(5):
        p, m = fused_step(p, given["grads"], m, given["factors"], lr=0.1, donate=True)
        assert places(p, m) == before


def test_views_of_donated_memory_keep_their_numbers(memory: str, given: Any) -> None:
    """Or JAX refuses the donation, which changes nothing."""
    x = given["params"]["dense"]["w"]
    seen = (np if memory == "cpu" or emulated() else pytest.importorskip("cupy")).from_dlpack(x)
    before = numpy_of(seen)
    try:
        new, _ = fused_step(**given, lr=0.1, donate=True)
    except CafinValueError as error:
        assert "donate" in str(error) and alive(given)
    else:
        assert x.is_deleted()
        assert not np.array_equal(numpy_of(new["dense"]["w"]), before)
    same_bits(seen, before)


def test_numpy_views_keep_their_numbers() -> None:
    given = of_jax(problem())
    view = np.asarray(given["params"]["dense"]["w"])
    before = view.copy()
    fused_step(**given, lr=0.1, donate=True)
    same_bits(view, before)


def test_another_array_of_the_same_buffer_is_deleted_with_it(given: Any) -> None:
    twin = given["params"]["dense"]["w"].addressable_data(0)
    before = numpy_of(twin)
    fused_step(**given, lr=0.1)
    same_bits(twin, before)
    fused_step(**given, lr=0.1, donate=True)
    assert twin.is_deleted()


# ---- What others may read ----


def trained(arrays: Any, given: Any, lend: Any) -> AdaFisher:
    """Two sampled steps of an optimizer of the core; `lend`: context that hands over JAX's arrays."""
    w = arrays(np.arange(6, dtype=np.float32).reshape(2, 3))
    optimizer = AdaFisher([w], [layer := Linear(w)], lr=0.1, TCov=1)
    for t in range(2):
        h, s, g = (jnp.sin(x + t) for x in given)
        with lend((h, s)) as (mine, yours):
            optimizer.accumulate(layer, mine, yours)
        with lend([g]) as grads:
            optimizer.step(grads)
    return optimizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_core_reads_activations_and_gradients(memory: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    h, s = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((4, 3), (4, 2)))
    given = h, s, jnp.asarray(rng.standard_normal((2, 3)), jnp.float32)
    if memory == "cpu":
        make = np.array
    else:
        import cupy

        make = cupy.asarray
    got = trained(make, given, borrowed)
    want = trained(np.array, given, lambda tree: nullcontext(jax.tree.map(np.asarray, tree)))
    for a, b in zip((*got.factors()["0"], *got.momenta), (*want.factors()["0"], *want.momenta)):
        close(a, b, 2e-6)
    assert got.steps == 2


def test_borrowed_arrays_share_memory_and_the_rest_is_passed_on(memory: str) -> None:
    x, y = jnp.arange(6.0).reshape(2, 3), np.ones(2)
    with borrowed({"x": x, "y": y, "n": 3, "none": None}) as tree:
        assert tree["y"] is y and tree["n"] == 3 and tree["none"] is None
        assert type(tree["x"]).__module__ == ("numpy" if memory == "cpu" else "cupy")
        same_bits(tree["x"], x)
        where = tree["x"].ctypes.data if memory == "cpu" or emulated() else tree["x"].data.ptr
        assert where == x.unsafe_buffer_pointer()
        if memory == "cpu":
            assert not tree["x"].flags.writeable


def test_what_is_borrowed_is_checked() -> None:
    x = jnp.ones(3)
    x.delete()
    with refuses(CafinValueError, "borrowed", "`h/0`", "alive"), borrowed({"h": [x]}):
        pass
    with borrowed({"nothing": 3}) as tree:
        assert tree == {"nothing": 3}
