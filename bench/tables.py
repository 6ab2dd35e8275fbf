"""The Markdown tables of a run, one function a section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
Table = Callable[[Any, Record], str]
MIB = 1 << 20
NONE = "–"
VERSIONS = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "cupy": "CuPy", "python": "Python"}


def number(value: float | None) -> str:
    """Three to four figures that matter, thousands apart."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(figure: dict[str, Any] | None, scale: float = 1.0) -> str:
    """`median (20th to 80th percentile)`."""
    if not isinstance(figure, dict):
        return NONE
    low, high = number(figure["p20"] * scale), number(figure["p80"] * scale)
    return f"{number(figure['median'] * scale)} ({low}–{high})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left, the others to the right; a column without any figure is left
    out."""
    kept = [k for k in range(len(head)) if not rows or k == 0 or any(row[k] != NONE for row in rows)]
    head, *rows = ([line[k] for k in kept] for line in (head, *rows))
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(record: Record, key: str) -> str:
    return "no optimizer" if key == "none" else record["conditions"]["contenders"].get(key, key)


def section_data(record: Record, name: str) -> dict[str, Any]:
    """The figures of a section, empty if it has none."""
    return (record["sections"].get(name) or {}).get("data") or {}


def share(record: Record, moved: float | None, time: float) -> str:
    """`moved` bytes in `time` us as a share of the copy speed of the same run."""
    speed = section_data(record, "copy").get("gigabytes_per_second")
    return f"{moved / (speed * 1e3) / time:.0%}" if speed and moved else NONE


def median_of(data: dict[str, Any], key: str, way: str) -> float | None:
    """The median of a contender's times in one way of timing; None where it has none."""
    figure = data.get("contenders", {}).get(key, {}).get(way)
    return figure["median"] if figure else None


def ratio(value: float | None, base: float | None, digits: int = 2) -> str:
    return f"{value / base:.{digits}f}" if value is not None and base else NONE


def preamble(record: Record) -> str:
    facts, conditions = record["environment"], record["conditions"]
    versions = ", ".join(f"{name} {facts[key]}" for key, name in VERSIONS.items() if facts.get(key))
    threads = conditions.get("threads")
    where = f"{facts['device']}{f', CPU threads: {threads}' if threads else ''}"
    lines = [
        f"{where}; {versions}; {facts['date']}; commit {facts.get('commit') or 'unknown'}.",
        f"{conditions['model']}, batch {conditions['batch']}, {conditions['dtype']}, TF32 "
        f"{'on' if conditions['tf32'] else 'off'}, cuDNN benchmark {'on' if conditions['cudnn_benchmark'] else 'off'}; "
        f"{conditions['data']}; {conditions['order']}.",
    ]
    if conditions["mode"] in ("quick", "smoke"):
        lines.append(f"**A {conditions['mode']} run: few repeats{', small sizes' * (conditions['mode'] == 'smoke')}.**")
    lines.append("Medians, with the 20th to 80th percentile")
    if threads:
        lines[-1] += "; all times are the wall clock's."
    else:
        lines[-1] += ". *Device*: the host queues ahead, so its time is hidden; *back to back*: calls in a loop; "
        lines[-1] += "*host*: what the call costs the host, the device not waited for."
    return "\n".join(lines)


def copy_table(data: Any, record: Record) -> str:
    rate, size = data["gigabytes_per_second"], data["bytes"] / MIB
    return f"{number(rate)} GB/s, read and written bytes together ({number(size)} MiB in {spread(data['time'])} µs)."


CALL_HEAD = ["", "device µs", "back to back µs", "host µs", "of copy speed"]
TAKEN_HEAD = ["kernels", "allocations", "peak MiB"]


def _call(name: str, times: dict[str, Any], moved: float | None, record: Record, base: float | None) -> list[str]:
    """A row under `CALL_HEAD` and "times ours"; without a time on the device that back to back takes its place."""
    time = (times.get("device") or times["streamed"])["median"]
    cells = [spread(times.get(way)) for way in ("device", "streamed", "host")]
    return [name, *cells, share(record, moved, time), ratio(time, base)]


