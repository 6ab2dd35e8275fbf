"""Faults within a step of the PyTorch optimizer, and exceptions in what a script hangs onto it: afterwards all is as
before the step, or as after it, and it can be tried again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from faults import FAULTS, Gate, ctrl_c, gate, interrupted_at, some  # noqa: E402, F401
from flat import Rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_helpers import (  # noqa: E402
    either_device,  # noqa: F401
    everything,
    hook_count,
    images,
    kernels_device,  # noqa: F401
    loss_of,
    mlp,
    net,
    rows,
)

from cafin_cupy import BackendError, backend, reference  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

STEPS = 4  # sampled, not, sampled, not: with TCov = 2
State = dict[str, Any]


class Run:
    """A training run; two of them agree to the bit."""

    def __init__(self, device: str, kind: type[AdaFisher] = AdaFisher, **options: Any) -> None:
        self.model = mlp(device)
        self.opt = kind(self.model, TCov=2, weight_decay=0.1, **options)
        self.batches = rows(device, STEPS)

    def feed(self) -> None:
        self.opt.zero_grad()
        loss_of(self.model, self.batches[self.opt.steps]).backward()

    def step(self) -> None:
        self.opt.step()

    def train(self, until: int) -> None:
        while self.opt.steps < until:
            self.feed()
            self.step()

    def state(self) -> State:
        return everything(self.opt)


class ImageRun(Run):
    """Every type of layer, of which the first convolution has no bias and the second has groups."""

    def __init__(self, device: str, **options: Any) -> None:
        self.model = net(device)
        self.opt = AdaFisher(self.model, TCov=2, **options)
        self.batches = images(device, *[3] * STEPS)


class FlatRun(Run):
    """One of several ranks whose parameters are laid flat: it has them from within a weight to within another."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.rank = Rank(self.opt, [(12, 70)])

    def feed(self) -> None:
        self.opt.zero_grad()
        self.rank.feed(lambda model: loss_of(model, self.batches[self.opt.steps]))

    def state(self) -> State:
        flat = self.rank.flats[0]
        kept = self.opt.state.get(flat, {})
        momentum = kept["exp_avg"].clone() if "exp_avg" in kept else torch.zeros_like(flat)
        found = {"copy": flat.detach().clone(), "momentum": momentum, "step": kept.get("step", 0)}
        return {**super().state(), **found}


def capturable_run(device: str) -> Run:
    """Counted on the device."""
    return Run(device, capturable=True)


def history(make: Callable[[], Run]) -> list[State]:
    run = make()
    states = [run.state()]
    for t in range(1, STEPS + 1):
        run.train(t)
        states.append(run.state())
    return states


def differing(a: State, b: State) -> list[str]:
    assert a.keys() == b.keys()
    return [
        name for name, x in a.items() if not (torch.equal(x, b[name]) if isinstance(x, torch.Tensor) else x == b[name])
    ]


def is_factor(name: str) -> bool:
    return name.startswith(("H of", "S of"))


def check_and_finish(run: Run, t: int, truth: list[State], partly: bool = False) -> None:
    """After a fault in step `t`: whole, and the rest comes out as if nothing had been. With `partly`, some parameters
    may have been updated, with their momenta."""
    now = run.state()
    if now["steps"] == t + 1:  # behind the point of no return
        assert not differing(now, truth[t + 1])
    elif changed := differing(now, truth[t]):
        factors = [name for name in changed if is_factor(name)]
        others = [name for name in changed if not is_factor(name)]
        assert not set(factors) & set(differing(now, truth[t + 1]))
        assert not factors or not run.opt.samples
        assert partly or not others
        for name in others:  # pieces of parameters and momenta, counted by nobody yet
            assert bool(((now[name] == truth[t][name]) | (now[name] == truth[t + 1][name])).all())
    if run.opt.steps == t:
        run.step()
    assert not differing(run.state(), truth[t + 1])
    more = min(t + 2, STEPS)
    run.train(more)
    assert not differing(run.state(), truth[more])
    assert hook_count(run.model) == len(run.opt._taps) == (len(run.opt._modules) if run.opt.samples else 0)


