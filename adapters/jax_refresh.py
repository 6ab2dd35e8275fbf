"""The factors after a sampled step inside XLA's programs: by the kernel average, one launch for all layers, where the
program is for NVIDIA GPUs, else by the reference's formulas (jax_update.py).

What differs from one model to the next is written into the kernel's source when a program is traced, as jax_kernels.py
does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from cafin_cupy.cuda_factors import AVERAGE_BLOCK
from cafin_cupy.reference import RawSums
from cafin_cupy.rule import Averaging

from . import jax_kernels, jax_update
from .jax_ptx import Kernel, vmapped_by
from .jax_taps import Bound, Layers
from .jax_update import Factors


def refreshed(
    layers: Layers,
    old: Factors,
    sums: Mapping[str, RawSums],
    averaging: Averaging,
    due: Any,
    grad_scale: Any,
    backend: str | None,
) -> Factors:
    """As `jax_update.refreshed`. `backend`: as of `fused_adafisher`."""

    def formulas(old: Factors, sums: Mapping[str, RawSums], due: Any, grad_scale: Any) -> Factors:
        return jax_update.refreshed(layers, old, sums, averaging, due, grad_scale)

    if not layers or not takes(layers, sums) or not jax_kernels.wanted(backend):
        return formulas(old, sums, due, grad_scale)
    kernel = vmapped_by(formulas, partial(_launched, layers, averaging))
    operands = old, dict(sums), due, jnp.asarray(grad_scale, jnp.float32)
    return jax.lax.platform_dependent(*operands, cuda=kernel, default=formulas)


def takes(layers: Layers, sums: Mapping[str, RawSums]) -> bool:
    """True for float32 sums of layers that are not counted, in stacks that the kernel can number."""
    return all(
        not bound.core.counted
        and math.prod(bound.stack) <= jax_kernels.ITEMS
        and all(x.dtype == jnp.float32 for x in sums[name])
        for name, bound in layers.items()
    )


def batches(layers: Layers) -> list[list[Bound]]:
    """The layers of each launch, as one takes a limited number of arguments, and blocks a limited number of cases."""
    result: list[list[Bound]] = [[]]
    items = 0
    for bound in layers.values():
        copies = math.prod(bound.stack)
        if result[-1] and (2 * len(result[-1]) + 8 > jax_kernels.ARGUMENTS or items + copies > jax_kernels.ITEMS):
            result.append([])
            items = 0
        result[-1].append(bound)
        items += copies
    return result


def kernel(layers: Sequence[Bound], size: int, averaging: Averaging) -> Kernel:
    """The launch that refreshes these layers. Operands: items, sums of H, sums of S, factors, averages if there are
    any; results: factors, averages, and of each block whether it has seen a NaN.

    Args:
        size: of all factors, also of other layers.
    """
    after = averaging.normalize == "after"
    state = ["used", "averages"] if after else ["used"]
    arguments = ["const Item* items", *(f"const A* {letter}{k}" for letter in "HS" for k in range(len(layers)))]
    arguments += [*(f"const A* old_{name}" for name in state), *(f"A* {name}" for name in state), "int* broken"]
    jobs: list[str] = []
    for k, bound in enumerate(layers):
        for copy in range(math.prod(bound.stack)):
            H, S = (
                _vector(f"{letter}{k}", units, part, copy, state)
                for letter, units, part in (("H", bound.units, bound.H), ("S", bound.core.S_size, bound.S))
            )
            jobs.append(f"case {len(jobs)}: job = {{{H}, {S}, nullptr, {int(bound.core.norm)}, 0}}; break;")
    defined = {
        "ARGUMENTS": ", ".join(arguments),
        "JOBS": " ".join(jobs),
        "KEEP": repr(float(averaging.keep)),
        "ADD": repr(float(averaging.add)),
        "AFTER": str(int(after)),
    }
    results = [jax.ShapeDtypeStruct((size,), jnp.float32)] * len(state) + [
        jax.ShapeDtypeStruct((len(jobs),), jnp.int32)
    ]
    aliases = {1 + 2 * len(layers) + k: k for k in range(len(state))}
    return Kernel("average_xla", defined, len(jobs), AVERAGE_BLOCK, results, aliases)


def _vector(sums: str, units: int, part: jax_kernels.Part, copy: int, state: Sequence[str]) -> str:
    """The fields of a `Vector`. The kernel writes to no sums, as there is one group of them."""
    place = part.start + copy * part.step + part.offset
    fields = [f"const_cast<A*>({sums}) + {copy * units}", f"{state[-1]} + {place}", f"used + {place}"]
    return f"{{{', '.join(fields)}, {units}, {part.length}, 1, 0, 0, 0}}"


def _items(layers: Sequence[Bound], sums: Mapping[str, RawSums], due: Any, grad_scale: Any) -> Any:
    """What depends on the counts, (blocks, 4): the fields of `Item` in average_xla.cu."""
    rows = []
    for bound in layers:
        n = sums[bound.name].n
        H_mean, S_mean = bound.core.mean(n)
        entry = bound.core.bias_entry(n, bound.units)
        fields = H_mean, S_mean / grad_scale / grad_scale, 0.0 if entry is None else entry, due & (n > 0)
        columns = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), n.shape).reshape(-1) for x in fields]
        rows.append(jnp.stack(columns, axis=1))
    return jnp.concatenate(rows)


def _launched(
    layers: Layers, averaging: Averaging, old: Factors, sums: Mapping[str, RawSums], due: Any, grad_scale: Any
) -> Factors:
    """The factors by the kernel, in the memory of the old ones where those are donated."""
    after = averaging.normalize == "after"
    state = [old.used, old.averages] if after else [old.used]
    broken = [jnp.zeros(0, jnp.int32)]
    for chosen in batches(layers):
        launch = kernel(chosen, layers.size, averaging)
        if launch.blocks == 0:  # of stacks without layers
            continue
        vectors = [getattr(sums[bound.name], letter) for letter in "HS" for bound in chosen]
        items = _items(chosen, sums, due, grad_scale)
        *state, seen = launch(items, *vectors, *state)
        broken.append(seen)
    return Factors(state[0], state[1] if after else (), old.skipped + _of_layers(layers, jnp.concatenate(broken)))


def _of_layers(layers: Layers, broken: Any) -> Any:
    """Of each layer, whether any of its stack is."""
    copies = [math.prod(bound.stack) for bound in layers.values()]
    if all(count == 1 for count in copies):
        return broken
    stops = [0, *accumulate(copies)]
    return jnp.stack([jnp.max(broken[a:b], initial=0) for a, b in zip(stops, stops[1:])])
