"""Errors. One base class; each kind is also the builtin that callers would expect."""

from __future__ import annotations

from typing import NoReturn


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
