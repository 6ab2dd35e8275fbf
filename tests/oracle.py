"""Training runs of the public implementation, recorded in tests/data: what tests of several adapters read.

The recorded float32 run lies within 3e-6 of its float64 run, relative to a tensor's largest entry; ours is held to
1e-5. Where the true value is 0, as the gradient of a convolution's bias in front of BatchNorm, the bound is 1e-6.
"""

from __future__ import annotations

import functools
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
CASES = sorted(file.stem for file in DATA.glob("*.npz"))
RELATIVE = 1e-5
ABSOLUTE = 1e-6


@functools.cache
def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A case: what it is, and its arrays."""
    with np.load(DATA / f"{name}.npz") as file:
        return json.loads(str(file["case"])), {key: file[key] for key in file.files if key != "case"}


def build(case: dict[str, Any], arrays: dict[str, np.ndarray], dtype: Any, device: str) -> Any:
    """The PyTorch model of a case."""
    torch, nn = import_module("torch"), import_module("torch.nn")

    def module(kind: str, **options: Any) -> Any:
        return getattr(nn, kind)(**{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})

    model = nn.Sequential(*[module(d["type"], **{k: v for k, v in d.items() if k != "type"}) for d in case["model"]])
    start = {key.removeprefix("init/"): torch.tensor(v) for key, v in arrays.items() if key.startswith("init/")}
    model.load_state_dict(start)
    return model.to(dtype).to(device)


def recorded(arrays: dict[str, np.ndarray], kind: str, t: int) -> dict[str, np.ndarray]:
    """The float64 run's arrays of a kind after a step."""
    prefix = f"f64/{kind}/{t}/"
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def assert_close(got: Any, true: np.ndarray, relative: float, what: str) -> None:
    """`relative` is to the tensor's largest entry."""
    got = np.asarray(got.detach().cpu() if hasattr(got, "detach") else got, dtype=np.float64)
    assert got.shape == true.shape, what
    largest = np.abs(true).max()
    bound = relative * largest if largest > ABSOLUTE else ABSOLUTE
    error = np.abs(got - true).max()
    assert error <= bound, f"{what}: error {error:.2e}, allowed {bound:.2e}"
