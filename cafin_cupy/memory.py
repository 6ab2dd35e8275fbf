"""Which arrays share memory: those that an update writes must not be touched by any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import View, item_size, torch_of
from .errors import refuse

_WORK = 10_000  # steps of NumPy's search for a common byte of two arrays whose strides interleave


class _Bytes:
    """The memory of a `View` in the protocol of NumPy, which asks where it is and does not touch it."""

    def __init__(self, v: View) -> None:
        item = item_size(v.dtype)
        strides = tuple(item * step for step in v.strides)
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{item}", "data": (v.ptr, False), "shape": v.shape, "strides": strides,
        }  # fmt: skip


def share(a: View, b: View) -> bool:
    """True if two arrays of one device have a byte in common, or that is too hard to tell."""
    try:
        return np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Span(NamedTuple):
    device: str
    start: int
    end: int
    name: str
    view: View
    written: bool


def refuse_overlap(where: str, written: Sequence[tuple[str, View]], read: Sequence[tuple[str, View]] = ()) -> None:
    """Refuse arrays that are written and share memory with any other: their updates would run in no defined order."""
    spans = [
        _Span(str(v.device), *v.extent, name, v, is_written)
        for is_written, named in ((True, written), (False, read))
        for name, v in named
        if v.size
    ]
    near: dict[bool, list[_Span]] = {True: [], False: []}  # by `written`: those that may reach beyond the present start
    for span in sorted(spans, key=lambda span: span[:4]):
        for kind in (True, False) if span.written else (True,):  # what is only read may share memory
            near[kind] = [other for other in near[kind] if other.device == span.device and other.end > span.start]
            for other in near[kind]:
                if share(span.view, other.view):
                    rule = f"not share memory with `{other.name}`"
                    refuse(where, span.name, rule, "overlapping memory", "pass each array once, or a copy")
        near[span.written].append(span)


def moved(array: Any, v: View) -> bool:
    """True if `array` has another place, shape or type than when `v` was made of it: torch gives tensors other memory
    (`p.data = ...`), and most libraries allow another shape in place."""
    if torch_of(array) is None:
        return tuple(getattr(array, "shape", v.shape)) != v.shape
    same = array.data_ptr() == v.ptr and array.shape == v.shape and array.stride() == v.strides
    return not (same and str(array.dtype) == f"torch.{v.dtype}")


class Written:
    """The memory that an update writes, to tell quickly which of many other arrays may reach into it."""

    def __init__(self, views: Sequence[View]) -> None:
        """`views`: of one device."""
        spans = sorted(v.extent for v in views if v.size)
        self._starts = np.array([start for start, _ in spans], np.uint64)
        ends = np.array([0, *(end for _, end in spans)], np.uint64)
        self._reach = np.maximum.accumulate(ends)  # of the first 0, 1, 2, ... spans

    def touched(self, starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Places of the arrays, given by their first and one past their last byte, that may share memory with it."""
        return np.flatnonzero(self._reach[np.searchsorted(self._starts, ends)] > starts)
