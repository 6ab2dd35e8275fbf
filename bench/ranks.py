"""`torchrun --nproc-per-node=2 -m bench.ranks`: what several ranks cost, a GPU for each: steps and whole iterations in
`DistributedDataParallel` and `fully_shard` against fused AdamW, what is sent, and how much of a sampled step's sending
shows.

With `--device cpu` a smoke test at small sizes over gloo, with `--shared` one over NCCL on a GPU that all ranks share.
Writes a table and JSON into `bench/results`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cafin_cupy.adapters.torch import AdaFisher
from cafin_cupy.ranks import Ranks

from . import models
from .contenders import LEARNING_RATE, NEVER
from .environment import ROOT, environment, stem
from .tables import number, table
from .timing import Clock, summary

MIB, GIB = 1 << 20, 1 << 30
HEAD = ["", "step ms", "times AdamW", "iteration ms", "times AdamW"]
HEAD += ["sampled ms", "sampled, nothing sent, ms", "exposed ms"]
HEAD += ["sent MB", "sent, sampled, MB", "state MiB", "peak GiB"]


@dataclass(frozen=True)
class Sizes:
    """How much a run does.

    Attributes:
        images, side, width, blocks: images of each rank, their side, the width of the ResNet's first stage, and the
            blocks of each.
        texts, depth, wide, heads, vocabulary, context: of each rank, and of the transformer.
        rounds: blocks of each contender; every figure is a median over all.
        block, sampled, steps: unsampled and sampled iterations, and steps, in a block.
    """

    images: int = 64
    side: int = 224
    width: int = 64
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    texts: int = 4
    depth: int = 20
    wide: int = 2048
    heads: int = 16
    vocabulary: int = 50257
    context: int = 1024
    rounds: int = 5
    block: int = 4
    sampled: int = 3
    steps: int = 10


FULL = Sizes()
TINY = Sizes(2, 16, 4, (1, 1), 2, 1, 16, 2, 11, 6, rounds=1, block=1, sampled=1, steps=1)
Wrap = Callable[[nn.Module], nn.Module]
Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """A model, made anew for each contender, and the batch of a rank."""

    name: str
    model: Callable[[], nn.Module]
    blocks: type[nn.Module]  # what `fully_shard` takes one by one
    x: Tensor
    y: Tensor
    autocast: bool


def works(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Float32 parameters, random data; the transformer's forward in bfloat16 autocast."""
    images = models.batch(sizes.images, sizes.side, 1000, device)
    name = f"ResNet-50, width {sizes.width}, {sizes.images} images of {sizes.side}x{sizes.side} on each rank"
    yield Work(
        name,
        partial(models.resnet50, width=sizes.width, blocks=sizes.blocks),
        models.Bottleneck,
        *images,
        autocast=False,
    )
    tokens = torch.randint(sizes.vocabulary, (2, sizes.texts, sizes.context), device=device)
    shape = sizes.depth, sizes.wide, sizes.heads, sizes.vocabulary, sizes.context
    batch = f"{sizes.texts} x {sizes.context:,} tokens on each rank"
    name = f"Transformer, {sizes.depth} layers, {sizes.wide} wide, {batch}"
    model = partial(models.Decoder, *shape)
    yield Work(name, model, models.TransformerBlock, tokens[0], tokens[1].flatten(), autocast=True)


def contenders(work: Work, device: torch.device) -> list[tuple[str, str, Wrap, Make]]:
    """(wrapper, optimizer, how each is made)."""
    ids = [device.index] if device.type == "cuda" else None
    replicated = partial(DistributedDataParallel, device_ids=ids, gradient_as_bucket_view=True)

    def sharded(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, work.blocks):
                fully_shard(module)
        fully_shard(model)
        return model

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def zero(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)

    ours = partial(AdaFisher, lr=LEARNING_RATE, TCov=NEVER)
    return [
        ("DDP", "AdaFisher", replicated, ours),
        ("DDP", "AdaFisher(shard_state=True)", replicated, partial(ours, shard_state=True)),
        ("DDP", "AdamW(fused)", replicated, adamw),
        ("DDP", "ZeroRedundancyOptimizer(AdamW, fused)", replicated, zero),
        ("FSDP2", "AdaFisher", sharded, ours),
        ("FSDP2", "AdamW(fused)", sharded, adamw),
    ]


