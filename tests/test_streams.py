"""Streams of the caller: no stream delays another, what was current is current again, and memory may be freed or
overwritten in the order of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import EXAMPLES, arrays, check_update, make, numpy_of, problem, refuses

from cafin_cupy import AdaFisher, CafinValueError, fused_step, update
from cafin_cupy.arrays import current_stream

pytestmark = pytest.mark.gpu
FRAMEWORKS = ["cupy", "torch-cuda"]
BUSY = 600_000_000  # clock cycles that keep a stream waiting: 0.3 s or more


def busy_stream() -> Any:
    """A stream of torch that waits."""
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
    return stream


def on(framework: str, stream: Any) -> Any:
    """Context in which a stream of torch is the framework's current one."""
    import cupy
    import torch

    return torch.cuda.stream(stream) if framework == "torch-cuda" else cupy.cuda.ExternalStream(stream.cuda_stream)


def trained(framework: str) -> tuple[AdaFisher, Callable[[], None]]:
    """An optimizer of all example layers, and a function that trains three steps, of which one is sampled."""
    layers = [case.layer(lambda shape: make(framework, np.ones(shape))) for case in EXAMPLES]
    params = [a for layer in layers for a in arrays(layer)]
    opt = AdaFisher(params, layers, TCov=3)
    data = [[make(framework, x) for x in case.data()] for case in EXAMPLES]
    grads = [make(framework, np.ones(p.shape)) for p in params]

    def train() -> None:
        for _ in range(3):
            if opt.samples:
                for layer, (h, s) in zip(layers, data):
                    opt.accumulate(layer, h, s)
            opt.step(grads)

    train()
    return opt, train


# ---- No stream delays another ----


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_busy_stream_delays_no_other(framework: str) -> None:
    import torch

    opt, train = trained(framework)
    x = problem((64, 27))
    p, m, wide = make(framework, x["p"]), make(framework, x["m"]), make(framework, np.zeros((64, 54)))
    side = torch.cuda.Stream()

    def work() -> None:
        with on(framework, side):
            train()
            fused_step([p], [wide[:, ::2]], [m], lr=0.1)
        fused_step([p], [wide[:, ::2]], [m], lr=0.1, stream=side)

    torch.cuda.synchronize()
    work()  # now all tables exist
    busy = busy_stream()
    work()
    side.synchronize()
    assert not busy.query(), "the stream was to be busy still"
    torch.cuda.synchronize()
    assert all(np.all(np.isfinite(numpy_of(m))) for m in opt.momenta)


def test_a_busy_stream_does_not_delay_the_torch_optimizer() -> None:
    import torch
    from torch_helpers import mlp, rows, run

    from cafin_cupy.adapters.torch import AdaFisher as Optimizer

    batch, side = rows("cuda", 1), torch.cuda.Stream()
    optimizer = Optimizer(mlp("cuda"), TCov=2)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        run(optimizer, batch * 4)
    busy = busy_stream()
    with torch.cuda.stream(side):
        run(optimizer, batch * 4)
    side.synchronize()
    assert not busy.query(), "the stream was to be busy still"


# ---- What was current is current again ----


def streams(framework: str, count: int) -> list[Any]:
    if framework == "torch-cuda":
        import torch

        return [torch.cuda.Stream() for _ in range(count)]
    import cupy

    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


def here(framework: str) -> tuple[Any, ...]:
    """The current device and stream, as CuPy and as the framework have them."""
    import cupy

    of_cupy = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    if framework == "cupy":
        return of_cupy
    import torch

    return *of_cupy, torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def current(framework: str, stream: Any) -> Any:
    if framework == "cupy":
        return stream
    import torch

    return torch.cuda.stream(stream)


