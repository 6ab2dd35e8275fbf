"""How many bits parameters, momenta and master weights have, and how parameters of 16 bits are rounded."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from . import rounding
from .errors import CafinTypeError, refuse, shown
from .rounding import SIXTEEN
from .rule import flag, whole


class Precision(NamedTuple):
    """An optimizer's choice, checked.

    Attributes:
        momentum: dtype of the momenta, by name; None for float32, or float64 for float64 parameters.
        masters: True keeps float32 master weights of parameters of 16 bits.
        begin: of the random numbers (see `rounding.start`); 0: parameters are rounded to the nearest.
    """

    momentum: str | None = None
    masters: bool = False
    begin: int = 0

    @classmethod
    def checked(
        cls, where: str, momentum_dtype: Any, master_weights: bool, stochastic_rounding: bool, seed: Any
    ) -> Precision:
        """The choice, or a `CafinError`."""
        name = None if momentum_dtype is None else dtype_name(momentum_dtype)
        if name not in (None, "float32", "float64", *SIXTEEN):
            rule = f"be None or one of float32, float64, {', '.join(SIXTEEN)}"
            refuse(where, "momentum_dtype", rule, shown(momentum_dtype), kind=CafinTypeError)
        master_weights = flag(where, "master_weights", master_weights)
        stochastic_rounding = flag(where, "stochastic_rounding", stochastic_rounding)
        if master_weights and stochastic_rounding:
            mend = "a master loses nothing in rounding to the nearest"
            refuse(where, "stochastic_rounding", "be False with master_weights=True", True, mend)
        number = checked_seed(where, "seed", seed)
        return cls(name, master_weights, rounding.start(number) if stochastic_rounding else 0)

    def seeded(self, seed: int) -> Precision:
        """The same with the random numbers of another seed, if there are any."""
        return self._replace(begin=rounding.start(seed)) if self.begin else self

    def momentum_of(self, where: str, name: str, dtype: str) -> str:
        """The dtype of the momentum of a parameter of `dtype`, which errors call `name`."""
        possible = momenta_of(dtype)
        if self.momentum is None:
            return possible[0]
        if self.momentum not in possible:
            rule = f"be None or one of {', '.join(possible)} for {dtype} parameters such as `{name}`"
            refuse(where, "momentum_dtype", rule, self.momentum)
        return self.momentum

    def has_master(self, dtype: str) -> bool:
        """True if a parameter of `dtype` has a master."""
        return self.masters and dtype in SIXTEEN


def checked_seed(where: str, name: str, seed: Any) -> int:
    """A seed, which has 64 bits."""
    number = whole(where, name, seed, 0)
    if number >= 2**64:
        refuse(where, name, "be below 2**64", number)
    return number


def sort_of(dtype: str) -> str:
    """What the parameters of one optimizer must have in common: those of 16 and 32 bits go together."""
    return "float32, bfloat16 or float16" if dtype == "float32" or dtype in SIXTEEN else dtype


def zeros_like(where: str, array: Any, dtype: str) -> Any:
    """Zeros in the shape, memory layout and framework of an array, of a dtype given by name."""
    xp = array_namespace(array)
    if dtype_name(array.dtype) == dtype:
        return xp.zeros_like(array)
    if not hasattr(xp, dtype):
        refuse(where, "momentum_dtype", f"be a dtype of {xp.__name__.split('.')[-1]}", dtype)
    return xp.zeros_like(array, dtype=getattr(xp, dtype))


def momenta_of(dtype: str) -> tuple[str, ...]:
    """The dtypes that the momentum of a parameter of `dtype` may have, the usual one first."""
    if dtype == "float32":
        return (dtype, *SIXTEEN)
    return ("float32", dtype) if dtype in SIXTEEN else (dtype,)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of any framework: "bfloat16" of `torch.bfloat16`, `numpy.dtype`s and their scalar types."""
    if isinstance(dtype, str):
        return dtype
    return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).removeprefix("torch.")
