"""inf and NaN through the PyTorch optimizer: gradients as in torch.optim."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch_helpers import (  # noqa: E402
    net,
    torch_device,  # noqa: F401
)

from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

INF, NAN = math.inf, math.nan


# Gradients


@pytest.mark.filterwarnings("ignore:.*were not seen on a sampled step")
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_gradients_poison_what_they_poison_in_torch(
    kind: type[AdaFisher], weight_decay: float, beta: float, device: str
) -> None:
    """inf and NaN in some gradients of the second and third step: after each step the same elements of parameters and
    momenta are finite as with SGD, or AdamW; and those are what they would have been."""
    models = [net(device) for _ in range(3)]
    dirty, clean = (kind(model, lr=1e-4, beta=beta, weight_decay=weight_decay) for model in models[:2])
    parameters = [list(model.parameters()) for model in models]
    if kind is AdaFisher:
        theirs = torch.optim.SGD(parameters[2], lr=1e-4, momentum=beta, dampening=beta, weight_decay=weight_decay)
    else:
        theirs = torch.optim.AdamW(parameters[2], lr=1e-4, betas=(beta, 0.999), weight_decay=weight_decay)
    hit = [torch.zeros(p.shape, dtype=torch.bool, device=device) for p in parameters[0]]
    for t in range(5):
        for index, (p, q, r) in enumerate(zip(*parameters)):
            torch.manual_seed(100 * t + index)
            g = torch.randn(p.shape, device=device)
            q.grad = g.clone()
            if t in (1, 2) and index % 3 == 0:
                places = torch.randint(p.numel(), (3,), device=device)
                g.view(-1)[places] = torch.tensor([NAN, INF, -INF], device=device)
                hit[index].view(-1)[places] = True
            p.grad, r.grad = g, g.clone()
        for optimizer in (dirty, clean, theirs):
            optimizer.step()
        for p, q, r, bad in zip(*parameters, hit):
            momentum = dirty.state[p]["exp_avg"]
            other = theirs.state[r].get("momentum_buffer") if kind is AdaFisher else theirs.state[r]["exp_avg"]
            assert torch.equal(torch.isfinite(p), torch.isfinite(r)) and torch.equal(torch.isfinite(p), ~bad)
            if other is not None and beta:
                assert torch.equal(torch.isfinite(momentum), torch.isfinite(other))
            assert torch.equal(p[~bad], q[~bad])
            assert torch.equal(momentum[~bad], clean.state[q]["exp_avg"][~bad])
    assert sum(int(bad.sum()) for bad in hit) > 10
