"""`summary` and `curvature` of the PyTorch optimizer: what it says of each parameter, and that nothing waits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import images, mlp, net, rows, run, split_groups, torch_device  # noqa: E402, F401

from cafin_cupy.adapters import torch_parts  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * self.scale


class Tied(nn.Module):
    """A head that multiplies by the embedding's weight, a frozen layer, one that is not called, a parameter of no
    layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.idle = nn.Linear(2, 2, bias=False)
        self.scale = Scale(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Any) -> Any:
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale(x))


def tied(device: str, kind: type[AdaFisher] = AdaFisher, **options: Any) -> AdaFisher:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `scale` has no factors
        return kind(Tied().to(device), **options)


def text(device: str) -> list[Any]:
    return [torch.arange(10, device=device).reshape(2, 5)]


def test_every_parameter_by_the_models_name(device: str) -> None:
    optimizer = tied(device)
    seen = {row.name: row for row in optimizer.summary().rows}
    assert list(seen) == [name for name, _ in optimizer.model.named_parameters()]
    assert {name: (row.shape, row.parameters) for name, row in seen.items()} == {
        name: (tuple(p.shape), p.numel()) for name, p in optimizer.model.named_parameters()
    }
    assert (seen["wte.weight"].layer, seen["wte.weight"].H, seen["wte.weight"].S) == ("Linear head", 6, 11)
    assert (seen["blocks.0.weight"].layer, seen["blocks.0.bias"].H) == ("Linear", 7)


def test_why_F_is_one_or_nothing_moves(device: str) -> None:
    optimizer = tied(device)

    def notes() -> dict[str, str]:
        return {row.name: row.note for row in optimizer.summary().rows if row.note}

    frozen = {"blocks.1.weight": "frozen", "blocks.1.bias": "frozen"}
    scale = {"scale.scale": "F = 1: Scale is no layer with factors"}
    assert notes() == {**frozen, **scale}
    run(optimizer, text(device))
    assert notes() == {**frozen, **scale, "idle.weight": "no gradient so far"}
    assert [row.name for row in optimizer.summary().without_factors] == ["scale.scale"]


def test_a_parameter_that_the_model_has_lost() -> None:
    optimizer = AdaFisher(mlp("cpu"))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    last = optimizer.summary().rows[-1]
    assert (last.name, last.note) == ("param_groups[1][0]", "F = 1: no module of the model holds it")


@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bytes_are_those_of_the_tensors(averaging: str, dtype: Any) -> None:
    optimizer = AdaFisher(net("cpu").to(dtype), averaging=averaging, backend="reference")
    before = optimizer.summary()
    assert optimizer._kept_factors is None  # a model may still move: a summary settles nothing
    x = [image.to(dtype) for image in images("cpu", 4)]
    run(optimizer, x)
    factors = optimizer._factors
    held = {id(a): a.nbytes for a in (*factors.H, *factors.S, *factors.H_effective, *factors.S_effective)}
    after = optimizer.summary()
    assert after.factors == sum(held.values())
    assert after.momentum == sum(state["exp_avg"].nbytes for state in optimizer.state.values())
    assert before.rows == after.rows


def test_momentum_that_is_not_there_takes_no_bytes(device: str) -> None:
    optimizer = tied(device)
    run(optimizer, text(device))
    assert optimizer.summary().momentum == sum(state["exp_avg"].nbytes for state in optimizer.state.values())


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_curvature_as_spelled_out(device: str, kind: type[AdaFisher], averaging: str) -> None:
    model = net(device)
    optimizer = split_groups(kind(model, lr=0.02, Lambda=0.1, TCov=2, weight_decay=0.3, averaging=averaging))
    optimizer.param_groups[1]["lr"] = 0.01
    optimizer.param_groups[1]["Lambda"] = 0.2
    run(optimizer, images(device, 4, 3, 5))
    names = {p: name for name, p in model.named_parameters()}
    seen = optimizer.curvature()
    assert set(seen) == set(names.values())
    for group in optimizer.param_groups:
        for p in group["params"]:
            index, role = optimizer._owners[id(p)]
            layer_pair = optimizer._factors.of_weight if role == "weight" else optimizer._factors.of_bias
            columns, rows_ = (x.double() for x in layer_pair(index))
            F = torch.outer(rows_, columns).reshape(p.shape) + group["Lambda"]
            state = optimizer.state[p]
            update = group["lr"] / (1 - group["beta"] ** int(state["step"])) * state["exp_avg"].double() / F
            if kind is AdaFisherW:
                update = update + group["lr"] * group["weight_decay"] * p.detach().double()
            ratio = update.norm() / p.detach().double().norm()
            want = {"min": F.min(), "max": F.max(), "mean": F.mean(), "update_ratio": ratio, "skipped": 0}
            found = seen[names[p]]
            assert found == pytest.approx({k: float(v) for k, v in want.items()}, rel=1e-12)  # float64 all the way


def test_only_what_moves_has_curvature(device: str) -> None:
    optimizer = tied(device)
    run(optimizer, text(device))
    every = {name for name, _ in optimizer.model.named_parameters()}
    assert set(optimizer.curvature()) == every - {"blocks.1.weight", "blocks.1.bias", "idle.weight"}


def test_keys_for_loggers(device: str) -> None:
    optimizer = AdaFisher(mlp(device))
    run(optimizer, rows(device, 1))
    flat = optimizer.curvature().flat()
    assert flat.keys() >= {"adafisher/0.weight/mean", "adafisher/0.bias/update_ratio"}
    assert all(isinstance(value, (int, float)) for value in flat.values())


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_counters_and_rates_on_the_device_give_the_same(kind: type[AdaFisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a capturable optimizer keeps them, here on the CPU."""
    optimizer = kind(mlp("cpu"), lr=0.25, weight_decay=0.5)
    run(optimizer, rows("cpu", 3))
    want = dict(optimizer.curvature())
    monkeypatch.setattr(torch_parts, "_on_device", lambda value: isinstance(value, torch.Tensor))
    optimizer.param_groups[0]["lr"] = torch.tensor([0.25])
    for state in optimizer.state.values():
        state["step"] = torch.tensor(state["step"])
    rates = torch_parts.rates(optimizer, "test")
    assert all(isinstance(rate.step_size, torch.Tensor) and rate.step_size.shape == () for rate in rates)
    for name, values in optimizer.curvature().items():
        assert values == pytest.approx(want[name], rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_nothing_waits_until_a_number_is_read(capturable: bool) -> None:
    optimizer = AdaFisherW(net("cuda"), capturable=capturable, weight_decay=0.1)
    if capturable:
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
    run(optimizer, images("cuda", 4))
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = optimizer.curvature()
        names = list(seen)
        with pytest.raises(RuntimeError, match="synchroniz"):
            seen[names[0]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(0 < values["update_ratio"] < 1 for values in optimizer.curvature().values())
