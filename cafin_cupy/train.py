"""`python -m cafin_cupy train`: a small residual network on handwritten digits, to see the optimizer at work.

The same seed on the same machine gives the same numbers, however many cores it has to spare.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from . import checkpoint, digits, rule, runtime
from .backend import requested
from .clock import Clock
from .errors import refuse
from .ranks import Ranks
from .recorder import Recorder
from .training import DEFAULTS, Epoch, check, draw

CHECK_EVERY = 20  # steps, after which ranks make sure that they agree


@dataclass(frozen=True)
class Settings:
    """What to train and how. None takes the default of the optimizer (`DEFAULTS`).

    Raises:
        CafinError: a value is out of range, the device is missing, or `output`, `checkpoint` or `factors` cannot
            be a file.
    """

    optimizer: str = "adafisher"
    device: str = "auto"
    backend: str | None = None
    epochs: int = 12
    batch_size: int = 64
    lr: float | None = None
    Lambda: float | None = None
    TCov: int | None = None
    gamma: float | None = None
    averaging: str | None = None
    weight_decay: float | None = None
    seed: int = 0
    output: Path = Path("training.png")
    checkpoint: Path | None = None
    factors: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("backend", "Lambda", "TCov", "gamma", "averaging", "factors"):
            if not self.adafisher and getattr(self, name) is not None:
                refuse("train", name, "be given for AdaFisher alone", f"one for {self.optimizer}", "leave it out")
        if self.adafisher:
            object.__setattr__(self, "gamma", rule.DEFAULT_GAMMA if self.gamma is None else self.gamma)
            object.__setattr__(self, "averaging", self.averaging or "parity")
        key = (self.optimizer, self.averaging or "")
        if key not in DEFAULTS:
            refuse("train", "optimizer, averaging", f"be one of {sorted(DEFAULTS)}", key)
        for name, value in DEFAULTS[key].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.device == "cuda" and not torch.cuda.is_available():
            refuse("train", "device", "be a GPU that PyTorch sees", "none", "`python -m cafin_cupy doctor` tells why")
        check(self)

    @property
    def adafisher(self) -> bool:
        return self.optimizer.startswith("adafisher")

    @property
    def decisive(self) -> dict[str, Any]:
        """Those that decide what is trained, and how."""
        aside = ("device", "backend", "output", "checkpoint", "factors", "quiet")
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in aside}

    @property
    def where(self) -> torch.device:
        """The device that `device` stands for."""
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Result:
    """Everything the program reports.

    Attributes:
        epochs: one entry for each.
        backend: which backend ran, and why.
        step_seconds: median of a whole step: forward, backward, update.
        update_seconds: median of `optimizer.step()` alone, on steps that refresh no factors.
        factor_seconds: what a step that refreshes factors takes longer; None where all steps do, or none.
        seconds: the whole run.
        recorder: the factors over the steps of this run, if they were asked for.
    """

    epochs: list[Epoch]
    backend: str
    step_seconds: float
    update_seconds: float
    factor_seconds: float | None
    seconds: float
    recorder: Recorder | None = None

    @property
    def accuracy(self) -> float:
        return self.epochs[-1].test_accuracy


def build_optimizer(settings: Settings, model: nn.Module) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer, and one sentence on the backend that it will use."""
    if settings.optimizer == "adamw":
        adamw = torch.optim.AdamW(model.parameters(), settings.lr or 0.0, weight_decay=settings.weight_decay or 0.0)
        return adamw, "PyTorch's own AdamW"
    if settings.optimizer == "sgd":
        sgd = torch.optim.SGD(model.parameters(), settings.lr or 0.0, 0.9, weight_decay=settings.weight_decay or 0.0)
        return sgd, "PyTorch's own SGD, momentum 0.9"
    from .adapters.torch import AdaFisher, AdaFisherW

    kind = AdaFisher if settings.optimizer == "adafisher" else AdaFisherW
    optimizer = kind(
        model,
        lr=settings.lr,
        Lambda=settings.Lambda,
        gamma=settings.gamma,
        TCov=settings.TCov,
        weight_decay=settings.weight_decay,
        averaging=settings.averaging,
        backend=settings.backend,
        check_every=CHECK_EVERY if isinstance(model, nn.parallel.DistributedDataParallel) else None,
    )
    return optimizer, f"{optimizer.backend}: {_why(settings, str(optimizer.backend))}"


