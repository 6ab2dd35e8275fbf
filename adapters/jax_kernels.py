"""The update of all leaves by one kernel inside `jax.jit`, and whether kernels can run there.

What differs from one tree of parameters to the next (addresses, sizes, factors) is written into the source as text.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from cafin_cupy import table
from cafin_cupy.backend import requested
from cafin_cupy.cuda_update import BLOCK, TYPES

from .jax_ptx import OLDEST, Kernel, take_callback

ARGUMENTS = 4000  # of a launch: 8 bytes each, of the 32,764 that CUDA 12.1 takes
ITEMS = 1000  # of a launch: for these the compiler takes some 8 seconds, for 2,000 some 40
NAMES = {"float32": "float", "bfloat16": "Bfloat16", "float16": "Half"}
ENUM = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "HALF"}


class Part(NamedTuple):
    """A vector among all factors, of each layer of a stack: `length` entries from `start + offset` on, and again every
    `step`."""

    start: int
    step: int
    offset: int
    length: int


class Use(NamedTuple):
    """How a parameter, seen as a row-major matrix, meets the factors: `F[r, c] = rows[r] * columns[c] + Lambda`."""

    columns: Part
    rows: Part


class Leaf(NamedTuple):
    """What is fixed of a parameter when a program is traced.

    Attributes:
        size: elements of one layer of the stack.
        stack: layers, 1 for most.
        dtype, momentum: of parameter and gradient, and of the momentum.
        use: which factors are its own; None without.
        hyper: which set of scalars.
    """

    size: int
    stack: int
    dtype: str
    momentum: str
    use: Use | None
    hyper: int

    @classmethod
    def of(cls, p: Any, m: Any, use: Use | None, stack: int, hyper: int) -> Leaf:
        """`stack`: how many of the parameter's axes number layers."""
        copies = math.prod(p.shape[:stack])
        return cls(p.size // max(1, copies), copies, str(p.dtype), str(m.dtype), use, hyper)

    @property
    def blocks(self) -> int:
        """Of one layer of the stack."""
        return -(-self.size // table.CHUNK)


def takes(leaf: Leaf) -> bool:
    """True for types that the kernel knows, and stacks that it can number."""
    p, m = leaf.dtype, leaf.momentum
    known = (p in TYPES and m in ("float32", p)) or (p == "float32" and m in TYPES)
    return known and leaf.stack <= ITEMS


def batches(leaves: Sequence[Leaf]) -> list[list[int]]:
    """The leaves of each launch, as one takes a limited number of arguments."""
    result: list[list[int]] = [[]]
    arguments = items = 0
    for k, leaf in enumerate(leaves):
        arguments, items = arguments + 5, items + leaf.stack
        if result[-1] and (arguments > ARGUMENTS or items > ITEMS):
            result.append([])
            arguments, items = 5, leaf.stack
        result[-1].append(k)
    return result


def kernel(leaves: Sequence[Leaf], results: list[Any]) -> Kernel:
    """The launch that updates these parameters; `results`: shapes and types of parameters, then momenta."""
    arguments = ["const Hyper* hypers", "const A* factors"]
    arguments += [f"const void* g{k}" for k in range(len(leaves))]
    arguments += [f"const void* old_{x}{k}" for x in "pm" for k in range(len(leaves))]  # where they are, p and m are
    arguments += [f"void* {x}{k}" for x in "pm" for k in range(len(leaves))]
    items: list[str] = []
    first = [0]
    for k, leaf in enumerate(leaves):
        for copy in range(leaf.stack):
            offset = copy * leaf.size
            p, m, g = (_moved(f"{x}{k}", offset * _width(of)) for x, of in _arrays(leaf))
            columns, rows = ("nullptr" if part is None else _factor(part, copy) for part in leaf.use or (None, None))
            vector = offset % 4 == 0  # XLA's arrays themselves begin at multiples of 128 bytes or more
            kind = TYPES[leaf.dtype] | TYPES[leaf.momentum] << 2
            count = f"{leaf.size}, {leaf.use.columns.length if leaf.use else 0}"
            fields = f"{p}, {m}, nullptr, {columns}, {rows}, {count}, 0, 0, {leaf.hyper}, {int(vector)}, {kind}, 0"
            items.append(f"case {len(items)}: t = {{{fields}}}; gradients = {g}; break;")
            first.append(first[-1] + leaf.blocks)
    kinds = [
        f"case kind({ENUM[p]}, {ENUM[m]}): return update_chunk<{NAMES[p]}, {NAMES[m]}>"
        "(h, block - first[item], gradients, t);"
        for p, m in sorted({(leaf.dtype, leaf.momentum) for leaf in leaves})
    ]
    defined = {
        "ARGUMENTS": ", ".join(arguments),
        "FIRST": ", ".join(map(str, first)),
        "ITEMS": " ".join(items),
        "KINDS": " ".join(kinds),
    }
    n = len(leaves)
    aliases = {2 + n + k: k for k in range(2 * n)}
    return Kernel("update_xla", defined, first[-1], BLOCK, results, aliases)


def _arrays(leaf: Leaf) -> tuple[tuple[str, str], ...]:
    return ("p", leaf.dtype), ("m", leaf.momentum), ("g", leaf.dtype)


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _moved(name: str, offset: int) -> str:
    if not offset:
        return name
    kind = "const char*" if name.startswith("g") else "char*"
    return f"static_cast<{kind}>({name}) + {offset}ll"


def _factor(part: Part, copy: int) -> str:
    return f"factors + {part.start + copy * part.step + part.offset}"


def update(
    leaves: Sequence[Leaf], p: Sequence[Any], g: Sequence[Any], m: Sequence[Any], factors: Any, hypers: Any
) -> tuple[list[Any], list[Any]]:
    """New parameters and momenta, in the memory of the old ones where those are donated.

    Args:
        leaves: of each parameter.
        p, g, m: parameters, gradients, momenta.
        factors: float32, those of all layers.
        hypers: float32 (sets, 8): the fields of `Hyper` in update.cuh.
    """
    new_p, new_m = list(p), list(m)
    for chosen in batches(leaves):
        old = [each[k] for each in (p, m) for k in chosen]
        launch = kernel([leaves[k] for k in chosen], [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old])
        if launch.blocks == 0:
            continue
        n = len(chosen)
        made = launch(hypers, factors, *(g[k].astype(p[k].dtype) for k in chosen), *old)
        for place, k in enumerate(chosen):
            new_p[k], new_m[k] = made[place], made[n + place]
    return new_p, new_m


def wanted(backend: str | None = None) -> bool:
    """Whether kernels are to run where a program that is traced is for NVIDIA GPUs: because `backend` or CAFIN_BACKEND
    say so, or, where both leave the choice, because they can, and each array is on one device as a whole."""
    asked = requested(backend, "fused_adafisher")
    if asked is not None:
        return asked == "cuda"
    if jax.device_count() > 1 and not getattr(jax.sharding.get_abstract_mesh(), "are_all_axes_manual", False):
        return False
    reason = problem()
    if reason is not None and jax.default_backend() == "gpu" and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"cafin_cupy: plain array code serves JAX on the GPU, as {reason}", stacklevel=4)
    return reason is None


_warned: set[str] = set()


@cache
def problem() -> str | None:
    """Why the kernel cannot run in JAX's programs here; None if it can. Tried once in a process: two parameters, one
    with factors, compared with the formulas."""
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "JAX sees no NVIDIA GPU"
    version = tuple(int(n) for n in re.findall(r"\d+", jax.__version__)[:2])
    reasons = []
    for callback in (False, True):
        take_callback(callback)
        if version < OLDEST and not callback:
            reasons.append(f"jax {jax.__version__} is older than 0.8, which brought XLA's target for PTX")
            continue
        try:
            reason = _tried()
        except Exception as error:  # of NVRTC, the driver, XLA: all of them end here, named
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if reason is None:
            return None
        reasons.append(reason)
    take_callback(False)
    return f"the kernels do not run in XLA's programs ({reasons[0]}; and by a callback: {reasons[1]})"


def _tried() -> str | None:
    rng = np.random.default_rng(0)
    p, g, m = ([rng.standard_normal(shape, np.float32) for shape in ((5, 7), (3,))] for _ in range(3))
    F = rng.random(12, np.float32)
    use = Use(Part(0, 7, 0, 7), Part(7, 5, 0, 5))
    leaves = [Leaf(35, 1, "float32", "float32", use, 0), Leaf(3, 1, "float32", "float32", None, 0)]
    hypers = np.array([[0.5, 0.0, 0.25, 0.75, 0.25, 0.5, 1.0, 0.0]], np.float32)
    arguments = p, g, m, F, hypers
    with jax.default_device(jax.devices("cuda")[0]):  # compiled ahead, so that no trace that is under way sees it
        got = jax.jit(partial(update, leaves)).lower(*arguments).compile()(*arguments)
    momentum = [0.75 * b + 0.25 * (a + 0.25 * x) for x, a, b in zip(p, g, m)]
    denominators: list[Any] = [np.outer(F[7:], F[:7]) + 0.5, 1.0]
    want = [x - 0.5 * b / f for x, b, f in zip(p, momentum, denominators)], momentum
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        if not np.allclose(a, b, rtol=1e-5, atol=1e-6):
            return "other numbers than those of the formulas"
    return None