class Sent(TorchDispatchMode):
    """Counts what collectives hand over, whoever starts them.

    Attributes:
        bytes: that a rank sends, if each collective is a ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in RINGS:
            where, rounds = RINGS[func._opname]
            ranks = distributed.get_world_size()
            given = args[where] if isinstance(args[where], (list, tuple)) else [args[where]]
            self.bytes += rounds * (ranks - 1) / ranks * sum(x.nbytes for x in given)
        return func(*args, **(kwargs or {}))


# Of a collective: which argument holds the tensors of all ranks, and how often a ring passes them on.
RINGS = {"allreduce_": (0, 2), "_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1), "broadcast_": (0, 1)}


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Leave out the factors' all-reduce; those of the wrappers do not go by this function."""
    done = mock.Mock()
    with mock.patch.object(distributed, "all_reduce", lambda *_, **__: done):
        yield


class Track:
    """One contender in training."""

    def __init__(self, work: Work, wrap: Wrap, make: Make, clock: Clock):
        self.work, self.clock = work, clock
        before = self._allocated()
        torch.manual_seed(0)
        with clock.device:
            model = work.model()
        self.model = wrap(model)
        self.optimizer: Any = make(self.model)
        self.samples = isinstance(self.optimizer, AdaFisher)
        self.times: dict[str, list[float]] = {}
        for _ in range(4):  # wrappers rearrange themselves behind the first
            self.iterate()
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.sent = [self._sent(False), self._sent(True) if self.samples else None]
        self.peak = torch.cuda.max_memory_allocated() - before if clock.cuda else None
        self.state = state_bytes(self.optimizer)

    def _allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.clock.cuda else 0

    def _sent(self, sampled: bool) -> float:
        self._sample(sampled)
        with Sent() as sent:
            self.iterate()
        return sent.bytes

    def _sample(self, sampled: bool) -> None:
        if self.samples:
            self.optimizer.TCov = 1 if sampled else NEVER

    def backward(self) -> None:
        self.loss = models.backward(self.model, self.work.x, self.work.y, self.work.autocast)

    def iterate(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, sizes: Sizes) -> None:
        """One round of all figures."""
        self._sample(False)
        self._note("iteration", self.clock.each(self.iterate, sizes.block))
        self.backward()
        self.optimizer.step()
        self._note("step", [self.clock.streamed(self.optimizer.step, sizes.steps)])
        self.optimizer.zero_grad()
        if self.samples:
            self._sample(True)
            self._note("sampled", self.clock.each(self.iterate, sizes.sampled))
            with nothing_sent():
                self._note("silent", self.clock.each(self.iterate, sizes.sampled))

    def _note(self, name: str, times: list[float]) -> None:
        self.times.setdefault(name, []).extend(times)

    def figures(self) -> dict[str, Any]:
        """Of the slowest rank."""
        if not bool(torch.isfinite(self.loss)):
            raise ArithmeticError("bench: the loss is not finite after training")
        mine = {name: summary(times) for name, times in self.times.items()}
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, (mine, self.state, self.peak))
        slowest = {name: max((one[name] for one, *_ in every), key=lambda x: x["median"]) for name in mine}
        peaks = [peak for *_, peak in every if peak is not None]
        return {**slowest, "sent": self.sent, "state": max(s for _, s, _ in every), "peak": max(peaks, default=None)}


def state_bytes(optimizer: Any) -> int:
    """What an optimizer keeps on this rank beside parameters and gradients."""
    inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
    kept = [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor)]
    kept += [F for pair in inner.factors().values() for F in pair] if isinstance(inner, AdaFisher) else []
    return sum(getattr(x, "_local_tensor", x).nbytes for x in kept)