def _why(settings: Settings, backend: str) -> str:
    if requested(settings.backend, "train"):
        return f"asked for by {'--backend' if settings.backend else 'the environment variable CAFIN_BACKEND'}"
    if backend == "cuda":
        return f"fused kernels on {torch.cuda.get_device_name()}"
    if settings.where.type == "cpu":
        return "the network is on the CPU" + ("" if settings.device == "cpu" else ", PyTorch sees no GPU")
    return runtime.cuda_problem() or "the kernels do not compile here"


class Stopwatch:
    """Marks between the parts of each step."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.plain: list[tuple[Any, Any, Any]] = []
        self.sampled: list[tuple[Any, Any, Any]] = []

    def medians(self, steps: list[tuple[Any, Any, Any]]) -> tuple[float, float]:
        """Median seconds of the whole step and of its update."""
        self.clock.wait()
        whole = [self.clock.between(start, end) for start, _, end in steps]
        update = [self.clock.between(middle, end) for _, middle, end in steps]
        return median(whole), median(update)


def train(settings: Settings) -> Result:
    """Train as `settings` say; prints one line for each epoch unless quiet. Draws nothing.

    With a checkpoint all is saved there after each epoch; if the file exists, the run goes on from it. Started by
    `torchrun`, the processes share each batch, and the first of them prints and saves.

    Raises:
        CafinError: the checkpoint is not of an unfinished run with these settings.
    """
    ranks = Ranks()
    rule.whole("train", "batch_size", settings.batch_size, 2 * ranks.count)  # see BatchNorm above, on each rank
    device = ranks.device(settings.where)
    with ranks:
        return _train(settings, ranks, device)


def _train(settings: Settings, ranks: Ranks, device: torch.device) -> Result:
    began = time.perf_counter()
    quiet = settings.quiet or not ranks.first
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    x, y, x_test, y_test = digits.load(device)
    model = digits.Network().to(device)
    replica = ranks.wrap(model)
    optimizer, backend = build_optimizer(settings, replica)
    recorder = Recorder(optimizer) if settings.factors is not None and ranks.first else None
    watch = Stopwatch(device)
    if not quiet:
        several = f"; {ranks.count} ranks" if ranks.count > 1 else ""
        print(f"{settings.optimizer} on {device}; backend {backend}{several}")
    batches = len(x) // settings.batch_size or 1
    steps = settings.epochs * batches
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    epochs, seconds = _resumed(settings, parts, generator, quiet)
    began -= seconds
    done = len(epochs) * batches
    bar = tqdm(total=steps, initial=done, unit="step", leave=False, disable=True if quiet else None)
    with bar, torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for epoch in range(len(epochs), settings.epochs):
            start = time.perf_counter()
            bar.set_description(f"epoch {epoch + 1}/{settings.epochs}")
            model.train()
            loss_sum, right = torch.zeros((), device=device), torch.zeros((), device=device)
            order = torch.randperm(len(x), generator=generator).to(device)
            for batch in order[: batches * settings.batch_size].chunk(batches):
                images, labels = ranks.share(digits.shifted(x[batch], generator)), ranks.share(y[batch])
                loss, logits = _step(replica, optimizer, watch, images, labels, ranks.weight(batch))
                if recorder is not None:
                    recorder.record()
                schedule.step()
                loss_sum += loss
                right += (logits.argmax(1) == labels).sum()
                bar.update()
            seen = min(len(x), batches * settings.batch_size)
            sums = ranks.average(torch.stack([loss_sum, right])).tolist()
            line = Epoch(
                sums[0] / batches,
                sums[1] * ranks.count / seen,
                accuracy(model, x_test, y_test),
                time.perf_counter() - start,
            )
            epochs.append(line)
            if ranks.first:
                _save(settings, parts, generator, epochs, time.perf_counter() - began)
            if not quiet:
                tqdm.write(line.line(epoch + 1))
    return _result(epochs, backend, watch, time.perf_counter() - began, recorder)


def _save(
    settings: Settings, parts: dict[str, Any], generator: torch.Generator, epochs: list[Epoch], seconds: float
) -> None:
    if settings.checkpoint is not None:
        content = {
            "settings": settings.decisive,
            "epochs": [astuple(epoch) for epoch in epochs],
            "seconds": seconds,
            "generator": generator.get_state(),
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
        checkpoint.save(settings.checkpoint, content)


def _resumed(
    settings: Settings, parts: dict[str, Any], generator: torch.Generator, quiet: bool
) -> tuple[list[Epoch], float]:
    """The epochs and seconds behind us, all parts set to where they ended; nothing and 0 without a checkpoint."""
    file = settings.checkpoint
    if file is None or not file.exists():
        return [], 0.0
    saved = checkpoint.load(file, settings.decisive)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    generator.set_state(saved["generator"])
    if not quiet:
        print(f"goes on after epoch {len(saved['epochs'])}, as {file} has it")
    return [Epoch(*numbers) for numbers in saved["epochs"]], saved["seconds"]


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: Stopwatch,
    images: torch.Tensor,
    labels: torch.Tensor,
    weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sampled = bool(getattr(optimizer, "samples", False))
    optimizer.zero_grad()
    start = watch.clock.mark()
    logits = model(images)
    loss = functional.cross_entropy(logits, labels) * weight
    loss.backward()
    middle = watch.clock.mark()
    optimizer.step()
    (watch.sampled if sampled else watch.plain).append((start, middle, watch.clock.mark()))
    return loss.detach(), logits.detach()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of right answers, in evaluation mode."""
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


