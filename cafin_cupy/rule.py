"""Hyperparameters: the two averaging rules of the factors, and the scalars of the update."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import CafinTypeError, refuse, shown

DEFAULT_GAMMA = 0.8
RULES = ("parity", "paper")
SMALLEST = 2.0**-126  # normal number of float32: the kernels flush smaller ones to 0
LARGEST = 1e18  # scalar: what the update makes of two of them, lr / (1 - beta) or lr * weight_decay, fits float32 too


def number(where: str, name: str, value: object) -> float:
    """`value` as a float, or a `CafinError`: finite, real, and no array of more than one element."""
    dtype = str(getattr(value, "dtype", "float"))  # NumPy would make floats of strings, dates and half of a complex
    if isinstance(value, (bool, type)) or not hasattr(value, "__float__") or not ("float" in dtype or "int" in dtype):
        refuse(where, name, "be a number", shown(value), kind=CafinTypeError)
    try:
        result = float(value)
    except OverflowError:  # an int beyond all floats
        result = math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        refuse(where, name, "be a single number", shown(value), kind=CafinTypeError)
    if not math.isfinite(result):
        refuse(where, name, "be finite", result)
    return result


def at_least(where: str, name: str, value: object, bound: float, *, strict: bool = False, mend: str = "") -> float:
    """`value` as a float that is >= `bound` (> with `strict`)."""
    result = number(where, name, value)
    if result < bound or (strict and result == bound):
        refuse(where, name, f"be {'>' if strict else '>='} {bound:g}", f"{result:g}", mend)
    return result


def whole(where: str, name: str, value: object, bound: int) -> int:
    """`value` as an int >= `bound`; 3.0 counts as 3, 3.5 is refused."""
    result = number(where, name, value)
    if result != int(result) or result < bound:
        refuse(where, name, f"be a whole number >= {bound}", f"{result:g}")
    return int(value) if isinstance(value, numbers.Integral) else int(result)


def steps_in(where: str, name: str, value: object) -> int:
    """`value` as a number of steps, which devices count in 64 bits."""
    count = whole(where, name, value, 0)
    if count >= 2**62:
        refuse(where, name, f"be a number of steps, below {2**62}", count)
    return count


def flag(where: str, name: str, value: object) -> bool:
    """`value` as a bool; 0 and 1 count, and NumPy's, but not the truth of strings and lists."""
    scalar = str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ()
    if not scalar and not (isinstance(value, int) and value in (0, 1)):
        refuse(where, name, "be True or False", shown(value), kind=CafinTypeError)
    return bool(value)


@dataclass(frozen=True)
class Averaging:
    """How a factor follows its raw moments: `F <- keep * F + add * x`, from ones. With
    `keep + add <= 1` it never exceeds the largest of those and of the moments.

    Attributes:
        keep: weight of the old factor, in [0, 1].
        add: weight of the new moment, >= 0.
        normalize: "before" averages min-max normalised moments, and F enters the preconditioner as it is;
            "after" averages the moments themselves, and F is min-max normalised when the preconditioner is formed.
    """

    keep: float
    add: float
    normalize: str = "before"

    def __post_init__(self) -> None:
        keep = at_least("Averaging", "keep", self.keep, 0.0)
        if keep > 1.0:
            refuse("Averaging", "keep", "lie in [0, 1]", keep)
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "add", at_least("Averaging", "add", self.add, 0.0))
        if not isinstance(self.normalize, str) or self.normalize not in ("before", "after"):
            refuse("Averaging", "normalize", 'be "before" or "after"', shown(self.normalize))

    @classmethod
    def parity(cls, gamma: float = DEFAULT_GAMMA) -> Averaging:
        """The public implementation's rule: `F <- 0.1 gamma F + 0.01 gamma x`, x normalised before."""
        gamma = _gamma(gamma)
        return cls(0.1 * gamma, 0.01 * gamma, "before")

    @classmethod
    def paper(cls, gamma: float = DEFAULT_GAMMA) -> Averaging:
        """The paper's rule (arXiv 2405.16397, Eq. 3-4): `F <- gamma F + (1 - gamma) x`, normalised after."""
        gamma = _gamma(gamma)
        return cls(gamma, 1.0 - gamma, "after")

    @classmethod
    def named(cls, rule: str | Averaging, gamma: float) -> Averaging:
        """The rule that an optimizer's `averaging=` argument names: "parity", "paper", or an `Averaging` as it is."""
        if isinstance(rule, Averaging):
            return rule
        if not isinstance(rule, str) or rule not in RULES:
            refuse("AdaFisher", "averaging", 'be "parity", "paper" or an Averaging', shown(rule))
        return cls.parity(gamma) if rule == "parity" else cls.paper(gamma)


