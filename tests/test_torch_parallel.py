"""Tensor parallel training: `parallel_checks.py` on two and four processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import launch


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    """One launch for all checks, each of which has a name of its own in the message."""
    found = launch(ranks, tmp_path, "parallel_checks")
    failed = {name: said for name, said in found.items() if said}
    assert len(found) > 5 and not failed, "\n".join(f"{name}, {said}" for name, said in failed.items())
