"""The recorded training runs through JAX, and the same trajectory as PyTorch's from the same weights and data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from jax_helpers import both_forms, cross_entropy, nested, sequential
from oracle import CASES, RELATIVE, assert_close, load, recorded

from cafin_cupy.adapters.jax import fused_adafisher


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """By plain array code, and by the kernels. A GPU multiplies in float32, not in TF32, of which no run has 1e-5."""
    device = jax.devices("cuda" if request.param == "gpu" else "cpu")[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield


def flat(tree: Any) -> dict[str, Any]:
    return {f"{module}.{role}": x for module, own in tree.items() for role, x in own.items()}


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {**case["hyperparameters"], "decoupled": case["optimizer"] == "AdaFisherW"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_runs(name: str) -> None:
    """By both forms."""
    case, arrays = load(name)
    start = {key.removeprefix("init/"): np.float32(x) for key, x in arrays.items() if key.startswith("init/")}
    params = nested({key: x for key, x in start.items() if key.endswith(("weight", "bias"))})
    layers, forward = sequential(case["model"], params)

    def loss(params: Any, taps: Any, x: Any, y: Any) -> Any:
        z = forward(params, taps, x)
        z = z.mean(1) if z.ndim == 3 else z
        value = ((z - y) ** 2).mean() if case["loss"] == "mse" else cross_entropy(z, y)
        return value * case.get("loss_scale", 1), value

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    for form, (init, step) in both_forms(layers=layers, **options_of(case)).items():
        p, state = params, init(params)
        step, compared = jax.jit(step), 0
        for t in range(case["steps"]):
            x, y = (jnp.asarray(arrays[f"{k}/{t}"]) for k in "xy")
            (_, value), (grads, sums) = gradient(p, layers.zeros(), jnp.float32(x), y)
            p, state = step(p, grads, state, factors=sums)
            if f"f64/loss/{t}" in arrays:
                assert value == pytest.approx(float(arrays[f"f64/loss/{t}"]), rel=RELATIVE)
            factors = layers.factors(state)
            got = {
                "H_D": {key: pair[0] for key, pair in factors.items()},
                "S_D": {key: pair[1] for key, pair in factors.items()},
                "param": flat(p),
                "grad": flat(grads),
                "exp_avg": flat(state.momentum),
            }
            for kind, values in got.items():
                for key, true in recorded(arrays, kind, t).items():
                    assert_close(values[key], true, RELATIVE, f"{form}: {kind} {key} after step {t}")
                    compared += 1
        assert state.count == case["steps"]
        assert compared >= 3 * 5 * 2  # three recorded steps, five kinds, at least two tensors each


MODELS: dict[str, tuple[list[dict[str, Any]], tuple[int, ...]]] = {
    "cnn": (
        [
            {"type": "Conv2d", "in_channels": 3, "out_channels": 8, "kernel_size": 3, "padding": 1, "bias": False},
            {"type": "BatchNorm2d", "num_features": 8},
            {"type": "ReLU"},
            {"type": "Conv2d", "in_channels": 8, "out_channels": 8, "kernel_size": 3, "stride": 2, "groups": 2},
            {"type": "ReLU"},
            {"type": "Flatten"},
            {"type": "Linear", "in_features": 72, "out_features": 10},
        ],
        (3, 8, 8),
    ),
    "mlp": (
        [
            {"type": "Linear", "in_features": 20, "out_features": 32},
            {"type": "LayerNorm", "normalized_shape": 32},
            {"type": "Tanh"},
            {"type": "Linear", "in_features": 32, "out_features": 10, "bias": False},
        ],
        (7, 20),
    ),
}


@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
@pytest.mark.parametrize("TCov", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_with_pytorch(model: str, TCov: int, decoupled: bool) -> None:
    """Parameters, momentum and factors, float32, every step."""
    torch = pytest.importorskip("torch")
    from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW

    modules, shape = MODELS[model]
    torch.manual_seed(0)
    kinds = [(getattr(torch.nn, d["type"]), {k: v for k, v in d.items() if k != "type"}) for d in modules]
    theirs = torch.nn.Sequential(*[kind(**options) for kind, options in kinds])
    params = nested({name: p.detach().numpy().copy() for name, p in theirs.named_parameters()})
    layers, forward = sequential(modules, params)
    options = {"lr": 1e-3, "TCov": TCov, "weight_decay": 0.01}
    adam = (AdaFisherW if decoupled else AdaFisher)(theirs, **options)
    optimizer = fused_adafisher(layers=layers, decoupled=decoupled, **options)

    def loss(params: Any, taps: Any, x: Any, y: Any) -> Any:
        z = forward(params, taps, x)
        return cross_entropy(z.mean(1) if z.ndim == 3 else z, y)

    @jax.jit
    def train(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads, sums = jax.grad(loss, argnums=(0, 1))(params, layers.zeros(), x, y)
        return optimizer.step(params, grads, state, factors=sums)

    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for t in range(20):
        x, y = np.float32(rng.standard_normal((16, *shape))), rng.integers(0, 10, 16)
        adam.zero_grad()
        z = theirs(torch.tensor(x))
        torch.nn.functional.cross_entropy(z.mean(1) if z.dim() == 3 else z, torch.tensor(y)).backward()
        adam.step()
        params, state = train(params, state, x, y)
        ours = {"parameter": flat(params), "momentum": flat(state.momentum)}
        for name, p in theirs.named_parameters():
            for kind, want in (("parameter", p), ("momentum", adam.state[p]["exp_avg"])):
                assert_close(ours[kind][name], numpy(want), RELATIVE, f"{kind} {name} after step {t}")
        for name, pair in adam.factors().items():
            for got, F in zip(layers.factors(state)[name], pair):
                assert_close(got, numpy(F), RELATIVE, f"factors of {name} after step {t}")


def numpy(x: Any) -> Any:
    return x.detach().numpy().astype(float)
