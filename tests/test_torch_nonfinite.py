"""inf and NaN through the PyTorch optimizer: counts of skipped refreshes, gradients as in torch.optim, and the option
that raises instead."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_same,
    everything,
    loss_of,
    mlp,
    net,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy import CafinValueError, NonFiniteError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

INF, NAN = math.inf, math.nan


# Counts


class Towers(nn.Module):
    """Two networks, each for half of the batch. `b.1` holds the weight of `b.0`, so they share their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5))
        self.b = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh())
        self.b[1].weight, self.b[1].bias = self.b[0].weight, self.b[0].bias

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return self.a(first) + self.b(second)


def towers(device: str, **options: Any) -> AdaFisher:
    torch.manual_seed(5)
    return AdaFisher(Towers().to(device), **{"TCov": 2, **options})


def iteration_of(optimizer: AdaFisher, x: Tensor) -> Callable[[], None]:
    """An iteration whose gradients the script makes finite, as some do."""

    def iteration() -> None:
        optimizer.zero_grad()
        weighted(optimizer.model(x)).backward()
        for p in optimizer.model.parameters():
            torch.nan_to_num(p.grad, out=p.grad)
        optimizer.step()

    return iteration


def spoilt(x: Tensor) -> Tensor:
    """With a NaN that the second tower gets to see."""
    x = x.clone()
    x[-1, 2] = NAN
    return x


def counted(device: str, **options: Any) -> AdaFisher:
    """After six steps, with a NaN on two sampled ones and on one between them."""
    optimizer = towers(device, **options)
    for t, x in enumerate(rows(device, 6)):
        iteration_of(optimizer, spoilt(x) if t in (2, 3, 4) else x)()
    return optimizer


COUNTS = {"a.0": 0, "a.2": 0, "b.0": 2, "b.1": 2}


def test_skipped_refreshes_are_counted_by_layer(device: str) -> None:
    optimizer = counted(device)
    assert optimizer.skipped_refreshes() == COUNTS
    assert list(optimizer.skipped_refreshes()) == list(optimizer.factors())
    assert all(torch.isfinite(F).all() for pair in optimizer.factors().values() for F in pair)
    assert torch.equal(optimizer.factors()["b.0"][0], counted(device).factors()["b.1"][0])


def test_sums_that_are_dropped_count_nothing(device: str) -> None:
    optimizer = counted(device)
    weighted(optimizer.model(spoilt(rows(device, 1)[0]))).backward()
    optimizer.zero_grad()
    iteration_of(optimizer, rows(device, 1)[0])()
    assert optimizer.skipped_refreshes() == COUNTS


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_count_on_alone(duplicate: Callable[[Any], Any], device: str) -> None:
    optimizer = counted(device, error_if_nonfinite=False)
    twin = duplicate(optimizer)
    assert twin.skipped_refreshes() == COUNTS and twin.error_if_nonfinite is False
    iteration_of(twin, spoilt(rows(device, 1)[0]))()
    assert twin.skipped_refreshes() == {"a.0": 0, "a.2": 0, "b.0": 3, "b.1": 3}
    assert optimizer.skipped_refreshes() == COUNTS


def test_a_checkpoint_has_no_room_for_counts(device: str) -> None:
    """Its format is the public implementation's: a loaded run counts from 0, a refused one goes on."""
    optimizer = counted(device)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    assert set(checkpoint) == {"state", "param_groups", "H_D", "S_D", "steps"}
    assert all(set(state) == {"step", "exp_avg"} for state in checkpoint["state"].values())
    with refused(optimizer, "load_state_dict: `steps`"):
        optimizer.load_state_dict({**checkpoint, "steps": -1})
    assert optimizer.skipped_refreshes() == COUNTS
    optimizer.load_state_dict(checkpoint)
    assert not any(optimizer.skipped_refreshes().values())


