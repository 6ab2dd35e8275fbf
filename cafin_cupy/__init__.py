"""Fused AdaFisher: a second-order step in one CUDA launch, for PyTorch, CuPy and anything that speaks DLPack.

Importing this package imports no framework and touches no device.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference
    from .errors import BackendError, CafinError, CafinTypeError, CafinValueError, NonFiniteError
    from .layers import (
        BatchNorm1d,
        BatchNorm2d,
        BatchNorm3d,
        Conv1d,
        Conv2d,
        Conv3d,
        ConvTranspose1d,
        ConvTranspose2d,
        ConvTranspose3d,
        Embedding,
        GroupNorm,
        InstanceNorm,
        LayerNorm,
        Linear,
        RMSNorm,
        SyncBatchNorm,
        TransposedLinear,
    )
    from .optimizer import AdaFisher
    from .rule import Averaging
    from .update import fused_step

__version__ = "0.1.0"

_HOME = {
    "AdaFisher": "optimizer",
    "Averaging": "rule",
    "BackendError": "errors",
    "BatchNorm1d": "layers",
    "BatchNorm2d": "layers",
    "BatchNorm3d": "layers",
    "CafinError": "errors",
    "CafinTypeError": "errors",
    "CafinValueError": "errors",
    "Conv1d": "layers",
    "Conv2d": "layers",
    "Conv3d": "layers",
    "ConvTranspose1d": "layers",
    "ConvTranspose2d": "layers",
    "ConvTranspose3d": "layers",
    "Embedding": "layers",
    "GroupNorm": "layers",
    "InstanceNorm": "layers",
    "LayerNorm": "layers",
    "Linear": "layers",
    "NonFiniteError": "errors",
    "RMSNorm": "layers",
    "SyncBatchNorm": "layers",
    "TransposedLinear": "layers",
    "fused_step": "update",
}
__all__ = [
    "AdaFisher",
    "Averaging",
    "BackendError",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CafinError",
    "CafinTypeError",
    "CafinValueError",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "NonFiniteError",
    "RMSNorm",
    "SyncBatchNorm",
    "TransposedLinear",
    "__version__",
    "fused_step",
    "reference",
]

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file() and (_checkout / "kernels").is_dir():
    # A checkout keeps `kernels/` and `adapters/` beside the package; an installation holds them inside it.
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module(".reference", __name__)
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
