"""The parts of training, timed for one workload: steps, factors, whole iterations.  `section` names failures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .contenders import NEVER, Contender, Pairs
from .context import Run
from .sampling import Action, capture, mover, sampler, summaries
from .timing import Call, Clock, cycle, summary
from .workloads import Workload

APART = 4  # iterations per block where sampled and unsampled ones are timed apart


def steps(run: Run, section: str, work: Workload) -> dict[str, Any]:
    """`optimizer.step()` on unsampled steps, two models in turn: more memory than any cache holds."""
    actions: dict[str, Action] = {}
    moved: dict[str, Action] = {}  # the same with gradients at new addresses each time
    for contender in run.contenders:
        with run.guard(section, contender.key):
            optimizers = [work.ready(contender) for _ in range(2)]
            actions[contender.key] = sampler(run, cycle([one.step for one in optimizers]), run.sizes.inner)
            moved[contender.key] = sampler(run, optimizers[0].step, run.sizes.inner, mover(optimizers[0]))
    figures = summaries(run.interleave(section, actions, run.sizes.rounds))
    return {
        "parameters": work.parameters,
        "contenders": figures,
        "moved": summaries(run.interleave(section, moved, max(3, run.sizes.rounds // 2))),
    }


def factors(run: Run, section: str, work: Workload, bf16: bool = False) -> dict[str, Any]:
    """All factors of one sampled step from every layer's (h, s), gathered beforehand from one pass.  With `bf16` ours
    reads them once more, converted to bfloat16."""
    pairs = work.pairs()
    makers = {contender.key: contender for contender in run.contenders if contender.construct is not None}
    given = dict.fromkeys(makers, pairs)
    if bf16 and "ours" in makers:
        makers["bf16"] = makers["ours"]
        given["bf16"] = {name: (h.bfloat16(), s.bfloat16()) for name, (h, s) in pairs.items()}
    calls: dict[str, Call] = {}
    actions: dict[str, Action] = {}
    for name, contender in makers.items():
        with run.guard(section, name):
            assert contender.construct is not None
            call = contender.construct(contender.make(work.model()), given[name])
            for _ in range(3):
                call()
            calls[name], actions[name] = call, sampler(run, call, 1)
    figures = summaries(run.interleave(section, actions, run.sizes.rounds))
    graphs = captured(run, section, {name: calls[name] for name in figures if name in ("ours", "bf16")})
    half = figures.pop("bf16", None)
    data: dict[str, Any] = {
        "layers": len(pairs),
        "bytes": moved_bytes(pairs),
        "dtypes": _dtypes(pairs),
        "contenders": figures,
        "ours_captured": graphs.get("ours") if run.cuda else "not applicable",
    }
    if half is not None:
        old = {**figures.get("ours", {}), "captured": graphs.get("ours")}
        new = {**half, "captured": graphs.get("bf16")}
        data["bf16"] = {
            "bytes": moved_bytes(given["bf16"]),
            "times": half,
            "captured": new["captured"],
            "of_float32": {way: new[way]["median"] / old[way]["median"] for way in new if new[way] and old.get(way)},
        }
    return data


def moved_bytes(pairs: Pairs) -> int:
    """What a construction of the factors has to read."""
    return sum(h.nbytes + s.nbytes for h, s in pairs.values())


def _dtypes(pairs: Pairs) -> dict[str, int]:
    """Bytes of each dtype."""
    found: dict[str, int] = {}
    for pair in pairs.values():
        for x in pair:
            name = str(x.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + x.nbytes
    return found


def captured(run: Run, section: str, calls: dict[str, Call]) -> dict[str, Any]:
    """Time of each call replayed from a CUDA graph; empty on a CPU."""
    actions: dict[str, Any] = {}
    for name, call in calls.items() if run.cuda else ():
        with run.guard(section, f"{name}, captured"):
            replay = capture(call)
            replay()
            actions[name] = partial(run.clock.streamed, replay, 4)
    return {name: summary(times) for name, times in run.interleave(section, actions, run.sizes.rounds).items()}


def track_name(key: str, TCov: int | None) -> str:
    """What a track is called in failures."""
    return key if TCov is None else f"{key}, TCov {TCov}"


class Track:
    """Whole training iterations of one contender: forward, backward, step, zero_grad."""

    def __init__(self, work: Workload, contender: Contender | None, TCov: int | None, **options: Any):
        """`TCov`: None for a contender that does not sample; `options` of its construction."""
        self.work, self.TCov, self.count = work, TCov, 0
        self.key = contender.key if contender else "none"
        self.model = work.model()
        self.optimizer: Any = contender.make(self.model, TCov or NEVER, **options) if contender else None
        self.times: dict[bool, list[float]] = {True: [], False: []}  # of sampled and of other iterations
        for _ in range(3):
            self.iterate()

    def iterate(self) -> None:
        self.loss = self.work.backward(self.model)
        if self.optimizer is not None:
            self.optimizer.step()
        (self.optimizer or self.model).zero_grad(set_to_none=True)
        self.count += 1

    def block(self, clock: Clock, length: int) -> float:
        """The mean of `length` iterations."""
        first = self.count + 1  # one goes ahead
        times = clock.each(self.iterate, length)
        for number, time in enumerate(times, first):
            self.times[self.TCov is not None and number % self.TCov == 0].append(time)
        return sum(times) / length

    def check(self) -> None:
        """Raise ArithmeticError if training has diverged: its times would mean little."""
        if not bool(torch.isfinite(self.loss)):
            raise ArithmeticError("bench: the loss is not finite after training")


def tracks(run: Run, section: str, work: Workload, keys: list[str], tcovs: tuple[int, ...]) -> dict[str, Track]:
    """A track without optimizer, and one for each contender of `keys` and, if it samples, each TCov."""
    found: dict[str, Track] = {}
    for contender in (None, *(one for one in run.contenders if one.key in keys)):
        for TCov in tcovs if contender and contender.samples else (None,):
            name = track_name(contender.key if contender else "none", TCov)
            with run.guard(section, name):
                found[name] = Track(work, contender, TCov)
    return found


def iterations(run: Run, section: str, work: Workload) -> dict[str, Any]:
    """Whole iterations at each TCov, in blocks of whole cycles, against no optimizer and those without factors."""
    everyone = tracks(run, section, work, [contender.key for contender in run.contenders], run.tcovs)
    actions = {
        name: partial(track.block, run.clock, max(run.sizes.block, track.TCov or 1)) for name, track in everyone.items()
    }
    rows = []
    for name, means in run.interleave(section, actions, run.sizes.cycles).items():
        track = everyone[name]
        row = {"contender": track.key, "TCov": track.TCov, "iteration": summary(means)}
        if track.TCov is not None:
            row["sampled"], row["unsampled"] = (
                summary(track.times[k]) if track.times[k] else None for k in (True, False)
            )
        rows.append(row)
        with run.guard(section, name):
            track.check()
    return {"tracks": rows}


def iterations_apart(run: Run, section: str, work: Workload) -> dict[str, Any]:
    """Whole iterations, too long for blocks of whole cycles: sampled and unsampled ones are timed apart, and weighted
    as a TCov has them.  The eager optimizer is left out."""
    keys = [contender.key for contender in run.contenders if contender.key != "eager"]
    everyone = tracks(run, section, work, keys, (1, NEVER))
    actions = {name: partial(track.block, run.clock, APART) for name, track in everyone.items()}
    alive = run.interleave(section, actions, run.sizes.cycles)
    rows: list[dict[str, Any]] = []
    for name in alive:
        track = everyone[name]
        with run.guard(section, name):
            track.check()
        if track.TCov is None:
            rows.append({"contender": track.key, "TCov": None, "iteration": summary(track.times[False])})
        elif track.TCov == 1 and (other := track_name(track.key, NEVER)) in alive:
            sampled, unsampled = summary(track.times[True]), summary(everyone[other].times[False])
            rows += [
                {
                    "contender": track.key,
                    "TCov": TCov,
                    "iteration": weighted(sampled, unsampled, TCov),
                    "sampled": sampled,
                    "unsampled": unsampled,
                }
                for TCov in run.tcovs
            ]
    return {"weighted": True, "tracks": rows}


def weighted(sampled: dict[str, Any], unsampled: dict[str, Any], TCov: int) -> dict[str, Any]:
    """Summary of the mean iteration of which one in `TCov` is sampled, from the summaries of both kinds."""
    mean = {key: (sampled[key] + (TCov - 1) * unsampled[key]) / TCov for key in ("median", "min", "p20", "p80")}
    return {**mean, "samples": min(sampled["samples"], unsampled["samples"]), "unit": sampled["unit"]}
