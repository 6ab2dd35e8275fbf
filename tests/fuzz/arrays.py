"""Arrays of every framework, dtype and memory layout, from descriptions that print as code; and what their bits are."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from hypothesis import strategies as st

DTYPES = {
    "numpy": ("float32", "float64", "float16"),
    "torch": ("float32", "float64", "float16", "bfloat16"),
    "cupy": ("float32", "float64", "float16"),
}
SIXTEEN = ("float16", "bfloat16")
WRITABLE = ("contiguous", "offset", "channels_last", "fortran", "sliced", "inner", "reversed", "shuffled")
READABLE = (*WRITABLE, "expanded", "read-only", "dlpack", "cuda interface")
VALUES = ("plain", "wide", "small", "large", "zero", "equal", "positive")
CANARY = 1e4  # lies around the entries of an array: an entry that is read from there shows, one that is written too


@dataclass(frozen=True)
class Style:
    """How arrays look; the shape comes from where they are used.

    Attributes:
        layout: one of READABLE. A layout that does not exist for a shape or framework is "contiguous".
        values: one of VALUES, or "not finite".
        dtype: of frameworks that know it, else float32.
        seed: of the values.
    """

    layout: str = "contiguous"
    values: str = "plain"
    dtype: str = "float32"
    seed: int = 0

    def of(self, number: int, dtype: str | None = None) -> Style:
        """Another array in this style."""
        return Style(self.layout, self.values, dtype or self.dtype, self.seed + 1009 * number)


def styles(layouts: tuple[str, ...], dtypes: tuple[str, ...] = ("float32",), finite: bool = True) -> Any:
    """Strategy of styles, of which "contiguous" and "plain" are the simplest and most frequent."""
    often = lambda first, others: st.one_of(st.just(first), st.sampled_from(others))  # noqa: E731
    values = VALUES if finite else (*VALUES, "not finite")
    return st.builds(
        Style, often("contiguous", layouts), often("plain", values), st.sampled_from(dtypes), st.integers(0, 999)
    )


def numbers(shape: tuple[int, ...], values: str, seed: int) -> np.ndarray[Any, Any]:
    """Entries in float64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if values == "wide":  # many magnitudes, both zeros
        x = np.where(rng.random(shape) < 0.2, 0.0 * x, x * 10.0 ** rng.uniform(-5, 3, shape))
    elif values == "small":  # squares below all float32
        x = x * 1e-25
    elif values == "large":
        x = x * 3e3
    elif values == "zero":
        x = 0.0 * x
    elif values == "equal":  # a vector without a range
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif values == "positive":
        x = rng.random(shape)
    elif values == "not finite":
        x = np.where(rng.random(shape) < 0.3, rng.choice([math.nan, math.inf, -math.inf], shape), x)
    return x


def momenta_of(dtype: str) -> tuple[str, ...]:
    """What the momentum of a parameter may be, the usual first."""
    return {"float32": ("float32", *SIXTEEN), "float64": ("float64",)}.get(dtype, ("float32", dtype))


class Held:
    """An array, the memory in which it lies (None if nobody knows), and what a call gets of it."""

    def __init__(self, array: Any, memory: Any = None, given: Any = None) -> None:
        self.array, self.memory = array, memory
        self.given = array if given is None else given

    @property
    def value(self) -> np.ndarray[Any, Any]:
        return value(self.array)


def make(framework: str, shape: tuple[int, ...], style: Style) -> Held:
    """A new array. Its memory begins and ends with canaries, and has some wherever the array leaves gaps."""
    dtype = style.dtype if style.dtype in DTYPES[framework] else "float32"
    x = numbers(shape, style.values, style.seed)
    with np.errstate(over="ignore"):
        x = np.clip(x, -6e4, 6e4) if dtype == "float16" and style.values != "not finite" else x
    order, steps, before = _lie(framework, shape, style)
    xp = import_module(framework)
    repeated = style.layout == "expanded" and bool(shape) and shape[0] > 0
    own = (1, *shape[1:]) if repeated else shape
    laid = [own[axis] * abs(steps[axis]) for axis in order]
    size = math.prod(laid)
    memory = _filled(xp, before + size + 5, dtype)
    array = memory[before : before + size].reshape(laid)
    array = array[(*(slice(None, None, steps[axis]) for axis in order), ...)]  # without "..." a scalar may come
    back = tuple(order.index(axis) for axis in range(len(own)))
    array = array.permute(back) if framework == "torch" else array.transpose(back)
    array[...] = _native(xp, x[:1] if repeated else x, dtype)
    if repeated:
        array = array.expand(shape) if framework == "torch" else xp.broadcast_to(array, shape)
    if framework == "numpy" and style.layout == "read-only":
        array = array.view()
        array.flags.writeable = False
    lends = style.layout in ("dlpack", "cuda interface") and dtype != "bfloat16"  # which NumPy does not know
    if lends and (style.layout == "dlpack" or framework == "cupy"):
        return Held(array, memory, Lent(array, style.layout))
    return Held(array, memory)


