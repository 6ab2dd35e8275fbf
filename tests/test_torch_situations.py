"""Every newer layer type in the situations that the first ones are known to bear: shared and repeated modules, unused
and frozen ones, recomputed forwards, accumulation under DDP, computed weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import LAYERS, drawn  # noqa: E402
from torch_helpers import everything, near, torch_device  # noqa: E402, F401

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

BATCH = 6


class Attention(nn.Module):
    """Self-attention of one argument and one result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def of_table(name: str) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    make, shape = LAYERS[name]
    return make, (BATCH, *shape[1:])


NAMES = (
    *("conv1d of transformers", "embedding, padding", "conv 1d, groups, stride, dilation", "conv 3d"),
    *("transposed conv 1d", "transposed conv 2d, groups, padding", "transposed conv 3d", "batch norm 1d"),
    *("batch norm 1d, sequence", "batch norm 3d", "sync batch norm", "group norm", "instance norm 1d"),
    *("instance norm 2d", "instance norm 3d", "rms norm, sequence"),
)
TYPES = {**{name: of_table(name) for name in NAMES}, "attention": (Attention, (BATCH, 5, 8))}
every_type = pytest.mark.parametrize("name", TYPES)


def made(name: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, its input, and what the loss multiplies its output by: its output gradient."""
    make, shape = TYPES[name]
    torch.manual_seed(0)
    layer = make().to(device)
    x = drawn(layer, shape, device)
    with torch.no_grad():
        out = layer(x)
    return layer, x, torch.randn_like(out)


def moments(optimizer: AdaFisher) -> dict[str, tuple[Tensor, ...]]:
    optimizer.step()
    return {name: tuple(F.clone() for F in pair) for name, pair in optimizer.factors().items()}


def at_once(name: str, device: str) -> dict[str, tuple[Tensor, ...]]:
    """Of one call for the whole batch."""
    layer, x, s = made(name, device)
    optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    (layer(x) * s).sum().backward()
    return moments(optimizer)


def assert_equal(got: dict[str, tuple[Tensor, ...]], wanted: dict[str, tuple[Tensor, ...]], within: str = "") -> None:
    for name, pair in wanted.items():
        full = f"{within}.{name}".strip(".")
        for one, other in zip(got[full], pair):
            near(one, other, full, 1e-5)  # as everywhere: float32 sums in another order
            assert not torch.equal(one, torch.ones_like(one))


@every_type
def test_a_module_called_several_times(name: str, device: str) -> None:
    layer, x, s = made(name, device)
    optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    sum((layer(part) * grad).sum() for part, grad in zip(x.chunk(3), s.chunk(3))).backward()
    assert_equal(moments(optimizer), at_once(name, device))


@every_type
def test_modules_that_share_all_parameters(name: str, device: str) -> None:
    layer, x, s = made(name, device)
    other = TYPES[name][0]().to(device)
    for mine, theirs in zip(layer.modules(), other.modules()):
        theirs._parameters.update(mine._parameters)
    model = nn.ModuleDict({"a": layer, "b": other})
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    (a, b), (first, second) = x.chunk(2), s.chunk(2)
    ((model["a"](a) * first).sum() + (model["b"](b) * second).sum()).backward()
    wanted, got = at_once(name, device), moments(optimizer)
    assert_equal(got, wanted, "a")
    assert_equal(got, wanted, "b")


@every_type
def test_unused_and_frozen_modules(name: str, device: str) -> None:
    """They shift nobody's factors, keep their own, and are no news; a base under adapters is frozen so."""
    layer, x, s = made(name, device)
    unused, frozen = (TYPES[name][0]().to(device) for _ in range(2))
    frozen.requires_grad_(False)
    model = nn.ModuleDict({"unused": unused, "frozen": frozen, "used": layer})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = AdaFisher(model, TCov=1, averaging=RAW)
        before = everything(optimizer)
        ((model["frozen"](x) + model["used"](x)) * s).sum().backward()
        got = moments(optimizer)
    assert_equal(got, at_once(name, device), "used")
    after = everything(optimizer)
    for key, value in before.items():
        if "used" in key.replace("unused", "") or key == "steps":
            continue
        assert torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key], key


@every_type
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_counts_once(name: str, use_reentrant: bool, device: str) -> None:
    layer, x, s = made(name, device)
    optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    trains = torch.zeros(1, device=device, requires_grad=True)  # the old kind wants an input that does
    out = checkpoint(lambda x, _: layer(x), x, trains, use_reentrant=use_reentrant)
    (out * s).sum().backward()
    assert_equal(moments(optimizer), at_once(name, device))


@every_type
def test_micro_batches_equal_the_full_batch(name: str, device: str) -> None:
    layer, x, s = made(name, device)
    optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    for part, grad in zip(x.chunk(3), s.chunk(3)):
        (layer(part) * grad).sum().backward()
    assert_equal(moments(optimizer), at_once(name, device))


