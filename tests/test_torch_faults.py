"""What autograd and the script may do around a sampled step: checkpointing, kept graphs, overwritten inputs, NaN."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_moments,
    assert_same,
    everything,
    loss_of,
    mlp,
    record,
    rows,
    run,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402


@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_one_nan_does_not_poison_a_factor(averaging: str, device: str) -> None:
    """The moments of that step are dropped, layer by layer; the next sample counts again."""
    clean, dirty = (AdaFisher(mlp(device), TCov=1, averaging=averaging) for _ in range(2))
    x, y = rows(device, 2)
    run(dirty, [x])
    before = everything(dirty)
    dirty.zero_grad()
    loss_of(dirty.model, torch.full_like(x, torch.nan)).backward()
    for p in dirty.model.parameters():
        p.grad = None  # the script throws the gradients away, but steps
    dirty.step()
    counts = {f"skipped of {name}": 1 for name in ("0", "2", "3")}
    assert_same(dirty, {**before, **counts, "steps": 2})
    assert_same(run(dirty, [y]), {**everything(run(clean, [x, y])), **counts, "steps": 3})


# Activation checkpointing


class Watch(nn.Module):
    """Passes its input on and tells whether its memory is still in use."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = StorageWeakRef(x.untyped_storage())
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_still_saves_memory(use_reentrant: bool, device: str) -> None:
    """On sampled steps too, the inputs inside a checkpointed block are freed after its forward."""
    block = nn.Sequential(nn.Linear(5, 6), watch := Watch(), nn.Linear(6, 3)).to(device)
    optimizer = AdaFisher(block, TCov=1)
    x = rows(device, 1)[0].requires_grad_()
    loss = checkpoint(block, x, use_reentrant=use_reentrant).square().mean()
    assert watch.seen.expired()
    loss.backward()
    optimizer.step()
    assert not any(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)


def test_inputs_are_freed_by_backward(device: str) -> None:
    """Though the script still holds the loss, as training loops do during the next forward."""
    model = nn.Sequential(nn.Linear(5, 6), watch := Watch(), nn.Linear(6, 3)).to(device)
    optimizer = AdaFisher(model, TCov=1)
    loss = loss_of(model, rows(device, 1)[0])
    assert not watch.seen.expired()
    loss.backward()
    assert watch.seen.expired()
    optimizer.step()


def test_a_graph_that_is_kept_counts_each_backward(device: str) -> None:
    """Losses with a common trunk, differentiated one after the other."""
    model = mlp(device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    out = model(rows(device, 1)[0])
    weighted(out).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    assert {name: len(calls) for name, calls in seen.items()} == {"0": 2, "2": 2, "3": 2}
    assert_moments(optimizer, seen)


def test_a_second_backward_is_refused_in_the_words_of_torch(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=1)
    loss = optimizer.model(rows(device, 1)[0]).mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_functional_transforms_leave_no_trace(transform: str, device: str) -> None:
    """Gradients for each sample, say, taken on a sampled step: their tensors are no tensors outside the transform."""
    x, y = rows(device, 2)
    optimizer = AdaFisher(mlp(device), TCov=1)
    model, weights = optimizer.model, {name: p.detach() for name, p in optimizer.model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    transforms = {
        "grad": lambda: torch.func.grad(loss)(weights, y),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, y),
        "jacrev": lambda: torch.func.jacrev(model)(y),
    }
    loss_of(model, x).backward()
    transforms[transform]()
    optimizer.step()
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1), [x]))


# Layers that are not seen


def test_training_in_eval_mode_warns_once(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=1)
    optimizer.model.eval()
    with pytest.warns(UserWarning, match="were not seen on a sampled step.*'0', '2', '3'") as caught:
        run(optimizer, rows(device, 3))
    assert [w.filename for w in caught] == [run.__code__.co_filename]
    assert all(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)
