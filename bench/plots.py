"""Plots of a run: step, construction of the factors, iteration by TCov."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from .tables import Record, label, number, section_data

OURS, THEIRS, FLOOR = "#1f6f5c", "#b8c0c6", "#c0392b"
SHADES = ["#d9dee2", "#b8c0c6", "#8f9aa3", "#6b7780"]


def draw(record: Record, path: Path) -> list[Path]:
    """Write `<stem>-<section>.png` beside `path` for every section that has figures."""
    drawn = []
    for name, plot in PLOTS.items():
        data = section_data(record, name)
        if data and (data.get("contenders") or data.get("tracks")):
            figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
            try:
                plot(axes, data, record)
                axes.spines[["top", "right"]].set_visible(False)
                figure.text(1, 0, record["environment"]["device"], ha="right", va="bottom", fontsize=7, color="#6b7780")
                target = path.with_name(f"{path.stem}-{name}.png")
                figure.savefig(target, dpi=144)
            finally:
                pyplot.close(figure)
            drawn.append(target)
    return drawn


def _floor(record: Record, moved: float) -> float | None:
    """Time in us that copy speed needs for `moved` bytes."""
    speed = section_data(record, "copy").get("gigabytes_per_second")
    return moved / (speed * 1e3) if speed else None


def _bars(axes: Any, record: Record, bars: dict[str, dict[str, Any]], floor: float | None, what: str) -> None:
    """Horizontal bars of {label: summary}, ours coloured, with a line at the floor."""
    names = list(bars)
    medians = [bars[name]["median"] for name in names]
    ours = label(record, "ours")
    axes.barh(names, medians, color=[OURS if name.startswith(ours) else THEIRS for name in names])
    lows = [bars[name]["median"] - bars[name]["p20"] for name in names]
    highs = [bars[name]["p80"] - bars[name]["median"] for name in names]
    axes.errorbar(medians, names, xerr=[lows, highs], fmt="none", ecolor="#333333", elinewidth=1)
    for row, median in enumerate(medians):
        axes.annotate(number(median), (median, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    if max(medians) > 20 * min(medians):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.set_xlim(left=min(medians + ([floor] if floor else [])) / 2, right=max(medians) * 2)
    else:
        axes.set_xlim(0, max(medians) * 1.15)
    if floor:
        axes.axvline(floor, color=FLOOR, linestyle="--", linewidth=1, label=f"copy speed: {number(floor)} µs")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.invert_yaxis()
    axes.set_xlabel(what)


def _step(axes: Any, data: Any, record: Record) -> None:
    bars = {label(record, key): times["device"] for key, times in data["contenders"].items()}
    each = record["conditions"]["bytes_per_parameter"]["ours"]
    _bars(axes, record, bars, _floor(record, each * data["parameters"]), "device µs per unsampled step")


def _fim(axes: Any, data: Any, record: Record) -> None:
    bars = {label(record, key): times["device"] for key, times in data["contenders"].items()}
    if isinstance(data["ours_captured"], dict):
        bars[f"{label(record, 'ours')}, CUDA graph"] = data["ours_captured"]
    _bars(axes, record, bars, _floor(record, data["bytes"]), "device µs for the factors of all layers")


def _iteration(axes: Any, data: Any, record: Record) -> None:
    tcovs = sorted({track["TCov"] for track in data["tracks"] if track["TCov"]})
    keys = list(dict.fromkeys(track["contender"] for track in data["tracks"] if track["TCov"]))
    width = 0.8 / max(1, len(keys))
    for place, key in enumerate(keys):
        found = {t["TCov"]: t["iteration"]["median"] / 1e3 for t in data["tracks"] if t["contender"] == key}
        xs = [x + (place - (len(keys) - 1) / 2) * width for x, TCov in enumerate(tcovs) if TCov in found]
        heights = [found[TCov] for TCov in tcovs if TCov in found]
        color = OURS if key == "ours" else SHADES[(place + 1) % len(SHADES)]
        bars = axes.bar(xs, heights, width, color=color, label=label(record, key))
        axes.bar_label(bars, fmt=number, fontsize=8, label_type="center", color="white" if key == "ours" else "black")
    styles = [":", "--", "-.", (0, (1, 4))]
    for style, track in zip(styles, (t for t in data["tracks"] if not t["TCov"]), strict=False):
        took = track["iteration"]["median"] / 1e3
        name = f"{label(record, track['contender'])}: {number(took)}"
        axes.axhline(took, color="#333333", linestyle=style, linewidth=1, label=name)
    axes.set_xticks(range(len(tcovs)), [f"TCov {TCov}" for TCov in tcovs])
    axes.set_ylabel("ms per iteration")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


PLOTS: dict[str, Callable[[Any, Any, Record], None]] = {"step": _step, "fim": _fim, "iteration": _iteration}
