"""Which PyTorch modules have factors, and how each type is a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cafin_cupy import layers
from cafin_cupy.errors import CafinTypeError, refuse, shown
from cafin_cupy.layers import Layer


def _as_they_are(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return h, s


def _never(module: Any, h: Tensor) -> bool:
    return False


def _first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[Any, Any]:
    """The first argument, and the output."""
    return (args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))), output


class Kind(NamedTuple):
    """How a type of module is a layer.

    Attributes:
        describe: (module, name) -> its descriptors, none if this one has no factors.
        take: (module, args, kwargs, output) -> the input `h`, and the tensor whose gradient is `s`, from a forward.
        arrange: (module, h, s) -> input and output gradient as the descriptor has them: padded, with a batch axis. It
            runs in backward.
        keeps: (module, h) -> True if backward needs `h` itself when the weight trains, so that torch notices when a
            script overwrites it. Where autograd keeps nothing, or a cast, padded or contiguous copy, the script may,
            and a copy of ours must be kept.
        lends: True if the forward calls no layer, but hands its weights to a function; see torch_attention.py.
    """

    describe: Callable[[Any, str], Sequence[Layer]]
    take: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[Any, Any]] = _first
    arrange: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] = _as_they_are
    keeps: Callable[[Any, Tensor], bool] = _never
    lends: bool = False


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of the module's type, or of the nearest base class that has one; what a script registers goes first."""
    for base in type(module).__mro__:
        package = base.__module__.partition(".")[0]
        kind = _registered.get(base) or _KINDS.get(base) or _FOREIGN.get((package, base.__name__))
        if kind is not None:
            return kind
    return None


def register_layer(
    module_type: type[nn.Module],
    describe: Callable[[Any, str], Layer | None],
    *,
    take: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[Any, Any]] | None = None,
    arrange: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Give modules of a type factors, in optimizers that are made from now on.

        register_layer(LlamaRMSNorm, lambda module, name: RMSNorm(module.weight, name=name))

    Args:
        module_type: its subclasses count as well; of several types that are known the nearest one wins. A type that is
            registered again, or that PyTorch has, is described anew until `unregister_layer`.
        describe: (module, name) -> a descriptor of `cafin_cupy` that holds the module's parameters, or None if this
            module has no factors. It says which shapes input and output gradient have.
        take: (module, args, kwargs, output) -> the layer's input h, and the tensor whose gradient is s, from a call;
            if None the first argument, and the output.
        arrange: (module, h, s) -> both in the shapes of the descriptor, in backward; if None as they are.

    Raises:
        CafinError: an argument is refused.
    """
    where = "register_layer"
    _check_type(where, module_type)
    for name, given in (("describe", describe), ("take", take or _first), ("arrange", arrange or _as_they_are)):
        if not callable(given):
            refuse(where, name, "be a function", type(given).__name__, kind=CafinTypeError)

    def checked(module: Any, name: str) -> Sequence[Layer]:
        layer: Any = describe(module, name)
        if layer is not None and not isinstance(layer, Layer):
            rule = "return a layer descriptor or None"
            refuse(where, f"describe of {module_type.__name__}", rule, type(layer).__name__, kind=CafinTypeError)
        if layer is None or not isinstance(layer.weight, nn.Parameter):
            return ()
        if not any(layer.weight is p for p in module.parameters()):
            rule = "describe a parameter of the module it is given"
            refuse(where, f"describe of {module_type.__name__}", rule, f"another one for {name!r}")
        return [layer]

    def pair(name: str, call: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        def checked(*arguments: Any) -> tuple[Any, Any]:
            given: Any = call(*arguments)
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                what = f"{name} of {module_type.__name__}"
                refuse(where, what, "return a pair", type(given).__name__, kind=CafinTypeError)
            return given[0], given[1]

        return checked

    _registered[module_type] = Kind(
        checked,
        pair("take", take) if take else _first,
        pair("arrange", arrange) if arrange else _as_they_are,
    )


def unregister_layer(module_type: type[nn.Module]) -> None:
    """Forget what `register_layer` was told of a type, in optimizers that are made from now on.

    Raises:
        CafinError: nothing was registered for this very type.
    """
    where = "unregister_layer"
    _check_type(where, module_type)
    if module_type not in _registered:
        refuse(where, "module_type", "be a type that was registered", module_type.__qualname__)
    del _registered[module_type]


def _check_type(where: str, module_type: Any) -> None:
    if not isinstance(module_type, type) or not issubclass(module_type, nn.Module):
        refuse(where, "module_type", "be a subclass of torch.nn.Module", shown(module_type), kind=CafinTypeError)


def _parameters(module: Any, name: str) -> tuple[Any, Any]:
    """(weight, bias) of a module, None where it has none or one that is not a parameter of its own."""
    if nn.utils.parametrize.is_parametrized(module, "weight"):
        return None, None  # computed anew at each access, which may even change the module's state
    weight, bias = module.weight, getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter):  # affine=False, or computed by a hook
        return None, None
    return weight, bias if isinstance(bias, nn.Parameter) else None


def _descriptor(kind: type[Layer], options: Callable[[Any], dict[str, Any]] | None = None) -> Any:
    """`describe` of modules whose parameters are `weight` and `bias`."""

    def describe(module: Any, name: str) -> Sequence[Layer]:
        weight, bias = _parameters(module, name)
        return () if weight is None else [kind(weight, bias, name=name, **(options(module) if options else {}))]

    return describe


def _geometry(module: Any) -> dict[str, Any]:
    """Of a convolution."""
    padding = module.padding
    if module.padding_mode != "zeros" or padding == "valid":
        padding = 0  # other modes pad the input before the layer reads it, see `_padded`
    elif padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size))
    return {"stride": module.stride, "padding": padding, "dilation": module.dilation, "groups": module.groups}


def _table(module: Any, name: str) -> Sequence[Layer]:
    """Of an embedding. `max_norm` changes the weight ahead of the forward, not its gradient."""
    weight, _ = _parameters(module, name)
    if weight is None or module.scale_grad_by_freq:  # rows of such a gradient are no sums over positions
        return ()
    return [layers.Embedding(weight, padding_idx=module.padding_idx, name=name)]


def _projections(module: Any, name: str) -> Sequence[Layer]:
    """Of an attention: its matrices but for `out_proj`, which is a module of its own. `in_proj` are those of query, key
    and value one below the other. Where they are apart, as their widths differ, their common bias is no layer's."""
    within = f"{name}." if name else ""
    found = []
    for matrix, bias in (("in_proj", "in_proj_bias"), ("q_proj", ""), ("k_proj", ""), ("v_proj", "")):
        weight = module._parameters.get(f"{matrix}_weight")  # None if it is computed, or not there
        if weight is not None:
            found.append(layers.Linear(weight, module._parameters.get(bias), name=within + matrix))
    return found


