"""The recorder of factors: what it copies and when, and the picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FRAMEWORKS, make, numpy_of

from cafin_cupy import AdaFisher, Averaging, BackendError, CafinError, Linear, recorder, reference
from cafin_cupy.recorder import Recorder

PNG = b"\x89PNG\r\n\x1a\n"


class Run:
    """Two Linear layers that see random numbers."""

    def __init__(self, framework: str = "numpy", widths: tuple[int, int] = (5, 3), **options: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.framework = framework
        self.params = [self.random(3, widths[0]), self.random(2, widths[1])]
        self.layers = [Linear(p, name=name) for p, name in zip(self.params, ("one", "two"))]
        self.optimizer = AdaFisher(self.params, self.layers, **options)

    def random(self, *shape: int) -> Any:
        return make(self.framework, self.rng.normal(size=shape))

    def step(self) -> None:
        for layer in self.layers:
            d_out, d_in = layer.shape
            self.optimizer.accumulate(layer, self.random(4, d_in), self.random(4, d_out))
        self.optimizer.step([self.random(*p.shape) for p in self.params])

    def effective(self) -> dict[str, list[Any]]:
        rule = self.optimizer.averaging
        factors = self.optimizer.factors().items()
        return {k: [reference.effective(numpy_of(F).astype(float), rule) for F in pair] for k, pair in factors}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("rule", ["parity", "paper"])
def test_copies_are_what_was_when_they_were_made(framework: str, rule: str) -> None:
    run = Run(framework, TCov=2, averaging=rule)
    seen, want = Recorder(run.optimizer), []
    assert not seen.record()  # before the first step
    for step in range(5):
        run.step()
        assert seen.record() == (step % 2 == 0)
        assert not seen.record()  # once a step
        if step % 2 == 0:
            want.append(run.effective())
    assert seen.layers == ["one", "two"]
    for name in seen.layers:
        history = seen.history(name)
        assert history.steps.tolist() == [0, 2, 4]
        for got, k in ((history.H, 0), (history.S, 1)):
            np.testing.assert_array_equal(got, np.stack([values[name][k] for values in want]))
        assert not np.array_equal(history.H[0], history.H[1])


def test_only_the_layers_that_are_named() -> None:
    run = Run(TCov=1)
    seen = Recorder(run.optimizer, ["two"])
    run.step()
    seen.record()
    assert seen.history("two").H.shape == (1, 3)
    with pytest.raises(CafinError, match=r"history: `layers` must be among \['two'\], got 'one'"):
        seen.history("one")


def test_nothing_recorded_is_an_empty_history() -> None:
    steps, H, S = Recorder(Run().optimizer).history("one")
    assert (len(steps), H.size, S.size) == (0, 0, 0)


def test_a_step_that_was_not_made_is_not_recorded_again() -> None:
    """As where a `GradScaler` leaves it out: the counter stands still."""
    run = Run(TCov=1)
    seen = Recorder(run.optimizer)
    run.step()
    assert [seen.record(), seen.record()] == [True, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: Recorder(object()), "Recorder: `optimizer` must be an AdaFisher, got object"),
        (lambda run: Recorder(run.optimizer, ["x"]), "Recorder: `layers` must be among ['one', 'two'], got 'x'"),
        (lambda run: Recorder(run.optimizer, "one"), "Recorder: `layers` must be a list of names, got 'one'"),
        (lambda run: Recorder(run.optimizer).draw("x.png"), "draw: `recorder` must have seen a sampled step"),
        (lambda run: Recorder(run.optimizer).draw("x.png", ["x"]), "draw: `layers` must be among"),
        (lambda run: Recorder(run.optimizer, [[]]), "Recorder: `layers` must be among ['one', 'two'], got []"),
        (lambda run: Recorder(run.optimizer).history({}), "history: `layers` must be among ['one', 'two'], got {}"),
        (lambda run: Recorder(run.optimizer).draw(None), "draw: `path` must be the name of a file, got None"),
        (lambda run: Recorder(run.optimizer).draw("x.png", title=1), "draw: `title` must be a string, got 1"),
    ],
)
def test_what_is_refused(call: Any, words: str) -> None:
    with pytest.raises(CafinError) as refused:
        call(Run())
    assert words in str(refused.value)


def recorded(steps: int = 6, **options: Any) -> Recorder:
    run = Run(**options)
    seen = Recorder(run.optimizer)
    for _ in range(steps):
        run.step()
        seen.record()
    return seen


def drawn(seen: Recorder, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Any, ...]]:
    """(steps, entries, values) of each image in the picture."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    images: list[tuple[Any, ...]] = []
    pcolormesh = axes.pcolormesh

    def watched(self: Any, *arrays: Any, **style: Any) -> Any:
        if "rasterized" in style:  # the bar of colours is such an image too
            images.append(arrays)
        return pcolormesh(self, *arrays, **style)

    monkeypatch.setattr(axes, "pcolormesh", watched)
    seen.draw(path, **options)
    assert path.read_bytes()[:8] == PNG
    return images


