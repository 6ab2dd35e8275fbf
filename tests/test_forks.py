"""Processes that are forked: on the reference they train on, with CUDA they say what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import make, numpy_of

from cafin_cupy import AdaFisher, BackendError, Linear, forks, fused_step, table

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_child(call: Callable[[], object]) -> str:
    """What `call` returns or raises in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"returned {call()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)  # without the parent's exit handlers
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_the_reference_works_in_a_forked_process() -> None:
    weight = np.ones((3, 5))
    opt = AdaFisher([weight], [layer := Linear(weight)], TCov=1)
    grad = np.ones((3, 5))

    def step() -> float:
        opt.accumulate(layer, np.ones((4, 5)), np.ones((4, 3)))
        opt.step([grad])
        return float(weight.sum())

    step()
    assert in_child(step) == f"returned {step()}"  # child and parent go on from the same state


def test_cuda_is_refused_and_the_mend_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "child", True)
    with pytest.raises(BackendError, match=f'f: CUDA must be.*got process {os.getpid()}, forked from.*"spawn"'):
        forks.refuse_child("f")


def test_only_forks_behind_the_first_use_are_told() -> None:
    program = """
import os
from cafin_cupy import forks
for watched in (False, True):
    if watched:
        forks.watch()
        forks.watch()
    child = os.fork()
    if child == 0:
        os._exit(forks.child)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), forks.child)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "0 False\n1 False\n"


@pytest.mark.gpu
def test_a_forked_process_is_told_and_the_parent_goes_on() -> None:
    """Whatever it tries, with arrays, tables and launches that the parent has made."""
    weight, grad = make("cupy", np.ones((3, 5))), make("cupy", np.ones((3, 5)))
    h, s = make("cupy", np.ones((4, 5))), make("cupy", np.ones((4, 3)))
    momentum = make("cupy", np.zeros((3, 5)))
    opt = AdaFisher([weight], [layer := Linear(weight)], TCov=1)
    opt.accumulate(layer, h, s)
    opt.step([grad])
    opt.accumulate(layer, h, s)
    rows = table.DeviceTable(table.Share, 3, weight, 0)
    attempts: dict[str, Callable[[], object]] = {
        "step": lambda: opt.step([grad]),
        "accumulate": lambda: opt.accumulate(layer, h, s),
        "fused_step": lambda: fused_step([weight], [grad], [momentum], lr=0.1),
        "new": lambda: AdaFisher([weight]),
        "asked for": lambda: AdaFisher([weight], backend="cuda"),
        "upload": lambda: rows.upload(0),
    }
    for name, attempt in attempts.items():
        said = in_child(attempt)
        assert said.startswith("BackendError: ") and '"spawn"' in said, f"{name}: {said}"
    opt.step([grad])
    assert opt.steps == 2 and np.isfinite(numpy_of(weight)).all()


TORCH = """
import multiprocessing, os, sys
import torch
from cafin_cupy.adapters.torch import AdaFisher
torch.set_num_threads(1)

def trained(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).to(device)
    optimizer = AdaFisher(model, TCov=2)
    return optimizer, torch.ones(6, 5, device=device)

def iteration(optimizer, x):
    optimizer.zero_grad()
    optimizer.model(x).square().sum().backward()
    optimizer.step()
    return float(sum(p.sum() for p in optimizer.model.parameters()))

def child(optimizer, x, whole):
    try:
        print("trained", iteration(optimizer, x) if whole else optimizer.step())
    except RuntimeError as error:
        print(type(error).__name__, error)

if __name__ == "__main__":
    device, start = sys.argv[1:]
    optimizer, x = trained(device)
    iteration(optimizer, x)
    process = multiprocessing.get_context(start).Process(target=child, args=(optimizer, x, device == "cpu"))
    process.start()
    process.join()
    print("trained", iteration(optimizer, x), process.exitcode)
"""


def run_torch(tmp_path: Any, *arguments: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(TORCH)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # OpenMP's threads do not survive a fork
    ran = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, env=env, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_pytorch_on_a_cpu_trains_on_in_a_forked_process(tmp_path: Any) -> None:
    child, parent = run_torch(tmp_path, "cpu", "fork")
    assert child.startswith("trained ") and parent == f"{child} 0"


@pytest.mark.gpu
def test_pytorch_on_a_gpu_is_told_in_a_forked_process(tmp_path: Any) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no emulated GPU")
    child, parent = run_torch(tmp_path, "cuda", "fork")
    assert child.startswith("BackendError ") and '"spawn"' in child
    assert parent.endswith(" 0")
