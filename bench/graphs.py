"""Whole iterations replayed from CUDA graphs: what a step costs where launches cost the host nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .contenders import Contender
from .context import Run
from .timing import Call, summary
from .training import Track, track_name


class Captured:
    """Forward, backward and step of one contender, captured with fixed inputs: a graph of an unsampled iteration and,
    for one that samples, another of a sampled iteration. Both share one pool of memory, and are never in flight
    together."""

    def __init__(self, run: Run, contender: Contender | None):
        self.clock = run.clock
        self.side = torch.cuda.Stream(run.device)
        self.side.wait_stream(torch.cuda.current_stream())
        samples = contender is not None and contender.samples
        options = (contender.capturable or {}) if contender else {}
        with torch.cuda.stream(self.side):  # warm-up, sampled and not: nothing in a graph is a first call
            self.track = Track(run.work, contender, 2 if samples else None, **options)
            for _ in range(2):
                self.track.iterate()
        torch.cuda.current_stream().wait_stream(self.side)
        self.pool = torch.cuda.graph_pool_handle()
        self.replays: dict[bool, Call] = {}
        self.losses: list[Tensor] = []  # as long as they are held, no other graph writes over them
        for sampled in (False, True) if samples else (False,):
            self._capture(sampled)

    def _capture(self, sampled: bool) -> None:
        """Capture an iteration of the wanted kind; there are no gradients yet, so that they lie in the graph's pool."""
        optimizer = self.track.optimizer
        if self.track.TCov is not None and optimizer.samples is not sampled:
            with torch.cuda.stream(self.side):  # every other iteration is of the other kind
                self.track.iterate()
            torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            self.track.iterate()
        self.replays[sampled] = graph.replay
        self.losses.append(self.track.loss)

    def block(self, length: int, TCov: int | None) -> float:
        """The mean of `length` iterations, whole cycles of one sampled and TCov - 1 others."""

        def replay() -> None:
            for number in range(length):
                self.replays[TCov is not None and number % TCov == 0]()

        return self.clock.streamed(replay) / length

    def check(self) -> None:
        """Raise ArithmeticError if training has diverged."""
        if not all(bool(torch.isfinite(loss)) for loss in self.losses):
            raise ArithmeticError("bench: the loss is not finite after training in a CUDA graph")


def graphs(run: Run) -> dict[str, Any]:
    """Whole iterations of the ResNet in CUDA graphs, in blocks of whole cycles."""
    found: dict[str, tuple[Captured, int | None]] = {}
    for contender in (None, *(one for one in run.contenders if one.capturable is not None)):
        key = contender.key if contender else "none"
        with run.guard("graphs", key):
            captured = Captured(run, contender)
            for TCov in run.tcovs if contender and contender.samples else (None,):
                captured.block(2, TCov)
                found[track_name(key, TCov)] = captured, TCov
    actions = {
        name: partial(captured.block, max(run.sizes.block, TCov or 1), TCov) for name, (captured, TCov) in found.items()
    }
    rows = []
    for name, means in run.interleave("graphs", actions, run.sizes.cycles).items():
        captured, TCov = found[name]
        rows.append({"contender": captured.track.key, "TCov": TCov, "iteration": summary(means)})
        with run.guard("graphs", name):
            captured.check()
    return {"tracks": rows}
