"""A `GradScaler` whose verdict the device reads: steps that are skipped, counted, and sampled as if the host had read
it; and the host that does not wait."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest

torch = pytest.importorskip("torch")

from faults import FAULTS, Gate, gate  # noqa: E402, F401
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from scaled import Scaled, left, no_waiting  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_same,
    either_device,  # noqa: F401
    everything,
    kernels_device,  # noqa: F401
    mlp,
    rows,
    run,
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

PATTERNS = {
    "none": "............",
    "unsampled": ".x..x.xx....",
    "sampled": "x..xx.......",
    "ahead of a sampled one": "..x.xx..x..x",
    "all but one": ".xxxxxxxxxx.",
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("TCov", [1, 3, 100])
def test_skipped_steps_leave_no_trace(TCov: int, pattern: str, device: str) -> None:
    """As a run that never saw those batches: parameters, momenta, factors, counters, and which steps are sampled."""
    bad = [mark == "x" for mark in PATTERNS[pattern]]
    xs = rows(device, len(bad))
    scaled = Scaled(device, TCov=TCov).train(xs, bad)
    plain = run(AdaFisher(mlp(device), TCov=TCov, weight_decay=0.1), left(xs, bad))
    assert scaled.steps == bad.count(False)
    assert_same(scaled, plain)
    more = rows(device, 3)
    assert_same(run(scaled, more), run(plain, more))  # a script may go on without the scaler


def test_a_loss_that_is_to_grow(device: str) -> None:
    bad = [mark == "x" for mark in ".x..x."]
    xs = rows(device, len(bad))
    scaled = Scaled(device, maximize=True).train(xs, bad)
    assert_same(scaled, run(AdaFisher(mlp(device), TCov=3, weight_decay=0.1, maximize=True), left(xs, bad)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(st.lists(st.booleans(), max_size=15), st.integers(1, 5))
def test_any_pattern(device: str, bad: list[bool], TCov: int) -> None:
    xs = rows(device, len(bad))
    scaled = Scaled(device, TCov=TCov).train(xs, bad)
    assert_same(scaled, run(AdaFisher(mlp(device), TCov=TCov, weight_decay=0.1), left(xs, bad)))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [False, True])
def test_the_host_does_not_wait_on_unsampled_steps(bad: bool, gpu: str) -> None:
    scaled = Scaled(gpu, TCov=100)
    xs = rows(gpu, 6)
    scaled.train(xs[:3], [False] * 3)
    for x in xs[3:]:
        scaled.backward(x, bad)
        with no_waiting(gpu):
            scaled.scaler.step(scaled.optimizer)
        scaled.scaler.update()
    assert scaled.optimizer.steps == (3 if bad else 6)


@pytest.mark.gpu
def test_the_host_waits_where_it_is_told_to(gpu: str) -> None:
    """So what is to notice it is able to."""
    scaled = Scaled(gpu, TCov=1, error_if_nonfinite=True)
    scaled.train(rows(gpu, 2), [False] * 2)
    scaled.backward(rows(gpu, 1)[0], False)
    with pytest.raises((AssertionError, RuntimeError)), no_waiting(gpu):
        scaled.scaler.step(scaled.optimizer)


def test_gradients_that_are_unscaled_ahead(device: str) -> None:
    """As to clip them."""
    scaled = Scaled(device)
    scaled.optimizer.grad_scaler = scaled.scaler
    bad = [mark == "x" for mark in ".x..xx.."]
    xs = rows(device, len(bad))
    for x, spoiled in zip(xs, bad):
        scaled.backward(x, spoiled)
        scaled.scaler.unscale_(scaled.optimizer)
        scaled.scaler.step(scaled.optimizer)
        scaled.scaler.update()
    assert_same(scaled.optimizer, run(AdaFisher(mlp(device), TCov=3, weight_decay=0.1), left(xs, bad)))


@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle"])
def test_copies_and_checkpoints_know_what_was_skipped(way: str, device: str) -> None:
    bad = [mark == "x" for mark in ".xx..x"]
    xs = rows(device, len(bad))
    scaled = Scaled(device)
    one = scaled.train(xs, bad)
    if way == "state dict":
        saved, weights = copy.deepcopy(one.state_dict()), copy.deepcopy(one.model.state_dict())
        assert saved["steps"] == 3 and {entry["step"] for entry in saved["state"].values()} == {3}
        other = Scaled(device).train(xs[:5], [False, True, False, True, True])
        other.model.load_state_dict(weights)
        other.load_state_dict(saved)
    else:
        other = copy.deepcopy(one) if way == "deepcopy" else pickle.loads(pickle.dumps(one))
    assert other.steps == 3
    assert_same(run(other, xs), run(one, xs))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("fail", FAULTS)
def test_a_failed_step_may_be_tried_again(fail: str, bad: bool, gpu: str, gate: Gate) -> None:  # noqa: F811
    xs = rows(gpu, 5)
    before = everything(Scaled(gpu).train(xs[:2], [False] * 2))
    after = before if bad else everything(Scaled(gpu).train(xs[:3], [False] * 3))
    number = 0
    while number <= gate.seen:
        number += 1
        scaled = Scaled(gpu)
        scaled.train(xs[:2], [False] * 2)
        scaled.backward(xs[2], bad)
        with gate.open(number, fail):
            try:
                scaled.scaler.step(scaled.optimizer)
                raised = False
            except (FAULTS[fail], CafinError):
                raised = True
        now = everything(scaled.optimizer)
        assert now["steps"] in (2, after["steps"])
        assert_same(scaled.optimizer, before if now["steps"] == 2 else after)
        if raised and now["steps"] == 2:
            scaled.scaler.step(scaled.optimizer)
        assert_same(scaled.optimizer, after)
    assert number > 2


def test_a_changed_TCov_counts_what_was_skipped(device: str) -> None:
    bad = [mark == "x" for mark in ".x."]
    xs = rows(device, 3)
    scaled = Scaled(device, TCov=100)
    scaled.train(xs, bad)
    scaled.optimizer.TCov = 2
    assert scaled.optimizer.samples  # two steps are complete


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [".....", "...x..", "....x."])
def test_a_layer_that_thaws_on_another_device(pattern: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is a launch on each device from then on, and the host reads the verdict for both. On one real GPU it
    stays one launch."""
    if gpu == "cpu":
        sys.modules["emulation.device"].lend_torch(monkeypatch, 2)
    bad = [mark == "x" for mark in pattern]
    xs, scaled = rows(gpu, len(bad)), Scaled(gpu, TCov=100)
    plain = AdaFisher(mlp(gpu), TCov=100, weight_decay=0.1)
    vectors = [p for model in (scaled.optimizer.model, plain.model) for p in model.parameters() if p.dim() == 1]
    for t, (x, spoiled) in enumerate(zip(xs, bad)):
        for p in vectors:
            p.requires_grad_(t > 2)
        scaled.iterate(x, spoiled)
        run(plain, left([x], [spoiled]))
    assert_same(scaled.optimizer, plain)


@pytest.mark.gpu
def test_a_float16_model(gpu: str) -> None:
    """With masters: the same as by the reference, which reads the verdict on the host, but for the rounding of factors
    and a GPU's fused multiply-adds."""
    bad = [mark == "x" for mark in ".x..x."]
    results = []
    for backend in ("cuda", "reference"):
        scaled = Scaled(gpu, backend=backend, master_weights=True, lr=1e-5, TCov=100)
        scaled.optimizer.model.half()
        results.append(scaled.train([x.half() for x in rows(gpu, len(bad))], bad))
    ours, theirs = results
    assert ours.steps == theirs.steps == 4
    for p, q in zip(ours.state.values(), theirs.state.values()):
        torch.testing.assert_close(p["master"], q["master"], rtol=2.0**-9, atol=2.0**-12)
