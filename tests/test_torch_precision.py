"""PyTorch models of 16 bits: momenta, masters and random rounding, on both backends; checkpoints, copies, faults."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from faults import FAULTS, Gate, gate  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_same,
    either_device,  # noqa: F401
    everything,
    kernels_device,  # noqa: F401
    loss_of,
    mlp,
    net,
    refused,
    rows,
    run,
)

from cafin_cupy import CafinError, NonFiniteError, spread  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

HALVES = [torch.bfloat16, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "16-bit momentum": {"momentum_dtype": "own"},
    "masters": {"master_weights": True},
    "random": {"stochastic_rounding": True, "seed": 5},
    "all": {"master_weights": True, "momentum_dtype": "own", "averaging": "paper"},
}


def made(device: str, dtype: torch.dtype, options: dict[str, Any], kind: type[AdaFisher] = AdaFisher) -> AdaFisher:
    given = {key: dtype if value == "own" else value for key, value in options.items()}
    return kind(mlp(device).to(dtype), **{"lr": 1e-4, "TCov": 2, "weight_decay": 0.1, **given})


def batches(device: str, dtype: torch.dtype, count: int) -> list[Any]:
    return [x.to(dtype) for x in rows(device, count)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_state(dtype: torch.dtype, name: str, device: str) -> None:
    """What there is of it, and of which dtypes; without one warning about the backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = run(made(device, dtype, OPTIONS[name]), batches(device, dtype, 3))
    own = "momentum_dtype" in OPTIONS[name]
    for p in optimizer.model.parameters():
        state = optimizer.state[p]
        assert p.dtype is dtype and state["exp_avg"].dtype is (dtype if own else torch.float32)
        assert ("master" in state) is bool(OPTIONS[name].get("master_weights"))
        if "master" in state:
            assert state["master"].dtype is torch.float32 and torch.equal(state["master"].to(dtype), p)
            assert not torch.equal(state["master"], p.float())
    factor = torch.float64 if name == "all" else torch.float32
    assert {F.dtype for pair in optimizer.factors().values() for F in pair} == {factor}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*were not seen on a sampled step")  # there is no forward
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_kernels_follow_the_reference(kind: type[AdaFisher], name: str, gpu: str) -> None:
    """From the same gradients. A GPU fuses multiplications with additions: then a few parameters round to the other
    neighbour."""
    ours, theirs = (made(gpu, torch.bfloat16, {**OPTIONS[name], "backend": b}, kind) for b in ("cuda", "reference"))
    for k in range(3):
        torch.manual_seed(k)
        for p, q in zip(ours.model.parameters(), theirs.model.parameters()):
            with torch.no_grad():
                q.copy_(p)
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
    assert ours.backend == "cuda" and theirs.backend == "reference"
    for p, q in zip(ours.model.parameters(), theirs.model.parameters()):
        torch.testing.assert_close(p, q, rtol=2.0**-7, atol=0)
        assert int((p != q).sum()) <= 1 + 0.02 * p.numel()


