"""The timed sections.  Each takes a `Run` and returns what goes into the results; what fails is in `run.failures`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import models
from .contenders import LAYERS, Contender
from .context import Run
from .timing import Call, cycle, summary

DELAYABLE = 5_000.0  # us of host time that one sample may queue: about what the launch queue holds


def copy_speed(run: Run) -> dict[str, Any]:
    """A large device-to-device copy: the ceiling of everything that streams memory."""
    size = run.sizes.copy
    if run.cuda:
        size = min(size, torch.cuda.mem_get_info(run.device)[0] // 8)
    source = torch.randn(size // 4, device=run.device)
    target = torch.empty_like(source)

    def call() -> None:
        target.copy_(source)

    for _ in range(3):
        call()
    time = summary([run.clock.queued(call, 2, 50.0) for _ in range(run.sizes.rounds)])
    moved = 2 * source.nbytes
    return {"bytes": moved, "time": time, "gigabytes_per_second": moved / time["median"] / 1e3}


def _sampler(run: Run, call: Call, inner: int, before: Call | None = None) -> Callable[[], dict[str, float]]:
    """An action that times `call` in the three ways of `timing`.  `before` is called ahead of each; its host time hides
    behind the device's in `device` and is left out of `host`; `streamed` is not measured then."""

    def both() -> None:
        if before is not None:
            before()
        call()

    host = min(run.clock.host(both) for _ in range(3))
    inner = max(1, min(inner, int(DELAYABLE / host)))

    def sample() -> dict[str, float]:
        times = {"device": run.clock.queued(both, inner, host)}
        if before is None:
            times["streamed"] = run.clock.streamed(call, inner)
        else:
            before()
        return {**times, "host": run.clock.host(call)} if run.cuda else times

    return sample


def _mover(optimizer: torch.optim.Optimizer) -> Call:
    """A call that puts every gradient at the other of two addresses."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    spare = [p.grad.clone() for p in parameters]

    def move() -> None:
        for k, p in enumerate(parameters):
            p.grad, spare[k] = spare[k], p.grad

    return move


def _summaries(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        name: {kind: summary([row[kind] for row in rows]) for kind in rows[0]} for name, rows in samples.items() if rows
    }


def step(run: Run) -> dict[str, Any]:
    """`optimizer.step()` of the ResNet on unsampled steps, two models in turn: more memory than any cache holds."""
    actions: dict[str, Callable[[], Any]] = {}
    moved: dict[str, Callable[[], Any]] = {}  # the same with gradients at new addresses each time
    for contender in run.contenders:
        with run.guard("step", contender.key):
            optimizers = [run.ready(contender) for _ in range(2)]
            actions[contender.key] = _sampler(run, cycle([one.step for one in optimizers]), run.sizes.inner)
            moved[contender.key] = _sampler(run, optimizers[0].step, run.sizes.inner, _mover(optimizers[0]))
    parameters = sum(p.numel() for p in run.model().parameters())
    figures = _summaries(run.interleave("step", actions, run.sizes.rounds))
    return {
        "parameters": parameters,
        "contenders": figures,
        "moved": _summaries(run.interleave("step", moved, max(3, run.sizes.rounds // 2))),
    }


def fim(run: Run) -> dict[str, Any]:
    """All factors of one sampled step from every layer's (h, s), gathered beforehand from one pass of the ResNet."""
    pairs = models.layer_pairs(run.model(), LAYERS, *run.data)
    calls: dict[str, Call] = {}
    actions: dict[str, Callable[[], Any]] = {}
    for contender in run.contenders:
        if contender.construct is not None:
            with run.guard("fim", contender.key):
                call = contender.construct(contender.make(run.model()), pairs)
                for _ in range(3):
                    call()
                calls[contender.key] = call
                actions[contender.key] = _sampler(run, call, 1)
    figures = _summaries(run.interleave("fim", actions, run.sizes.rounds))
    captured: Any = "not applicable"
    if run.cuda and "ours" in figures:
        captured = None
        with run.guard("fim", "ours, captured"):
            replay = capture(calls["ours"])
            replay()
            captured = summary([run.clock.streamed(replay, 4) for _ in range(run.sizes.rounds)])
    moved = sum(h.nbytes + s.nbytes for h, s in pairs.values())
    return {"layers": len(pairs), "bytes": moved, "contenders": figures, "ours_captured": captured}