def _taken(record: Record, what: str, key: str) -> list[str]:
    """What a call takes from the device, under `TAKEN_HEAD`."""
    memory, launches = (section_data(record, name).get("contenders", {}) for name in ("memory", "launches"))
    used, ran = memory.get(key, {}).get(what), launches.get(key, {}).get(what)
    kernels = f"{ran['kernels']:,}" if ran else NONE
    return [kernels, *([f"{used['allocations']:,}", number(used["peak"] / MIB)] if used else [NONE, NONE])]


def step_table(data: Any, record: Record, taken: bool = True) -> str:
    """`taken`: with the columns that the sections memory and launches fill, which know the ResNet alone."""
    each, count = record["conditions"]["bytes_per_parameter"], data["parameters"]
    base = median_of(data, "ours", "device")
    rows = []
    for key, times in data["contenders"].items():
        row = _call(label(record, key), times, each[key] * count if each.get(key) else None, record, base)
        rows.append(row[:-1] + (_taken(record, "step", key) if taken else []) + row[-1:])
    head = [*CALL_HEAD, *(TAKEN_HEAD if taken else []), "times ours"]
    text = f"{count:,} parameters, unsampled steps.\n\n" + table(head, rows)
    moved = [
        f"{label(record, key)} {number(times['device']['median'])} and {number(times['host']['median'])}"
        for key, times in data.get("moved", {}).items()
        if "host" in times
    ]
    return text + (
        f"\n\nWith every gradient at a new address, device and host µs: {'; '.join(moved)}." if moved else ""
    )


def fim_table(data: Any, record: Record, taken: bool = True) -> str:
    """`taken`: see `step_table`."""
    base, ours = median_of(data, "ours", "device"), label(record, "ours")
    half = data.get("bf16") or {}
    found = [(key, label(record, key), times, data["bytes"]) for key, times in data["contenders"].items()]
    more = [
        ("", f"{ours}, CUDA graph", _streamed(data["ours_captured"]), data["bytes"]),
        ("", f"{ours}, bfloat16", half.get("times"), half.get("bytes")),
        ("", f"{ours}, bfloat16, CUDA graph", _streamed(half.get("captured")), half.get("bytes")),
    ]
    place = 1 if "ours" in data["contenders"] else 0
    found[place:place] = [row for row in more if row[2]]
    rows = []
    for key, name, times, moved in found:
        row = _call(name, times, None if key not in ("", "ours") else moved, record, base)
        none = [NONE] * len(TAKEN_HEAD)
        rows.append(row[:-1] + ((_taken(record, "fim", key) if key else none) if taken else []) + row[-1:])
    kinds = data.get("dtypes", {})
    parts = ", ".join(f"{number(size / MIB)} {kind}" for kind, size in kinds.items()) if len(kinds) > 1 else ""
    head = f"{data['layers']} layers, {number(data['bytes'] / MIB)} MiB of inputs and output gradients"
    head += f"{f' ({parts})' if parts else ''}, each read once."
    text = head + "\n\n" + table([*CALL_HEAD, *(TAKEN_HEAD if taken else []), "times ours"], rows)
    less = half.get("of_float32", {})
    if "device" in less:
        graph = f", in a CUDA graph {less['captured']:.2f}" if "captured" in less else ""
        text += f"\n\nFrom bfloat16 ours takes {less['device']:.2f} of its time from float32{graph}."
    return text


def _streamed(figure: Any) -> dict[str, Any] | None:
    """The times of a replayed graph in the form of a call's; None where there are none."""
    return {"streamed": figure} if isinstance(figure, dict) else None


def track_median(tracks: list[dict[str, Any]], key: str, TCov: int | None = None) -> float | None:
    """The median iteration of a track in us; None where it is missing."""
    same = [track for track in tracks if track["contender"] == key and track["TCov"] == TCov]
    return same[0]["iteration"]["median"] if same else None