def test_mixed_models(device: str) -> None:
    """Norm layers in float32, the others in bfloat16."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(5, 6).bfloat16(), nn.LayerNorm(6), nn.Linear(6, 3).bfloat16()

        def forward(self, x: Any) -> Any:
            return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16())

    optimizer = AdaFisher(Mixed().to(device), master_weights=True)
    before = everything(optimizer)
    run(optimizer, rows(device, 3))
    for name, p in optimizer.model.named_parameters():
        assert ("master" in optimizer.state[p]) is (p.dtype is torch.bfloat16)
        assert not torch.equal(p, before[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_and_copies_go_on_to_the_same_bits(name: str, device: str) -> None:
    dtype, options = torch.bfloat16, OPTIONS[name]
    xs = batches(device, dtype, 6)
    whole = run(made(device, dtype, options), xs)
    half = run(made(device, dtype, options), xs[:3])
    file = io.BytesIO()
    torch.save({"model": half.model.state_dict(), "optimizer": half.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = made(device, dtype, {**options, "seed": 77} if "seed" in options else options)
    again.load_state_dict(saved["optimizer"])
    again.model.load_state_dict(saved["model"])  # the other way round than usual: masters must not mind
    for other in (again, copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert_same(run(other, xs[3:]), whole)
    assert ("seed" in saved["optimizer"]) is ("seed" in options)
    passed_on = {key: saved["optimizer"][key] for key in ("state", "param_groups")}  # by torch.distributed.checkpoint
    later = made(device, dtype, {**options, "seed": 77} if "seed" in options else options)
    later.load_state_dict(passed_on)
    later.model.load_state_dict(saved["model"])
    assert_same(run(later, xs[3:]), whole)
    master = {"master"} if "master_weights" in options else set()
    assert set(saved["optimizer"]["state"][0]) == {"step", "exp_avg"} | master


def test_the_seed_decides(device: str) -> None:
    xs = batches(device, torch.bfloat16, 3)
    one, same, other = (run(made(device, torch.bfloat16, {**OPTIONS["random"], "seed": s}), xs) for s in (1, 1, 2))
    assert_same(one, same)
    assert not torch.equal(one.model[0].weight, other.model[0].weight)


@pytest.mark.filterwarnings("ignore:.*were not seen on a sampled step")  # there is no forward
def test_random_numbers_belong_to_the_parameter(device: str) -> None:
    """Not to its place in a launch: here parameters get their first gradients in another order."""
    late, early = (made(device, torch.bfloat16, OPTIONS["random"]) for _ in range(2))
    grads = {name: torch.randn_like(p) for name, p in late.model.named_parameters()}
    for optimizer, names in ((late, ["3.weight", "0.bias"]), (early, ["0.bias", "3.weight"])):
        for name in names:
            optimizer.zero_grad()
            optimizer.model.get_parameter(name).grad = grads[name].clone()
            optimizer.step()
    for p, q in zip(late.model.parameters(), early.model.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("write", ["copy_", "data", "load_state_dict", "vector"])
def test_what_a_script_writes_into_a_parameter_counts(write: str, device: str) -> None:
    """As if the master had been made of it then; whether torch counts the change or not."""
    xs = batches(device, torch.bfloat16, 2)
    optimizer = run(made(device, torch.bfloat16, OPTIONS["masters"]), xs[:1])
    p = optimizer.model[0].weight
    new = (torch.arange(p.numel(), device=p.device).view_as(p) / 16 + 1.5).to(p.dtype)
    with torch.no_grad():
        if write == "copy_":
            p.copy_(new)
        elif write == "data":
            p.data.copy_(new)
        elif write == "load_state_dict":
            optimizer.model.load_state_dict({**optimizer.model.state_dict(), "0.weight": new})
        else:
            p.view(-1)[:] = new.view(-1)
    fresh = copy.deepcopy(optimizer)
    fresh.state[fresh.model[0].weight]["master"] = new.float()
    assert_same(run(optimizer, xs[1:]), run(fresh, xs[1:]))
    assert bool((p.float() - new.float()).abs().max() < 0.5)


# Checkpoints that do not fit


def test_misfits_are_refused_by_key(device: str) -> None:
    xs = batches(device, torch.bfloat16, 2)
    source = run(made(device, torch.bfloat16, OPTIONS["masters"]), xs)
    good = source.state_dict()
    plain = run(made(device, torch.bfloat16, {}), xs)
    with refused(plain, "load_state_dict: `state[0]['master']` must be left out", "master_weights=True"):
        plain.load_state_dict(good)
    full = run(AdaFisher(mlp(device), master_weights=True), rows(device, 1))
    with refused(full, "`state[0]['master']` must be left out", "float32"):
        full.load_state_dict(good)
    for key, value, words in (
        ("master", torch.ones(3), "be a tensor of shape (7, 5)"),
        ("master", "x", "be a tensor of shape (7, 5)"),
        ("master", torch.ones(7, 5, dtype=torch.int32), "hold real floating-point numbers"),
        ("exp_avg", torch.ones(3), "be a tensor of shape (7, 5)"),
    ):
        bad = {**good, "state": {**good["state"], 0: {**good["state"][0], key: value}}}
        with refused(source, f"load_state_dict: `state[0]['{key}']` must", words):
            source.load_state_dict(bad)
    for seed in (-1, "x", 2**64):
        random = made(device, torch.bfloat16, OPTIONS["random"])
        with refused(random, "load_state_dict: `seed`"):
            random.load_state_dict({**run(plain, []).state_dict(), "seed": seed})


def test_older_checkpoints(device: str) -> None:
    """Momentum of 16 bits is not cast, masters start from the parameters, and a run without a seed keeps its own."""
    xs = batches(device, torch.bfloat16, 4)
    old = run(made(device, torch.bfloat16, {"momentum_dtype": torch.bfloat16}), xs[:2])
    saved = copy.deepcopy(old.state_dict())
    again = made(device, torch.bfloat16, {})
    again.model.load_state_dict(old.model.state_dict())
    again.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in again.state.values()} == {torch.bfloat16}
    assert_same(run(again, xs[2:]), run(old, xs[2:]))
    wide = made(device, torch.bfloat16, {"momentum_dtype": torch.float32, "master_weights": True})
    wide.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in wide.state.values()} == {torch.float32}
    run(wide, xs[2:3])
    assert all(torch.equal(state["master"].bfloat16(), p) for p, state in wide.state.items())


def test_copies_that_were_pickled_without_a_choice() -> None:
    optimizer = run(made("cpu", torch.float32, {}), rows("cpu", 2))
    state = optimizer.__getstate__()
    for name in ("_precision", "_seed"):
        del state["_copied"][0][name]
    other = AdaFisher.__new__(AdaFisher)
    other.__setstate__(state)
    assert_same(pickle.loads(pickle.dumps(other)), optimizer)


# Faults, and other options


@pytest.mark.gpu
@pytest.mark.parametrize("fail", FAULTS)
@pytest.mark.parametrize("name", ["masters", "random"])
def test_a_failed_step_leaves_all_as_it_was(name: str, fail: str, gpu: str, gate: Gate) -> None:  # noqa: F811
    def start(t: int) -> AdaFisher:
        optimizer = run(made(gpu, torch.bfloat16, OPTIONS[name]), xs[:t])
        optimizer.zero_grad()
        loss_of(optimizer.model, xs[t]).backward()
        return optimizer

    xs = batches(gpu, torch.bfloat16, 3)
    truth = [everything(run(made(gpu, torch.bfloat16, OPTIONS[name]), xs[:t])) for t in range(4)]
    for t in range(3):
        number = 0
        while number <= gate.seen:
            number += 1
            optimizer = start(t)
            with gate.open(number, fail):
                try:
                    optimizer.step()
                except (FAULTS[fail], CafinError):
                    pass
            now = everything(optimizer)
            if now["steps"] == t:
                written = [k for k in now if not k.startswith(("H of", "S of")) and k in truth[t]]
                assert all(torch.equal(now[k], truth[t][k]) for k in written if isinstance(now[k], torch.Tensor))
                optimizer.step()
            assert_same(optimizer, truth[t + 1])


@pytest.mark.parametrize("name", ["masters", "random"])
def test_nonfinite_gradients(name: str, device: str) -> None:
    xs = batches(device, torch.bfloat16, 2)
    optimizer = run(made(device, torch.bfloat16, {**OPTIONS[name], "error_if_nonfinite": True}), xs[:1])
    loss_of(optimizer.model, xs[1]).backward()
    optimizer.model[0].weight.grad[1, 2] = torch.inf
    before = everything(optimizer)
    with pytest.raises(NonFiniteError, match=r"gradient of 0\.weight"):
        optimizer.step()
    assert_same(optimizer, before)
    optimizer.error_if_nonfinite = False
    optimizer.step()
    bad = ~optimizer.model[0].weight.isfinite()
    assert bad.sum() == 1 and bool(bad[1, 2])


@pytest.mark.parametrize("name", ["plain", "masters"])
def test_under_a_grad_scaler(name: str) -> None:
    """Gradients of float16 are unscaled in float32, where none underflows; a step with inf changes nothing."""
    xs = batches("cpu", torch.float16, 3)
    plain = run(made("cpu", torch.float16, OPTIONS[name]), xs)
    optimizer, scaler = made("cpu", torch.float16, OPTIONS[name]), torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for k, x in enumerate(xs):
        optimizer.zero_grad()
        scaler.scale(loss_of(optimizer.model, x)).backward()
        if k == 1:
            before = everything(optimizer)
            kept = optimizer.model[3].bias.grad.clone()
            optimizer.model[3].bias.grad[0] = torch.inf
            scaler.step(optimizer)
            assert_same(optimizer, before)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
            scaler.scale(torch.zeros(()))
            optimizer.model[3].bias.grad = kept
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(optimizer.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(p, q, rtol=2.0**-9, atol=2.0**-12)  # backward rounds scaled gradients otherwise


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["masters", "random"])
def test_steps_that_the_device_counts(name: str, gpu: str) -> None:
    """capturable=True: the same bits, random ones too."""
    xs = batches(gpu, torch.bfloat16, 4)
    host = run(made(gpu, torch.bfloat16, OPTIONS[name]), xs)
    assert_same(run(made(gpu, torch.bfloat16, {**OPTIONS[name], "capturable": True}), xs), host)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["masters", "random"])
def test_captured_iterations(name: str, gpu: str) -> None:
    if gpu == "cpu":
        pytest.skip("graphs are not emulated")
    optimizer = made(gpu, torch.bfloat16, {**OPTIONS[name], "capturable": True})
    x = torch.empty(6, 5, dtype=torch.bfloat16, device=gpu)

    def iteration() -> None:
        optimizer.zero_grad()
        loss_of(optimizer.model, x).backward()
        optimizer.step()

    train = optimizer.capture(iteration)
    xs = batches(gpu, torch.bfloat16, 12)
    for each in xs:
        x.copy_(each)
        train()
    assert_same(optimizer, run(made(gpu, torch.bfloat16, OPTIONS[name]), xs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["masters", "random", "all"])
def test_several_devices(name: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second parameter's launch apart, as on another GPU: nothing changes, random numbers neither."""
    from cafin_cupy.adapters import torch_plan

    def shared_out(layouts: Any, factors: Any, like: Any, device: int, masters: Any = (), keys: Any = ()) -> Any:
        devices = [k % 2 for k in range(len(layouts))]
        return spread.SpreadUpdate(layouts, factors, [like] * len(layouts), devices, masters, keys)

    class OnFirst(spread.CudaUpdate):
        def __init__(self, layouts: Any, factors: Any, like: Any, device: int, *more: Any) -> None:
            super().__init__(layouts, factors, like, 0, *more)

    xs = batches(gpu, torch.bfloat16, 3)
    alone = run(made(gpu, torch.bfloat16, OPTIONS[name]), xs)
    current = spread.current_stream
    monkeypatch.setattr(spread, "current_stream", lambda like, device: current(like, 0))
    monkeypatch.setattr(spread, "CudaUpdate", OnFirst)
    monkeypatch.setattr(torch_plan, "CudaUpdate", shared_out)
    assert_same(run(made(gpu, torch.bfloat16, OPTIONS[name]), xs), alone)


