"""The processes that train one model together, as `torchrun` starts them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .errors import refuse


class Ranks:
    """This process among those of a run; the only one where `torchrun` has not started it. Within the context they
    can reach each other.

    Attributes:
        rank, count: number of this process, and how many there are.
    """

    def __init__(self) -> None:
        launched = distributed.is_available() and distributed.is_torchelastic_launched()
        self.rank, self.count, self._local = (
            int(os.environ[name]) if launched else alone
            for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        self._backend = "gloo"

    @property
    def first(self) -> bool:
        """True of the one that prints and saves."""
        return self.rank == 0

    def device(self, kind: torch.device) -> torch.device:
        """A GPU of its own for each process of this machine."""
        if kind.type == "cpu" or self.count == 1:
            return kind
        if self._local >= torch.cuda.device_count():
            got, mend = f"{torch.cuda.device_count()} of them", "start fewer processes, or pass --device cpu"
            refuse("train", "device", f"be a GPU for each process, {self._local + 1} or more", got, mend)
        torch.cuda.set_device(self._local)
        self._backend = "nccl"
        return torch.device("cuda", self._local)

    def __enter__(self) -> Ranks:
        if self.count > 1:
            distributed.init_process_group(self._backend)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.count > 1:
            distributed.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, whose gradients are averaged over the ranks. Its BatchNorm sees the whole batch on GPUs; on CPUs,
        where PyTorch has none that does, each rank's own share."""
        if self.count == 1:
            return model
        if next(model.parameters()).is_cuda:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(model)

    def share(self, batch: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return batch[self.rank :: self.count]

    def weight(self, batch: Tensor) -> float:
        """What the mean loss of the share is multiplied by, so that the average over ranks is the mean of the batch."""
        return self.count * len(self.share(batch)) / len(batch)

    def average(self, x: Tensor) -> Tensor:
        """The mean over ranks."""
        if self.count > 1:
            distributed.all_reduce(x)
        return x / self.count
