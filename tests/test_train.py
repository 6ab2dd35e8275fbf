"""The training program: what it learns, what it prints and draws, and how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
torch = pytest.importorskip("torch")

from cafin_cupy import CafinError, digits, environment  # noqa: E402  (the program needs the extra [train])
from cafin_cupy.__main__ import main, parser  # noqa: E402
from cafin_cupy.ranks import Ranks  # noqa: E402
from cafin_cupy.train import DEFAULTS, Settings, train  # noqa: E402

CPU = torch.device("cpu")
FORMS = [
    ("adafisher", "parity"),
    ("adafisher", "paper"),
    ("adafisherw", "parity"),
    ("adamw", None),
    ("sgd", None),
]


@pytest.mark.parametrize(("optimizer", "averaging"), FORMS)
def test_every_optimizer_learns(optimizer: str, averaging: str | None) -> None:
    result = train(Settings(optimizer=optimizer, averaging=averaging, epochs=3, device="cpu", quiet=True))
    losses = [epoch.loss for epoch in result.epochs]
    assert losses == sorted(losses, reverse=True)
    assert result.epochs[-1].train_accuracy > 0.9
    assert 0 < result.update_seconds < result.step_seconds


def test_default_run_reaches_97_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    assert main(["train", "--device", "cpu", "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert lines[0] == "adafisher on cpu; backend reference: the network is on the CPU"
    assert len(epochs) == Settings().epochs
    summary = next(line for line in lines if line.startswith("test accuracy"))
    assert float(summary.split()[2].rstrip("%")) >= 97.0
    assert any(line.startswith("optimizer.step()") for line in lines)
    assert any(line.startswith("factors:") for line in lines)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def torchrun(*arguments: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = [*launcher, "cafin_cupy", "train", "--device", "cpu", *arguments]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_train_one_network(tmp_path: Path) -> None:
    """The first prints and saves; all have the same bits, as every 20 steps they compare. One process goes on from
    there: BatchNorm sees half of the batch on each rank, the rest is the same."""
    file, picture = tmp_path / "run.pt", tmp_path / "curves.png"
    options = ["--checkpoint", str(file), "--output", str(picture)]
    said = torchrun(*options, "--factors", str(tmp_path / "factors.png")).splitlines()
    assert said[0] == "adafisher on cpu; backend reference: the network is on the CPU; 2 ranks"
    assert [line.split()[1] for line in said if line.startswith("epoch")] == [str(n + 1) for n in range(12)]
    (summary,) = (line for line in said if line.startswith("test accuracy"))
    assert float(summary.split()[2].rstrip("%")) >= 97.0
    assert picture.is_file() and (tmp_path / "factors.png").is_file()
    saved = torch.load(file, weights_only=True)
    assert saved["parts"]["optimizer"]["steps"] == 12 * (len(digits.load(CPU)[0]) // 64)
    saved["epochs"].pop()  # as after the last epoch but one
    torch.save(saved, file)
    assert len(train(Settings(device="cpu", quiet=True, checkpoint=file)).epochs) == 12


def test_a_batch_feeds_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(CafinError, match="train: `batch_size` must be a whole number >= 8, got 7"):
        train(Settings(batch_size=7))
    ranks = Ranks()
    assert (ranks.rank, ranks.count, ranks.first) == (1, 4, False)
    batch = torch.arange(7)
    assert ranks.share(batch).tolist() == [1, 5] and ranks.weight(batch) == 8 / 7


def test_a_seed_decides_everything() -> None:
    first, again, other = (
        train(Settings(epochs=1, seed=seed, device="cpu", quiet=True)).epochs[0] for seed in (3, 3, 4)
    )
    assert (first.loss, first.test_accuracy) == (again.loss, again.test_accuracy)
    assert first.loss != other.loss


def test_factors_are_timed_apart_only_where_some_steps_have_none() -> None:
    every = train(Settings(epochs=1, TCov=1, batch_size=512, device="cpu", quiet=True))
    some = train(Settings(epochs=2, TCov=2, batch_size=512, device="cpu", quiet=True))
    assert every.factor_seconds is None
    assert some.factor_seconds is not None


def test_digits_are_split_once_and_evenly() -> None:
    x, y, x_test, y_test = digits.load(CPU)
    assert (x.shape, x_test.shape) == ((1347, 1, 8, 8), (450, 1, 8, 8))
    assert abs(x.mean().item()) < 1e-5 and abs(x.std().item() - 1) < 1e-3
    assert all(43 <= count <= 47 for count in torch.bincount(y_test).tolist())
    assert len(y) + len(y_test) == 1797
    assert torch.equal(x, digits.load(CPU)[0])


def test_shifts_move_by_at_most_one_pixel() -> None:
    x = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(200, 1, 1, 1)
    moved = digits.shifted(x, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    offsets = (moved[:, 0, 4, 4] - x[:, 0, 4, 4]).unique().tolist()
    assert offsets == [-9, -8, -7, -1, 0, 1, 7, 8, 9]


def test_defaults_fill_only_what_is_not_given() -> None:
    settings = Settings(lr=0.5, optimizer="adafisherw")
    expected = DEFAULTS[("adafisherw", "parity")]
    assert (settings.lr, settings.Lambda, settings.TCov) == (0.5, expected["Lambda"], expected["TCov"])


def test_every_option_is_a_setting() -> None:
    options = vars(parser().parse_args(["train"]))
    assert options.pop("command") == "train" and options.pop("framework") is None
    assert set(options) == set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "0"], "train: `epochs` must be a whole number >= 1, got 0"),
        (["--batch-size", "1"], "train: `batch_size` must be a whole number >= 2, got 1"),
        (["--seed", "-1"], "train: `seed` must"),
        (["--lr", "0"], "train: `lr` must be > 0, got 0"),
        (["--lr", "nan"], "train: `lr` must be finite"),
        (["--weight-decay", "-1"], "`weight_decay` must be >= 0, got -1"),
        (["--Lambda", "0"], "`Lambda` must be > 0, got 0"),
        (["--TCov", "0"], "`TCov` must be a whole number >= 1, got 0"),
        (["--gamma", "2"], "`gamma` must lie in [0, 1], got 2"),
        (["--output", "no/such/folder/t.png"], "train: `output` must be a file in a folder that exists"),
        (["--optimizer", "sgd", "--TCov", "5"], "`TCov` must be given for AdaFisher alone"),
        (["--device", "cpu", "--backend", "cuda"], "`backend` must be able to reach the arrays"),
    ],
)
def test_a_bad_value_gives_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = [] if "--output" in arguments else ["--output", str(tmp_path / "t.png")]
    assert main(["train", "--quiet", *arguments, *output]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cafin_cupy: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(CafinError, match="be a GPU that PyTorch sees, got none"):
        Settings(device="cuda")


@pytest.mark.parametrize("arguments", [["train", "--epochs", "many"], ["train", "--optimizer", "adam"], ["fit"], []])
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "installed", lambda module: module not in ("sklearn", "tqdm"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == (
        "cafin_cupy: train: needs scikit-learn, tqdm; install with: pip install scikit-learn tqdm\n"
    )


def test_help_names_every_option_without_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None; from cafin_cupy.__main__ import main; main(['train', '--help'])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for name in Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in ran.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adafisher", "adafisherw"])
def test_the_gpu_trains_with_the_kernels(optimizer: str) -> None:
    result = train(Settings(optimizer=optimizer, epochs=6, quiet=True))
    assert result.backend.startswith("cuda: fused kernels on ")
    assert result.accuracy > 0.97
    assert 0 < result.update_seconds < result.step_seconds


@pytest.mark.gpu
def test_a_seed_decides_everything_on_the_gpu() -> None:
    first, again = (train(Settings(epochs=2, quiet=True)).epochs for _ in range(2))
    assert [epoch.loss for epoch in first] == [epoch.loss for epoch in again]
