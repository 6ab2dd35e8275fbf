"""What PyTorch does not document may go: the optimizer then trains to the same bits by what serves in its place."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch_helpers import assert_same, mlp, rows, run  # noqa: E402

from cafin_cupy import arrays  # noqa: E402
from cafin_cupy.adapters import torch as adapter  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

TRAIN = """
import hashlib, torch
from torch import nn
from cafin_cupy.adapters.torch import AdaFisher

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4))
optimizer = AdaFisher(model, TCov=2)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(6, 1, 4, 4)).square().mean().backward()
    optimizer.step()
state = [*model.parameters(), *(F for pair in optimizer.factors().values() for F in pair)]
print(hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in state)).hexdigest())
"""
# What torch itself needs stays: it looks up some of these names as well.
WITHOUT = """
from types import SimpleNamespace
import torch, torch._dynamo

engine = torch.autograd.Variable._execution_engine
torch.autograd.Variable._execution_engine = SimpleNamespace(run_backward=engine.run_backward)
gone = [
    (torch.autograd, "_profiler_enabled"),
    (torch._C, "_current_graph_task_id"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    (torch._C._functorch, "is_legacy_batchedtensor"),
    (torch._C._dynamo.guards, "TensorGuards"),
]
for owner, name in gone:
    if hasattr(owner, name):
        delattr(owner, name)
"""


def trained(ahead: str = "") -> str:
    """A hash of parameters and factors, from a process of its own, as names are looked up when modules are imported."""
    ran = subprocess.run([sys.executable, "-c", ahead + TRAIN], capture_output=True, text=True, timeout=300)
    assert not ran.returncode, ran.stderr
    return ran.stdout


def test_training_goes_to_the_same_bits() -> None:
    assert trained(WITHOUT) == trained()


def test_hooks_are_called_where_torch_hides_the_global_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "global_pre_hooks", {0: None})
    optimizer, calls = AdaFisher(mlp("cpu"), TCov=1), []
    hook = register_optimizer_step_post_hook(lambda *given: calls.append(given))
    try:
        assert_same(run(optimizer, rows("cpu", 2)), run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2)))
    finally:
        hook.remove()
    assert len(calls) == 4


def test_the_stream_without_the_internal_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))
    assert arrays.torch_stream(2) == 42