@pytest.fixture(name="process_group")
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@every_type
def test_accumulation_without_synchronisation(name: str, process_group: None) -> None:
    """DDP of one rank, whose `no_sync` keeps all but the last backward from reducing; the optimizer has the module."""
    if name == "sync batch norm":
        pytest.skip("it reduces on GPUs alone")
    layer, x, s = made(name, "cpu")
    model = nn.parallel.DistributedDataParallel(layer)
    optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    *first, last = zip(x.chunk(3), s.chunk(3))
    with model.no_sync():
        for part, grad in first:
            (model(part) * grad).sum().backward()
    part, grad = last
    (model(part) * grad).sum().backward()
    assert_equal(moments(optimizer), at_once(name, "cpu"))


PARAMETRIZED = [
    "conv 3d",
    "conv 1d, groups, stride, dilation",
    "transposed conv 2d, groups, padding",
    "embedding, padding",
]


@pytest.mark.parametrize("parametrization", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("name", [*PARAMETRIZED, "conv1d of transformers"])
def test_computed_weights_have_no_factors(name: str, parametrization: str, device: str) -> None:
    """Nor are they looked at, which would change the state of some; what they are computed of is updated."""
    layer, x, s = made(name, device)
    getattr(nn.utils.parametrizations, parametrization)(layer)
    state = {key: value.clone() for key, value in layer.named_buffers()}
    with pytest.warns(UserWarning, match="no factors .*parametrizations.weight.original"):
        optimizer = AdaFisher(layer, TCov=1)
    assert all(torch.equal(value, state[key]) for key, value in layer.named_buffers())
    assert optimizer.factors() == {}
    (layer(x) * s).sum().backward()
    before = everything(optimizer)
    optimizer.step()
    for key, p in layer.named_parameters():
        assert not torch.equal(p, before[key]), key


def test_an_attention_with_a_computed_matrix(device: str) -> None:
    layer, x, s = made("attention", device)
    nn.utils.parametrizations.weight_norm(layer.inner, "in_proj_weight")
    with pytest.warns(UserWarning, match="no factors"):
        optimizer = AdaFisher(layer, TCov=1, averaging=RAW)
    (layer(x) * s).sum().backward()
    got = moments(optimizer)
    assert set(got) == {"inner.out_proj"}
    assert not any(torch.equal(F, torch.ones_like(F)) for F in got["inner.out_proj"])


class LoRA(nn.Module):
    """A low-rank adapter beside a frozen base."""

    def __init__(self, base: Any, width: int, made: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Linear(width, 2, bias=False), nn.Linear(2, made, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


def test_adapters_on_frozen_bases(device: str) -> None:
    """The adapters have their factors, the bases cost no momentum."""
    torch.manual_seed(0)
    base = LAYERS["conv1d of transformers"][0]()
    tokens = nn.Embedding(7, 5).requires_grad_(False)
    model = nn.Sequential(tokens, LoRA(base, 5, 3), nn.RMSNorm(3)).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = AdaFisher(model, TCov=1, averaging=RAW)
        x = torch.randint(7, (4, 6), device=device)
        (model(x) * torch.randn(4, 6, 3, device=device)).sum().backward()
        got = moments(optimizer)
    for name in ("0", "1.base"):
        assert all(torch.equal(F, torch.ones_like(F)) for F in got[name])
    read = tokens(x).double().flatten(0, 1)
    near(got["1.A"][0], read.square().mean(0))
    assert not torch.equal(got["1.B"][1], torch.ones_like(got["1.B"][1]))
    assert not torch.equal(got["2"][1], torch.ones_like(got["2"][1]))
    held = {name for name, p in model.named_parameters() if "exp_avg" in optimizer.state.get(p, {})}
    assert held == {"1.A.weight", "1.B.weight", "2.weight"}


def test_many_gradients_at_once_are_left_alone() -> None:
    """Jacobians by `vectorize`: their batched gradients are none of the loss."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    functional = torch.autograd.functional
    wanted = functional.jacobian(lambda z: model(z).sum(0), x)
    optimizer.zero_grad()
    near(functional.jacobian(lambda z: model(z).sum(0), x, vectorize=True), wanted)
    functional.hessian(lambda z: model(z).square().sum(), x, vectorize=True)
    optimizer.zero_grad()  # of its first derivative, which is no batch
    y = model(x).sum(0)
    torch.autograd.grad(y, list(model.parameters()), torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda v: torch.autograd.grad(y, x_first(model), v, retain_graph=True)[0])(torch.eye(2))
    assert not optimizer._factors.pending
    model(x).sum().backward()
    assert optimizer._factors.pending


def x_first(model: nn.Sequential) -> Tensor:
    weight: Tensor = model[0].weight
    return weight
