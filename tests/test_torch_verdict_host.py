"""The host under a `GradScaler` whose verdict the device reads: when it waits and for what, and what it makes of
checkpoints, copies and failed attempts before it knows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from faults import FAULTS, Gate, ctrl_c, gate, interrupted_at, some  # noqa: E402, F401
from scaled import READS, Scaled, Waits, host_reads, marks, no_waiting  # noqa: E402
from torch import nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_equal_trees,
    assert_same,
    everything,
    hook_count,
    kernels_device,  # noqa: F401
    loss_of,
    rows,
    run,
)

from cafin_cupy import BackendError, CafinError, CafinValueError  # noqa: E402
from cafin_cupy.adapters import torch_verdict  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402
from cafin_cupy.cuda_update import CudaUpdate  # noqa: E402


def iterate(scaled: Scaled, x: Any, bad: bool, device: str, waits: Waits) -> None:
    """One iteration in which no tensor becomes a number of Python."""
    optimizer: Any = scaled.optimizer
    waits.doing = "forward"
    with no_waiting(device):
        optimizer.zero_grad()
        loss = scaled.scaler.scale(loss_of(scaled.model, x))
        waits.doing = "backward"
        loss.backward()
        if bad:
            optimizer.model[2].bias.grad[:1].fill_(torch.inf)
        waits.doing = "step"
        scaled.step()
    waits.doing = "nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("unscale", [False, True], ids=["unscaled by the step", "unscale_ ahead"])
@pytest.mark.parametrize("TCov", [1, 2, 3, 5])
@pytest.mark.parametrize("pattern", ["." * 12, "...x..xx..x.", "xxxxxxxxxxxx"])
def test_the_host_waits_once_behind_a_sampled_step(pattern: str, TCov: int, unscale: bool, gpu: str) -> None:
    """In the backward pass of the next iteration, whose forward pass is under way by then; never where each step is
    sampled, and never within `step`."""
    scaled = Scaled(gpu, TCov=TCov, unscale=unscale)
    scaled.train(rows(gpu, 3), [False] * 3)  # the first ones plan and compile
    optimizer = scaled.optimizer
    at, sampled, waits = optimizer.steps, 0, Waits()  # and nothing is open
    with waits.counted():
        for number, (x, bad) in enumerate(zip(rows(gpu, len(pattern)), marks(pattern))):
            before = len(waits.seen)
            iterate(scaled, x, bad, gpu, waits)
            assert len(waits.seen) <= before + 1, f"iteration {number} has waited twice"
            sampled += at % TCov == 0
            at += not bad
    assert set(waits.seen) <= {"backward"}, f"waited in {waits.seen}"
    if TCov == 1:
        assert not waits.seen
    elif "x" not in pattern:  # what the last iteration has left open waits for no one yet
        assert len(waits.seen) == sampled - (at % TCov == 1)
    else:  # a step that would be a sampled one if all before it had happened asks too
        assert len(waits.seen) <= sampled + pattern.count("x")
    assert optimizer.steps == at


@pytest.mark.gpu
def test_what_waits_is_the_number_alone(gpu: str) -> None:
    """Not the forward pass that the device was given since."""
    if gpu == "cpu":
        pytest.skip("the emulated GPU is never late")
    scaled, xs = Scaled(gpu, TCov=2), rows(gpu, 4)
    scaled.train(xs[:3], [False] * 3)  # the third was a sampled one
    loss, waits = scaled.scaler.scale(loss_of(scaled.model, xs[3])), Waits()
    torch.cuda._sleep(10**9)  # about half a second
    awake = torch.cuda.Event()
    awake.record()
    with waits.counted():
        loss.backward()
        queued = not awake.query()
    assert len(waits.seen) == 1
    assert queued, "the host has waited for more than the step before"
    assert scaled.optimizer.steps == 3


@pytest.mark.gpu
def test_a_step_without_a_backward_pass_asks_by_itself(gpu: str) -> None:
    runs = []
    for reads in READS.values():
        scaled, waits = Scaled(gpu, TCov=2), Waits()
        with reads(), waits.counted():
            scaled.train(rows(gpu, 3), [False] * 3)
            waits.seen.clear()
            for p in scaled.model.parameters():
                p.grad = torch.ones_like(p)
            waits.doing = "step"
            scaled.step()
            assert waits.seen == (["step"] if reads is not host_reads else [])
            assert scaled.optimizer._unsure == len(waits.seen)
        runs.append(everything(scaled.optimizer))
    assert_equal_trees(*runs)


@pytest.mark.gpu
def test_hooks_stay_for_an_iteration_and_go(gpu: str) -> None:
    scaled, xs = Scaled(gpu, TCov=4), rows(gpu, 12)
    model, counts = scaled.optimizer.model, []
    for x in xs:
        scaled.iterate(x)
        counts.append(hook_count(model) > 0)
    # Behind steps 0 (which the host reads, as it makes a plan) to 11: on ahead of 4, 8 and 12, and behind 4 and 8.
    assert counts == [k in (3, 4, 7, 8, 11) for k in range(12)]


@pytest.mark.gpu
def test_nothing_is_read_for_a_step_that_is_not_sampled(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, xs = Scaled(gpu, TCov=3), rows(gpu, 8)
    read: list[int] = []
    receive = AdaFisher._receive

    def counted(self: Any, *args: Any, **options: Any) -> None:
        read[-1] += 1
        receive(self, *args, **options)

    monkeypatch.setattr(AdaFisher, "_receive", counted)
    for x in xs:
        read.append(0)
        scaled.iterate(x)
    assert read == [3, 0, 0, 3, 0, 0, 3, 0]


@pytest.mark.gpu
def test_a_late_backward_through_the_graph_of_a_sampled_step(gpu: str) -> None:
    """Of one layer, which needs no weight for it."""
    runs = []
    for reads in READS.values():
        xs, scaled = rows(gpu, 6), Scaled(gpu, optimizer=AdaFisher(nn.Linear(5, 3, device=gpu), TCov=2))
        for p in scaled.model.parameters():
            nn.init.constant_(p, 0.5)
        with reads():
            scaled.train(xs[:2], [False] * 2)
            scaled.optimizer.zero_grad()
            loss = loss_of(scaled.model, xs[2])
            scaled.scaler.scale(loss).backward(retain_graph=True)
            scaled.step()
            loss.backward()
            assert not scaled.optimizer._factors.pending
            scaled.train(xs[3:], marks(".x."))
        runs.append(everything(scaled.optimizer))
    assert_equal_trees(*runs)


# What asks the host all the same


@pytest.mark.gpu
def test_a_scaler_that_does_not_show_its_scale_is_asked(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, bad = rows(gpu, 6), marks("..x...")
    monkeypatch.setattr(torch_verdict, "scale_of", lambda scaler: None)
    scaled = Scaled(gpu, TCov=2, unscale=True)
    asked: list[float] = []
    get = scaled.scaler.get_scale
    monkeypatch.setattr(scaled.scaler, "get_scale", lambda: asked.append(get()) or asked[-1])
    got = everything(scaled.train(xs, bad))
    assert len(asked) == 3  # on the steps that are sampled, but for the one that does not happen
    assert_equal_trees(got, everything(Scaled(gpu, TCov=2, unscale=True).train(xs, bad)))


@pytest.mark.gpu
def test_a_scaler_that_is_disabled_is_not_the_one_that_steps(gpu: str) -> None:
    """Its scale of 1 would make the factors those of the scaled loss."""
    scaled = Scaled(gpu, TCov=2, unscale=True)
    xs = rows(gpu, 6)
    scaled.train(xs[:4], marks("...."))
    scaled.optimizer.grad_scaler = torch.amp.GradScaler(gpu, enabled=False)
    scaled.backward(xs[4], bad=False)
    before = everything(scaled.optimizer)
    with pytest.raises(CafinValueError, match=r"grad_scaler.*disabled"):
        scaled.step()
    assert_equal_trees(everything(scaled.optimizer), before)
    scaled.optimizer.grad_scaler = scaled.scaler
    scaled.scaler.step(scaled.optimizer)
    scaled.scaler.update()
    scaled.train(xs[5:], marks("."))
    assert_equal_trees(
        everything(scaled.optimizer), everything(Scaled(gpu, TCov=2, unscale=True).train(xs, marks("......")))
    )


@pytest.mark.gpu
def test_several_ranks_and_several_devices_are_asked(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled steps: all ranks must come to one decision, and a factor elsewhere cannot see the verdict."""
    scaled = Scaled(gpu, TCov=2)
    scaled.train(rows(gpu, 2), [False] * 2)
    optimizer: Any = scaled.optimizer
    optimizer.found_inf = optimizer.grad_scale = torch.ones((), device=gpu)
    assert optimizer.samples and torch_verdict.verdict_of_device(optimizer) is not None
    with monkeypatch.context() as patch:
        patch.setattr(torch_verdict, "group_of", lambda optimizer: object())
        assert torch_verdict.verdict_of_device(optimizer) is None
        optimizer._steps += 1
        assert torch_verdict.verdict_of_device(optimizer) is not None
        optimizer._steps -= 1
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._factors, "device", 1)
        assert torch_verdict.verdict_of_device(optimizer) is None
    optimizer._factors.refreshed = True
    assert torch_verdict.verdict_of_device(optimizer) is None
    optimizer._factors.refreshed = False
    assert torch_verdict.verdict_of_device(optimizer) is not None
    optimizer._skips = torch.zeros(1, dtype=torch.int64, device="meta")  # as if the model had moved since
    assert torch_verdict.verdict_of_device(optimizer) is None


