"""Layers of models that `torch.compile` compiles.

A compiled graph must hold what a sampled step needs, and nothing of it on other steps. So Dynamo finds the hook of each
layer on every step, open or closed: it traces both kinds, and a guard on that one bool picks. The open hook puts one
operation into the backward graph, which hands the layer's input and output gradient over.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .torch_internals import calling_frame, exporting, transforming
from .torch_shards import is_sharded

if TYPE_CHECKING:
    from .torch_attention import Watch
    from .torch_layers import Tap

# True if PyTorch takes a hook on a tensor into a graph, as 2.13 does. Older ones break the graph at each layer, and the
# hook runs there as it does without a compiler.
FOLLOWS = find_spec("torch._higher_order_ops.register_hook") is not None
# Of an operation that hands over what a backward pass has computed. It changes no argument, though compilers must not
# drop it (`has_side_effect`): one that all layers shared would be an input of each part of the graph that is computed
# again (checkpointing), and must not change before that. Nor may a CUDA graph replay it, which would not call the host;
# older versions neither know that tag nor have the graphs.
OPTIONS: dict[str, Any] = {"mutates_args": (), **({"tags": (torch.Tag.cudagraph_unsafe,)} if FOLLOWS else {})}
numbers = count()
_hooks: WeakValueDictionary[str, Any] = WeakValueDictionary()
_laid: dict[int, Any] = {}  # calls of graphs that hand over DTensors: mesh, placements and shape of both


def key_of(tap: Tap | Watch) -> str:
    """What graphs call this hook by: they hold no objects. A number might count as one that varies."""
    key = f"tap {next(numbers)}"
    _hooks[key] = tap
    return key


def hook_of(key: str) -> Any:
    return _hooks[key]


@torch.compiler.assume_constant_result
def _enters(key: str) -> bool:
    """Runs when Dynamo traces a layer: True if its gradients are wanted. From then on the optimizer's hooks stay."""
    tap = _hooks[key]
    optimizer = tap._optimizer()
    if optimizer is None:
        return False
    optimizer._compiled = True
    return tap.trains and not transforming()


@torch.compiler.assume_constant_result
def _is_alone() -> bool:
    """Runs when Dynamo traces a layer: True if the hook is all that the graph will hold, as Dynamo does not follow what
    calls it (a Sequential that is compiled in place, or within what breaks graphs)."""
    return calling_frame() == "__call__"


def wanted(tap: Tap | Watch) -> bool:
    """What Dynamo traces of a hook first: True if the graph will hold more of it."""
    if exporting():
        return False
    key = tap.key + ""  # Dynamo takes it for a constant once something has been done with it
    return _enters(key) and tap.open and torch.is_grad_enabled()


def trace(tap: Tap, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """What Dynamo traces of a layer's forward hook."""
    if not wanted(tap):
        return
    h, out = tap.kind.take(module, args, kwargs, output)
    if not isinstance(h, Tensor) or not isinstance(out, Tensor) or not out.requires_grad:
        return
    if _is_alone():
        kept, key, call = h.detach().clone(), tap.key + "", 0
        hand = _receive_local if is_sharded(h) else receive
        out.register_hook(lambda s: hand(kept, s, key, call))  # a hook on an input of the graph: Dynamo leaves it alone
    else:
        watch(h, out, tap.key + "")


@torch.compiler.allow_in_graph
def watch(h: Tensor, out: Tensor, key: str) -> None:
    """Call `receive` with `h` and the gradient of `out` once that is known.

    One node of Dynamo's graph, behind which the compiler looks, not Dynamo: where Dynamo takes `register_hook` apart by
    itself (2.13), it forgets what the forward then does to objects that it has changed before.
    """
    kept = h.detach().clone()  # the compiler keeps `h` itself where nothing overwrites it
    call = next(numbers)
    hand = _receive_local if is_sharded(h) else receive
    out.register_hook(lambda s: hand(kept, s, key, call))


def _receive_local(h: Any, s: Any, key: str, call: int) -> None:
    """`receive` of DTensors: an operation of a graph gets what lies in memory, and the call tells their layouts."""
    _laid[call] = [(x.device_mesh, x.placements, _known_shape(x)) for x in (h, s)]
    receive(h.to_local(), s.to_local(), key, call)


def _known_shape(x: Any) -> dict[str, Any]:
    """Shape and strides, unless they vary from call to call: then ranks have equal parts."""
    fixed = all(type(n) is int for n in (*x.shape, *x.stride()))
    return {"shape": x.shape, "stride": x.stride()} if fixed else {}


torch.fx.has_side_effect(watch)  # or graphs that are split, as for DistributedDataParallel, would lose it


def receiver(key: str) -> tuple[Any, Any, Any] | None:
    """(tap, optimizer, module) that a running graph means; None if its gradients count for nothing now."""
    tap = _hooks.get(key)
    if tap is None or not tap.open:
        return None
    optimizer, module = tap._optimizer(), tap._module()
    if optimizer is None or module is None or not (module.training or optimizer.model.training):
        return None
    optimizer.prepare()
    return (tap, optimizer, module) if optimizer._reads() else None


@torch.library.custom_op("cafin_cupy::receive", **OPTIONS)
def receive(h: Tensor, s: Tensor, key: str, call: int) -> None:
    """From a compiled backward pass: a layer's input and output gradient, read at once, as their memory is reused.

    `call` tells the layouts of DTensors, and to compilers, which would make one operation of two that are given the
    same, that they are two.
    """
    found = receiver(key)
    if found is not None:
        tap, optimizer, module = found
        if call in _laid:
            from torch.distributed.tensor import DTensor

            h, s = (
                DTensor.from_local(x, mesh, placements, run_check=False, **shape)
                for x, (mesh, placements, shape) in zip((h, s), _laid[call])
            )
        tap.receive(optimizer, module, h, s, at_once=True)


@receive.register_fake
def _(h: Tensor, s: Tensor, key: str, call: int) -> None:
    return None


torch.fx.has_side_effect(torch.ops.cafin_cupy.receive.default)
