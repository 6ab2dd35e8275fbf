"""PyTorch models that lie on more than one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import assert_same, everything, exact_float32, loss_of, refused, rows, run  # noqa: E402

from cafin_cupy import CafinError, backend  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

BOTH = ("cuda:0", "cuda:1")
PLACES = [
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu, id="one GPU"),
    pytest.param(("cpu", "cuda:0"), marks=pytest.mark.gpu, id="cpu and GPU"),
    pytest.param(("cuda:0", "cpu"), marks=pytest.mark.gpu, id="GPU and cpu"),
    pytest.param(BOTH, marks=pytest.mark.multi_gpu, id="two GPUs"),
]


class Spread(nn.Module):
    """The first half of the layers on one device, the second on another; the scale is of no layer."""

    def __init__(self, places: tuple[str, str]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.places = places
        first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6, bias=False))
        second = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))
        scale = torch.randn(3)
        self.first, self.second = first.to(places[0]), second.to(places[1])
        self.scale = nn.Parameter(scale.to(places[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.to(self.places[0])).to(self.places[1])) * self.scale


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "_warned", set())
    with warnings.catch_warnings(), exact_float32():
        warnings.filterwarnings("ignore", message=".*no factors.*scale|.*a part of the model is on the CPU")
        yield


def same(one: AdaFisher, other: AdaFisher, tolerance: float) -> None:
    """Whatever the devices."""
    mine, theirs = everything(one), everything(other)
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value.cpu(), theirs[key].cpu(), rtol=tolerance, atol=tolerance)
        else:
            assert value == theirs[key], key


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_a_spread_model_trains_as_on_one_device(kind: type[AdaFisher], averaging: str, places: tuple[str, str]) -> None:
    """Matrix products differ by 1e-7 between devices; five steps at lr / Lambda = 1 carry that to 1e-5."""
    options: dict[str, Any] = {"averaging": averaging, "TCov": 2, "weight_decay": 0.1}
    spread, alone = kind(Spread(places), **options), kind(Spread(("cpu", "cpu")), **options)
    for optimizer in (spread, alone):
        scale = optimizer.param_groups[0]["params"].pop(0)
        optimizer.add_param_group({"params": [scale], "lr": 0.5})  # a second set of scalars
        run(optimizer, rows("cpu", 5), micro=2)
    same(spread, alone, 1e-5)
    expected = "cuda" if all(p.startswith("cuda") for p in places) else "reference"
    assert spread.backend == expected


@pytest.mark.parametrize("places", PLACES)
def test_a_checkpoint_goes_from_one_device_to_several(places: tuple[str, str]) -> None:
    alone, spread = AdaFisher(Spread(("cpu", "cpu")), TCov=2), AdaFisher(Spread(places), TCov=2)
    run(alone, rows("cpu", 3))
    spread.model.load_state_dict(alone.model.state_dict())
    spread.load_state_dict(copy.deepcopy(alone.state_dict()))
    for optimizer in (alone, spread):
        run(optimizer, rows("cpu", 3))
    same(spread, alone, 1e-5)
    copied = copy.deepcopy(spread)
    for optimizer in (spread, copied):
        run(optimizer, rows("cpu", 2))
    assert_same(spread, copied)


@pytest.mark.parametrize("places", PLACES[2:4])
def test_the_reference_serves_a_cpu_and_a_gpu_with_one_warning(places: tuple[str, str]) -> None:
    with pytest.warns(UserWarning, match="slowly, because a part of the model is on the CPU") as caught:
        optimizer = AdaFisher(Spread(places))
        assert optimizer.backend == "reference"
        run(optimizer, rows("cpu", 2))
    assert sum("a part of the model" in str(warning.message) for warning in caught) == 1
    with pytest.raises(CafinError, match="'cuda' for arrays on the CPU"):
        run(AdaFisher(Spread(places), backend="cuda"), rows("cpu", 1))


@pytest.mark.multi_gpu
def test_a_step_on_two_gpus_is_a_launch_on_each() -> None:
    optimizer = run(AdaFisher(Spread(BOTH), TCov=100), rows("cpu", 2))
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [event.name for event in kernels].count("update") == 2 == len(kernels)
    assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_two_gpus_wait_for_nothing() -> None:
    optimizer = run(AdaFisher(Spread(BOTH), TCov=100), rows("cpu", 2))
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.multi_gpu
def test_a_capturable_optimizer_wants_one_device() -> None:
    optimizer = AdaFisher(Spread(BOTH), capturable=True)
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    with refused(optimizer, "step", "must lie on one device if capturable", "leave capturable out"):
        optimizer.step()


@pytest.mark.parametrize("moved", ["scale", "second.0.weight"])
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:1", marks=pytest.mark.multi_gpu)])
@pytest.mark.gpu
def test_a_parameter_that_moves_is_refused(moved: str, target: str) -> None:
    optimizer = run(AdaFisher(Spread(("cuda:0", "cuda:0"))), rows("cpu", 2))
    loss_of(optimizer.model, rows("cpu", 1)[0]).backward()
    parameter = optimizer.model.get_parameter(moved)
    grad = parameter.grad
    parameter.grad = None
    parameter.data = parameter.data.to(target)
    parameter.grad = grad.to(target)
    with refused(optimizer, "step", moved, "must stay"):
        optimizer.step()


@pytest.mark.parametrize("places", PLACES)
def test_curvature_is_computed_where_each_parameter_is(places: tuple[str, str]) -> None:
    one, other = (AdaFisher(Spread(at), lr=1e-3, TCov=1) for at in (places, ("cpu", "cpu")))
    for optimizer in (one, other):
        run(optimizer, rows("cpu", 3))
    mine, theirs = one.curvature(), other.curvature()
    assert list(mine) == list(theirs)
    for name, values in mine.items():
        assert values == pytest.approx(theirs[name], rel=1e-4)  # float32, three steps apart
