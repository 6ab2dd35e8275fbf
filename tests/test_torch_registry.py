"""Layers of one's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_helpers import near, torch_device, weighted  # noqa: E402, F401

from cafin_cupy import CafinTypeError, CafinValueError, Linear, RMSNorm, TransposedLinear  # noqa: E402
from cafin_cupy.adapters import torch_kinds  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, register_layer, unregister_layer  # noqa: E402


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(torch_kinds, "_registered", {})
    yield


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def test_a_norm_of_ones_own_equals_torchs(device: str) -> None:
    register_layer(LlamaRMSNorm, lambda module, name: RMSNorm(module.weight, name=name))
    x = torch.randn(4, 5, 6, device=device)
    factors = []
    for norm in (LlamaRMSNorm(6), nn.RMSNorm(6, eps=1e-6)):
        model = nn.Sequential(norm).to(device)
        optimizer = AdaFisher(model, TCov=1, averaging=RAW)
        weighted(model(x)).backward()
        optimizer.step()
        factors.append(optimizer.factors()["0"])
    for one, other in zip(*factors):
        near(one, other)


class Gated(nn.Module):
    """Returns a pair, of which the layer's output is the second, and takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.zeros(3))

    def forward(self, gate: Tensor, *, states: Tensor) -> tuple[Tensor, Tensor]:
        out = states.transpose(0, 1) @ self.matrix + self.shift
        return gate, out.transpose(0, 1)


def gated(**options: Any) -> None:
    register_layer(
        Gated,
        lambda module, name: TransposedLinear(module.matrix, module.shift, name=name),
        take=lambda module, args, kwargs, output: (kwargs["states"], output[1]),
        **options,
    )


def test_input_and_output_are_taken_as_told(device: str) -> None:
    seen = []
    gated(arrange=lambda module, h, s: (seen.append(module) or h.flatten(0, 1), s.flatten(0, 1)))
    model = Gated().to(device)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    h, scale = torch.randn(4, 2, 5, device=device), torch.randn(4, 2, 3, device=device)
    (model(torch.ones(1, device=device), states=h)[1] * scale).sum().backward()
    optimizer.step()
    H, S = optimizer.factors()[""]
    near(H, torch.cat([h.double().flatten(0, 1).square().mean(0), torch.ones(1, device=device)]))
    near(S, scale.double().flatten(0, 1).square().mean(0))
    assert seen == [model]


