"""What the layers of a model read and what gradients they get: what the PyTorch optimizer must get to see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .calls import Machine
from .checks import exact
from .expected import Geometry, Part
from .torch_models import described, seen


class Watched(Machine):
    """Attributes:
    layers: each with its weight and bias; places: of a module's layer, by the module's id; names: by its name;
        matrices: by the weight's id, of attentions, which call no modules.
    pending: of each layer, the (h, s) of the coming sampled step.
    """

    model: Any
    samples: bool

    def find_layers(self) -> None:
        """Look at the model anew; drops what is pending."""
        self.layers: list[tuple[Geometry, Any, Any]] = []
        self.places: dict[int, int] = {}
        self.names: dict[str, int] = {}
        self.matrices: dict[int, int] = {}
        attentions = [m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)]
        lent = {id(module) for each in attentions for module in (each, each.out_proj)}
        for module, (name, layer, weight, bias) in described(self.model):
            same = [k for k, (_, w, b) in enumerate(self.layers) if w is weight and b is bias]
            if not same:
                self.layers.append((layer, weight, bias))
            self.names[name] = same[0] if same else len(self.layers) - 1
            if id(module) in lent:
                self.matrices[id(weight)] = self.names[name]
            else:
                self.places[id(module)] = self.names[name]
        self.forget()
        self.hooks = [m.register_forward_hook(self._forward) for m in self.model.modules() if id(m) in self.places]

    def forget(self) -> None:
        """As an optimizer that drops its sums."""
        self.pending: list[list[Any]] = [[] for _ in self.layers]

    def _forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Hook of each layer: what the optimizer must get to see."""
        self._expect(self.places[id(module)], seen(module, args[0]), output)

    def _expect(self, place: int, h: Tensor, output: Tensor, *part: int) -> None:
        trains = any(p is not None and p.requires_grad for p in self.layers[place][1:])
        if not (self.samples and trains and self.model.training and torch.is_grad_enabled() and output.requires_grad):
            return
        read = exact(h)

        def backward(s: Tensor) -> None:
            if self.samples and s.numel() and h.numel():
                pair = read, exact(s)
                self.pending[place].append(Part(*pair, *part) if part else pair)

        output.register_hook(backward)

    @contextmanager
    def _products(self) -> Iterator[None]:
        """What attentions multiply: their function calls `linear`, PyTorch's own or one that calls that."""
        linear, rows = nn.functional.linear, 0

        def product(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            nonlocal rows
            out, base = linear(h, weight, bias), weight._base
            if id(weight) in self.matrices:
                self._expect(self.matrices[id(weight)], h, out)
            elif base is not None and id(base) in self.matrices:
                first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
                rows = rows if first else math.prod(h.shape[:-1])
                self._expect(self.matrices[id(base)], h, out, first, rows)
            return out

        nn.functional.linear = product
        try:
            yield
        finally:
            nn.functional.linear = linear
