"""The recorded training runs of the public implementation, see oracle.py: every factor, momentum and parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oracle import CASES, RELATIVE, assert_close, build, load, recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch_helpers import exact_float32  # noqa: E402

from cafin_cupy import Averaging, BatchNorm2d, Conv2d, LayerNorm, Linear, reference  # noqa: E402
from cafin_cupy.adapters import torch as adapter  # noqa: E402

ROUNDING = 1e-12  # float64 against float64: another order of summation over a few steps

RUNS = [
    pytest.param("cpu", torch.float64, None, ROUNDING, id="cpu-float64"),
    pytest.param("cpu", torch.float32, None, RELATIVE, id="cpu-float32"),
    pytest.param("cuda", torch.float32, "cuda", RELATIVE, id="cuda-kernels", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, "reference", RELATIVE, id="cuda-reference", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_float32():
        yield


def backward(case: dict[str, Any], arrays: dict[str, np.ndarray], model: nn.Module, t: int) -> float:
    """Forward and backward of step `t`; the loss without its scale."""
    like = next(model.parameters())
    x, y = torch.tensor(arrays[f"x/{t}"]).to(like), torch.tensor(arrays[f"y/{t}"]).to(like.device)
    z = model(x)
    if case["loss"] == "mse":
        loss = ((z - y.to(like.dtype)) ** 2).mean()
    else:
        loss = nn.functional.cross_entropy(z.mean(1) if z.dim() == 3 else z, y)
    (loss * case.get("loss_scale", 1)).backward()
    return loss.item()


def test_every_case_is_here() -> None:
    assert len(CASES) == 7


@pytest.mark.parametrize(("device", "dtype", "backend", "relative"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_adapter(name: str, device: str, dtype: Any, backend: str | None, relative: float) -> None:
    case, arrays = load(name)
    model = build(case, arrays, dtype, device)
    optimizer = getattr(adapter, case["optimizer"])(model, **case["hyperparameters"], backend=backend)
    compared = 0
    for t in range(case["steps"]):
        optimizer.zero_grad()
        loss = backward(case, arrays, model, t)
        optimizer.step()
        if f"f64/loss/{t}" in arrays:
            assert loss == pytest.approx(float(arrays[f"f64/loss/{t}"]), rel=relative)
        named, factors = dict(model.named_parameters()), optimizer.factors()
        got = {
            "H_D": {module: pair[0] for module, pair in factors.items()},
            "S_D": {module: pair[1] for module, pair in factors.items()},
            "param": named,
            "grad": {key: p.grad for key, p in named.items()},
            "exp_avg": {key: optimizer.state[p]["exp_avg"] for key, p in named.items()},
        }
        for kind, values in got.items():
            for key, true in recorded(arrays, kind, t).items():
                assert_close(values[key], true, relative, f"{kind} {key} after step {t}")
                compared += 1
    assert optimizer.backend == (backend or "reference")
    assert compared >= 3 * 5 * 2  # three recorded steps, five kinds, at least two tensors each


def describe(module: nn.Module, arrays: tuple[np.ndarray, np.ndarray | None]) -> Any:
    if isinstance(module, nn.Conv2d):
        geometry = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
        return Conv2d(*arrays, **geometry)
    kinds = {nn.Linear: Linear, nn.BatchNorm2d: BatchNorm2d, nn.LayerNorm: LayerNorm}
    return next((make(*arrays) for kind, make in kinds.items() if isinstance(module, kind)), None)


def record(model: nn.Sequential) -> dict[str, tuple[np.ndarray, Any]]:
    """From now on the model's forward and backward fill the dict: name -> (input, output gradient)."""
    seen: dict[str, Any] = {}

    def tap(name: str) -> Any:
        def forward(module: nn.Module, args: Any, output: Any) -> None:
            h = args[0].detach().numpy().copy()
            output.register_hook(lambda s: seen.__setitem__(name, (h, s.numpy().copy())))

        return forward

    for name, module in model.named_children():
        module.register_forward_hook(tap(name))
    return seen


@pytest.mark.parametrize("name", CASES)
def test_reference_on_numpy_arrays(name: str) -> None:
    """The same runs by the pure functions alone; torch only differentiates the model."""
    case, arrays = load(name)
    options = dict(case["hyperparameters"])
    averaging, every = Averaging.parity(options.pop("gamma")), options.pop("TCov")
    model = build(case, arrays, torch.float64, "cpu")
    seen = record(model)
    p = {key: value.detach().numpy() for key, value in model.named_parameters()}  # the model's own memory
    m = {key: np.zeros_like(value) for key, value in p.items()}
    layers = {}
    for key, module in model.named_children():
        if f"{key}.weight" in p:
            layers[key] = describe(module, (p[f"{key}.weight"], p.get(f"{key}.bias")))
    F = {key: (np.ones(layer.H_size), np.ones(layer.S_size)) for key, layer in layers.items()}
    for t in range(case["steps"]):
        model.zero_grad()
        backward(case, arrays, model, t)
        for key, layer in layers.items():
            if t % every == 0:
                raw = reference.raw_moments(layer, reference.raw_sums(layer, *seen[key]))
                F[key] = reference.refresh(*F[key], *raw, averaging)
        for full, parameter in model.named_parameters():
            key, role = full.rsplit(".", 1)
            H, S = F[key]
            width = layers[key].width
            H = H[:width] if role == "weight" else H[width:]
            decoupled = case["optimizer"] == "AdaFisherW"
            new = reference.update(
                p[full], parameter.grad.numpy(), m[full], H, S, **options, decoupled=decoupled, step=t + 1
            )
            p[full][...], m[full] = new
        got = {"H_D": {k: f[0] for k, f in F.items()}, "S_D": {k: f[1] for k, f in F.items()}, "param": p, "exp_avg": m}
        for kind, values in got.items():
            for key, true in recorded(arrays, kind, t).items():
                assert_close(values[key], true, ROUNDING, f"{kind} {key} after step {t}")
