"""Tables of text, and sizes as people read them."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cell. `align`: "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths)).rstrip() for row in rows
    ]


def size(count: int) -> str:
    """A number of bytes: "512 B", "46.6 MiB"."""
    number, unit = float(count), 0
    while round(number, 1) >= 1024 and unit < len(UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {UNITS[unit]}" if unit else f"{count} B"


def percent(part: float, whole: float) -> str:
    """The share of a part, "" where there is no whole. What is not nothing never reads as 0.0%."""
    if not whole:
        return ""
    share = 100 * part / whole
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"
