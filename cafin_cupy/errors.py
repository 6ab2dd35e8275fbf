"""Errors. One base class; each kind is also the builtin that callers would expect."""

from __future__ import annotations

from reprlib import Repr
from typing import NoReturn

_short = Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 3, 100, 200


class CafinError(Exception):
    """Base of every error that this library raises on purpose."""


class CafinValueError(CafinError, ValueError):
    """An argument has the right type and a wrong value, shape, dtype or device."""


class CafinTypeError(CafinError, TypeError):
    """An argument is of a kind that cannot be used."""


class NonFiniteError(CafinError, FloatingPointError):
    """`error_if_nonfinite` is on, and what a step was about to use holds an inf or a NaN. Nothing has been changed."""


class BackendError(CafinError, RuntimeError):
    """A backend was asked for that cannot run here."""


def shown(value: object) -> str:
    """What came, as messages show it: `repr` on one line, shortened where it is long or deeply nested."""
    return " ".join(_short.repr(value).split())


def refuse(
    where: str,
    argument: str,
    rule: str,
    got: object,
    mend: str = "",
    kind: type[CafinError] = CafinValueError,
) -> NoReturn:
    """Raise `kind` with the one sentence that all messages share: place, argument, rule, value, mend."""
    raise kind(f"{where}: `{argument}` must {rule}, got {got}" + (f"; {mend}" if mend else ""))
