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
    """A Markdown table, the first column to the left, the others to the right."""
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


def preamble(record: Record) -> str:
    facts, conditions = record["environment"], record["conditions"]
    versions = ", ".join(f"{name} {facts[key]}" for key, name in VERSIONS.items() if facts.get(key))
    lines = [
        f"{facts['device']}; {versions}; {facts['date']}; commit {facts.get('commit') or 'unknown'}.",
        f"{conditions['model']}, batch {conditions['batch']}, {conditions['dtype']}, TF32 "
        f"{'on' if conditions['tf32'] else 'off'}, cuDNN benchmark {'on' if conditions['cudnn_benchmark'] else 'off'}; "
        f"{conditions['data']}; {conditions['order']}.",
    ]
    if conditions["mode"] != "full":
        lines.append(f"**A {conditions['mode']} run: few repeats{', small sizes' * (conditions['mode'] == 'smoke')}.**")
    lines.append("Medians, with the 20th to 80th percentile. *Device*: the host queues ahead, so its time is hidden; ")
    lines[-1] += "*back to back*: calls in a loop; *host*: what the call costs the host, the device not waited for."
    return "\n".join(lines)


def copy_table(data: Any, record: Record) -> str:
    rate, size = data["gigabytes_per_second"], data["bytes"] / MIB
    return f"{number(rate)} GB/s, read and written bytes together ({number(size)} MiB in {spread(data['time'])} µs)."


def _calls(data: Any, record: Record, what: str, moved: Callable[[str], float | None]) -> list[list[str]]:
    ours = data["contenders"].get("ours")
    memory, launches = (section_data(record, name).get("contenders", {}) for name in ("memory", "launches"))
    rows = []
    for key, times in data["contenders"].items():
        device = times["device"]["median"]
        used, ran = memory.get(key, {}).get(what), launches.get(key, {}).get(what)
        row = [label(record, key), spread(times["device"]), spread(times["streamed"]), spread(times.get("host"))]
        row += [share(record, moved(key), device), f"{ran['kernels']:,}" if ran else NONE]
        row += [f"{used['allocations']:,}", number(used["peak"] / MIB)] if used else [NONE, NONE]
        rows.append([*row, f"{device / ours['device']['median']:.2f}" if ours else NONE])
    return rows


CALL_HEAD = ["", "device µs", "back to back µs", "host µs", "of copy speed", "kernels", "allocations", "peak MiB"]


def step_table(data: Any, record: Record) -> str:
    each = record["conditions"]["bytes_per_parameter"]
    count = data["parameters"]
    rows = _calls(data, record, "step", lambda key: each[key] * count if each.get(key) else None)
    text = f"{count:,} parameters, unsampled steps.\n\n" + table([*CALL_HEAD, "times ours"], rows)
    moved = [
        f"{label(record, key)} {number(times['device']['median'])} and {number(times['host']['median'])}"
        for key, times in data.get("moved", {}).items()
        if "host" in times
    ]
    return text + (
        f"\n\nWith every gradient at a new address, device and host µs: {'; '.join(moved)}." if moved else ""
    )


def fim_table(data: Any, record: Record) -> str:
    rows = _calls(data, record, "fim", lambda key: data["bytes"] if key == "ours" else None)
    captured = data["ours_captured"]
    if isinstance(captured, dict):
        took = captured["median"]
        ratio = took / data["contenders"]["ours"]["device"]["median"]
        name = f"{label(record, 'ours')}, CUDA graph"
        rows.insert(1, [name, NONE, spread(captured), NONE, share(record, data["bytes"], took), NONE, NONE, NONE])
        rows[1].append(f"{ratio:.2f}")
    head = f"{data['layers']} layers, {number(data['bytes'] / MIB)} MiB of inputs and output gradients, each read once."
    return head + "\n\n" + table([*CALL_HEAD, "times ours"], rows)


def iteration_table(data: Any, record: Record) -> str:
    base = next((t["iteration"]["median"] for t in data["tracks"] if t["contender"] == "none"), None)
    rows = []
    for track in data["tracks"]:
        took = track["iteration"]
        more = number((took["median"] - base) / 1e3) if base and track["contender"] != "none" else NONE
        row = [label(record, track["contender"]), str(track["TCov"] or NONE), spread(took, 1e-3), more]
        rows.append([*row, spread(track.get("unsampled"), 1e-3), spread(track.get("sampled"), 1e-3)])
    return table(["", "TCov", "iteration ms", "more than none", "unsampled ms", "sampled ms"], rows)


def large_table(data: Any, record: Record) -> str:
    ours = data["contenders"].get("ours")
    each = record["conditions"]["bytes_per_parameter"]
    rows = []
    for key, times in data["contenders"].items():
        device = times["device"]["median"]
        moved = each[key] * data["parameters"] if each.get(key) else None
        ratio = f"{device / ours['device']['median']:.2f}" if ours else NONE
        rows.append([label(record, key), spread(times["device"], 1e-3), share(record, moved, device), ratio])
    return f"{data['parameters']:,} parameters.\n\n" + table(["", "device ms", "of copy speed", "times ours"], rows)


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
    "large": ("Step on large matrices", large_table),
    "memory": ("Memory", memory_table),
    "accuracy": ("Numerical error", accuracy_table),
}
