"""The user's function of `profile`: what it may be, and what is said where it is something else."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.task import Task  # noqa: E402

HEAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

x = torch.ones(5, 3)
mine = model()
frozen = model().requires_grad_(False)
"""
COUNT = iter(range(10**6))


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """A new module in the import path; its name."""
    name = f"users_task_{next(COUNT)}"
    (folder / f"{name}.py").write_text(HEAD + text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_model_and_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "def task():\n    return model(), lambda m: m(x).square().mean()\n")
    task = Task(f"{name}:task")
    assert (task.name, task.device) == (f"{name}:task", torch.device("cpu"))
    assert all(p.grad is None for p in task.model.parameters())  # it was tried on a copy
    one, other = task.copy(), task.copy()
    assert torch.equal(task.loss(one), task.loss(other))
    task.loss(one).backward()
    assert one[0].weight.grad is not None and other[0].weight.grad is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`NAME:task` must be a function of FILE, got nothing of that name"),
        ("task = 3", "`NAME:task` must be a function of FILE, got int"),
        ("raise OSError('no\\nfile')", "import NAME failed with OSError: no file (FILE, line 11)"),
        ("raise SystemExit(2)", "import NAME failed with SystemExit: 2 (FILE, line 11)"),
        ("import not_there_at_all", "import NAME failed with ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def task(model): return 1", "NAME:task() failed with TypeError: task() missing 1 required"),
        ("def task(): return model()", "`NAME:task()` must return (model, loss_of), got Sequential"),
        ("def task(): return 1, 2, 3", "`NAME:task()` must return (model, loss_of), got a tuple of 3"),
        ("def task(): return 1, 2", "`NAME:task()` must return a torch.nn.Module first, got int"),
        ("def task(): return model(), x", "`NAME:task()` must return a function of the model second, got Tensor"),
        ("def task(): return frozen, len", "must return a model with a parameter that trains, got none"),
        ("def task(): return model(), lambda: 0", "loss_of of NAME:task failed with TypeError"),
        ("def task(): return model(), lambda m: m(x[0, 0])", "loss_of of NAME:task failed with RuntimeError"),
        ("def task(): return model(), lambda m: 0.5", "`loss_of of NAME:task` must return a tensor, got float"),
        ("def task(): return model(), lambda m: m(x)", "must return a single number with gradient, got shape (5, 2)"),
        ("def task(): return model(), lambda m: x.sum()", "a single number with gradient, got one without gradient"),
        ("def task(): return model(), lambda m: mine(x).sum()", "must use the model that it is given"),
        ("def task(): return model().to('meta'), lambda m: m(x).sum()", "loss_of of NAME:task failed with"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, text)
    with pytest.raises(CafinError) as refused:
        Task(f"{name}:task")
    said = str(refused.value)
    assert said.startswith("profile: ")
    assert words.replace("NAME", name).replace("FILE", str(tmp_path / f"{name}.py")) in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["task", ":task", "module:", "module:a b", ""])
def test_a_name_is_two_names(name: str) -> None:
    with pytest.raises(CafinError, match="`MODULE:FUNCTION` must name both, as in train:task, got"):
        Task(name)


def test_a_missing_module_is_named() -> None:
    with pytest.raises(CafinError, match="import no_such_module failed with ModuleNotFoundError"):
        Task("no_such_module:task")
