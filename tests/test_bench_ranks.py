"""The benchmark of several ranks, at small sizes on two processes, of CPUs or on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # bench is no part of the installed package

from bench.models import Decoder  # noqa: E402
from bench.ranks import HEAD, TINY, main  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

ROWS = [
    ("DDP", "AdaFisher"),
    ("DDP", "AdaFisher(shard_state=True)"),
    ("DDP", "AdamW(fused)"),
    ("DDP", "ZeroRedundancyOptimizer(AdamW, fused)"),
    ("FSDP2", "AdaFisher"),
    ("FSDP2", "AdamW(fused)"),
]


@pytest.fixture(name="results", scope="module", params=["cpu", pytest.param("shared", marks=pytest.mark.gpu)])
def small_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the results."""
    shared = request.param == "shared"
    if shared and not torch.cuda.is_available():
        pytest.skip("NCCL needs a real GPU")
    out = tmp_path_factory.mktemp("ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    command = [*launcher, "-m", "bench.ranks", *(["--shared"] if shared else ["--device", "cpu"]), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def test_all_rows_are_there(results: Path) -> None:
    (file,) = results.glob("*-ranks-smoke.json")
    record = json.loads(file.read_text())
    assert record["conditions"]["ranks"] == 2 and len(record["workloads"]) == 2
    lines = file.with_suffix(".md").read_text().splitlines()
    for work in record["workloads"]:
        assert [(row["wrapper"], row["optimizer"]) for row in work["rows"]] == ROWS
        for row in work["rows"]:
            ours = row["optimizer"].startswith("AdaFisher")
            assert {name for name in ("step", "iteration", "sampled", "silent") if row.get(name)} == (
                {"step", "iteration", "sampled", "silent"} if ours else {"step", "iteration"}
            )
            assert all(row[name]["median"] > 0 for name in ("step", "iteration"))
            line = next(x for x in lines if x.startswith(f"| {row['wrapper']}, {row['optimizer']} |"))
            on_a_gpu = work["rows"][0]["peak"] is not None  # else the memory at peak is left out
            assert line.count("|") == len(HEAD) + on_a_gpu
        state = {(row["wrapper"], row["optimizer"]): row["state"] for row in work["rows"]}
        assert state[ROWS[1]] < 0.7 * state[ROWS[0]] and state[ROWS[4]] < 0.7 * state[ROWS[0]]


def test_bytes_are_those_of_the_formulas(results: Path) -> None:
    """On two ranks a ring sends an all-reduced number once, and half of an all-gathered or reduce-scattered one."""
    (file,) = results.glob("*-ranks-smoke.json")
    work = json.loads(file.read_text())["workloads"][1]
    model = Decoder(TINY.depth, TINY.wide, TINY.heads, TINY.vocabulary, TINY.context)
    optimizer = AdaFisher(model)
    size = 4 * work["parameters"]
    assert work["parameters"] == sum(p.numel() for p in model.parameters())
    layers = optimizer._layers
    norms = sum(layer.H_units is None for layer in layers)
    sums = sum((layer.H_units or TINY.context) + layer.S_size for layer in layers) + len(layers) + 2 * norms
    sent = {(row["wrapper"], row["optimizer"]): row["sent"] for row in work["rows"]}
    assert sent[ROWS[0]] == [size, size + 4 * sums]
    assert sent[ROWS[2]] == [size, None]
    plain, sampled = sent[ROWS[1]]
    assert 1.5 * size <= plain < 1.55 * size  # rows that two ranks do not divide are filled up
    assert sampled == plain + 4 * sums
    assert sent[ROWS[4]][0] == sent[ROWS[5]][0] and sent[ROWS[4]][1] - sent[ROWS[4]][0] == 4 * sums


def test_it_must_be_started_on_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node=2 -m bench.ranks" in capsys.readouterr().err
