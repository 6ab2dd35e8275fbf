"""`nn.MultiheadAttention`, which calls no layers, but hands its weights to a function.

On sampled steps its query is a tensor that PyTorch asks whenever a function is called with it. For the attention
function the answer is the same code with another `linear`, which remembers what it is given. That code must not ask
again, so it gets plain tensors. A forward of one's own that changes the query before it calls PyTorch's goes unnoticed,
and a warning names the layer.

Where query, key and value are not one tensor, PyTorch multiplies by parts of `in_proj`. The matrix then has one H for
all of them: the mean over the matrix's rows of what each row reads; and each part's rows of S come from its own calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cafin_cupy.layers import SummedLinear

from .torch_internals import transforming
from .torch_layers import Tap, counts

PARTS = 3  # of in_proj: query, key, value
_PLAIN = (Tensor, nn.Parameter)


def attach_to_attention(optimizer: Any) -> Iterator[Any]:
    """Hook all attentions; the handles of the hooks."""
    layers = list(zip(optimizer._modules, optimizer._kinds))
    for module in optimizer.model.modules():
        if not isinstance(module, nn.MultiheadAttention) or any(
            owner is module and not kind.lends for (_, owner, _, _), kind in layers
        ):
            continue  # or a script has said what its layer is
        within = [module, getattr(module, "out_proj", None)]
        taps = [
            Tap(optimizer, index, layer, kind)
            for (_, owner, index, layer), kind in layers
            if any(owner is each for each in within)
        ]
        yield module.register_forward_pre_hook(Watch(optimizer, taps), with_kwargs=True)


class Watch:
    """Forward pre-hook of an attention. In a copied or unpickled model it removes itself, as a `Tap` does.

    Compiled code goes around it: the attention of a compiled model runs as it is on all steps."""

    def __init__(self, optimizer: Any = None, taps: Sequence[Tap] = ()) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self.taps = taps

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            self._remove(module)
            return None
        if not (optimizer.samples and counts(optimizer, module) and any(tap.trains for tap in self.taps)):
            return None
        query = args[0] if args else kwargs.get("query")
        if not isinstance(query, (*_PLAIN, _Query)) or type(query) not in (*_PLAIN, _Query):
            return None
        if query.is_nested or transforming():
            return None
        watched = _Query.of(query, [_Call(optimizer, module, self.taps)])
        # What was one tensor stays one: PyTorch then multiplies once.
        replaced = tuple(watched if x is query else x for x in args)
        return replaced, {name: watched if x is query else x for name, x in kwargs.items()}

    def _remove(self, module: nn.Module) -> None:
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch()

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()


class _Query(Tensor):
    """The query on its way to the attention function."""

    calls: list[_Call]  # one of each optimizer

    @staticmethod
    def of(query: Tensor, calls: list[_Call]) -> _Query:
        watched = query.as_subclass(_Query)
        watched.calls = [*(query.calls if isinstance(query, _Query) else []), *calls]
        return watched

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is not F.multi_head_attention_forward:
                result = func(*args, **kwargs)
                # As `batch_first` does; nothing else may carry this type out of the forward.
                return cls.of(result, args[0].calls) if func is Tensor.transpose else result
            given = next(x for x in (*args, *kwargs.values()) if isinstance(x, cls))
            query = given.as_subclass(Tensor)
            args = [query if x is given else x for x in args]
            kwargs = {name: query if x is given else x for name, x in kwargs.items()}
        before, _current.calls = _current.calls, given.calls
        try:
            return _attention()(*args, **kwargs)
        finally:
            _current.calls = before


class _Current(threading.local):
    calls: Sequence[_Call] = ()


_current = _Current()  # what a running attention function works for


class _Call:
    """A forward of an attention, for one optimizer."""

    def __init__(self, optimizer: Any, module: nn.Module, taps: Sequence[Tap]) -> None:
        self.optimizer, self.module, self.taps = optimizer, module, taps
        self.rows = 0  # that the first part of a matrix has read

    def multiplied(self, h: Tensor, weight: Tensor, out: Tensor) -> None:
        for tap in self.taps:
            whole: Any = tap.layer.weight
            if weight is whole:
                tap.watch(self.optimizer, self.module, h, out)
            elif weight._base is not None and weight._base is whole:
                first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
                self.rows = self.rows if first else h.shape[:-1].numel()
                tap.watch(self.optimizer, self.module, h, out, _Part(tap, first, self.rows))


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = F.linear(h, weight, bias)
    for call in _current.calls:
        call.multiplied(h, weight, out)
    return out


class _Part(NamedTuple):
    """Some rows of a matrix, from the `first`. PyTorch computes the uppermost first; it has read `rows` rows."""

    tap: Tap
    first: int
    rows: int

    def receive(self, optimizer: Any, module: nn.Module, h: Tensor, s: Tensor) -> None:
        """Sums of a part are scaled to those of as many rows as the uppermost part has read, whatever it has read
        itself: in cross-attention the lengths differ. A call counts these rows once for each third of the matrix, so
        that S, which a third adds alone, counts thrice."""
        whole = self.tap.layer
        read = h.shape[:-1].numel()
        if not read or not self.rows:  # an empty query or key: nothing was attended to
            return
        thirds = s.shape[-1] * PARTS // whole.S_size
        scale = self.rows / read
        S = torch.zeros(whole.S_size, dtype=torch.promote_types(s.dtype, torch.float32), device=s.device)
        S[self.first : self.first + s.shape[-1]] = _squares(s) * (scale * PARTS)
        part = SummedLinear(whole.weight, whole.bias, rows=self.rows * thirds, name=whole.name)
        optimizer._receive(self.tap.index, _squares(h)[None] * (scale * thirds), S[None], part)


def _squares(x: Tensor) -> Tensor:
    """Sums of squares over rows, in float32 at least."""
    x = x.reshape(-1, x.shape[-1])
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(0)


@cache
def _attention() -> Any:
    """PyTorch's attention function, the same code, with `_linear`: in it, and in what it calls."""
    own = [f for f in vars(F).values() if isinstance(f, FunctionType) and f.__globals__ is vars(F)]
    names, callers = {"linear"}, []  # type: ignore[var-annotated]
    while more := [f for f in own if f not in callers and names & set(f.__code__.co_names)]:
        callers += more
        names |= {f.__name__ for f in more}
    namespace = {**vars(F), "linear": _linear}
    for f in callers:
        twin = FunctionType(f.__code__, namespace, f.__name__, f.__defaults__, f.__closure__)
        twin.__kwdefaults__ = f.__kwdefaults__
        namespace[f.__name__] = twin
    return namespace["multi_head_attention_forward"]