# The kernels


@pytest.mark.gpu
@pytest.mark.parametrize("fail", FAULTS)
@pytest.mark.parametrize("kind", [Run, capturable_run, FlatRun])
def test_every_call_of_a_step_may_fail(kind: Callable[[str], Run], fail: str, gpu: str, gate: Gate) -> None:  # noqa: F811
    def make() -> Run:
        return kind(gpu)

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
    assert first > sampled > unsampled >= (2 if kind is capturable_run else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("fail", FAULTS)
def test_every_call_of_a_backward_pass_may_fail(fail: str, gpu: str, gate: Gate) -> None:  # noqa: F811
    """The script starts the batch over, as after any failure there."""
    truth = history(lambda: ImageRun(gpu))
    for t in (0, 2):
        number = 0
        while number <= gate.seen:
            number += 1
            run = ImageRun(gpu)
            run.train(t)
            with gate.open(number, fail):
                try:
                    run.feed()
                except (FAULTS[fail], BackendError):
                    assert not differing(run.state(), truth[t])
            run.train(t + 1)
            assert not differing(run.state(), truth[t + 1])


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kind", [Run, capturable_run, FlatRun])
def test_ctrl_c_at_any_line_of_a_step(kind: Callable[[str], Run], device: str) -> None:
    def make(t: int) -> Run:
        run = kind(device)
        run.train(t)
        run.feed()
        return run

    truth = history(lambda: kind(device))
    for t in range(3):
        lines, came = interrupted_at(0, make(t).step)
        assert lines > 50 and not came
        for line in some(lines):
            run = make(t)
            ran, came = interrupted_at(line, run.step)
            assert came or ran < line  # a GPU may be done with a copy, or not yet: then a line more runs
            check_and_finish(run, t, truth)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_any_line_of_a_backward_pass(device: str) -> None:
    truth = history(lambda: Run(device))
    for t in (0, 2):
        run = Run(device)
        run.train(t)
        lines, _ = interrupted_at(0, run.feed)
        for line in some(lines):
            run = Run(device)
            run.train(t)
            ran, came = interrupted_at(line, run.feed)
            assert came or ran < line
            assert not differing(run.state(), truth[t])
            run.train(t + 1)
            assert not differing(run.state(), truth[t + 1])


# Memory


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations that take memory, and lets one of them (from 1) fail."""

    def __init__(self, at: int = 0, call: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.at, self.seen, self.call = at, 0, call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function._schema.returns
        takes = any(result.alias_info is None and isinstance(result.type, torch.TensorType) for result in results)
        if takes or self.call is not None:
            self.seen += 1
            if self.seen == self.at:
                if self.call is None:
                    raise MemoryError("on purpose")
                self.call()
        return function(*args, **(kwargs or {}))


def wide(device: str) -> Run:
    """Parameters that the reference updates in several pieces; see `small_pieces`."""
    return Run(device, AdaFisherW, averaging="paper")


def half(device: str) -> Run:
    """Parameters for which PyTorch has no fused operations."""
    run = Run(device)
    run.model.bfloat16()
    run.batches = [x.bfloat16() for x in run.batches]
    return run


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PIECE", 10)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", [wide, half, ImageRun, FlatRun])
def test_memory_may_run_out_anywhere_on_the_reference(make: Callable[[str], Run]) -> None:
    truth = history(lambda: make("cpu"))
    for t in range(3):
        run = make("cpu")
        run.train(t)
        run.feed()
        with (count := Operations()):
            run.step()
        assert count.seen > 10
        for number in some(count.seen):
            run = make("cpu")
            run.train(t)
            run.feed()
            with pytest.raises(MemoryError), Operations(number):
                run.step()
            check_and_finish(run, t, truth, partly=True)


def test_pieces_are_not_updated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out within a parameter, again and again."""
    monkeypatch.setattr(reference, "PIECE", 5)
    truth = history(lambda: wide("cpu"))
    run = wide("cpu")
    run.train(1)
    run.feed()
    failed = 0
    for _ in range(100):
        try:
            with Operations(3):
                run.step()
            break
        except MemoryError:
            failed += 1
    assert failed > 3
    assert not differing(run.state(), truth[2])


@pytest.mark.usefixtures("ctrl_c", "small_pieces")
@pytest.mark.parametrize("make", [wide, half, FlatRun])
def test_ctrl_c_between_any_operations_of_the_reference(make: Callable[[str], Run]) -> None:
    """It waits until the step is complete."""
    truth = history(lambda: make("cpu"))
    for t in range(3):
        run = make("cpu")
        run.train(t)
        run.feed()
        count = Operations(0, lambda: None)
        with count:
            run.step()
        for number in some(count.seen):
            run = make("cpu")
            run.train(t)
            run.feed()
            with pytest.raises(KeyboardInterrupt), Operations(number, lambda: signal.raise_signal(signal.SIGINT)):
                run.step()
            check_and_finish(run, t, truth)


def test_new_momenta_are_taken_over_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(device)
    zeros_like, calls = torch.zeros_like, []

    def fail(p: Any, **options: Any) -> Any:
        calls.append(p)
        if len(calls) == 4:
            raise MemoryError("on purpose")
        return zeros_like(p, **options)

    truth = history(lambda: Run(device))
    run.feed()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", fail)
        with pytest.raises(MemoryError):
            run.step()
    assert not run.opt.state and run.opt.steps == 0
    check_and_finish(run, 0, truth)


# What a script hangs onto a step


class Mine(Exception):
    pass


def raise_mine(*_: Any) -> None:
    raise Mine


@pytest.mark.parametrize("place", ["at once", "behind forward", "within backward", "behind backward"])
def test_an_exception_in_a_closure_changes_nothing(place: str, device: str) -> None:
    truth = history(lambda: Run(device))
    for t in range(3):
        run = Run(device)
        run.train(t)

        def closure(run: Run = run, t: int = t) -> Any:
            run.opt.zero_grad()
            if place == "at once":
                raise Mine
            loss = loss_of(run.model, run.batches[t])
            if place == "behind forward":
                raise Mine
            if place == "within backward":
                run.model[2].weight.register_hook(raise_mine)
            loss.backward()
            raise Mine

        with pytest.raises(Mine):
            run.opt.step(closure)
        run.model[2].weight._backward_hooks = None
        assert not differing(run.state(), truth[t])
        run.train(STEPS)
        assert not differing(run.state(), truth[STEPS])


def test_an_exception_in_a_hook_ahead_of_the_step_changes_nothing(device: str) -> None:
    truth = history(lambda: Run(device))
    for t in range(3):
        run = Run(device)
        run.train(t)
        run.feed()
        handle = run.opt.register_step_pre_hook(raise_mine)
        with pytest.raises(Mine):
            run.step()
        handle.remove()
        assert not differing(run.state(), truth[t])
        check_and_finish(run, t, truth)


def test_an_exception_in_a_hook_behind_the_step_leaves_it_done(device: str) -> None:
    truth = history(lambda: Run(device))
    for t in range(3):
        run = Run(device)
        run.train(t)
        run.feed()
        handle = run.opt.register_step_post_hook(raise_mine)
        with pytest.raises(Mine):
            run.step()
        handle.remove()
        assert not differing(run.state(), truth[t + 1])
        check_and_finish(run, t, truth)


@pytest.mark.parametrize("kind", ["forward pre", "forward", "full backward", "gradient"])
def test_an_exception_in_a_hook_of_a_module_changes_nothing(kind: str, device: str) -> None:
    """The script starts the batch over."""
    truth = history(lambda: Run(device))
    for t in range(3):
        run = Run(device)
        run.train(t)
        layer = run.model[2]
        register = {
            "forward pre": layer.register_forward_pre_hook,
            "forward": layer.register_forward_hook,
            "full backward": layer.register_full_backward_hook,
            "gradient": layer.weight.register_hook,
        }[kind]
        handle = register(raise_mine)
        with pytest.raises(Mine):
            run.feed()
        handle.remove()
        assert not differing(run.state(), truth[t])
        run.train(STEPS)
        assert not differing(run.state(), truth[STEPS])


def test_an_exception_in_a_scheduler_changes_nothing(device: str) -> None:
    truth = history(lambda: Run(device))
    run = Run(device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.opt, lambda t: raise_mine() if t == 1 else 1.0)  # type: ignore[func-returns-value]
    run.train(1)
    with pytest.raises(Mine):
        scheduler.step()
    run.train(STEPS)
    assert not differing(run.state(), truth[STEPS])


def test_a_scaled_step_may_be_tried_again() -> None:
    """The scaler would multiply the scale of the failed attempt into that of the next."""

    def train(fail: int) -> State:
        run, scaler = Run("cpu"), torch.amp.GradScaler("cpu", init_scale=4.0)
        for x in run.batches:
            run.opt.zero_grad()
            scaler.scale(loss_of(run.model, x)).backward()
            if fail:
                with pytest.raises(MemoryError), Operations(fail):
                    scaler.step(run.opt)
            scaler.step(run.opt)
            scaler.update()
        return run.state()

    truth = train(0)
    for fail in (3, 10, 20):
        assert not differing(train(fail), truth)


def test_a_failed_scaled_step_leaves_no_scale_behind() -> None:
    """For a script that goes on without the scaler."""
    run, scaler = Run("cpu"), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(run.model, run.batches[0])).backward()
    run.opt.register_step_pre_hook(raise_mine)
    with pytest.raises(Mine):
        scaler.step(run.opt)
    assert not hasattr(run.opt, "grad_scale") and not hasattr(run.opt, "found_inf")