def _result(epochs: list[Epoch], backend: str, watch: Stopwatch, seconds: float, recorder: Recorder | None) -> Result:
    step, update = watch.medians(watch.plain or watch.sampled)
    factors = watch.medians(watch.sampled)[0] - step if watch.plain and watch.sampled else None
    return Result(epochs, backend, step, update, factors, seconds, recorder)


def report(settings: Settings) -> int:
    """Train, draw, and print the summary; returns the exit code. PyTorch is held to one CPU thread.

    More would hardly help so small a network, wait for each other on a busy machine, and change the order of sums.
    """
    torch.set_num_threads(1)
    result = train(settings)
    if not Ranks().first:
        return 0
    draw(settings.output, result.epochs, f"{settings.optimizer}, {settings.where.type}, seed {settings.seed}")
    clock = "CUDA events" if settings.where.type == "cuda" else "perf_counter"
    share = result.update_seconds / result.step_seconds
    print(f"test accuracy {result.accuracy:.2%} after {len(result.epochs)} epochs, {result.seconds:.1f} s in all")
    print(
        f"optimizer.step() {1e3 * result.update_seconds:.2f} ms of a {1e3 * result.step_seconds:.2f} ms step: "
        f"{share:.0%} (median, {clock})"
    )
    if result.factor_seconds is not None:
        print(f"factors: {1e3 * result.factor_seconds:+.2f} ms on one step in {settings.TCov}, forward to update")
    print(f"curves in {settings.output}")
    if settings.factors is not None and result.recorder is not None:
        result.recorder.draw(settings.factors, title=f"{settings.optimizer}, {settings.averaging} averaging, digits")
        print(f"factors over the steps in {settings.factors}")
    return 0
