"""Wrappers by which trainers call the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .torch_sampling import Sampling

Optimizer = TypeVar("Optimizer", bound="Sampling")


def itself(optimizer: Optimizer) -> Optimizer:
    """The optimizer, also where one of its methods was called on a wrapper of Lightning or Fabric.

    Their wrapper's class inherits from the optimizer's, and looks up in the optimizer what it lacks itself. What a
    method sets would stay with the wrapper, and hide what the optimizer has.
    """
    wrapped: Optimizer = vars(optimizer).get("_optimizer", optimizer)
    return wrapped
