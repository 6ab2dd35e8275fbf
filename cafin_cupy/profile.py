"""`python -m cafin_cupy profile MODULE:FUNCTION`: what AdaFisher would cost in a training loop of one's own.

The function makes a model and says how to get a loss of it. Copies of the model are trained by AdamW, SGD and
AdaFisher, a few iterations each in turn, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .clock import Clock
from .errors import refuse
from .rule import whole
from .task import Task
from .text import aligned, size

NEVER = 10**9  # a TCov under which no further step samples
IN_TURN = 2  # iterations of a turn that count; one goes ahead, which starts from an idle device and a cold cache
SCATTERED = 0.05  # share of an iteration: a wider interval around no difference tells nothing
RATE = 1e-6  # learning rate: nobody shall diverge, and no time depends on it


@dataclass(frozen=True)
class Settings:
    """What to time.

    Attributes:
        task: MODULE:FUNCTION, see `Task`.
        optimizer: "adafisher" or "adafisherw".
        TCov, averaging: AdaFisher's.
        steps: iterations of each kind that are timed, at least.

    Raises:
        CafinError: a value is out of range.
    """

    task: str
    optimizer: str = "adafisher"
    TCov: int = 100
    averaging: str = "parity"
    steps: int = 20

    def __post_init__(self) -> None:
        whole("profile", "steps", self.steps, 2)
        whole("profile", "TCov", self.TCov, 1)
        if self.optimizer not in ("adafisher", "adafisherw"):
            refuse("profile", "optimizer", "be adafisher or adafisherw", self.optimizer)


class Spread(NamedTuple):
    """Seconds: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{1e3 * self.median:.3g} ({1e3 * self.low:.3g}-{1e3 * self.high:.3g})"


def spread(samples: list[float]) -> Spread:
    """Of two or more samples."""
    low, *_, high = quantiles(samples, n=5, method="inclusive")
    return Spread(median(samples), low, high)


def interval(samples: list[float]) -> Spread:
    """Median of the distribution that the samples are of, with its 95% confidence interval: how many samples lie below
    the median is binomially distributed, whatever their distribution is (here in the normal approximation)."""
    ordered = sorted(samples)
    below = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return Spread(median(ordered), ordered[below], ordered[-1 - below])


@dataclass
class Lane:
    """One optimizer with its copy of the model.

    Attributes:
        label: for the table.
        TCov: what it is set to ahead of a turn; None for optimizers that know none.
        marks: (start, behind backward, end) of each timed iteration.
    """

    label: str
    model: nn.Module
    optimizer: Any
    TCov: int | None = None
    marks: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def turn(self, task: Task, clock: Clock) -> None:
        """Some iterations one behind the other, from an idle device; the first does not count."""
        if self.TCov is not None:
            self.optimizer.TCov = self.TCov
        clock.wait()
        for count in range(1 + IN_TURN):
            start = clock.mark()
            task.loss(self.model).backward()
            middle = clock.mark()
            self.optimizer.step()
            self.optimizer.zero_grad()
            end = clock.mark()
            if count:
                self.marks.append((start, middle, end))

    def iterations(self, clock: Clock) -> list[float]:
        """Seconds of each."""
        clock.wait()
        return [clock.between(start, end) for start, _, end in self.marks]

    def times(self, clock: Clock) -> Times:
        """What the turns have taken."""
        whole = spread(self.iterations(clock))
        passes, update = ([clock.between(*mark[k : k + 2]) for mark in self.marks] for k in (0, 1))
        return Times(whole, spread(passes), spread(update))


class Times(NamedTuple):
    """Seconds of an iteration and of its parts.

    Attributes:
        iteration: all of it.
        passes: forward and backward; on a sampled step the sums of the layers too, which are taken there.
        update: `step` and `zero_grad`.
    """

    iteration: Spread
    passes: Spread
    update: Spread


@dataclass(frozen=True)
class Line:
    """One line of the report. `state` and `peak` in bytes; None where it is the state of the line above, or where no
    device counts its memory."""

    label: str
    times: Times
    state: int | None
    peak: int | None


