"""JAX arrays outside of `jax.jit` on a GPU's own streams: neither side runs ahead of the other, and nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import same_bits

import cafin_cupy
from cafin_cupy import AdaFisher, Linear
from cafin_cupy.adapters.jax import borrowed, fused_step

pytestmark = pytest.mark.gpu
ROUNDS = 50
SHAPE = (513, 257)
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Whatever other tests have made the default device of the process."""
    with jax.default_device(jax.devices("cuda")[0]):
        yield


@jax.jit
def slowly(x: Any) -> Any:
    """`x` itself, some ten milliseconds later."""
    a = jnp.full((4096, 4096), 1.0 / 4096)
    late = jax.lax.fori_loop(0, 10, lambda _, a: a @ a, a)[0, 0]  # stays 1 / 4096
    return jnp.where(late > 0, x, 0.0)


def problem(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    x = {name: rng.standard_normal(SHAPE, np.float32) for name in "pgm"}
    return x | {"H": rng.random(SHAPE[1], np.float32), "S": rng.random(SHAPE[0], np.float32)}


def on_gpu(x: Arrays) -> dict[str, Any]:
    return {name: jax.block_until_ready(jnp.asarray(value)) for name, value in x.items()}


def expected(x: Arrays, steps: int = 1) -> list[np.ndarray[Any, Any]]:
    """What the kernel makes of CuPy's arrays."""
    import cupy

    y = {name: cupy.asarray(value) for name, value in x.items()}
    for t in range(steps):
        cafin_cupy.fused_step([y["p"]], [y["g"]], [y["m"]], [(y["H"], y["S"])], lr=0.1, step=t + 1)
    return [y[name].get() for name in "pm"]


def streams() -> list[Any]:
    """The default stream, one that waits for it, and one that does not."""
    import cupy

    return [None, cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)]


def busy_kernel() -> Any:
    """Keeps the stream it is launched on waiting, some ten milliseconds."""
    import cupy

    return cupy.RawKernel(
        'extern "C" __global__ void busy() { for (long long end = clock64() + 20000000; clock64() < end;); }', "busy"
    )


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "donated"])
@pytest.mark.parametrize("which", range(3))
def test_the_step_comes_behind_what_jax_is_still_computing(which: int, donate: bool) -> None:
    """Its arguments, and whoever still reads what is donated."""
    stream = streams()[which]
    x = problem(0)
    want = expected(x)
    for _ in range(ROUNDS):
        y = on_gpu(x)
        reader = slowly(y["p"]) + y["m"]  # runs while the step is called
        g = slowly(y["g"])
        p, m = fused_step([y["p"]], [g], [y["m"]], [(y["H"], y["S"])], lr=0.1, donate=donate, stream=stream)
        same_bits(reader, x["p"] + x["m"])
        same_bits(p[0], want[0])
        same_bits(m[0], want[1])


@pytest.mark.parametrize("which", range(3))
def test_what_jax_does_next_comes_behind_the_step(which: int) -> None:
    """And what else the stream was given before."""
    import cupy

    stream = streams()[which]
    x, busy = problem(1), busy_kernel()
    want = expected(x)
    for _ in range(ROUNDS):
        y = on_gpu(x)
        with stream or cupy.cuda.Stream.null:
            busy((1,), (1,), ())
        p, m = fused_step([y["p"]], [y["g"]], [y["m"]], [(y["H"], y["S"])], lr=0.1, donate=True, stream=stream)
        for name in "gHS":  # which JAX may give to others at once
            y[name].delete()
        others = [jnp.full(SHAPE, float(k)) + 1.0 for k in range(8)]
        twice = 2.0 * p[0], 2.0 * m[0]
        same_bits(twice[0], 2.0 * want[0])
        same_bits(twice[1], 2.0 * want[1])
        assert [float(each[-1, -1]) for each in others] == [k + 1.0 for k in range(8)]


def test_the_host_does_not_wait() -> None:
    import cupy

    y, stream, busy = on_gpu(problem(2)), cupy.cuda.Stream(non_blocking=True), busy_kernel()
    p, m = [y["p"]], [y["m"]]
    for _ in range(2):
        p, m = fused_step(p, [y["g"]], m, [(y["H"], y["S"])], lr=0.1, donate=True, stream=stream)
        with borrowed([y["g"]], stream):  # compiled here, not where it is timed
            pass
    jax.block_until_ready(p)
    with stream:
        for _ in range(50):
            busy((1,), (1,), ())
    begin = time.perf_counter()
    p, m = fused_step(p, [y["g"]], m, [(y["H"], y["S"])], lr=0.1, donate=True, stream=stream)
    with borrowed([y["g"]], stream):
        pass
    called = time.perf_counter() - begin
    assert not stream.done, "the stream was to be busy still"
    jax.block_until_ready(p)
    assert called < (time.perf_counter() - begin) / 2


def test_many_steps_need_no_more_memory_than_one() -> None:
    import cupy

    x = problem(3)
    y, device = on_gpu(x), jax.devices("cuda")[0]
    p, m, sizes, pooled = [y["p"]], [y["m"]], [], []
    places = [a.unsafe_buffer_pointer() for a in (*p, *m)]
    for t in range(ROUNDS):
        p, m = fused_step(p, [y["g"]], m, [(y["H"], y["S"])], lr=0.1, step=t + 1, donate=True)
        assert [a.unsafe_buffer_pointer() for a in (*p, *m)] == places
        jax.block_until_ready(p)
        sizes.append(device.memory_stats()["bytes_in_use"])
        pooled.append(cupy.get_default_memory_pool().total_bytes())
    assert len(set(sizes[5:])) == len(set(pooled[5:])) == 1
    for got, want in zip((p[0], m[0]), expected(x, ROUNDS)):
        same_bits(got, want)


def test_a_view_of_donated_memory_is_refused_or_keeps_its_numbers() -> None:
    import cupy

    y = on_gpu(problem(4))
    view = cupy.from_dlpack(y["p"])
    before = view.get()
    try:
        fused_step([y["p"]], [y["g"]], [y["m"]], lr=0.1, donate=True)
    except cafin_cupy.CafinValueError as error:
        assert "donate" in str(error)
        assert not any(each.is_deleted() for each in y.values())
    same_bits(view, before)
    del view


@pytest.mark.parametrize("lent", [False, True], ids=["as they are", "borrowed"])
def test_the_core_reads_what_jax_is_still_computing(lent: bool) -> None:
    """And JAX may have the memory back at once."""
    import cupy

    rng = np.random.default_rng(5)
    h, s = rng.standard_normal((512, 64), np.float32), rng.standard_normal((512, 32), np.float32)
    results = []
    for source in ("cupy", *["jax"] * ROUNDS):
        w = cupy.zeros((32, 64), cupy.float32)
        optimizer = AdaFisher([w], [layer := Linear(w)], TCov=1)
        if source == "cupy":
            optimizer.accumulate(layer, cupy.asarray(h), cupy.asarray(s))
        else:
            mine = slowly(jnp.asarray(h)), slowly(jnp.asarray(s))
            if lent:
                with borrowed(mine) as (a, b):
                    optimizer.accumulate(layer, a, b)
            else:
                optimizer.accumulate(layer, *mine)
            for x in mine:
                x.delete()
            others = [jnp.full(h.shape, float(k)) for k in range(8)]
            assert [float(x[-1, -1]) for x in others] == list(range(8))
        optimizer.step([cupy.zeros_like(w)])
        results.append([F.get() for F in optimizer.factors()["0"]])
    for found in results[1:]:
        for a, b in zip(found, results[0]):
            same_bits(a, b)