def _track(track: dict[str, Any], tracks: list[dict[str, Any]], record: Record) -> list[str]:
    """The cells under `TRACK_HEAD`."""
    took, key = track["iteration"]["median"], track["contender"]
    none, sgd = track_median(tracks, "none"), track_median(tracks, "sgd")
    more = number((took - none) / 1e3) if none and key != "none" else NONE
    times = [spread(track["iteration"], 1e-3), more, ratio(took, sgd, 3)]
    return [label(record, key), str(track["TCov"] or NONE), *times]


TRACK_HEAD = ["", "TCov", "iteration ms", "more than none", "times SGD"]


def iteration_table(data: Any, record: Record) -> str:
    rows = [
        [*_track(track, data["tracks"], record), *(spread(track.get(kind), 1e-3) for kind in ("unsampled", "sampled"))]
        for track in data["tracks"]
    ]
    note = "Sampled and unsampled iterations were timed apart; an iteration at a TCov is their weighted mean.\n\n"
    return note * bool(data.get("weighted")) + table([*TRACK_HEAD, "unsampled ms", "sampled ms"], rows)


def graphs_table(data: Any, record: Record) -> str:
    launched = section_data(record, "iteration").get("tracks", [])
    rows = []
    for track in data["tracks"]:
        one = track_median(launched, track["contender"], track["TCov"])
        rows.append([*_track(track, data["tracks"], record), number(one / 1e3) if one else NONE])
    head = "Forward, backward and step replayed from a CUDA graph; AdaFisher: from one of two, sampled or not."
    return head + "\n\n" + table([*TRACK_HEAD, "launched by the host ms"], rows)


def workload_table(data: Any, record: Record) -> str:
    """Step, factors and iteration of a transformer."""
    parts = [f"{data['model']}; bfloat16 autocast, float32 parameters."]
    for key, title, part in (
        ("step", "Step", lambda found: step_table(found, record, taken=False)),
        ("fim", "All factors", lambda found: fim_table(found, record, taken=False)),
        ("iteration", "Whole iteration", lambda found: iteration_table(found, record)),
    ):
        if data.get(key):
            parts.append(f"**{title}.** {part(data[key])}")
    return "\n\n".join(parts)


def large_table(data: Any, record: Record) -> str:
    each = record["conditions"]["bytes_per_parameter"]
    rows = []
    for key, times in data["contenders"].items():
        device = times["device"]["median"]
        moved = each[key] * data["parameters"] if each.get(key) else None
        cells = [spread(times["device"], 1e-3), share(record, moved, device)]
        rows.append([label(record, key), *cells, ratio(device, median_of(data, "ours", "device"))])
    return f"{data['parameters']:,} parameters.\n\n" + table(["", "device ms", "of copy speed", "times ours"], rows)


def growth_table(data: Any, record: Record) -> str:
    parts = []
    each = record["conditions"]["bytes_per_parameter"]
    ways = {"device": "device µs", "streamed": "back to back µs", "host": "host µs"}
    for what, title in (("parameters", "Two matrices"), ("tensors", "Tensors of 1,024 elements")):
        rows = []
        for row in data[what]["rows"]:
            for key, times in row["contenders"].items():
                cells = [number(times[way]["median"]) if way in times else NONE for way in ways]
                device, base = times["device"]["median"], median_of(row, "ours", "device")
                moved = share(record, each[key] * row["parameters"], device)
                rows.append([label(record, key), f"{row[what]:,}", *cells, moved, ratio(device, base)])
            rows += [[label(record, key), f"{row[what]:,}", why, *[NONE] * 4] for key, why in row["skipped"].items()]
        parts += [
            f"**{title}**, unsampled steps.",
            table(["", what, *ways.values(), "of copy speed", "times ours"], rows),
        ]
    checked = [row for row in data["parameters"]["rows"] if "error" in row]
    if checked:
        worst, most = max(row["error"] for row in checked), max(row["largest"] for row in checked)
        parts.append(
            f"Steps of ours agree with the rule in float64 within {worst:.1e}, in a tensor of {most:,} elements too."
        )
    rows = [
        [
            f"{row['batch']:,}",
            spread(row["time"]),
            number(row["bytes"] / MIB),
            share(record, row["bytes"], row["time"]["median"]),
        ]
        for row in data["batch"]["rows"]
    ]
    graph = ", CUDA graph" if data["batch"]["captured"] else ""
    parts.append(f"**All factors of the ResNet**, {label(record, 'ours')}{graph}.")
    return "\n\n".join([*parts, table(["batch", "µs", "MiB read", "of copy speed"], rows)])


