"""Hyperparameters: the averaging rules, and what is a number."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refuses

from cafin_cupy import Averaging, CafinTypeError, CafinValueError
from cafin_cupy.cuda_update import scalars
from cafin_cupy.rule import LARGEST, Hyper, at_least, flag, number, whole
from cafin_cupy.table import HYPER


def test_coefficients() -> None:
    assert Averaging.parity() == Averaging.parity(0.8)
    assert Averaging.paper() == Averaging.paper(0.8)
    parity, paper = Averaging.parity(0.8), Averaging.paper(0.8)
    assert (parity.keep, parity.add, parity.normalize) == (pytest.approx(0.08), pytest.approx(0.008), "before")
    assert (paper.keep, paper.add, paper.normalize) == (0.8, pytest.approx(0.2), "after")
    assert Averaging.paper(1.0).add == 0.0
    assert Averaging.parity(0.0).keep == 0.0


def test_named_rules() -> None:
    own = Averaging(0.5, 3.0)
    assert Averaging.named("parity", 0.5) == Averaging.parity(0.5)
    assert Averaging.named("paper", 0.5) == Averaging.paper(0.5)
    assert Averaging.named(own, 0.5) is own
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.keep = 0.1  # type: ignore[misc]


def test_parity_leaves_little_curvature() -> None:
    """The factors settle below 0.0087, as 0.008 / (1 - 0.08): the preconditioner within 8 % of Lambda = 1e-3."""
    rule, F = Averaging.parity(0.8), 1.0
    for _ in range(50):
        F = rule.keep * F + rule.add * 1.0
    assert pytest.approx(0.008 / 0.92) == F
    assert F < 0.0087
    assert F**2 < 0.08 * 1e-3


REFUSED: list[tuple[Any, Any, type, list[str]]] = [
    (Averaging, (-0.1, 0.1), CafinValueError, ["Averaging", "`keep`", ">= 0", "-0.1"]),
    (Averaging, (1.1, 0.1), CafinValueError, ["Averaging", "`keep`", "[0, 1]", "1.1"]),
    (Averaging, (0.5, -1), CafinValueError, ["Averaging", "`add`", ">= 0", "-1"]),
    (Averaging, (0.5, math.inf), CafinValueError, ["Averaging", "`add`", "finite", "inf"]),
    (Averaging, ("0.5", 0.1), CafinTypeError, ["Averaging", "`keep`", "number", "'0.5'"]),
    (Averaging, (0.5, 0.1, "during"), CafinValueError, ["`normalize`", '"before" or "after"', "'during'"]),
    (Averaging.parity, (-0.1,), CafinValueError, ["`gamma`", "[0, 1]", "-0.1"]),
    (Averaging.paper, (1.1,), CafinValueError, ["`gamma`", "[0, 1]", "1.1"]),
    (Averaging.paper, (math.nan,), CafinValueError, ["`gamma`", "finite", "nan"]),
    (Averaging.paper, (None,), CafinTypeError, ["`gamma`", "number", "None"]),
    (Averaging.named, ("best", 0.5), CafinValueError, ["`averaging`", '"parity", "paper"', "'best'"]),
]


@pytest.mark.parametrize(("make", "arguments", "kind", "words"), REFUSED)
def test_refused_rules(make: Any, arguments: Any, kind: type, words: list[str]) -> None:
    with refuses(kind, *words):
        make(*arguments)


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), Fraction(4, 2), torch.tensor(2.0)]
)
def test_numbers_of_every_kind(value: Any) -> None:
    got = number("f", "x", value)
    assert (type(got), got) == (float, 2.0)
    assert whole("f", "x", value, 1) == 2


NO_NUMBERS = [None, "2", True, [2.0], 2j, np.ones(2), torch.ones(2), object(), int]
# NumPy and PyTorch would make floats of these: of the text, of the truth, of the half that is real.
ALMOST = [
    np.str_("2"), np.bool_(True), np.complex64(2), np.datetime64("2020"), np.array("2"), np.array(True), np.array(2j),
    np.array("2", object), torch.tensor(True), torch.tensor(2j), torch.tensor(2 + 0j),
]  # fmt: skip


@pytest.mark.parametrize("value", [*NO_NUMBERS, *ALMOST], ids=lambda value: type(value).__name__)
def test_what_is_no_number(value: Any) -> None:
    with refuses(CafinTypeError, "f: `x` must be a", "number, got"):
        number("f", "x", value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, np.float32("nan")], ids=lambda value: str(value)[:9]
)
def test_numbers_are_finite(value: Any) -> None:
    for check in (lambda: number("f", "x", value), lambda: whole("f", "x", value, 1)):
        with refuses(CafinValueError, "f: `x` must be finite, got"):
            check()


def test_bounds() -> None:
    assert at_least("f", "x", 0, 0.0) == 0.0
    with refuses(CafinValueError, "f: `x` must be >= 0, got -1; mend it"):
        at_least("f", "x", -1, 0.0, mend="mend it")
    with refuses(CafinValueError, "f: `x` must be > 0, got 0"):
        at_least("f", "x", 0, 0.0, strict=True)
    for value in (0, 2.5):
        with refuses(CafinValueError, f"f: `x` must be a whole number >= 1, got {value}"):
            whole("f", "x", value, 1)


def test_equal_scalars_are_equal_hypers() -> None:
    a, b = (Hyper.checked("f", lr, 0.9, 1e-3, 0, False) for lr in (1, np.float64(1)))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Hyper.checked("f", 1, 0.9, 1e-3, 0, True)


@pytest.mark.parametrize("name", ["lr", "Lambda", "weight_decay"])
def test_scalars_fit_float32_and_so_does_what_is_made_of_them(name: str) -> None:
    """PyTorch and the kernels' tables raise where they do not, in the middle of a step."""
    given = {"lr": LARGEST, "beta": math.nextafter(1.0, 0.0), "Lambda": LARGEST, "weight_decay": LARGEST}
    for decoupled in (False, True):
        made = scalars(Hyper.checked("f", **given, decoupled=decoupled), 1)
        assert np.all(np.isfinite(np.frombuffer(HYPER.pack(*made), np.float32)))
    with refuses(CafinValueError, f"f: `{name}` must be <= 1e+18, got 1e+19"):
        Hyper.checked("f", **{**given, name: 1e19}, decoupled=False)


