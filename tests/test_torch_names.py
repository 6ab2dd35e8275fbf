"""State dicts of the PyTorch optimizer by name: another order of modules, wrappers, `torch.distributed.checkpoint`, and
the momentum of other optimizers."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_equal_trees,
    assert_same,
    loss_of,
    mlp,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

dcp = pytest.importorskip("torch.distributed.checkpoint")
state_dicts = pytest.importorskip("torch.distributed.checkpoint.state_dict")


class Ordered(nn.Module):
    """The same modules, and so the same names, in any order."""

    def __init__(self, order: Any = "abcd") -> None:
        super().__init__()
        torch.manual_seed(8)
        made = {"a": nn.Linear(5, 6), "b": nn.LayerNorm(6), "c": nn.Linear(6, 6), "d": nn.Linear(6, 3)}
        for name in order:
            setattr(self, name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


def taken_over(source: AdaFisher, model: nn.Module, inner: nn.Module | None = None, **options: Any) -> AdaFisher:
    """Another optimizer that goes on from the source."""
    (inner or model).load_state_dict(source.model.state_dict())
    target = AdaFisher(model, TCov=2, **options)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    return target


def test_format() -> None:
    """torch's key in every group, and factors and count in the first: the same tensors, which a file holds once."""
    optimizer = run(AdaFisher(mlp("cpu"), TCov=1, param_groups=[{"params": "*.bias"}]), rows("cpu", 1))
    state = optimizer.state_dict()
    assert [group["param_names"] for group in state["param_groups"]] == [
        ["0.bias", "2.bias", "3.bias"],
        ["0.weight", "2.weight", "3.weight"],
    ]
    first, second = state["param_groups"]
    assert first["steps"] == 1 and list(first["factors"]) == ["0", "2", "3"]
    for pair, H, S in zip(first["factors"].values(), state["H_D"], state["S_D"]):
        assert pair["H"] is H and pair["S"] is S
    assert not {"steps", "factors"} & second.keys()
    assert not {"steps", "factors", "param_names"} & optimizer.param_groups[0].keys()
    theirs = torch.optim.AdamW(optimizer.model.named_parameters()).state_dict()
    if "param_names" in theirs["param_groups"][0]:  # PyTorch 2.6
        assert theirs["param_groups"][0]["param_names"] == [name for name, _ in optimizer.model.named_parameters()]


@given(st.permutations("abcd"))
@settings(deadline=None)
def test_the_order_of_modules_may_change(order: list[str]) -> None:
    source = run(AdaFisher(Ordered(), TCov=2, weight_decay=0.1), rows("cpu", 3))
    target = taken_over(source, Ordered(order))
    assert_same(target, source)
    assert_same(run(target, rows("cpu", 3)), run(source, rows("cpu", 3)))


def test_the_order_of_modules_on_each_device(device: str) -> None:
    source = run(AdaFisher(Ordered().to(device), TCov=2), rows(device, 3))
    target = taken_over(source, Ordered("dbca").to(device))
    assert_same(run(target, rows(device, 3)), run(source, rows(device, 3)))


def test_groups_are_found_by_their_parameters() -> None:
    asked = [{"params": "*.bias", "lr": 0.01}, {"params": "a.weight", "lr": 0.02}]
    source = run(AdaFisher(Ordered(), TCov=2, param_groups=asked), rows("cpu", 3))
    target = taken_over(source, Ordered("dcba"), param_groups=asked[::-1])
    assert [group["lr"] for group in target.param_groups] == [0.02, 0.01, 1e-3]
    assert_same(run(target, rows("cpu", 3)), run(source, rows("cpu", 3)))


def test_names_without_wrappers() -> None:
    """A checkpoint of the plain model serves the wrapped one, and the other way round."""
    wrap: list[Callable[[nn.Module], nn.Module]] = [nn.DataParallel, lambda m: torch.compile(m, backend="eager")]
    for wrapper in wrap:
        source = run(AdaFisher(Ordered(), TCov=2), rows("cpu", 3))
        inner = Ordered("badc")
        target = taken_over(source, wrapper(inner), inner)
        back = taken_over(
            source=type("Source", (), {"model": inner, "state_dict": target.state_dict})(), model=Ordered("cdab")
        )
        results = [run(optimizer, rows("cpu", 3)) for optimizer in (source, back)]
        assert_same(*results)
        assert target.state_dict()["param_groups"][0]["param_names"][:2] == ["b.weight", "b.bias"]


