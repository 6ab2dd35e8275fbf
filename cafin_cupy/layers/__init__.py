"""Layer descriptors: which arrays form a layer, and how its input and output gradient are read.

The FIM of a weight W (d_out, d_in) is E[g gᵀ], where g is the gradient that one sample gives. Every such gradient is a
sum over positions t of s_t[r] * x_t[c]: s the gradient of the loss with respect to what the weight's row r makes, x
what its column c reads. AdaFisher takes s and x for independent, positions for uncorrelated and alike, and keeps the
diagonal: the entry of W[r, c] is mean_t s_t[r]² times mean_t x_t[c]², a row vector times a column vector. Constant
factors go, as both are normalised. `H` is the one that comes from the layer's input, `S` the one that comes from its
output gradient; a bias is one more column, which reads 1. Each descriptor says what its positions, s and x are.

Shape letters: B batch, N rows (all dims but the last), C channels, T sequence, g groups, K columns of a convolution's
weight: channels of a group times kernel taps.
"""

from .base import Columns, Layer, Patches, Shape
from .convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .linear import Embedding, Linear, SummedLinear, TransposedLinear
from .norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, InstanceNorm, LayerNorm, RMSNorm, SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Columns",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "GroupNorm",
    "InstanceNorm",
    "Layer",
    "LayerNorm",
    "Linear",
    "Patches",
    "RMSNorm",
    "Shape",
    "SummedLinear",
    "SyncBatchNorm",
    "TransposedLinear",
]
