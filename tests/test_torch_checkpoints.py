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


def assert_equal_trees(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_trees(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal_trees(x, y)
    else:
        assert a == b


# state_dict and load_state_dict


@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("cut", range(5))
def test_a_restored_run_goes_on_bit_for_bit(cut: int, averaging: str, device: str) -> None:
    """Cut before the first step, on sampled steps and between them."""
    batches = rows(device, 7)
    first = run(made(device, averaging=averaging), batches[:cut])
    again = restored(stored(first), device, averaging=averaging)
    assert_same(again, first)
    assert hook_count(again.model) == (3 if cut % 3 == 0 else 0)
    assert_same(run(again, batches[cut:]), run(made(device, averaging=averaging), batches))


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


def test_before_the_first_step(device: str) -> None:
    checkpoint = made(device).state_dict()
    assert checkpoint["state"] == {} and checkpoint["steps"] == 0
    assert all(torch.equal(f, torch.ones_like(f)) for key in ("H_D", "S_D") for f in checkpoint[key])
    made(device).load_state_dict(checkpoint)


def test_the_callers_dict_stays_as_it_is(device: str) -> None:
    """While it is loaded, and while the optimizer trains on."""
    _, checkpoint = stored(run(made(device), rows(device, 4)))
    before = copy.deepcopy(checkpoint)
    optimizer = made(device)
    optimizer.load_state_dict(checkpoint)
    assert_equal_trees(checkpoint, before)
    run(optimizer, rows(device, 4))
    assert_equal_trees(checkpoint, before)


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
    optimizer = run(made(device), rows(device, 2))
    checkpoint = stored(optimizer)
    for i in (4, 5):  # its last ones, where a parameter has no layer
        del checkpoint[1]["state"][i]
    again = run(restored(checkpoint, device), rows(device, 1))
    assert [again.state[p]["step"] for p in again.model.parameters()] == [3, 3, 3, 3, 1, 1]


# Refusals

Spoil = Callable[[dict[str, Any]], Any]


def without(key: str) -> Spoil:
    return lambda d: {k: v for k, v in d.items() if k != key}


def changed(key: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda d: {**d, key: change(d[key])}


def in_state(**values: Any) -> Spoil:
    return changed("state", lambda state: {**state, 1: {**state[1], **values}})


def in_group(**values: Any) -> Spoil:
    return changed("param_groups", lambda groups: [{**groups[0], **values}])


SPOILT: dict[str, tuple[Spoil, str]] = {
    **{f"no {key}": (without(key), repr(key)) for key in ("state", "param_groups", "H_D", "S_D", "steps")},
    "not a dict": (lambda d: None, "state_dict"),
    "of SGD": (lambda d: torch.optim.SGD(mlp("cpu").parameters(), lr=0.1).state_dict(), "H_D"),
    "fewer layers": (changed("H_D", lambda H: H[:-1]), "H_D"),
    "more layers": (changed("S_D", lambda S: [*S, torch.ones(3)]), "S_D"),
    "another order": (changed("S_D", lambda S: S[::-1]), "S_D"),
    "a matrix": (changed("H_D", lambda H: [H[0][None], *H[1:]]), "H_D of 0"),
    "not tensors": (changed("H_D", lambda H: [f.tolist() for f in H]), "H_D of 0"),
    "steps below 0": (changed("steps", lambda t: -1), "steps"),
    "steps of no number": (changed("steps", lambda t: "many"), "steps"),
    "no group": (changed("param_groups", lambda groups: []), "param_groups"),
    "two groups": (changed("param_groups", lambda groups: groups * 2), "param_groups"),
    "fewer parameters": (in_group(params=[0, 1]), "param_groups"),
    "lr below 0": (in_group(lr=-1.0), "lr"),
    "another shape": (in_state(exp_avg=torch.zeros(3)), "exp_avg"),
    "momentum of no tensor": (in_state(exp_avg=[0.0] * 7), "exp_avg"),
    "step below 0": (in_state(step=-3), "step"),
    "unknown parameter": (changed("state", lambda state: {**state, 77: state[0]}), "state"),
    "momentum of None": (in_state(exp_avg=None), "exp_avg"),
    "sparse momentum": (in_state(exp_avg=torch.zeros(7).to_sparse()), "exp_avg"),
    "momentum nowhere": (in_state(exp_avg=torch.zeros(7, device="meta")), "exp_avg"),
    "complex factor": (changed("H_D", lambda H: [H[0].cfloat(), *H[1:]]), "H_D of 0"),
    "factor nowhere": (changed("H_D", lambda H: [H[0].to("meta"), *H[1:]]), "H_D of 0"),
    "factor of NaN": (changed("S_D", lambda S: [S[0] * float("nan"), *S[1:]]), "S_D of 0"),
    "factor below 0": (changed("S_D", lambda S: [-S[0], *S[1:]]), "S_D of 0"),
    "state of a list": (changed("state", lambda state: [1, 2]), "state"),
    "entry of a number": (changed("state", lambda state: {0: 3}), "state[0]"),
    "groups of a number": (changed("param_groups", lambda groups: 3), "param_groups"),
    "group without params": (changed("param_groups", lambda groups: [{"lr": 1.0}]), "'params'"),
    "params of lists": (in_group(params=[[0], [1]]), "params"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_dict_that_does_not_fit_is_refused(name: str, device: str) -> None:
    optimizer = run(made(device), rows(device, 4))
    _, checkpoint = stored(run(made(device, lr=0.5), rows(device, 2)))
    groups = copy.deepcopy(optimizer.param_groups[0])
    spoil, word = SPOILT[name]
    with refused(optimizer, "load_state_dict", word):
        optimizer.load_state_dict(spoil(checkpoint))
    assert_equal_trees({**optimizer.param_groups[0]}, groups)
    run(optimizer, rows(device, 1))


# Copies

COPIES: dict[str, Callable[[AdaFisher], AdaFisher]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy with the model": lambda optimizer: copy.deepcopy((optimizer.model, optimizer))[1],
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "pickle with the model": lambda optimizer: pickle.loads(pickle.dumps((optimizer.model, optimizer)))[1],
}


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize("cut", [0, 3, 4])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_goes_on_bit_for_bit(name: str, cut: int, kind: type[AdaFisher], device: str) -> None:
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
