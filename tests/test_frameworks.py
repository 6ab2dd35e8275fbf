"""Arrays of several frameworks in one call, and strides that only some of them have, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import check_update, make, problem, refuses

from cafin_cupy import AdaFisher, CafinTypeError, CafinValueError, Linear, fused_step
from cafin_cupy.arrays import view

CPU_FRAMEWORKS = ["numpy", "torch", "jax"]


@pytest.mark.parametrize("own", ["numpy", "torch"])
@pytest.mark.parametrize("others", CPU_FRAMEWORKS)
def test_gradients_and_factors_of_another_framework(own: str, others: str) -> None:
    x = problem((5, 3))
    p, m = make(own, x["p"]), make(own, x["m"])
    g, H, S = (make(others, x[k]) for k in ("g", "H", "S"))
    fused_step([p], [g], [m], [(H, S)], lr=0.1)
    check_update(p, m, x, lr=0.1)


@pytest.mark.parametrize("momenta", ["numpy", "torch"])
def test_momenta_of_another_framework_are_written(momenta: str) -> None:
    x = problem((5, 3))
    p, m = make("torch" if momenta == "numpy" else "numpy", x["p"]), make(momenta, x["m"])
    fused_step([p], [make("numpy", x["g"])], [m], [(make("torch", x["H"]), x["S"])], lr=0.1)
    check_update(p, m, x, lr=0.1)


@pytest.mark.parametrize("own", ["numpy", "torch"])
@pytest.mark.parametrize("others", CPU_FRAMEWORKS)
def test_layers_see_arrays_of_another_framework(own: str, others: str) -> None:
    results = []
    for framework in (own, others):
        w = make(own, np.ones((2, 3)))
        layer = Linear(w)
        opt = AdaFisher([w], [layer], lr=0.1)
        opt.accumulate(
            layer, make(framework, np.arange(12.0).reshape(4, 3)), make(framework, np.arange(8.0).reshape(4, 2))
        )
        opt.step([make(framework, np.ones((2, 3)))])
        results.append(np.array(w))
    np.testing.assert_array_equal(*results)


def test_nothing_moves_if_a_later_array_is_refused() -> None:
    p, m = [np.zeros(3, np.float32), np.zeros(3, np.float32)], [np.zeros(3, np.float32) for _ in range(2)]
    with refuses(CafinTypeError, "`grads[1]`", "str", unchanged=[*p, *m]):
        fused_step(p, [np.ones(3, np.float32), "ones"], m, lr=1.0)


def test_jax_arrays_are_read_and_never_written() -> None:
    x = make("jax", np.ones(3))
    assert not view(x).writable
    with refuses(CafinTypeError, "`params[0]` must be writable"):
        fused_step([x], [np.ones(3, np.float32)], [np.ones(3, np.float32)], lr=0.1)


@pytest.mark.parametrize("reverse", ["p", "g", "m", "pgm"])
def test_negative_strides_on_the_reference(reverse: str) -> None:
    x = problem((4, 6))

    def laid(k: str) -> Any:
        return np.flip(np.ascontiguousarray(np.flip(x[k]))) if k in reverse else x[k].copy()

    p, g, m = laid("p"), laid("g"), laid("m")
    fused_step([p], [g], [m], [(x["H"], x["S"])], lr=0.1)
    check_update(p, m, x, lr=0.1)


def test_memory_that_serves_two_entries_is_refused() -> None:
    windows = np.lib.stride_tricks.as_strided(np.ones(6, np.float32), (3, 3), (4, 4))
    with refuses(CafinValueError, "`params[0]`", "one element of memory for each entry", "(1, 1)", unchanged=[windows]):
        fused_step([windows], [np.ones((3, 3), np.float32)], [np.ones((3, 3), np.float32)], lr=0.1)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_geometry_in_numpy_integers(kind: type) -> None:
    from cafin_cupy import Conv2d

    layer = Conv2d(np.ones((4, 2, 3, 3)), stride=kind(2), padding=(kind(1), 1), groups=kind(2))
    assert (layer.stride, layer.padding, layer.groups) == ((2, 2), (1, 1), 2)
