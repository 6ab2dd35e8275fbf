"""Models and steps within `torch.compile`: the factors of the eager model, two graphs, and no break of them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_same,
    everything,
    hook_count,
    images,
    loss_of,
    mlp,
    near,
    net,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy.adapters import torch_compiled  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

# Without a C++ compiler. Whatever memory a compiler takes or gives back, "aot_eager" does so.
BACKENDS = [pytest.param("eager", marks=pytest.mark.host), "aot_eager"]
# test_torch_unseen.py has what older versions do.
pytestmark = pytest.mark.skipif(
    not torch_compiled.FOLLOWS, reason="this PyTorch breaks the graph at a hook on a tensor"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled_run(optimizer: AdaFisher, compiled: Any, batches: list[Tensor], micro: int = 1) -> AdaFisher:
    for x in batches:
        optimizer.zero_grad()
        for part in x.chunk(micro):
            (loss_of(compiled, part) / micro).backward()
        optimizer.step()
    return optimizer


MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[str], list[Tensor]]]] = {
    "mlp": (mlp, lambda device: rows(device, 7)),
    "every layer, in place": (net, lambda device: images(device, *[4] * 7)),
}
ORDERS: dict[str, Callable[[nn.Module, str], tuple[AdaFisher, Any]]] = {
    "optimizer first": lambda m, b: (AdaFisher(m, TCov=3), torch.compile(m, backend=b, fullgraph=True)),
    "model first": lambda m, b: (lambda c: (AdaFisher(m, TCov=3), c))(torch.compile(m, backend=b, fullgraph=True)),
    "of the compiled model": lambda m, b: (lambda c: (AdaFisher(c, TCov=3), c))(torch.compile(m, backend=b)),
}


def without_wrapper(optimizer: AdaFisher) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value for name, value in everything(optimizer).items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error:.*AdaFisher")
def test_factors_are_those_of_the_eager_model(name: str, order: str, backend: str, device: str) -> None:
    """With one graph for sampled steps, one for the others, and no break. The compiler may round otherwise."""
    make, batches = MODELS[name]
    optimizer, compiled = ORDERS[order](make(device), backend)
    compiled_run(optimizer, compiled, batches(device))
    assert graphs() == 2 and not counters["graph_break"]
    eager = everything(run(AdaFisher(make(device), TCov=3), batches(device)))
    for key, value in without_wrapper(optimizer).items():
        if isinstance(value, Tensor):
            near(value, eager[key], key, 5 * TOLERANCE)  # seven steps
        else:
            assert value == eager[key], key
    assert all(not torch.equal(F, torch.ones_like(F)) for pair in optimizer.factors().values() for F in pair)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_resumed_run_is_compiled_on_any_step(steps: int, device: str) -> None:
    """Its first call may be on an unsampled step: hooks wait for it, closed."""
    source = run(AdaFisher(mlp(device), TCov=3), rows(device, steps))
    optimizer = AdaFisher(mlp(device), TCov=3)
    optimizer.model.load_state_dict(source.model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    compiled = torch.compile(optimizer.model, backend="aot_eager", fullgraph=True)
    compiled_run(optimizer, compiled, rows(device, 6))
    assert graphs() == 2
    assert_same(optimizer, run(source, rows(device, 6)), 5 * TOLERANCE)


def test_an_unsampled_graph_holds_nothing_of_ours(device: str) -> None:
    """And the hooks of a compiled model stay, closed; those of an eager one go."""
    seen: list[tuple[bool, str]] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append((optimizer.samples, "torch_compiled_watch" in module.print_readable(print_output=False)))
        return module.forward

    optimizer = AdaFisher(mlp(device), TCov=3)
    compiled = torch.compile(optimizer.model, backend=backend)
    compiled_run(optimizer, compiled, rows(device, 5))
    assert seen == [(True, True), (False, False)]
    assert hook_count(optimizer.model) == 3 and not any(tap.open for tap in optimizer._gates)
    eager = run(AdaFisher(mlp(device), TCov=3), rows(device, 2))
    assert hook_count(eager.model) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_equal_the_full_batch(backend: str, device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=2)
    compiled_run(optimizer, torch.compile(optimizer.model, backend=backend), rows(device, 4), micro=3)
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=2), rows(device, 4), micro=3), 5 * TOLERANCE)


class Overwriting(nn.Module):
    """Calls a layer twice and once for nothing, and overwrites the input of another, which autograd does not keep, as
    its weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.frozen, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.first(x)).clone()
        y = self.frozen(h.detach())
        h.mul_(0.0).add_(1.0)
        self.first(x)
        return self.last(y * h)


