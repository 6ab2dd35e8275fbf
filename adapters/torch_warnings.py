"""The warnings of the PyTorch optimizer: parameters without factors, layers that it does not get to see, and factors
that a checkpoint does not hold."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

SHOWN = 8  # names in a warning


def warn_without_factors(where: str, names: Sequence[str]) -> None:
    """Parameters that no known layer owns; nothing if there are none."""
    if names:
        _warn(f"{where}: no factors (F = 1) for {_listed(names)}")


def warn_unseen(where: str, names: Sequence[str]) -> None:
    """Layers whose weights have gradients although their forward was not seen on a sampled step."""
    _warn(
        f"{where}: layers have gradients but were not seen on a sampled step, so their factors stay as they are: "
        f"{_listed([repr(name) for name in names])}. Their forward was not called (other code uses their weights), ran "
        "in eval mode, met a sparse or nested input, or was compiled before the optimizer was made (make it before the "
        "model's first call, or call torch.compiler.reset() behind it, or set "
        "torch._dynamo.config.skip_nnmodule_hook_guards = False before torch.compile)."
    )


def warn_not_stored(where: str, names: Sequence[str]) -> None:
    """Layers whose factors a checkpoint does not hold; nothing if there are none."""
    if names:
        _warn(
            f"{where}: the checkpoint holds no factors for {_listed(names)}, as it was made by the public "
            "implementation or a version that had none for such layers. Theirs begin at one (F = 1) and follow from "
            "the next sampled step"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _warn(text: str) -> None:
    """Warn at the script's own line, behind the wrappers that torch, its schedulers and scalers put around a step."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "cafin_cupy"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
