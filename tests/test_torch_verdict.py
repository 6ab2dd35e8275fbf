"""Sampled steps under a `GradScaler` whose verdict the device reads: as if the host had read it, bit for bit, whatever
a script asks in between; and the host that waits for one number, behind a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from faults import FAULTS, Gate, gate  # noqa: E402, F401
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from scaled import READS, Scaled, host_reads, marks  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_equal_trees,
    everything,
    images,
    kernels_device,  # noqa: F401
    loss_of,
    mlp,
    net,
    rows,
)

from cafin_cupy.adapters import torch_compiled  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

Batches = Callable[[str, int], list[Any]]


def agree(device: str, make: Callable[[], Scaled], batches: Batches, pattern: str, what: str = "") -> None:
    """The same bits, and the same steps sampled."""
    bad = marks(pattern)
    xs = batches(device, len(bad))
    ours, theirs = make(), make()
    got = everything(ours.train(xs, bad))
    with host_reads():
        want = everything(theirs.train(xs, bad))
    where = f"{what} verdicts {pattern!r}, TCov={ours.optimizer.TCov}"
    differ = [
        name
        for name, value in want.items()
        if not (torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value)
    ]
    assert not differ, f"{where}: others than the host's: {', '.join(differ)}"
    assert ours.optimizer.steps == bad.count(False), where
    assert ours.optimizer.samples == theirs.optimizer.samples, where


# What the host may take for granted


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7))
def test_what_may_be_a_sampled_step(steps: int, unsure: int, TCov: int) -> None:
    """By the definition: of the numbers of steps that may be complete, one is a multiple of TCov."""
    optimizer = AdaFisher(nn.Linear(2, 1), TCov=TCov)
    unsure = min(unsure, steps)
    optimizer._steps, optimizer._unsure = steps, unsure
    may_be = range(steps - unsure, steps + 1)
    assert optimizer._may_sample is any(t % TCov == 0 for t in may_be)
    assert optimizer._undecided is (TCov > 1 and any(t % TCov == 0 for t in may_be[:-1]))


# The same as where the host reads


def places(count: int) -> Iterator[str]:
    """One step that does not happen, at each place; and two in a row."""
    for k in range(count):
        yield "." * k + "x" + "." * (count - k - 1)
        yield "." * k + "xx"[: count - k] + "." * (count - k - 2)


@pytest.mark.gpu
@pytest.mark.parametrize("unscale", [False, True], ids=["unscaled by the step", "unscale_ ahead"])
@pytest.mark.parametrize("TCov", [1, 2, 5])
def test_inf_at_each_place_of_a_sequence(TCov: int, unscale: bool, gpu: str) -> None:
    for pattern in dict.fromkeys(places(7)):
        agree(gpu, lambda: Scaled(gpu, TCov=TCov, unscale=unscale), rows, pattern)


@pytest.mark.gpu
@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_every_layer_and_both_rules(averaging: str, gpu: str) -> None:
    def make() -> Scaled:
        return Scaled(gpu, optimizer=AdaFisher(net(gpu), TCov=2, averaging=averaging, weight_decay=0.1))

    for pattern in ("........", "..x.....", "..xx..x."):
        agree(gpu, make, lambda device, count: images(device, *[4] * count), pattern)


@pytest.mark.gpu
@pytest.mark.parametrize("TCov", [1, 2])
def test_a_loss_that_overflows(TCov: int, gpu: str) -> None:
    """Sums of NaN are thrown away and counted nowhere."""
    runs = []
    for reads in READS.values():
        scaled, xs = Scaled(gpu, TCov=TCov), rows(gpu, 8)
        for place in (2, 3, 4):
            xs[place] = torch.full_like(xs[place], torch.inf)
        with reads():
            runs.append(everything(scaled.train(xs, [False] * 8)))
    assert_equal_trees(*runs)
    assert runs[0]["steps"] == 5 and not any(n for name, n in runs[0].items() if name.startswith("skipped"))


@pytest.mark.gpu
def test_a_scale_that_is_no_power_of_two(gpu: str) -> None:
    """Factors have the same bits, as both divide in float64. Gradients are divided where the host does it, and
    multiplied by a rounded reciprocal where the device does: a last place of parameters."""
    factors = []
    for reads in READS.values():
        scaled = Scaled(gpu, TCov=1, lr=0.0)
        scaled.scaler = torch.amp.GradScaler(gpu, init_scale=1000.0, growth_factor=1.7, growth_interval=2)
        with reads():
            scaled.train(rows(gpu, 7), marks("...x..."))
        factors.append(copy.deepcopy(scaled.optimizer.factors()))
    assert_equal_trees(*factors)


PHASES = ["before", "forward", "backward", "done"]
QUESTIONS: dict[str, Callable[[Scaled], Any]] = {
    "steps": lambda scaled: scaled.optimizer.steps,
    "samples": lambda scaled: scaled.optimizer.samples,
    "state_dict": lambda scaled: scaled.optimizer.state_dict()["steps"],
    "TCov 1": lambda scaled: setattr(scaled.optimizer, "TCov", 1),
    "TCov 2": lambda scaled: setattr(scaled.optimizer, "TCov", 2),
    "TCov 3": lambda scaled: setattr(scaled.optimizer, "TCov", 3),
    "set steps": lambda scaled: setattr(scaled.optimizer, "steps", scaled.optimizer.steps + 1),
    "evaluate": lambda scaled: loss_of(scaled.model, rows(scaled.device, 1)[0]).detach(),
    "backward": lambda scaled: scaled.scaler.scale(loss_of(scaled.model, rows(scaled.device, 1)[0])).backward(),
    "load": lambda scaled: scaled.optimizer.load_state_dict(copy.deepcopy(scaled.optimizer.state_dict())),
    "zero_grad": lambda scaled: scaled.optimizer.zero_grad(),
    "forget the scaler": lambda scaled: setattr(scaled, "plain", True),
    "thaw": lambda scaled: [p.requires_grad_(True) for p in scaled.optimizer.model.parameters()],
}
iterations = st.tuples(
    st.booleans(),
    st.sampled_from([1, 1, 2]),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from([*QUESTIONS])), max_size=2),
)


def play(device: str, script: list[Any], TCov: int, frozen: bool) -> tuple[dict[str, Any], list[Any]]:
    """A run, and all answers."""
    scaled, answers = Scaled(device, TCov=TCov), []
    scaled.optimizer.model[0].requires_grad_(not frozen)
    scaled.device, scaled.plain = device, False  # type: ignore[attr-defined]
    scaled.optimizer.grad_scaler = scaled.scaler
    for x, (bad, micro, unscale, questions) in zip(rows(device, len(script)), script):
        ask = {phase: [name for when, name in questions if when == phase] for phase in PHASES}

        def answer(phase: str, asked: dict[str, list[str]] = ask) -> None:
            for name in asked[phase]:
                found = QUESTIONS[name](scaled)
                answers.append((name, found if name != "thaw" else None))

        answer("before")
        scaled.optimizer.zero_grad()
        for part in x.chunk(micro):
            loss = scaled.scaler.scale(loss_of(scaled.model, part) / micro)
            answer("forward")
            loss.backward()
        if bad and not scaled.plain:
            scaled.optimizer.model[3].bias.grad[:1].fill_(torch.inf)
        answer("backward")
        if any(p.grad is not None for p in scaled.optimizer.model.parameters()):
            if scaled.plain:
                for p in scaled.optimizer.model.parameters():
                    p.grad = None if p.grad is None else p.grad / scaled.scaler.get_scale()
                scaled.optimizer.step()
            else:
                scaled.unscale = unscale
                scaled.step()
        answer("done")
    return everything(scaled.optimizer), answers


@pytest.mark.gpu
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(iterations, max_size=9), st.integers(1, 4), st.booleans())
def test_whatever_a_script_asks_and_whenever(gpu: str, script: list[Any], TCov: int, frozen: bool) -> None:
    got = play(gpu, script, TCov, frozen)
    with host_reads():
        want = play(gpu, script, TCov, frozen)
    assert got[1] == want[1]
    assert_equal_trees(got[0], want[0])


class Recomputed(nn.Module):
    """Blocks whose forward runs again in backward, behind the first layers that backward reaches."""

    def __init__(self, device: str, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.use_reentrant = mlp(device), use_reentrant
        torch.manual_seed(6)
        self.second, self.head = nn.Linear(3, 5, device=device), nn.Linear(5, 2, device=device)

    def forward(self, x: Any) -> Any:
        x = x.requires_grad_() if self.use_reentrant else x
        h = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(checkpoint(self.second, h, use_reentrant=self.use_reentrant))


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("pattern", ["........", "..x.x...", "...x..xx"])
def test_recomputed_forwards(pattern: str, use_reentrant: bool, gpu: str) -> None:
    """What is saved again must be what was saved, though by then the host knows that the step is not a sampled one."""
    for TCov in (1, 2, 3):
        agree(
            gpu,
            lambda every=TCov: Scaled(gpu, optimizer=AdaFisher(Recomputed(gpu, use_reentrant), TCov=every)),
            rows,
            pattern,
        )


class Attending(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.attention = nn.MultiheadAttention(5, 1, device=device)
        self.head = nn.Linear(5, 2, device=device)

    def forward(self, x: Any) -> Any:
        x = x[:, None]
        return self.head(self.attention(x, x * 2.0, x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["........", "..x.x...", "...x..xx"])
def test_attentions(pattern: str, gpu: str) -> None:
    for TCov in (1, 2, 3):
        agree(gpu, lambda every=TCov: Scaled(gpu, optimizer=AdaFisher(Attending(gpu), TCov=every)), rows, pattern)


@pytest.mark.host
@pytest.mark.gpu
@pytest.mark.skipif(not torch_compiled.FOLLOWS, reason="this PyTorch breaks the graph at a hook on a tensor")
@pytest.mark.parametrize("make", [mlp, Attending], ids=["mlp", "attention"])
@pytest.mark.parametrize("pattern", ["......", "..x.x.xx"])
def test_compiled_models(pattern: str, make: Any, gpu: str) -> None:
    """With two graphs for each run, of sampled and of other steps."""
    for TCov in (2, 3):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def made(every: int = TCov) -> Scaled:
            optimizer = AdaFisher(make(gpu), TCov=every)
            compiled = torch.compile(optimizer.model, backend="aot_eager", fullgraph=True)
            return Scaled(gpu, compiled, optimizer=optimizer)

        agree(gpu, made, rows, pattern, "compiled,")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch._dynamo.reset()