def _padded(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    if module.padding_mode != "zeros":
        h = nn.functional.pad(h, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    return _batched(1 + len(module.kernel_size), h, s)


def _batched(alone: int, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """With a batch axis: a single sample has `alone` axes."""
    return (h.unsqueeze(0), s.unsqueeze(0)) if h.dim() == alone else (h, s)


# What autograd keeps.


def _keeps_indices(module: Any, h: Tensor) -> bool:
    return module.max_norm is None or h.is_contiguous()


def _cast(h: Tensor, wide: bool) -> bool:
    """True if autocast hands a layer something else than `h`: float32 if `wide`, else its 16-bit type."""
    if not torch.is_autocast_enabled(h.device.type):
        return False
    return h.dtype != (torch.float32 if wide else torch.get_autocast_dtype(h.device.type))


def _keeps_rows(module: Any, h: Tensor) -> bool:
    return (h.dim() <= 2 or h.is_contiguous()) and not _cast(h, wide=False)  # else it multiplies a contiguous copy


def _keeps_image(module: Any, h: Tensor) -> bool:
    padded = module.padding_mode != "zeros"
    if module.padding == "same":  # by one more behind than before where this is odd, which torch does beforehand
        padded |= any(d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size))
    return not padded and not _cast(h, wide=False)


def _keeps_dense(module: Any, h: Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(h.dim(), torch.contiguous_format)
    return h.is_contiguous() or h.is_contiguous(memory_format=last)  # else cuDNN takes a copy


def _keeps_wide(module: Any, h: Tensor) -> bool:
    return not _cast(h, wide=True)


def _keeps_to_differentiate(module: Any, h: Tensor) -> bool:
    """The normalised input is all that the weight needs; the gradient of `h` needs `h`, or a wider copy of it."""
    return h.requires_grad and h.element_size() >= 4 and not _cast(h, wide=True)


def _keeps_contiguous(module: Any, h: Tensor) -> bool:
    return h.is_contiguous() and not _cast(h, wide=True)


def _convolution(kind: type[Layer]) -> Kind:
    return Kind(_descriptor(kind, _geometry), arrange=_padded, keeps=_keeps_image)


def _of_shape(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return _batched(len(module.normalized_shape), h, s)


def _instance_norm(alone: int) -> Kind:
    return Kind(
        _descriptor(layers.InstanceNorm), arrange=lambda _, h, s: _batched(alone, h, s), keeps=_keeps_contiguous
    )


_registered: dict[type[nn.Module], Kind] = {}  # by scripts

_KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: Kind(_descriptor(layers.Linear), keeps=_keeps_rows),
    nn.MultiheadAttention: Kind(_projections, keeps=_keeps_rows, lends=True),
    nn.Embedding: Kind(_table, keeps=_keeps_indices),
    nn.Conv1d: _convolution(layers.Conv1d),
    nn.Conv2d: _convolution(layers.Conv2d),
    nn.Conv3d: _convolution(layers.Conv3d),
    nn.ConvTranspose1d: _convolution(layers.ConvTranspose1d),
    nn.ConvTranspose2d: _convolution(layers.ConvTranspose2d),
    nn.ConvTranspose3d: _convolution(layers.ConvTranspose3d),
    nn.BatchNorm1d: Kind(_descriptor(layers.BatchNorm1d), keeps=_keeps_dense),
    nn.BatchNorm2d: Kind(_descriptor(layers.BatchNorm2d), keeps=_keeps_dense),
    nn.BatchNorm3d: Kind(_descriptor(layers.BatchNorm3d), keeps=_keeps_dense),
    nn.SyncBatchNorm: Kind(_descriptor(layers.SyncBatchNorm), keeps=_keeps_dense),
    nn.GroupNorm: Kind(_descriptor(layers.GroupNorm), keeps=_keeps_contiguous),
    nn.InstanceNorm1d: _instance_norm(2),
    nn.InstanceNorm2d: _instance_norm(3),
    nn.InstanceNorm3d: _instance_norm(4),
    nn.LayerNorm: Kind(_descriptor(layers.LayerNorm), arrange=_of_shape, keeps=_keeps_wide),
    nn.RMSNorm: Kind(_descriptor(layers.RMSNorm), arrange=_of_shape, keeps=_keeps_to_differentiate),
}

# Of libraries that need not be there: by the package and name of the class.
_FOREIGN: dict[tuple[str, str], Kind] = {
    ("transformers", "Conv1D"): Kind(_descriptor(layers.TransposedLinear), keeps=_keeps_rows),
}
