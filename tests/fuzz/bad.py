"""What is no number, no array and no list, by names that print; and numbers in every dress."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

# Refused wherever a number is wanted.
NO_NUMBERS: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "None": None,
    "a string": "0.1",
    "bytes": b"0.1",
    "True": True,
    "a list": [0.1],
    "a tuple": (0.1,),
    "a dict": {},
    "a function": abs,
    "an object": object(),
    "complex": 0.1 + 1j,
    "beyond floats": 10**400,
    "np.nan": np.float32(np.nan),
    "np.complex64": np.complex64(0.1 + 1j),
    "np.True_": np.True_,
    "np.str_": np.str_("0.1"),
    "an array of strings": np.array("0.1"),
    "a complex array": np.array(0.1 + 1j),
    "two numbers": np.ones(2),
    "no numbers": np.ones(0),
    "a date": np.datetime64("2020-01-01"),
    "an array of objects": np.array(None, object),
    "a complex tensor": torch.tensor(0.1 + 1j),
    "a tensor of bools": torch.tensor(True),
    "two tensor elements": torch.ones(2),
    "a tensor without memory": torch.ones((), device="meta"),
    "a sparse tensor": torch.ones(2).to_sparse(),
}

# Refused for one scalar, beside NO_NUMBERS.
OUTSIDE: dict[str, dict[str, Any]] = {
    "lr": {"-1": -1, "-tiny": -1e-300, "Fraction": Fraction(-1, 2), "tensor": torch.tensor(-0.5)},
    "beta": {"1": 1, "1.5": 1.5, "-0.1": -0.1, "np 1": np.float32(1)},
    "Lambda": {"0": 0, "-0.0": -0.0, "-1": -1.0, "denormal": 1e-39, "tensor": torch.tensor(0.0)},
    "weight_decay": {"-0.1": -0.1, "np": np.float64(-2)},
    "gamma": {"-0.1": -0.1, "1.5": 1.5},
    "TCov": {"0": 0, "-3": -3, "2.5": 2.5, "np 0": np.int64(0)},
    "step": {"0": 0, "-1": -1, "1.5": 1.5, "np 0": np.int32(0)},
    "grad_scale": {"0": 0, "-1": -1.0, "np 0": np.float32(0)},
}


def bad_scalars(name: str) -> dict[str, Any]:
    return {**NO_NUMBERS, **OUTSIDE[name]}


# The same number in another type.
DRESS: dict[str, Any] = {
    "float": float,
    "np.float32": np.float32,
    "np.float64": np.float64,
    "Fraction": Fraction,
    "Decimal": Decimal,
    "array": np.array,
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64),
    "trained tensor": lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True),
}

# Refused wherever an array is wanted.
NO_ARRAYS: dict[str, Any] = {
    "None": None,
    "a number": 3.0,
    "a string": "weight",
    "a numpy scalar": np.int8(1),
    "an object": object(),
    "a type": np.ndarray,
    "a function": abs,
    "a range": range(3),
    "a set": {1.0},
    "an array of objects": np.array([None, 1.0], object),
    "an array of strings": np.array(["a", "b"]),
    "a record": np.zeros(2, [("a", "f4")]),
    "dates": np.zeros(2, "datetime64[s]"),
    "a sparse tensor": torch.ones(2).to_sparse(),
    "a tensor without memory": torch.ones(2, device="meta"),
}
