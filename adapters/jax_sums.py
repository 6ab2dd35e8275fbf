"""The raw sums of a layer's input and output gradient inside XLA's programs: by the kernels column_sums and fold, two
launches a layer, where the program is for NVIDIA GPUs, else by the reference's formulas.

A layer's geometry is written into the kernels' source when a program is traced, as jax_kernels.py does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cafin_cupy import reference
from cafin_cupy.arrays import View, contiguous_strides
from cafin_cupy.cuda_sums import ELEMENTS, Described
from cafin_cupy.fold import FOLD_BLOCK
from cafin_cupy.layers import Layer
from cafin_cupy.matrix import COLUMN_SUMS_BLOCK, matrix
from cafin_cupy.reference import RawSums

from . import jax_kernels
from .jax_ptx import Kernel, vmapped_by


class Plan(NamedTuple):
    """Two arrays of a layer, as the kernels are told of them, and the lengths of their sums."""

    h: Described
    s: Described
    outputs: tuple[int, int]


def raw_sums(core: Layer, h: Any, s: Any, channels_last: bool = False) -> RawSums:
    """The core's raw sums of one call.

    Args:
        core: the layer's descriptor.
        h, s: input and output gradient, in the descriptor's shapes; with `channels_last` (B, ..., C) for (B, C, ...).

    Raises:
        CafinError: shapes that the layer cannot have.
    """
    seen = [_view(x, channels_last) for x in (h, s)]
    core.check(seen[0].shape, seen[1].shape, "tap")

    def formulas(h: Any, s: Any) -> tuple[Any, Any]:
        sums = reference.raw_sums(core, *((jnp.moveaxis(x, -1, 1) if channels_last else x) for x in (h, s)))
        return sums.H, sums.S

    planned = _plan(core, *seen) if jax_kernels.wanted() else None
    if planned is None:
        H, S = formulas(h, s)
    else:
        kernel = vmapped_by(formulas, partial(_launched, planned, core.shares))

        def launched(h: Any, s: Any) -> tuple[Any, Any]:
            H, S = kernel(h, s)
            return H + nothing(h), S + nothing(s)

        H, S = jax.lax.platform_dependent(h, s, cuda=launched, default=formulas)
    return RawSums(H, S, core.count(*(v.shape for v in seen)))


def nothing(x: Any) -> Any:
    """0, of each sample where `jax.vmap` brings the batch, and of each device where `jax.shard_map` splits it. What it
    is added to is each one's own, and so are gradients, which are then summed; without it the count, which all have in
    common, would enter that sum once."""
    return jax.lax.stop_gradient(x[(slice(0, 0),) * x.ndim].sum(dtype=jnp.float32))


def _view(x: Any, channels_last: bool) -> View:
    """What a kernel will see of an array, in the order of the descriptor's axes: XLA hands arrays out row-major."""
    shape, strides = tuple(x.shape), contiguous_strides(tuple(x.shape))
    if channels_last and len(shape) > 1:
        shape, strides = ((each[0], each[-1], *each[1:-1]) for each in (shape, strides))
    return View(0, shape, strides, str(x.dtype), "cuda", False, None)


def _plan(core: Layer, h: View, s: View) -> Plan | None:
    """None for arrays that the kernels cannot read, or need not."""
    described = []
    for v, columns in zip((h, s), core.columns(h.shape, s.shape)):
        laid = matrix(v, columns) if v.size and v.dtype in ELEMENTS else None
        if laid is None:
            return None
        aligned = laid.stride * (4 if v.dtype == "float32" else 2) % 16 == 0  # XLA's arrays begin at such multiples
        described.append(Described.of(columns, laid, v.dtype, aligned))
    H, S = described
    return Plan(H, S, (int(H.jobs[0][0]["outputs"]), int(S.jobs[0][0]["outputs"])))


def _launched(plan: Plan, shares: tuple[int, int], h: Any, s: Any) -> tuple[Any, Any]:
    """The sums by the kernels."""
    column_sums, fold = sources(plan)
    partials = column_sums(h, s)
    return tuple(  # type: ignore[return-value]  # two
        sums if n == 1 else sums.reshape(n, -1).sum(axis=0) for sums, n in zip(fold(*partials), shares)
    )


def sources(plan: Plan) -> tuple[Kernel, Kernel]:
    """The two kernels of a layer."""
    halves = {"FIRST": plan.h, "SECOND": plan.s}
    plan.s.operand["first"] = plan.h.blocks
    operands, jobs = {}, {}
    for k, (name, half) in enumerate(halves.items()):
        operands[name] = literal(half.operand, {"x": f"x{k}", "sums": f"partial{k}"})
        jobs[name] = literal(half.jobs[0][0], {"columns": f"partial{k}", "sums": f"sums{k}"})
    partials, sums = (
        [jax.ShapeDtypeStruct((n,), jnp.float32) for n in each]
        for each in ([half.partial for half in halves.values()], plan.outputs)
    )
    blocks = [half.jobs[0][1] for half in halves.values()]
    return (
        Kernel("column_sums_xla", operands, plan.h.blocks + plan.s.blocks, COLUMN_SUMS_BLOCK, partials),
        Kernel("fold_xla", {**jobs, "BOUNDARY": str(blocks[0])}, sum(blocks), FOLD_BLOCK, sums),
    )


def literal(row: Any, pointers: dict[str, str]) -> str:
    """The fields of a struct as CUDA C, with names for its pointers."""
    fields = []
    for name in row.dtype.names:
        value = row[name].item()
        fields.append(pointers.get(name) or (f"{value!r}f" if isinstance(value, float) else str(value)))
    return ", ".join(fields)
