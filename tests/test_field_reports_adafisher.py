"""What does not work in the public AdaFisher (its PyTorch implementation, measured on a CPU), each as a test that it
does here. Each docstring says what happens there.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    Tokens,
    assert_equal_trees,
    assert_moments,
    assert_same,
    everything,
    hook_count,
    images,
    loss_of,
    mlp,
    near,
    net,
    record,
    rows,
    run,
    split_groups,
    start,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402


def assert_trains(model: nn.Module, shape: tuple[int, ...], device: str) -> None:
    """All layers get the moments of their own inputs and output gradients, and all parameters move."""
    model, optimizer, seen = start(model, device)
    assert set(optimizer.factors()) == {
        name for name, m in model.named_modules() if getattr(m, "weight", None) is not None
    }
    before = everything(optimizer)
    weighted(model(torch.randn(shape, device=device))).backward()
    optimizer.step()
    assert_moments(optimizer, {name: calls for name, calls in seen.items() if name in optimizer.factors()})
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


# ---- Models ----


def test_a_parameter_that_no_layer_owns_shifts_nothing(device: str) -> None:
    """`cls` or `pos`: the last layers are never updated. Here they are, with factors of their own; parameters without a
    layer take F = 1, and one warning names them."""
    model = Tokens().to(device)
    seen = record(model)
    with pytest.warns(UserWarning, match=r"AdaFisher: no factors \(F = 1\) for cls, scale$") as caught:
        optimizer = AdaFisher(model, lr=0.1, averaging=RAW)
    assert [w.filename for w in caught] == [__file__]
    before = everything(optimizer)
    run(optimizer, rows(device, 1))
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
    for p, name in ((model.cls, "cls"), (model.scale, "scale")):
        near(p, before[name] - 0.1 * p.grad, name)
    assert set(seen) == set(optimizer.factors()) == {"fc", "norm", "head"}
    assert_moments(optimizer, seen)


def test_a_frozen_first_layer_shifts_nothing(device: str) -> None:
    """The second Linear is never updated. Here a frozen layer, and an unused one, neither move nor shift anybody
    else's factors."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model.add_module("unused", nn.Linear(3, 3))
    body = nn.Sequential(*list(model)[:5])
    model[0].requires_grad_(False)
    model, optimizer, seen = start(model, device)
    before = everything(optimizer)
    weighted(body(torch.randn(4, 5, device=device))).backward()
    optimizer.step()
    assert_moments(optimizer, {name: seen[name] for name in ("2", "4")})
    after = everything(optimizer)
    moved = {name for name, _ in model.named_parameters() if not torch.equal(before[name], after[name])}
    assert moved == {"2.weight", "2.bias", "4.weight", "4.bias"}
    assert all(torch.equal(f, torch.ones_like(f)) for pair in (optimizer.factors()["unused"],) for f in pair)


