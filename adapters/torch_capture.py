"""Whole training iterations in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cafin_cupy.errors import BackendError

from .torch_checks import check_callable
from .torch_scalars import checked_hypers

if TYPE_CHECKING:
    from .torch import AdaFisher
    from .torch_plan import Plan

RUN_FIRST = (
    "step: what a CUDA graph captures must have run before, with the same parameters and state; run a few iterations "
    "first, or use optimizer.capture(iteration)"
)
WARM_UP = 3  # iterations before the first capture: libraries set themselves up


class CapturedIteration:
    """See `AdaFisher.capture`.

    Sampled and unsampled iterations differ in their launches, so each kind has a graph; both share one memory pool.
    The host counts steps and keeps the scalars up to date, so schedulers work. If the optimizer's state moves, as after
    `load_state_dict`, the graphs are made anew.
    """

    def __init__(self, optimizer: AdaFisher, iteration: Callable[[], Any]) -> None:
        check_callable("capture", "iteration", iteration)
        if not optimizer.capturable or optimizer.backend != "cuda":
            rule = "the optimizer must be capturable and run on the CUDA backend"
            got = f"capturable={optimizer.capturable}, backend {optimizer.backend!r}"
            mend = f"use {type(optimizer).__name__}(model, ..., capturable=True)"
            raise BackendError(f"capture: {rule}, got {got}; {mend}")
        self._optimizer, self._iteration = optimizer, iteration
        self._stream = torch.cuda.Stream()
        self._forget()

    def _forget(self) -> None:
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._run: set[bool] = set()  # kinds of iterations that have run without a graph
        self._runs = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._plan: Plan | None = None

    def __call__(self) -> Any:
        """Train one iteration, on the current stream."""
        optimizer = self._optimizer
        if optimizer.error_if_nonfinite:
            raise BackendError("capture: error_if_nonfinite must be False, as a graph cannot wait for what it finds")
        plan = self._plan
        if plan is not None and (optimizer._plan is not plan or not plan.valid(optimizer)):
            self._forget()
        sampled = optimizer.samples
        if sampled in self._graphs:
            graph, result = self._graphs[sampled]
            assert plan is not None
            plan.refresh(checked_hypers(optimizer, "step"))
            graph.replay()
            optimizer._count_steps(optimizer.steps + 1)
            return result
        if self._runs < WARM_UP or sampled not in self._run:
            self._run.add(sampled)
            self._runs += 1
            return self._outside()
        return self._capture(sampled)

    def _outside(self) -> Any:
        """On the stream that will capture, where autograd and the libraries then know their way."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._iteration()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self, sampled: bool) -> Any:
        optimizer = self._optimizer
        self._plan = plan = optimizer._plan
        if plan is None or plan.schedule is None:
            raise BackendError("capture: `iteration` must call step(), on the CUDA backend")
        plan.refresh(checked_hypers(optimizer, "step"))
        plan.reserve()
        before, stream = optimizer.steps, torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = self._iteration()
            if optimizer.steps != before + 1:
                raise BackendError("capture: `iteration` must call step() once")
        except BaseException:
            optimizer._count_steps(before)  # nothing has run
            self._clean_up(stream)
            raise
        self._graphs[sampled] = graph, result
        graph.replay()
        return result

    def _clean_up(self, stream: torch.cuda.Stream) -> None:
        """After a capture that failed.  PyTorch may leave its stream current, its memory pool in use, and the generator
        of random numbers unusable until some capture ends well."""
        torch.cuda.set_stream(stream)
        self._forget()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=stream.device)


def check_capture(optimizer: AdaFisher) -> None:
    """Refuse a step that a CUDA graph captures and could not repeat, and keep what its replays will read.

    Raises:
        BackendError: it cannot be captured.
    """
    rule = None
    if not optimizer.capturable:
        rule = "be captured by a CUDA graph only with capturable=True, since a replay would repeat one step number"
    elif optimizer.backend != "cuda":
        rule = "run on the CUDA backend to be captured by a CUDA graph"
    elif getattr(optimizer, "found_inf", None) is not None:
        rule = "be captured without a GradScaler, as the host must learn whether the step has happened"
    elif optimizer.error_if_nonfinite:
        rule = "be captured with error_if_nonfinite=False, which a graph cannot wait for"
    if rule is not None:
        name = type(optimizer).__name__
        mend = f"use {name}(model, ..., capturable=True), or capture forward and backward of an unsampled step alone"
        raise BackendError(f"step: it must {rule}; {mend}")
    optimizer._factors.hold()
