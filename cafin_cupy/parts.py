"""The parameters of an optimizer as `summary` and `curvature` look at them, whatever framework owns them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .layers import Layer
from .precision import Precision
from .rule import Hyper

if TYPE_CHECKING:
    from .optimizer import AdaFisher


@dataclass(frozen=True)
class Part:
    """One parameter.

    Attributes:
        name: as the optimizer's errors call it; in PyTorch the model's name for it.
        array: the parameter itself.
        momentum: of the parameter's shape; None where there is none.
        trains: False of a frozen one.
        layer: the descriptor that gives it factors, or None.
        index: place of its factors, where there is a layer.
        role: "weight" or "bias" of the layer.
        note: why its F is 1, or that it is not updated; "" where neither holds.
        precision: what decides the dtype of a momentum that there is not yet, and whether it has a master.
        kept: elements whose state this process keeps: all, where ranks do not divide it.
    """

    name: str
    array: Any
    momentum: Any
    trains: bool
    layer: Layer | None
    index: int
    role: str
    note: str
    precision: Precision
    kept: int


class Rate(NamedTuple):
    """What makes a parameter's update of its momentum: `step_size * m / F + decay * p`.

    Attributes:
        step_size: `lr / (1 - beta^t)`, t the completed updates, at least 1. A number, or an array without axes beside
            the parameter; so is `decay`.
        decay: `lr * weight_decay` where it is decoupled; None without.
        Lambda: damping in F.
    """

    step_size: Any
    decay: Any
    Lambda: float


def rate(hyper: Hyper, correction: Any, lr: Any = None) -> Rate:
    """`correction`: `1 - beta^t`. `lr`: an array that holds it, if it is not the one of `hyper`."""
    lr = hyper.lr if lr is None else lr
    decay = lr * hyper.weight_decay if hyper.decoupled and hyper.weight_decay else None
    return Rate(lr / correction, decay, hyper.Lambda)


def parts(optimizer: AdaFisher) -> list[Part]:
    """The parameters of an optimizer of raw arrays."""
    found = []
    for (name, _), array, momentum, place in zip(
        optimizer._named, optimizer._arrays, optimizer.momenta, optimizer._owners
    ):
        index, role = place or (-1, "")
        layer = optimizer._layers[index] if place else None
        note = "" if place else "F = 1: no layer of `layers` holds it"
        kept = math.prod(array.shape)
        found.append(Part(name, array, momentum, True, layer, index, role, note, optimizer._precision, kept))
    return found


def rates(optimizer: AdaFisher, where: str) -> list[Rate]:
    """Of each of `parts`.

    Raises:
        CafinError: a scalar has been set to what a step would refuse.
    """
    hyper = optimizer._hyper(where)
    return [rate(hyper, 1.0 - hyper.beta ** max(1, optimizer.steps))] * len(optimizer._named)
