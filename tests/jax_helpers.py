"""What the tests of the JAX adapter share: float64, explicit sums in NumPy, comparisons of trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import close

from cafin_cupy.adapters.jax import (
    ChannelNorm,
    Conv,
    Dense,
    LayerNorm,
    Layers,
    State,
    adafisher,
    fused_adafisher,
    tap,
)
from cafin_cupy.reference import RawSums

jax.config.update("jax_default_device", jax.devices("cpu")[0])  # plain array code; test_jax_gpu.py is of the kernel
ROUNDING = 1e-12  # float64 in another order of summation
ORDER = 1e-5  # float32 sums of some thousand terms in another order


def x64() -> Any:
    """Within, JAX has float64."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)


def normal(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """float64, exact in float32; not of mean 0."""
    return np.float32(np.random.default_rng(seed).normal(0.5, 1.0, shape)).astype(float)


def gradient_sums(layers: Layers, calls: Callable[[dict[str, RawSums]], Any], dtype: Any = jnp.float32) -> Any:
    """Raw sums of a loss that is a function of the taps."""
    return jax.jit(jax.grad(calls))(layers.zeros(dtype))


def tapped_sums(layers: Layers, h: Any, s: Any, name: str = "layer", dtype: Any = jnp.float64) -> RawSums:
    """Raw sums of one call of a layer whose output gradient is `s`; its output itself does not matter."""
    found = gradient_sums(layers, lambda taps: (tap(layers[name], h, jnp.zeros_like(s), taps[name]) * s).sum(), dtype)
    return found[name]


def same_sums(got: RawSums, want: Sequence[Any], tolerance: float = ROUNDING, scale: Any = None) -> None:
    """`scale`: sums of absolute values, where terms cancel."""
    for x, y, largest in zip(got, want, scale or want, strict=True):
        close(np.asarray(x), y, tolerance, largest)


def same_trees(got: Any, want: Any, tolerance: float = 0.0) -> None:
    """Leaves within `tolerance` of each one's largest entry; 0: the same bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert x.dtype == y.dtype
        if tolerance:
            close(np.asarray(x), np.asarray(y), tolerance)
        else:
            np.testing.assert_array_equal(x, y)


def patches(h: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], pads: Any) -> Any:
    """(B, C, *positions, taps) of an image (B, C, ...): what each output position multiplies by the kernel. `pads`: a
    pair for each axis, zeros; or "wrap" and those pairs."""
    mode, pads = ("wrap", pads[1]) if pads[0] == "wrap" else ("constant", pads)
    padded = np.pad(h, [(0, 0), (0, 0), *pads], mode=mode)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    counts = [(n - wide) // t + 1 for n, wide, t in zip(padded.shape[2:], span, stride)]
    taps = []
    for tap_ in product(*map(range, kernel)):
        seen = [slice(j * d, j * d + (n - 1) * t + 1, t) for j, d, n, t in zip(tap_, dilation, counts, stride)]
        taps.append(padded[(..., *seen)])
    return np.stack(taps, axis=-1)


def patch_sums(seen: Any, s: Any, groups: int, channels_last: bool) -> tuple[Any, Any, Any]:
    """Raw sums of a convolution from its patches (B, C, *positions, taps) and output gradient (B, C_out, *positions);
    entries of H are ordered as the weight lies in memory."""
    per_tap = (seen**2).sum(axis=(0, *range(2, seen.ndim - 1)))  # (C, taps)
    per_tap = per_tap.reshape(groups, -1, per_tap.shape[-1]).sum(0)
    H = (per_tap.T if channels_last else per_tap).reshape(-1)
    return H, (s**2).sum(axis=(0, *range(2, s.ndim))), math.prod(s.shape) / s.shape[1]


def sequential(modules: Sequence[dict[str, Any]], params: Any) -> tuple[Layers, Callable[[Any, Any, Any], Any]]:
    """A model as the oracle cases describe it, in PyTorch's layouts: (layers, `forward(params, taps, x)`).

    Args:
        params: {"0": {"weight": ..., "bias": ...}, ...}.
    """
    kinds = {"Linear": Dense, "Conv2d": Conv, "BatchNorm2d": ChannelNorm, "LayerNorm": LayerNorm}
    described = {}
    for k, module in enumerate(modules):
        if str(k) in params:
            own = {role: f"{k}/{role}" for role in params[str(k)]}
            options: dict[str, Any] = {"Linear": {"input_major": False}, "LayerNorm": {"length": 7}}.get(
                module["type"], {"channels_last": False}
            )
            if module["type"] == "Conv2d":
                options |= {name: module[name] for name in ("stride", "groups") if name in module}
                options["padding"] = module.get("padding", 0)
            described[str(k)] = kinds[module["type"]](**own, **options)
    layers = Layers(params, described)

    def forward(params: Any, taps: Any, x: Any) -> Any:
        for k, module in enumerate(modules):
            y = _called(module, params.get(str(k)), x)
            x = tap(layers[str(k)], x, y, taps[str(k)]) if str(k) in layers else y
        return x

    return layers, forward


def _called(module: dict[str, Any], p: Any, x: Any) -> Any:
    match module["type"]:
        case "Linear":
            y = x @ p["weight"].T
        case "Conv2d":
            stride, pads = (module.get(name, default) for name, default in (("stride", 1), ("padding", 0)))
            stride, pads = ((n, n) if isinstance(n, int) else n for n in (stride, pads))
            y = jax.lax.conv_general_dilated(
                x, p["weight"], stride, [(n, n) for n in pads], feature_group_count=module.get("groups", 1)
            )
            return y + p["bias"][:, None, None] if "bias" in p else y
        case "BatchNorm2d":
            centred = x - x.mean((0, 2, 3), keepdims=True)
            y = centred / jnp.sqrt((centred**2).mean((0, 2, 3), keepdims=True) + 1e-5)
            return y * p["weight"][:, None, None] + p["bias"][:, None, None]
        case "LayerNorm":
            centred = x - x.mean(-1, keepdims=True)
            y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["weight"]
        case "Flatten":
            return x.reshape(len(x), -1)
        case "GELU":
            return jax.nn.gelu(x, approximate=False)
        case kind:
            return {"ReLU": jax.nn.relu, "Tanh": jnp.tanh}[kind](x)
    return y + p["bias"] if "bias" in p else y


def nested(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"0.weight": array} as {"0": {"weight": array}}."""
    tree: dict[str, dict[str, Any]] = {}
    for key, x in arrays.items():
        module, role = key.rsplit(".", 1)
        tree.setdefault(module, {})[role] = jnp.asarray(x)
    return tree


def cross_entropy(z: Any, y: Any) -> Any:
    """Mean over the batch."""
    return optax.softmax_cross_entropy_with_integer_labels(z, y).mean()


Step = Callable[..., tuple[Any, State]]


def both_forms(**options: Any) -> dict[str, tuple[Callable[[Any], State], Step]]:
    """(init, `step(params, grads, state, ...)`) of the fused form and of optax's, by name."""
    fused, transform = fused_adafisher(**options), adafisher(**options)

    def step(params: Any, grads: Any, state: State, **extra: Any) -> tuple[Any, State]:
        updates, state = transform.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return {"fused": (fused.init, fused.step), "optax": (transform.init, step)}
