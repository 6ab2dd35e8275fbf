"""Raw moments of every PyTorch layer against the formulas in float64; layers that share, freeze, repeat."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_cases import LAYERS, Conv1D, drawn  # noqa: E402
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

from cafin_cupy import Averaging, CafinError, Embedding  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


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
    x = drawn(model, shape, device)
    (name, *_) = inspect.signature(model.forward).parameters
    loss(model(**{name: x})).backward()
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
    assert set(optimizer.factors()) == {"1"}
    assert_first_step(model[0].weight, old, *optimizer.factors()["1"], 0.1)
    assert not recwarn.list


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_is_read_by_shapes_alone(padding: int | None) -> None:
    """Without looking at a number, so that the host waits for nothing, and a CUDA graph may capture it: tensors without
    memory have none to look at."""
    layer = Embedding(torch.empty(7, 4, device="meta"), padding_idx=padding)
    h, s = torch.empty(2, 5, dtype=torch.int64, device="meta"), torch.empty(2, 5, 4, device="meta")
    counts, read = layer.read(h, s)
    assert counts.shape == (1, 7) and counts.dtype == torch.float32 and read.shape == s.shape


def test_embeddings_that_share_their_table(device: str) -> None:
    """Those of an encoder and a decoder: counts and sums of both."""
    a, b = nn.Embedding(6, 3), nn.Embedding(6, 3, padding_idx=1)
    b.weight = a.weight
    model, optimizer, seen = start(nn.ModuleDict({"a": a, "b": b}), device)
    first, second = torch.tensor([0, 1, 5], device=device), torch.tensor([1, 5, 5], device=device)
    (weighted(model["a"](first)) + weighted(model["b"](second))).backward()
    old = a.weight.detach().clone()
    optimizer.step()
    (_, h, s), (_, k, t) = *seen["a"], *seen["b"]
    H, S = optimizer.factors()["a"]
    near(H, nn.functional.one_hot(torch.cat([h, k[1:]]), 6).double().mean(0))
    near(S, torch.cat([s, t[1:]]).square().mean(0))
    assert all(x is y for x, y in zip(optimizer.factors()["b"], (H, S)))
    assert not torch.equal(a.weight, old)


def test_transposed_weights_have_their_rows_on_the_input(device: str) -> None:
    """Of the Conv1D of transformers and of embeddings, in the first step."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(7, 4), Conv1D(3, 4)).to(device)
    optimizer = AdaFisher(model, lr=0.1, averaging=Averaging(0.5, 0.5, "before"))
    weighted(model(torch.tensor([1, 2, 2, 5], device=device))).backward()
    old = everything(optimizer)
    optimizer.step()
    (H, S), (K, T) = optimizer.factors()["0"], optimizer.factors()["1"]
    assert_first_step(model[0].weight, old["0.weight"], S, H, 0.1)
    assert_first_step(model[1].weight, old["1.weight"], T, K[:4], 0.1)
    assert_first_step(model[1].bias, old["1.bias"], K[4:], T, 0.1)


def test_gradients_divided_by_counts_have_no_factors(device: str) -> None:
    """They are no sums over positions."""
    with pytest.warns(UserWarning, match="no factors .F = 1. for 0.weight$"):
        optimizer = AdaFisher(nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, 3)).to(device))
    assert set(optimizer.factors()) == {"1"}


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
