"""Inputs that the script overwrites between forward and backward: torch refuses, or the factors know what was read."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers import LAYOUTS, RAW, strided  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_cases import LAYERS, drawn  # noqa: E402
from torch_helpers import assert_moments, record, torch_device, weighted  # noqa: E402, F401

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


def overwritten(layer: nn.Module, x: Tensor, trains: bool = False, autocast: bool = False) -> bool:
    """Train one step while the input changes behind the forward; False if autograd does not allow it."""
    model = layer.to(x.device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    if trains:
        x = x.requires_grad_().view_as(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = weighted(model(x))
    with torch.no_grad():
        x.zero_()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return False
    optimizer.step()
    assert_moments(optimizer, seen)
    return True


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("trains", [False, True], ids=["data", "activation"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_in_every_layout(name: str, trains: bool, autocast: bool, device: str) -> None:
    make, shape = LAYERS[name]
    framework = "torch-cuda" if device == "cuda" else "torch"
    for layout in LAYOUTS:
        torch.manual_seed(0)
        layer = make()
        x = strided(framework, drawn(layer, shape).numpy(), layout)
        overwritten(layer, x, trains and x.is_floating_point(), autocast)


def test_overwritten_input_of_a_frozen_weight(device: str) -> None:
    """Autograd keeps nothing."""
    layer = nn.Linear(5, 3)
    layer.weight.requires_grad_(False)
    assert overwritten(layer, torch.randn(4, 5, device=device))


def test_overwritten_input_under_autocast(device: str) -> None:
    """Autograd keeps a bfloat16 copy of it."""
    assert overwritten(nn.Linear(5, 3), torch.randn(4, 5, device=device), autocast=True)


def test_overwritten_input_of_a_convolution_that_pads_itself(device: str) -> None:
    """Autograd keeps the padded copy."""
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    assert overwritten(layer, torch.randn(2, 2, 5, 6, device=device))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_overwritten_input_of_a_convolution_that_pads_more_behind(device: str) -> None:
    """Autograd keeps the padded copy."""
    assert overwritten(nn.Conv2d(2, 3, (4, 3), padding="same"), torch.randn(2, 2, 5, 6, device=device))


def test_overwritten_input_whose_rows_are_not_neighbours(device: str) -> None:
    """A sequence of which the batch is the second axis: autograd keeps a contiguous copy."""
    assert overwritten(nn.Linear(5, 3), torch.randn(4, 2, 5, device=device).transpose(0, 1))


def test_overwritten_input_of_a_norm_that_keeps_only_what_it_made(device: str) -> None:
    assert overwritten(nn.InstanceNorm2d(3, affine=True), torch.randn(3, 2, 5, 6, device=device).transpose(0, 1))
    if device == "cpu":
        assert overwritten(nn.RMSNorm(5), torch.randn(4, 5))
