"""What the tests of JAX arrays outside of `jax.jit` share: arguments, and where they lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_helpers  # noqa: F401  # the CPU is JAX's default device
import numpy as np
import pytest


def emulated() -> bool:
    """True if CuPy is the emulated GPU's stand-in, which some tests import without using it."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and cupy.cuda.Module.__module__ == "emulation.device"


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)], name="memory")
def jax_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where JAX's arrays are."""
    if request.param == "cpu":
        yield "cpu"
    elif emulated():
        sys.modules["emulation.device"].lend_jax(monkeypatch)
        yield "gpu"
    else:
        with jax.default_device(jax.devices("cuda")[0]):
            yield "gpu"


def problem(seed: int = 0, dtype: str = "float32", momentum: str = "float32") -> dict[str, Any]:
    """Trees of NumPy arrays: two matrices, of which one has factors, a vector, a number, and one without elements."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, Any] = {"dense": {"w": (5, 3), "b": (5,)}, "list": [(2, 3, 4), ()], "empty": (0, 3)}

    def tree(kind: str) -> Any:
        def one(shape: tuple[int, ...]) -> Any:
            return rng.standard_normal(shape).astype(jnp.dtype(kind))

        return jax.tree.map(one, shapes, is_leaf=lambda x: isinstance(x, tuple))

    H, S = (rng.random(n, np.float32) for n in (3, 5))
    factors = {"dense": {"w": (H, S), "b": (H[:1], S)}, "list": [None, None], "empty": None}
    return {"params": tree(dtype), "grads": tree(dtype), "momenta": tree(momentum), "factors": factors}


def of_jax(trees: Any) -> Any:
    return jax.tree.map(jnp.asarray, trees)


def alive(*trees: Any) -> bool:
    return not any(x.is_deleted() for x in jax.tree.leaves(trees))


@pytest.fixture(name="given")
def given_arrays(memory: str) -> Any:
    """Arguments on that device."""
    return of_jax(problem())
