"""System faults within a step on raw arrays: afterwards all is as before the step, or as after it, and the step can be
tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faults import FAULTS, Gate, ctrl_c, gate, interrupted_at, some  # noqa: F401
from helpers import CUDA, Device, numpy_of

from cafin_cupy import AdaFisher, BackendError, BatchNorm2d, Conv2d, ConvTranspose2d, Embedding, LayerNorm, Linear
from cafin_cupy.layers import Layer

STEPS = 4  # sampled, not, sampled, not: with TCov = 2
State = dict[str, Any]


class Run:
    """A training run whose numbers do not depend on how it goes, so that two runs can be compared to the bit."""

    def __init__(self, device: Device, averaging: str = "parity") -> None:
        rng = np.random.default_rng(0)
        self.device = device

        def draw(*shape: int) -> Any:
            return device.array(rng.standard_normal(shape))

        images = (2, 4, 5, 4)
        self.layers: list[tuple[Layer, Any, Any]] = [
            (Linear(draw(3, 5), draw(3)), draw(4, 5), draw(4, 3)),
            (Conv2d(draw(4, 2, 3, 3), draw(4), padding=1, groups=2), draw(*images), draw(*images)),
            (BatchNorm2d(draw(4), draw(4)), draw(*images), draw(*images)),
            (LayerNorm(draw(5), None), draw(2, 3, 5), draw(2, 3, 5)),
            (ConvTranspose2d(draw(4, 2, 1, 2), draw(2)), draw(2, 4, 3, 2), draw(2, 2, 3, 3)),
            (Embedding(draw(6, 3), padding_idx=1), device.array(np.arange(8).reshape(2, 4) % 6), draw(2, 4, 3)),
        ]
        arrays = [array for layer, *_ in self.layers for array in (layer.weight, layer.bias) if array is not None]
        self.params = [*arrays, draw(7)]
        layers = [layer for layer, *_ in self.layers]
        self.opt = AdaFisher(self.params, layers, TCov=2, weight_decay=0.1, averaging=averaging, backend=device.backend)
        self.grads = [[draw(*p.shape) for p in self.params] for _ in range(STEPS)]

    def feed(self) -> None:
        """What comes ahead of a step: twice, so that the second call adds to the first."""
        for layer, h, s in self.layers * 2:
            self.opt.accumulate(layer, h, s)

    def step(self) -> None:
        self.opt.step(self.grads[self.opt.steps])

    def train(self, until: int) -> None:
        while self.opt.steps < until:
            self.feed()
            self.step()

    def state(self) -> State:
        factors = {
            f"{letter} of {name}": f for name, pair in self.opt.factors().items() for letter, f in zip("HS", pair)
        }
        named = {f"p{k}": p for k, p in enumerate(self.params)} | {f"m{k}": m for k, m in enumerate(self.opt.momenta)}
        found = {name: numpy_of(array).tobytes() for name, array in (named | factors).items()}
        return {**found, "steps": self.opt.steps, "effective": [numpy_of(f).tobytes() for f in self.effective()]}

    def effective(self) -> list[Any]:
        return self.opt._factors.H_effective + self.opt._factors.S_effective


def without_factors(state: State) -> State:
    return {name: value for name, value in state.items() if name[0] not in "HSe"}


def history(make: Callable[[], Run]) -> list[State]:
    """The states of an undisturbed run: at its start, and after each step."""
    run = make()
    states = [run.state()]
    for t in range(1, STEPS + 1):
        run.train(t)
        states.append(run.state())
    return states


def check_and_finish(run: Run, t: int, truth: list[State]) -> None:
    """After a fault in step `t` (from 0): whole, and the rest of the run comes out as if nothing had been."""
    now = run.state()
    if now["steps"] == t + 1:  # Ctrl-C came behind the point of no return: the step is complete
        assert now == truth[t + 1]
    elif now != truth[t]:  # the factors are refreshed, the update is to come; nothing else has changed
        assert not run.opt.samples
        expected = {name: truth[t + 1][name] for name in now} | without_factors(truth[t])
        assert now == expected
    if run.opt.steps == t:
        run.step()
    assert run.state() == truth[t + 1]
    more = min(t + 2, STEPS)
    run.train(more)
    assert run.state() == truth[more]


@pytest.mark.gpu
@pytest.mark.parametrize(("fail", "averaging"), [*zip(FAULTS, ["parity", "paper"] * 2)])
def test_every_call_of_a_step_may_fail(fail: str, averaging: str, gate: Gate) -> None:  # noqa: F811
    def make() -> Run:
        return Run(CUDA, averaging)

    truth = history(make)
    counted = []
    for t in range(STEPS - 1):
        number = 0
        while number <= gate.seen:
            number += 1
            run = make()
            run.train(t)
            run.feed()
            with gate.open(number, fail):
                try:
                    run.step()
                except (FAULTS[fail], BackendError) as error:
                    assert "on purpose" in str(error) or "the driver must take kernel" in str(error)
            check_and_finish(run, t, truth)
        counted.append(gate.seen)
    first, unsampled, sampled = counted
    assert first > sampled > unsampled >= 1  # tables are made, known, and not needed


@pytest.mark.gpu
@pytest.mark.parametrize("fail", ["memory", "driver", "Ctrl-C"])
def test_a_call_of_accumulate_that_fails_adds_nothing(fail: str, gate: Gate) -> None:  # noqa: F811
    truth = history(lambda: Run(CUDA))
    for t in (0, 2):
        number = failed = 0
        while number <= gate.seen:
            number += 1
            run = Run(CUDA)
            run.train(t)
            with gate.open(number, fail):
                for layer, h, s in run.layers * 2:
                    try:
                        run.opt.accumulate(layer, h, s)
                    except (FAULTS[fail], BackendError):
                        failed += 1
                        run.opt.accumulate(layer, h, s)
            run.step()
            assert run.state() == truth[t + 1]
        assert failed == gate.seen >= 8


def fail_behind_the_refresh(run: Run) -> None:
    """A step whose update the driver refuses, once."""
    run.feed()
    launch = run.opt._launch._launch  # type: ignore[union-attr]
    real, launch._launch = launch._launch, lambda *_: launch._answers.append(719)
    with pytest.raises(BackendError, match="kernel `update`, got error 719"):
        run.step()
    launch._launch = real
    assert not run.opt.samples


@pytest.mark.gpu
def test_a_batch_that_comes_twice_refreshes_once() -> None:
    """The script starts over with the same batch."""
    truth = history(lambda: Run(CUDA))
    run = Run(CUDA)
    fail_behind_the_refresh(run)
    run.feed()
    assert not run.opt._factors.pending
    run.step()
    assert run.state() == truth[1]
    run.train(STEPS)
    assert run.state() == truth[STEPS]


@pytest.mark.gpu
def test_what_a_failed_step_has_left_ends_with_its_state() -> None:
    truth = history(lambda: Run(CUDA))
    run = Run(CUDA)
    start = {
        key: [CUDA.array(numpy_of(a)) for a in value] if isinstance(value, list) else value
        for key, value in run.opt.state_dict().items()
    }
    fail_behind_the_refresh(run)
    run.opt.load_state_dict(start)
    assert run.opt.samples
    run.train(STEPS)
    assert run.state() == truth[STEPS]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_any_line_of_a_step(device: Device) -> None:
    def make(t: int) -> Run:
        run = Run(device, "paper")
        run.train(t)
        run.feed()
        return run

    truth = history(lambda: Run(device, "paper"))
    for t in range(3):
        lines, came = interrupted_at(0, make(t).step)
        assert lines > 50 and not came
        for line in some(lines):
            run = make(t)
            ran, came = interrupted_at(line, run.step)
            assert came or ran < line  # a GPU may be done with a copy, or not yet: then a line more runs
            check_and_finish(run, t, truth)