def test_other_names_are_taken_in_their_order_or_refused() -> None:
    source = run(AdaFisher(mlp("cpu"), TCov=2), rows("cpu", 3))
    within = nn.Sequential(mlp("cpu"))  # called "0.0.weight" and so on
    within[0].load_state_dict(source.model.state_dict())
    target = AdaFisher(within, TCov=2)
    target.load_state_dict(source.state_dict())
    for mine, theirs in zip(target.state_dict()["state"].values(), source.state_dict()["state"].values()):
        assert_equal_trees(mine, theirs)
    given_ = copy.deepcopy(source.state_dict())
    given_["param_groups"][0]["param_names"][2] = "norm.weight"
    with refused(source, "name the model's parameters, got none called '2.weight'", "remove 'param_names'"):
        source.load_state_dict(given_)
    del given_["param_groups"][0]["param_names"]
    source.load_state_dict(given_)


# torch.distributed.checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "full": {"full_state_dict": True},
    "full, on the CPU": {"full_state_dict": True, "cpu_offload": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_distributed_checkpoints_of_one_process(name: str, tmp_path: Path, device: str) -> None:
    """Saved and loaded into a fresh optimizer of another order of modules; it goes on as the first one does."""
    options = state_dicts.StateDictOptions(**OPTIONS[name])

    def state_of(model: nn.Module, optimizer: AdaFisher) -> dict[str, Any]:
        of_model, of_optimizer = state_dicts.get_state_dict(model, optimizer, options=options)
        return {"model": of_model, "optimizer": of_optimizer}

    source = AdaFisher(Ordered().to(device), TCov=2, param_groups=[{"params": "*.bias", "lr": 0.01}])
    source.model.a.requires_grad_(False)
    run(source, rows(device, 5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("error", message="AdaFisher")  # its first step with lr = 0 is no news
        dcp.save(state_of(source.model, source), checkpoint_id=tmp_path)
        model = Ordered("cdab").to(device)
        model.a.requires_grad_(False)
        target = AdaFisher(model, TCov=2, param_groups=[{"params": "*.bias", "lr": 0.01}])
        given_ = state_of(model, target)
        dcp.load(given_, checkpoint_id=tmp_path)
        state_dicts.set_state_dict(
            model, target, model_state_dict=given_["model"], optim_state_dict=given_["optimizer"], options=options
        )
    assert_same(target, source)
    assert "factors" not in target.param_groups[0]
    assert_same(run(target, rows(device, 4)), run(source, rows(device, 4)))


def test_flattened_state_dicts_are_refused() -> None:
    """They keep nothing of a group but what the optimizer's own has, so no factors."""
    options = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)
    source, target = (run(AdaFisher(mlp("cpu"), TCov=2), rows("cpu", 2)) for _ in range(2))
    flat = state_dicts.get_optimizer_state_dict(source.model, source, options=options)
    with refused(target, "flatten_optimizer_state_dict=True, which drops the factors"):
        state_dicts.set_optimizer_state_dict(target.model, target, flat, options=options)


# Momentum of other optimizers


def trained(model: nn.Module, steps: int, make: Callable[[nn.Module], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(model)
    for x in rows(str(next(model.parameters()).device), steps):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return optimizer


ADAMS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, amsgrad=True),
}


@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_momentum_of_adam(kind: type[AdaFisher], name: str, device: str) -> None:
    """`exp_avg` and the count that corrects its bias; the first step is a sampled one, and moves by that momentum."""
    model = mlp(device)
    adam = trained(model, 3, ADAMS[name])
    optimizer = kind(model, TCov=2)
    given_ = adam.state_dict()
    before = copy.deepcopy(given_)
    optimizer.load_momentum(given_)
    assert_equal_trees(given_, before)
    assert optimizer.samples and optimizer.steps == 0
    for p in model.parameters():
        assert optimizer.state[p].keys() == {"step", "exp_avg"} and optimizer.state[p]["step"] == 3
        assert torch.equal(optimizer.state[p]["exp_avg"], adam.state[p]["exp_avg"])
        assert optimizer.state[p]["exp_avg"].data_ptr() != adam.state[p]["exp_avg"].data_ptr()
    old = [(p.detach().clone(), adam.state[p]["exp_avg"].clone()) for p in model.parameters()]
    run(optimizer, rows(device, 1))
    for p, (value, average) in zip(model.parameters(), old):
        m = 0.9 * average + 0.1 * p.grad
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m)
        assert ((p - value) * m <= 0).all()


def test_momentum_by_groups_and_by_names() -> None:
    """Equal groups; one group for all of a model that is divided here; and any order where names are known."""
    groups = [{"params": "*.bias", "weight_decay": 0.0}]
    for make, asked in (
        (lambda m: torch.optim.AdamW(m.parameters()), groups),
        (
            lambda m: torch.optim.AdamW(
                [{"params": [p for n, p in m.named_parameters() if n.endswith(s)]} for s in ("bias", "weight")]
            ),
            groups,
        ),
        (lambda m: torch.optim.AdamW(list(m.named_parameters())[::-1]), None),
    ):
        model = mlp("cpu")
        adam = trained(model, 2, make)
        optimizer = AdaFisher(model, param_groups=asked)
        optimizer.load_momentum(adam.state_dict())
        for p in model.parameters():
            assert torch.equal(optimizer.state[p]["exp_avg"], adam.state[p]["exp_avg"])


def test_parameters_that_the_other_one_never_updated_start_afresh() -> None:
    model = mlp("cpu")
    model[0].requires_grad_(False)
    adam = trained(model, 2, ADAMS["AdamW"])
    model[0].requires_grad_(True)
    optimizer = AdaFisher(model)
    optimizer.load_momentum(adam.state_dict())
    run(optimizer, rows("cpu", 1))
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1, 1, 3, 3, 3, 3]


