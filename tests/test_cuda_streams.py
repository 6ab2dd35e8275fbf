"""On the GPU: streams, a second device, and what a step costs: launches, allocations, waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from helpers import EXAMPLES, check_update, close, make, numpy_of, problem, same_bits, updated

from cafin_cupy import AdaFisher, fused_step

pytestmark = pytest.mark.gpu
FRAMEWORKS = ["cupy", "torch-cuda"]
SUMMED = [case for case in EXAMPLES if not case.kind.counted]  # else indices are counted, by sorting
BUSY = 600_000_000  # clock cycles that keep a stream waiting: 0.3 s or more


def busy_stream() -> Any:
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
    return stream


@pytest.mark.parametrize("kind", ["torch", "torch current", "cupy", "cupy current", "address"])
def test_streams(kind: str) -> None:
    """The update waits for its stream, and the host for neither."""
    import cupy
    import torch

    framework = "cupy" if "cupy" in kind else "torch-cuda"
    x = problem((64, 27))
    p, g, m, H, S = (make(framework, x[k]) for k in ("p", "g", "m", "H", "S"))
    q, n = (make(framework, x[k]) for k in "pm")
    fused_step([q], [g], [n], [(H, S)], lr=0.1)  # compiled by now
    stream = busy_stream()
    external = cupy.cuda.ExternalStream(stream.cuda_stream)
    given = {"torch": stream, "cupy": external, "address": stream.cuda_stream}.get(kind)
    begin = time.perf_counter()
    if kind == "torch current":
        with torch.cuda.stream(stream):
            fused_step([p], [g], [m], [(H, S)], lr=0.1)
    elif kind == "cupy current":
        with external:
            fused_step([p], [g], [m], [(H, S)], lr=0.1)
    else:
        fused_step([p], [g], [m], [(H, S)], lr=0.1, stream=given)
    assert not stream.query(), "the stream was to be busy still"
    assert time.perf_counter() - begin < 0.15
    same_bits(p, x["p"])  # read on another stream, which does not wait
    stream.synchronize()
    check_update(p, m, x, lr=0.1)
    same_bits(p, q)


def test_a_strided_gradient_is_copied_on_the_given_stream() -> None:
    """The copy must come behind what the stream still has to do, and before the update."""
    import torch

    x = problem((64, 27))
    p, m = (make("torch-cuda", x[k]) for k in "pm")
    wide = torch.zeros(64, 54, device="cuda")
    fused_step([p.clone()], [wide[:, ::2]], [m.clone()], lr=0.1)
    values = make("torch-cuda", x["g"])
    stream = busy_stream()
    with torch.cuda.stream(stream):
        wide[:, ::2] = values  # the gradient is ready only behind the wait
    fused_step([p], [wide[:, ::2]], [m], lr=0.1, stream=stream)
    scratch = [torch.full((64, 27), 9.0, device="cuda") for _ in range(4)]  # takes memory that was given back too early
    torch.cuda.synchronize()
    check_update(p, m, x, factors=False, lr=0.1)
    del scratch


def test_many_different_calls_behind_a_busy_stream() -> None:
    """More kinds of calls than tables are remembered: forgotten ones are still to be read by waiting launches."""
    xs = [problem((5 + k,), k) for k in range(40)]
    arrays = [[make("torch-cuda", x[name]) for name in "pgm"] for x in xs]
    fused_step([arrays[0][0].clone()], [arrays[0][1]], [arrays[0][2].clone()], lr=0.1)
    stream = busy_stream()
    for p, g, m in arrays:
        fused_step([p], [g], [m], lr=0.1, stream=stream)
    stream.synchronize()
    for x, (p, _, m) in zip(xs, arrays):
        check_update(p, m, x, factors=False, lr=0.1)


def test_equal_layouts_on_two_streams() -> None:
    """Two models of the same shapes that know nothing of one another."""
    import torch

    first, second = problem((70, 9), 1), problem((70, 9), 2)
    a, b = ([make("torch-cuda", x[name]) for name in "pgm"] for x in (first, second))
    fused_step([a[0].clone()], [a[1]], [a[2].clone()], lr=0.1)
    stream, other = busy_stream(), torch.cuda.Stream()
    for (p, g, m), where in ((a, stream), (b, other)):
        fused_step([p], [g], [m], lr=0.1, stream=where)
    torch.cuda.synchronize()
    for x, (p, _, m) in ((first, a), (second, b)):
        check_update(p, m, x, factors=False, lr=0.1)


def trained(framework: str) -> tuple[AdaFisher, Any, list[Any], list[Any]]:
    """An optimizer of all example layers past its first step, a function that accumulates them all, two gradients."""
    layers = [case.layer(lambda shape: make(framework, np.ones(shape))) for case in SUMMED]
    params = [a for layer in layers for a in (layer.weight, layer.bias) if a is not None]
    opt = AdaFisher(params, layers, TCov=3)
    data = [[make(framework, x) for x in case.data()] for case in SUMMED]
    grads = [[make(framework, np.ones(p.shape)) for p in params] for _ in range(2)]

    def accumulate() -> None:
        for layer, (h, s) in zip(layers, data):
            opt.accumulate(layer, h, s)

    accumulate()
    opt.step(grads[0])
    opt.step(grads[1])
    return opt, accumulate, grads[0], grads[1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_launches_of_a_step(framework: str) -> None:
    """One kernel an unsampled step; one a layer and three a step where the factors are refreshed."""
    import torch

    opt, accumulate, grads, others = trained(framework)
    names = []
    for given in (others, grads, grads):  # unsampled, sampled with other pointers, unsampled
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            if opt.samples:
                accumulate()
            opt.step(given)
            torch.cuda.synchronize()
        events = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        names.append([name for name in events if "memcpy" not in name.lower()])
    assert names[0] == names[2] == ["update"]
    assert names[1] == ["column_sums"] * len(SUMMED) + ["fold", "average", "update"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_allocates_and_waits_for_nothing(framework: str) -> None:
    import cupy
    import torch

    class Count(cupy.cuda.MemoryHook):
        name = "Count"
        calls = 0

        def malloc_preprocess(self, **_: Any) -> None:
            Count.calls += 1

    def allocations() -> int:
        return Count.calls + int(torch.cuda.memory_stats()["allocation.all.allocated"])

    opt, accumulate, grads, others = trained(framework)
    while not opt.samples:
        opt.step(grads)
    accumulate()
    opt.step(grads)  # all tables exist
    stream = busy_stream()
    torch.cuda.current_stream().wait_stream(stream)  # whatever waits for the device now waits long
    begin, before = time.perf_counter(), allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Count():
            for given in (others, grads, others, others):  # unsampled, unsampled, sampled, unsampled
                if opt.samples:
                    accumulate()
                opt.step(given)
            used = allocations() - before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert time.perf_counter() - begin < 0.15
    assert used == 0
    torch.cuda.synchronize()
    assert all(np.all(np.isfinite(numpy_of(m))) for m in opt.momenta)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_device_that_is_not_the_current_one(framework: str) -> None:
    import cupy
    import torch

    xs = [problem((9, 5), k) for k in range(2)]
    with cupy.cuda.Device(1), torch.cuda.device(1):
        p, m = (make(framework, xs[0][k]) for k in "pm")
        grads = [make(framework, x["g"]) for x in xs]
        H, S = (make(framework, xs[0][k]) for k in "HS")
    assert cupy.cuda.runtime.getDevice() == 0
    fused_step([p], [grads[0]], [m], [(H, S)], lr=0.1)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    torch.cuda._sleep(BUSY)  # the current device is busy, which is none of the other's business
    fused_step([p], [grads[1]], [m], [(H, S)], lr=0.1)
    torch.cuda.synchronize(1)
    assert cupy.cuda.runtime.getDevice() == 0
    once = updated(xs[0], lr=0.1)
    twice = updated({**xs[0], "p": once[0], "m": once[1], "g": xs[1]["g"]}, lr=0.1)
    close(p, twice[0], 1e-5)
    close(m, twice[1], 1e-5)
