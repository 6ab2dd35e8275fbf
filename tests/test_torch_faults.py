"""Faults that users of neighbouring projects reported, each as a test of the right behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    images,
    loss_of,
    mlp,
    net,
    record,
    rows,
    run,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


def test_convolution_norm_and_relu_in_place(device: str) -> None:
    """Full backward hooks would raise "is a view and is being modified inplace"."""
    batches = images(device, 4, 4, 4)
    inplace, plain = (AdaFisher(net(device, inplace=flag), TCov=2) for flag in (True, False))
    assert_same(run(inplace, batches), run(plain, batches), TOLERANCE)


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_one_nan_does_not_poison_a_factor(averaging: str, device: str) -> None:
    """The moments of that step are dropped, layer by layer; the next sample counts again."""
    clean, dirty = (AdaFisher(mlp(device), TCov=1, averaging=averaging) for _ in range(2))
    x, y = rows(device, 2)
    run(dirty, [x])
    before = everything(dirty)
    dirty.zero_grad()
    loss_of(dirty.model, torch.full_like(x, torch.nan)).backward()
    for p in dirty.model.parameters():
        p.grad = None  # the script throws the gradients away, but steps
    dirty.step()
    counts = {f"skipped of {name}": 1 for name in ("0", "2", "3")}
    assert_same(dirty, {**before, **counts, "steps": 2})
    assert_same(run(dirty, [y]), {**everything(run(clean, [x, y])), **counts, "steps": 3})


# Activation checkpointing


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
    assert_same(checkpointed(device, use_reentrant), checkpointed(device, None), TOLERANCE)


class Watch(nn.Module):
    """Passes its input on and tells whether its memory is still in use."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = StorageWeakRef(x.untyped_storage())
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_still_saves_memory(use_reentrant: bool, device: str) -> None:
    """On sampled steps too, the inputs inside a checkpointed block are freed after its forward."""
    block = nn.Sequential(nn.Linear(5, 6), watch := Watch(), nn.Linear(6, 3)).to(device)
    optimizer = AdaFisher(block, TCov=1)
    x = rows(device, 1)[0].requires_grad_()
    loss = checkpoint(block, x, use_reentrant=use_reentrant).square().mean()
    assert watch.seen.expired()
    loss.backward()
    optimizer.step()
    assert not any(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)


def test_inputs_are_freed_by_backward(device: str) -> None:
    """Though the script still holds the loss, as training loops do during the next forward."""
    model = nn.Sequential(nn.Linear(5, 6), watch := Watch(), nn.Linear(6, 3)).to(device)
    optimizer = AdaFisher(model, TCov=1)
    loss = loss_of(model, rows(device, 1)[0])
    assert not watch.seen.expired()
    loss.backward()
    assert watch.seen.expired()
    optimizer.step()


def test_a_graph_that_is_kept_counts_each_backward(device: str) -> None:
    """Losses with a common trunk, differentiated one after the other."""
    model = mlp(device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    out = model(rows(device, 1)[0])
    weighted(out).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    assert {name: len(calls) for name, calls in seen.items()} == {"0": 2, "2": 2, "3": 2}
    assert_moments(optimizer, seen)


def test_a_second_backward_is_refused_in_the_words_of_torch(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=1)
    loss = optimizer.model(rows(device, 1)[0]).mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_functional_transforms_leave_no_trace(transform: str, device: str) -> None:
    """Gradients for each sample, say, taken on a sampled step: their tensors are no tensors outside the transform."""
    x, y = rows(device, 2)
    optimizer = AdaFisher(mlp(device), TCov=1)
    model, weights = optimizer.model, {name: p.detach() for name, p in optimizer.model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    transforms = {
        "grad": lambda: torch.func.grad(loss)(weights, y),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, y),
        "jacrev": lambda: torch.func.jacrev(model)(y),
    }
    loss_of(model, x).backward()
    transforms[transform]()
    optimizer.step()
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1), [x]))


# Inputs that the script overwrites between forward and backward, as autograd allows


