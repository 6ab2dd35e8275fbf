"""Plots of a run: step, construction of the factors, iteration by TCov, growth."""

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


Plot = Callable[[Any, Any, Record], None]


def draw(record: Record, path: Path) -> list[Path]:
    """Write `<stem>-<section>.png` beside `path` for every section that has figures."""
    drawn = []
    for name, panels in _panels(record).items():
        size = (7.2, 3.2 * len(panels))
        figure, rows = pyplot.subplots(len(panels), figsize=size, layout="constrained", squeeze=False)
        try:
            for axes, (plot, data) in zip(rows[:, 0], panels, strict=True):
                plot(axes, data, record)
                axes.spines[["top", "right"]].set_visible(False)
            figure.text(1, 0, record["environment"]["device"], ha="right", va="bottom", fontsize=7, color="#6b7780")
            target = path.with_name(f"{path.stem}-{name}.png")
            figure.savefig(target, dpi=144)
        finally:
            pyplot.close(figure)
        drawn.append(target)
    return drawn


def _panels(record: Record) -> dict[str, list[tuple[Plot, Any]]]:
    """What there is to draw: for each section its plots, one below the other, and the figures of each."""
    of = {name: section_data(record, name) for name in (*PLOTS, "transformer", "vit", "growth")}
    wanted: dict[str, list[tuple[Plot, Any]]] = {name: [(plot, of[name])] for name, plot in PLOTS.items()}
    for name in ("transformer", "vit"):
        wanted[name] = [(PLOTS[part], of[name].get(part)) for part in ("step", "fim", "iteration")]
    growth = {"parameters": _parameters, "tensors": _tensors, "batch": _batch}
    wanted["growth"] = [(plot, of["growth"].get(part)) for part, plot in growth.items()]
    kinds = ("contenders", "tracks", "rows")
    found = {
        name: [(plot, data) for plot, data in plots if data and any(map(data.get, kinds))]
        for name, plots in wanted.items()
    }
    return {name: plots for name, plots in found.items() if plots}


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
    half = data.get("bf16") or {}
    if "times" in half:
        bars[f"{label(record, 'ours')}, bfloat16"] = half["times"]["device"]
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


def _line(axes: Any, xs: list[float], ys: list[float], key: str, name: str, dash: str = "-") -> None:
    color = {"ours": OURS, "copy": FLOOR, "sgd": SHADES[2], "adamw": SHADES[3]}.get(key, SHADES[1])
    axes.plot(xs, ys, dash, color=color, linewidth=2 if key == "ours" else 1.2, marker="o", markersize=3, label=name)


def _copy_line(axes: Any, record: Record, xs: list[float], moved: list[float]) -> None:
    floors = [_floor(record, size) for size in moved]
    if floors and floors[0] is not None:
        axes.plot(xs, floors, "--", color=FLOOR, linewidth=1, label="copy speed")


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _by_size(axes: Any, data: Any, record: Record, size: str, ways: dict[str, str]) -> None:
    """A line for each contender and way of timing a step, over the size; `ways` has the dash of each."""
    rows = [row for row in data["rows"] if row["contenders"]]
    for key in dict.fromkeys(key for row in rows for key in row["contenders"]):
        for way, dash in ways.items():
            own = [row for row in rows if way in row["contenders"].get(key, {})]
            name = label(record, key) + (f", {way}" if len(ways) > 1 else "")
            if own:
                ys = [row["contenders"][key][way]["median"] for row in own]
                _line(axes, [row[size] for row in own], ys, key, name, dash)
    each = record["conditions"]["bytes_per_parameter"]["ours"]
    _copy_line(axes, record, [row[size] for row in rows], [each * row["parameters"] for row in rows])


def _parameters(axes: Any, data: Any, record: Record) -> None:
    _by_size(axes, data, record, "parameters", {"device": "-"})
    _finish(axes, "parameters, in two matrices", "device µs per step")


def _tensors(axes: Any, data: Any, record: Record) -> None:
    _by_size(axes, data, record, "tensors", {"device": "-", "host": ":"})
    _finish(axes, "tensors of 1,024 elements", "µs per step")


def _batch(axes: Any, data: Any, record: Record) -> None:
    xs = [row["batch"] for row in data["rows"]]
    name = label(record, "ours") + (", CUDA graph" if data["captured"] else "")
    _line(axes, xs, [row["time"]["median"] for row in data["rows"]], "ours", name)
    _copy_line(axes, record, xs, [row["bytes"] for row in data["rows"]])
    _finish(axes, "batch of the ResNet", "µs for all factors")


PLOTS: dict[str, Plot] = {"step": _step, "fim": _fim, "iteration": _iteration, "graphs": _iteration}