def test_the_picture_shows_the_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(TCov=2, averaging="paper")
    images = drawn(seen, tmp_path / "f.png", monkeypatch, title="a run")
    factors = [F for name in ("one", "two") for F in seen.history(name)[1:]]
    assert len(images) == len(factors)
    top = max(F.max() for F in factors)
    for (steps, entries, values), F in zip(images, factors):
        assert steps.tolist() == [0, 2, 4, 6] and entries.tolist() == list(range(F.shape[1] + 1))
        np.testing.assert_allclose(values, np.maximum(F.T, 1e-5 * top), rtol=1e-15)


def test_factors_of_zeros_are_drawn(tmp_path: Path) -> None:
    """One sample alone, of a rule that makes nothing but zeros."""
    seen = recorded(1, TCov=1, averaging=Averaging(0.0, 0.0))
    seen.draw(tmp_path / "f.png")
    assert not seen.history("one").H.any()


def test_layers_that_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(TCov=1)
    assert [len(v) for *_, v in drawn(seen, tmp_path / "f.png", monkeypatch, layers=["two"])] == [3, 2]
    monkeypatch.setattr(recorder, "SHOWN", 1)
    assert [len(v) for *_, v in drawn(seen, tmp_path / "f.png", monkeypatch)] == [5, 3]  # the largest
    empty = recorded(TCov=1, widths=(0, 3))
    assert [len(v) for *_, v in drawn(empty, tmp_path / "f.png", monkeypatch, layers=["one", "two"])] == [3, 2]


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (3, 3), (4, 4), (5, 3), (8, 4), (9, 3)])
def test_many_entries_share_cells_by_their_mean(count: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CELLS", 4)
    x = np.random.default_rng(0).normal(size=(count, 2))
    edges = 10 * np.arange(count + 1)
    means, ends = recorder._cells(x, edges)
    assert len(means) == cells and ends[0] == 0 and ends[-1] == 10 * count
    for mean, first, last in zip(means, ends[:-1] // 10, ends[1:] // 10, strict=True):
        np.testing.assert_allclose(mean, x[first:last].mean(axis=0))


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(TCov=1)
    monkeypatch.setattr(recorder, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="draw: needs matplotlib; install with: pip install matplotlib"):
        seen.draw("f.png")


def test_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from cafin_cupy.adapters.torch import AdaFisher as Torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = Torch(model, TCov=3)
    seen, want = Recorder(optimizer), []
    for step in range(7):
        optimizer.zero_grad()
        model(torch.ones(5, 3) * step).square().mean().backward()
        optimizer.step()
        seen.record()
        if step % 3 == 0:
            want.append(numpy_of(optimizer.factors()["2"][1]))
    steps, _, S = seen.history("2")
    assert steps.tolist() == [0, 3, 6]
    np.testing.assert_array_equal(S, np.stack(want))


def test_training_draws_its_factors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    from cafin_cupy.__main__ import main

    picture, curves = tmp_path / "factors.png", tmp_path / "curves.png"
    options = ["--device", "cpu", "--epochs", "1", "--quiet", "--output", str(curves), "--factors", str(picture)]
    assert main(["train", *options]) == 0
    assert f"factors over the steps in {picture}" in capsys.readouterr().out
    assert picture.read_bytes()[:8] == PNG
    assert main(["train", "--optimizer", "sgd", *options]) == 1
    assert "`factors` must be given for AdaFisher alone" in capsys.readouterr().err


def test_importing_it_imports_neither_framework_nor_matplotlib() -> None:
    import subprocess

    program = "import sys, cafin_cupy.recorder; print({'torch', 'jax', 'cupy', 'matplotlib'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
