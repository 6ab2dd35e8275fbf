"""Which backend runs: the argument, the environment variable, the arrays, and what is missing."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from helpers import FRAMEWORKS, make, refuses

from cafin_cupy import AdaFisher, BackendError, CafinValueError, backend, fused_step
from cafin_cupy.backend import choose, requested

FLOAT = {"float32"}


@pytest.fixture
def gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU were there and all kernels compiled."""
    monkeypatch.setattr(backend, "cuda_problem", lambda: None)
    monkeypatch.setattr(backend, "prepare", lambda device, mixed: None)
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "_failed", {})


@pytest.mark.parametrize("value", [None, "cuda", "reference"])
def test_the_argument_comes_before_the_environment(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested(value, "f") == value
    monkeypatch.setenv("CAFIN_BACKEND", "reference")
    assert requested(value, "f") == (value or "reference")
    monkeypatch.setenv("CAFIN_BACKEND", "")
    assert requested(value, "f") == value


@pytest.mark.parametrize("value", ["gpu", "CUDA", "nvidia"])
def test_unknown_names_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(CafinValueError, "f: `backend` must be", '"cuda", "reference"', repr(value)):
        requested(value, "f")
    monkeypatch.setenv("CAFIN_BACKEND", value)
    with refuses(CafinValueError, "f: `CAFIN_BACKEND` must be", '"cuda", "reference"', repr(value)):
        requested(None, "f")


@pytest.mark.usefixtures("gpu_works")
def test_arrays_choose_where_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(None, 0, FLOAT, "f") == "cuda"
    assert choose("cuda", 0, FLOAT, "f") == "cuda"
    assert choose("reference", 0, FLOAT, "f") == "reference"
    assert choose(None, "cpu", FLOAT, "f") == "reference"
    monkeypatch.setenv("CAFIN_BACKEND", "reference")
    assert choose(None, 0, FLOAT, "f") == "reference"


@pytest.mark.usefixtures("gpu_works")
def test_cuda_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(BackendError, "f: `backend` must", "'cuda'", "CPU", "move them to a GPU"):
        choose("cuda", "cpu", FLOAT, "f")
    monkeypatch.setenv("CAFIN_BACKEND", "cuda")
    with refuses(BackendError, "f: `CAFIN_BACKEND` must", "'cuda'", "CPU", "move them to a GPU"):
        choose(None, "cpu", FLOAT, "f")


@pytest.mark.usefixtures("gpu_works")
def test_what_the_kernels_cannot_take() -> None:
    with refuses(BackendError, "f: `backend` must", "'cuda'", "float32", "float64"):
        choose("cuda", 0, {"float32", "float64"}, "f")
    with pytest.warns(UserWarning, match="reference backend runs on the GPU, slowly, because .*float64"):
        assert choose(None, 0, {"float64"}, "f") == "reference"


@pytest.mark.parametrize("broken", ["cuda_problem", "prepare"])
@pytest.mark.usefixtures("gpu_works")
def test_a_missing_part_is_named_once(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        if broken == "prepare":
            raise BackendError("no wheel; install it")
        return "no wheel; install it"

    monkeypatch.setattr(backend, broken, fail)
    with refuses(BackendError, "f: `backend` must", "'cuda'", "no wheel; install it"):
        choose("cuda", 0, FLOAT, "f")
    with pytest.warns(UserWarning, match="slowly, because no wheel; install it"):
        assert choose(None, 0, FLOAT, "f") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time, silence
        assert choose(None, 0, FLOAT, "f") == "reference"
        assert choose("reference", 0, FLOAT, "f") == "reference"


@pytest.mark.parametrize("broken", ["cuda_problem", "prepare"])
@pytest.mark.usefixtures("gpu_works")
def test_a_set_up_that_failed_is_not_repeated(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing compilation takes a second, and `choose` is asked again and again; "cuda" asks for another attempt."""
    tries: list[Any] = []
    broken_now = [True]

    def attempt(*arguments: Any, **_: Any) -> str | None:
        tries.append(arguments)
        if broken_now and broken == "prepare":
            raise BackendError("no wheel; install it")
        return "no wheel; install it" if broken_now else None

    monkeypatch.setattr(backend, broken, attempt)
    with pytest.warns(UserWarning, match="because no wheel") as caught:
        for _ in range(3):
            assert choose(None, 0, FLOAT, "f") == "reference"
    assert len(tries) == len(caught) == 1
    for count in (2, 3):
        with refuses(BackendError, "no wheel; install it"):
            choose("cuda", 0, FLOAT, "f")
        assert len(tries) == count
    broken_now.clear()  # the wheel is installed
    assert choose(None, 0, FLOAT, "f") == "reference"  # as before: state may lie there
    assert choose("cuda", 0, FLOAT, "f") == "cuda"
    assert choose(None, 0, FLOAT, "f") == "cuda"


@pytest.mark.usefixtures("gpu_works")
def test_one_device_that_fails_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(device: int, mixed: bool) -> None:
        if device == 1:
            raise BackendError("too old a device")

    monkeypatch.setattr(backend, "prepare", prepare)
    with pytest.warns(UserWarning, match="too old a device"):
        assert choose(None, 1, FLOAT, "f") == "reference"
    assert choose(None, 0, FLOAT, "f") == "cuda"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("value", ["cuda", "reference"])
def test_the_environment_rules_the_public_functions(
    framework: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAFIN_BACKEND", value)
    p, g, m = (make(framework, np.ones(3)) for _ in range(3))
    if value == "cuda" and framework in ("numpy", "torch"):
        for call in (lambda: AdaFisher([p]), lambda: fused_step([p], [g], [m], lr=0.1)):
            with refuses(BackendError, "CAFIN_BACKEND", "'cuda'", "CPU", unchanged=[p, g, m]):
                call()
        return
    assert AdaFisher([p]).backend == value
    fused_step([p], [g], [m], lr=0.1)
    assert float(p[0]) == pytest.approx(0.0)  # m = 1 and 1 - beta = 0.1: a step of 0.1 * 1 / 0.1


@pytest.mark.gpu
def test_precisions_without_kernels_run_by_the_reference() -> None:
    p, g, m = (make("torch-cuda", np.ones(3), "float64") for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning may have been given before
        fused_step([p], [g], [m], lr=0.1)
        assert AdaFisher([p]).backend == "reference"
    assert float(p[0]) == pytest.approx(0.0)


@pytest.mark.parametrize("value", [np.array(["cuda", "reference"]), np.array("cuda"), ["cuda"], 3, b"cuda"])
def test_backends_are_named_by_strings(value: Any) -> None:
    with refuses(CafinValueError, "f: `backend` must be", '"cuda", "reference"'):
        requested(value, "f")