def test_a_step_that_the_scaler_skips_counts_nothing(device: str) -> None:
    scaler = torch.amp.GradScaler(device)
    optimizer = towers(device)
    scaler.scale(weighted(optimizer.model(spoilt(rows(device, 1)[0])))).backward()
    scaler.step(optimizer)
    assert optimizer.steps == 0 and not any(optimizer.skipped_refreshes().values())


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 2])
def test_replays_count(every: int) -> None:
    """On the device: the host sees nothing of them."""
    captured, plain = (towers("cuda", TCov=every, capturable=graphs) for graphs in (True, False))
    x = torch.empty(6, 5, device="cuda")
    iterations = [captured.capture(iteration_of(captured, x)), iteration_of(plain, x)]
    for t, batch in enumerate(rows("cuda", 16)):
        for iteration in iterations:
            x.copy_(spoilt(batch) if t % 3 == 0 else batch)
            iteration()
    assert captured.skipped_refreshes() == plain.skipped_refreshes()
    assert plain.skipped_refreshes()["b.0"] == (6 if every == 1 else 3)
    assert_same(captured, plain, TOLERANCE)


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


# The option


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("sampled", [False, True], ids=["unsampled", "sampled"])
def test_a_gradient_that_is_not_finite_raises(sampled: bool, value: float, device: str) -> None:
    """Before anything has changed, the sums included; zero_grad() leaves the batch out of the run."""
    first, second, third = rows(device, 3)
    optimizer = run(AdaFisher(mlp(device), TCov=1 if sampled else 9, error_if_nonfinite=True), [first])
    optimizer.zero_grad()
    loss_of(optimizer.model, second).backward()
    optimizer.model[2].weight.grad[3] = value
    optimizer.model[3].weight.grad[0, 0] = value
    for _ in range(2):
        with refused(optimizer, "step: `gradient of 2.weight` must be finite", "1 of 7 elements", "zero_grad()"):
            optimizer.step()
    assert optimizer._factors.pending == sampled
    run(optimizer, [third])
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1 if sampled else 9), [first, third]))


@pytest.mark.parametrize("sampled", [False, True], ids=["unsampled", "sampled"])
def test_sums_wait_for_a_step_that_is_finite(sampled: bool, device: str) -> None:
    """A script may mend the gradient and step again."""
    batches = rows(device, 2)
    optimizer = run(AdaFisher(mlp(device), TCov=1 if sampled else 9, error_if_nonfinite=True), batches[:1])
    optimizer.zero_grad()
    loss_of(optimizer.model, batches[1]).backward()
    gradient = optimizer.model[0].bias.grad
    kept, gradient[0] = gradient[0].clone(), INF
    with refused(optimizer, "`gradient of 0.bias`"):
        optimizer.step()
    gradient[0] = kept
    optimizer.step()
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1 if sampled else 9), batches))


def test_a_raw_moment_that_is_not_finite_raises(device: str) -> None:
    """On a sampled step, though the gradients are finite; between them nobody looks."""
    optimizer = counted(device)
    optimizer.error_if_nonfinite = True
    bad = spoilt(rows(device, 1)[0])  # its layer is called twice, and hands the NaN on to itself
    with refused(optimizer, "step: `raw H of b.0` must be finite", "inf or NaN in 5 of 6 elements", "zero_grad()"):
        iteration_of(optimizer, bad)()
    assert optimizer.skipped_refreshes() == COUNTS
    iteration_of(optimizer, rows(device, 1)[0])()
    assert not optimizer.samples
    iteration_of(optimizer, bad)()
    assert optimizer.steps == 8 and optimizer.skipped_refreshes() == COUNTS


def test_looking_changes_no_bit(device: str) -> None:
    torch.manual_seed(6)
    batches = [torch.randn(4, 3, 9, 8, device=device) for _ in range(4)]
    looks, plain = (AdaFisher(net(device), TCov=2, error_if_nonfinite=flag) for flag in (True, False))
    assert_same(run(looks, batches, micro=2), run(plain, batches, micro=2))


