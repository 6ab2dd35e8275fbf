"""Normalisation layers."""

from __future__ import annotations

import math
from typing import ClassVar

from ..errors import refuse
from .base import Columns, Layer, Shape


class Norm(Layer):
    """What the normalisation layers share. y = weight * n + bias, element by element, where n is the normalised input:
    a sample's gradient of an entry of the weight is the sum of s * n over the places that share the entry, and of the
    bias the sum of s. The paper takes h for n, as it is at hand. So squares are taken after the sums, `S` has a row for
    each entry, and `H` one column for the weight and one, which reads 1, for the bias; both are there with or without a
    bias, since normalisation compares them. Divided as the public implementation does:

        H = [sum_j u_j², length of u] / B²,  u_j = sum of h over all other axes / P²;    S = (sum of s)² / B

    where j is axis 1 of h, P the product of the axes behind it, and S sums over all that share an entry of the weight.
    """

    norm = True

    @property
    def H_size(self) -> int:
        return 2

    @property
    def H_units(self) -> int | None:
        return self.shape[0]

    def count(self, h: Shape, s: Shape) -> int:
        return h[0]

    def mean(self, count: int) -> tuple[float, float]:
        return 1.0 / count**2, 1.0 / count

    def bias_entry(self, count: int, units: int) -> float | None:
        return units / count**2


def _of_axis_1(h: Shape) -> Columns:
    """Sums over all other axes, divided by P²."""
    inner = math.prod(h[2:])
    return Columns(1, h[0], h[1], inner, 1, 1.0 / max(1, inner) ** 2)


class ChannelNorm(Norm):
    """A scale and a shift for each channel, whatever the statistics are taken over: `weight`, `bias` (C,); h and s
    (B, C, ...). In the formulas of `Norm` u and S belong to channels, and P counts pixels, 1 without axes of them."""

    pixels: ClassVar[tuple[str, ...]] = ()  # the axes behind C that h may have; any where none are given

    def _check(self, shape: Shape) -> None:
        self._ndim(shape, 1, "(C,)")

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        channels = self.shape[0]
        known = not self.pixels or len(h) - 2 in [each.count(",") for each in self.pixels]
        if len(h) < 2 or not known or h != s or h[1] != channels:
            shapes = " or ".join(f"(B, {channels}{each})" for each in self.pixels or (", ...",))
            self._refuse_shapes(where, f"have shape {shapes}", h, s)

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        return _of_axis_1(h), Columns(1, s[0], s[1], math.prod(s[2:]), 1)


class BatchNorm1d(ChannelNorm):
    """Batch normalisation of features (B, C) or sequences (B, C, L). `weight`, `bias` (C,). See `ChannelNorm`."""

    pixels = ("", ", L")


class BatchNorm2d(ChannelNorm):
    """Batch normalisation of images. `weight`, `bias` (C,); h and s (B, C, H, W). See `ChannelNorm`."""

    pixels = (", H, W",)


class BatchNorm3d(ChannelNorm):
    """Batch normalisation of volumes. `weight`, `bias` (C,); h and s (B, C, D, H, W). See `ChannelNorm`."""

    pixels = (", D, H, W",)


class SyncBatchNorm(ChannelNorm):
    """Batch normalisation over several processes, of images of any number of axes; the sums are this process's.
    `weight`, `bias` (C,); h and s (B, C, ...). See `ChannelNorm`."""


class GroupNorm(ChannelNorm):
    """Group normalisation: statistics of groups of channels, weight and bias of channels. `weight`, `bias` (C,); h and
    s (B, C, ...). See `ChannelNorm`."""


class InstanceNorm(ChannelNorm):
    """Instance normalisation: statistics of a channel in one sample. `weight`, `bias` (C,); h and s (B, C, ...). See
    `ChannelNorm`."""


class LayerNorm(Norm):
    """Layer normalisation. `weight`, `bias` of the normalised shape (...); h and s (B, [T, ...,] ...).

    In the formulas of `Norm` u belongs to axis 1 of h, which may be the sequence, and S to the entries of the
    weight."""

    def _check(self, shape: Shape) -> None:
        if not shape:
            refuse(type(self).__name__, "weight", "have at least one dimension", shape)

    @property
    def S_size(self) -> int:
        return math.prod(self.shape)

    @property
    def H_units(self) -> int | None:
        return None

    def check(self, h: Shape, s: Shape, where: str = "accumulate") -> None:
        if h != s or len(h) <= len(self.shape) or h[-len(self.shape) :] != self.shape:
            self._refuse_shapes(where, f"have shape (B, ..., {', '.join(map(str, self.shape))})", h, s)

    def columns(self, h: Shape, s: Shape) -> tuple[Columns, Columns]:
        lead = len(s) - len(self.shape)
        return _of_axis_1(h), Columns(lead, math.prod(s[:lead]), self.S_size, 1, 1)


class RMSNorm(LayerNorm):
    """Root mean square normalisation: a LayerNorm that subtracts no mean and adds no bias. `weight` of the normalised
    shape (...), `bias` None; h and s (B, [T, ...,] ...). `H` keeps its second entry, as that of every norm layer."""

    def _check(self, shape: Shape) -> None:
        super()._check(shape)
        if self.bias is not None:
            refuse("RMSNorm", "bias", "be None", f"shape {tuple(self.bias.shape)}", "describe the layer as a LayerNorm")
