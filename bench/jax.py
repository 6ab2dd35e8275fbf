"""`python -m bench.jax [steps] [sums] [refresh]`: optimizer steps inside `jax.jit` on the trees of a ResNet-18 and of a
language model of GPT-2's size, beside optax's, and the raw sums and the refresh of a ResNet's factors. Prints tables;
needs a GPU that JAX can use.

A step takes gradients that are there already and gives new parameters and a new state; parameters and state are
donated. *In a loop*: calls of the jitted step, the device waited for at the end; *in a scan*: steps within one program,
which leaves out what a call costs the host.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax

from cafin_cupy import Averaging
from cafin_cupy.adapters import jax as cafin
from cafin_cupy.adapters.jax_refresh import refreshed
from cafin_cupy.adapters.jax_update import first_factors
from cafin_cupy.rule import DEFAULT_GAMMA

ROUNDS, CALLS, STEPS, BATCH = 9, 100, 100, 128
Tree = dict[str, Any]


def resnet18() -> tuple[Tree, dict[str, cafin.Layer]]:
    """(shapes, layers) of a ResNet-18 for small images, 11,173,962 parameters."""
    shapes: Tree = {}
    layers: dict[str, cafin.Layer] = {}

    def conv(name: str, kernel: int, c_in: int, c_out: int, stride: int) -> None:
        shapes[name] = {"kernel": (kernel, kernel, c_in, c_out)}
        shapes[f"{name}_norm"] = {"scale": (c_out,), "bias": (c_out,)}
        layers[name] = cafin.Conv(weight=f"{name}/kernel", stride=stride)
        layers[f"{name}_norm"] = cafin.ChannelNorm(weight=f"{name}_norm/scale", bias=f"{name}_norm/bias")

    conv("stem", 3, 3, 64, 1)
    c_in = 64
    for stage in range(4):
        c_out = 64 << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            conv(f"{stage}.{block}.1", 3, c_in, c_out, stride)
            conv(f"{stage}.{block}.2", 3, c_out, c_out, 1)
            if stride > 1:
                conv(f"{stage}.{block}.skip", 1, c_in, c_out, stride)
            c_in = c_out
    shapes["head"] = {"kernel": (512, 10), "bias": (10,)}
    layers["head"] = cafin.Dense(weight="head/kernel", bias="head/bias")
    return shapes, layers


def gpt2() -> tuple[Tree, dict[str, cafin.Layer]]:
    """(shapes, layers) of a decoder of 12 layers of width 768, 124,439,808 parameters; embeddings have no factors."""
    width = 768
    shapes: Tree = {"tokens": (50257, width), "positions": (1024, width)}
    layers: dict[str, cafin.Layer] = {}

    def dense(name: str, d_in: int, d_out: int) -> None:
        shapes[name] = {"kernel": (d_in, d_out), "bias": (d_out,)}
        layers[name] = cafin.Dense(weight=f"{name}/kernel", bias=f"{name}/bias")

    def norm(name: str) -> None:
        shapes[name] = {"scale": (width,), "bias": (width,)}
        layers[name] = cafin.LayerNorm(weight=f"{name}/scale", bias=f"{name}/bias", length=1024)

    for k in range(12):
        norm(f"{k}.norm1")
        dense(f"{k}.attention", width, 3 * width)
        dense(f"{k}.projection", width, width)
        norm(f"{k}.norm2")
        dense(f"{k}.up", width, 4 * width)
        dense(f"{k}.down", 4 * width, width)
    norm("norm")
    return shapes, layers


Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def contenders(params: Any, layers: cafin.Layers) -> dict[str, tuple[Any, Step]]:
    """(state, step) of each by name; `step(params, state, grads)` returns parameters and state."""

    def of_optax(transform: Any) -> tuple[Any, Step]:
        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return transform.init(params), step

    fused = cafin.fused_adafisher(1e-3, weight_decay=0.01, layers=layers)
    plain = cafin.fused_adafisher(1e-3, weight_decay=0.01, layers=layers, backend="reference")
    return {
        "fused_adafisher": (fused.init(params), lambda p, s, g: fused.step(p, g, s)),
        "fused_adafisher, without the kernel": (plain.init(params), lambda p, s, g: plain.step(p, g, s)),
        "adafisher": of_optax(cafin.adafisher(1e-3, weight_decay=0.01, layers=layers)),
        "optax.adamw": of_optax(optax.adamw(1e-3, weight_decay=0.01)),
        "optax.sgd(momentum)": of_optax(optax.sgd(1e-3, momentum=0.9)),
    }


def looped(step: Step, grads: Any, carry: Any) -> Any:
    """Calls of a jitted step."""
    for _ in range(CALLS):
        carry = step(carry[0], carry[1], grads)
    return carry


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def scanned(step: Step, grads: Any, carry: Any) -> Any:
    """Steps within one program."""
    return jax.lax.scan(lambda carry, _: (step(carry[0], carry[1], grads), None), carry, None, length=STEPS)[0]


def timed(call: Callable[[Any], Any], carry: Any, steps: int) -> tuple[float, Any]:
    """(microseconds of one of `steps`, what is left)."""
    begin = time.perf_counter()
    carry = call(carry)
    jax.block_until_ready(carry)
    return (time.perf_counter() - begin) / steps * 1e6, carry


def measure(params: Any, layers: cafin.Layers, dtype: Any) -> list[list[str]]:
    """The rows of a table."""
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape, dtype), params)
    made = contenders(params, layers)
    compiled: dict[str, tuple[Any, Any, Any, float]] = {}
    for name, (state, step) in made.items():
        begin = time.perf_counter()
        one = jax.jit(step, donate_argnums=(0, 1))
        memory = one.lower(params, state, grads).compile().memory_analysis()
        first = time.perf_counter() - begin
        compiled[name] = partial(looped, one, grads), partial(scanned, step, grads), memory, first
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in made}
    for _ in range(ROUNDS):
        for name, (loop, scan, *_) in compiled.items():
            carry = jax.tree.map(jnp.copy, (params, made[name][0]))
            carry = jax.block_until_ready(scan(loop(carry)))
            for into, call, steps in zip(times[name], (loop, scan), (CALLS, STEPS)):
                each, carry = timed(call, carry, steps)
                into.append(each)
    ours = times["fused_adafisher"]
    rows = []
    for name, (in_loop, in_scan) in times.items():
        _, _, memory, first = compiled[name]
        rows.append(
            [
                name,
                *(f"{median(each):,.1f}" for each in (in_loop, in_scan)),
                *(f"{median(mine) / median(each):.2f}" for mine, each in zip(ours, (in_loop, in_scan))),
                *(
                    f"{size / 2**20:,.1f}"
                    for size in (memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes)
                ),
                f"{first:.2f}",
            ]
        )
    return rows


def repeated(call: Callable[[Any], Any], argument: Any, last: Any) -> Any:
    """The last result of many calls."""
    for _ in range(CALLS):
        last = call(argument)
    return last


def seen() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of input and output gradient of each layer of the ResNet, for a batch of 128 images of 32x32 pixels."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"head": ((BATCH, 512), (BATCH, 10))}

    def conv(name: str, size: int, c_in: int, c_out: int, stride: int) -> None:
        images = (BATCH, size, size, c_in), (BATCH, size // stride, size // stride, c_out)
        shapes[name], shapes[f"{name}_norm"] = images, (images[1], images[1])

    conv("stem", 32, 3, 64, 1)
    c_in, size = 64, 32
    for stage in range(4):
        c_out = 64 << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            conv(f"{stage}.{block}.1", size, c_in, c_out, stride)
            if stride > 1:
                conv(f"{stage}.{block}.skip", size, c_in, c_out, stride)
            c_in, size = c_out, size // stride
            conv(f"{stage}.{block}.2", size, c_out, c_out, 1)
    return shapes


def sums() -> None:
    """Print the times of the raw sums of all layers, and of the factors that come of them."""
    shapes, layers = resnet18()
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=is_shape)
    known = cafin.Layers(params, layers)
    print("\n## Raw sums of the ResNet's layers\n\nMicroseconds of a program, calls queued; *copy*: at 4,280 GB/s.\n")
    print("| arrays | MiB | copy | kernels | plain | ratio |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = {name: tuple(jnp.ones(shape, dtype) for shape in each) for name, each in seen().items()}
        size = sum(x.nbytes for pair in arrays.values() for x in pair)
        times = {}
        for backend in ("cuda", "reference"):
            os.environ["CAFIN_BACKEND"] = backend
            call = jax.jit(lambda arrays: {name: known[name].sums(*pair) for name, pair in arrays.items()})
            queued = partial(repeated, call, arrays)
            queued(None)
            times[backend] = median(timed(queued, None, CALLS)[0] for _ in range(ROUNDS))
        del os.environ["CAFIN_BACKEND"]
        kernels, plain = times.values()
        cells = [jnp.dtype(dtype).name, *(f"{x:,.0f}" for x in (size / 2**20, size / 4.28e6, kernels, plain))]
        print(f"| {' | '.join(cells)} | {kernels / plain:.2f} |", flush=True)


def refreshes() -> None:
    """Print the times of all factors as on a sampled step: raw sums by the kernels, then their refresh by one launch or
    by XLA. The sums take longer than the host needs for the next call, so that the GPU is measured."""
    shapes, layers = resnet18()
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    known = cafin.Layers(jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=is_shape), layers)
    arrays = {name: tuple(jnp.ones(shape) for shape in each) for name, each in seen().items()}
    print(
        f"\n## All factors of the ResNet, {len(known)} layers, float32\n\nRaw sums by the kernels, then the refresh. ",
        end="",
    )
    print("Microseconds of a program, calls queued, factors donated.\n")
    print("| averaging | refresh by the kernel | by plain code | ratio |\n| --- | ---: | ---: | ---: |")
    os.environ["CAFIN_BACKEND"] = "cuda"  # of the sums
    for name in ("parity", "paper"):
        averaging, times = Averaging.named(name, DEFAULT_GAMMA), []
        for backend in ("cuda", "reference"):

            @partial(jax.jit, donate_argnums=0)
            def call(old: Any, arrays: Any, averaging: Any = averaging, backend: Any = backend) -> Any:
                taken = {name: known[name].sums(*pair) for name, pair in arrays.items()}
                return refreshed(known, old, taken, averaging, jnp.asarray(True), 1.0, backend)

            def queued(old: Any, call: Any = call) -> Any:
                for _ in range(CALLS):
                    old = call(old, arrays)
                return old

            state, rounds = queued(first_factors(known, averaging)), []
            for _ in range(ROUNDS):
                each, state = timed(queued, state, CALLS)
                rounds.append(each)
            times.append(median(rounds))
        kernel, plain = times
        print(f"| {name} | {kernel:,.0f} | {plain:,.0f} | {kernel / plain:.2f} |", flush=True)
    del os.environ["CAFIN_BACKEND"]


def main(sections: list[str]) -> int:
    if jax.default_backend() != "gpu":
        print("bench.jax: needs a GPU, and JAX sees none", file=sys.stderr)
        return 2
    device = jax.devices()[0]
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    print(f"# Steps inside `jax.jit`\n\n{device.device_kind}; driver {driver}, {versions}; {datetime.date.today()}.")
    print(f"Medians of {ROUNDS} rounds of {CALLS} calls and of {STEPS} steps in a scan, contenders in turn.")
    if not sections or "sums" in sections:
        sums()
    if not sections or "refresh" in sections:
        refreshes()
    if sections and "steps" not in sections:
        return 0
    head = ["", "in a loop µs", "in a scan µs", "ours / it, loop", "scan"]
    head += ["arguments MiB", "aliased MiB", "temporary MiB", "compile s"]
    for title, (shapes, layers) in {"ResNet-18": resnet18(), "GPT-2": gpt2()}.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            params = jax.tree.map(
                lambda shape, dtype=dtype: jnp.ones(shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
            )
            count = sum(p.size for p in jax.tree.leaves(params))
            print(f"\n## {title}, {count:,} parameters of {jnp.dtype(dtype).name}\n")
            rows = measure(params, cafin.Layers(params, layers), dtype)
            for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows):
                print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