def scaled(optimizer: AdaFisher, scaler: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(optimizer.model, x)).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_has_the_first_word(device: str) -> None:
    """A step that it skips does not raise."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    optimizer = AdaFisher(mlp(device), TCov=1, error_if_nonfinite=True)
    first, second = rows(device, 2)
    scaled(optimizer, scaler, first)
    before = everything(optimizer)
    scaled(optimizer, scaler, torch.full_like(first, INF))
    assert_same(optimizer, before)
    scaled(optimizer, scaler, second)
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1), [first, second]), TOLERANCE)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fault", ["moments", "scalar"])
def test_after_an_error_under_a_scaler_the_scale_is_still_right(fault: str, unscale: bool, device: str) -> None:
    """The scaler hands its scale over in attributes, and multiplies by those that a failed step has left."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    optimizer = AdaFisher(mlp(device), TCov=1, error_if_nonfinite=True, grad_scaler=scaler)
    first, second = rows(device, 2)

    def step(x: Tensor, spoil: bool = False) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(optimizer.model, x)).backward()
        if spoil and fault == "moments":
            optimizer._factors.accumulate(0, torch.full_like(x, NAN), torch.ones(len(x), 7, device=device))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    optimizer.param_groups[0]["lr"] = -1.0 if fault == "scalar" else 1e-3
    with refused(optimizer, "`raw H of 0`" if fault == "moments" else "`lr` must be >= 0"):
        step(first, spoil=True)
    optimizer.param_groups[0]["lr"] = 1e-3
    scaler.update()
    for x in (first, second):
        step(x)
        scaler.update()
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=1), [first, second]), TOLERANCE)


def test_graphs_cannot_wait() -> None:
    with pytest.raises(CafinValueError, match="`error_if_nonfinite` must be False with capturable=True, got True"):
        AdaFisher(mlp("cpu"), capturable=True, error_if_nonfinite=True)


@pytest.mark.gpu
def test_a_capture_that_would_wait_is_refused() -> None:
    """Also where the option comes after the graphs, which would not look."""
    optimizer = towers("cuda", capturable=True)
    iteration = optimizer.capture(iteration_of(optimizer, rows("cuda", 1)[0]))
    for _ in range(6):
        iteration()
    optimizer.error_if_nonfinite = True
    with refused(optimizer, "capture: error_if_nonfinite must be False"):
        iteration()
    with refused(optimizer, "step", "error_if_nonfinite=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    optimizer.error_if_nonfinite = False
    iteration()
    assert optimizer.steps == 7


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [False, True], ids=["unsampled", "sampled"])
def test_looking_waits_once(layers: bool) -> None:
    """One transfer to the host a step, however many parameters and layers there are."""
    optimizer = run(AdaFisher(net("cuda"), TCov=1 if layers else 9, error_if_nonfinite=True), images_of("cuda", 3))
    loss_of(optimizer.model, images_of("cuda", 1)[0]).backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as caught:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing" in str(w.message)]) == 1


def images_of(device: str, count: int) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(4, 3, 9, 8, device=device) for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 1025, 2**22 + 3])
def test_no_place_is_overlooked_on_the_device(size: int, dtype: torch.dtype) -> None:
    """Among the largest numbers; of all that a fused norm of many tensors may get wrong."""
    from cafin_cupy.nonfinite import refuse_nonfinite

    some = [torch.full((k,), torch.finfo(dtype).max, dtype=dtype, device="cuda") for k in (0, 7, size, 33)]
    named = [(f"tensor {k}", x) for k, x in enumerate(some)]
    refuse_nonfinite("step", named, "")
    for place in {0, size // 3, size - 1}:
        for value in (NAN, INF, -INF):
            some[2][place] = value
            with pytest.raises(NonFiniteError, match=f"`tensor 2` must be finite, got inf or NaN in 1 of {size}"):
                refuse_nonfinite("step", named, "")
            some[2][place] = 1.0
