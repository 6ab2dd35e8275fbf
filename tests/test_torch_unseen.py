"""Layers that a sampled step does not see: one warning names them, and says why that may be."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import DEVICES  # noqa: E402

from cafin_cupy.adapters import torch_compiled, torch_layers  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


class Lending(nn.Module):
    """Uses the weights of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.lent = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(x), self.lent.weight, self.lent.bias)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_that_lends_its_weights(device: str) -> None:
    model = Lending().to(device)
    optimizer = AdaFisher(model, TCov=1)
    x = torch.randn(3, 5, 8, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (warning,) = [w for w in caught if "were not seen on a sampled step" in str(w.message)]
    assert "'lent'" in str(warning.message) and "'called'" not in str(warning.message)
    H, S = optimizer.factors()["lent"]
    assert torch.equal(H, torch.ones_like(H)) and torch.equal(S, torch.ones_like(S))
    assert not any(torch.equal(f, torch.ones_like(f)) for f in optimizer.factors()["called"])


def test_the_warning_names_the_scripts_line_behind_a_scheduler() -> None:
    optimizer = AdaFisher(nn.Linear(3, 2), TCov=1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # wraps `step`
    optimizer.model.eval()
    optimizer.model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(UserWarning, match="were not seen") as caught:
        optimizer.step()
    assert [w.filename for w in caught] == [__file__]


def test_unused_and_frozen_layers_are_no_news() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    optimizer = AdaFisher(model, TCov=1)
    model["frozen"](model["used"](torch.randn(4, 3))).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_compiled_on_an_unsampled_step_with_the_switch_of_the_warning() -> None:
    """A resumed run: the first call of the compiled model finds no hooks, and Dynamo must look again later."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer, before = AdaFisher(model, TCov=3), AdaFisher(copy.deepcopy(model), TCov=3)
        before.model(torch.randn(6, 4)).square().mean().backward()
        before.step()
        optimizer.load_state_dict(
            {**before.state_dict(), **{key: optimizer.state_dict()[key] for key in ("H_D", "S_D")}}
        )
        compiled = torch.compile(model, backend="eager")
        for _ in range(4):
            optimizer.zero_grad()
            compiled(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    torch._dynamo.reset()
    assert not any(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)


def test_an_older_pytorch_breaks_the_graph_at_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph cannot hold the hook, the factors are those of the eager model all the same."""
    if torch_compiled.FOLLOWS:
        monkeypatch.setattr(torch_compiled, "FOLLOWS", False)
        monkeypatch.setattr(torch_layers.Tap, "catch", torch.compiler.disable(torch_layers.Tap.catch))
    made = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = AdaFisher(model, TCov=3)
        run: Any = torch.compile(model, backend="eager") if compiled else model
        for _ in range(7):
            optimizer.zero_grad()
            run(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        made.append([*model.parameters(), *(F for pair in optimizer.factors().values() for F in pair)])
    torch._dynamo.reset()
    for one, other in zip(*made):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums in another order


def test_a_parametrized_weight_is_left_alone() -> None:
    """Looking at it would run a power iteration."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    before = layer.parametrizations.weight[0]._u.clone()
    with pytest.warns(UserWarning, match="parametrizations.weight.original"):
        optimizer = AdaFisher(nn.Sequential(layer))
    assert torch.equal(layer.parametrizations.weight[0]._u, before)
    assert optimizer.factors() == {}