def first_table(data: Any, record: Record) -> str:
    text = f"`import cafin_cupy` takes {spread(data['import'], 1e-3)} ms in a process that has imported NumPy."
    rows = []
    for cache in ("cold", "warm"):
        if cache in data:
            found = data[cache]
            apart = "optimizer" in found
            cells = [
                found["first"],
                *([found["optimizer"]] if apart else []),
                found["plain"],
                *found["imports"].values(),
            ]
            rows.append([f"{cache} kernel cache", *(number(value * 1e3) for value in cells)])
            names = [f"import {name} ms" for name in found["imports"]]
    if not rows:
        return text
    text += " A fresh process with a small model of every layer type, a single sample each; the first step with making"
    text += " the optimizer, forward and backward, less a plain iteration. PyTorch imports its compiler for the first"
    text += f" optimizer of a process, whatever it is: {'shown apart' if apart else 'in the first step here'}.\n\n"
    head = ["first step ms", *(["a process's first optimizer ms"] if apart else []), "plain iteration ms"]
    return text + table(["", *head, *names], rows)


def accuracy_table(data: Any, record: Record) -> str:
    groups = ["conv", "norm", "linear", "bias"]
    rows = []
    for key, errors in data["contenders"].items():
        for what, found in errors.items():
            cells = [f"{found[group]:.1e}" if group in found else NONE for group in groups]
            rows.append([label(record, key), what, *cells])
    head = f"Largest error after {data['steps']} float32 steps against float64, relative to the tensor's largest entry."
    return head + "\n\n" + table(["", "of", *groups], rows)


def memory_table(data: Any, record: Record) -> str:
    rows = []
    for key, found in data["contenders"].items():
        row = [label(record, key), number(found["held"] / MIB) if "held" in found else NONE]
        for what in ("unsampled iteration", "sampled iteration"):
            used = found.get(what)
            row += [number(used["peak"] / MIB), f"{used['allocations']:,}"] if used else [NONE, NONE]
        pool = max((used["cupy_pool_growth"] for used in found.values() if isinstance(used, dict)), default=0)
        rows.append([*row, number(pool / MIB)])
    columns = ["unsampled: peak MiB", "allocations", "sampled: peak MiB", "allocations", "CuPy pool growth MiB"]
    head = "Whole iterations. *State*: what the optimizer holds; the peaks come on top of it and of the model."
    return head + "\n\n" + table(["", "state MiB", *columns], rows)


TABLES: dict[str, tuple[str, Table]] = {
    "copy": ("Copy speed", copy_table),
    "step": ("Optimizer step", step_table),
    "fim": ("Construction of all factors", fim_table),
    "iteration": ("Whole iteration", iteration_table),
    "graphs": ("Whole iteration in a CUDA graph", graphs_table),
    "transformer": ("GPT-2", workload_table),
    "vit": ("Vision transformer", workload_table),
    "large": ("Step on large matrices", large_table),
    "growth": ("Growth", growth_table),
    "first": ("First step", first_table),
    "memory": ("Memory", memory_table),
    "accuracy": ("Numerical error", accuracy_table),
}
