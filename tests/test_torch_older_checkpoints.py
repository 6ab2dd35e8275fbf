"""Checkpoints that know nothing of some layers: of the public implementation, or of a version with fewer types."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_same,
    everything,
    loss_of,
    near,
    refused,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


def stored(optimizer: AdaFisher) -> Any:
    """The optimizer's state dict, through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def words(device: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(device)


def tokens(device: str, count: int) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randint(9, (6,), device=device) for _ in range(count)]


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_a_checkpoint_without_factors_for_newer_layers_is_taken_over(averaging: str, device: str) -> None:
    """Of the public implementation, or of a version that had none for them: they go on with F = 1, as they did."""
    first = run(AdaFisher(words(device), TCov=3, averaging=averaging), tokens(device, 2))
    checkpoint = stored(first)
    for key in ("H_D", "S_D"):
        checkpoint[key] = [checkpoint[key][1], checkpoint[key][3]]
    again = run(AdaFisher(words(device), TCov=3, averaging=averaging), tokens(device, 1))
    again.model.load_state_dict(first.model.state_dict())
    with pytest.warns(UserWarning, match="holds no factors for 0, 2, as it was made by the public") as caught:
        again.load_state_dict(checkpoint)
    assert [w.filename for w in caught] == [__file__]
    for name in ("1", "3"):
        assert all(torch.equal(a, b) for a, b in zip(again.factors()[name], first.factors()[name]))
    for name in ("0", "2"):
        assert all(torch.equal(F, torch.ones_like(F)) for F in again.factors()[name])
    old = everything(again)
    x = tokens(device, 1)[0]
    again.zero_grad()
    loss_of(again.model, x).backward()
    again.step()  # an unsampled one
    for name in ("0.weight", "2.weight"):
        p, state = again.model.get_parameter(name), again.state[again.model.get_parameter(name)]
        direction = state["exp_avg"].double() / (1 - 0.9 ** state["step"])
        near(p, old[name].double() - 1e-3 * direction / 1.001, name)
    run(again, tokens(device, 1))  # a sampled one
    assert not any(torch.equal(F, torch.ones_like(F)) for name in ("0", "2") for F in again.factors()[name])


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_a_checkpoint_of_another_number_of_layers_is_refused(kept: int, device: str) -> None:
    optimizer = run(AdaFisher(words(device), TCov=3), tokens(device, 2))
    checkpoint = stored(run(AdaFisher(words(device), TCov=3), tokens(device, 4)))
    for key in ("H_D", "S_D"):
        checkpoint[key] = (checkpoint[key] * 2)[:kept]
    with refused(optimizer, "load_state_dict", "H_D", "4 tensors, one for each layer"):
        optimizer.load_state_dict(checkpoint)


def test_all_layers_are_in_module_order(device: str) -> None:
    optimizer = run(AdaFisher(words(device), TCov=1), tokens(device, 1))
    checkpoint = stored(optimizer)
    assert [len(F) for F in checkpoint["H_D"]] == [9, 6, 2, 8]
    assert [len(F) for F in checkpoint["S_D"]] == [5, 7, 7, 3]
    again = AdaFisher(words(device), TCov=1)
    again.model.load_state_dict(optimizer.model.state_dict())
    again.load_state_dict(checkpoint)
    assert_same(again, optimizer)
