"""A run in one table, for the README."""

from __future__ import annotations

from typing import Any

from .tables import NONE, Record, label, number, section_data, table

MIB = 2**20


def brief(record: Record, page: str, pictures: list[str]) -> str:
    """Step, factors, iteration and state of each contender; `page` links to all tables, `pictures` are links."""
    facts, conditions = record["environment"], record["conditions"]
    tf32, mode = "on" if conditions["tf32"] else "off", conditions["mode"]
    head = (
        f"{conditions['model']}, batch {conditions['batch']}, {conditions['dtype']}, TF32 {tf32}, on {facts['device']} "
        f"({facts['date'][:10]}{'' if mode == 'full' else f', a {mode} run'}); medians, all contenders in one run. "
        f"[All tables and conditions]({page})."
    )
    step, fim, memory = (section_data(record, name).get("contenders", {}) for name in ("step", "fim", "memory"))
    rows = [
        [
            label(record, key),
            number(times["device"]["median"]),
            number(times["streamed"]["median"]),
            number(fim[key]["streamed"]["median"] / 1e3) if key in fim else NONE,
            _iterations(record, key),
            number(memory[key]["held"] / MIB) if "held" in memory.get(key, {}) else NONE,
        ]
        for key, times in step.items()
    ]
    columns = ["", "step, GPU µs", "step, in a loop µs", "all factors ms", "added to an iteration ms", "state MiB"]
    parts = [head, table(columns, rows)]
    note = "*In a loop*: launched by the host one after the other. *Added*: over the same iteration without optimizer"
    parts.append(f"{note}; for AdaFisher at TCov = {_tcovs(record)}.")
    parts += [f"![{name}]({link})" for link in pictures for name in [link.rpartition("-")[2].removesuffix(".png")]]
    return "\n\n".join([*parts, *_large(record)]) + "\n"


def _tracks(record: Record) -> list[dict[str, Any]]:
    tracks: list[dict[str, Any]] = section_data(record, "iteration").get("tracks", [])
    return sorted(tracks, key=lambda track: -(track["TCov"] or 0))


def _tcovs(record: Record) -> str:
    return ", ".join(map(str, dict.fromkeys(track["TCov"] for track in _tracks(record) if track["TCov"])))


def _iterations(record: Record, key: str) -> str:
    """What a contender adds to an iteration, for each TCov."""
    base = next((track["iteration"]["median"] for track in _tracks(record) if track["contender"] == "none"), None)
    if base is None:
        return NONE
    own = [track["iteration"]["median"] for track in _tracks(record) if track["contender"] == key]
    return ", ".join(number((median - base) / 1e3) for median in own) or NONE


def _large(record: Record) -> list[str]:
    """One sentence on the step of a large model."""
    data = section_data(record, "large")
    times = {key: found["device"]["median"] / 1e3 for key, found in data.get("contenders", {}).items()}
    if "ours" not in times:
        return []
    others = ", ".join(f"{label(record, key)} {number(took)} ms" for key, took in times.items() if key != "ours")
    return [
        f"A step of {data['parameters'] / 1e9:.2f} B parameters takes {number(times['ours'])} ms of GPU time; {others}."
    ]
