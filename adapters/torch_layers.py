"""PyTorch modules as layers: which modules have factors, and how their inputs and output gradients are caught."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.layers import BatchNorm2d, Conv2d, Layer, LayerNorm, Linear


def describe(name: str, module: nn.Module) -> Layer | None:
    """The descriptor of a module, or None if it is of no known type or its weight is not a parameter of its own."""
    kind = next((known for known in _DESCRIBE if isinstance(module, known)), None)
    if kind is None:
        return None
    if nn.utils.parametrize.is_parametrized(module, "weight"):
        return None  # computed anew at each access, which may even change the module's state
    weight, bias = module.weight, module.bias
    if not isinstance(weight, nn.Parameter):  # affine=False, or computed by a hook
        return None
    return _DESCRIBE[kind](name, module, weight, bias if isinstance(bias, nn.Parameter) else None)


def _conv2d(name: str, module: Any, weight: Tensor, bias: Tensor | None) -> Layer:
    padding = module.padding
    if module.padding_mode != "zeros" or padding == "valid":
        padding = 0  # other modes pad the input before the layer reads it, see `catch`
    elif padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size))
    return Conv2d(
        weight, bias, stride=module.stride, padding=padding, dilation=module.dilation, groups=module.groups, name=name
    )


_DESCRIBE: dict[type[nn.Module], Callable[[str, Any, Tensor, Tensor | None], Layer]] = {
    nn.Linear: lambda name, module, weight, bias: Linear(weight, bias, name=name),
    nn.Conv2d: _conv2d,
    nn.BatchNorm2d: lambda name, module, weight, bias: BatchNorm2d(weight, bias, name=name),
    nn.LayerNorm: lambda name, module, weight, bias: LayerNorm(weight, bias, name=name),
}


def find_layers(model: nn.Module) -> tuple[list[Layer], list[tuple[str, nn.Module, int, Layer]]]:
    """Descriptors in module order, and (name, module, place of its factors, descriptor) of each layer. Modules that
    hold the same weight and bias share the factors of the first."""
    layers: list[Layer] = []
    modules: list[tuple[str, nn.Module, int, Layer]] = []
    shared: dict[Any, int] = {}
    for name, module in model.named_modules():
        layer = describe(name, module)
        if layer is None:
            continue
        key = (type(layer), id(layer.weight), id(layer.bias), getattr(layer, "groups", 1))
        if key not in shared:
            shared[key] = len(layers)
            layers.append(layer)
        modules.append((name, module, shared[key], layer))
    return layers, modules


class Tap:
    """Forward hook of one layer, which catches its input and output gradient.

    In a copied or unpickled model it removes itself at the first call: a copy trains with its own optimizer.
    """

    def __init__(self, optimizer: Any = None, index: int = 0, layer: Layer | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self.index, self.layer = index, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The input is looked at only when the gradient is known, so a forward without a backward leaves no trace, and
        a recomputed forward (activation checkpointing) does not count twice. A hook on the output tensor, unlike a full
        backward hook, bears in-place operations behind the layer and inputs without gradient."""
        optimizer = self._optimizer()
        if optimizer is None:
            self._remove(module)
            return
        # A layer counts if it or the model is in training mode: BatchNorm frozen inside a model that trains does, and
        # so does a head that trains on a model in eval mode.
        if not torch.is_grad_enabled() or not (module.training or optimizer.model.training):
            return
        h = args[0] if args else kwargs.get("input")
        if not isinstance(h, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if h.layout is not torch.strided or h.is_nested:  # the layer keeps its factors, and a warning names it
            return
        if _transforming():  # per-sample gradients and the like: their tensors mean nothing outside the transform
            return
        weight: Any = module.weight
        bias: Any = module.bias
        if not weight.requires_grad and (bias is None or not bias.requires_grad):
            return
        optimizer.prepare()
        h = h.detach()
        kept = keep(h if weight.requires_grad and _autograd_keeps(module, h) else h.clone())
        output.register_hook(_Catch(optimizer, self, module, kept))

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

    def __init__(self, optimizer: Any, tap: Tap, module: nn.Module, kept: Any) -> None:
        self._optimizer, self._tap, self._module, self._kept = optimizer, tap, module, kept

    def __call__(self, s: Tensor) -> None:
        kept, module = self._kept, self._module
        if kept is None:  # a second backward through a freed graph: torch will say so
            return
        h = kept if isinstance(kept, Tensor) else kept[0].grad_fn.saved_tensors[0]
        if not _graph_is_kept():
            self._kept = None  # free the input now: the script may hold on to the loss
        s = s.detach()
        if not isinstance(module, nn.Linear):
            h, s = _as_batch(module, h, s)
        self._optimizer._receive(self._tap.index, h, s, self._tap.layer)


def _as_batch(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output gradient as the layer's descriptor has them: padded, and with a batch axis."""
    alone = 3
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros":
            h = nn.functional.pad(h, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    else:
        alone = len(getattr(module, "normalized_shape", ()))
    return (h.unsqueeze(0), s.unsqueeze(0)) if h.dim() == alone else (h, s)


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
    if _top_hooks(False) is None:
        return h
    return (_Keep.apply(h, _ANCHOR),)  # the saved tensor lives as long as this one


_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
# True if the running backward retains its graph, so that another may follow.
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: ())


def _autograd_keeps(module: Any, h: Tensor) -> bool:
    """True if the backward of a layer that trains needs `h` itself. Where autograd keeps nothing, or a cast or padded
    copy, the script may overwrite `h` before backward, and a copy of ours must be kept."""
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return False
    if torch.is_autocast_enabled(h.device.type) and not isinstance(module, nn.BatchNorm2d):
        wide = isinstance(module, nn.LayerNorm)
        return h.dtype == (torch.float32 if wide else torch.get_autocast_dtype(h.device.type))
    return True
