"""A run in one table, for the README."""

from __future__ import annotations

from typing import Any

from .tables import NONE, Record, label, median_of, number, ratio, section_data, table, track_median

MIB = 2**20
MODELS = {"transformer": "GPT-2", "vit": "ViT-B/16"}


def brief(record: Record, page: str, pictures: list[str]) -> str:
    """Step, factors, iteration and state of each contender; `page` links to all tables, `pictures` are links."""
    facts, conditions = record["environment"], record["conditions"]
    tf32, mode = "on" if conditions["tf32"] else "off", conditions["mode"]
    head = (
        f"{conditions['model']}, batch {conditions['batch']}, {conditions['dtype']}, TF32 {tf32}, on {facts['device']} "
        f"({facts['date'][:10]}{'' if mode == 'full' else f', a {mode} run'}); medians, all contenders in one run. "
        f"[All tables and conditions]({page})."
    )
    step, fim = section_data(record, "step"), section_data(record, "fim")
    memory = section_data(record, "memory").get("contenders", {})
    tracks = _tracks(section_data(record, "iteration"))
    rows = []
    for key in step.get("contenders", {}):
        took, factors = median_of(step, key, "streamed"), median_of(fim, key, "streamed")
        rows.append(
            [
                label(record, key),
                number(median_of(step, key, "device")),
                number(took),
                *(ratio(took, median_of(step, other, "streamed")) for other in ("sgd", "adamw")),
                number(median_of(step, key, "host")),
                number(factors / 1e3) if factors else NONE,
                _added(tracks, key),
                number(memory[key]["held"] / MIB) if "held" in memory.get(key, {}) else NONE,
            ]
        )
    columns = ["", "step, GPU µs", "in a loop µs", "times SGD", "times AdamW", "host µs"]
    parts = [head, table([*columns, "all factors ms", "added to an iteration ms", "state MiB"], rows)]
    note = (
        "*In a loop*: launched by the host one after the other. *Host*: what the call costs it. *Added*: over the same"
    )
    parts.append(f"{note} iteration without optimizer; for AdaFisher at TCov = {_tcovs(tracks)}.")
    parts += [f"![{name}]({link})" for link in pictures for name in [link.rpartition("-")[2].removesuffix(".png")]]
    more = (_captured_factors, _graphs, _models, _large, _first)
    return "\n\n".join([*parts, *(part for tell in more for part in tell(record))]) + "\n"


def _tracks(data: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(data.get("tracks", []), key=lambda track: -(track["TCov"] or 0))


def _tcovs(tracks: list[dict[str, Any]]) -> str:
    return ", ".join(map(str, dict.fromkeys(track["TCov"] for track in tracks if track["TCov"])))


def _added(tracks: list[dict[str, Any]], key: str) -> str:
    """What a contender adds to an iteration, for each TCov."""
    base = track_median(tracks, "none")
    if base is None:
        return NONE
    own = [track["iteration"]["median"] for track in tracks if track["contender"] == key]
    return ", ".join(number((median - base) / 1e3) for median in own) or NONE


def _milliseconds(tracks: list[dict[str, Any]], key: str) -> str:
    """A contender's iteration, for each TCov."""
    return (
        ", ".join(number(track["iteration"]["median"] / 1e3) for track in tracks if track["contender"] == key) or NONE
    )


def _captured_factors(record: Record) -> list[str]:
    """One sentence on the factors in a CUDA graph, in both precisions."""
    data = section_data(record, "fim")
    took = [data.get("ours_captured"), (data.get("bf16") or {}).get("captured")]
    if not all(isinstance(figure, dict) for figure in took):
        return []
    whole, half = (number(figure["median"] / 1e3) for figure in took if figure)
    return [f"In a CUDA graph all factors take {whole} ms, from inputs and output gradients in bfloat16 {half} ms."]


def _graphs(record: Record) -> list[str]:
    """One sentence on iterations in a CUDA graph."""
    tracks = _tracks(section_data(record, "graphs"))
    if track_median(tracks, "none") is None:
        return []
    there = {track["contender"]: track["TCov"] for track in tracks}
    took = [
        f"{label(record, key)} {_milliseconds(tracks, key)}" + (f" (TCov = {_tcovs(tracks)})" if there[key] else "")
        for key in ("none", *record["conditions"]["contenders"])
        if key in there
    ]
    return [f"The whole iteration in a CUDA graph, ms: {'; '.join(took)}."]


def _models(record: Record) -> list[str]:
    """Step, factors and iteration of the transformers."""
    found = {name: section_data(record, section) for section, name in MODELS.items() if section_data(record, section)}
    if not found:
        return []
    tracks = {name: _tracks(data.get("iteration") or {}) for name, data in found.items()}
    keys = ["none", *record["conditions"]["contenders"]]
    rows = []
    for key in keys:
        cells = [label(record, key)]
        for name, data in found.items():
            times = [median_of(data.get(part) or {}, key, "streamed") for part in ("step", "fim")]
            cells += [number(time / 1e3) if time else NONE for time in times] + [_milliseconds(tracks[name], key)]
        rows.append(cells)
    columns = [f"{name}: {what} ms" for name in found for what in ("step", "all factors", "iteration")]
    names = "; ".join(f"{data['model']} ({data['parameters'] / 1e6:.0f} M parameters)" for data in found.values())
    tcovs = ", ".join(dict.fromkeys(filter(None, map(_tcovs, tracks.values()))))
    return [
        f"In bfloat16 autocast: {names}. Step and factors in a loop; AdaFisher's iteration at TCov = {tcovs}.",
        table(["", *columns], rows),
    ]


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


def _first(record: Record) -> list[str]:
    """One sentence on the first step."""
    data = section_data(record, "first")
    if not {"cold", "warm"} <= set(data) or "optimizer" not in data["cold"]:  # PyTorch's own first time is in it
        return []
    cold, warm = (number(data[cache]["first"]) for cache in ("cold", "warm"))
    return [f"The first step of a process compiles the kernels: {cold} s, and {warm} s where CuPy's cache has them."]
