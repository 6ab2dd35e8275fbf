"""Parameters that the PyTorch optimizer refuses, and some that look like them and are welcome."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    loss_of,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

RESHAPED = {
    "a slice": lambda w: w[:3],
    "transposed": lambda w: w.t(),
    "as integers": lambda w: w.view(torch.int32),
}


@pytest.mark.parametrize("TCov", [1, 100])
@pytest.mark.parametrize("change", ["a slice", "as integers"])
def test_a_parameter_that_changes_in_place_of_its_memory_is_refused(change: str, TCov: int, device: str) -> None:
    """Its address stays, so the address alone would not tell."""
    optimizer = run(AdaFisher(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device), TCov=TCov), rows(device, 1))
    w = optimizer.model[1].weight
    w.requires_grad_(change == "a slice")
    w.data = RESHAPED[change](w.data)
    w.grad = torch.ones_like(w) if change == "a slice" else None
    optimizer.model[0].weight.grad = torch.ones(5, 5, device=device)
    with refused(optimizer, "step", "1.weight" if change == "a slice" else "float"):
        optimizer.step()


def test_a_transposed_parameter_is_followed_or_refused(device: str) -> None:
    optimizer = run(AdaFisher(nn.Linear(5, 5, bias=False).to(device), TCov=100), rows(device, 1))
    w = optimizer.model.weight
    w.data = w.data.t()
    w.grad = torch.randn_like(w)
    before, m = w.detach().clone(), optimizer.state[w]["exp_avg"].clone()
    H, S = optimizer.factors()[""]
    try:
        optimizer.step()
    except CafinError as error:
        assert "contiguous" in str(error)
        return
    m = 0.9 * m + 0.1 * w.grad
    want = before - 1e-3 / (1 - 0.9**2) * m / (torch.outer(S, H) + 1e-3)
    torch.testing.assert_close(w.detach(), want, rtol=1e-5, atol=1e-6)  # float32 roundings of one step


@pytest.mark.parametrize("frozen", [torch.arange(3), torch.ones(3, dtype=torch.cfloat), torch.ones(3).half()])
def test_frozen_parameters_may_be_of_any_type(frozen: Tensor, device: str) -> None:
    model = nn.Linear(5, 3)
    model.register_parameter("index", nn.Parameter(frozen, requires_grad=False))
    optimizer = run(AdaFisher(model.to(device), TCov=1), rows(device, 2))
    assert optimizer.backend == ("reference" if device == "cpu" else "cuda")
    assert torch.equal(model.index.cpu(), frozen)


class Loose(nn.Module):
    """A Linear layer and parameters made by hand."""

    def __init__(self, *parameters: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.loose = nn.ParameterList(nn.Parameter(p) for p in parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + sum(p.sum() for p in self.loose)


def assert_step_refused(optimizer: AdaFisher, *words: str) -> None:
    loss_of(optimizer.model, rows(str(optimizer.model.fc.weight.device), 1)[0]).backward()
    with refused(optimizer, "step", *words):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*no factors")
def test_expanded_parameters_are_refused(device: str) -> None:
    optimizer = AdaFisher(Loose(torch.ones(1, device=device).expand(4)).to(device))
    assert_step_refused(optimizer, "`loose.0` must have one element of memory for each entry", "strides (0,)", "copy")


@pytest.mark.filterwarnings("ignore:.*no factors")
def test_overlapping_parameters_are_refused(device: str) -> None:
    memory = torch.ones(10, device=device)
    optimizer = AdaFisher(Loose(memory[:6], memory[4:]).to(device))
    assert_step_refused(optimizer, "`loose.1` must not share memory with `loose.0`", "pass each array once")


@pytest.mark.filterwarnings("ignore:.*no factors")
def test_a_parameter_that_changes_its_shape_is_refused(device: str) -> None:
    """As an embedding that grows: its momentum has the old size."""
    optimizer = AdaFisher(Loose(torch.ones(4, 2)).to(device))
    run(optimizer, rows(device, 1))
    p = optimizer.model.loose[0]
    p.grad, p.data = None, torch.ones(6, 2, device=device)
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    weight = optimizer.model.fc.weight.detach().clone()
    with pytest.raises(CafinError, match=r"step: `loose.0` must .*shape.*\(4, 2\).*got .*\(6, 2\)"):
        optimizer.step()
    assert torch.equal(optimizer.model.fc.weight, weight)
    assert torch.equal(p, torch.ones(6, 2, device=device))


@pytest.mark.filterwarnings("ignore:.*no factors")
def test_neighbours_in_one_memory_are_welcome(device: str) -> None:
    memory = torch.ones(11, device=device)  # the second lies at an odd address
    optimizer = AdaFisher(Loose(memory[:5], memory[5:]).to(device), lr=0.1)
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    grads = torch.cat([p.grad for p in optimizer.model.loose])
    optimizer.step()
    torch.testing.assert_close(memory, 1 - 0.1 * grads)  # a first step with F = 1, to the rounding of float32


@pytest.mark.parametrize("change", [{"device": "meta"}, {"dtype": torch.complex64}], ids=["meta", "complex"])
def test_models_without_real_numbers_are_refused(change: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 2, **change)
    with pytest.raises(CafinError, match=r"`model \(weight\)` must have real floating-point parameters in memory"):
        AdaFisher(model)
