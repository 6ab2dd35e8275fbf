"""Whether tensors are still what they were: every trait counts, what lies in them does not."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from cafin_cupy.unchanged import Unchanged


@pytest.mark.parametrize("guards", [True, False], ids=["by torch's guards", "in Python"])
def test_unchanged_notices_every_trait(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)  # as in a torch without them
    square, other = torch.ones(4, 4), torch.ones(2, 3, 5, 6)
    same = Unchanged([square, other])
    assert same([square, other]) and same([torch.zeros(4, 4), other.clone()])  # what lies there does not count
    for changed in (
        square.t(),
        square[:3],
        square.double(),
        square.view(16),
        square.to_sparse(),
        torch._neg_view(square),
    ):
        assert not same([changed, other])
    assert not same([square, other.to(memory_format=torch.channels_last)])
    assert not same([square, None])


def test_unchanged_never_says_yes_of_other_arrays() -> None:
    array = np.ones(3)
    assert not Unchanged([array])([array])
    assert not Unchanged([])([])
    assert not Unchanged([torch.ones(3), array])([torch.ones(3), array])
