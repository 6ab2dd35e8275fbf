"""From calls to samples: what an action of `Run.interleave` does, and how its samples are summed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .context import Run
from .timing import Call, summary

WARM = 5  # calls of which the last counts as the host's time
DELAYABLE = 5_000.0  # us of host time that one sample may queue: about what the launch queue holds

Action = Callable[[], dict[str, float]]


def sampler(run: Run, call: Call, inner: int, before: Call | None = None) -> Action:
    """An action that times `call` in the three ways of `timing`.  `before` is called ahead of each; its host time hides
    behind the device's in `device` and is left out of `host`; `streamed` is not measured then.  On a CPU there is
    `device` alone."""

    def both() -> None:
        if before is not None:
            before()
        call()

    if not run.cuda:  # all would be the wall clock
        return lambda: {"device": run.clock.wall(both, inner)}

    host = min(run.clock.host(both) for _ in range(3))
    inner = max(1, min(inner, int(DELAYABLE / host)))

    def sample() -> dict[str, float]:
        times = {"device": run.clock.queued(both, inner, host)}
        if before is None:
            times["streamed"] = run.clock.streamed(call, inner)
        for _ in range(WARM):
            if before is not None:
                before()
            times["host"] = run.clock.host(call)  # the last: the host's caches are warm
        return times

    return sample


def mover(optimizer: torch.optim.Optimizer) -> Call:
    """A call that puts every gradient at the other of two addresses."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    spare = [p.grad.clone() for p in parameters]

    def move() -> None:
        for k, p in enumerate(parameters):
            p.grad, spare[k] = spare[k], p.grad

    return move


def summaries(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """{name: {way of timing: summary}}."""
    return {
        name: {kind: summary([row[kind] for row in rows]) for kind in rows[0]} for name, rows in samples.items() if rows
    }


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

    def replay(_: Call = call) -> None:  # whoever can replay holds what the graph reads
        graph.replay()

    return replay
