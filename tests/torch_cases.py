"""PyTorch modules of every type that has factors, with the shape of an input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.1 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


def drawn(module: nn.Module, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """An input: numbers, or indices for an embedding."""
    if isinstance(module, nn.Embedding):
        return torch.randint(module.num_embeddings, shape, device=device)
    return torch.randn(shape, device=device)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear, sequence": (lambda: nn.Linear(5, 3), (2, 7, 5)),
    "linear, one row": (lambda: nn.Linear(5, 3), (5,)),
    "linear, long batch": (lambda: nn.Linear(7, 3), (4099, 7)),
    "conv1d of transformers": (lambda: Conv1D(3, 5), (2, 7, 5)),
    "conv1d of transformers, rows": (lambda: Conv1D(3, 5), (4, 5)),
    "embedding": (lambda: nn.Embedding(7, 3), (2, 5)),
    "embedding, one row": (lambda: nn.Embedding(7, 3), ()),
    "embedding, padding": (lambda: nn.Embedding(4, 3, padding_idx=-1), (5, 6)),
    "embedding, norm": (lambda: nn.Embedding(7, 3, max_norm=0.5), (2, 5)),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 7)),
    "conv, no bias, stride, padding": (lambda: nn.Conv2d(3, 4, (3, 2), (2, 3), (2, 1), bias=False), (2, 3, 9, 11)),
    "conv, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 6)),
    "conv, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 5, 6)),
    "conv, dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=(2, 3), padding=2), (2, 2, 9, 8)),
    "conv, 1x1 stride 2": (lambda: nn.Conv2d(3, 4, 1, stride=2), (2, 3, 7, 7)),
    "conv, rows never met": (lambda: nn.Conv2d(2, 3, 2, stride=3), (2, 2, 7, 7)),
    "conv, same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 6, 5)),
    "conv, same, even kernel": (lambda: nn.Conv2d(2, 3, (4, 2), padding="same"), (2, 2, 6, 5)),
    "conv, same, dilation": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 2)), (2, 2, 9, 8)),
    "conv, valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 6, 5)),
    "conv, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 2, 6, 5)),
    "conv, replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 2, 6, 5)),
    "conv, circular, same": (lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), (2, 2, 6, 5)),
    "conv, unbatched": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "conv, unbatched, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 5)),
    "conv 1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8)),
    "conv 1d, groups, stride, dilation": (
        lambda: nn.Conv1d(4, 6, 3, 2, 3, dilation=2, groups=2, bias=False),
        (3, 4, 11),
    ),
    "conv 1d, same, even kernel": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 2, 7)),
    "conv 1d, reflect": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 2, 6)),
    "conv 1d, unbatched": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 9)),
    "conv 3d": (lambda: nn.Conv3d(3, 4, (3, 2, 3)), (2, 3, 4, 5, 6)),
    "conv 3d, groups, stride, dilation": (
        lambda: nn.Conv3d(4, 2, 2, (1, 2, 3), (0, 1, 2), dilation=(2, 1, 2), groups=2),
        (2, 4, 5, 4, 6),
    ),
    "conv 3d, same, even kernel": (lambda: nn.Conv3d(2, 3, (2, 3, 4), padding="same"), (2, 2, 4, 3, 5)),
    "conv 3d, circular": (lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 4, 3, 5)),
    "conv 3d, unbatched": (lambda: nn.Conv3d(3, 4, 2), (3, 4, 3, 5)),
    "transposed conv 1d": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    "transposed conv 1d, stride, padding": (
        lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2, dilation=2),
        (3, 4, 5),
    ),
    "transposed conv 2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 4)),
    "transposed conv 2d, no bias, stride": (
        lambda: nn.ConvTranspose2d(3, 4, (2, 3), (3, 2), bias=False),
        (2, 3, 5, 4),
    ),
    "transposed conv 2d, groups, padding": (
        lambda: nn.ConvTranspose2d(4, 6, 3, (2, 3), (1, 2), (0, 1), groups=2),
        (2, 4, 5, 4),
    ),
    "transposed conv 2d, depthwise": (lambda: nn.ConvTranspose2d(3, 3, 2, groups=3), (2, 3, 5, 4)),
    "transposed conv 2d, unbatched": (lambda: nn.ConvTranspose2d(3, 4, 3), (3, 5, 4)),
    "transposed conv 3d": (lambda: nn.ConvTranspose3d(2, 4, (2, 1, 3), (1, 2, 2), groups=2), (2, 2, 3, 4, 3)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch norm 1d, sequence": (lambda: nn.BatchNorm1d(4), (3, 4, 7)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(4), (3, 4, 2, 5, 3)),
    "sync batch norm": (lambda: nn.SyncBatchNorm(4), (3, 4, 5, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 2)),
    "group norm, no pixels": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "group norm, four axes": (lambda: nn.GroupNorm(1, 4), (3, 4, 2, 1, 3, 2)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 7)),
    "instance norm 1d, unbatched": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 7)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 2)),
    "instance norm 2d, unbatched": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 2)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(4, affine=True), (3, 4, 2, 5, 2)),
    "instance norm 3d, unbatched": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 5, 2)),
    "rms norm": (lambda: nn.RMSNorm(6), (5, 6)),
    "rms norm, sequence": (lambda: nn.RMSNorm(6), (2, 5, 6)),
    "rms norm, shape of two": (lambda: nn.RMSNorm((4, 6)), (2, 3, 4, 6)),
    "rms norm, unbatched": (lambda: nn.RMSNorm(6), (6,)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 2)),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6)),
    "layer norm, sequence": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "layer norm, image": (lambda: nn.LayerNorm(6), (2, 3, 4, 6)),
    "layer norm, shape of two": (lambda: nn.LayerNorm((4, 6)), (2, 4, 6)),
    "layer norm, shape of three": (lambda: nn.LayerNorm((3, 4, 6)), (2, 3, 4, 6)),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), (2, 5, 6)),
    "layer norm, unbatched": (lambda: nn.LayerNorm(6), (6,)),
    "layer norm, unbatched, shape of two": (lambda: nn.LayerNorm((4, 6)), (4, 6)),
}
