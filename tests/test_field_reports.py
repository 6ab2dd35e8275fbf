"""Faults that users of neighbouring projects reported, each with its public thread and the right behaviour.

Devices, processes and memory are in test_field_reports_devices.py, tensors of more than 2^31 elements in
test_field_reports_large.py, and what was measured on the public AdaFisher in test_field_reports_adafisher.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    exact_float32,
    images,
    loss_of,
    mlp,
    net,
    record,
    refused,
    rows,
    run,
    scaled_run,
    scaler_of,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_float32():
        yield


# ---- Gradients and scales ----


@pytest.mark.parametrize("clip", [0.0, 1e9], ids=["in step", "unscale_ and clip"])
@pytest.mark.parametrize("after", [1, 2], ids=["unsampled", "sampled"])
def test_found_inf_is_honoured_and_nothing_unscaled_twice(after: int, clip: float, device: str) -> None:
    """pytorch 95847, 96755: parameters updated with infinite gradients. Nothing changes, neither parameters, momentum,
    factors nor counters, and the run goes on as if the batch had not been."""
    scaler = scaler_of(device)
    optimizer = AdaFisher(mlp(device), TCov=2, grad_scaler=scaler)
    batches = rows(device, 5)
    scaled_run(optimizer, scaler, batches[:after], clip)
    before, scale = everything(optimizer), scaler.get_scale()
    scaled_run(optimizer, scaler, [torch.full_like(batches[0], torch.inf)], clip)
    assert_same(optimizer, before)
    assert scaler.get_scale() == scale / 2
    scaled_run(optimizer, scaler, batches[after:], clip)
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=2), batches), TOLERANCE)


def sliced(g: Tensor) -> Tensor:
    wide = torch.full((*g.shape[:-1], 2 * g.shape[-1]), torch.nan, device=g.device)
    wide[..., ::2] = g
    return wide[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": sliced,
    "chunk of a larger tensor": lambda g: torch.stack([g + 1, g]).chunk(2)[1][0],
    "at an odd address": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].reshape(g.shape),
    "transposed": lambda g: g.mT.contiguous().mT if g.dim() > 1 else g,
    "channels_last": lambda g: g.to(memory_format=torch.channels_last) if g.dim() == 4 else g,
    "expanded": lambda g: g.flatten()[0].expand_as(g),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_gradients_in_any_layout_give_equal_updates(name: str, device: str) -> None:
    """bitsandbytes 1185: a gradient that is a slice or chunk gives another update. The bits of a contiguous one's."""
    strided, plain = (AdaFisher(net(device), TCov=2, weight_decay=0.1) for _ in range(2))
    for x in images(device, 3, 3, 3):
        for optimizer in (strided, plain):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
            for p in optimizer.model.parameters():
                g = LAYOUTS[name](p.grad)
                p.grad = g if optimizer is strided else g.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        assert_same(strided, plain)


# ---- State ----


@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16])
def test_a_loaded_state_keeps_its_dtype(momentum: torch.dtype) -> None:
    """pytorch 43706: float32 momentum of bfloat16 parameters is cast when it is loaded. It stays as it was saved, the
    factors stay float32; the run goes on bit for bit."""
    batches = [x.bfloat16() for x in rows("cpu", 4)]
    first = run(AdaFisher(mlp("cpu").bfloat16(), TCov=1), batches[:2])
    for state in first.state.values():
        state["exp_avg"] = state["exp_avg"].to(momentum)
    again = AdaFisher(mlp("cpu").bfloat16(), TCov=1)
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(first.state_dict())
    assert_same(again, first)
    assert_same(run(again, batches[2:]), run(first, batches[2:]))
    assert {state["exp_avg"].dtype for state in again.state.values()} == {momentum}
    assert {f.dtype for pair in again.factors().values() for f in pair} == {torch.float32}


@pytest.mark.parametrize(
    ("device", "capturable"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=gpu)]
)
def test_a_rate_that_is_a_tensor_is_followed(device: str, capturable: bool) -> None:
    """pytorch 106802, 163093: `.item()` of a tensor lr waits for the GPU, and a scheduler replaces the tensor by a
    number. It is read where it lies and filled in place; on a GPU no step waits."""
    rate = torch.tensor(1e-3, device=device)
    optimizer = AdaFisher(mlp(device), lr=rate, TCov=2, capturable=capturable)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    by_hand = AdaFisher(mlp(device), lr=float(rate), TCov=2, capturable=capturable)
    batches = rows(device, 5)
    run(optimizer, batches[:1])
    run(by_hand, batches[:1])
    for t, x in enumerate(batches[1:], 1):
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is rate
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            run(optimizer, [x])
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert float(rate) == pytest.approx(1e-3 / (1 + t))
        by_hand.param_groups[0]["lr"] = float(rate)
        run(by_hand, [x])
    assert_same(optimizer, by_hand)


