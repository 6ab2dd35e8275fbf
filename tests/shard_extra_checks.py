"""Checks of what needs more than a rank's own part of sharded parameters, run on every rank by `ranks.py`."""

from __future__ import annotations

import torch
from rank_checks import WHOLE
from shard_checks import assert_law, sharded, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from cafin_cupy.adapters.torch import AdaFisher


class Attending(nn.Module):
    """To itself, and to what has another width."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(6, 2, batch_first=True)
        self.other = nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x, x, x, need_weights=False)[0]
        return self.other(x, x[..., :4], x[..., 2:], need_weights=False)[0]


def check_attention(rank: int, ranks: int) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Attending().double()

    torch.manual_seed(3)
    batches = list(torch.randn(3, WHOLE, 5, 6, dtype=torch.float64))
    alone = train(AdaFisher(made(), TCov=1, dist=False), batches, 0, 1)
    for wrap in (fully_shard, sharded):
        optimizer = train(AdaFisher(wrap(made()), TCov=1), batches, rank, ranks)
        assert_law(optimizer, alone)
