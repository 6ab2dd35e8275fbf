"""Several devices: data parallel by shard_map, and by jit with sharded batches and parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("cupy")  # its NVRTC


@cache
def differences() -> dict[str, float]:
    """By the names of the ways."""
    program = Path(__file__).with_name("jax_devices.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return {name: float(number) for name, number in map(str.split, ran.stdout.splitlines())}


@pytest.mark.parametrize("way", ["shard_map", "jit", "sharded"])
def test_four_devices_train_as_one_with_the_whole_batch(way: str) -> None:
    """Parameters, momentum and factors, the largest difference relative to each array's largest entry."""
    assert differences()[way] < 2e-6  # float32 sums in another order, four steps


def test_each_device_runs_the_kernels_under_shard_map() -> None:
    """On a sampled step: one for the factors, one for the parameters."""
    assert differences()["average_xla"] == differences()["update_xla"] == 1
    assert differences()["calls"] == 2


def test_outside_of_jit_arrays_lie_on_one_device_and_stay_there() -> None:
    assert differences()["refused"] == differences()["stays"] == 1
    assert differences()["mixed"] == 6
