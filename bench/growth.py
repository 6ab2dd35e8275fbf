"""How costs grow: the step with parameters and with tensors, the factors with the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import models
from .contenders import Contender
from .context import Run
from .sampling import Action, capture, sampler, summaries
from .timing import summary
from .training import moved_bytes

TENSOR = 32  # rows and columns of each of many tensors
MARGIN = 1 << 30  # bytes of device memory left for all but parameters, gradients and state
POSITIONS = 4096  # looked at in a large tensor
TOLERANCE = 1e-6  # a dozen float32 roundings of 6e-8


def growth(run: Run) -> dict[str, Any]:
    """Three series: `batch`, `tensors`, `parameters`."""
    data: dict[str, Any] = {"batch": {"captured": run.cuda, "rows": by_batch(run)}}
    run.release()
    for name, sizes, measure in (
        ("tensors", run.sizes.tensors, by_tensors),
        ("parameters", run.sizes.parameters, by_parameters),
    ):
        rows = []
        for size in sizes:
            with run.guard("growth", f"{size:,} {name}"):
                rows.append(measure(run, size))
            run.release()
        data[name] = {"rows": rows}
    return data


def shapes(parameters: int) -> list[tuple[int, int]]:
    """Two matrices of nearly so many parameters together, the first somewhat larger: of 4e9 it has more than 2**31."""
    columns = 1 << (parameters.bit_length() - 1) // 2
    rows = parameters // columns
    first = rows * 55 // 100
    return [(first, columns), (rows - first, columns)]


def by_parameters(run: Run, parameters: int) -> dict[str, Any]:
    """The step of two matrices; what ours made of the first is compared with the rule."""
    matrices = shapes(parameters)
    count = sum(rows * columns for rows, columns in matrices)
    free = run.free()
    if 8 * count + MARGIN > free:
        return {"parameters": count, "contenders": {}, "skipped": {"all": _lacking(8 * count, free)}}
    stack = models.matrices(matrices, run.device)
    inner = run.sizes.inner if parameters < 10**8 else 2
    row, optimizers = _steps(run, stack, f"{parameters:,} parameters", inner)
    p = next(stack.parameters())
    row = {"parameters": count, "largest": p.numel(), **row}
    if "ours" in optimizers:
        with run.guard("growth", f"ours, check of {parameters:,} parameters"):
            row["error"] = error = step_error(optimizers["ours"], p)
            if not error <= TOLERANCE:
                raise ArithmeticError(f"bench: a step of {row['largest']:,} elements is off by {error:.1e}")
    return row


def by_tensors(run: Run, tensors: int) -> dict[str, Any]:
    """The step of many small matrices."""
    stack = models.matrices([(TENSOR, TENSOR)] * tensors, run.device)
    row, _ = _steps(run, stack, f"{tensors:,} tensors", run.sizes.inner)
    return {"tensors": tensors, "parameters": tensors * TENSOR**2, **row}


def _steps(run: Run, stack: nn.ModuleList, what: str, inner: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of the contenders whose traffic is known, on shared parameters and gradients; and their optimizers."""
    count = sum(p.numel() for p in stack.parameters())
    optimizers: dict[str, Any] = {}
    actions: dict[str, Action] = {}
    skipped: dict[str, str] = {}
    for contender in run.contenders:
        if contender.state is None:
            continue
        free = run.free()
        if contender.state * count + MARGIN > free:
            skipped[contender.key] = _lacking(contender.state * count, free)
            continue
        with run.guard("growth", f"{contender.key}, {what}"):
            optimizer = _started(contender, stack)
            actions[contender.key] = sampler(run, optimizer.step, inner)
            optimizers[contender.key] = optimizer
    figures = summaries(run.interleave("growth", actions, max(3, run.sizes.rounds // 3)))
    return {"contenders": figures, "skipped": skipped}, {key: optimizers[key] for key in figures}


def _started(contender: Contender, stack: nn.ModuleList) -> torch.optim.Optimizer:
    """An optimizer past its first steps, its factors no longer all equal."""
    optimizer = contender.make(stack)
    models.feed(stack)
    for _ in range(3):
        optimizer.step()
    return optimizer


def _lacking(wanted: float, free: float) -> str:
    return f"needs {wanted / 2**30:.0f} GiB of {free / 2**30:.0f} GiB free"


def step_error(optimizer: Any, p: Tensor) -> float:
    """Make one unsampled step of AdaFisher (parity), and compare p, the weight of the layer named "0", and its momentum
    with the rule in float64, at some thousand positions, the last ones among them.

    Returns:
        The largest error of an entry, relative to the sum of the magnitudes that make it.
    """
    group = optimizer.param_groups[0]
    group["lr"] = 1e-3  # large enough that the change counts as much as what is changed
    columns, last = p.shape[1], p.numel()
    ends = torch.arange(max(0, last - 64), last, device=p.device)
    at = torch.cat([torch.randint(last, (POSITIONS,), device=p.device), ends])
    p0, g, m0 = (_entries(x, at) for x in (p, p.grad, optimizer.state[p]["exp_avg"]))
    optimizer.step()
    H, S = optimizer.factors()["0"]
    beta, t = group["beta"], int(optimizer.state[p]["step"])
    kept, added = beta * m0, (1 - beta) * g
    F = S.double()[at // columns] * H.double()[at % columns] + group["Lambda"]
    change = group["lr"] / (1 - beta**t) * (kept + added) / F
    errors = [
        (_entries(optimizer.state[p]["exp_avg"], at) - (kept + added)).abs() / (kept.abs() + added.abs()),
        (_entries(p, at) - (p0 - change)).abs() / (p0.abs() + change.abs()),
    ]
    return float(torch.cat(errors).max())  # NaN if there is one


def _entries(x: Tensor | None, at: Tensor) -> Tensor:
    assert x is not None
    return x.detach().view(-1)[at].double()


def by_batch(run: Run) -> list[dict[str, Any]]:
    """Our construction of the ResNet's factors at each batch size, replayed from a CUDA graph where there is CUDA."""
    (ours,) = [contender for contender in run.contenders if contender.key == "ours"]
    moved: dict[str, int] = {}
    actions: dict[str, Any] = {}
    for batch in run.sizes.batches:
        with run.guard("growth", f"batch {batch}"):
            work = run.resnet(batch)
            pairs = work.pairs()
            assert ours.construct is not None
            call = ours.construct(ours.make(work.model()), pairs)
            for _ in range(3):
                call()
            replay = capture(call) if run.cuda else call
            replay()
            moved[str(batch)], actions[str(batch)] = moved_bytes(pairs), partial(run.clock.streamed, replay, 4)
    times = run.interleave("growth", actions, max(3, run.sizes.rounds // 3))
    return [{"batch": int(batch), "bytes": moved[batch], "time": summary(found)} for batch, found in times.items()]
