"""Run by test_jax_devices.py in a process of its own, which sees four devices: training steps on all of them and on
one, compared. Prints the largest relative difference of each way, and the kernel's calls in a program for GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cafin_cupy import CafinValueError
from cafin_cupy.adapters.jax import ChannelNorm, Conv, Dense, Layers, borrowed, fused_adafisher, fused_step, tap

if hasattr(jax, "shard_map"):
    shard_map = jax.shard_map
else:
    from jax.experimental.shard_map import shard_map

STEPS, BATCH = 4, 16
Step = Callable[..., Any]


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 4, 8), "scale": (8,), "shift": (8,), "kernel": (8, 8), "bias": (8,), "head": (8, 12)}
    return {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


LAYERS = Layers(
    params(),
    {
        "conv": Conv(weight="conv", stride=2),
        "norm": ChannelNorm(weight="scale", bias="shift"),
        "dense": Dense(weight="kernel", bias="bias"),
        "head": Dense(weight="head"),
    },
)


def forward(p: Any, taps: Any, x: Any) -> Any:
    def behind(name: str, h: Any, y: Any) -> Any:
        return tap(LAYERS[name], h, y, taps[name])

    y = jax.lax.conv_general_dilated(x, p["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = behind("conv", x, y)
    h = jax.nn.relu(behind("norm", h, h * p["scale"] + p["shift"])).mean((1, 2))
    h = jnp.tanh(behind("dense", h, h @ p["kernel"] + p["bias"]))
    return behind("head", h, h @ p["head"])


def loss(p: Any, taps: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(forward(p, taps, x), y).mean()


def stepping(mean: Callable[[Any], Any] = lambda x: x, backend: str | None = None) -> Step:
    """A training step; `mean`: of the loss over devices."""
    optimizer = fused_adafisher(1e-2, Lambda=1e-2, TCov=2, weight_decay=0.01, layers=LAYERS, backend=backend)

    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        grads, sums = jax.grad(lambda p, t: mean(loss(p, t, x, y)), argnums=(0, 1))(p, LAYERS.zeros())
        return optimizer.step(p, grads, state, factors=sums)

    return step


def trained(step: Step, place: Callable[[Any, Any], Any] = lambda p, data: (p, data)) -> Any:
    p, rng = params(), np.random.default_rng(1)
    state = fused_adafisher(layers=LAYERS).init(p)
    for _ in range(STEPS):
        x, y = np.float32(rng.standard_normal((BATCH, 6, 6, 4))), rng.integers(0, 12, BATCH)
        (p, state), (x, y) = place((p, state), (x, y))
        p, state = step(p, state, x, y)
    return jax.device_get((p, state))


def difference(got: Any, want: Any) -> float:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(*map(jax.tree.leaves, (got, want)))
    return max(float(np.abs(a - b).max() / max(1e-12, np.abs(b).max())) for a, b in pairs)


def sharded(tree: Any, mesh: Mesh) -> Any:
    """Leaves whose last axis divides are split along it."""

    def split(x: Any) -> Any:
        spec = P(*[None] * (x.ndim - 1), "data") if x.ndim and x.shape[-1] % 4 == 0 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(split, tree)


def main() -> None:
    assert jax.device_count() == 4
    mesh = Mesh(np.array(jax.devices()), ("data",))
    want = trained(jax.jit(stepping()))

    split = partial(shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P()))
    pmean = partial(jax.lax.pmean, axis_name="data")
    print("shard_map", difference(trained(jax.jit(split(stepping(pmean)))), want))

    with_kernels = jax.jit(split(stepping(pmean, backend="cuda")))
    arguments = (
        params(),
        fused_adafisher(layers=LAYERS).init(params()),
        jnp.ones((BATCH, 6, 6, 4)),
        jnp.zeros(BATCH, int),
    )
    text = with_kernels.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("average_xla", "update_xla"):
        print(name, text.count(f'name = "{name}"'))
    print("calls", text.count("gpu.ptx"))

    def replicated(state: Any, data: Any) -> Any:
        return (
            jax.device_put(state, NamedSharding(mesh, P())),
            jax.device_put(data, NamedSharding(mesh, P("data"))),
        )

    print("jit", difference(trained(jax.jit(stepping()), replicated), want))
    print(
        "sharded", difference(trained(jax.jit(stepping()), lambda s, d: (sharded(s, mesh), replicated(s, d)[1])), want)
    )
    outside_of_jit(mesh)


def outside_of_jit(mesh: Mesh) -> None:
    """Arrays on several devices are refused, and those on one stay there, whichever is the default."""
    whole = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("data")))
    try:
        fused_step([whole], [whole + 1], [whole + 2], lr=0.1, donate=True)
    except CafinValueError as error:
        print("refused", int("lie on one device" in str(error) and not whole.is_deleted()))
    first, last = jax.devices()[0], jax.devices()[-1]
    mixed = 0
    for odd in range(5):  # of parameters, gradients, momenta, H and S
        p, g, m, H, S = (
            jax.device_put(jnp.ones(n), last if k == odd else first) for k, n in enumerate((3, 3, 3, 3, 1))
        )
        try:
            fused_step([p], [g], [m], [(H, S)], lr=0.1, donate=True)
        except CafinValueError as error:
            mixed += "lie on one device" in str(error) and not p.is_deleted()
    try:
        borrowed((p, S)).__enter__()
    except CafinValueError as error:
        mixed += "lie on one device" in str(error)
    print("mixed", mixed)
    with jax.default_device(last):
        p, g, m = (jnp.full(3, x) for x in (1.0, 2.0, 0.0))
    for donate in (False, True):
        new = fused_step(p, g, m, lr=0.1, beta=0.0, donate=donate)
    print("stays", int(all(x.devices() == {last} for x in new)))


if __name__ == "__main__":
    main()
