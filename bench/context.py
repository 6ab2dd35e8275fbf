"""What one run shares: sizes, clock, contenders, and the list of what failed."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .contenders import Contender
from .timing import Clock
from .workloads import GPT2, VIT_B16, TransformerSizes, Workload, resnet


@dataclass(frozen=True)
class Sizes:
    """How much a run does.

    Attributes:
        batch, image, width: images per batch, their side, and the width of the ResNet's first stage.
        rounds: samples per figure.
        inner: steps per sample.
        cycles: blocks of iterations per contender and TCov.
        block: iterations per block, if TCov is not larger.
        text, vision: the transformers.
        large: number, rows and columns of the large matrices.
        parameters, tensors, batches: numbers of parameters, of tensors, and of images, over which costs are followed.
        copy: bytes of the copied array.
    """

    batch: int = 128
    image: int = 32
    width: int = 64
    rounds: int = 50
    inner: int = 10
    cycles: int = 5
    block: int = 20
    text: TransformerSizes = GPT2
    vision: TransformerSizes = VIT_B16
    large: tuple[int, int, int] = (6, 20480, 8192)
    parameters: tuple[int, ...] = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9, 4 * 10**9)
    tensors: tuple[int, ...] = (10, 100, 1000, 10000)
    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    copy: int = 1 << 31


FULL = Sizes()
QUICK = Sizes(rounds=15, cycles=2, block=10, parameters=FULL.parameters[:-2], tensors=FULL.tensors[:-1])
CPU = Sizes(
    rounds=5,
    inner=1,
    cycles=1,
    block=2,
    parameters=FULL.parameters[:4],
    tensors=FULL.tensors[:3],
    batches=FULL.batches[:3],
    copy=1 << 28,
)
SMOKE = Sizes(
    batch=4,
    image=8,
    width=4,
    rounds=3,
    inner=2,
    cycles=1,
    block=2,
    text=TransformerSizes(2, 1, 8, 2, (11, 6)),
    vision=TransformerSizes(2, 1, 8, 2, (8, 4)),
    large=(2, 64, 96),
    parameters=(1000, 10000),
    tensors=(2, 5),
    batches=(2, 4),
    copy=1 << 20,
)
TCOVS = (1, 10, 100)
SMOKE_TCOVS = (1, 2)


@dataclass
class Run:
    """One run on one device."""

    device: torch.device
    sizes: Sizes
    contenders: list[Contender]
    clock: Clock
    tcovs: tuple[int, ...] = TCOVS
    failures: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.work = self.resnet(self.sizes.batch)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def resnet(self, batch: int) -> Workload:
        """The ResNet on a batch of this size."""
        return resnet(batch, self.sizes.image, self.sizes.width, self.device)

    def free(self) -> float:
        """Bytes of device memory that are still to be had; infinite on a CPU, whose sizes are small."""
        if not self.cuda:
            return float("inf")
        self.release()
        return torch.cuda.mem_get_info(self.device)[0]

    @contextlib.contextmanager
    def guard(self, section: str, who: str = "") -> Iterator[None]:
        """Note what fails inside, and go on."""
        try:
            yield
        except Exception as error:  # whatever it is, the other figures are still wanted
            self.failures.append(
                {
                    "section": section,
                    "contender": who,
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": "".join(traceback.format_exception(error, limit=-4)),
                }
            )

    def interleave(self, section: str, actions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
        """What `rounds` rounds of all actions returned: each round makes every action once, so that a drift of the
        device meets all alike.  An action that fails is noted and left out from then on."""
        collected: dict[str, list[Any]] = {name: [] for name in actions}
        alive = dict(actions)
        for _ in range(rounds):
            for name in list(alive):
                before = len(self.failures)
                with self.guard(section, name):
                    collected[name].append(alive[name]())
                if len(self.failures) > before:
                    del alive[name], collected[name]
        return collected

    def release(self) -> None:
        """Give back what the last section held."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
