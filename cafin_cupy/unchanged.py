"""Whether torch's tensors are still what they were, at a price that the hot path can pay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import torch_of


def version(array: Any) -> int:
    """Counts the changes in place that torch knows of; 0 where nobody counts."""
    return 0 if torch_of(array) is None or array.is_inference() else int(array._version)


class Unchanged:
    """Tells, at the price of one call, whether torch tensors have the type, shape, strides, dtype and device of those
    seen at first.

    A no may be false (under autocast, say, or after `requires_grad_`): then look closer. Of other arrays it is always
    a no, as there is no faster look.

    Attributes:
        check: as a call, but takes the tensors one by one: a function in C where torch has it.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._seen: list[Any] | None = None
        self.check: Callable[..., bool] = self._compare
        if not tensors or any(torch_of(t) is None for t in tensors):
            return
        try:  # the check that torch.compile runs before each call of its code
            from torch._C._dynamo.guards import TensorGuards
        except ImportError:  # internal to torch, so it may go; then the same is read in Python
            self._seen = traits(tensors)
            return
        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        self.check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def __call__(self, tensors: Sequence[Any]) -> bool:
        return self.check(*tensors)

    def _compare(self, *tensors: Any) -> bool:
        return self._seen is not None and traits(tensors) == self._seen


def traits(tensors: Sequence[Any]) -> list[Any]:
    """What `Unchanged` compares; None for what is no torch tensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return [None] * len(tensors)
    kind, strided, plain = torch.Tensor, torch.strided, (torch.Tensor, torch.nn.Parameter)
    return [
        (
            t.shape,
            t.layout,
            t.stride() if t.layout is strided else None,
            t.dtype,
            t.device,
            t.is_neg(),
            type(t) in plain,
        )
        if isinstance(t, kind)
        else None
        for t in tensors
    ]
