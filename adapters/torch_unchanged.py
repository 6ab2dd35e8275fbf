"""Telling, at the price of one call, that tensors are still what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_guards: Any
try:  # the check that torch.compile runs before each call of its code
    from torch._C._dynamo.guards import TensorGuards as _guards
except ImportError:  # internal to torch, so it may go; then the same is read in Python
    _guards = None


class Unchanged:
    """Whether tensors have the type, shape, strides, dtype and device of those seen at first.

    A no may be false (under autocast, say, or after `requires_grad_`): then look closer.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._guards: Any = None
        if _guards is not None and tensors:
            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self._guards = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        else:
            self._seen = traits(tensors)

    def __call__(self, tensors: Sequence[Tensor | None]) -> bool:
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return traits(tensors) == self._seen


def traits(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What `Unchanged` compares."""
    return [
        (t.shape, t.stride() if t.layout is torch.strided else t.layout, t.dtype, t.device, t.is_neg())
        if isinstance(t, Tensor)
        else None
        for t in tensors
    ]