@pytest.mark.gpu
def test_a_graph_does_not_capture_what_is_undecided(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(gpu, TCov=2)
    scaled.train(rows(gpu, 3), [False] * 3)
    loss = loss_of(scaled.model, rows(gpu, 1)[0])
    with monkeypatch.context() as patch, pytest.raises(BackendError, match=r"read optimizer\.samples before"):
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        scaled.optimizer._reads()
    assert not scaled.optimizer.samples and not scaled.optimizer._reads()
    loss.backward()


# Behind a sampled step that has not happened


def behind(device: str, **options: Any) -> Scaled:
    scaled = Scaled(device, TCov=2, **options)
    scaled.train(rows(device, 3), marks("..x"))
    assert scaled.optimizer._unsure
    return scaled


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle"])
def test_checkpoints_and_copies(way: str, gpu: str) -> None:
    one, xs = behind(gpu).optimizer, rows(gpu, 4)
    if way == "state dict":
        saved = copy.deepcopy(one.state_dict())
        assert saved["steps"] == 2 and {entry["step"] for entry in saved["state"].values()} == {2}
        other = behind(gpu).optimizer
        other.model.load_state_dict(copy.deepcopy(one.model.state_dict()))
        other.load_state_dict(saved)
    else:
        other = copy.deepcopy(one) if way == "deepcopy" else pickle.loads(pickle.dumps(one))
    assert other.steps == one.steps == 2 and other.samples and one.samples
    assert_same(run(other, xs), run(one, xs))


@pytest.mark.gpu
def test_what_a_script_changes(gpu: str) -> None:
    scaled = behind(gpu)
    scaled.optimizer.TCov = 3
    assert scaled.optimizer._steps == 2 and not scaled.optimizer.samples and not hook_count(scaled.model)
    scaled = behind(gpu)
    scaled.optimizer.steps = 7
    assert scaled.optimizer.steps == 7 and not scaled.optimizer.samples
    scaled = behind(gpu)
    scaled.optimizer.model.add_module("more", nn.Linear(3, 3, device=gpu))
    scaled.optimizer.add_param_group({"params": ["more.*"]})
    scaled.train(rows(gpu, 2), [False] * 2)
    assert scaled.optimizer.steps == 4
    for name, (H, _) in scaled.optimizer.factors().items():
        assert not torch.equal(H, torch.ones_like(H)), name


@pytest.mark.gpu
def test_sums_of_a_step_that_turns_out_not_to_be_sampled(gpu: str) -> None:
    """They are gone once the host knows, also where the script forgets its gradients by itself."""
    runs = []
    for reads in READS.values():
        scaled, xs = Scaled(gpu, TCov=2), rows(gpu, 6)
        with reads():
            scaled.train(xs[:2], marks(".x"))
            for x in xs[2:]:
                scaled.model.zero_grad()
                scaled.scaler.scale(loss_of(scaled.model, x)).backward()
                assert scaled.optimizer.steps in (1, 2, 3, 4)
                assert scaled.optimizer._factors.pending is scaled.optimizer.samples
                scaled.step()
        runs.append(everything(scaled.optimizer))
    assert_equal_trees(*runs)


# Faults

# The sampled step that fails: at each, on the second; behind one that has not happened; one that the host knows not to
# be sampled; and one of which the device alone knows that it is, or is not.
AHEAD = [(1, ".."), (2, ".."), (2, "..x"), (2, "..."), (3, "..."), (3, "..x")]


class Attempts:
    """An iteration behind those of `pattern`, the last step of which may fail, and two more."""

    def __init__(self, device: str, TCov: int, pattern: str, bad: bool) -> None:
        self.device, self.TCov, self.ahead, self.bad = device, TCov, marks(pattern), bad
        self.count = len(pattern)
        self.xs = rows(device, self.count + 3)
        first, whole = Scaled(device, TCov=TCov), Scaled(device, TCov=TCov)
        with host_reads():
            self.before = everything(first.train(self.xs[: self.count], self.ahead))
            self.after = everything(whole.train(self.xs[: self.count + 1], [*self.ahead, bad]))
            self.final = everything(whole.train(self.xs[self.count + 1 :], [True, False]))

    def start(self) -> Scaled:
        scaled = Scaled(self.device, TCov=self.TCov)
        scaled.train(self.xs[: self.count], self.ahead)
        scaled.backward(self.xs[self.count], self.bad)
        return scaled

    def finish(self, scaled: Scaled, what: str) -> None:
        """The step has happened as a whole or not at all, and may be called again; all goes on as if nothing were."""
        now = everything(scaled.optimizer)
        wanted = self.before if now["steps"] == self.before["steps"] else self.after
        for name, value in now.items():
            known = [wanted, self.after] if name.startswith(("H of", "S of")) else [wanted]  # refreshed factors stay
            same = [torch.equal(value, x[name]) if isinstance(value, torch.Tensor) else value == x[name] for x in known]
            assert any(same), f"{name}, {what}"
        stage = scaled.scaler._per_optimizer_states[id(scaled.optimizer)]["stage"].name
        if stage != "STEPPED" and (self.bad or now["steps"] != self.after["steps"]):
            scaled.scaler.step(scaled.optimizer)
        assert_same(scaled.optimizer, self.after)
        scaled.scaler.update()
        assert_same(scaled.train(self.xs[self.count + 1 :], [True, False]), self.final)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("fail", FAULTS)
@pytest.mark.parametrize(("TCov", "pattern"), AHEAD)
def test_a_failed_step_may_be_tried_again(
    TCov: int,
    pattern: str,
    fail: str,
    bad: bool,
    gpu: str,
    gate: Gate,  # noqa: F811
) -> None:
    """No refresh is left out, and none is done twice, whatever the device has made of the attempt."""
    attempts = Attempts(gpu, TCov, pattern, bad)
    number, raised = 0, 0
    while number == 0 or number <= gate.seen:
        number += 1
        scaled = attempts.start()
        with gate.open(number, fail):
            try:
                scaled.scaler.step(scaled.optimizer)
            except (FAULTS[fail], CafinError):
                raised += 1
        attempts.finish(scaled, f"after call {number} has failed")
    assert raised >= 2, f"{raised} of {number} calls have failed"


@pytest.mark.gpu
def test_books_that_are_kept_twice_count_a_step_once(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ctrl-C comes while they are kept: see `Launch`."""
    bad = marks("..x.x...")
    once, again = (Scaled(gpu, TCov=2) for _ in range(2))
    once.train(rows(gpu, 8), bad)
    call = CudaUpdate.__call__

    def twice(self: Any, *given: Any) -> None:
        *given, then = given
        call(self, *given, lambda: (then(), then()))

    monkeypatch.setattr(CudaUpdate, "__call__", twice)
    again.train(rows(gpu, 8), bad)
    assert again.optimizer._unsure == once.optimizer._unsure > 0
    assert_same(again.optimizer, once.optimizer)


@pytest.mark.gpu
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("bad", [False, True])
def test_ctrl_c_at_any_line_of_a_sampled_step(bad: bool, gpu: str) -> None:
    attempts = Attempts(gpu, 2, "..", bad)

    def step(scaled: Scaled) -> Any:
        return lambda: scaled.scaler.step(scaled.optimizer)

    lines, came = interrupted_at(0, step(attempts.start()))
    assert lines > 50 and not came
    for line in some(lines):
        if line <= 2:  # as within the scaler, ahead of what takes its attributes back
            continue
        scaled = attempts.start()
        interrupted_at(line, step(scaled))
        attempts.finish(scaled, f"after Ctrl-C at line {line} of {lines}")