def test_repeated_layers_and_overwritten_inputs(device: str) -> None:
    optimizer, eager = (AdaFisher(Overwriting().to(device), TCov=2) for _ in range(2))
    compiled_run(optimizer, torch.compile(optimizer.model, backend="aot_eager"), rows(device, 4))
    assert_same(optimizer, run(eager, rows(device, 4)), 5 * TOLERANCE)


def test_a_compiled_backward_pass_may_use_its_memory_again(device: str) -> None:
    """So input and output gradient are read at once, not when small layers share a launch."""
    optimizer, eager = (AdaFisher(nn.Sequential(nn.Linear(5, 3)).to(device), TCov=1) for _ in range(2))
    eager.model.load_state_dict(optimizer.model.state_dict())
    x = rows(device, 1)[0]
    run(eager, [x])
    (tap,) = optimizer._gates
    kept = x.clone()

    def hand_over(s: Tensor) -> None:
        mine = s.clone()
        torch.ops.cafin_cupy.receive(kept, mine, tap.key, 0)
        kept.fill_(7.0)
        mine.fill_(7.0)

    with torch.no_grad():
        out = optimizer.model(x)
    out.requires_grad_().register_hook(hand_over)
    out.square().mean().backward()
    optimizer.model[0].weight.grad = torch.zeros_like(optimizer.model[0].weight)
    optimizer.step()
    for mine, theirs in zip(optimizer.factors()["0"], eager.factors()["0"]):
        near(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_and_frozen_layers(backend: str, device: str) -> None:
    runs = []
    for compiling in (False, True):
        torch._dynamo.reset()
        model = mlp(device)
        model[0].requires_grad_(False)
        optimizer = AdaFisher(model, TCov=2)
        called: Any = torch.compile(model, backend=backend) if compiling else model
        for t, x in enumerate(rows(device, 6)):
            if t == 4:
                model[0].requires_grad_(True)
            compiled_run(optimizer, called, [x])
            model.eval()
            with torch.no_grad():
                called(x)
            loss_of(called, x).backward()  # on the next step's account, but in evaluation
            model.zero_grad()
            model.train()
        runs.append(optimizer)
    assert_same(*runs, 5 * TOLERANCE)


def test_a_compiled_model_outlives_its_optimizer(device: str) -> None:
    optimizer = AdaFisher(mlp(device), TCov=1)
    model = optimizer.model
    compiled = torch.compile(model, backend="aot_eager")
    compiled_run(optimizer, compiled, rows(device, 2))
    loss = loss_of(compiled, rows(device, 1)[0])
    del optimizer
    gc.collect()
    loss.backward()
    assert hook_count(model) == 0
    other = AdaFisher(model, TCov=1)
    torch._dynamo.reset()
    compiled_run(other, torch.compile(model, backend="aot_eager"), rows(device, 2))
    assert all(not torch.equal(F, torch.ones_like(F)) for pair in other.factors().values() for F in pair)


def test_a_model_that_ran_compiled_before_is_warned_of(device: str) -> None:
    model = mlp(device)
    compiled = torch.compile(model, backend="eager")
    loss_of(compiled, rows(device, 1)[0]).backward()
    optimizer = AdaFisher(model, TCov=1)
    with pytest.warns(UserWarning, match=r"call torch\.compiler\.reset\(\) behind it"):
        compiled_run(optimizer, compiled, rows(device, 2))
    torch.compiler.reset()
    before = everything(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled_run(optimizer, compiled, rows(device, 1))
    assert not any(torch.equal(before[f"H of {name}"], H) for name, (H, _) in optimizer.factors().items())


def test_no_compiler_replays_a_sampled_step(device: str) -> None:
    """By a CUDA graph, where the host would not count what is summed."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    seen: list[tuple[bool, bool]] = []

    def backward(graph: Any, inputs: Any) -> Any:
        seen.append((optimizer.samples, get_first_incompatible_cudagraph_node(graph) is not None))
        return make_boxed_func(graph.forward)

    optimizer = AdaFisher(mlp(device), TCov=3)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)
    compiled_run(optimizer, torch.compile(optimizer.model, backend=backend), rows(device, 5))
    assert seen == [(True, True), (False, False)]


def test_no_compiler_drops_a_layer(device: str) -> None:
    """As those that split a graph do with what nobody reads."""

    def without_dead_code(graph: Any, inputs: Any) -> Any:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph.forward

    optimizer = AdaFisher(mlp(device), TCov=3)
    compiled_run(optimizer, torch.compile(optimizer.model, backend=without_dead_code), rows(device, 4))
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=3), rows(device, 4)), 5 * TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_whose_caller_is_not_compiled(backend: str, device: str) -> None:
    """Dynamo does not follow the forward of a Sequential that is compiled in place: the hook is a graph by itself."""
    optimizer = AdaFisher(mlp(device), TCov=3)
    optimizer.model.compile(backend=backend)
    compiled_run(optimizer, optimizer.model, rows(device, 4))
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=3), rows(device, 4)), 5 * TOLERANCE)


@pytest.mark.gpu
def test_cuda_graphs_of_a_compiler() -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs are not emulated")
    optimizer = AdaFisher(mlp("cuda"), TCov=3)
    compiled_run(optimizer, torch.compile(optimizer.model, backend="cudagraphs"), rows("cuda", 9))
    assert_same(optimizer, run(AdaFisher(mlp("cuda"), TCov=3), rows("cuda", 9)), 5 * TOLERANCE)


class Repeating(nn.Module):
    """Calls a layer twice with the same input, which a compiler may take for one call, and computes blocks again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        self.norm = nn.LayerNorm(6)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.first, x, use_reentrant=False)
        h = self.norm(h) + self.norm(h)
        h = checkpoint(self.second, h, use_reentrant=False)
        return self.last(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_are_alike_and_blocks_that_are_computed_again(backend: str, device: str) -> None:
    model = Repeating().to(device)
    optimizer = AdaFisher(copy.deepcopy(model), TCov=2, averaging="paper")
    compiled_run(optimizer, torch.compile(optimizer.model, backend=backend), rows(device, 4), micro=2)
    eager = run(AdaFisher(model, TCov=2, averaging="paper"), rows(device, 4), micro=2)
    assert_same(optimizer, eager, 5 * TOLERANCE)


class Remembering(nn.Module):
    """Changes an object ahead of its layer and behind it, as models of transformers do with their `config`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.calls, self.kind = 0, ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.fc(x)
        if not self.kind:
            self.kind = "doubled"
        return 2 * y if self.kind == "doubled" else y


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_forward_does_to_objects_is_done(backend: str, device: str) -> None:
    x = rows(device, 1)[0]
    optimizer = AdaFisher(Remembering().to(device), TCov=1)
    model = optimizer.model
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert (model.calls, model.kind) == (1, "doubled")
    near(y, 2 * model.fc(x))


def test_an_exported_model_is_no_business_of_the_optimizer() -> None:
    optimizer = AdaFisher(mlp("cpu"), TCov=1)
    graph = torch.export.export(optimizer.model, (rows("cpu", 1)[0],)).graph
    assert "receive" not in str(graph)
    assert_same(run(optimizer, rows("cpu", 2)), run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whole", [False, True], ids=["step", "iteration"])
def test_a_compiled_function_may_call_step(whole: bool, backend: str, device: str) -> None:
    """The graph breaks there, and nothing of the step is traced."""
    optimizer = AdaFisher(mlp(device), TCov=3)

    def iteration(x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(optimizer.model, x).backward()
        optimizer.step()

    def step(x: Tensor) -> None:
        optimizer.step()

    compiled = torch.compile(iteration if whole else step, backend=backend)
    for x in rows(device, 7):
        if not whole:
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
        compiled(x)
    assert_same(optimizer, run(AdaFisher(mlp(device), TCov=3), rows(device, 7)), 5 * TOLERANCE)
    reasons = [reason.splitlines()[0] for reason in counters["graph_break"]]
    assert all("torch.compiler.disable" in reason or "backward() call" in reason for reason in reasons), reasons
    assert any("torch.compiler.disable" in reason for reason in reasons)