@pytest.mark.gpu
def test_a_settled_optimizer_keeps_its_backend(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that fails later is an error: else the reference would go on with the state, and nobody would know."""
    truth = history(lambda: Run(gpu))
    run = Run(gpu)
    run.train(2)
    run.feed()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "cuda_problem", lambda: "it has fallen off the bus")
        patch.setattr(backend, "_set_up", lambda *_: "it has fallen off the bus")
        run.opt._plan.launch._launch._launch = lambda *_: run.opt._plan.launch._launch._answers.append(719)  # type: ignore[union-attr]
        with pytest.raises(BackendError, match="the driver must take kernel `update`"):
            run.step()
        run.opt._plan = None
        run.opt.add_param_group({"params": [nn.Parameter(torch.ones(3, device=gpu))]})  # a new plan is due
        assert run.opt.backend == "cuda"
    del run.opt.param_groups[1]
    run.train(STEPS)
    assert not differing(run.state(), truth[STEPS])


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_a_group_may_wait_for_its_gradients(gpu: str, capturable: bool) -> None:
    """A capturable optimizer tells the device the scalars of all groups, and knows only those of parameters that have
    taken part."""
    run = Run(gpu, capturable=capturable)
    head = nn.Parameter(torch.ones(3, device=gpu))
    run.opt.add_param_group({"params": [head], "lr": 0.5, "weight_decay": 0.0})
    run.train(2)
    assert torch.equal(head, torch.ones_like(head))
    run.feed()
    head.grad = torch.full_like(head, 2.0)
    run.step()
    torch.testing.assert_close(
        head.detach(), torch.zeros_like(head), atol=1e-6, rtol=0.0
    )  # 1 - 0.5 * 2 on a first step
    assert (run.opt.steps, int(run.opt.state[head]["step"])) == (3, 1)
