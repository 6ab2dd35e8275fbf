"""One process plays all ranks of a wrapper that lays parameters flat, as DeepSpeed's ZeRO does in stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_helpers import near

from cafin_cupy.adapters.torch import AdaFisher


@dataclass
class Address:
    start: int
    numel: int


@dataclass
class Link:
    """Where a rank's elements of a parameter are, in it and in the rank's flat copy."""

    lp_fragment_address: Address
    hp_fragment_address: Address
    hp_fragment: Tensor | None


def one_behind_the_other(params: Sequence[Tensor]) -> Tensor:
    """Move parameters into one memory, which is returned."""
    whole = torch.cat([p.detach().flatten() for p in params])
    for p, part in zip(params, whole.split([p.numel() for p in params])):
        p.data = part.view(p.shape)
    return whole


class Rank:
    """What a wrapper does on one rank, but for the sending: flat copies of the elements from `first` to `last - 1` of
    each group, one behind the other, behind which there may be padding."""

    def __init__(self, optimizer: AdaFisher, bounds: Sequence[tuple[int, int]]) -> None:
        self.optimizer, self.model = optimizer, optimizer.model
        self.params: list[list[Tensor]] = []
        self.bounds = bounds
        for group, (first, last) in zip(self.groups, bounds):
            params = [p for p in group["params"] if p.requires_grad]
            whole = one_behind_the_other(params)
            flat = nn.functional.pad(whole, (0, max(0, last - len(whole))))[first:last]
            group["params"] = [flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True).requires_grad_()]
            self.params.append(params)
        self.link()

    def link(self) -> None:
        for params, (first, last), group in zip(self.params, self.bounds, self.groups):
            start = 0
            for p in params:
                a, b = max(start, first), min(start + p.numel(), last)
                flat = group["params"][0]
                p._hp_mapping = (  # type: ignore[attr-defined]
                    Link(Address(a - start, b - a), Address(a - first, b - a), flat[a - first : b - first])
                    if a < b
                    else None
                )
                start += p.numel()

    @property
    def groups(self) -> list[Any]:
        return self.optimizer.param_groups

    @property
    def flats(self) -> list[Tensor]:
        return [group["params"][0] for group in self.groups]

    def feed(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Gradients of the model, and their flat copies."""
        self.model.zero_grad()
        loss(self.model).backward()
        for params, flat, (first, last) in zip(self.params, self.flats, self.bounds):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            whole = torch.cat([g.flatten() for g in grads]).to(flat.dtype)
            flat.grad = nn.functional.pad(whole, (0, max(0, last - len(whole))))[first:last].clone()

    def step(self, at_once: bool = True) -> None:
        if at_once:
            self.optimizer.step()
            return
        groups = self.groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            self.optimizer.param_groups = groups

    @torch.no_grad()
    def receive(self, ranks: Sequence[Rank]) -> None:
        """Write the flat copies of all ranks into the model."""
        for number, params in enumerate(self.params):
            whole = torch.cat([rank.flats[number].detach() for rank in ranks])
            for p, part in zip(params, whole.split([p.numel() for p in params] + [_rest(whole, params)])):
                p.copy_(part.view(p.shape))

    def momentum(self, number: int) -> Tensor:
        average: Tensor = self.optimizer.state[self.flats[number]]["exp_avg"]
        return average


def _rest(whole: Tensor, params: Sequence[Tensor]) -> int:
    return len(whole) - sum(p.numel() for p in params)


def laid_flat(make: Callable[[], AdaFisher], cuts: Sequence[Sequence[int]], pad: int = 0) -> list[Rank]:
    """All ranks: of each group, rank r has the elements from `cuts[r - 1]` to `cuts[r] - 1`, and the last one the rest
    with padding."""
    ranks = []
    for number in range(len(cuts[0]) + 1):
        optimizer = make()
        sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in optimizer.param_groups]
        edges = [[0, *each, size + pad] for each, size in zip(cuts, sizes)]
        ranks.append(Rank(optimizer, [(each[number], each[number + 1]) for each in edges]))
    return ranks


def train(ranks: Sequence[Rank], losses: Sequence[Callable[[nn.Module], Tensor]], at_once: bool = True) -> None:
    for loss in losses:
        for rank in ranks:
            rank.feed(loss)
            rank.step(at_once)
        for rank in ranks:
            rank.receive(ranks)


def assert_whole(ranks: Sequence[Rank], plain: Any, tolerance: float = 0.0) -> None:
    """All ranks together have the bits of an optimizer of whole parameters; of momentum within a `tolerance`."""
    names = {id(p): name for name, p in plain.model.named_parameters()}
    for rank in ranks:
        assert rank.optimizer.steps == plain.steps
        for (name, p), mine in zip(plain.model.named_parameters(), rank.model.parameters()):
            assert torch.equal(p, mine), name
        for name, pair in plain.factors().items():
            assert all(map(torch.equal, pair, rank.optimizer.factors()[name])), name
        assert all(rank.optimizer.state[flat]["step"] == plain.steps for flat in rank.flats)
    for number, group in enumerate(plain.param_groups):
        params = [p for p in group["params"] if p.requires_grad]
        whole = torch.cat([rank.momentum(number) for rank in ranks])
        for p, part in zip(params, whole.split([p.numel() for p in params] + [_rest(whole, params)])):
            near(part, plain.state[p]["exp_avg"].flatten(), f"momentum of {names[id(p)]}", tolerance)
        assert not whole[sum(p.numel() for p in params) :].any(), "padding"