def test_relu_in_place(device: str) -> None:
    """RuntimeError, as its full backward hooks make views."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.ReLU(inplace=True))
    assert_trains(model, (4, 5), device)


def test_norm_layers_without_parameters(device: str, recwarn: pytest.WarningsRecorder) -> None:
    """`LayerNorm(elementwise_affine=False)`: AttributeError. Here it and BatchNorm(affine=False) are passed over, in
    silence."""
    norms = nn.BatchNorm2d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False)
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), norms[0], nn.ReLU(inplace=True), flat, norms[1], nn.Linear(4, 2)
    )
    assert_trains(model, (5, 3, 6, 6), device)
    assert not recwarn.list


def test_layer_norm_without_bias(device: str) -> None:
    """`LayerNorm(bias=False)`: shape error."""
    assert_trains(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, bias=False)), (4, 3, 5), device)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [3, (4, 2)], ids=["odd", "even"])
def test_padding_by_name(kernel: Any, device: str) -> None:
    """`Conv2d(padding="same")`: TypeError. Even kernels pad unevenly."""
    model = nn.Sequential(nn.Conv2d(2, 3, kernel, padding="same"), nn.Conv2d(3, 2, kernel, padding="valid"))
    assert_trains(model, (2, 2, 8, 7), device)


@pytest.mark.parametrize("padding", [2, "same"])
def test_dilation_counts(padding: Any, device: str) -> None:
    """Dilation is ignored, so that the moments are those of other pixels."""
    assert_trains(nn.Sequential(nn.Conv2d(2, 3, 3, dilation=(2, 3), padding=padding)), (2, 2, 9, 8), device)


def test_a_module_that_is_called_twice_counts_twice(device: str) -> None:
    """Only the last call counts."""
    layer = nn.Linear(5, 5)
    model, optimizer, seen = start(nn.Sequential(layer, nn.Tanh(), layer), device)
    weighted(model(torch.randn(4, 5, device=device))).backward()
    optimizer.step()
    assert len(seen["0"]) == 2
    assert_moments(optimizer, seen)


# ---- Forward and backward ----


def test_forwards_in_eval_or_without_gradient_do_not_count(device: str) -> None:
    """A forward in `eval()` with gradients on still updates the factors."""
    model, optimizer, seen = start(net(device), device)
    x, y = images(device, 4, 4)
    model.norm.eval()  # its running statistics would see the other batch
    weighted(model(x)).backward()
    mine = {name: list(calls) for name, calls in seen.items()}
    grads = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        model(y)
    model.eval()
    weighted(model(y)).backward()
    model.train()
    model(y)  # and one without a backward
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    optimizer.step()
    assert_moments(optimizer, mine)


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_one_nan_does_not_stay_in_a_factor(averaging: str, device: str) -> None:
    """One NaN poisons a factor for good. Here the layers that saw it keep their factors on that step, and go on with
    the next."""
    optimizer = run(AdaFisher(mlp(device), TCov=1, averaging=averaging), rows(device, 1))
    before = {name: [f.clone() for f in pair] for name, pair in optimizer.factors().items()}
    spoilt = rows(device, 2)[1]
    spoilt[3, 2] = torch.nan
    loss_of(optimizer.model, spoilt).backward()
    optimizer.model.zero_grad()  # the script throws the gradients away, but steps
    optimizer.step()
    for name, pair in optimizer.factors().items():
        assert all(map(torch.equal, pair, before[name])), name
    run(optimizer, rows(device, 1))
    for name, pair in optimizer.factors().items():
        assert all(bool(f.isfinite().all()) for f in pair), name
        assert not any(map(torch.equal, pair, before[name])), name


def checkpointed(device: str, use_reentrant: bool | None) -> AdaFisher:
    torch.manual_seed(4)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(5, 6), block, nn.Linear(6, 3)).to(device)
    optimizer = AdaFisher(model, TCov=2)
    for x in rows(device, 3):
        x = model[0](x)
        y = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        optimizer.zero_grad()
        model[2](y).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_counts_once(use_reentrant: bool, device: str) -> None:
    """The recomputed forward counts again."""
    assert_same(checkpointed(device, use_reentrant), checkpointed(device, None), TOLERANCE)


def test_autocast_keeps_the_state_in_float32(device: str) -> None:
    """The factors become bfloat16."""
    optimizer = AdaFisher(net(device), TCov=1)
    for x in images(device, 4, 4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(optimizer.model, x)
        loss.backward()
        optimizer.step()
    assert {f.dtype for pair in optimizer.factors().values() for f in pair} == {torch.float32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


# ---- The optimizer's interface ----


def test_closure_is_run_once_and_its_loss_returned(device: str) -> None:
    """NotImplementedError."""
    x, y = rows(device, 2)
    optimizer = AdaFisher(mlp(device), TCov=1)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(optimizer.model, (x, y)[len(losses)]))
        losses[-1].backward()
        return losses[-1]

    for count in (1, 2):
        assert optimizer.step(closure) is losses[-1]
        assert len(losses) == count
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1), [x, y]))


def test_groups_share_the_layers_and_have_their_own_scalars(device: str) -> None:
    """Two parameter groups restart the walk over the layers, so the second has the factors of the first."""
    split = run(split_groups(AdaFisher(mlp(device), lr=1e-3, weight_decay=0.1, TCov=2)), rows(device, 1))
    matrices = everything(run(AdaFisher(mlp(device), lr=1e-3, weight_decay=0.1), rows(device, 1)))
    vectors = everything(run(AdaFisher(mlp(device), lr=5e-4), rows(device, 1)))
    for name, p in split.model.named_parameters():
        assert torch.equal(p, (matrices if p.dim() > 1 else vectors)[name]), name


def test_a_state_before_the_first_step(device: str) -> None:
    """`state_dict()` before the first step: KeyError."""
    state = AdaFisher(mlp(device)).state_dict()
    assert state["state"] == {} and state["steps"] == 0
    assert all(torch.equal(f, torch.ones_like(f)) for key in ("H_D", "S_D") for f in state[key])
    optimizer = AdaFisher(mlp(device))
    optimizer.load_state_dict(state)
    assert_same(run(optimizer, rows(device, 3)), run(AdaFisher(mlp(device)), rows(device, 3)))


def test_the_callers_state_dict_stays_as_it_is(device: str) -> None:
    """`load_state_dict` removes keys from the caller's dict. Here it stays as it is, while it is loaded, and while the
    optimizer trains on."""
    state = copy.deepcopy(run(AdaFisher(mlp(device)), rows(device, 4)).state_dict())
    before = copy.deepcopy(state)
    optimizer = AdaFisher(mlp(device))
    optimizer.load_state_dict(state)
    assert_equal_trees(state, before)
    run(optimizer, rows(device, 4))
    assert_equal_trees(state, before)


COPIES: dict[str, Callable[[AdaFisher], AdaFisher]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy with the model": lambda optimizer: copy.deepcopy((optimizer.model, optimizer))[1],
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "pickle with the model": lambda optimizer: pickle.loads(pickle.dumps((optimizer.model, optimizer)))[1],
}


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize("cut", [0, 3, 4])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_keeps_the_factors_and_goes_on_bit_for_bit(
    name: str, cut: int, kind: type[AdaFisher], device: str
) -> None:
    """`deepcopy` and `pickle` silently lose the factors."""
    batches = rows(device, 7)
    original = run(kind(mlp(device), TCov=3, weight_decay=0.1), batches[:cut])
    twin = COPIES[name](original)
    assert type(twin) is kind and twin.model is not original.model
    owned = {id(p) for p in twin.model.parameters()}
    assert {id(p) for p in twin.param_groups[0]["params"]} == owned
    assert_same(twin, original)
    before = everything(original)
    run(twin, batches[cut:])
    assert_same(original, before)
    assert_same(run(original, batches[cut:]), twin)
    assert hook_count(twin.model) == hook_count(original.model)


# ---- Several ranks: the public one sends two all-reduces for each layer on every step; see rank_checks.py ----


def test_one_rank_communicates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an all-reduce, with `dist=True` either; and trains as without a process group."""
    calls: list[str] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    try:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor"):
            monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: calls.append(name))
        alone = run(AdaFisher(mlp("cpu"), TCov=1, dist=True), rows("cpu", 2))
    finally:
        torch.distributed.destroy_process_group()
    assert calls == []
    assert_same(alone, run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2)))
