"""Training iterations in CUDA graphs: replays train as the same iterations do without graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_helpers import assert_same, exact_float32, images, loss_of, mlp, net, refused, rows  # noqa: E402

from cafin_cupy import BackendError, CafinError, table  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_float32():
        yield


def iteration_of(optimizer: AdaFisher, x: Tensor) -> Callable[[], Tensor]:
    def iteration() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(optimizer.model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return iteration


def pair(kind: type[AdaFisher] = AdaFisher, **options: Any) -> tuple[AdaFisher, AdaFisher]:
    """A capturable optimizer, and one that is not, of equal models."""
    model = net("cuda")
    return kind(model, capturable=True, **options), kind(copy.deepcopy(model), **options)


def train(
    optimizer: AdaFisher, batches: list[Tensor], graphs: bool, each: Callable[[Any, int], None] | None = None
) -> list[float]:
    x = batches[0].clone()
    iteration = iteration_of(optimizer, x)
    run = optimizer.capture(iteration) if graphs else iteration
    losses = []
    for t, batch in enumerate(batches):
        if each is not None:
            each(optimizer, t)
        x.copy_(batch)
        losses.append(float(run()))
    return losses


@gpu
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_replays_train_like_the_iterations_themselves(kind: type[AdaFisher], every: int) -> None:
    captured, plain = pair(kind, TCov=every, weight_decay=0.1, lr=1e-4)
    batches = images("cuda", *[4] * 14)
    assert train(captured, batches, True) == pytest.approx(train(plain, batches, False), rel=1e-5)
    assert_same(captured, plain, 1e-5)  # cuDNN may choose other algorithms under a graph
    assert captured.steps == 14 and all(int(s["step"]) == 14 for s in captured.state.values())


class Reader(nn.Module):
    """An embedding with padding, attention to itself and to other tokens, and a head of the table's width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.block(x)
        return self.head(self.cross(y[:, :3], y, x, need_weights=False)[0])


@gpu
@pytest.mark.parametrize("every", [1, 3])
def test_embeddings_and_attentions_are_captured(every: int) -> None:
    """Tokens are counted on the device, and the replays count those of their own batch."""
    model = Reader().cuda()
    captured = AdaFisher(model, TCov=every, lr=1e-4, capturable=True)
    plain = AdaFisher(copy.deepcopy(model), TCov=every, lr=1e-4)
    torch.manual_seed(7)
    batches = [torch.randint(11, (4, 5), device="cuda") for _ in range(3 * every + 8)]
    with sdpa_kernel(SDPBackend.MATH):  # the others add in any order
        losses = train(captured, batches, True)
        assert losses == pytest.approx(train(plain, batches, False), rel=1e-5)
    assert_same(captured, plain, 1e-5)
    assert all(not torch.equal(F, torch.ones_like(F)) for pair in captured.factors().values() for F in pair)


@gpu
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_counting_on_the_device_changes_no_bit(kind: type[AdaFisher]) -> None:
    """The device computes the scalars in float64 as the host does."""
    captured, plain = pair(kind, TCov=2, weight_decay=0.1, lr=1e-4)
    batches = images("cuda", *[4] * 5)
    assert train(captured, batches, False) == train(plain, batches, False)
    assert_same(captured, plain)


@gpu
@pytest.mark.parametrize("on_device", [False, True])
def test_schedules_reach_the_graphs(on_device: bool) -> None:
    """Numbers that the host passes on, or a tensor on the device that the script changes in place."""
    captured, plain = pair(TCov=3)
    if on_device:
        captured.param_groups[0]["lr"] = torch.tensor(1e-4, device="cuda")

    def decay(optimizer: Any, t: int) -> None:
        lr = float(torch.tensor(1e-3 / (t + 1)))  # a float32, as the tensor holds
        if on_device and optimizer is captured:
            optimizer.param_groups[0]["lr"].fill_(lr)
        else:
            optimizer.param_groups[0]["lr"] = lr

    batches = images("cuda", *[4] * 12)
    train(captured, batches, True, decay)
    train(plain, batches, False, decay)
    assert_same(captured, plain, 1e-5)