@dataclass(frozen=True)
class Result:
    """Everything that was measured.

    Attributes:
        lines: AdamW, SGD, AdaFisher between samples, AdaFisher on samples.
        TCov: as given.
        name: of the AdaFisher.
        added: seconds that its iterations between samples have taken longer than those of AdamW in the same turn.
    """

    title: str
    name: str
    TCov: int
    lines: tuple[Line, Line, Line, Line]
    added: list[float]

    @property
    def overall(self) -> tuple[float, float]:
        """Seconds of AdaFisher's iteration, and of its update, with one step in TCov sampled."""
        plain, sampled = (line.times for line in self.lines[2:])
        shares = (self.TCov - 1) / self.TCov, 1 / self.TCov
        return (
            shares[0] * plain.iteration.median + shares[1] * sampled.iteration.median,
            shares[0] * plain.update.median + shares[1] * sampled.update.median,
        )

    def table(self) -> str:
        """The report without its verdict."""
        rows: list[tuple[str, ...]] = [
            ("", "iteration ms", "forward, backward ms", "optimizer ms", "share", "state", "peak")
        ]
        for line in self.lines:
            whole, passes, update = line.times
            cells = (line.label, str(whole), str(passes), str(update), f"{update.median / whole.median:.1%}")
            rows.append((*cells, *("" if count is None else size(count) for count in (line.state, line.peak))))
        iteration, update_ = self.overall
        label = f"{self.name}, TCov = {self.TCov}"
        rows.append((label, f"{1e3 * iteration:.3g}", "", f"{1e3 * update_:.3g}", f"{update_ / iteration:.1%}", "", ""))
        if all(line.peak is None for line in self.lines):
            rows = [row[:-1] for row in rows]
        return "\n".join([self.title, "", *aligned(rows, "<" + ">" * (len(rows[0]) - 1))])

    @property
    def verdict(self) -> str:
        """One sentence: what the switch from AdamW costs, and when it pays."""
        before = self.lines[0].times.iteration.median
        sampling = self.overall[0] - self.lines[2].times.iteration.median
        middle, low, high = ((difference + sampling) / before for difference in interval(self.added))
        if low <= 0 <= high and high - low > SCATTERED:
            return (
                f"verdict: the timings are too scattered to tell (an iteration with {self.name} differs from AdamW's "
                f"by {low:+.0%} to {high:+.0%}, with 95% confidence): give more --steps, or the machine less other work"
            )
        surely = f"with 95% confidence {low:+.1%} to {high:+.1%}"
        one = f"verdict: an iteration with {self.name} (TCov = {self.TCov}) takes"
        if low <= 0 <= high:
            return f"{one} as long as with AdamW ({surely}): the switch costs no time"
        if middle < 0:
            return f"{one} {-middle:.1%} less than with AdamW ({surely}): the switch pays from the first step"
        fewer = middle / (1 + middle)
        return (
            f"{one} {middle:.1%} more than with AdamW ({surely}): the switch pays if it saves {fewer:.1%} of the steps"
        )


def profile(settings: Settings) -> Result:
    """Time the iterations.

    Raises:
        CafinError: the task is not what it must be; see `Task`.
    """
    task = Task(settings.task)
    clock = Clock(task.device)
    name = "AdaFisher" if settings.optimizer == "adafisher" else "AdaFisherW"
    makers: list[tuple[str, Callable[[nn.Module], Any]]] = [
        ("AdamW", lambda model: _of_torch(torch.optim.AdamW, model)),
        ("SGD, momentum", lambda model: _of_torch(torch.optim.SGD, model, momentum=0.9)),
        (name, lambda model: _ours(settings, model)),
    ]
    lanes: list[Lane] = []
    memory: list[tuple[int | None, int | None]] = []
    for label, make in makers:
        lane, peak = _first(task, clock, label, make)
        memory.append((_state(lane.optimizer), peak))
        lanes.append(lane)
    ours = lanes.pop()
    lanes += [
        Lane(f"{name}, unsampled step", ours.model, ours.optimizer, NEVER),
        Lane(f"{name}, sampled step", ours.model, ours.optimizer, 1),
    ]
    memory.append((None, None))
    for _ in range(-(-settings.steps // IN_TURN)):
        for lane in lanes:
            lane.turn(task, clock)
    lines = [Line(lane.label, lane.times(clock), *counts) for lane, counts in zip(lanes, memory)]
    added = [ours - theirs for theirs, ours in zip(lanes[0].iterations(clock), lanes[2].iterations(clock))]
    title = _title(task, len(lanes[0].marks))
    return Result(title, name, settings.TCov, (lines[0], lines[1], lines[2], lines[3]), added)


def _first(task: Task, clock: Clock, label: str, make: Callable[[nn.Module], Any]) -> tuple[Lane, int | None]:
    """A lane whose first iterations are done, and the most memory that they took beyond what was taken before."""
    before = 0
    if clock.cuda:
        clock.wait()
        torch.cuda.reset_peak_memory_stats(task.device)
        before = torch.cuda.memory_allocated(task.device)
    model = task.copy()
    lane = Lane(label, model, make(model))
    for TCov in (1, NEVER) if hasattr(lane.optimizer, "TCov") else (None,):
        lane.TCov = TCov
        lane.turn(task, clock)
    peak = torch.cuda.max_memory_allocated(task.device) - before if clock.cuda else None
    if lane.optimizer.defaults.get("fused"):
        lane.label += ", fused"
    lane.marks.clear()
    return lane, peak


def _of_torch(kind: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of PyTorch, fused where it can be."""
    parameters = list(model.parameters())
    try:
        made: torch.optim.Optimizer = kind(parameters, RATE, fused=True, **options)
    except RuntimeError:  # this device or dtype has no fused form
        made = kind(parameters, RATE, **options)
    return made


def _ours(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    from .adapters.torch import AdaFisher, AdaFisherW

    kind = AdaFisher if settings.optimizer == "adafisher" else AdaFisherW
    return kind(model, lr=RATE, TCov=1, averaging=settings.averaging)


def _state(optimizer: Any) -> int:
    """Bytes of an optimizer's state."""
    if hasattr(optimizer, "summary"):
        return int(optimizer.summary().state)
    entries = (entry for state in optimizer.state.values() for entry in state.values())
    return sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))


def _title(task: Task, count: int) -> str:
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    device = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else task.device.type
    return (
        f"{task.name} on {device}: {sum(p.numel() for p in parameters):,} parameters in {len(parameters)} tensors; "
        f"{count} iterations of each kind, in turns; median (20th-80th percentile)"
    )


def report(settings: Settings) -> int:
    """Time, and print table and verdict; returns the exit code."""
    result = profile(settings)
    print(result.table())
    print()
    print(result.verdict)
    return 0
