"""The timed sections.  Each takes a `Run` and returns what goes into the results; what fails is in `run.failures`."""

from __future__ import annotations

from typing import Any

import torch

from . import models
from .context import Run
from .sampling import Action, sampler, summaries
from .timing import summary
from .training import factors, iterations, iterations_apart, steps
from .workloads import Workload, decoder
from .workloads import vit as vision_transformer


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


def step(run: Run) -> dict[str, Any]:
    """Unsampled steps of the ResNet."""
    return steps(run, "step", run.work)


def fim(run: Run) -> dict[str, Any]:
    """All factors of the ResNet, in float32 and in bfloat16."""
    return factors(run, "fim", run.work, bf16=True)


def iteration(run: Run) -> dict[str, Any]:
    """Whole iterations of the ResNet."""
    return iterations(run, "iteration", run.work)


def transformer(run: Run) -> dict[str, Any]:
    """Step, factors and iteration of a language model of GPT-2's size."""
    return _all_parts(run, "transformer", decoder(run.sizes.text, run.device))


def vit(run: Run) -> dict[str, Any]:
    """Step, factors and iteration of a vision transformer of ViT-B/16's size."""
    return _all_parts(run, "vit", vision_transformer(run.sizes.vision, run.device))


def _all_parts(run: Run, section: str, work: Workload) -> dict[str, Any]:
    data: dict[str, Any] = {"model": work.name, "parameters": work.parameters}
    for part, measure in (("step", steps), ("fim", factors), ("iteration", iterations_apart)):
        with run.guard(section, part):
            data[part] = measure(run, f"{section}, {part}", work)
        run.release()
    return data


def large(run: Run) -> dict[str, Any]:
    """`optimizer.step()` on a few large matrices with factors, unsampled; all share parameters and gradients."""
    count, rows, columns = run.sizes.large
    arrays = 12  # p, g; five arrays of momenta and moments; temporaries of the eager step
    count = int(max(1, min(count, run.free() // (arrays * 4 * rows * columns))))
    stack = models.matrices([(rows, columns)] * count, run.device)
    actions: dict[str, Action] = {}
    for contender in run.contenders:
        if contender.key != "other":
            with run.guard("large", contender.key):
                optimizer = contender.make(stack)
                models.feed(stack)
                for _ in range(3):
                    optimizer.step()
                actions[contender.key] = sampler(run, optimizer.step, 2)
    samples = run.interleave("large", actions, max(3, run.sizes.rounds // 2))
    return {"parameters": count * rows * columns, "contenders": summaries(samples)}