def adamw_of_mlp() -> dict[str, Any]:
    return trained(mlp("cpu"), 1, ADAMS["AdamW"]).state_dict()


NO_MOMENTUM: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "SGD": (lambda: trained(mlp("cpu"), 1, lambda m: torch.optim.SGD(m.parameters(), 0.1)).state_dict(), ("exp_avg",)),
    "ours": (lambda: run(AdaFisher(mlp("cpu")), rows("cpu", 1)).state_dict(), ("no factors", "H_D")),
    "a list": (lambda: [1], ("list",)),
    "before its first step": (lambda: torch.optim.AdamW(mlp("cpu").parameters()).state_dict(), ("exp_avg",)),
    "no groups": (lambda: {"state": {0: {"step": 1, "exp_avg": torch.zeros(7, 5)}}}, ("the key 'param_groups'",)),
    "groups of nothing": (
        lambda: {"state": {0: {"step": 1, "exp_avg": torch.zeros(7, 5)}}, "param_groups": [{}]},
        ("`param_groups` must be a list of groups",),
    ),
    "groups of lists": (
        lambda: {"state": {0: {"step": 1, "exp_avg": torch.zeros(7, 5)}}, "param_groups": [{"params": [[]]}]},
        ("`param_groups` must be a list of groups",),
    ),
    "tensors for states": (
        lambda: {**(state := adamw_of_mlp()), "state": {**state["state"], 1: torch.ones(2)}},
        ("`state[1]` must be a mapping", "Tensor"),
    ),
    "another model": (
        lambda: trained(Ordered(), 1, ADAMS["AdamW"]).state_dict(),
        ("[6] parameters", "[8]", "named_parameters"),
    ),
    "other shapes": (
        lambda: trained(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))), 1, ADAMS["AdamW"]).state_dict(),
        ("state[0]['exp_avg']", "(7, 5)"),
    ),
}


@pytest.mark.parametrize("name", NO_MOMENTUM)
def test_momentum_that_is_refused(name: str) -> None:
    make, words = NO_MOMENTUM[name]
    optimizer = run(AdaFisher(mlp("cpu")), rows("cpu", 1))
    with refused(optimizer, "load_momentum", *words):
        optimizer.load_momentum(make())


def test_momentum_of_a_parameter_of_integers_is_refused() -> None:
    """It never trains, so it has none."""
    model = mlp("cpu")
    model.places = nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = run(AdaFisher(model), rows("cpu", 1))
    entry = {"step": 1, "exp_avg": torch.zeros(3)}
    (index,) = (k for k, p in enumerate(optimizer.param_groups[0]["params"]) if p is model.places)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][index] = entry
    words = f"state[{index}]['exp_avg']` must be left out, as its parameter does not train"
    with refused(optimizer, "load_state_dict", words):
        optimizer.load_state_dict(state)
    with refused(optimizer, "load_momentum", words):
        optimizer.load_momentum({"state": {index: entry}, "param_groups": state["param_groups"]})


def test_adams_state_is_refused_with_the_way_to_take_it_over() -> None:
    state = trained(mlp("cpu"), 1, ADAMS["AdamW"]).state_dict()
    with refused(AdaFisher(mlp("cpu")), "load_state_dict: `state_dict` must have the key 'H_D'", "load_momentum("):
        optimizer = AdaFisher(mlp("cpu"))
        optimizer.load_state_dict(state)


def test_a_file_holds_factors_once() -> None:
    file = io.BytesIO()
    torch.save(run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 1)).state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for pair, H in zip(loaded["param_groups"][0]["factors"].values(), loaded["H_D"]):
        assert pair["H"].data_ptr() == H.data_ptr()
