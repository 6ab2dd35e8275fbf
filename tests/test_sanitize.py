"""The verdict on a run of compute-sanitizer; the tools themselves need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sanitize

CLEAN: dict[str, Any] = {
    "tool": "memcheck",
    "planted": True,
    "errors": 0,
    "tests": "149 passed",
    "launches": dict.fromkeys(sanitize.NAMES, 3),
    "seconds": 1.0,
}


def test_a_clean_run() -> None:
    assert sanitize.good(CLEAN)
    assert "| memcheck | 0 | found | 149 passed |" in sanitize.report([CLEAN], "an H200")


@pytest.mark.parametrize(
    "change",
    [
        {"planted": False},
        {"errors": 1},
        {"errors": -1},
        {"tests": "1 failed, 148 passed"},
        {"tests": "did not end"},
        {"launches": {**CLEAN["launches"], "fold": 0}},
        {"launches": {**CLEAN["launches"], "update_xla": 0}},
    ],
    ids=str,
)
def test_what_is_no_clean_run(change: dict[str, Any]) -> None:
    assert not sanitize.good({**CLEAN, **change})


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("========= ERROR SUMMARY: 0 errors", ["0"]),
        ("========= ERROR SUMMARY: 64 errors", ["64"]),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", ["2"]),
        ("========= Error: Target application terminated before first instrumented API call", []),
    ],
)
def test_what_the_tools_count(said: str, counted: list[str]) -> None:
    assert sanitize.SUMMARY.findall(said) == counted
