"""Shared by all tests: which of them need a GPU, where arrays live, and how long hypothesis may search."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers.py
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory

from helpers import CPU, CUDA, Device
from same_examples import leave_modules_unread

# The same examples on every run: a failure seen once is seen again. Raise HYPOTHESIS_EXAMPLES for a longer search.
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "30"))
hypothesis.settings.register_profile("cafin", max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("cafin")
leave_modules_unread()


@cache
def gpus() -> tuple[int, str]:
    """How many GPUs the tests can use; the reason where there are none."""
    from cafin_cupy.runtime import cuda_problem

    problem = cuda_problem()
    if problem is not None:
        return 0, problem
    import torch

    return torch.cuda.device_count(), "this PyTorch is built without CUDA, or sees no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed == 0:
            continue
        found, reason = gpus()
        if found == 0:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
        elif found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, and there is {found}"))


@pytest.fixture(autouse=True)
def _free_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the caller's choice of a backend."""
    monkeypatch.delenv("CAFIN_BACKEND", raising=False)


@pytest.fixture(
    scope="session",
    params=[pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Device:
    """NumPy arrays and the reference, or CuPy arrays and the kernels."""
    return request.param
