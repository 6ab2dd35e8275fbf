"""Parameters that the PyTorch optimizer refuses, and some that look like them and are welcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    loss_of,
    mlp,
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


def without_memory(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


class Wrapper(Tensor):
    """A tensor that has no memory itself, as quantised and distributed ones."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(torch.ones(args[0].shape))
        raise NotImplementedError(str(func))


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return nn.Parameter(x.clone())


UNUSABLE: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "sparse": (lambda x: x.to_sparse(), ("must be dense", "torch.sparse_coo", ".to_dense()")),
    "sparse rows": (lambda x: x.to_sparse_csr(), ("must be dense", "torch.sparse_csr", ".to_dense()")),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), ("must be dense", "nested", ".to_padded_tensor()")),
    "complex": (lambda x: x.cfloat(), ("real floating-point", "complex64", "convert it")),
    "lazy": (lambda x: nn.UninitializedParameter(), ("must be initialised", "lazy", "one forward pass")),
    "meta": (lambda x: x.to("meta"), ("in memory", "meta")),
    "without memory": (lambda x: without_memory(x.clone()), ("must have memory of its own", "without memory")),
    "wrapper": (lambda x: Wrapper(x), ("must have memory of its own", "Wrapper", "stands for")),
    "inference": (inference, ("must be writable", "inference tensor", "outside of torch.inference_mode()")),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), ("real floating-point", "float8_e4m3fn", "convert it")),
}


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state)")
@pytest.mark.parametrize("name", UNUSABLE)
def test_parameters_that_are_refused(name: str) -> None:
    """When the optimizer is made, or by its first step, with nothing changed."""
    make, words = UNUSABLE[name]
    model = mlp("cpu")
    odd = make(torch.ones(2, 3))
    model.register_parameter("odd", odd if isinstance(odd, nn.Parameter) else nn.Parameter(odd))
    before = {k: p.detach().clone() for k, p in model.named_parameters() if k != "odd"}
    with pytest.raises(CafinError) as caught:
        optimizer = AdaFisher(model)
        loss_of(model, rows("cpu", 1)[0]).backward()
        model.odd.grad = torch.ones(2, 3).to(model.odd.dtype)
        optimizer.step()
    assert not [word for word in ("odd", *words) if word not in str(caught.value)], caught.value
    assert all(torch.equal(p, before[k]) for k, p in model.named_parameters() if k != "odd")


def test_tensors_at_no_multiple_of_their_size_are_refused() -> None:
    """No kernel could read them. Gradients are looked at where they are not all like those of the step before."""
    odd = torch.frombuffer(bytearray(4 * 15 + 1), dtype=torch.float32, offset=1).view(3, 5)
    words = "must lie at multiples of its elements' size", "pass a copy"
    for steps in (0, 1):
        optimizer = AdaFisher(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
        for _ in range(steps):
            loss_of(optimizer.model[0], rows("cpu", 1)[0]).backward()
            optimizer.step()
        optimizer.model[0].weight.grad, optimizer.model[0].bias.grad = odd, None
        with refused(optimizer, "step: `gradient of 0.weight`", *words):
            optimizer.step()
    optimizer.model[0].weight.grad = None
    optimizer.model[0].weight.data = odd
    with refused(optimizer, "step: `0.weight`", *words):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1])
def test_sparse_gradients_are_refused_on_any_step(steps: int) -> None:
    """Later ones are not looked at as closely as those of the first."""
    optimizer = AdaFisher(nn.Linear(5, 3))
    w = optimizer.model.weight
    for _ in range(steps):
        w.grad = torch.ones(3, 5)
        optimizer.step()
    w.grad = torch.ones(3, 5).to_sparse()
    with refused(optimizer, "step: `gradient of weight` must be dense", ".to_dense()"):
        optimizer.step()


def test_quantised_and_integer_parameters_may_be_frozen() -> None:
    model = mlp("cpu")
    for name, frozen in (("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)), ("i", torch.arange(3))):
        model.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    run(AdaFisher(model, TCov=1), rows("cpu", 2))
    assert torch.equal(model.i, torch.arange(3))


@pytest.mark.parametrize("kind", [nn.LazyConv1d, nn.LazyConv2d, nn.LazyLinear, nn.LazyBatchNorm2d])
def test_lazy_modules_are_refused_until_they_have_run(kind: Any) -> None:
    layer = kind(*[4, 1][: 2 if "Conv" in kind.__name__ else 1] if kind is not nn.LazyBatchNorm2d else [])
    model = nn.Sequential(layer)
    with pytest.raises(CafinError, match=r"`model \(0.weight\)` must be initialised"):
        AdaFisher(model)
    x = torch.ones(*((2, 3, 5, 5) if "2d" in kind.__name__ else (2, 3, 5)))
    model(x)
    optimizer = AdaFisher(model, TCov=1)
    model(x).square().sum().backward()
    optimizer.step()
    assert len(optimizer.factors()) == 1


@pytest.mark.parametrize("name", ["capturable", "error_if_nonfinite"])
def test_flags_are_true_or_false(name: str) -> None:
    for wrong in ("no", None, [False], torch.ones(2)):
        with pytest.raises(CafinError, match=f"AdaFisher: `{name}` must be True or False, got"):
            AdaFisher(nn.Linear(2, 2), **{name: wrong})


@pytest.mark.parametrize(("name", "wrong"), [("lr", -1.0), ("beta", 1.0), ("Lambda", 0.0), ("weight_decay", "0.1")])
def test_a_group_with_a_bad_scalar_is_refused_when_it_is_added(name: str, wrong: Any) -> None:
    optimizer = AdaFisher(nn.Linear(2, 2))
    with pytest.raises(CafinError, match=f"add_param_group: `{name}` must"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: wrong})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: 0.5})


def _bad_scalar(optimizer: AdaFisher) -> None:
    optimizer.param_groups[0]["lr"] = -1.0


def _bad_gradient(optimizer: AdaFisher) -> None:
    weight = optimizer.model[2].weight
    weight.grad = weight.grad.to_sparse()


def _bad_momentum(optimizer: AdaFisher) -> None:
    optimizer.state[optimizer.model[2].bias] = {"step": 1, "exp_avg": torch.ones(99)}


def _nan(optimizer: AdaFisher) -> None:
    optimizer.error_if_nonfinite = True
    optimizer.model[2].bias.grad[0] = torch.nan


@pytest.mark.parametrize("spoil", [_bad_scalar, _bad_gradient, _bad_momentum, _nan])
def test_a_refused_step_makes_no_state(spoil: Callable[[AdaFisher], None]) -> None:
    """Not even empty entries, which a checkpoint would hold."""
    optimizer = AdaFisher(mlp("cpu"))
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    spoil(optimizer)
    before = dict(optimizer.state)
    with pytest.raises(CafinError, match="step: "):
        optimizer.step()
    assert dict(optimizer.state) == before


class Scaler:
    """Tells a scale, as a `GradScaler` does."""

    def __init__(self, scale: Any) -> None:
        self.get_scale = lambda: scale


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "2", None, torch.ones(2)], ids=str)
@pytest.mark.parametrize("unscaled", [False, True], ids=["by the step", "before"])
def test_scales_are_numbers_above_zero(scale: Any, unscaled: bool) -> None:
    optimizer = AdaFisher(mlp("cpu"), TCov=1, grad_scaler=Scaler(scale))
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    optimizer.found_inf = torch.zeros(())  # as `GradScaler.step` tells it
    if not unscaled and scale is not None:
        optimizer.grad_scale = scale
    with refused(optimizer, "step: `scale of the GradScaler` must be"):
        optimizer.step()
