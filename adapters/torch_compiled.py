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

from .torch_internals import exporting, transforming

if TYPE_CHECKING:
    from .torch_layers import Tap

# True if PyTorch takes a hook on a tensor into a graph, as 2.13 does. Older ones break the graph at each layer, and the
# hook runs there as it does without a compiler.
FOLLOWS = find_spec("torch._higher_order_ops.register_hook") is not None
# A replay would not call the host, which counts the sums. Older versions neither know the tag nor have the graphs.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if FOLLOWS else {}
_numbers = count()
_taps: WeakValueDictionary[str, Tap] = WeakValueDictionary()


def key_of(tap: Tap) -> str:
    """What graphs call this tap by: they hold no objects. A number might count as one that varies."""
    key = f"tap {next(_numbers)}"
    _taps[key] = tap
    return key


@torch.compiler.assume_constant_result
def _enters(key: str) -> bool:
    """Runs when Dynamo traces a layer: True if its gradients are wanted. From then on the optimizer's hooks stay."""
    tap = _taps[key]
    optimizer = tap._optimizer()
    if optimizer is None:
        return False
    optimizer._compiled = True
    return tap.trains and not transforming()


def trace(tap: Tap, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """What Dynamo traces of a layer's forward hook."""
    if exporting():
        return
    key = tap.key + ""  # Dynamo takes it for a constant once something has been done with it
    if not _enters(key) or not tap.open or not torch.is_grad_enabled():
        return
    h, out = tap.kind.take(module, args, kwargs, output)
    if not isinstance(h, Tensor) or not isinstance(out, Tensor) or not out.requires_grad:
        return
    watch(h, out, key)


@torch.compiler.allow_in_graph
def watch(h: Tensor, out: Tensor, key: str) -> None:
    """Call `receive` with `h` and the gradient of `out` once that is known.

    One node of Dynamo's graph, behind which the compiler looks, not Dynamo: where Dynamo takes `register_hook` apart by
    itself (2.13), it forgets what the forward then does to objects that it has changed before.
    """
    kept = h.detach().clone()  # the compiler keeps `h` itself where nothing overwrites it
    call = next(_numbers)
    out.register_hook(lambda s: receive(kept, s, key, call))


@torch.library.custom_op("cafin_cupy::receive", mutates_args=(), **_TAGS)
def receive(h: Tensor, s: Tensor, key: str, call: int) -> None:
    """From a compiled backward pass: a layer's input and output gradient, read at once, as their memory is reused.

    `call` has a meaning for compilers alone, which would make one operation of two that are given the same.
    """
    tap = _taps.get(key)
    optimizer = tap._optimizer() if tap is not None else None
    module = tap._module() if tap is not None else None
    if tap is None or optimizer is None or module is None or not tap.open:
        return
    if module.training or optimizer.model.training:
        optimizer.prepare()
        optimizer._receive(tap.index, *tap.kind.arrange(module, h, s), tap.layer, at_once=True)


@receive.register_fake
def _(h: Tensor, s: Tensor, key: str, call: int) -> None:
    return None


# No compiler shall drop it. It changes no argument: one that all layers shared would be an input of each part of the
# graph that is computed again (checkpointing), and must not change before that.
torch.fx.has_side_effect(torch.ops.cafin_cupy.receive.default)
