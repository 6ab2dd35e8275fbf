"""What is trained: a model with its batch and precision."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import models
from .contenders import LAYERS, Contender, Pairs


@dataclass(frozen=True)
class Workload:
    """A model and one batch for it, on one device. Parameters are float32.

    Attributes:
        name: what it is, for tables.
        origin: the model that all contenders start from.
        x, y: inputs and labels.
        autocast: True if the forward pass runs in bfloat16 where autocast allows it.
    """

    name: str
    origin: nn.Module
    x: Tensor
    y: Tensor
    autocast: bool = False

    @property
    def parameters(self) -> int:
        """Their number; a shared one counts once."""
        return sum(p.numel() for p in self.origin.parameters())

    def model(self) -> nn.Module:
        """A fresh copy of the model."""
        return copy.deepcopy(self.origin)

    def backward(self, model: nn.Module) -> Tensor:
        """Forward and backward pass over the batch; the loss."""
        return models.backward(model, self.x, self.y, self.autocast)

    def pairs(self) -> Pairs:
        """(h, s) of every layer with factors, of one pass, in the dtypes that training gives them."""
        return models.layer_pairs(self.model(), LAYERS, self.x, self.y, self.autocast)

    def ready(self, contender: Contender) -> torch.optim.Optimizer:
        """An optimizer of a fresh model, past its first step (the sampled one), with gradients present."""
        model = self.model()
        optimizer = contender.make(model)
        self.backward(model)
        for _ in range(3):
            optimizer.step()
        return optimizer


def resnet(batch: int, image: int, width: int, device: torch.device) -> Workload:
    """ResNet-18 for small images, float32."""
    model = models.resnet18(width=width).to(device)
    name = f"ResNet-18 for {image}x{image} images, width {width}"
    return Workload(name, model, *models.batch(batch, image, 10, device))


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of the blocks, and of what surrounds them: (vocabulary, context) of a text, (image, patch) of images."""

    batch: int
    depth: int
    width: int
    heads: int
    around: tuple[int, int]


GPT2 = TransformerSizes(8, 12, 768, 12, (50257, 1024))
VIT_B16 = TransformerSizes(64, 12, 768, 12, (224, 16))


def decoder(sizes: TransformerSizes, device: torch.device) -> Workload:
    """A language model of GPT-2's form on random tokens, bfloat16 autocast."""
    vocabulary, context = sizes.around
    with device:
        model = models.Decoder(sizes.depth, sizes.width, sizes.heads, vocabulary, context)
        x = torch.randint(vocabulary, (sizes.batch, context))
        y = torch.randint(vocabulary, (sizes.batch * context,))
    batch = f"batch {sizes.batch} x {context:,} tokens of {vocabulary:,}"
    return Workload(f"GPT-2, {_blocks(sizes)}, {batch}", model, x, y, autocast=True)


def vit(sizes: TransformerSizes, device: torch.device) -> Workload:
    """A vision transformer of ViT-B/16's form on random images, bfloat16 autocast."""
    image, patch = sizes.around
    with device:
        model = models.VisionTransformer(sizes.depth, sizes.width, sizes.heads, image, patch, classes=1000)
    name = f"ViT, {_blocks(sizes)}, batch {sizes.batch} of {image}x{image} images in {patch}x{patch} patches"
    return Workload(name, model, *models.batch(sizes.batch, image, 1000, device), autocast=True)


def _blocks(sizes: TransformerSizes) -> str:
    return f"{sizes.depth} layers, {sizes.width} wide, {sizes.heads} heads"