def overwritten(layer: nn.Module, shape: tuple[int, ...], device: str, autocast: bool = False) -> None:
    model = layer.to(device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    x = torch.randn(shape, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        loss = weighted(model(x))
    x.zero_()
    loss.backward()
    optimizer.step()
    assert_moments(optimizer, seen)


def test_overwritten_input_of_a_frozen_weight(device: str) -> None:
    layer = nn.Linear(5, 3)
    layer.weight.requires_grad_(False)
    overwritten(layer, (4, 5), device)


def test_overwritten_input_under_autocast(device: str) -> None:
    """Autograd keeps a bfloat16 copy of it."""
    overwritten(nn.Linear(5, 3), (4, 5), device, autocast=True)


def test_overwritten_input_of_a_convolution_that_pads_itself(device: str) -> None:
    """Autograd keeps the padded copy."""
    overwritten(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 6), device)


# Compiled models


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_compiled_models_train_or_warn_once(first: str) -> None:
    """Row 11: hooks that come after the compilation may be ignored; silence would be the fault. The model is compiled
    before or after the optimizer is made."""
    torch._dynamo.reset()
    batches = rows("cpu", 6)
    model = mlp("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if first == "model":
            compiled = torch.compile(model, backend="eager")
            compiled(batches[0]).sum().backward()
        optimizer = AdaFisher(model, TCov=2)
        if first == "optimizer":
            compiled = torch.compile(model, backend="eager")
        for x in batches:
            optimizer.zero_grad()
            loss_of(compiled, x).backward()
            optimizer.step()
    torch._dynamo.reset()
    warned = [w for w in caught if "were not seen on a sampled step" in str(w.message)]
    if warned:
        assert len(warned) == 1
        assert all(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)
    else:
        assert_same(optimizer, run(AdaFisher(mlp("cpu"), TCov=2), batches), TOLERANCE)


def test_training_in_eval_mode_warns_once(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=1)
    optimizer.model.eval()
    with pytest.warns(UserWarning, match="were not seen on a sampled step.*'0', '2', '3'") as caught:
        run(optimizer, rows(device, 3))
    assert [w.filename for w in caught] == [run.__code__.co_filename]
    assert all(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)


# Processes


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # the ranks are on this machine, whatever its name resolves to
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


CONSTRUCT = """
import os, sys, torch
from cafin_cupy.adapters.torch import AdaFisher
def train(optimizer, x):
    optimizer.model(x).sum().backward()
    optimizer.step()
    return optimizer.backend
optimizer = AdaFisher(torch.nn.Linear(3, 2))
"""


def test_on_the_cpu_nothing_touches_cuda() -> None:
    """Row 15: neither the import nor training, or a later fork could not use the GPU."""
    train = """
assert train(optimizer, torch.ones(4, 3)) == "reference"
print(torch.cuda.is_initialized(), "cupy" in sys.modules)
"""
    assert python(CONSTRUCT + train).communicate()[0] == "False False\n"


@pytest.mark.gpu
def test_a_forked_process_may_use_the_gpu() -> None:
    """The parent has made an optimizer, but not differentiated: PyTorch itself forbids that before a fork."""
    fork = """
child = os.fork()
if child == 0:
    optimizer.model.cuda()
    assert train(optimizer, torch.ones(4, 3).cuda()) == "cuda"
    torch.cuda.synchronize()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(CONSTRUCT + fork).communicate()[0] == "0\n"


RANK = """
import sys, torch
from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher
early = AdaFisher(torch.nn.Linear(3, 2))
weight = early.model.weight.detach().clone()
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
early.model(torch.ones(4, 3)).sum().backward()
for attempt in (lambda: AdaFisher(torch.nn.Linear(3, 2), dist=True), early.step):
    try:
        attempt()
    except CafinError as error:
        print(error)
assert torch.equal(early.model.weight, weight) and early.steps == 0
torch.distributed.barrier()
"""


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    """Each would follow factors of its own, and the replicas would drift apart."""
    ranks = [python(RANK, f"file://{tmp_path}/ranks", str(rank)) for rank in range(2)]
    for process in ranks:
        lines = process.communicate(timeout=120)[0].splitlines()
        said = [line for line in lines if "the process group must have one rank, got 2" in line]
        assert [line.split(":")[0] for line in said] == ["AdaFisher", "step"], lines


def test_one_rank_is_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    try:
        alone = run(AdaFisher(mlp("cpu"), dist=True), rows("cpu", 2))
    finally:
        torch.distributed.destroy_process_group()
    assert_same(alone, run(AdaFisher(mlp("cpu")), rows("cpu", 2)))


def test_state_keeps_its_dtype_on_load() -> None:
    """Row 5: bfloat16 parameters with their momentum, and factors that stay float32."""
    first = run(AdaFisher(mlp("cpu").bfloat16(), TCov=1), [x.bfloat16() for x in rows("cpu", 2)])
    again: Any = AdaFisher(mlp("cpu").bfloat16(), TCov=1)
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(first.state_dict())
    assert_same(again, first)
    assert {f.dtype for pair in again.factors().values() for f in pair} == {torch.float32}