@gpu
def test_a_script_may_capture_by_itself() -> None:
    captured, plain = pair(TCov=100)
    batches = images("cuda", *[4] * 9)
    x = batches[0].clone()
    iteration = iteration_of(captured, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in batches[:3]:
            x.copy_(batch)
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    x.copy_(batches[3])
    with torch.cuda.graph(graph):
        iteration()
    graph.replay()
    for batch in batches[4:]:
        x.copy_(batch)
        graph.replay()
    train(plain, batches, False)
    captured.steps = plain.steps  # the host has not seen the replays
    assert_same(captured, plain, 1e-5)


@gpu
def test_other_iterations_between_replays_disturb_nothing() -> None:
    """Another batch size describes the layers anew: what the graphs read must stay."""
    captured, plain = pair(TCov=1)
    batches = images("cuda", *[4] * 10)
    others = images("cuda", *[7] * 10)
    x = batches[0].clone()
    run = captured.capture(iteration_of(captured, x))
    for t, (batch, other) in enumerate(zip(batches, others)):
        x.copy_(batch)
        run()
        if t > 4:
            iteration_of(captured, other)()
            torch.randn(1000, 1000, device="cuda")  # takes what memory was freed
        iteration_of(plain, batch)()
        if t > 4:
            iteration_of(plain, other)()
    assert_same(captured, plain, 1e-5)


@gpu
def test_a_loaded_checkpoint_is_trained_on() -> None:
    captured, plain = pair(TCov=2)
    batches = images("cuda", *[4] * 8)
    x = batches[0].clone()
    run = captured.capture(iteration_of(captured, x))
    for batch in batches:
        x.copy_(batch)
        run()
    saved = copy.deepcopy(captured.state_dict())
    weights = copy.deepcopy(captured.model.state_dict())
    assert all(type(entry["step"]) is int for entry in saved["state"].values())
    plain.load_state_dict(saved)
    plain.model.load_state_dict(weights)
    captured.load_state_dict(saved)
    for batch in batches:
        x.copy_(batch)
        run()
        iteration_of(plain, batch)()
    assert_same(captured, plain, 1e-5)


@gpu
def test_more_gradients_than_the_arguments_hold() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(table.WORDS // 2 + 5)).cuda()
    plain_model = copy.deepcopy(model)
    x = torch.randn(4, 3, device="cuda")
    results = []
    for one, graphs in ((model, True), (plain_model, False)):
        optimizer = AdaFisher(one, TCov=3, capturable=graphs)

        def iteration(optimizer: AdaFisher = optimizer, one: Any = one) -> None:
            optimizer.zero_grad()
            sum(layer(x).square().mean() for layer in one).backward()
            optimizer.step()

        run = optimizer.capture(iteration) if graphs else iteration
        for _ in range(8):
            run()
        for _ in range(2):  # and some without a graph, whose gradients lie elsewhere, each time at the same place
            iteration()
            run()
        results.append(optimizer)
    assert_same(*results, 1e-5)


@gpu
def test_a_parameter_without_gradient_is_not_counted() -> None:
    captured, plain = pair(TCov=100)
    for optimizer in (captured, plain):
        optimizer.model.head.bias.requires_grad_(False)
    batches = images("cuda", *[4] * 6)
    train(captured, batches, True)
    train(plain, batches, False)
    assert_same(captured, plain, 1e-5)


@gpu
def test_a_script_may_reset_the_count_of_a_parameter() -> None:
    captured, plain = pair(TCov=100)
    batches = images("cuda", *[4] * 4)
    for optimizer in (captured, plain):
        train(optimizer, batches, False)
        weight = optimizer.model.head.weight
        optimizer.state[weight]["step"] = 0
        train(optimizer, batches, False)
    assert_same(captured, plain)
    assert int(captured.state[captured.model.head.weight]["step"]) == 4


@gpu
def test_a_failed_capture_leaves_nothing_behind() -> None:
    optimizer, plain = pair(TCov=100)
    (x,) = images("cuda", 4)
    inner = iteration_of(optimizer, x)
    wait = True

    def iteration() -> Tensor:
        loss = inner()
        if wait:
            loss.item()  # waits for the device, which no capture allows
        return loss

    run = optimizer.capture(iteration)
    for _ in range(3):
        run()
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        run()
    assert optimizer.steps == 3 and torch.cuda.current_stream() == stream
    torch.randn(3, device="cuda")  # PyTorch's generator may be left waiting for the end of the capture
    wait = False
    for _ in range(6):
        run()
    train(plain, [x] * 9, False)
    assert_same(optimizer, plain, 1e-5)


@gpu
def test_a_sampled_step_is_not_captured_by_halves() -> None:
    """Forward and backward alone: the host would not know of the sums."""
    optimizer = AdaFisher(mlp("cuda"), TCov=1)
    (x,) = rows("cuda", 1)
    iteration_of(optimizer, x)()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match="must not capture a sampled step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss_of(optimizer.model, x).backward()


@gpu
def test_what_is_new_cannot_be_captured() -> None:
    optimizer = AdaFisher(mlp("cuda"), capturable=True)
    (x,) = rows("cuda", 1)
    loss_of(optimizer.model, x).backward()
    with refused(optimizer, "step", "run a few iterations first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@gpu
def test_an_iteration_that_does_not_step_is_refused() -> None:
    optimizer = AdaFisher(mlp("cuda"), capturable=True)
    (x,) = rows("cuda", 1)
    run = optimizer.capture(lambda: loss_of(optimizer.model, x).backward())
    with pytest.raises(BackendError, match="must call step"):
        for _ in range(5):
            run()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_capture_needs_a_capturable_optimizer(device: str) -> None:
    with pytest.raises(CafinError, match="capturable=True"):
        AdaFisher(mlp(device)).capture(lambda: None)


def test_capturable_changes_nothing_on_the_cpu() -> None:
    model = mlp("cpu")
    one, other = AdaFisher(model, capturable=True), AdaFisher(copy.deepcopy(model))
    for x in rows("cpu", 3):
        for optimizer in (one, other):
            iteration_of(optimizer, x)()
    assert_same(one, other)