def test_channels_last(device: str) -> None:
    """State lies in memory as the parameters do."""
    model = net(device).bfloat16().to(memory_format=torch.channels_last)
    optimizer = AdaFisher(model, master_weights=True, TCov=1)
    torch.manual_seed(0)
    loss_of(model, torch.randn(3, 3, 8, 8, device=device, dtype=torch.bfloat16)).backward()
    optimizer.step()
    for p, state in optimizer.state.items():
        assert state["master"].stride() == state["exp_avg"].stride() == p.stride()
        assert torch.equal(state["master"].bfloat16(), p)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"momentum_dtype": torch.float16}, "`momentum_dtype` must be None or one of float32, bfloat16 for bfloat16"),
    ({"momentum_dtype": torch.int8}, "`momentum_dtype` must be None or one of"),
    ({"master_weights": True, "stochastic_rounding": True}, "`stochastic_rounding` must be False with master_weights"),
    ({"master_weights": None}, "`master_weights` must be True or False"),
    ({"seed": 0.5}, "`seed` must be a whole number"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: str(x)[:30])
def test_refused_choices(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CafinError) as caught:
        AdaFisher(mlp("cpu").bfloat16(), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("spoil", ["dtype", "shape"])
def test_a_master_that_is_spoiled_is_refused(spoil: str, device: str) -> None:
    optimizer = run(made(device, torch.bfloat16, OPTIONS["masters"]), batches(device, torch.bfloat16, 1))
    state = optimizer.state[optimizer.model[0].weight]
    state["master"] = state["master"].double() if spoil == "dtype" else state["master"][:3].clone()
    loss_of(optimizer.model, batches(device, torch.bfloat16, 1)[0]).backward()
    with refused(optimizer, "step: `", "0.weight", "must stay"):
        optimizer.step()


def test_a_plan_holds_until_a_master_moves(device: str) -> None:
    xs = batches(device, torch.bfloat16, 4)
    optimizer, twin = (run(made(device, torch.bfloat16, OPTIONS["masters"]), xs[:1]) for _ in range(2))
    plan = optimizer._plan
    run(optimizer, xs[1:2])
    assert optimizer._plan is plan
    state = optimizer.state[optimizer.model[0].weight]
    old = state["master"]
    state["master"] = old.clone()
    old.fill_(7.0)  # nobody's any more
    run(optimizer, xs[2:])
    assert optimizer._plan is not plan
    assert_same(optimizer, run(twin, xs[1:]))


def test_a_model_that_changes_its_precision_goes_on(device: str) -> None:
    """float32, then bfloat16 with masters, then float32 again: the masters come and go."""
    optimizer = run(AdaFisher(mlp(device), master_weights=True), rows(device, 2))
    assert all("master" not in state for state in optimizer.state.values())
    optimizer.model.bfloat16()
    run(optimizer, batches(device, torch.bfloat16, 2))
    assert all("master" in state for state in optimizer.state.values())
    optimizer.model.float()
    run(optimizer, rows(device, 2))
    assert all("master" not in state for state in optimizer.state.values())
    assert {state["step"] for state in optimizer.state.values()} == {6}


# Training


def test_random_rounding_follows_float32_better() -> None:
    """scikit-learn's digits, a perceptron in bfloat16 alone, the same batches for all: distances of parameters from the
    run in float32, and losses. Rounded to the nearest most steps are lost, as they are smaller than half the distance
    of neighbours; masters lose none."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    X = torch.tensor(images / 16, dtype=torch.float32)
    Y = torch.tensor(labels)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def trained(dtype: torch.dtype, **options: Any) -> tuple[Any, float]:
        model = network().to(dtype)
        optimizer = AdaFisher(model, lr=2e-5, TCov=10, **options)
        order = torch.Generator().manual_seed(1)
        for _ in range(400):
            picked = torch.randint(len(X), (64,), generator=order)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[picked].to(dtype)).float(), Y[picked]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(X.to(dtype)).float(), Y)
        return nn.utils.parameters_to_vector(model.parameters()).detach().float(), float(loss)

    weights, loss = trained(torch.float32)
    ways: dict[str, Callable[[], tuple[Any, float]]] = {
        "nearest": lambda: trained(torch.bfloat16),
        "random": lambda: trained(torch.bfloat16, stochastic_rounding=True),
        "masters": lambda: trained(torch.bfloat16, master_weights=True),
    }
    found = {name: way() for name, way in ways.items()}
    distance = {name: float((w - weights).norm()) for name, (w, _) in found.items()}
    lost = {name: abs(its - loss) for name, (_, its) in found.items()}
    assert distance["random"] < distance["nearest"] / 2 and lost["random"] < lost["nearest"] / 2
    assert distance["masters"] < distance["random"]


def test_summary_tells_what_state_there_will_be(device: str) -> None:
    for name, momentum, master in (("plain", 4, 0), ("all", 2, 4)):
        optimizer = made(device, torch.bfloat16, OPTIONS[name])
        for _ in range(2):
            seen = optimizer.summary()
            count = seen.parameters
            assert seen.momentum == momentum * count and seen.masters == master * count
            run(optimizer, batches(device, torch.bfloat16, 1))
        assert all(values["mean"] > 0 for values in optimizer.curvature().values())
