"""JAX arrays outside of `jax.jit` that are refused, and steps that fail: nothing changes, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import numpy_of, refuses, same_bits
from jax_eager_helpers import alive, given_arrays, jax_memory, of_jax, problem  # noqa: F401

from cafin_cupy import CafinError, CafinTypeError, CafinValueError, NonFiniteError, update
from cafin_cupy.adapters import jax_eager, jax_streams
from cafin_cupy.adapters.jax import borrowed, fused_step


def put(path: str, value: Any) -> Callable[[Any], Any]:
    """A change of the arguments: at "params.dense.w", say, stands the value, or what that makes of the arguments."""

    def changed(at: Any, way: list[str], given: Any) -> Any:
        if not way:
            return value(given) if callable(value) else value
        if isinstance(at, dict):
            return at | {way[0]: changed(at[way[0]], way[1:], given)}
        return type(at)(changed(x, way[1:], given) if str(k) == way[0] else x for k, x in enumerate(at))

    return lambda given: changed(given, path.split("."), given)


def keys(_: Any) -> Any:
    return jax.random.split(jax.random.key(0), (5, 3))


def column_major(given: Any) -> Any:
    from jax.experimental.layout import Format, Layout

    x = given["params"]["dense"]["w"]
    return jax.device_put(x, Format(Layout((1, 0)), x.sharding))


def deleted(_: Any) -> Any:
    x = jnp.ones((5, 3))
    x.delete()
    return x


def shared(into: str, path: str, twin: bool = False) -> Any:
    """The array at `path` stands at `into` as well."""

    def found(given: Any) -> Any:
        for key in path.split("."):
            given = given[int(key) if key.isdigit() else key]
        return given.addressable_data(0) if twin else given

    return put(into, found)


P, G, M, F = (f"{tree}.dense.w" for tree in ("params", "grads", "momenta", "factors"))
AT_P, AT_G, AT_M, AT_F = (f"`{tree}['dense/w']`" for tree in ("params", "grads", "momenta", "factors"))
SHARE = CafinValueError, "not share memory"
ONES = np.ones((5, 3), np.float32)
REFUSED: dict[str, tuple[Any, ...]] = {  # a change of the arguments, the kind of error, words
    "two leaves are one": (
        shared("params.twins.1", "params.twins.0"),
        *SHARE,
        "params['twins/0']",
        "params['twins/1']",
    ),
    "a parameter is a momentum": (shared(M, P), *SHARE),
    "a parameter is a gradient": (shared(G, P), *SHARE),
    "a momentum is a gradient": (shared(G, M), *SHARE),
    "a parameter is a factor": (shared("factors.dense.b.1", "params.dense.b"), *SHARE),
    "a gradient is a twin of a parameter": (shared(G, P, twin=True), *SHARE),
    "a parameter of NumPy": (put(P, ONES), CafinTypeError, AT_P, "JAX array", "ndarray"),
    "a momentum of NumPy": (put(M, ONES), CafinTypeError, AT_M, "JAX array"),
    "a deleted parameter": (put(P, deleted), CafinValueError, AT_P, "alive", "donated"),
    "a deleted gradient": (put(G, deleted), CafinValueError, AT_G, "alive"),
    "keys": (put(P, keys), CafinTypeError, AT_P, "numbers", "key"),
    "whole numbers": (put(P, lambda _: jnp.ones((5, 3), int)), CafinTypeError, AT_P, "floating", "int32"),
    "float8": (put(P, lambda _: jnp.ones((5, 3), "float8_e4m3fn")), CafinTypeError, AT_P, "floating", "float8"),
    "less than a byte": (put(P, lambda _: jnp.ones((5, 3), "int4")), CafinTypeError, AT_P, "whole bytes", "int4"),
    "four bits": (put(P, lambda _: jnp.ones((5, 3), "float4_e2m1fn")), CafinTypeError, AT_P, "whole bytes", "float4"),
    "truth values": (put(P, lambda _: jnp.ones((5, 3), bool)), CafinTypeError, AT_P, "floating", "bool"),
    "another type": (put(G, lambda _: jnp.ones((5, 3), "bfloat16")), CafinValueError, AT_G, "float32", "bfloat16"),
    "another shape": (put(M, lambda _: jnp.ones((3, 5))), CafinValueError, AT_M, "(5, 3)"),
    "other factors": (put(F, lambda _: (jnp.ones(3), jnp.ones(4))), CafinValueError, AT_F, "15"),
    "another structure": (put("grads.dense", [1, 2]), CafinTypeError, "`grads`", "structure"),
    "another structure of factors": (put("factors.list", None), CafinTypeError, "`factors`", "structure"),
    "column-major": (put(P, column_major), CafinValueError, AT_P, "row-major", "(1, 0)"),
}


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "donated"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, donate: bool, given: Any) -> None:
    change, kind, *words = REFUSED[name]
    for tree in given.values():
        tree["twins"] = [None, None] if tree is given["factors"] else [jnp.ones(3), jnp.ones(3)]
    changed = change(given)
    before = jax.tree.map(lambda x: np.array(x) if not x.is_deleted() else None, given)
    with refuses(kind, "fused_step", *words):
        fused_step(**changed, lr=0.1, donate=donate)
    assert alive(given)
    jax.tree.map(same_bits, given, before)


BAD: dict[str, dict[str, Any]] = {
    "lr": {"lr": -1.0},
    "beta": {"beta": 1.0},
    "step": {"step": 0},
    "donate": {"donate": "yes"},
    "backend": {"backend": "tpu"},
    "error_if_nonfinite": {"error_if_nonfinite": "yes"},
    "seed": {"seed": -1},
    "stream": {"stream": "mine"},
}


@pytest.mark.parametrize("name", BAD)
def test_refused_options(name: str, given: Any) -> None:
    with pytest.raises(CafinError, match=name):
        fused_step(**given, **{"lr": 0.1, "donate": True, **BAD[name]})
    assert alive(given)


def test_traced_values_are_refused() -> None:
    given = of_jax(problem())
    with refuses(
        CafinTypeError, "fused_step", "`params['dense/b']`", "traced", "outside of jax.jit", "fused_adafisher"
    ):
        jax.jit(lambda given: fused_step(**given, lr=0.1))(given)
    with refuses(CafinTypeError, "fused_step", "`grads['dense/b']`", "traced"):
        jax.vmap(lambda g: fused_step(**given | {"grads": g}, lr=0.1))(jax.tree.map(lambda x: x[None], given["grads"]))
    with refuses(CafinTypeError, "borrowed", "traced"):
        jax.jit(lambda x: borrowed(x).__enter__())(jnp.ones(3))


def test_what_is_traced_around_the_call_is_refused(given: Any) -> None:
    """Of arrays that are not traced themselves JAX makes those that are."""
    with refuses(CafinTypeError, "fused_step", "`params`", "a program that is traced", "outside of jax.jit"):
        jax.jit(lambda x: x + fused_step(**given, lr=0.1, donate=True)[0]["list"][1])(1.0)
    assert alive(given)


def test_a_gradient_of_something_else_is_no_such_trace(given: Any) -> None:
    want = fused_step(**given, lr=0.1)
    got = []
    jax.grad(lambda x: got.append(fused_step(**given, lr=0.1)) or x)(1.0)
    jax.tree.map(same_bits, got[0], want)


@pytest.mark.parametrize("tree", ["momenta", "grads"])
def test_no_number_is_lost_to_jaxs_search_for_nan(tree: str, given: Any) -> None:
    """It would raise between donation and return."""
    given[tree]["dense"]["w"] = given[tree]["dense"]["w"].at[1, 1].set(jnp.nan)
    want = fused_step(**given, lr=0.1)
    with jax.debug_nans(True), jax.debug_infs(True):
        got = fused_step(**given, lr=0.1, donate=True)
    jax.tree.map(same_bits, got, want)


def test_nonfinite_gradients_are_refused_before_anything_is_donated(given: Any) -> None:
    given["grads"]["dense"]["w"] = given["grads"]["dense"]["w"].at[1, 1].set(jnp.nan)
    with refuses(NonFiniteError, "gradient of params['dense/w']", "1 of 15"):
        fused_step(**given, lr=0.1, donate=True, error_if_nonfinite=True)
    assert alive(given)
    params, _ = fused_step(**given, lr=0.1, donate=True)
    assert np.isnan(numpy_of(params["dense"]["w"])).sum() == 1


def test_names_with_slashes_are_told_apart() -> None:
    p = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(2)}}
    g = {"a/b": jnp.ones(3), "a": {"b": jnp.full(2, 3.0)}}
    params, _ = fused_step(p, g, jax.tree.map(jnp.zeros_like, p), lr=0.5, beta=0.0)
    np.testing.assert_array_equal(params["a/b"], 0.5)
    np.testing.assert_array_equal(params["a"]["b"], -0.5)


def test_a_donation_that_jax_refuses_is_told(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax_eager._home(given["params"]["dense"]["w"], "", "") == "cpu":
        pytest.skip("a CPU copies")

    def moved(*_: Any) -> Any:
        raise ValueError("INVALID_ARGUMENT: a buffer with an external reference cannot be donated\nmore")

    monkeypatch.setattr(jax_streams, "moved", moved)
    with refuses(CafinValueError, "fused_step", "JAX's to donate", "external reference", "donate=False"):
        fused_step(**given, lr=0.1, donate=True)
    assert alive(given)


# ---- Faults behind the checks ----


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "donated"])
def test_nothing_is_lost_if_the_launch_fails(given: Any, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.tree.map(np.array, given)

    def fails(self: Any, stream: Any = None) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(update.Step, "__call__", fails)
    with pytest.raises(MemoryError, match="no more") as caught:
        fused_step(**given, lr=0.1, donate=donate)
    kept = {name: given[name] for name in ("params", "momenta")}
    if not alive(kept):
        kept = dict(zip(kept, caught.value.donated))  # type: ignore[attr-defined]
    jax.tree.map(same_bits, kept, {name: before[name] for name in kept})
    monkeypatch.undo()


def test_ctrl_c_leaves_the_finished_step(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = fused_step(**given, lr=0.1)
    call = update.Step.__call__

    def interrupted(self: Any, stream: Any = None) -> None:
        signal.raise_signal(signal.SIGINT)
        call(self, stream)

    monkeypatch.setattr(update.Step, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        fused_step(**given, lr=0.1, donate=True)
    jax.tree.map(same_bits, caught.value.donated, want)  # type: ignore[attr-defined]
