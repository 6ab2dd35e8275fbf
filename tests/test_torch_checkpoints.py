"""Checkpoints and copies of the PyTorch optimizer: the run goes on as if nothing had happened."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_equal_trees,
    assert_same,
    everything,
    hook_count,
    images,
    loss_of,
    mlp,
    near,
    net,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def made(device: str, **options: Any) -> AdaFisher:
    return AdaFisher(mlp(device), **{"TCov": 3, "weight_decay": 0.1, **options})


def stored(optimizer: AdaFisher) -> tuple[Any, Any]:
    """The state dicts of model and optimizer, through a file."""
    file = io.BytesIO()
    torch.save((optimizer.model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restored(checkpoint: tuple[Any, Any], device: str, **options: Any) -> AdaFisher:
    optimizer = made(device, **options)
    optimizer.model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    return optimizer


# state_dict and load_state_dict


@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("cut", range(5))
def test_a_restored_run_goes_on_bit_for_bit(cut: int, averaging: str, device: str) -> None:
    """Cut before the first step, on sampled steps and between them."""
    batches = rows(device, 7)
    first = run(made(device, averaging=averaging), batches[:cut])
    again = restored(stored(first), device, averaging=averaging)
    assert_same(again, first)
    assert hook_count(again.model) == 3 and {tap.open for tap in again._gates} == {cut % 3 == 0}  # until the next step
    assert_same(run(again, batches[cut:]), run(made(device, averaging=averaging), batches))


@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_every_kind_goes_through_a_file(
    kind: type[AdaFisher], averaging: str, capturable: bool, rate: str, device: str
) -> None:
    """`torch.load(weights_only=True)` takes nothing but tensors, numbers and containers."""
    batches = rows(device, 6)

    def made() -> AdaFisher:
        lr = 1e-3 if rate == "number" else torch.tensor(1e-3, device=device if capturable else "cpu")
        return kind(mlp(device), lr=lr, TCov=2, weight_decay=0.1, averaging=averaging, capturable=capturable)

    first = run(made(), batches[:3])
    weights, state = stored(first)
    again = made()
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    assert {type(entry["step"]) for entry in state["state"].values()} == {int}
    assert {F.dtype for key in ("H_D", "S_D") for F in state[key]} == {
        torch.float64 if averaging == "paper" else torch.float32
    }
    assert type(again.param_groups[0]["lr"]) is (float if rate == "number" else Tensor)
    assert_same(again, first)
    assert_same(run(again, batches[3:]), run(first, batches[3:]))


@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("trains", DTYPES)
def test_dtypes_of_a_checkpoint(saved: torch.dtype, trains: torch.dtype) -> None:
    """Momentum follows its parameter; that of a 16-bit parameter keeps what it was saved in, if a new one could have
    it, and is float32 else, which holds all of the other 16-bit type."""
    source = run(AdaFisher(mlp("cpu").to(saved), TCov=1, momentum_dtype=saved), [x.to(saved) for x in rows("cpu", 2)])
    target = run(AdaFisher(mlp("cpu").to(trains), TCov=1), [x.to(trains) for x in rows("cpu", 1)])
    state = source.state_dict()
    target.load_state_dict(state)
    wanted = trains
    if trains in (torch.bfloat16, torch.float16):
        wanted = saved if saved in (trains, torch.float32) else torch.float32
    for p, entry in zip(target.model.parameters(), state["state"].values()):
        average = target.state[p]["exp_avg"]
        assert average.dtype is wanted
        torch.testing.assert_close(average, entry["exp_avg"].to(wanted), rtol=0, atol=0)
    factor = torch.float64 if trains is torch.float64 else torch.float32
    assert {F.dtype for pair in target.factors().values() for F in pair} == {factor}
    before = everything(target)
    run(target, [x.to(trains) for x in rows("cpu", 1)])
    for name, p in target.model.named_parameters():
        assert target.state[p]["exp_avg"].dtype is wanted
        assert not torch.equal(p, before[name]), name


def test_a_checkpoint_without_memory_is_refused(device: str) -> None:
    """As `torch.load(map_location="meta")` gives."""
    file = io.BytesIO()
    torch.save(run(made(device), rows(device, 2)).state_dict(), file)
    file.seek(0)
    optimizer = made(device)
    with refused(optimizer, "load_state_dict: `state[0]['exp_avg']` must be a dense tensor in memory", "meta"):
        optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="meta"))


@pytest.mark.parametrize("TCov", [1, 100], ids=["sampled", "unsampled"])
def test_between_backward_and_step_a_state_is_that_of_the_last_step(TCov: int, device: str) -> None:
    """What backward has added is in it no more than gradients are: the resumed run repeats the iteration."""
    x, y = rows(device, 2)
    optimizer = run(made(device, TCov=TCov), [x])
    before = stored(optimizer)
    optimizer.zero_grad()
    loss_of(optimizer.model, y).backward()
    between = stored(optimizer)
    assert_equal_trees(between, before)
    optimizer.step()  # which the saving did not disturb
    assert_same(optimizer, run(restored(between, device, TCov=TCov), [y]))
    assert_same(optimizer, run(made(device, TCov=TCov), [x, y]))


def test_format(device: str) -> None:
    optimizer = run(AdaFisher(net(device), TCov=1), images(device, 2))
    checkpoint = optimizer.state_dict()
    assert set(checkpoint) == {"state", "param_groups", "H_D", "S_D", "steps"}
    assert checkpoint["steps"] == 1
    for key, lengths in (("H_D", [27, 2, 28, 7, 2, 9]), ("S_D", [6, 6, 6, 8, 8, 4])):
        assert isinstance(checkpoint[key], list)
        assert [tuple(f.shape) for f in checkpoint[key]] == [(n,) for n in lengths]
    assert all(torch.equal(f, pair[0]) for f, pair in zip(checkpoint["H_D"], optimizer.factors().values()))
    assert [set(state) for state in checkpoint["state"].values()] == [{"step", "exp_avg"}] * 11


def test_one_dict_for_two_optimizers(device: str) -> None:
    """They share no memory afterwards."""
    source = run(made(device), rows(device, 2))
    before = everything(source)
    a, b = (restored((source.model.state_dict(), source.state_dict()), device) for _ in range(2))
    run(a, rows(device, 5))
    for optimizer in (source, b):
        assert_same(optimizer, before)


def test_loading_forgets_the_sums_of_a_started_step(device: str) -> None:
    checkpoint = stored(run(made(device), rows(device, 3)))
    optimizer = made(device)
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    optimizer.model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert_same(run(optimizer, rows(device, 2)), run(restored(checkpoint, device), rows(device, 2)))


def test_memory_formats_may_differ(device: str) -> None:
    first = AdaFisher(net(device).to(memory_format=torch.channels_last), TCov=2)
    run(first, [x.to(memory_format=torch.channels_last) for x in images(device, 3, 3, 3)])
    again = AdaFisher(net(device), TCov=2)
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(first.state_dict())
    whole = run(AdaFisher(net(device), TCov=2), images(device, 3, 3, 3, 3))
    assert_same(run(again, images(device, 3, 3, 3, 3)[3:]), whole, TOLERANCE)


@pytest.mark.gpu
def test_backends_exchange_checkpoints() -> None:
    batches = rows("cpu", 7)
    on_gpu = [x.cuda() for x in batches]
    cpu = run(made("cpu"), batches[:2])
    gpu = run(restored(stored(cpu), "cuda"), on_gpu[2:4])
    assert (cpu.backend, gpu.backend) == ("reference", "cuda")
    file = io.BytesIO()
    torch.save((gpu.model.state_dict(), gpu.state_dict()), file)
    file.seek(0)
    back = restored(torch.load(file, weights_only=True, map_location="cpu"), "cpu")
    run(back, batches[4:])
    mixed = restored(stored(gpu), "cpu")  # without map_location: tensors on the GPU for a model on the CPU
    assert_same(run(mixed, batches[4:]), back)
    assert_same(back, run(made("cpu"), batches), TOLERANCE)


# Checkpoints of the public implementation


def public_checkpoint(arrays: Any, names: list[str], modules: list[str], tensor_steps: bool) -> dict[str, Any]:
    """As the public implementation writes it after two steps."""

    def get(key: str) -> Tensor:
        return torch.tensor(arrays[f"f64/{key}"])

    steps = torch.tensor(2.0) if tensor_steps else 2
    return {
        "state": {i: {"step": steps, "exp_avg": get(f"exp_avg/1/{name}")} for i, name in enumerate(names)},
        "param_groups": [{"lr": 1e-3, "beta": 0.95, "weight_decay": 5e-4, "params": list(range(len(names)))}],
        "H_D": [get(f"H_D/1/{module}") for module in modules],
        "S_D": [get(f"S_D/1/{module}") for module in modules],
        "steps": 2,
    }


@pytest.mark.parametrize("tensor_steps", [False, True])
def test_a_public_checkpoint_goes_on_as_recorded(tensor_steps: bool, device: str) -> None:
    with np.load(Path(__file__).parent / "data" / "mlp_l2_tcov3.npz") as file:
        arrays = {key: file[key] for key in file.files}
    case = json.loads(str(arrays["case"]))
    model = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 5))
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: torch.tensor(arrays[f"f64/param/1/{name}"]) for name in names})
    dtype, tolerance = (torch.float32, 1e-5) if device == "cuda" else (torch.float64, 1e-12)  # as in test_oracle.py
    model.to(device, dtype)
    if dtype is torch.float64:  # the load into a float32 model above rounded them
        for name, p in model.named_parameters():
            p.data.copy_(torch.tensor(arrays[f"f64/param/1/{name}"]))
    optimizer = AdaFisher(model, **case["hyperparameters"])
    optimizer.load_state_dict(public_checkpoint(arrays, names, ["0", "2"], tensor_steps))
    for t in range(2, case["steps"]):
        x, y = torch.tensor(arrays[f"x/{t}"]).to(device, dtype), torch.tensor(arrays[f"y/{t}"]).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        near(p, torch.tensor(arrays[f"f64/param/9/{name}"]), name, tolerance)
        near(optimizer.state[p]["exp_avg"], torch.tensor(arrays[f"f64/exp_avg/9/{name}"]), name, tolerance)
        assert optimizer.state[p]["step"] == 10
    for module, (H, S) in optimizer.factors().items():
        near(H, torch.tensor(arrays[f"f64/H_D/9/{module}"]), module, tolerance)
        near(S, torch.tensor(arrays[f"f64/S_D/9/{module}"]), module, tolerance)


def test_parameters_that_the_public_implementation_never_updated_start_afresh(device: str) -> None:
    checkpoint = stored(run(made(device), rows(device, 2)))
    del checkpoint[1]["param_groups"][0]["Lambda"]  # which the public one does not keep there
    for i in (4, 5):  # its last ones, where a parameter has no layer
        del checkpoint[1]["state"][i]
    again = run(restored(checkpoint, device), rows(device, 1))
    assert [again.state[p]["step"] for p in again.model.parameters()] == [3, 3, 3, 3, 1, 1]


# Copies


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_no_copy_between_backward_and_step(make: Callable[[Any], Any], device: str) -> None:
    optimizer = made(device)
    loss_of(optimizer.model, rows(device, 1)[0]).backward()
    with refused(optimizer, "AdaFisher", "between steps", "call step() or zero_grad() first"):
        make(optimizer)
    optimizer.step()
    make(optimizer)


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, through_torch_save], ids=["deepcopy", "torch.save"])
def test_a_copied_model_is_no_business_of_the_optimizer(make: Callable[[Any], Any], device: str) -> None:
    """As for an average of weights. The hooks that a sampled step has left in the copy go with its first forward."""
    batches = rows(device, 4)
    optimizer = run(made(device), batches[:3])
    twin = make(optimizer.model)
    twin.train()
    loss_of(twin, batches[0]).backward()
    assert hook_count(twin) == 0
    assert_same(run(optimizer, batches[3:]), run(made(device), batches))
    with pytest.raises(CafinError):
        optimizer.load_state_dict({})
