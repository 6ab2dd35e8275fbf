"""Factors of several ranks, on both backends: a group whose other rank has seen the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RAW
from torch import Tensor, distributed
from torch_cases import LAYERS, drawn
from torch_helpers import (  # noqa: F401
    assert_same,
    either_device,
    everything,
    kernels_device,
    loss_of,
    near,
    net,
    refused,
    run,
)

from cafin_cupy import CafinError
from cafin_cupy.adapters import torch_ranks, torch_reduced
from cafin_cupy.adapters.torch import AdaFisher


class Pair:
    """Two ranks with the same data."""

    sent = 0
    _device_types = torch.device("cpu"), torch.device("cuda")

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def all_reduce(self, x: Tensor, op: Any = distributed.ReduceOp.SUM, **options: Any) -> Pair:
        self.sent += 1
        if op == distributed.ReduceOp.SUM:
            x *= 2  # the lengths of sequences, too, which tests here keep equal
        return self

    def wait(self) -> None:
        pass


@pytest.fixture(name="pair")
def pair_of_ranks(monkeypatch: pytest.MonkeyPatch) -> Pair:
    pair = Pair()
    monkeypatch.setattr(torch_ranks, "group_of", lambda optimizer: None if optimizer._dist is False else pair)
    monkeypatch.setattr(torch_ranks, "_size", lambda group: 2)
    monkeypatch.setattr(torch_reduced.dist, "all_reduce", pair.all_reduce)
    return pair


@pytest.mark.parametrize("name", [name for name in LAYERS if "unbatched" not in name and "one row" not in name])
def test_two_ranks_are_one_with_twice_the_batch(name: str, device: str, pair: Pair) -> None:
    make, shape = LAYERS[name]
    if "layer norm" in name or "rms norm" in name:
        pytest.skip("lengths of sequences must not be added up; see rank_checks.py")
    torch.manual_seed(0)
    layer, x = make().to(device).eval(), drawn(make(), shape, device)
    s = torch.randn_like(layer(x))
    found = []
    for dist, times in ((None, 1), (False, 2)):
        optimizer = AdaFisher(torch.nn.Sequential(layer), TCov=1, averaging=RAW, dist=dist)
        for _ in range(times):
            (optimizer.model(x) * s).sum().div(times).backward()
        moments = optimizer._factors.raw(2.0)
        optimizer.step()
        optimizer.zero_grad()
        for got, factor, scale in zip(moments[0][1:], next(iter(optimizer.factors().values())), (1.0, 4.0)):
            near(got * scale, factor, f"raw moment of {name}")  # which a step without a scale averages
        found.append(next(iter(optimizer.factors().values())))
        layer.to(device)
    for letter, got, want in zip("HS", *found):
        near(got, want, f"{letter} of {name}")


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_many_steps(averaging: str, device: str, pair: Pair) -> None:
    """Memory of sums is used again and again; a step that is called off leaves nothing behind."""
    torch.manual_seed(1)
    batches = [torch.randn(6, 5, device=device) for _ in range(5)]
    options = {"TCov": 2, "averaging": averaging, "Lambda": 0.1}
    optimizer, alone = (AdaFisher(small(device), dist=dist, **options) for dist in (None, False))
    loss_of(optimizer.model, batches[0] + 1).backward()
    run(optimizer, batches)
    assert pair.sent == 1 + 3  # that they are alike, and three sampled steps
    assert_same(optimizer, everything(run(alone, [torch.cat([x, x]) for x in batches])), 1e-5)


def test_capture_is_refused(device: str, pair: Pair) -> None:
    optimizer = AdaFisher(net(device), TCov=1)
    with pytest.raises(CafinError, match="it must be captured on one rank"):
        optimizer._factors.hold()


@pytest.mark.parametrize("at", ["sending", "waiting"])
def test_an_error_of_the_collective_changes_nothing(
    at: str, device: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the step may be called again, where the other ranks are there again."""
    optimizer, alone = (AdaFisher(small(device), TCov=1, dist=dist) for dist in (None, False))
    x = torch.randn(6, 5, device=device)
    loss_of(optimizer.model, x).backward()

    def wait(self: Pair) -> None:
        raise RuntimeError("Connection closed by peer")

    def send(x: Tensor, **options: Any) -> Pair:
        if "async_op" in options:
            raise RuntimeError("Connection closed by peer")
        return pair.all_reduce(x, **options)

    with (
        monkeypatch.context() as patch,
        refused(optimizer, "step: the all-reduce of the factors' sums over 2 ranks failed", "Connection closed"),
    ):
        if at == "sending":
            patch.setattr(torch_reduced.dist, "all_reduce", send)
        else:
            patch.setattr(Pair, "wait", wait)
        optimizer.step()
    optimizer.step()
    assert_same(optimizer, everything(run(alone, [torch.cat([x, x])])), 1e-5)


def small(device: str) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device)
