"""Memory and launches: what one step, one construction of the factors and one iteration take from the device."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .contenders import Contender
from .context import Run
from .timing import Call

KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}


def memory(run: Run) -> dict[str, Any]:
    """Allocations and bytes of one unsampled step, one construction, and one sampled and one unsampled iteration."""
    return _per_call(run, "memory", _allocations, iterations=True)


def launches(run: Run) -> dict[str, Any]:
    """Kernels, copies and fills of one unsampled step and one construction, with the time that they ran."""
    _launches(run, lambda: torch.zeros(1, device=run.device))  # the profiler's own start-up
    return _per_call(run, "launches", _launches, iterations=False)


def _per_call(run: Run, section: str, measure: Any, iterations: bool) -> dict[str, Any]:
    pairs = run.work.pairs()
    figures: dict[str, Any] = {}
    for contender in run.contenders:
        figures[contender.key] = {}
        with run.guard(section, contender.key):
            figures[contender.key]["step"] = measure(run, run.work.ready(contender).step)
            if contender.construct is not None:
                call = contender.construct(contender.make(run.work.model()), pairs)
                call()
                figures[contender.key]["fim"] = measure(run, call)
    if iterations:
        everyone: list[Contender | None] = [None, *run.contenders]
        for one in everyone:
            key = one.key if one else "none"
            with run.guard(section, f"{key}, iteration"):
                figures.setdefault(key, {}).update(_iterations(run, one))
    return {"contenders": figures}


def _iterations(run: Run, contender: Contender | None) -> dict[str, Any]:
    model = run.work.model()
    run.work.backward(model)  # what libraries keep from their first use is not the optimizer's
    model.zero_grad(set_to_none=True)
    before = _held(run)
    optimizer = contender.make(model, 2) if contender else None

    def iterate() -> None:
        run.work.backward(model)
        if optimizer is not None:
            optimizer.step()
        (optimizer or model).zero_grad(set_to_none=True)

    for _ in range(2):
        iterate()
    figures: dict[str, Any] = {"held": _held(run) - before}
    figures["sampled iteration"] = _allocations(run, iterate)  # the third of TCov 2
    figures["unsampled iteration"] = _allocations(run, iterate)
    return figures


def _held(run: Run) -> int:
    """Bytes in use on the device, CuPy's included."""
    run.release()
    run.clock.synchronize()
    pool = _cupy_pool()
    return torch.cuda.memory_allocated(run.device) + (pool.used_bytes() if pool is not None else 0)


def _allocations(run: Run, call: Call) -> dict[str, int]:
    """Device memory of one call.  `peak` counts from what was held before the call; CuPy's pool is counted apart."""
    run.release()
    run.clock.synchronize()
    pool = _cupy_pool()
    if pool is not None:
        pool.free_all_blocks()
    pool_before = pool.total_bytes() if pool is not None else 0
    torch.cuda.reset_peak_memory_stats(run.device)
    before = torch.cuda.memory_stats(run.device)
    held = torch.cuda.memory_allocated(run.device)
    call()
    run.clock.synchronize()
    after = torch.cuda.memory_stats(run.device)
    return {
        "allocations": after["allocation.all.allocated"] - before["allocation.all.allocated"],
        "allocated": after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"],
        "peak": torch.cuda.max_memory_allocated(run.device) - held,
        "kept": torch.cuda.memory_allocated(run.device) - held,
        "cupy_pool_growth": (pool.total_bytes() - pool_before) if pool is not None else 0,
    }


def _cupy_pool() -> Any:
    cupy = sys.modules.get("cupy")
    return cupy.get_default_memory_pool() if cupy is not None else None


def _launches(run: Run, call: Call) -> dict[str, Any]:
    """Device activities of one call, counted in the profiler's trace; `busy` is the sum of the kernels' times in us."""
    run.clock.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        run.clock.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    counts = Counter(KINDS[event["cat"]] for event in events if event.get("cat") in KINDS)
    if not counts:
        raise RuntimeError("bench: the profiler recorded no device activity; is CUPTI available?")
    busy = sum(float(event["dur"]) for event in events if event.get("cat") == "kernel")
    return {**{kind: counts[kind] for kind in KINDS.values()}, "busy": busy}
