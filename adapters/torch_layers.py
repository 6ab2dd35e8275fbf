"""The layers of a PyTorch model, and how their inputs and output gradients are caught."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.errors import CafinValueError, refuse
from cafin_cupy.layers import Layer

from . import torch_compiled
from .torch_internals import graph_is_kept, is_batched, top_saved_tensors_hooks, transforming
from .torch_kinds import Kind, kind_of
from .torch_parallel import computed_together, share_of
from .torch_shards import is_sharded


def find_layers(model: nn.Module) -> tuple[list[Layer], list[tuple[str, nn.Module, int, Layer]], list[Kind]]:
    """Descriptors in module order; (name, module, place of its factors, descriptor) of each layer; its kind.

    Modules that hold the same weight and bias share the factors of the first. An embedding whose weight another layer
    multiplies by, as a language model's head does, has none: every row of their gradient is the other's, also where
    none was looked up.
    """
    described = [
        (name, module, layer, kind)
        for name, module in model.named_modules()
        if (kind := kind_of(module)) is not None
        for layer in kind.describe(module, name)
    ]
    multiplied = {id(layer.weight) for _, _, layer, _ in described if not layer.counted}
    layers: list[Layer] = []
    modules: list[tuple[str, nn.Module, int, Layer]] = []
    kinds: list[Kind] = []
    shared: dict[Any, int] = {}
    for name, module, layer, kind in described:
        if layer.counted and id(layer.weight) in multiplied:
            continue
        key = identity(layer)
        if key not in shared:
            shared[key] = len(layers)
            layers.append(layer)
        modules.append((layer.name or name, module, shared[key], layer))
        kinds.append(kind)
    name, times = Counter(entry[0] for entry in modules).most_common(1)[0] if modules else ("", 0)
    if times > 1:
        mend = "give each descriptor the name that `describe` is given"
        refuse("AdaFisher", "model", "have a name of its own for each layer", f"{times} of {name!r}", mend)
    return layers, modules, kinds


def identity(layer: Layer) -> Any:
    """What layers have in common that share factors."""
    return type(layer), id(layer.weight), id(layer.bias), getattr(layer, "groups", 1)


def find_joined(
    model: nn.Module, known: list[Layer]
) -> tuple[list[Layer], list[tuple[str, nn.Module, int, Layer]], list[Kind]] | None:
    """`find_layers` of a model to which layers may have been added: those that are `known` keep their places, and the
    others come behind them. None if there are no others."""
    layers, modules, kinds = find_layers(model)
    places = {identity(layer): place for place, layer in enumerate(known)}
    joined = [layer for layer in layers if identity(layer) not in places]
    if not joined:
        return None
    places.update((identity(layer), place) for place, layer in enumerate(joined, len(known)))
    moved = [(name, module, places[identity(layers[index])], layer) for name, module, index, layer in modules]
    return [*known, *joined], moved, kinds


def attach(optimizer: Any) -> Iterator[Any]:
    """Hook all layers that are called; the handles of the hooks. Of layers that several ranks compute together they go
    first, and see input and output as DTensors, which the hooks of tensor parallelism make and unmake."""
    for (_, module, index, layer), kind in zip(optimizer._modules, optimizer._kinds):
        if not kind.lends:
            tap = Tap(optimizer, index, layer, kind, module)
            optimizer._gates.append(tap)
            first = computed_together(optimizer, layer)
            yield module.register_forward_hook(tap, with_kwargs=True, prepend=first)


def counts(optimizer: Any, module: nn.Module) -> bool:
    """True if a forward of this module now is one of training. A layer counts if it or the model is in training mode:
    BatchNorm frozen inside a model that trains does, and so does a head that trains on a model in eval mode."""
    return torch.is_grad_enabled() and (module.training or optimizer.model.training)


class Tap:
    """Forward hook of one layer, which catches its input and output gradient as long as it is `open`.

    In a copied or unpickled model it removes itself at the first call: a copy trains with its own optimizer.
    """

    def __init__(
        self, optimizer: Any = None, index: int = 0, layer: Any = None, kind: Any = None, module: Any = None
    ) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self.index: int = index
        self.layer: Layer = layer
        self.kind: Kind = kind
        self.open = True
        self._module = weakref.ref(module) if module is not None else lambda: None
        self.key = torch_compiled.key_of(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The input is looked at only when the gradient is known, so a forward without a backward leaves no trace, and
        a recomputed forward (activation checkpointing) does not count twice. A hook on the output tensor, unlike a full
        backward hook, bears in-place operations behind the layer and inputs without gradient."""
        if torch_compiled.FOLLOWS and torch.compiler.is_compiling():
            torch_compiled.trace(self, module, args, kwargs, output)
        else:
            self.catch(module, args, kwargs, output)

    def catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            self._remove(module)
            return
        if self.open and counts(optimizer, module):
            self.watch(optimizer, module, *self.kind.take(module, args, kwargs, output))

    if not torch_compiled.FOLLOWS:
        catch = torch.compiler.disable(catch)

    @property
    def trains(self) -> bool:
        weight, bias = self.layer.weight, self.layer.bias
        return bool(weight.requires_grad or (bias is not None and bias.requires_grad))

    def watch(self, optimizer: Any, module: nn.Module, h: Any, output: Any, receiver: Any = None) -> None:
        """Let `receive` of this tap, or of `receiver`, have `h` and the gradient of `output` once that is known."""
        if not isinstance(h, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if h.layout is not torch.strided or h.is_nested:  # the layer keeps its factors, and a warning names it
            return
        if transforming():  # per-sample gradients and the like: their tensors mean nothing outside the transform
            return
        if not self.trains:
            return
        optimizer.prepare()
        itself = self.layer.weight.requires_grad and self.kind.keeps(module, h)
        kept = keep(h.detach() if itself else h.detach().clone())
        output.register_hook(_Catch(self._optimizer, receiver or self, module, kept))

    def receive(self, optimizer: Any, module: nn.Module, h: Tensor, s: Tensor, at_once: bool = False) -> None:
        """From backward."""
        h, s = self.kind.arrange(module, h, s)
        layer, place = self.layer, None
        if is_sharded(h) or is_sharded(s):
            h, s, layer, place = share_of(optimizer._team, layer, h, s)
        try:
            optimizer._receive(self.index, h, s, layer, at_once, place)
        except CafinValueError as error:
            mend = f"if {type(module).__name__} takes or returns something else first, `register_layer` can tell"
            raise CafinValueError(f"{error}; {mend}") from error

    def _remove(self, module: nn.Module) -> None:
        for hooks in (module._forward_hooks, module._forward_hooks_with_kwargs):
            for key in [key for key in hooks if module._forward_hooks.get(key, self) is self]:
                del hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        return Tap()

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        return Tap, ()


class _Catch:
    """Hook on a layer's output: hands (h, s) to the optimizer. One small object, as there is one for each layer and
    call, and Python's collector looks at all of them."""

    __slots__ = ("_kept", "_module", "_optimizer", "_tap")

    def __init__(self, optimizer: Any, tap: Any, module: nn.Module, kept: Any) -> None:
        self._optimizer, self._tap, self._module, self._kept = optimizer, tap, module, kept  # the first one is weak

    def __call__(self, s: Tensor | None) -> None:
        kept, module, optimizer = self._kept, self._module, self._optimizer()
        if kept is None or optimizer is None:  # a second backward through a freed graph: torch will say so
            return
        if s is None:  # from a function that says so of a gradient of zeros, as DistributedDataParallel's
            return
        if not graph_is_kept():
            self._kept = None  # free the input now: the script may hold on to the loss
        if transforming() or is_batched(s):  # many gradients at once, as for a Jacobian: none of them is the loss's
            return
        if not optimizer._reads():  # before anything is computed for it
            return
        h = kept if isinstance(kept, Tensor) else kept[0].grad_fn.saved_tensors[0]
        self._tap.receive(optimizer, module, h, s.detach())


class _Keep(torch.autograd.Function):
    """Saves a tensor as autograd saves a layer's input: checkpointing drops and recomputes it, offloading moves it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # gives the saved tensor a node of the graph


def keep(h: Tensor) -> Any:
    """Hold a tensor until backward. Under hooks for saved tensors (checkpointing, offloading) it is handed to them, and
    comes back as the saved tensor of what is returned; otherwise it is simply held."""
    if top_saved_tensors_hooks(False) is None:
        return h
    return (_Keep.apply(h, _ANCHOR),)  # the saved tensor lives as long as this one
