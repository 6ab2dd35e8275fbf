"""AdaFisher as an ordinary PyTorch optimizer: the unfused baseline, and the float64 oracle of the error figures.

The arithmetic is the parity rule of `cafin_cupy.reference`.  The form is the usual one: hooks keep sums of every
layer's input h and output gradient s, patches are unfolded, each stage is a kernel of its own, and a loop walks the
parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)


class Eager(torch.optim.Optimizer):
    """AdaFisher (`decoupled=True`: AdaFisherW) of a model's Linear, Conv2d, BatchNorm2d and LayerNorm layers.

    `step()` changes the parameters in place, on the current stream.  One forward and backward pass, or several, may
    precede it; only sampled steps (every TCov-th, the first one included) look at h and s.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        beta: float = 0.9,
        Lambda: float = 1e-3,
        gamma: float = 0.8,
        TCov: int = 100,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ):
        defaults = {"lr": lr, "beta": beta, "Lambda": Lambda, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__([p for p in model.parameters() if p.requires_grad], defaults)
        self.steps, self.gamma, self.TCov = 0, gamma, TCov
        self.layers: dict[str, Any] = {}
        self.sums: dict[str, list[Any]] = {}
        self.averages: dict[str, tuple[Tensor, Tensor]] = {}
        self.owners: dict[Tensor, tuple[str, bool]] = {}
        for name, module in model.named_modules():
            if isinstance(module, LAYERS) and module.weight is not None:
                self._track(name, module)

    def _track(self, name: str, module: Any) -> None:
        self.layers[name] = module
        self.owners[module.weight] = (name, False)
        if module.bias is not None:
            self.owners[module.bias] = (name, True)
        module.register_forward_hook(lambda _, inputs, output: self._watch(name, inputs[0], output))

    def _watch(self, name: str, h: Tensor, output: Tensor) -> None:
        if self.samples and output.requires_grad:
            h = h.detach()
            output.register_hook(lambda s: self.construct(name, h, s))

    @property
    def samples(self) -> bool:
        """True if the next step samples."""
        return self.steps % self.TCov == 0

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(H, S) of every layer that has been sampled, by module name."""
        return dict(self.averages)

    @torch.no_grad()
    def construct(self, name: str, h: Tensor, s: Tensor) -> None:
        """Add one pass of layer `name`, input h and output gradient s, to the sums of this step."""
        new = layer_sums(self.layers[name], h, s)
        old = self.sums.get(name)
        self.sums[name] = list(new) if old is None else [a + b for a, b in zip(old, new, strict=True)]

    @torch.no_grad()
    def update_factors(self) -> None:
        """End a sampled step: normalise what `construct` gathered, and move the averages by it."""
        for name, (h, s, count) in self.sums.items():
            H, S = layer_moments(self.layers[name], h, s, count)
            old = self.averages.get(name, (torch.ones_like(H), torch.ones_like(S)))
            self.averages[name] = (average(old[0], H, self.gamma), average(old[1], S, self.gamma))
        self.sums.clear()

    def preconditioner(self, p: Tensor, Lambda: float) -> Tensor | None:
        """The whole matrix S ⊗ H + Lambda in the shape of p, or None where no factors belong to p."""
        name, is_bias = self.owners.get(p, ("", False))
        if name not in self.averages:
            return None
        H, S = self.averages[name]
        row = H[-1:] if is_bias else H[: p.numel() // S.numel()]
        return (torch.outer(S, row) + Lambda).view(p.shape)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        """One update of every parameter that has a gradient."""
        if self.samples:
            self.update_factors()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        self.steps += 1

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p))
        state["step"] += 1
        decay, decoupled = group["weight_decay"], group["decoupled"]
        grad = p.grad + decay * p if decay and not decoupled else p.grad
        m = state["exp_avg"].mul_(group["beta"]).add_(grad, alpha=1 - group["beta"])
        direction = m / (1 - group["beta"] ** state["step"])
        fisher = self.preconditioner(p, group["Lambda"])
        if fisher is not None:
            direction = direction / fisher
        if decay and decoupled:
            direction = direction + decay * p
        p.sub_(group["lr"] * direction)


def layer_sums(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor, int]:
    """Sums over one pass that add up over passes: of h, of s, and the count that the mean divides by."""
    if isinstance(module, nn.Linear):
        h, s = h.reshape(-1, h.shape[-1]), s.reshape(-1, s.shape[-1])
        return _sum(h.square(), 0), _sum(s.square(), 0), len(h)
    if isinstance(module, nn.Conv2d):
        if isinstance(module.padding, str) or module.padding_mode != "zeros":
            raise ValueError(f"Eager: `padding` of a Conv2d must be numbers of zeros, got {module.padding!r}")
        patches = F.unfold(h, module.kernel_size, module.dilation, module.padding, module.stride)
        patches = patches.view(len(h), module.groups, -1, patches.shape[-1])
        return _sum(patches.square(), (0, 1, 3)), _sum(s.square(), (0, 2, 3)), len(h) * patches.shape[-1]
    if isinstance(module, nn.BatchNorm2d):
        return _sum(h, (0, 2, 3)) / h[0, 0].numel() ** 2, _sum(s, (0, 2, 3)), len(h)
    others = [axis for axis in range(h.dim()) if axis != 1]
    return _sum(h, others) / h[0, 0].numel() ** 2, _sum(s.reshape(-1, module.weight.numel()), 0), len(h)


def _sum(x: Tensor, axes: int | list[int] | tuple[int, ...]) -> Tensor:
    """Sum that half precision, as autocast leaves it, enters as it is and leaves in float32."""
    return x.sum(axes, dtype=torch.promote_types(x.dtype, torch.float32))


def layer_moments(module: Any, h: Tensor, s: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The raw moments H (with one more entry for a bias) and S of one step, from its sums."""
    if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):  # their two entries are there without a bias too
        return F.pad(h.square().sum().reshape(1) / count**2, (0, 1), value=len(h) / count**2), s.square() / count
    H, one = (h / count, 1.0) if isinstance(module, nn.Linear) else (h / (count * len(h)), module.groups / len(h))
    return (H if module.bias is None else F.pad(H, (0, 1), value=one)), s / count


def average(old: Tensor, raw: Tensor, gamma: float) -> Tensor:
    """The moving average, moved by the min-max normalised raw moment."""
    raw = torch.nan_to_num(raw, nan=torch.nan, posinf=1.0, neginf=0.0)
    normal = (raw - raw.min()) / (raw.max() - raw.min() + 1e-6)
    return 0.1 * gamma * old + 0.01 * gamma * normal
