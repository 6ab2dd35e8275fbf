"""The training program's checkpoints: a killed run goes on as if nothing had happened, and no other file is taken."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
torch = pytest.importorskip("torch")

from torch_helpers import assert_equal_trees  # noqa: E402  (one thread, as the program has)

from cafin_cupy import CafinError, checkpoint, digits  # noqa: E402
from cafin_cupy.__main__ import main  # noqa: E402
from cafin_cupy.train import Settings, train  # noqa: E402

FEW = 96  # images
QUICK: dict[str, Any] = {"batch_size": 32, "device": "cpu", "quiet": True}  # so three steps an epoch
KILLED = f"""
import os, signal, sys
from cafin_cupy import digits
from cafin_cupy.__main__ import main
load, shifted, calls = digits.load, digits.shifted, []
def dies(*arguments):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return shifted(*arguments)
digits.load, digits.shifted = lambda device: tuple(part[:{FEW}] for part in load(device)), dies
main(sys.argv[2:])
"""


@pytest.fixture(scope="module", autouse=True)
def _few() -> Iterator[None]:
    load = digits.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load", lambda device: tuple(part[:FEW] for part in load(device)))
        yield


def finished(settings: Settings) -> dict[str, Any]:
    """What the last checkpoint of a run holds, but for times."""
    train(settings)
    assert settings.checkpoint is not None
    content = torch.load(settings.checkpoint, weights_only=True)
    content["epochs"] = [numbers[:3] for numbers in content["epochs"]]
    del content["seconds"]
    return content


def test_a_killed_program_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed in the middle of its third epoch, between two steps that refresh the factors."""
    file = tmp_path / "run.pt"
    options = ["--epochs", "5", "--batch-size", "32", "--device", "cpu", "--TCov", "4", "--optimizer", "adafisherw"]
    where = ["--output", str(tmp_path / "curves.png"), "--checkpoint", str(file)]
    program = [sys.executable, "-c", KILLED, "8", "train", *options, *where]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert len(torch.load(file, weights_only=True)["epochs"]) == 2
    settings = {**QUICK, "epochs": 5, "TCov": 4, "optimizer": "adafisherw"}
    unbroken = finished(Settings(**settings, checkpoint=tmp_path / "unbroken.pt"))
    assert_equal_trees(finished(Settings(**settings, checkpoint=file)), unbroken)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafisher"])
def test_every_optimizer_goes_on(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the run ends in an error after its second epoch."""
    settings = Settings(**QUICK, epochs=4, optimizer=optimizer, checkpoint=tmp_path / "run.pt")
    saves = []

    def save(path: Path, content: dict[str, Any]) -> None:
        if len(saves) == 2:
            raise MemoryError
        saves.append(path)
        checkpoint_save(path, content)

    checkpoint_save = checkpoint.save
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(checkpoint, "save", save)
        train(settings)
    result, unbroken = train(settings), train(Settings(**QUICK, epochs=4, optimizer=optimizer))
    assert [epoch.loss for epoch in result.epochs] == [epoch.loss for epoch in unbroken.epochs]
    assert result.seconds > sum(epoch.seconds for epoch in result.epochs)  # those of the first life included


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.pt"
    checkpoint.save(file, {"a": torch.ones(3)})

    def broken(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(file, {"a": torch.zeros(3)})
    assert torch.equal(torch.load(file)["a"], torch.ones(3))


@pytest.fixture(scope="module")
def half(_few: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint after two of three epochs."""
    file = tmp_path_factory.mktemp("half") / "run.pt"
    train(Settings(**QUICK, epochs=2, checkpoint=file))
    content = torch.load(file, weights_only=True)
    content["settings"]["epochs"] = 3
    checkpoint.save(file, content)
    return file.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "be of a run with seed 1, got 0"),
        ({"lr": 0.5}, "be of a run with lr 0.5, got 0.001"),
        ({"optimizer": "sgd"}, "be of a run with optimizer sgd, got adafisher"),
        ({"epochs": 4}, "be of a run with epochs 4, got 3"),
    ],
)
def test_another_run_is_refused(half: bytes, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    file.write_bytes(half)
    with pytest.raises(CafinError, match=f"train: `checkpoint` must {words}; delete .*run.pt"):
        train(Settings(**{**QUICK, "epochs": 3, "checkpoint": file, **options}))
    assert file.read_bytes() == half


def test_a_run_that_is_over_is_refused(half: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    file.write_bytes(half)
    train(Settings(**QUICK, epochs=3, checkpoint=file))
    with pytest.raises(CafinError, match="be of an unfinished run, got one that is over after 3"):
        train(Settings(**QUICK, epochs=3, checkpoint=file))


@pytest.mark.parametrize("what", ["truncated", "empty", "text", "weights", "a tensor"])
def test_another_file_is_refused(what: str, half: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.pt"
    contents = {"truncated": half[: len(half) // 2], "empty": b"", "text": b"seeds: 3\n" * 99}
    if what in contents:
        file.write_bytes(contents[what])
    else:
        torch.save({"weights": torch.ones(3)} if what == "weights" else torch.ones(3), file)
    before = file.read_bytes()
    assert main(["train", "--quiet", "--output", str(tmp_path / "t.png"), "--checkpoint", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("cafin_cupy: train: `checkpoint` must be ") and "delete" in said and said.count("\n") == 1
    assert file.read_bytes() == before


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CafinError, match="`checkpoint` must be a file in a folder that exists"):
        Settings(checkpoint=tmp_path / "no" / "run.pt")


@pytest.mark.gpu
def test_a_run_on_the_gpu_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Of three epochs, the third alone in the second run."""
    settings = {**QUICK, "device": "cuda", "epochs": 3}
    unbroken = finished(Settings(**settings, checkpoint=tmp_path / "unbroken.pt"))
    states: list[bytes] = []
    save = checkpoint.save
    try:
        checkpoint.save = lambda path, content: (save(path, content), states.append(path.read_bytes()))  # type: ignore
        train(Settings(**settings, checkpoint=tmp_path / "run.pt"))
    finally:
        checkpoint.save = save
    (tmp_path / "run.pt").write_bytes(states[1])
    assert_equal_trees(finished(Settings(**settings, checkpoint=tmp_path / "run.pt")), unbroken)