def test_the_script_may_overwrite_the_input(device: str) -> None:
    """Nothing is known of what autograd keeps of it, so we keep a copy."""

    class Copying(LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    register_layer(Copying, lambda module, name: RMSNorm(module.weight, name=name))
    model = Copying(6).to(device)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    x = torch.randn(4, 6, device=device)
    read = x.double().sum(0).square().sum() / 16
    loss = weighted(model(x))
    x.zero_()
    loss.backward()
    optimizer.step()
    near(optimizer.factors()[""][0][0], read)


class Special(nn.Linear):
    pass


class VerySpecial(Special):
    pass


def test_the_nearest_type_wins() -> None:
    kinds = {}

    def describe(label: str) -> Any:
        def described(module: Any, name: str) -> Linear:
            kinds[name] = label
            return Linear(module.weight, module.bias, name=name)

        return described

    register_layer(Special, describe("Special"))
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": Special(2, 2), "c": VerySpecial(2, 2)})
    assert set(AdaFisher(model).factors()) == {"a", "b", "c"}
    assert kinds == {"b": "Special", "c": "Special"}
    register_layer(VerySpecial, describe("VerySpecial"))
    register_layer(Special, describe("again"))
    AdaFisher(model)
    assert kinds == {"b": "again", "c": "VerySpecial"}


def test_what_was_registered_can_be_forgotten() -> None:
    """Then PyTorch's own description holds again; optimizers that exist keep theirs."""
    model = nn.Sequential(nn.Linear(2, 2))
    register_layer(nn.Linear, lambda module, name: Linear(module.weight, name="mine"))
    with pytest.warns(UserWarning, match="no factors .F = 1. for 0.bias$"):
        optimizer = AdaFisher(model)
    unregister_layer(nn.Linear)
    assert optimizer.factors().keys() == {"mine"}
    assert AdaFisher(model).factors().keys() == {"0"}
    for unknown, kind, words in (
        (nn.Linear, CafinValueError, "be a type that was registered, got Linear"),
        (VerySpecial, CafinValueError, "be a type that was registered, got VerySpecial"),
        (dict, CafinTypeError, "be a subclass of torch.nn.Module, got <class 'dict'>"),
    ):
        with pytest.raises(kind, match="unregister_layer: ") as caught:
            unregister_layer(unknown)
        assert words in str(caught.value)


def test_a_module_may_have_no_factors() -> None:
    """As told, or because its weight is no parameter."""
    register_layer(Special, lambda module, name: None)
    with pytest.warns(UserWarning, match="no factors .F = 1. for 0.weight, 0.bias$"):
        assert AdaFisher(nn.Sequential(Special(2, 2), nn.Linear(2, 2))).factors().keys() == {"1"}
    register_layer(Special, lambda module, name: Linear(module.weight * 1.0, name=name))
    with pytest.warns(UserWarning, match="no factors .F = 1. for 0.weight, 0.bias$"):
        assert AdaFisher(nn.Sequential(Special(2, 2), nn.Linear(2, 2))).factors().keys() == {"1"}


def test_a_layer_without_a_name_has_its_modules() -> None:
    register_layer(LlamaRMSNorm, lambda module, name: RMSNorm(module.weight))
    assert AdaFisher(nn.Sequential(LlamaRMSNorm(3))).factors().keys() == {"0"}


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "an object": ((nn.Linear(2, 2), len), {}, "`module_type` must be a subclass of torch.nn.Module"),
    "another class": ((dict, len), {}, "`module_type` must be a subclass of torch.nn.Module, got <class 'dict'>"),
    "no function": ((Special, Linear(torch.ones(2, 2))), {}, "`describe` must be a function, got Linear"),
    "take": ((Special, len), {"take": 3}, "`take` must be a function, got int"),
    "arrange": ((Special, len), {"arrange": "mean"}, "`arrange` must be a function, got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, options, words = REFUSED[name]
    with pytest.raises(CafinTypeError, match="register_layer: ") as caught:
        register_layer(*arguments, **options)
    assert words in str(caught.value)
    assert not torch_kinds._registered


def test_a_description_that_is_none_is_refused() -> None:
    register_layer(Special, lambda module, name: module.weight)
    with pytest.raises(CafinTypeError, match="`describe of Special` must return a layer descriptor or None, got Param"):
        AdaFisher(nn.Sequential(Special(2, 2)))


def test_an_optimizer_keeps_what_it_has_found() -> None:
    """Whatever is registered later: its hooks come and go as before."""
    register_layer(Special, lambda module, name: Linear(module.weight, module.bias, name=name))
    model, x = nn.Sequential(Special(2, 3), nn.Linear(3, 2)), torch.randn(4, 2)
    optimizer = AdaFisher(model, TCov=2)
    unregister_layer(Special)
    register_layer(nn.Linear, lambda module, name: Linear(module.weight, name=name), take=lambda *_: (None, None))
    before = {}
    for step in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        now = {name: H.clone() for name, (H, _) in optimizer.factors().items()}
        if step != 1:
            assert all(not torch.equal(H, before.get(name, torch.ones_like(H))) for name, H in now.items())
        before = now
    with pytest.raises(CafinValueError, match="call register_layer as before"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("given", [None, 3, (1, 2, 3), np.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["take", "arrange"])
def test_what_is_no_pair_is_refused(name: str, given: Any) -> None:
    register_layer(Special, lambda module, name: Linear(module.weight, name=name), **{name: lambda *_: given})  # type: ignore[arg-type]
    model = nn.Sequential(Special(2, 2))
    with pytest.warns(UserWarning, match="no factors"):
        AdaFisher(model, TCov=1)._attach()
        optimizer = AdaFisher(model, TCov=1)
    with pytest.raises(CafinTypeError, match=f"`{name} of Special` must return a pair, got {type(given).__name__}"):
        model(torch.ones(3, 2)).sum().backward()
    assert optimizer.steps == 0


def test_a_descriptor_of_something_else_is_refused() -> None:
    other = nn.Linear(2, 2)
    register_layer(Special, lambda module, name: Linear(other.weight, name=name))
    with pytest.raises(CafinValueError, match="must describe a parameter of the module it is given, got another"):
        AdaFisher(nn.Sequential(Special(2, 2)))
    register_layer(Special, lambda module, name: Linear(module.weight, module.bias, name="mine"))
    with pytest.raises(CafinValueError, match="a name of its own for each layer, got 2 of 'mine'"):
        AdaFisher(nn.Sequential(Special(2, 2), Special(2, 2)))


class Second(nn.Linear):
    """Its input is its second argument."""

    def forward(self, other: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_another_first_argument_is_told_how_to_mend_it() -> None:
    model = Second(4, 3)
    optimizer = AdaFisher(model, TCov=1)
    with pytest.raises(CafinValueError, match="if Second takes or returns something else first, `register_layer` can"):
        model(torch.ones(3), torch.ones(5, 4)).sum().backward()
    optimizer.zero_grad()
    register_layer(
        Second, lambda module, name: Linear(module.weight, module.bias), take=lambda _, a, k, out: (a[1], out)
    )
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    model(torch.ones(3), torch.full((5, 4), 7.0)).sum().backward()
    optimizer.step()
    near(optimizer.factors()[""][0], torch.tensor([49.0, 49, 49, 49, 1]).double())
