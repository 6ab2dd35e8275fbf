"""Every example of the README runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_helpers import assert_equal_trees

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def block(mark: str) -> str:
    (found,) = [code for code in BLOCKS if mark in code]
    return found


def test_the_table_names_every_layer():
    """That has factors in PyTorch, by the name of its class."""
    from cafin_cupy.adapters import torch_kinds

    table = README.read_text(encoding="utf-8").split("## Layers and their factors")[1].split("\n\n")[2]
    modules = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for cell in modules for name in re.findall("`([A-Z]\\w+)`", cell)}
    known = {kind.__name__ for kind in torch_kinds._KINDS} | {name for _, name in torch_kinds._FOREIGN}
    assert named == known


def test_every_block_has_its_test():
    assert len(BLOCKS) == 14


def test_pytorch_example():
    names = run(block("optimizer.factors()"))
    assert names["H"].shape == (21,) and names["S"].shape == (64,)


def test_example_of_groups_without_decay():
    """Of vectors and the embedding, as a language model has it: the one matrix is left for the last group."""
    optimizer = run(block("no_decay"))["optimizer"]
    first, rest = optimizer.param_groups
    assert rest["params"] == [optimizer.model[2].weight] and rest["weight_decay"] == 0.1
    assert len(first["params"]) == 4 and first["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("mark", "steps"), [("init_process_group", 20), ("from accelerate import", 5), ("from transformers import", 20)]
)
def test_examples_on_two_ranks(mark, steps, tmp_path):
    """That of several processes, and trainers, which find them by themselves: all ranks end with the same bits."""
    for package in ("accelerate", "transformers"):
        if package in mark:
            pytest.importorskip(package)
    code = block(mark) + "\nimport os\ntorch.save(optimizer.state_dict(), os.environ['RANK'])\n"
    # With any optimizer, gloo's threads may still hold tensors at the interpreter's end, which aborts the process.
    code += "os._exit(0)\n"
    (tmp_path / "script.py").write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(README.parent), *sys.path])
    ours = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command, env = [*launcher, "script.py"], {**os.environ, **ours}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / rank, weights_only=True) for rank in "01")
    assert first["steps"] == steps
    assert_equal_trees(first, second)


@pytest.mark.gpu
def test_example_of_captured_iterations():
    names = run(block("optimizer.capture"))
    assert names["optimizer"].steps == 20 and names["train"]._graphs


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_plain_array_example_learns(library):
    names = run(block("import cupy as xp").replace("import cupy as xp", f"import {library} as xp"))
    assert names["opt"].backend == ("cuda" if library == "cupy" else "reference")
    assert names["accuracy"] > 0.93  # 10 points below would be a linear model; seeds vary by 1 point


def test_example_of_a_layer_of_ones_own():
    names = run(block("register_layer"))
    from cafin_cupy.adapters.torch import unregister_layer

    assert names["optimizer"].factors().keys() == {"0", "1"}
    unregister_layer(names["LlamaRMSNorm"])


def test_example_of_seeing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(block("Recorder(optimizer)"))
    assert "adafisher/12.weight/mean" in names["scalars"] and len(names["recorder"].steps) == 4
    assert (tmp_path / "factors.png").is_file()
    table = capsys.readouterr().out.strip()
    if names["optimizer"].backend == "reference":
        assert f"```\n{table}\n```" in README.read_text(encoding="utf-8")


def test_checkpoint_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(block("checkpoint.pt"))
    assert (tmp_path / "checkpoint.pt").is_file()


@pytest.fixture
def on_one_device(tmp_path, monkeypatch):
    """Trainers write where they run, and would take every GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return tmp_path


def test_transformers_example(on_one_device):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = run(block("from transformers import"))
    assert names["optimizer"].steps == 20 and names["trainer"].optimizer.optimizer is names["optimizer"]
    assert (on_one_device / "bert" / "checkpoint-20" / "optimizer.pt").is_file()


def test_accelerate_example(on_one_device):
    pytest.importorskip("accelerate")
    names = run(block("from accelerate import"))
    assert names["adafisher"].steps == 10
    assert (on_one_device / "run" / "optimizer.bin").is_file()


def test_lightning_example(on_one_device):
    pytest.importorskip("lightning")
    names = run(block("import lightning"))
    (optimizer,) = names["trainer"].optimizers
    assert optimizer.steps == 20 and optimizer.factors().keys() == {"net.0", "net.2"}
    assert list(on_one_device.rglob("*.ckpt"))


def test_flax_example():
    pytest.importorskip("flax")
    names = run(block("import flax.linen as nn"))
    assert names["state"].count == 20 and names["H"].shape == (17,) and names["S"].shape == (5,)
    assert (names["H"] < 0.1).all()  # two sampled steps


def test_equinox_example():
    pytest.importorskip("equinox")
    names = run(block("import equinox as eqx"))
    assert names["state"][1].count == 20 and len(names["layers"]) == 2
    assert (names["model"].layers[0].weight == names["params"].layers[0].weight).all()


def test_example_of_jax_arrays_outside_of_jit():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    names = run(block("borrowed"))
    assert float(names["params"]["b"][0]) == pytest.approx(-3 * 1e-3 / (0.5 * 0.5 + 1e-3), rel=1e-6)  # m / F is alike
    assert names["optimizer"].steps == 1 and 0 < names["optimizer"].factors()["0"][0][0] < 1
