"""Tensor parallel training: `parallel_checks.py` on two and four processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RAW
from ranks import launch
from torch import Tensor
from torch_helpers import DEVICES, either_device, kernels_device, near  # noqa: F401

from cafin_cupy import Linear, TransposedLinear
from cafin_cupy.adapters import torch_parallel
from cafin_cupy.adapters.torch_parallel import Place
from cafin_cupy.adapters.torch_reduced import ReducedFactors
from cafin_cupy.arrays import view
from cafin_cupy.backend import choose_for_all
from cafin_cupy.factors import make_factors
from cafin_cupy.layers import Layer


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_all_ranks(ranks: int, on: str, tmp_path: Path) -> None:
    """One launch for all checks, each of which has a name of its own in the message."""
    found = launch(ranks, tmp_path, "parallel_checks", on=on)
    failed = {name: said for name, said in found.items() if said}
    assert len(found) > 2 and not failed, "\n".join(f"{name}, {said}" for name, said in failed.items())


class Team:
    """A group of one rank; a team of two is played by two objects."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def played(monkeypatch: pytest.MonkeyPatch, layer: Layer, calls: list[Any]) -> tuple[Tensor, Tensor, int]:
    """The sum of what two ranks contribute, each of which has made its `calls`: (h, s, descriptor, place)."""
    found, at = [], view(layer.weight).device
    for rank in range(2):
        monkeypatch.setattr(torch_parallel.dist, "get_rank", lambda rank=rank: rank)
        own = make_factors([layer], RAW, choose_for_all(None, {at}, {"float32"}, "AdaFisher"), {at})
        factors = ReducedFactors(own, Team(), 1.0, torch_parallel.Team((0, 1)))
        for h, s, part, place in calls[rank]:
            factors.place(0, place)
            factors.accumulate(0, h, s, part)
        found.append(factors._seen()[0])
    return found[0].H + found[1].H, found[0].S + found[1].S, found[0].n + found[1].n


def test_shares_of_a_team_are_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both backends: layers of parts of the features, and what all ranks have, in calls of different places."""
    torch.manual_seed(0)
    for layer in (Linear(torch.ones(7, 5, device=device)), TransposedLinear(torch.ones(5, 7, device=device))):
        h, s = torch.randn(2, 6, 5, device=device), torch.randn(2, 6, 7, device=device)
        part = torch_parallel._part
        columns = [
            (h[0], s[0][:, :4].contiguous(), part(layer, 5, 4), Place(0, 0, 4, (True, True, True))),
            (h[0], s[0][:, 4:].contiguous(), part(layer, 5, 3), Place(0, 4, 3, (False, True, False))),
        ]
        rows = [
            (h[1][:, :3].contiguous(), s[1], part(layer, 3, 7), Place(0, 0, 7, (True, True, True))),
            (h[1][:, 3:].contiguous(), s[1], part(layer, 2, 7), Place(3, 0, 7, (True, False, False))),
        ]
        whole = [(h[0], s[0], None, None)] * 2
        calls = [list(each) for each in zip(columns, rows, whole)]
        H, S, n = played(monkeypatch, layer, calls)
        near(H, (2 * h[0].square() + h[1].square()).sum(0), "H")
        near(S, (2 * s[0].square() + s[1].square()).sum(0), "S")
        assert n == 18
