"""`python -m cafin_cupy profile`: what it measures, its table, and the verdict that follows from the numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cafin_cupy import CafinError, environment, profile  # noqa: E402
from cafin_cupy.__main__ import main, parser  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402
from cafin_cupy.profile import IN_TURN, Line, Result, Settings, Spread, Times, interval, spread  # noqa: E402

PROGRAM = """
import torch
from torch import nn

def task(device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).to(device)
    x, y = torch.randn(8, 3, 8, 8, device=device), torch.randint(5, (8,), device=device)
    return model, lambda model: nn.functional.cross_entropy(model(x), y)

def on_gpu():
    return task("cuda")
"""


@pytest.fixture(name="program", autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_program", raising=False)
    (tmp_path / "users_program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def measured(theirs: list[float], plain: list[float], sampled: float, TCov: int = 100) -> Result:
    """A result of given seconds; the update takes a tenth."""

    def line(label: str, samples: list[float], state: int | None) -> Line:
        parts = (spread([share * x for x in samples]) for share in (1, 0.9, 0.1))
        return Line(label, Times(*parts), state, None)

    lines = (
        line("AdamW, fused", theirs, 2048),
        line("SGD", theirs, 1024),
        line("AdaFisher, unsampled step", plain, 1030),
        line("AdaFisher, sampled step", [sampled] * 2, None),
    )
    return Result("title", "AdaFisher", TCov, lines, [b - a for a, b in zip(theirs, plain)])


def test_each_optimizer_trains_its_own_copy_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, bool]] = []
    turn = profile.Lane.turn

    def watched(lane: Any, *arguments: Any) -> None:
        weights = [p.detach().clone() for p in lane.model.parameters()]
        turn(lane, *arguments)
        assert all(not torch.equal(old, p) for old, p in zip(weights, lane.model.parameters()))
        assert all(p.grad is None for p in lane.model.parameters())
        seen.append((lane.label, id(lane.model), bool(getattr(lane.optimizer, "_taps", ()))))

    monkeypatch.setattr(profile.Lane, "turn", watched)
    monkeypatch.setattr(profile, "RATE", 0.1)  # so that each step shows in float32
    result = profile.profile(Settings("users_program:task", steps=5))
    labels = [line.label for line in result.lines]
    assert labels[2:] == ["AdaFisher, unsampled step", "AdaFisher, sampled step"]
    assert [label for label, *_ in seen[-12:]] == labels * 3  # 5 iterations take 3 turns of 2
    assert f"{3 * IN_TURN} iterations of each kind" in result.title
    assert [taps for *_, taps in seen[-4:]] == [False, False, False, True]  # hooks are on in sampled turns alone
    assert len({model for _, model, _ in seen}) == 3
    assert len(result.added) == 3 * IN_TURN


def test_iterations_between_samples_are_compared_with_those_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"AdamW, fused": 10.0, "SGD, momentum, fused": 9.0, "AdaFisher, unsampled step": 12.5}
    monkeypatch.setattr(
        profile.Lane, "iterations", lambda lane, clock: [seconds.get(lane.label, 20.0)] * len(lane.marks)
    )
    result = profile.profile(Settings("users_program:task", steps=2))
    assert [line.times.iteration.median for line in result.lines] == [10.0, 9.0, 12.5, 20.0]
    assert result.added == [2.5] * IN_TURN


def test_the_parts_make_the_whole() -> None:
    result = profile.profile(Settings("users_program:task", steps=4))
    for line in result.lines:
        whole, passes, update = line.times
        assert 0 < passes.median < whole.median and 0 < update.median < whole.median
        assert all(x.low <= x.median <= x.high for x in line.times)
    adamw, sgd, ours = (line.state for line in result.lines[:3])
    parameters = 4 * (3 * 4 * 9 + 4 + 4 + 4 + 144 * 5 + 5)  # bytes
    assert sgd == parameters and adamw >= 2 * parameters and parameters < ours < 2 * parameters
    assert all(line.peak is None for line in result.lines)


def test_the_options_reach_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = AdaFisher.__init__

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(AdaFisher, "__init__", watched)
    profile.profile(Settings("users_program:task", "adafisherw", 7, "paper", 2))
    (optimizer,) = made
    assert type(optimizer).__name__ == "AdaFisherW" and optimizer.averaging.normalize == "after"


def test_one_step_in_TCov_is_sampled() -> None:
    whole, update = measured([1.0, 1.0], [1.0, 1.0], 3.0, TCov=4).overall
    assert (whole, update) == pytest.approx((1.5, 0.15))  # (3 x 1 + 3) / 4, a tenth of it
    assert measured([1.0, 1.0], [1.0, 1.0], 3.0, TCov=1).overall[0] == 3.0


NOISE = [0.01 * np.sin(k) for k in range(40)]


@pytest.mark.parametrize(
    ("factor", "sampled", "TCov", "words"),
    [
        (1.0, 1.0, 100, "as long as with AdamW (with 95% confidence -"),
        (1.25, 1.25, 100, "25.0% more than with AdamW"),
        (1.25, 1.25, 100, "pays if it saves 20.0% of the steps"),
        (0.8, 0.8, 100, "20.0% less than with AdamW"),
        (0.8, 0.8, 100, "pays from the first step"),
        (1.0, 2.0, 2, "pays if it saves 33.3% of the steps"),  # every second step takes twice as long
    ],
)
def test_the_verdict(factor: float, sampled: float, TCov: int, words: str) -> None:
    # The noise of both is the same but for a small part, as that of two iterations in one turn is.
    theirs = [1 + x for x in NOISE]
    plain = [factor + x + 0.003 * (-1) ** k for k, x in enumerate(NOISE)]
    assert words in measured(theirs, plain, sampled, TCov).verdict


def test_scattered_timings_give_no_verdict() -> None:
    theirs = [1.0, 3.0] * 10
    assert "too scattered to tell" in measured(theirs, theirs[::-1], 1.5).verdict


def test_the_table() -> None:
    lines = measured([0.01, 0.01], [0.012, 0.014], 0.02).table().splitlines()
    assert lines == [
        "title",
        "",
        "                             iteration ms  forward, backward ms     optimizer ms  share    state",
        "AdamW, fused                   10 (10-10)               9 (9-9)          1 (1-1)  10.0%  2.0 KiB",
        "SGD                            10 (10-10)               9 (9-9)          1 (1-1)  10.0%  1.0 KiB",
        "AdaFisher, unsampled step  13 (12.4-13.6)      11.7 (11.2-12.2)  1.3 (1.24-1.36)  10.0%  1.0 KiB",
        "AdaFisher, sampled step        20 (20-20)            18 (18-18)          2 (2-2)  10.0%",
        "AdaFisher, TCov = 100                13.1                                   1.31  10.0%",
    ]


def test_percentiles() -> None:
    assert spread([float(n) for n in range(11)]) == Spread(5.0, 2.0, 8.0)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """For a skewed distribution, 95% up to the noise of 2,000 trials (0.5%) and the steps of its ranks (2%)."""
    rng = np.random.default_rng(0)
    for count in (20, 60):
        found = [interval(list(rng.exponential(size=count))) for _ in range(2000)]
        held = np.mean([low <= np.log(2) <= high for _, low, high in found])
        assert 0.93 < held < 0.985


def test_the_interval_of_few_samples_is_their_range() -> None:
    assert interval([3.0, 1.0]) == Spread(2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 1}, "`steps` must be a whole number >= 2, got 1"),
        ({"TCov": 0}, "`TCov` must be a whole number >= 1, got 0"),
        ({"optimizer": "adam"}, "`optimizer` must be adafisher or adafisherw, got adam"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CafinError, match=words.replace("(", "\\(")):
        Settings("a:b", **options)


def test_every_option_is_a_setting() -> None:
    options = vars(parser().parse_args(["profile", "a:b"]))
    options.pop("command")
    assert set(options) == set(Settings.__dataclass_fields__)


def test_as_a_user_runs_it(program: Path) -> None:
    command = [sys.executable, "-m", "cafin_cupy", "profile", "users_program:task", "--steps", "2", "--TCov", "10"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=program, env=_with_package())
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("users_program:task on cpu: 845 parameters in 6 tensors; 2 iterations of each kind")
    assert lines[-1].startswith("verdict: ")
    assert any(line.startswith("AdaFisher, TCov = 10 ") for line in lines)


def _with_package() -> dict[str, str]:
    import os

    import cafin_cupy

    home = str(Path(cafin_cupy.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}


def test_an_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "users_program:nothing"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("cafin_cupy: profile: `users_program:nothing` must be a function of ")


def test_missing_pytorch_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "installed", lambda module: module != "torch")
    assert main(["profile", "a:b"]) == 1
    assert capsys.readouterr().err == "cafin_cupy: profile: needs torch; install with: pip install torch\n"


def test_help_tells_the_contract_without_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None; from cafin_cupy.__main__ import main; main(['profile', '-h'])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "returns (model, loss_of)" in " ".join(ran.stdout.split())


@pytest.mark.gpu
def test_the_gpu_counts_its_memory() -> None:
    result = profile.profile(Settings("users_program:on_gpu", steps=4))
    assert all(line.peak and line.peak > 8 * 845 for line in result.lines[:3])  # a copy of the model, and gradients
    assert "peak" in result.table()