def measure(work: Work, sizes: Sizes, clock: Clock) -> dict[str, Any]:
    """All contenders of a workload, block by block in turn."""
    listed = contenders(work, clock.device)
    tracks = [Track(work, wrap, make, clock) for _, _, wrap, make in listed]
    for _ in range(sizes.rounds):
        for track in tracks:
            track.block(sizes)
    rows = [
        {"wrapper": wrapper, "optimizer": name, **track.figures()} for (wrapper, name, *_), track in zip(listed, tracks)
    ]
    parameters = sum(p.numel() for p in tracks[0].model.parameters())
    return {"name": work.name, "parameters": parameters, "autocast": work.autocast, "rows": rows}


def cells(row: dict[str, Any], adamw: dict[str, Any]) -> list[str]:
    """A line of the table; `adamw`: that of AdamW in the same wrapper."""

    def ms(name: str) -> float | None:
        return row[name]["median"] / 1e3 if name in row else None

    sampled, silent = ms("sampled"), ms("silent")
    figures = [f"{row['wrapper']}, {row['optimizer']}"]
    for name in ("step", "iteration"):
        figures += [number(ms(name)), f"{row[name]['median'] / adamw[name]['median']:.2f}"]
    exposed = None if sampled is None or silent is None else sampled - silent
    figures += map(number, (sampled, silent, exposed))
    figures += [number(None if sent is None else sent / 1e6) for sent in row["sent"]]
    return [*figures, number(row["state"] / MIB), number(row["peak"] and row["peak"] / GIB)]


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    facts, told = record["environment"], record["conditions"]
    names = ("driver", "cuda", "torch", "cupy", "python", "commit")
    versions = ", ".join(f"{name} {facts[name]}" for name in names if facts[name])
    lines = [
        f"# {told['ranks']} ranks, {facts['device']}, {facts['date'][:10]}",
        f"{versions}; backend {told['backend']}, NVLink multicast off. Medians over {told['rounds']} rounds, "
        "contenders in turn, of the slowest rank. *Step*: unsampled, with gradients at rest; with divided state it "
        "sends the parameters. *Iteration*: unsampled. *Sampled*: TCov = 1; *nothing sent*: without the factors' "
        "all-reduce, *exposed* the difference. *Sent*: counted by each rank in one iteration, as rings send it. "
        "*Peak*: of memory, beyond the other contenders'.",
    ]
    for work in record["workloads"]:
        adamw = {row["wrapper"]: row for row in work["rows"] if row["optimizer"] == "AdamW(fused)"}
        kind = "bfloat16 autocast" if work["autocast"] else "float32"
        lines.append(f"## {work['name']}\n\n{work['parameters']:,} parameters, {kind}.")
        lines.append(table(HEAD, [cells(row, adamw[row["wrapper"]]) for row in work["rows"]]))
    return "\n\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0: done; 2: nothing could run."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node=2 -m bench.ranks", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small sizes, a smoke test")
    parser.add_argument("--shared", action="store_true", help="all ranks on one GPU: small sizes, a smoke test")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    chosen = parser.parse_args(argv)
    if chosen.shared:
        # NCCL refuses ranks of one host that share a GPU. Those of several hosts speak through sockets.
        os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"] = f"host of rank {os.environ.get('RANK')}", "0"
    ranks = Ranks()
    if ranks.count < 2:
        print("bench.ranks: start it by `torchrun --nproc-per-node=2 -m bench.ranks`", file=sys.stderr)
        return 2
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = ranks.device(torch.device(chosen.device))
    cuda = device.type == "cuda"
    sizes = FULL if cuda and not chosen.shared else TINY
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", "AdaFisher: no factors")  # positions, which no layer owns
    with ranks:
        facts, clock = environment(device), Clock(device)
        told = {"ranks": ranks.count, "backend": distributed.get_backend(), "rounds": sizes.rounds, "tf32": False}
        record: dict[str, Any] = {"environment": facts, "conditions": told, "workloads": []}
        path = chosen.out / f"{stem(facts, 'ranks' if sizes is FULL else 'ranks-smoke')}.json"
        for work in works(sizes, device):
            record["workloads"].append(measure(work, sizes, clock))
            if ranks.first:  # after each, so that an end by force loses little
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(record, indent=1) + "\n")
                path.with_suffix(".md").write_text(page(record))
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        if ranks.first:
            print(f"results: {path}\n\n{page(record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
