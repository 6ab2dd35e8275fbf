"""Arrays of several frameworks in one call, and strides that only some of them have, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import check_update, make, problem, refuses

from cafin_cupy import AdaFisher, CafinTypeError, CafinValueError, Linear, fused_step, streams
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
    ours = np.ones(3, np.float32)
    words = "must be writable", "immutable", "cafin_cupy.adapters.jax"
    with refuses(CafinTypeError, "`params[0]`", *words, unchanged=[x, ours]):
        fused_step([x], [ours.copy()], [ours], lr=0.1)
    with refuses(CafinTypeError, "`momenta[0]`", *words, unchanged=[x, ours]):
        fused_step([ours], [ours.copy()], [x], lr=0.1)
    with refuses(CafinTypeError, "AdaFisher", "`params[0]`", *words, unchanged=[x]):
        AdaFisher([x])


@pytest.mark.parametrize("fails", [False, True])
def test_the_host_waits_for_what_jax_lends_to_a_launch(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX says of no stream when an array is there, and may free it as soon as nobody holds it."""
    jax = pytest.importorskip("jax")
    happened: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda given: happened.append([x.shape for x in given]))
    monkeypatch.setattr(streams, "synchronize", happened.append)
    ours, theirs = np.zeros(3), make("jax", np.ones(2))
    try:
        with streams.joined([ours, theirs], 0, 17):
            happened.append("launch")
            assert not fails
    except AssertionError:
        assert fails
    assert happened == [[(2,)], "launch", 17]
    happened.clear()
    with streams.joined([ours], 0, 17):
        pass
    assert not happened


@pytest.mark.parametrize("reverse", ["p", "g", "m", "pgm"])
def test_negative_strides_on_the_reference(reverse: str) -> None:
    x = problem((4, 6))

    def laid(k: str) -> Any:
        return np.flip(np.ascontiguousarray(np.flip(x[k]))) if k in reverse else x[k].copy()

    p, g, m = laid("p"), laid("g"), laid("m")
    fused_step([p], [g], [m], [(x["H"], x["S"])], lr=0.1)
    check_update(p, m, x, lr=0.1)


READ = {
    "negative strides": lambda: np.arange(15.0, dtype=np.float32).reshape(5, 3)[::-1],
    "read-only": lambda: np.broadcast_to(np.float32(0.5), (5, 3)),
    "negative bit": lambda: torch.complex(torch.zeros(5, 3), torch.ones(5, 3)).conj().imag,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own", ["numpy", "torch"])
@pytest.mark.parametrize("kind", READ)
def test_special_gradients_of_either_framework(own: str, kind: str) -> None:
    g = READ[kind]()
    if kind == "negative bit":
        with refuses(CafinValueError, "`grads[0]`", "negative bit", "resolve_neg"):
            fused_step([make(own, np.zeros((5, 3)))], [g], [make(own, np.zeros((5, 3)))], lr=0.1)
        return
    x = {**problem((5, 3)), "g": np.array(g)}
    p, m = make(own, x["p"]), make(own, x["m"])
    fused_step([p], [g], [m], lr=0.1)
    check_update(p, m, x, factors=False, lr=0.1)


@pytest.mark.parametrize("others", ["numpy", "torch", "jax"])
def test_half_precision_activations_of_another_framework(others: str) -> None:
    if others == "torch":
        h, s = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
    else:
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        h, s = (make(others, np.ones(shape)).astype(bfloat16) for shape in ((4, 3), (4, 2)))
    w = np.ones((2, 3), np.float32)
    opt = AdaFisher([w], [layer := Linear(w)])
    opt.accumulate(layer, h, s)
    opt.step([w.copy()])
    H, S = opt.factors()["0"]
    np.testing.assert_allclose((H[0], S[0]), 0.08, rtol=1e-6)  # constant moments are normalised to 0


def test_momenta_that_cannot_be_shared_are_refused() -> None:
    m = np.zeros((5, 3), np.float32)[::-1]
    p = torch.zeros(5, 3)
    with refuses(CafinTypeError, "`momenta`", "convert it", unchanged=[p, m]):
        fused_step([p], [torch.ones(5, 3)], [m], lr=0.1)


def test_memory_that_serves_two_entries_is_refused() -> None:
    windows = np.lib.stride_tricks.as_strided(np.ones(6, np.float32), (3, 3), (4, 4))
    with refuses(CafinValueError, "`params[0]`", "one element of memory for each entry", "(1, 1)", unchanged=[windows]):
        fused_step([windows], [np.ones((3, 3), np.float32)], [np.ones((3, 3), np.float32)], lr=0.1)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_geometry_in_numpy_integers(kind: type) -> None:
    from cafin_cupy import Conv2d

    layer = Conv2d(np.ones((4, 2, 3, 3)), stride=kind(2), padding=(kind(1), 1), groups=kind(2))
    assert (layer.stride, layer.padding, layer.groups) == ((2, 2), (1, 1), 2)
