"""Lightning trains with AdaFisher as a loop of one's own does, and resumes to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_helpers import assert_same, loss_of, mlp, rows, run  # noqa: E402

from cafin_cupy import BackendError  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402
from cafin_cupy.recorder import Recorder  # noqa: E402

BATCHES = 5  # TCov is 2: an epoch ends between two sampled steps
OPTIONS: dict[str, Any] = {"lr": 1e-3, "TCov": 2, "averaging": "paper"}


class Module(lightning.LightningModule):
    """Automatic optimization: the step's closure is forward, `zero_grad` and backward, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp("cpu")

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = AdaFisher(self, **OPTIONS)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # replaces `optimizer.step`
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, batch[0]))
        optimizer.step()
        self.lr_schedulers().step()


def loader() -> Any:
    return DataLoader(TensorDataset(torch.cat(rows("cpu", BATCHES))), batch_size=6)


def trainer(epochs: int, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return lightning.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, **quiet, **options)


def fit(module: Any, epochs: int = 1, path: Path | None = None, **options: Any) -> Any:
    trained = trainer(epochs, **options)
    trained.fit(module, loader(), ckpt_path=path)
    (optimizer,) = trained.optimizers
    return optimizer


def looped(micro: int = 1) -> AdaFisher:
    """An epoch of a step for each `micro` batches."""
    optimizer = AdaFisher(Module(), **OPTIONS)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for index, x in enumerate(rows("cpu", BATCHES)):
        if index % micro == 0:
            optimizer.zero_grad()
        (loss_of(optimizer.model.net, x) / micro).backward()
        if (index + 1) % micro == 0 or index + 1 == BATCHES:
            optimizer.step()
            schedule.step()
    return optimizer


@pytest.mark.parametrize("kind", [Module, Manual])
def test_trains_as_a_loop_does(kind: Any) -> None:
    optimizer = fit(kind())
    assert type(optimizer) is AdaFisher and optimizer.steps == BATCHES
    assert_same(optimizer, looped())


def test_accumulates() -> None:
    """The last batch of the epoch is alone in its step, and its loss is halved all the same."""
    optimizer = fit(Module(), accumulate_grad_batches=2)
    assert optimizer.steps == 3
    assert_same(optimizer, looped(micro=2))


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_resumes_to_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    unbroken = fit(Module(), 2, **options)
    first = trainer(1, **options)
    first.fit(Module(), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    resumed = fit(Module(), 2, tmp_path / "last.ckpt", **options)
    assert resumed.steps == 2 * BATCHES
    assert_same(resumed, unbroken)


def scaler(scale: float) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)


def test_a_loss_scale_changes_nothing() -> None:
    """Both are powers of two."""
    one, other = (fit(Module(), plugins=[MixedPrecision("16-mixed", "cpu", scaler(s))]) for s in (2.0**10, 2.0**12))
    assert one.steps == BATCHES
    assert_same(one, other, tolerance=1e-6)  # a subnormal gradient or two may round


class Clipping(Module):
    """Lightning has no clipping of its own in mixed precision for an optimizer that can unscale in its step."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.trainer.precision == "16-mixed":
            optimizer.grad_scaler = self.trainer.precision_plugin.scaler
            optimizer.grad_scaler.unscale_(optimizer)
        self.norm = nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


def test_clips_in_bfloat16() -> None:
    module = Clipping()
    optimizer = fit(module, precision="bf16-mixed", gradient_clip_val=1e-3)
    assert optimizer.steps == BATCHES and module.norm > 1e-3
    largest = max(state["exp_avg"].abs().max().item() for state in optimizer.state.values())
    assert 0 < largest <= 1e-3  # an average of gradients that were clipped


def test_clips_scaled_gradients() -> None:
    """The factors are told the scale, which they cannot see any more."""
    plugins = [[MixedPrecision("16-mixed", "cpu", scaler(s))] for s in (2.0**10, 2.0**12)]
    one, other = (fit(Clipping(), plugins=p, gradient_clip_val=1e-3) for p in plugins)
    largest = max(state["exp_avg"].abs().max().item() for state in one.state.values())
    assert one.steps == BATCHES and 0 < largest <= 1e-3
    assert_same(one, other, tolerance=1e-6)  # a subnormal gradient or two may round


def test_lightning_refuses_to_clip_itself() -> None:
    """What the above gets around: once this fails, README need not tell how."""
    with pytest.raises(RuntimeError, match="AdaFisher, does not allow for gradient clipping"):
        fit(Module(), precision="bf16-mixed", gradient_clip_val=0.1)


class Watching(Manual):
    """Looks at the optimizer through Lightning's wrapper, before the first step too."""

    def training_step(self, batch: Any, index: int) -> None:
        if index == 0:
            self.recorder = Recorder(self.optimizers())
            self.optimizers().TCov = 3
        super().training_step(batch, index)
        self.recorder.record()