def whole_numbers(framework: str, x: Any, dtype: str = "int64") -> Held:
    """A new array of integers."""
    xp = import_module(framework)
    return Held(xp.tensor(x).to(getattr(xp, dtype)) if framework == "torch" else xp.asarray(x.astype(dtype)))


def _lie(framework: str, shape: tuple[int, ...], style: Style) -> tuple[list[int], list[int], int]:
    """(axes from the outermost to the innermost, step of each axis, entries before the first)."""
    order, steps, ndim = list(range(len(shape))), [1] * len(shape), len(shape)
    rng = np.random.default_rng(style.seed)
    if style.layout == "fortran":
        order.reverse()
    elif style.layout == "channels_last" and ndim == 4:
        order = [0, 2, 3, 1]
    elif style.layout == "sliced" and ndim:
        steps[0] = 2
    elif style.layout == "inner" and ndim:
        steps[-1] = 3
    elif style.layout == "reversed" and framework != "torch":
        steps = [-1] * ndim
    elif style.layout == "shuffled":
        order = [int(k) for k in rng.permutation(ndim)]
        steps = [int(k) for k in rng.choice([1, 2] if framework == "torch" else [1, 2, -1, -2], ndim)]
    return order, steps, 1 if style.layout == "offset" else 4


def _filled(xp: Any, size: int, dtype: str) -> Any:
    if xp.__name__ == "torch":
        return xp.full((size,), CANARY, dtype=getattr(xp, dtype))
    return xp.asarray(np.full(size, CANARY, dtype))


def _native(xp: Any, x: Any, dtype: str) -> Any:
    """`x` for an assignment."""
    with np.errstate(all="ignore"):
        return xp.tensor(x).to(getattr(xp, dtype)) if xp.__name__ == "torch" else xp.asarray(x.astype(dtype))


class Lent:
    """An array behind one protocol only: "dlpack" or "cuda interface"."""

    def __init__(self, array: Any, protocol: str) -> None:
        self.array = array
        if protocol == "cuda interface":
            self.__cuda_array_interface__ = array.__cuda_array_interface__
        else:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


# ---- What arrays hold ----


def value(x: Any) -> np.ndarray[Any, Any]:
    """A copy in float64."""
    if hasattr(x, "detach"):
        return np.array(x.detach().resolve_neg().cpu().double().numpy())
    return np.array(x.get() if hasattr(x, "get") else x, float)


def dtype_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def bits(x: Any) -> bytes:
    """The entries of an array, in order."""
    if hasattr(x, "detach"):
        torch = sys.modules["torch"]
        return bytes(
            x.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        )
    return np.asarray(x.get() if hasattr(x, "get") else x).tobytes()


def is_array(x: Any) -> bool:
    return hasattr(x, "detach") or (hasattr(x, "get") and hasattr(x, "strides")) or isinstance(x, np.ndarray)


class Outline:
    """Of lists, tuples and mappings, which objects they hold, and nothing of what is in those."""

    def __init__(self, of: Any) -> None:
        self.of = of


def fingerprint(x: Any, deep: bool = True) -> Any:
    """Equal for two looks at `x` if nothing in it has changed: which objects it holds, and their bits."""
    if isinstance(x, Outline):
        return fingerprint(x.of, False)
    if isinstance(x, Held):
        return fingerprint(x.array), bits(x.memory) if x.memory is not None else None
    if isinstance(x, Lent):
        return fingerprint(x.array)
    if isinstance(x, Mapping):
        return [(key, fingerprint(item, deep)) for key, item in x.items()]
    if isinstance(x, (list, tuple)):
        return [fingerprint(item, deep) for item in x]
    if not deep:
        return id(x)
    if not is_array(x):
        return repr(x)
    return id(x), str(x.dtype), tuple(x.shape), _traits(x)


def _traits(x: Any) -> Any:
    if not hasattr(x, "detach"):
        return x.strides, repr(x) if x.dtype.hasobject else bits(x)
    plain = x.layout is sys.modules["torch"].strided and not x.is_meta and not x.is_quantized
    return x.requires_grad, (x.stride(), bits(x)) if plain else repr(x)


def around(held: Held, before: bytes) -> bool:
    """True if the memory around the array is what it was: `before`, the bits of the whole memory then."""
    then = np.frombuffer(before, np.uint8).copy()
    now = np.frombuffer(bits(held.memory), np.uint8)
    item = len(before) // max(1, held.memory.shape[0])
    changed = np.unique(np.flatnonzero(then != now) // item)
    return bool(np.isin(changed, list(_places(held, item))).all())


def _places(held: Held, item: int) -> set[int]:
    """Where in its memory the entries of an array lie."""
    array, memory = held.array, held.memory
    if hasattr(array, "detach"):
        start, strides = array.storage_offset() - memory.storage_offset(), array.stride()
    else:
        address = lambda a: a.__array_interface__["data"][0] if isinstance(a, np.ndarray) else a.data.ptr  # noqa: E731
        start, strides = (address(array) - address(memory)) // item, [n // item for n in array.strides]
    grid = np.indices(array.shape).reshape(len(array.shape), math.prod(array.shape))
    return set((start + np.asarray(strides, int) @ grid).tolist())
