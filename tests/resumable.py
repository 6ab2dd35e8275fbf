"""A training program that is killed and resumed: `python resumable.py JOBS`, a list in JSON (see `Job`).

It trains with a checkpoint every few steps, and dies by SIGKILL wherever the job says. The lives of a job follow each
other, each a process of its own; they are forked from one that has imported PyTorch and computed nothing.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import array_api_compat.torch  # noqa: F401  (once for all lives)
import torch
from torch import Tensor, nn

from cafin_cupy.adapters import torch as adapter

EVERY = 4  # steps between checkpoints: after sampled steps and after others
EPOCHS, BATCHES, BATCH = 3, 7, 6
STEPS = EPOCHS * BATCHES
PLACES = ("forward", "backward", "step", "half written", "written")  # in a step, where a process may die


class Job(NamedTuple):
    """What to train, and where to die.

    Attributes:
        kind: "AdaFisher" or "AdaFisherW".
        options: of the optimizer.
        device: "cpu" or "cuda".
        folder: where checkpoint and final state lie.
        deaths: (step, place) of each life; it dies when it first comes there. The last life ends well.
    """

    kind: str
    options: dict[str, Any]
    device: str
    folder: str
    deaths: list[tuple[int, str]]


class Net(nn.Module):
    """Convolution, both norms, dropout, linear; its dropout draws from the generator of its device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc, self.ln, self.drop = nn.Linear(6 * 5 * 5, 8), nn.LayerNorm(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(self.drop(torch.tanh(self.ln(self.fc(x.flatten(1))))))


class Run:
    """All that a checkpoint holds."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.device = job.device
        self.x = torch.randn(BATCHES * BATCH, 2, 5, 5).to(self.device)
        self.y = torch.randint(3, (BATCHES * BATCH,)).to(self.device)
        self.model = Net().to(self.device)
        self.optimizer = getattr(adapter, job.kind)(self.model, TCov=3, weight_decay=0.1, **job.options)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.generator = torch.Generator().manual_seed(1)  # shuffles the data
        self.order = list(range(BATCHES * BATCH))
        self.done = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generators": [self.generator.get_state(), torch.get_rng_state()],
            "cuda": torch.cuda.get_rng_state_all() if self.device == "cuda" else [],
            "order": self.order,
            "done": self.done,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generators"][0])
        torch.set_rng_state(state["generators"][1])
        torch.cuda.set_rng_state_all(state["cuda"])
        self.order, self.done = state["order"], state["done"]

    def batch(self) -> tuple[Tensor, Tensor]:
        place = self.done % BATCHES
        if place == 0:
            self.order = torch.randperm(len(self.order), generator=self.generator).tolist()
        chosen = self.order[place * BATCH : (place + 1) * BATCH]
        return self.x[chosen], self.y[chosen]


def live(job: Job, death: tuple[int, str] | None) -> None:
    """Train from the last checkpoint to the end, or to death."""
    run, folder = Run(job), Path(job.folder)

    def reached(place: str) -> None:
        if death is not None and run.done >= death[0] and place == death[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(file: Path) -> None:
        content = io.BytesIO()
        torch.save(run.state(), content)
        half = len(content.getvalue()) // 2
        with open(file.with_suffix(".new"), "wb") as new:
            new.write(content.getvalue()[:half])
            new.flush()
            reached("half written")
            new.write(content.getvalue()[half:])
        reached("written")
        os.replace(file.with_suffix(".new"), file)  # so the file is the old checkpoint or the new one

    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        run.load(torch.load(checkpoint, weights_only=True))
    with open(folder / "lives", "a") as lives:
        lives.write(f"{run.done}\n")
    while run.done < STEPS:
        x, y = run.batch()
        run.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run.model(x), y)
        reached("forward")
        loss.backward()
        reached("backward")
        run.optimizer.step()
        run.schedule.step()
        run.done += 1
        reached("step")
        if run.done % EVERY == 0:
            save(checkpoint)
    save(folder / "end.pt")


def born(job: Job, death: tuple[int, str] | None) -> int:
    """Lead one life in a process of its own; its exit code, or the negative number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            live(job, death)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for job in jobs:
        for death in [*job.deaths, None]:
            end = born(job, death)
            if end != (0 if death is None else -signal.SIGKILL):
                sys.exit(f"the life that was to end at {death} ended with {end}")


if __name__ == "__main__":
    main([Job(**job) for job in json.loads(sys.argv[1])])
