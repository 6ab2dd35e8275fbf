"""`torch.inference_mode`, in which a script may call the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def leaves_inference_mode(function: Function) -> Function:
    """For what makes momenta and factors: a tensor that is made in inference mode cannot be changed outside of it."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **options)

    return called  # type: ignore[return-value]