def _gamma(gamma: object) -> float:
    value = number("Averaging", "gamma", gamma)
    if not 0.0 <= value <= 1.0:
        refuse("Averaging", "gamma", "lie in [0, 1]", value)
    return value


@dataclass(frozen=True)
class Hyper:
    """The scalars of one update, checked. Two parameters with equal scalars and equal step share a `Hyper`.

    Attributes:
        lr: learning rate, >= 0.
        beta: decay of the momentum, in [0, 1).
        Lambda: damping added to `S[r] * H[c]`, > 0.
        weight_decay: >= 0.
        decoupled: False adds `weight_decay * p` to the gradient (AdaFisher), True shrinks `p` apart (AdaFisherW).
        maximize: True takes the gradient with the opposite sign, and so ascends.
    """

    lr: float
    beta: float
    Lambda: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False

    def scale(self, grad_scale: float) -> float:
        """What the gradient is divided by: the scale that it has, with the sign that the step wants."""
        return -grad_scale if self.maximize else grad_scale

    @property
    def l2(self) -> float:
        """What multiplies `p` in the gradient."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def decay(self) -> float:
        """What multiplies `p` in the step."""
        return self.lr * self.weight_decay if self.decoupled else 0.0

    @classmethod
    def checked(
        cls,
        where: str,
        lr: object,
        beta: object,
        Lambda: object,
        weight_decay: object,
        decoupled: object,
        path: str = "{}",
        maximize: object = False,
    ) -> Hyper:
        """The scalars, or a `CafinError` that calls the first bad one by `path`."""

        def scalar(name: str, value: object, **options: Any) -> float:
            result = at_least(where, path.format(name), value, 0.0, **options)
            if result > LARGEST:
                refuse(where, path.format(name), f"be <= {LARGEST:g}", f"{result:g}")
            return result

        rate = scalar("lr", lr)
        b = number(where, path.format("beta"), beta)
        if not 0.0 <= b < 1.0:
            refuse(where, path.format("beta"), "lie in [0, 1)", b)
        damping = scalar("Lambda", Lambda, strict=True, mend="it keeps the preconditioner above 0")
        at_least(where, path.format("Lambda"), damping, SMALLEST, mend="float32 knows no smaller normal number")
        decay, decoupled = scalar("weight_decay", weight_decay), flag(where, "decoupled", decoupled)
        return cls(rate, b, damping, decay, decoupled, flag(where, path.format("maximize"), maximize))


class Scalars(NamedTuple):
    """What the formulas of the update take of the hyperparameters at one step of a parameter.

    Attributes:
        step_size: `lr / (1 - beta^step)`.
        decay: of AdaFisherW, `lr * weight_decay`; else 0.
        l2: of AdaFisher, `weight_decay`; else 0.
        beta, rest: decay of the momentum, and `1 - beta`.
        Lambda: damping.
    """

    step_size: Any
    decay: Any
    l2: Any
    beta: Any
    rest: Any
    Lambda: Any

    @classmethod
    def of(cls, hyper: Hyper, step: int) -> Scalars:
        """At a parameter's `step`, counted from 1, computed in float64."""
        step_size = hyper.lr / (1.0 - hyper.beta**step)
        return cls(step_size, hyper.decay, hyper.l2, hyper.beta, 1.0 - hyper.beta, hyper.Lambda)