def test_the_wrapper_shows_the_optimizer() -> None:
    module = Watching()
    optimizer, wrapper = fit(module), module.optimizers()
    assert type(wrapper) is not AdaFisher and isinstance(wrapper, AdaFisher)
    assert optimizer.TCov == 3 and module.recorder.steps == [0, 3]
    for name, pair in optimizer.factors().items():
        assert all(a is b for a, b in zip(pair, wrapper.factors()[name]))
    assert wrapper.curvature().flat() == optimizer.curvature().flat()
    with pytest.raises(BackendError, match="use AdaFisher"):  # not the class of the wrapper
        wrapper.capture(lambda: None)


def test_the_wrapper_loads_into_the_optimizer() -> None:
    """`self.optimizers().load_state_dict(...)`, as where only the optimizer's state is taken over."""
    want = looped()
    optimizer = AdaFisher(Module(), **OPTIONS)
    optimizer.model.load_state_dict(want.model.state_dict())
    wrapper = lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)
    wrapper.load_state_dict(want.state_dict())
    assert_same(optimizer, want)
    assert wrapper.state is optimizer.state


def test_the_wrapper_counts_no_steps_of_its_own() -> None:
    """Not those either that a scaler's verdict has prevented on a device, which are known when someone asks."""
    optimizer = looped()
    wrapper = lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)
    optimizer._skips, optimizer._unsure = torch.ones(1, dtype=torch.int64), True
    assert wrapper.steps == optimizer.steps == BATCHES - 1
    optimizer.steps = 8
    assert wrapper.steps == 8
    wrapper.steps = 9
    assert optimizer.steps == wrapper.steps == 9


def test_layers_join_through_the_wrapper() -> None:
    optimizer = looped()
    wrapper = lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)
    optimizer.model.head = nn.Linear(3, 2)
    wrapper.add_param_group({"params": ["head.*"], "lr": 1e-2})
    assert "head" in optimizer.factors() and len(optimizer.param_groups) == 2
    before = optimizer.model.head.weight.detach().clone()
    for x in rows("cpu", 2):  # the second one refreshes the factors
        wrapper.zero_grad()
        optimizer.model.head(optimizer.model.net(x)).square().mean().backward()
        optimizer.step()
    assert bool((optimizer.factors()["head"][0] != 1).any())
    assert not torch.equal(optimizer.model.head.weight, before)


def test_momentum_is_taken_over_through_the_wrapper() -> None:
    adamw = torch.optim.AdamW(Module().parameters())
    trained = adamw.param_groups[0]["params"]
    for p in trained:
        p.grad = torch.ones_like(p)
    adamw.step()
    optimizer = AdaFisher(Module(), **OPTIONS)
    lightning.pytorch.core.optimizer.LightningOptimizer(optimizer).load_momentum(adamw.state_dict())
    assert len(optimizer.state) == len(trained)
    for p, q in zip(trained, optimizer.model.parameters()):
        assert torch.equal(optimizer.state[q]["exp_avg"], adamw.state[p]["exp_avg"])


def test_fabric(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    own = AdaFisher(mlp("cpu"), **OPTIONS)
    model, optimizer = fabric.setup(own.model, own)
    assert optimizer.factors().keys() == own.factors().keys()  # before the first step
    for x in rows("cpu", BATCHES):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, x))
        optimizer.step()
    assert_same(own, run(AdaFisher(mlp("cpu"), **OPTIONS), rows("cpu", BATCHES)))

    fabric.save(tmp_path / "run", {"model": model, "optimizer": optimizer})
    other = AdaFisher(mlp("cpu"), **OPTIONS)
    model, optimizer = fabric.setup(other.model, other)
    fabric.load(tmp_path / "run", {"model": model, "optimizer": optimizer})
    assert_same(other, own)
