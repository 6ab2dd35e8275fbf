"""`nn.MultiheadAttention`, which calls no layers, but hands its weights to a function.

On sampled steps its query is a tensor that PyTorch asks whenever a function is called with it. For the attention
function the answer is the same code with another `linear`, which remembers what it is given. That code must not ask
again, so it gets plain tensors. A forward of one's own that changes the query before it calls PyTorch's goes unnoticed,
and a warning names the layer.

A compiled graph holds the attention function as one operation. Dynamo follows such a query to it, and puts that code in
its place, which the compiler then runs as it would run PyTorch's.

Where query, key and value are not one tensor, PyTorch multiplies by parts of `in_proj`. The matrix then has one H for
all of them: the mean over the matrix's rows of what each row reads; and each part's rows of S come from its own calls.
"""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cafin_cupy.layers import SummedLinear

from . import torch_compiled
from .torch_internals import transforming
from .torch_layers import Tap, counts

PARTS = 3  # of in_proj: query, key, value
OUT = "out_proj.weight"  # where the module has a matrix; the attention function calls each so with "_" for "."
_PLAIN = (Tensor, nn.Parameter)


def attach_to_attention(optimizer: Any) -> Iterator[Any]:
    """Hook all attentions; the handles of the hooks."""
    layers = list(zip(optimizer._modules, optimizer._kinds))
    for module in optimizer.model.modules():
        if not isinstance(module, nn.MultiheadAttention) or any(
            owner is module and not kind.lends for (_, owner, _, _), kind in layers
        ):
            continue  # or a script has said what its layer is
        taps = {}
        for (name, owner, index, layer), kind in layers:
            if owner is module or owner is getattr(module, "out_proj", None):
                matrix = f"{name.rpartition('.')[2]}_weight" if owner is module else OUT
                taps[matrix] = Tap(optimizer, index, layer, kind, module)
        watch = Watch(optimizer, module, taps)
        optimizer._gates += [watch, *taps.values()]
        yield module.register_forward_pre_hook(watch, with_kwargs=True)


class Watch:
    """Forward pre-hook of an attention. In a copied or unpickled model it removes itself, as a `Tap` does.

    `taps` go by where the module has their matrices: in a forward of `fully_shard` it has whole ones there.
    """

    def __init__(self, optimizer: Any = None, module: Any = None, taps: Mapping[str, Tap] | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._module = weakref.ref(module) if module is not None else lambda: None
        self.taps = taps or {}
        self.open = True
        self.key = torch_compiled.key_of(self)
        self.traced = type("_Traced", (_Traced,), {"key": self.key})

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query = args[0] if args else kwargs.get("query")
        if torch_compiled.FOLLOWS and torch.compiler.is_compiling():
            watched = self.trace(query)
        else:
            watched = self.catch(module, query)
        if watched is None:
            return None
        # What was one tensor stays one: PyTorch then multiplies once.
        replaced = tuple(watched if x is query else x for x in args)
        return replaced, {name: watched if x is query else x for name, x in kwargs.items()}

    def trace(self, query: Any) -> Any:
        """What Dynamo traces."""
        if not torch_compiled.wanted(self) or not isinstance(query, Tensor) or isinstance(query, _Traced):
            return None
        return query.as_subclass(self.traced)

    def catch(self, module: nn.Module, query: Any) -> Any:
        """The query that a forward of the attention gets; None for the one it has."""
        optimizer = self._optimizer()
        if optimizer is None:
            self._remove(module)
            return None
        if not (self.open and counts(optimizer, module) and self.trains):
            return None
        if not isinstance(query, (*_PLAIN, _Query)) or type(query) not in (*_PLAIN, _Query):
            return None
        if query.is_nested or transforming():
            return None
        return _Query.of(query, [_Call(optimizer, module, self.taps)])

    if not torch_compiled.FOLLOWS:
        catch = torch.compiler.disable(catch)

    @property
    def trains(self) -> bool:
        return any(tap.trains for tap in self.taps.values())

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


class _Traced(Tensor):
    """The query on its way through a graph. Each attention has a class of it, as graphs hold no objects."""

    key = ""  # of the hook

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.multi_head_attention_forward:
                return _attend(cls.key, *args, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func is Tensor.transpose else result


@torch.compiler.allow_in_graph
def _attend(key: str, *args: Any, **kwargs: Any) -> Any:
    """The attention function in a graph: for all optimizers whose hooks are open, as the graph's guards say."""
    module: Any = torch_compiled.hook_of(key)._module()
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    watches = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Watch) and hook.open]
    calls = [
        _TracedCall([(tap, given.get(name.replace(".", "_"))) for name, tap in watch.taps.items()]) for watch in watches
    ]
    before, _current.calls = _current.calls, calls
    try:
        return _attention()(*args, **kwargs)
    finally:
        _current.calls = before


class _Current(threading.local):
    calls: Sequence[_Matrices] = ()


_current = _Current()  # what a running attention function works for


class _Matrices:
    """A forward of an attention, for one optimizer. `taps`: each with its matrix, as the forward has it."""

    def __init__(self, taps: Sequence[tuple[Tap, Any]]) -> None:
        self.taps = taps
        self.rows: Any = 0  # that the first part of a matrix has read

    def multiplied(self, h: Tensor, weight: Tensor, out: Tensor) -> None:
        for tap, whole in self.taps:
            if weight is whole:
                self.watch(tap, h, out, None)
            elif weight._base is not None and weight._base is whole:
                first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
                self.rows = self.rows if first else math.prod(h.shape[:-1])
                self.watch(tap, h, out, _Part(tap, first, self.rows))

    def watch(self, tap: Tap, h: Tensor, out: Tensor, part: _Part | None) -> None:
        """Let the tap, or this part of it, have `h` and the gradient of `out`."""
        raise NotImplementedError


class _Call(_Matrices):
    """One that runs as it is."""

    def __init__(self, optimizer: Any, module: nn.Module, taps: Mapping[str, Tap]) -> None:
        super().__init__([(tap, attrgetter(name)(module)) for name, tap in taps.items()])
        self.optimizer, self.module = optimizer, module

    def watch(self, tap: Tap, h: Tensor, out: Tensor, part: _Part | None) -> None:
        tap.watch(self.optimizer, self.module, h, out, part)


class _TracedCall(_Matrices):
    """One that a compiler runs to see what is in it, or that is an operation of a graph."""

    def watch(self, tap: Tap, h: Tensor, out: Tensor, part: _Part | None) -> None:
        if not tap.trains or not out.requires_grad:
            return
        if part is None:
            torch_compiled.watch(h, out, tap.key)
            return
        key, kept, call = tap.key, h.detach().clone(), next(torch_compiled.numbers)
        out.register_hook(lambda s: _receive_part(kept, s, key, part.first, part.rows, call))


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


@torch.library.custom_op("cafin_cupy::receive_part", **torch_compiled.OPTIONS)
def _receive_part(h: Tensor, s: Tensor, key: str, first: int, rows: int, call: int) -> None:
    """From a compiled backward pass, as `torch_compiled.receive`: for a `_Part`."""
    found = torch_compiled.receiver(key)
    if found is not None:
        tap, optimizer, module = found
        _Part(tap, first, rows).receive(optimizer, module, h, s)


@_receive_part.register_fake
def _(h: Tensor, s: Tensor, key: str, first: int, rows: int, call: int) -> None:
    return None


torch.fx.has_side_effect(torch.ops.cafin_cupy.receive_part.default)


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
