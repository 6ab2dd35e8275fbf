"""The networks that are timed: ResNet-18 for CIFAR, ResNet-50, transformers for text and images, a small one of every
layer type, stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pairs = dict[str, tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Basic residual block: two 3x3 convolutions and a shortcut, (B, c_in, H, W) -> (B, c_out, H/stride, W/stride)."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-18 with the CIFAR stem (3x3, no max-pool): 11,173,962 parameters.  Activations are out of place, so that
    implementations on full backward hooks run it too."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    c_in = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        c_out = width << stage
        layers += [Block(c_in, c_out, stride), Block(c_out, c_out, 1)]
        c_in = c_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions, (B, c_in, H, W) -> (B, 4 c, H/stride, W/stride)."""

    def __init__(self, c_in: int, c: int, stride: int):
        super().__init__()
        sizes = (c_in, c, 1, 1, 0), (c, c, 3, stride, 1), (c, 4 * c, 1, 1, 0)
        self.convs = nn.ModuleList(nn.Conv2d(*size, bias=False) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != 4 * c:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, 4 * c, 1, stride, bias=False), nn.BatchNorm2d(4 * c))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(F.relu(y) if number else y))
        return F.relu(y + self.shortcut(x))


def resnet50(classes: int = 1000, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """ResNet-50 with the ImageNet stem (7x7, max-pool): 25,557,032 parameters. `blocks`: of each stage."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    c_in = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(c_in, width << stage, 2 if stage and not number else 1))
            c_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))


class Tokens(nn.Module):
    """(B, C, H, W) -> (B, H * W, C): what a convolution hands to a transformer's layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class MeanOver(nn.Module):
    """Mean over one axis."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axis)


def mixed(classes: int = 10, width: int = 16) -> nn.Sequential:
    """A small network of 3-channel images with every layer type, with and without bias.  No convolution with a bias
    stands before a BatchNorm: its true gradient would be 0, and a relative error of it meaningless."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, groups=2),
        nn.GELU(),
        Tokens(),
        nn.LayerNorm(2 * width),
        nn.Linear(2 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, 2 * width, bias=False),
        MeanOver(1),
        nn.Linear(2 * width, classes),
    )


class Attention(nn.Module):
    """Self-attention, (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(2, (3, self.heads, -1))  # (B, T, 3, heads, width / heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def trunk(depth: int, width: int, heads: int, causal: bool) -> nn.Sequential:
    """`depth` blocks and the last LayerNorm."""
    return nn.Sequential(*(TransformerBlock(width, heads, causal) for _ in range(depth)), nn.LayerNorm(width))


class Decoder(nn.Module):
    """A GPT-2: tokens (B, context) -> logits (B * context, vocabulary). The head's weight is the token embedding."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, context: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.trunk = trunk(depth, width, heads, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.tokens(tokens) + self.positions)).flatten(0, 1)


class VisionTransformer(nn.Module):
    """A ViT: images (B, 3, image, image) -> logits (B, classes), read from the class token."""

    def __init__(self, depth: int, width: int, heads: int, image: int, patch: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2 + 1, width))
        self.trunk = trunk(depth, width, heads, causal=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.trunk(x)[:, 0])


def matrices(shapes: Sequence[tuple[int, int]], device: torch.device) -> nn.ModuleList:
    """A Linear layer without bias for each (rows, columns), made on `device`, with random gradients present."""
    with torch.device(device):
        stack = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)
    for p in stack.parameters():
        p.grad = torch.randn_like(p).mul_(0.01)
    return stack


def feed(stack: nn.ModuleList) -> None:
    """Forward and backward pass through every layer of `matrices`, which leaves their gradients alone: for the factors
    of a sampled step."""
    layers = [layer for layer in stack if isinstance(layer, nn.Linear)]
    inputs = [torch.randn(8, p.shape[1], device=p.device, requires_grad=True) for p in stack.parameters()]
    loss = torch.stack([layer(x).square().mean() for layer, x in zip(layers, inputs)]).sum()
    torch.autograd.grad(loss, inputs)


def batch(size: int, image: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images (size, 3, image, image) and labels (size,)."""
    return torch.randn(size, 3, image, image, device=device), torch.randint(classes, (size,), device=device)


def backward(model: nn.Module, x: Tensor, y: Tensor, autocast: bool = False) -> Tensor:
    """Forward and backward pass, the forward one in bfloat16 where autocast allows it; the loss."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def layer_pairs(
    model: nn.Module, types: tuple[type[nn.Module], ...], x: Tensor, y: Tensor, autocast: bool = False
) -> Pairs:
    """(h, s) of every layer of one forward and backward pass, copied with memory layout and dtype, by module name."""
    inputs: dict[str, Tensor] = {}
    pairs: Pairs = {}

    def watch(name: str):  # type: ignore[no-untyped-def]
        def keep_input(_: nn.Module, inputs_: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = inputs_[0].detach().clone()
            output.register_hook(keep_gradient)

        def keep_gradient(s: Tensor) -> None:
            pairs[name] = (inputs[name], s.detach().clone())

        return keep_input

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, types)]
    backward(model, x, y, autocast)
    for handle in handles:
        handle.remove()
    return {name: pairs[name] for name in inputs}
