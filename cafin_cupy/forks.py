"""Processes that were forked after CUDA had been used: there it cannot be used, and its own errors do not say why."""

from __future__ import annotations

import os

from .errors import BackendError

child = False  # this process is one
_watching = False


def watch() -> None:
    """Called ahead of the first use of CUDA: processes that are forked from then on know what they are."""
    global _watching
    if not _watching and hasattr(os, "register_at_fork"):  # Windows does not fork
        _watching = True
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global child
    child = True


def refuse_child(where: str) -> None:
    """
    Raises:
        BackendError: this process was forked after CUDA had been used.
    """
    if child:
        raise BackendError(
            f"{where}: CUDA must be used in a process that was not forked after CUDA had been used, got process "
            f"{os.getpid()}, forked from {os.getppid()}; start it by "
            '"spawn": multiprocessing.get_context("spawn"), for a DataLoader multiprocessing_context="spawn"'
        )
