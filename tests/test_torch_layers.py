"""Raw moments of every PyTorch layer against the formulas in float64; layers that share, freeze, repeat."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    hook_count,
    images,
    near,
    net,
    record,
    run,
    start,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy import Averaging, CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear, sequence": (lambda: nn.Linear(5, 3), (2, 7, 5)),
    "linear, one row": (lambda: nn.Linear(5, 3), (5,)),
    "linear, long batch": (lambda: nn.Linear(7, 3), (4099, 7)),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 7)),
    "conv, no bias, stride, padding": (lambda: nn.Conv2d(3, 4, (3, 2), (2, 3), (2, 1), bias=False), (2, 3, 9, 11)),
    "conv, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 6)),
    "conv, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 5, 6)),
    "conv, dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=(2, 3), padding=2), (2, 2, 9, 8)),
    "conv, 1x1 stride 2": (lambda: nn.Conv2d(3, 4, 1, stride=2), (2, 3, 7, 7)),
    "conv, rows never met": (lambda: nn.Conv2d(2, 3, 2, stride=3), (2, 2, 7, 7)),
    "conv, same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 6, 5)),
    "conv, same, even kernel": (lambda: nn.Conv2d(2, 3, (4, 2), padding="same"), (2, 2, 6, 5)),
    "conv, same, dilation": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 2)), (2, 2, 9, 8)),
    "conv, valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 6, 5)),
    "conv, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 2, 6, 5)),
    "conv, replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 2, 6, 5)),
    "conv, circular, same": (lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), (2, 2, 6, 5)),
    "conv, unbatched": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "conv, unbatched, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 2)),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6)),
    "layer norm, sequence": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "layer norm, image": (lambda: nn.LayerNorm(6), (2, 3, 4, 6)),
    "layer norm, shape of two": (lambda: nn.LayerNorm((4, 6)), (2, 4, 6)),
    "layer norm, shape of three": (lambda: nn.LayerNorm((3, 4, 6)), (2, 3, 4, 6)),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), (2, 5, 6)),
    "layer norm, unbatched": (lambda: nn.LayerNorm(6), (6,)),
    "layer norm, unbatched, shape of two": (lambda: nn.LayerNorm((4, 6)), (4, 6)),
}


@pytest.mark.parametrize("loss", [weighted, torch.mean], ids=["weighted", "expanded gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_raw_moments(name: str, loss: Callable[[Tensor], Tensor], device: str) -> None:
    """The input needs no gradient here, as a network's first layer's."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, optimizer, seen = start(make(), device)
    with torch.no_grad():
        for p in model.parameters():  # norm layers start with constants
            p.add_(torch.randn_like(p))
    x = torch.randn(shape, device=device)
    loss(model(input=x)).backward()
    optimizer.step()
    assert_moments(optimizer, seen)


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_micro_batches_equal_the_full_batch(micro: int, device: str) -> None:
    batches = images(device, 8, 8, 8)
    split, full = (AdaFisher(net(device, norm=False), TCov=2) for _ in range(2))
    assert_same(run(split, batches, micro), run(full, batches), TOLERANCE)


def test_channels_last_equals_contiguous(device: str) -> None:
    batches = images(device, 4, 4, 4)
    strided = [x.to(memory_format=torch.channels_last) for x in batches]
    last = AdaFisher(net(device).to(memory_format=torch.channels_last), TCov=2)
    assert_same(run(last, strided), run(AdaFisher(net(device), TCov=2), batches), TOLERANCE)


def test_channels_last_moments(device: str) -> None:
    model, optimizer, seen = start(net(device).to(memory_format=torch.channels_last), device)
    for x in images(device, 3, 3):
        optimizer.zero_grad()
        weighted(model(x.to(memory_format=torch.channels_last))).backward()
        optimizer.step()
        assert_moments(optimizer, seen)


def test_batch_sizes_may_change(device: str) -> None:
    """Between steps (a last partial batch) and between the micro-batches of a step."""
    model, optimizer, seen = start(net(device), device)
    for sizes in ((8,), (8,), (3,), (5, 3), (2, 2, 4), (8,)):
        optimizer.zero_grad()
        for x in images(device, *sizes):
            weighted(model(x)).backward()
        optimizer.step()
        assert_moments(optimizer, seen)


def test_sequence_lengths_may_change(device: str) -> None:
    model, optimizer, seen = start(nn.LayerNorm(6), device)
    for lengths in ((5,), (5, 7), (7, 5, 9), (2,), (2, 3)):
        for n in lengths:
            weighted(model(torch.randn(3, n, 6, device=device))).backward()
        optimizer.step()
        assert_moments(optimizer, seen)


def test_empty_batch_adds_nothing(device: str, recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer, seen = start(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), device)
    model(torch.randn(3, 5, device=device)).square().sum().backward()
    optimizer.step()
    assert_moments(optimizer, seen)
    before = factors_of(optimizer)
    optimizer.zero_grad()
    model(torch.randn(0, 5, device=device)).sum().backward()
    optimizer.step()
    assert_equal_factors(optimizer, before)
    assert not recwarn.list


def factors_of(optimizer: AdaFisher) -> dict[str, tuple[Tensor, ...]]:
    return {name: tuple(f.clone() for f in pair) for name, pair in optimizer.factors().items()}


