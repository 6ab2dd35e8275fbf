"""Accelerate's wrapper trains with AdaFisher as a loop of one's own does, and resumes to the same bits."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_helpers import assert_same, everything, loss_of, mlp, rows, run  # noqa: E402

from cafin_cupy import CafinError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

BATCHES = 6
OPTIONS: dict[str, Any] = {"lr": 1e-3, "TCov": 2, "averaging": "paper"}


def forget_state() -> None:
    """Accelerate has one for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    forget_state()
    yield
    forget_state()


def prepared(accelerator: Accelerator, **options: Any) -> tuple[Any, Any, Any]:
    """Model, wrapped optimizer and loader."""
    model = mlp("cpu")
    optimizer = AdaFisher(model, **OPTIONS, **options)
    loader = DataLoader(TensorDataset(torch.cat(rows("cpu", BATCHES))), batch_size=6)
    return accelerator.prepare(model, optimizer, loader)


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, clip: float = 0.0) -> AdaFisher:
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.optimizer


@pytest.mark.parametrize("micro", [1, 2])
def test_trains_as_a_loop_does(micro: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    theirs = epoch(accelerator, *prepared(accelerator))
    ours, batches = AdaFisher(mlp("cpu"), **OPTIONS), iter(rows("cpu", BATCHES))
    for _ in range(BATCHES // micro):
        ours.zero_grad()
        for _ in range(micro):
            (loss_of(ours.model, next(batches)) / micro).backward()
        ours.step()
    assert theirs.steps == BATCHES // micro
    assert_same(theirs, ours)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_resumes_to_the_same_bits(precision: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    first = prepared(accelerator)
    epoch(accelerator, *first, clip=0.1)  # three steps: the checkpoint lies between two sampled ones
    accelerator.save_state(str(tmp_path))
    unbroken = epoch(accelerator, *first, clip=0.1)

    accelerator.free_memory()
    second = prepared(accelerator)
    accelerator.load_state(str(tmp_path))
    resumed = epoch(accelerator, *second, clip=0.1)
    assert resumed.steps == BATCHES
    assert_same(resumed, unbroken)


def scaling(scale: float) -> Accelerator:
    """With a `GradScaler`, which Accelerate makes for itself on a GPU only."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    return accelerator


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_loss_scale_changes_nothing(clip: float) -> None:
    """Both are powers of two. Clipping unscales ahead of the step."""
    runs = []
    for scale in (2.0**10, 2.0**12):
        accelerator = scaling(scale)
        runs.append(epoch(accelerator, *prepared(accelerator, grad_scaler=accelerator.scaler), clip))
        forget_state()
    assert runs[0].steps == BATCHES
    assert_same(*runs, tolerance=1e-6)  # a subnormal gradient or two may round


def test_clipping_needs_to_know_the_scaler() -> None:
    accelerator = scaling(2.0**10)
    model, optimizer, loader = prepared(accelerator)
    before = everything(optimizer.optimizer)
    with pytest.raises(CafinError, match="grad_scaler=scaler"):
        epoch(accelerator, model, optimizer, loader, clip=0.1)
    assert_same(optimizer.optimizer, before)
    optimizer.optimizer.grad_scaler = accelerator.scaler  # may also be told later, and the step repeated
    optimizer.step()
    assert optimizer.optimizer.steps == 1


def test_an_overflow_changes_nothing() -> None:
    accelerator = scaling(2.0**10)
    model, optimizer, loader = prepared(accelerator, grad_scaler=accelerator.scaler)
    epoch(accelerator, model, optimizer, loader, clip=0.1)
    before = everything(optimizer.optimizer)
    accelerator.backward(loss_of(model, torch.full((6, 5), math.inf)))
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert accelerator.scaler.get_scale() == 2.0**9
    assert_same(optimizer.optimizer, before)
    assert not optimizer.optimizer._factors.pending  # the next step starts from none of its sums


def test_copies_of_the_wrapper_go_on() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    epoch(accelerator, model, optimizer, loader)
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    batches = rows("cpu", 3)
    want = run(optimizer.optimizer, batches)
    for twin in twins:
        assert_same(run(twin.optimizer, batches), want)
