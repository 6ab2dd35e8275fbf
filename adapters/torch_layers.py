"""PyTorch modules as layers: which modules have factors, and how their inputs and output gradients are caught."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.errors import refuse
from cafin_cupy.layers import BatchNorm2d, Conv2d, Layer, LayerNorm, Linear


def describe(name: str, module: nn.Module) -> Layer | None:
    """The descriptor of a module, or None if it is of no known type or its weight is not a parameter of its own."""
    kind = next((known for known in _DESCRIBE if isinstance(module, known)), None)
    if kind is None:
        return None
    weight, bias = module.weight, module.bias
    if isinstance(weight, nn.parameter.UninitializedParameter):
        refuse("AdaFisher", "model", "have initialised parameters", f"a lazy `{name}`", "run one forward pass first")
    if not isinstance(weight, nn.Parameter):  # affine=False, or computed by a parametrization
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


class Tap:
    """Forward hook of one layer. In a copied or unpickled model it is inert: a copy trains with its own optimizer."""

    def __init__(self, optimizer: Any = None, index: int = 0) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._index = index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not torch.is_grad_enabled():
            return
        # A layer counts if it or the model is in training mode: BatchNorm frozen inside a model that trains does, and
        # so does a head that trains on a model in eval mode.
        if not (module.training or optimizer.model.training):
            return
        h = args[0] if args else kwargs.get("input")
        if isinstance(h, Tensor) and isinstance(output, Tensor) and output.requires_grad:
            optimizer._factors  # noqa: B018  # made, and kernels compiled, here rather than in autograd's thread
            catch(module, h, output, self._index, optimizer._receive)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        return Tap()

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        return Tap, ()


def catch(module: Any, h: Tensor, output: Tensor, index: int, receive: Callable[[int, Tensor, Tensor], None]) -> None:
    """Hand (index, h, s) to `receive` when the gradient `s` of `output` is known.

    The input is looked at only then, so a forward without a backward leaves no trace, and a recomputed forward
    (activation checkpointing) does not count twice. A hook on the output tensor, unlike a full backward hook, bears
    in-place operations behind the layer and inputs without gradient.
    """
    weight, bias = module.weight, module.bias
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return
    h = h.detach()
    if not weight.requires_grad:
        h = h.clone()  # autograd keeps no input for a frozen weight: it may be overwritten before backward
    version = h._version
    batched = h.dim() > (len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 3)
    add_batch = not batched and isinstance(module, (nn.Conv2d, nn.LayerNorm))

    def hook(s: Tensor) -> None:
        if h._version != version:
            refuse(
                "backward", f"input of {type(module).__name__}", "be as it was in forward", "an input changed in place",
                "use the out-of-place operation",
            )  # fmt: skip
        x, g = h, s.detach()
        if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        if add_batch:
            x, g = x.unsqueeze(0), g.unsqueeze(0)
        receive(index, x, g)

    output.register_hook(hook)
