"""The training program in JAX: what it learns, what it prints and draws, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("jax")
pytest.importorskip("flax")
import jax
import jax.numpy as jnp
import jax_helpers  # noqa: F401  # no GPU for JAX
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from cafin_cupy import environment
from cafin_cupy.__main__ import main
from cafin_cupy.train_jax import Settings, shifted, train


def configure(settings: dict[str, Any]) -> None:
    """Of JAX's cache, which reads them once."""
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that several runs share; compiling takes longer than training."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    configure(wanted)
    yield
    configure(before)


def test_eight_epochs_reach_97_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    assert main(["train", "--framework", "jax", "--epochs", "8", "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("adafisher on cpu, jax ") and lines[0].endswith("; plain array code")
    assert sum(line.startswith("epoch") for line in lines) == 8
    summary = next(line for line in lines if line.startswith("test accuracy"))
    assert float(summary.split()[2].rstrip("%")) >= 97.0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_adafisherw_learns_by_the_rule_of_the_paper_and_a_seed_decides_everything() -> None:
    settings = Settings(optimizer="adafisherw", averaging="paper", epochs=2, TCov=2, quiet=True)
    first, again = (train(settings) for _ in range(2))
    assert first[1].loss < first[0].loss and first[1].train_accuracy > 0.8
    assert [epoch.loss for epoch in first] == [epoch.loss for epoch in again]


def test_shifts_move_by_at_most_one_pixel() -> None:
    x = jnp.tile(jnp.arange(64.0).reshape(1, 8, 8, 1), (200, 1, 1, 1))
    moved = shifted(jax.random.key(0), x)
    assert moved.shape == x.shape
    assert np.unique(moved[:, 4, 4, 0] - x[:, 4, 4, 0]).tolist() == [-9, -8, -7, -1, 0, 1, 7, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "sgd"], "train: `optimizer` must be adafisher or adafisherw with --framework jax, got sgd"),
        (["--device", "cpu"], "train: `device` must be left out with --framework jax, got cpu"),
        (["--checkpoint", "run.pt"], "train: `checkpoint` must be left out with --framework jax"),
        (["--factors", "f.png"], "train: `factors` must be left out with --framework jax"),
        (["--epochs", "0"], "train: `epochs` must be a whole number >= 1, got 0"),
        (["--output", "no/such/folder/t.png"], "train: `output` must be a file in a folder that exists"),
        (["--TCov", "0"], "`TCov` must be a whole number >= 1, got 0"),
    ],
)
def test_a_bad_value_gives_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--framework", "jax", "--quiet", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "installed", lambda module: module not in ("flax", "optax"))
    assert main(["train", "--framework", "jax"]) == 1
    assert "needs flax, optax; install with: pip install flax optax" in capsys.readouterr().err


def test_it_needs_no_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None; import cafin_cupy.train_jax"
    subprocess.run([sys.executable, "-c", program], check=True)
