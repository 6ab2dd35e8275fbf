"""`nn.MultiheadAttention`, which calls no layers, but hands its weights to a function.

On sampled steps its forward runs PyTorch's own attention function with another `linear`, which remembers what it is
given. A TorchFunctionMode around the forward alone would not do: it sees the attention function, but nothing that this
calls, and called again under the mode the function would hand itself over once more, and so for ever.

Where query, key and value are not one tensor, PyTorch multiplies by parts of `in_proj`. The matrix then has one H for
all of them: the mean over the matrix's rows of what each row reads; and each part's rows of S come from its own calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from cafin_cupy.layers import SummedLinear

from .torch_kinds import kind_of
from .torch_layers import Tap, counts

PARTS = 3  # of in_proj: query, key, value


def attach_to_attention(optimizer: Any) -> Iterator[Any]:
    """Hook all attentions; the handles of the hooks."""
    known = {id(layer.weight): (index, layer) for _, _, index, layer in optimizer._modules}
    for module in optimizer.model.modules():
        kind = kind_of(module)
        if kind is None or not kind.lends:
            continue
        weights = [p for p in (*module.parameters(recurse=False), *module.out_proj.parameters()) if id(p) in known]
        watch = Watch(optimizer, [Tap(optimizer, *known[id(p)], kind) for p in weights])
        yield module.register_forward_pre_hook(watch)
        yield module.register_forward_hook(watch, always_call=True)


class Watch:
    """Both hooks of an attention. In a copied or unpickled model it removes itself, as a `Tap` does.

    Compiled code goes around it: the attention of a compiled model runs as it is on all steps."""

    def __init__(self, optimizer: Any = None, taps: list[Tap] | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self.taps = taps or []

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        if output:  # of a forward, or None of one that has failed
            mode = _get_current_function_mode()
            if isinstance(mode, _Watching) and mode.watch is self:
                mode.__exit__(None, None, None)
            return
        optimizer = self._optimizer()
        if optimizer is None:
            self._remove(module)
        elif optimizer.samples and counts(optimizer, module) and any(tap.trains for tap in self.taps):
            _Watching(self, optimizer, module).__enter__()

    def _remove(self, module: nn.Module) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch()

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()


def leave_interrupted() -> None:
    """After Ctrl-C in a forward PyTorch calls no hook: then the mode is left between two steps."""
    while isinstance(mode := _get_current_function_mode(), _Watching):
        mode.__exit__(None, None, None)


class _Watching(TorchFunctionMode):
    """In force during one forward."""

    def __init__(self, watch: Watch, optimizer: Any, module: nn.Module) -> None:
        self.watch, self.optimizer, self.module = watch, optimizer, module
        self.rows = 0  # that the first part of a matrix has read

    @torch.compiler.disable
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            func = _attention(self.linear)
        return func(*args, **(kwargs or {}))

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.linear(h, weight, bias)
        for tap in self.watch.taps:
            whole: Any = tap.layer.weight
            if weight is whole:
                tap.watch(self.optimizer, self.module, h, out)
            elif weight._base is not None and weight._base is whole:
                first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
                self.rows = self.rows if first else h.shape[:-1].numel()
                tap.watch(self.optimizer, self.module, h, out, _Part(tap, first, self.rows))
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
        if not read:
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
def _callers() -> list[FunctionType]:
    """The functions of torch.nn.functional that call its `linear`, or each other."""
    own = [f for f in vars(F).values() if isinstance(f, FunctionType) and f.__globals__ is vars(F)]
    names, found = {"linear"}, []  # type: ignore[var-annotated]
    while more := [f for f in own if f not in found and names & set(f.__code__.co_names)]:
        found += more
        names |= {f.__name__ for f in more}
    return found


def _attention(linear: Callable[..., Tensor]) -> Any:
    """PyTorch's attention function, the same code, with this `linear`."""
    namespace = {**vars(F), "linear": linear}
    for f in _callers():
        twin = FunctionType(f.__code__, namespace, f.__name__, f.__defaults__, f.__closure__)
        twin.__kwdefaults__ = f.__kwdefaults__
        namespace[f.__name__] = twin
    return namespace["multi_head_attention_forward"]
