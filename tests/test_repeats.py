"""The same bits on every run: at other addresses of equal alignment, on another stream, beside other work, whatever the
order of blocks. Five steps, of which two are sampled, each from two micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Case, Device, make, numpy_of
from torch import nn
from torch_helpers import DEVICES

from cafin_cupy import AdaFisher, BatchNorm2d, Conv2d, LayerNorm, Linear
from cafin_cupy.adapters.torch import AdaFisher as TorchAdaFisher

STEPS, TCOV, MICRO = 5, 3, 2
CASES = [  # several blocks each, and several slices of a batch
    Case(Linear, (70, 300), True, (700, 300), (700, 70)),
    Case(Conv2d, (12, 3, 3, 3), True, (17, 3, 20, 19), (17, 12, 20, 19), {"padding": 1}),
    Case(BatchNorm2d, (12,), True, (17, 12, 20, 19), (17, 12, 20, 19)),
    Case(LayerNorm, (70,), True, (20, 35, 70), (20, 35, 70)),
]
DATA = [[case.data(seed) for seed in range(2 * MICRO)] for case in CASES]


def numbers(seed: int, shape: Any) -> np.ndarray[Any, Any]:
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def shapes() -> list[tuple[int, ...]]:
    return [tuple(a.shape) for case in CASES for a in (case.layer().weight, case.layer().bias)]


def bits(arrays: Any) -> list[bytes]:
    return [numpy_of(array).tobytes() for array in arrays]


def train(framework: str, dtype: str = "float32", front: int = 0) -> list[bytes]:
    """Parameters, momenta and factors. Every array lies behind `front` times 64 bytes of its own memory."""

    def placed(x: Any) -> Any:
        x = np.asarray(x)
        flat = make(framework, np.append(np.zeros(16 * front), x.ravel()), dtype)
        return flat[16 * front :].reshape(x.shape)

    params = [placed(numbers(seed, shape)) for seed, shape in enumerate(shapes())]
    layers = [case.kind(*params[2 * k : 2 * k + 2], **case.options) for k, case in enumerate(CASES)]
    opt = AdaFisher(params, layers, TCov=TCOV, weight_decay=0.1)
    for step in range(STEPS):
        for k, layer in enumerate(layers):
            for h, s in DATA[k][:MICRO] if step == 0 else DATA[k][MICRO:]:
                opt.accumulate(layer, placed(h), placed(s))
        opt.step([placed(numbers(100 * step + k, p.shape)) for k, p in enumerate(params)])
    return bits([*params, *opt.momenta, *(F for pair in opt.factors().values() for F in pair)])


MODULES: list[Any] = [
    lambda: nn.Linear(300, 70),
    lambda: nn.Conv2d(3, 12, 3, padding=1),
    lambda: nn.BatchNorm2d(12),
    lambda: nn.LayerNorm(70),
]


def train_torch(device: str, front: int = 0) -> list[bytes]:
    """The same by the PyTorch optimizer. Inputs and gradients are given: those of torch's own kernels may differ."""

    def placed(x: Any) -> torch.Tensor:
        x = torch.tensor(np.asarray(x), dtype=torch.float32, device=device)
        return torch.cat([x.new_zeros(16 * front), x.flatten()])[16 * front :].reshape(x.shape)

    model = nn.ModuleList(make() for make in MODULES).to(device)
    for seed, p in enumerate(model.parameters()):
        p.data = placed(numbers(seed, tuple(p.shape)))
    optimizer = TorchAdaFisher(model, TCov=TCOV, weight_decay=0.1)
    for step in range(STEPS):
        for _, _, index, layer in optimizer._modules:
            for h, s in DATA[index][:MICRO] if step == 0 else DATA[index][MICRO:]:
                optimizer._receive(index, placed(h), placed(s), layer)
        for k, p in enumerate(model.parameters()):
            p.grad = placed(numbers(100 * step + k, tuple(p.shape)))
        optimizer.step()
    momenta = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return bits([*model.parameters(), *momenta, *(f for pair in optimizer.factors().values() for f in pair)])


@pytest.mark.parametrize("front", [0, 1, 37])
def test_another_run_at_other_addresses(device: Device, front: int) -> None:
    first = train(device.framework, device.dtype)
    kept = [make(device.framework, np.zeros(1000 * k + 1)) for k in range(1, 30)]  # the second finds other memory
    assert train(device.framework, device.dtype, front) == first
    del kept


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("front", [0, 37])
def test_another_run_of_the_torch_optimizer(place: str, front: int) -> None:
    assert train_torch(place, front) == train_torch(place)


@contextmanager
def matrix_products() -> Iterator[None]:
    """Another stream of the GPU is busy with them from the beginning to the end."""
    stream = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda") / 64
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(600):  # about 3 ms each on a large GPU
            a = (a @ a).clamp_(-1, 1)
    yield
    assert not stream.query(), "the other work was to last"
    torch.cuda.synchronize()


@contextmanager
def side_stream(framework: str) -> Iterator[None]:
    stream = torch.cuda.Stream() if framework == "torch" else import_module("cupy").cuda.Stream(non_blocking=True)
    with torch.cuda.stream(stream) if framework == "torch" else stream:
        yield
        stream.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["nothing", "matrix products"])
def test_another_stream(beside: str) -> None:
    first = train("cupy")
    with matrix_products() if beside == "matrix products" else nullcontext(), side_stream("cupy"):
        assert train("cupy") == first


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["nothing", "matrix products"])
def test_another_stream_of_torch(beside: str) -> None:
    first = train_torch("cuda")
    with matrix_products() if beside == "matrix products" else nullcontext(), side_stream("torch"):
        assert train_torch("cuda") == first


@pytest.mark.gpu
def test_any_order_of_blocks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulated GPU, which lets us choose it."""
    import cupy

    if cupy.cuda.Module.__module__ != "emulation.device":
        pytest.skip("a GPU has an order of its own")
    compiler = sys.modules["emulation.compiler"]
    first = train("cupy")
    for seed in (0, 1, 2):
        for kernel in compiler.Kernel.known.values():
            monkeypatch.setattr(kernel, "_seed", seed)
        assert train("cupy") == first