@gpu
def test_a_rate_on_the_gpu_is_refused_where_reading_it_would_wait() -> None:
    """pytorch 106802: the same without capturable=True; a clear error, and nothing changed."""
    rate = torch.tensor(1e-3, device="cuda")
    with pytest.raises(CafinError, match="`lr` must be a number or a CPU tensor, got a tensor on cuda:0"):
        AdaFisher(mlp("cuda"), lr=rate)
    optimizer = run(AdaFisher(mlp("cuda")), rows("cuda", 1))
    optimizer.param_groups[0]["lr"] = rate
    with refused(optimizer, "`lr` must be a number or a CPU tensor", "pass .item()"):
        optimizer.step()


# ---- Graphs, compilers, hooks ----


@gpu
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
def test_a_replay_steps_as_eager_does_or_its_capture_is_refused(steps: int) -> None:
    """pytorch 76368: a replay repeats the step number that the host counted. Refused, with the mend; as it says, step
    and rate on the device train as eager does."""
    x, batches = images("cuda", 4)[0], images("cuda", *[4] * (steps + 6))
    optimizer, plain, counting = (AdaFisher(net("cuda"), TCov=100, capturable=k == 2) for k in range(3))
    for each in (optimizer, plain):
        run(each, batches[:steps])
        each.zero_grad()
        loss_of(each.model, x).backward()
    with refused(optimizer, "step", "capturable=True", "replay would repeat"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    for each in (optimizer, plain):
        each.step()
    assert_same(optimizer, plain)

    def iteration() -> None:
        counting.zero_grad()
        loss_of(counting.model, x).backward()
        counting.step()

    replayed = counting.capture(iteration)
    for batch in batches:
        x.copy_(batch)
        replayed()
    assert counting._captured  # by then
    # cuDNN may choose other algorithms under a graph
    assert_same(counting, run(AdaFisher(net("cuda"), TCov=100), batches), 1e-5)


def test_in_place_operations_behind_a_layer(device: str) -> None:
    """f-dangel/singd 56, pytorch 61519: full backward hooks raise "is a view and is being modified inplace" for
    Conv2d -> ReLU(inplace=True). A hook on the output tensor bears it: as without in-place operations."""
    batches = images(device, 4, 4, 4)
    inplace, plain = (AdaFisher(net(device, inplace=flag), TCov=2) for flag in (True, False))
    assert_same(run(inplace, batches), run(plain, batches), TOLERANCE)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_model_that_was_compiled_first_trains_or_one_warning_says_why(first: str) -> None:
    """pytorch 117265, 133303: hooks that come after torch.compile are silently ignored. The factors are those of the
    eager model, or they stay at one and one warning says what to do."""
    torch._dynamo.reset()
    batches = rows("cpu", 6)
    model = mlp("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if first == "model":
            compiled = torch.compile(model, backend="eager")
            compiled(batches[0]).sum().backward()
        optimizer = AdaFisher(model, TCov=2)
        if first == "optimizer":
            compiled = torch.compile(model, backend="eager")
        for x in batches:
            optimizer.zero_grad()
            loss_of(compiled, x).backward()
            optimizer.step()
    torch._dynamo.reset()
    warned = [w for w in caught if "were not seen on a sampled step" in str(w.message)]
    assert len(warned) <= 1
    if warned:
        assert "skip_nnmodule_hook_guards = False" in str(warned[0].message)
        assert all(torch.equal(f, torch.ones_like(f)) for pair in optimizer.factors().values() for f in pair)
    else:
        assert_same(optimizer, run(AdaFisher(mlp("cpu"), TCov=2), batches), TOLERANCE)


FIRST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 6)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (4, 2, 5, 6)),
    "layer norm": (lambda: nn.LayerNorm(5), (4, 3, 5)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FIRST)
def test_the_first_layer_has_factors_though_its_input_needs_no_gradient(name: str, device: str) -> None:
    """pytorch 56380, 100528: a full backward hook does not fire, or warns, where no input needs a gradient. The factors
    are computed all the same, in silence."""
    make, shape = FIRST[name]
    model = make().to(device)
    seen = record(model)
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    x = torch.randn(shape, device=device)
    assert not x.requires_grad
    weighted(model(x)).backward()
    optimizer.step()
    assert_moments(optimizer, seen)