def fails(*_: Any, **__: Any) -> None:
    raise MemoryError("out of memory")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_current_device_and_stream_come_back(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every public call, and after one that raises."""
    x = problem((8, 5))
    p, g, m = (make(framework, x[name]) for name in "pgm")
    wide = make(framework, np.zeros((8, 10)))[:, ::2]
    side, other = streams(framework, 2)
    with current(framework, side):
        before = here(framework)
        assert current_stream(p, 0) == before[-1]
        opt, train = trained(framework)
        assert here(framework) == before
        train()
        fused_step([p], [wide], [m], lr=0.1, stream=other)
        assert here(framework) == before
        with refuses(CafinValueError, "grads[0]"):
            fused_step([p], [g[:2]], [m], lr=0.1, stream=other)
        with refuses(CafinValueError, "grads", f"list of {len(opt.momenta)}"):
            opt.step([g])
        with refuses(CafinValueError, "(..., 5)"):
            opt.accumulate(opt._layers[0], g[:, :4], g)
        with monkeypatch.context() as patch:
            patch.setattr(update, "copy_like", fails)  # a strided gradient has no room to be copied
            with pytest.raises(MemoryError):
                fused_step([p], [wide], [m], lr=0.1, stream=other)
            patch.setattr(opt._launch._launch, "_launch", fails)  # type: ignore[union-attr]
            with pytest.raises(MemoryError):
                train()
        assert here(framework) == before
    assert here(framework)[-1] != before[-1]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_current_device_comes_back_after_a_launch_that_fails(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy
    import torch

    with cupy.cuda.Device(1), torch.cuda.device(1):
        p, g = make(framework, np.ones(5)), make(framework, np.ones(5))
        opt = AdaFisher([p])
    before = here(framework)
    opt.step([g])
    assert here(framework) == before
    monkeypatch.setattr(opt._launch._launch, "_launch", fails)  # type: ignore[union-attr]
    with pytest.raises(MemoryError):
        opt.step([g])
    assert here(framework) == before


# ---- Memory that is freed or overwritten ----


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_and_activations_may_be_freed_at_once(framework: str) -> None:
    """The launches still wait when other streams take memory and fill it."""
    import torch

    x, case = problem((512, 300)), EXAMPLES[0]
    p, source, m, H, S = (make(framework, x[name]) for name in ("p", "g", "m", "H", "S"))
    layers = [case.layer(lambda shape: make(framework, np.ones(shape))) for _ in range(2)]
    data = [make(framework, a) for a in case.data()]
    opts = [AdaFisher([layer.weight], [layer], TCov=1) for layer in layers]
    one = make(framework, np.ones(case.weight))
    for opt, layer in zip(opts, layers):
        opt.accumulate(layer, *data)
        opt.step([one])
    fused_step([source + 0], [source], [source + 1], [(H, S)], lr=0.1)
    busy = busy_stream()
    with on(framework, busy):
        g, h, s = source + 0, data[0] + 0, data[1] + 0
        fused_step([p], [g], [m], [(H, S)], lr=0.1)
        opts[0].accumulate(layers[0], h, s)
        opts[0].step([one + 0])
        del g, h, s
    with on(framework, torch.cuda.Stream()):
        taken = [array + float("nan") for array in (source, *data, one) for _ in range(3)]
    taken += [array + float("nan") for array in (source, *data, one) for _ in range(3)]
    assert not busy.query(), "the stream was to be busy still"
    opts[1].accumulate(layers[1], *data)
    opts[1].step([one])
    torch.cuda.synchronize()
    check_update(p, m, x, lr=0.1)
    for a, b in zip((layers[0].weight, *opts[0].factors()["0"]), (layers[1].weight, *opts[1].factors()["0"])):
        np.testing.assert_array_equal(numpy_of(a), numpy_of(b))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("given", ["stream", "address"])
def test_the_default_stream_may_be_named(framework: str, given: str) -> None:
    """While another is current: the copy of a strided gradient waits for what the default stream has to do."""
    import cupy
    import torch

    x = problem((64, 27))
    p, m, wide, values = (make(framework, a) for a in (x["p"], x["m"], np.zeros((64, 54)), x["g"]))
    fused_step([values + 0], [wide[:, ::2]], [values + 1], lr=0.1)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)  # on the default stream
    wide[:, ::2] = values
    default = torch.cuda.default_stream() if framework == "torch-cuda" else cupy.cuda.Stream.null
    with on(framework, torch.cuda.Stream()):
        fused_step([p], [wide[:, ::2]], [m], lr=0.1, stream=default if given == "stream" else 0)
    torch.cuda.synchronize()
    check_update(p, m, x, factors=False, lr=0.1)


@pytest.mark.parametrize("first", FRAMEWORKS)
def test_arrays_of_two_frameworks_follow_both_streams(first: str) -> None:
    """Parameters of one framework with strided gradients of the other, which are written before and after the call on
    a stream that the first knows nothing of; and so a layer's input."""
    import torch

    second = FRAMEWORKS[1 - FRAMEWORKS.index(first)]
    x, case = problem((64, 27)), EXAMPLES[0]
    p, q, m = (make(first, x[name]) for name in "ppm")
    wide, values = make(second, np.zeros((64, 54))), make(second, x["g"])
    layer = case.layer(lambda shape: make(first, np.ones(shape)))
    opt = AdaFisher([q, layer.weight], [layer], lr=0.1, TCov=1)
    zero = make(first, np.zeros(case.weight))
    data = [make(second, a) for a in case.data()]
    h, s = (make(second, np.zeros(a.shape)) for a in case.data())
    fused_step([make(first, x["p"])], [wide[:, ::2]], [make(first, x["m"])], lr=0.1)
    opt.accumulate(layer, h, s)
    opt.discard()
    busy = busy_stream()
    with on(second, busy):
        wide[:, ::2], h[...], s[...] = values, *data
        fused_step([p], [wide[:, ::2]], [m], lr=0.1)
        opt.accumulate(layer, h, s)
        opt.step([wide[:, ::2], zero])
        wide[...], h[...], s[...] = float("nan"), float("nan"), float("nan")
    torch.cuda.synchronize()
    check_update(p, m, x, factors=False, lr=0.1)
    check_update(q, opt.momenta[0], {**x, "m": np.zeros_like(x["m"])}, factors=False, lr=0.1)
    alone = AdaFisher([layer.weight], [layer], TCov=1)
    alone.accumulate(layer, *(make(first, a) for a in case.data()))
    alone.step([zero])
    for a, b in zip(opt.factors()["0"], alone.factors()["0"]):
        np.testing.assert_array_equal(numpy_of(a), numpy_of(b))