def test_errors_call_a_scalar_by_its_path() -> None:
    with refuses(CafinValueError, "f: `groups[1]['beta']` must lie in [0, 1), got 2.0"):
        Hyper.checked("f", 0.1, 2.0, 0.1, 0.0, False, "groups[1]['{}']")


def test_large_counts_are_exact() -> None:
    assert whole("f", "x", 2**60 + 1, 0) == 2**60 + 1


@pytest.mark.parametrize("value", [True, False, 1, 0, np.True_, np.False_, np.array(True)])
def test_flags(value: Any) -> None:
    got = flag("f", "x", value)
    assert type(got) is bool
    assert got == bool(value)


@pytest.mark.parametrize("value", ["False", "no", "", None, 2, 0.0, [], [0], np.ones(2), np.array("False"), object()])
def test_what_is_no_flag(value: Any) -> None:
    """Python knows the truth of anything; that of "no" is True."""
    with refuses(CafinTypeError, "f: `x` must be True or False, got"):
        flag("f", "x", value)
    with refuses(CafinTypeError, "f: `decoupled` must be True or False, got"):
        Hyper.checked("f", 0.1, 0.9, 0.1, 0.0, value)


@pytest.mark.parametrize("value", [np.array(["parity", "paper"]), np.array("parity"), ["parity"], b"parity"])
def test_rules_are_named_by_strings(value: Any) -> None:
    with refuses(CafinValueError, "`averaging`", '"parity", "paper" or an Averaging'):
        Averaging.named(value, 0.8)
    with refuses(CafinValueError, "`normalize`", '"before" or "after"'):
        Averaging(0.5, 0.5, value)