def capture(call: Call) -> Call:
    """The replay of a CUDA graph of `call`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call on this stream allocates must not be in the graph
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class _Track:
    """Whole training iterations of one contender at one TCov: forward, backward, step, zero_grad."""

    def __init__(self, run: Run, contender: Contender | None, TCov: int):
        self.run, self.TCov, self.count = run, TCov, 0
        self.key = contender.key if contender else "none"
        self.model = run.model()
        self.optimizer = contender.make(self.model, TCov) if contender else None
        self.sampled: list[float] = []
        self.unsampled: list[float] = []
        for _ in range(3):
            self.iterate()

    def iterate(self) -> None:
        self.loss = self.run.backward(self.model)
        if self.optimizer is not None:
            self.optimizer.step()
        (self.optimizer or self.model).zero_grad(set_to_none=True)
        self.count += 1

    def block(self) -> float:
        """The mean iteration of a block that holds whole cycles."""
        first, length = self.count + 1, max(self.run.sizes.block, self.TCov)
        times = self.run.clock.each(self.iterate, length)
        for offset, time in enumerate(times):
            (self.unsampled if (first + offset) % self.TCov else self.sampled).append(time)
        return sum(times) / length


def iteration(run: Run) -> dict[str, Any]:
    """Whole iterations at each TCov, against no optimizer and those without factors."""
    tracks: dict[str, _Track] = {}
    for contender in (None, *run.contenders):
        for TCov in run.tcovs if contender and contender.samples else (0,):
            name = (contender.key if contender else "none") + (f", TCov {TCov}" if TCov else "")
            with run.guard("iteration", name):
                tracks[name] = _Track(run, contender, TCov or max(run.sizes.block, 1))
    blocks = run.interleave("iteration", {name: track.block for name, track in tracks.items()}, run.sizes.cycles)
    rows = []
    for name, means in blocks.items():
        track = tracks[name]
        samples = ", TCov " in name
        row = {"contender": track.key, "TCov": track.TCov if samples else None, "iteration": summary(means)}
        if samples:
            row["sampled"] = summary(track.sampled) if track.sampled else None
            row["unsampled"] = summary(track.unsampled) if track.unsampled else None
        rows.append(row)
        with run.guard("iteration", name):
            if not bool(torch.isfinite(track.loss)):
                raise ArithmeticError("bench: the loss is not finite after training")
    return {"tracks": rows}


def large(run: Run) -> dict[str, Any]:
    """`optimizer.step()` on a few large matrices with factors, unsampled; all share parameters and gradients."""
    count, rows, columns = run.sizes.large
    if run.cuda:
        arrays = 12  # p, g; five arrays of momenta and moments; temporaries of the eager step
        count = max(1, min(count, torch.cuda.mem_get_info(run.device)[0] // (arrays * 4 * rows * columns)))
    stack = models.matrices(count, rows, columns, run.device)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for contender in run.contenders:
        if contender.key != "other":
            with run.guard("large", contender.key):
                optimizers[contender.key] = contender.make(stack)
    x = torch.randn(64, columns, device=run.device)
    sum(layer(x).square().mean() for layer in stack).backward()
    actions: dict[str, Callable[[], Any]] = {}
    for key, optimizer in optimizers.items():
        with run.guard("large", key):
            for _ in range(3):
                optimizer.step()
            actions[key] = _sampler(run, optimizer.step, 2)
    samples = run.interleave("large", actions, max(3, run.sizes.rounds // 2))
    return {"parameters": count * rows * columns, "contenders": _summaries(samples)}