def assert_equal_factors(optimizer: AdaFisher, before: dict[str, tuple[Tensor, ...]]) -> None:
    for name, pair in optimizer.factors().items():
        assert all(torch.equal(x, y) for x, y in zip(pair, before[name])), name


def test_modules_that_share_weight_and_bias_add_up_by_their_own_geometry(device: str) -> None:
    """As the branches of a TridentNet: one weight, several dilations."""
    a, b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 3, padding=2, dilation=2, stride=2)
    b.weight, b.bias = a.weight, a.bias
    model, optimizer, seen = start(nn.ModuleDict({"a": a, "b": b}), device)
    x = torch.randn(2, 2, 8, 7, device=device)
    (weighted(model["a"](x)) + weighted(model["b"](x))).backward()
    optimizer.step()
    seen["a"] += seen.pop("b")
    assert_moments(optimizer, seen)


def assert_first_step(p: Tensor, old: Tensor, H: Tensor, S: Tensor, lr: float) -> None:
    """In a first step the momentum's correction cancels."""
    F = S.double()[:, None] * H.double()[None, :] + 1e-3
    near(p, old.double() - lr * p.grad.double() / F.reshape(p.shape))


def test_weight_shared_by_layers_with_their_own_biases(device: str) -> None:
    """Each module has its own factors; those of the first serve the weight."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    model = nn.Sequential(a, nn.Tanh(), b).to(device)
    seen = record(model)
    optimizer = AdaFisher(model, lr=0.1, averaging=Averaging(0.5, 0.5, "before"))
    weighted(model(torch.randn(6, 4, device=device))).backward()
    old = everything(optimizer)
    optimizer.step()
    assert {name: len(calls) for name, calls in seen.items()} == {"0": 1, "2": 1}
    (H, S), (H_other, S_other) = optimizer.factors()["0"], optimizer.factors()["2"]
    assert not torch.equal(H, H_other)
    assert_first_step(a.weight, old["0.weight"], H[:4], S, 0.1)
    assert_first_step(a.bias, old["0.bias"], H[4:], S, 0.1)
    assert_first_step(b.bias, old["2.bias"], H_other[4:], S_other, 0.1)


def test_weight_tied_to_an_embedding(device: str, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)).to(device)
    model[1].weight = model[0].weight
    optimizer = AdaFisher(model, lr=0.1)
    weighted(model(torch.tensor([1, 2, 2, 5], device=device))).backward()
    old = model[0].weight.detach().clone()
    optimizer.step()
    assert_first_step(model[0].weight, old, *optimizer.factors()["1"], 0.1)
    assert not recwarn.list


def test_frozen_parameters_cost_no_momentum(device: str) -> None:
    model, optimizer, _ = start(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), device)
    model[0].requires_grad_(False)
    weighted(model(torch.randn(4, 5, device=device))).backward()
    optimizer.step()
    assert not any("exp_avg" in optimizer.state.get(p, {}) for p in model[0].parameters())
    model[0].requires_grad_(True)
    weighted(model(torch.randn(4, 5, device=device))).backward()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1, 1, 2, 2]


def test_batch_norm_in_eval_inside_a_model_that_trains(device: str) -> None:
    model, optimizer, seen = start(net(device), device)
    model.norm.eval()
    for x in images(device, 4, 4):
        optimizer.zero_grad()
        weighted(model(x)).backward()
        optimizer.step()
        assert "norm" in seen
        assert_moments(optimizer, seen)


def test_attention_of_torch_itself(device: str) -> None:
    """Its output projection is read without being called: it keeps factors of one, and everything is updated."""
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="no factors .F = 1. for self_attn.in_proj_weight, self_attn.in_proj_bias"):
        model, optimizer, seen = start(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), device)
    before = everything(optimizer)
    weighted(model(torch.randn(3, 5, 8, device=device))).backward()
    optimizer.step()
    assert set(seen) == {"linear1", "linear2", "norm1", "norm2"}
    assert_moments(optimizer, seen)
    after = everything(optimizer)
    assert not [name for name, _ in model.named_parameters() if torch.equal(before[name], after[name])]


def test_computed_weights_have_no_factors(device: str) -> None:
    with pytest.warns(UserWarning, match="no factors"):
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
        model, optimizer, _ = start(nn.Sequential(layer, nn.Linear(4, 3)), device)
    before = everything(optimizer)
    weighted(model(torch.randn(3, 5, device=device))).backward()
    optimizer.step()
    assert set(optimizer.factors()) == {"1"}
    after = everything(optimizer)
    assert not [name for name, _ in model.named_parameters() if torch.equal(before[name], after[name])]


def test_subclasses_of_a_layer_count(device: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2.0

    model, optimizer, seen = start(nn.Sequential(Scaled(5, 3)), device)
    weighted(model(torch.randn(4, 5, device=device))).backward()
    optimizer.step()
    assert_moments(optimizer, seen)


def test_lazy_layers_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CafinError, match=r"`model \(0.weight\)` must be initialised, got a lazy parameter; run one"):
        AdaFisher(model)
    model(torch.randn(2, 3))
    run(AdaFisher(model), [torch.randn(2, 3)])
    assert hook_count(model) == 0
