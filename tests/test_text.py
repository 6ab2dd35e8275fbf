"""Tables and sizes as text."""

from __future__ import annotations

import pytest

from cafin_cupy.text import aligned, percent, size


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert aligned([("name", "n"), ("a", "1,000"), ("", "")], "<>") == ["name      n", "a     1,000", ""]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("part", "text"), [(0, "0.0%"), (0.9, "<0.1%"), (1, "0.1%"), (12.34, "0.6%"), (2000, "100.0%")]
)
def test_shares(part: float, text: str) -> None:
    assert percent(part, 2000) == text
    assert percent(part, 0) == ""
