"""The PyTorch optimizer on a GPU: what a step costs, streams, graphs, devices, and what is refused there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    Net,
    assert_same,
    exact_float32,
    images,
    loss_of,
    mlp,
    net,
    refused,
    rows,
    run,
)

from cafin_cupy import CafinError, backend, cuda_factors  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW  # noqa: E402

pytestmark = pytest.mark.gpu
LONG = 1_000_000_000  # clock cycles: about half a second of an idle wait on the GPU


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_float32():
        yield


def trained(kind: type[AdaFisher] = AdaFisher, every: int = 100, steps: int = 3) -> AdaFisher:
    optimizer = run(kind(net("cuda"), TCov=every, weight_decay=0.1), images("cuda", *[4] * steps))
    assert optimizer.backend == "cuda"
    return optimizer


def kernels(work: Callable[[], object], folder: Path) -> list[str]:
    """Names of the kernels that `work` launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "kernel"]


def backward(optimizer: AdaFisher, batch: int = 4) -> None:
    optimizer.zero_grad()
    loss_of(optimizer.model, images("cuda", batch)[0]).backward()


# Cost


@pytest.mark.parametrize("kind", [AdaFisher, AdaFisherW])
def test_an_unsampled_step_is_one_kernel(kind: type[AdaFisher], tmp_path: Path) -> None:
    optimizer = trained(kind)
    for _ in range(2):  # the first profile of a process may come too late
        backward(optimizer)
        names = kernels(optimizer.step, tmp_path)
    assert names == ["update"]


@pytest.mark.parametrize("batch, launches", [(cuda_factors.BATCH_BYTES, 1), (0, 6)], ids=["small", "large"])
def test_a_sampled_step_is_three_kernels_and_one_for_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, launches: int
) -> None:
    """Small layers share a launch; a large one has its own."""
    monkeypatch.setattr(cuda_factors, "BATCH_BYTES", batch)
    optimizer = trained(every=1)
    for _ in range(2):
        names = kernels(lambda: backward(optimizer), tmp_path)
        step = kernels(optimizer.step, tmp_path)
    assert names.count("column_sums") == launches
    assert step == ["fold", "average", "update"]


def test_a_script_may_overwrite_what_layers_have_read_once_backward_returns() -> None:
    """Layers that wait for a common launch are read before that."""
    one, other = (AdaFisher(mlp("cuda"), TCov=1) for _ in range(2))
    for x in rows("cuda", 3):
        for optimizer, overwrites in ((one, True), (other, False)):
            optimizer.zero_grad()
            read = x.clone()
            for part in range(2):  # two backward passes a step
                loss_of(optimizer.model, read).backward()
                assert not optimizer._factors._waiting
                if overwrites and part:
                    read.fill_(torch.nan)
            optimizer.step()
    assert_same(one, other)


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    """What its layers had handed over is forgotten by zero_grad, and the next pass is read in time again."""
    one, other = (AdaFisher(mlp("cuda"), TCov=1) for _ in range(2))

    def fail(grad: Tensor) -> Tensor:
        raise RuntimeError("a hook of the script")

    for x in rows("cuda", 3):
        broken = x.clone().requires_grad_()
        broken.register_hook(fail)
        with pytest.raises(RuntimeError, match="a hook of the script"):
            loss_of(one.model, broken).backward()
        for optimizer in (one, other):
            optimizer.zero_grad()
            read = x.clone()
            loss_of(optimizer.model, read).backward()
            read.fill_(torch.nan)
            optimizer.step()
    assert_same(one, other)


def test_layers_of_several_streams() -> None:
    """Arrays that wait are read on the stream that made them, and the step waits for it."""
    one, other = (AdaFisher(mlp("cuda"), TCov=1) for _ in range(2))
    stream = torch.cuda.Stream()
    for x in rows("cuda", 3, batch=4096):
        one.zero_grad()
        first, *others = one.model
        y = first(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in others:
                y = layer(y)
        torch.cuda.current_stream().wait_stream(stream)
        y.float().square().mean().backward()
        one.step()
        run(other, [x])
    assert_same(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_activations_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    """No kernel but column_sums touches them, and the sums are those of the same numbers in float32."""
    optimizers = [AdaFisher(net("cuda"), TCov=1) for _ in range(2)]
    pairs = []
    for _, module, index, layer in optimizers[0]._modules:
        shape = (5, module.in_features) if isinstance(module, nn.Linear) else (5, module.weight.shape[0], 9, 8)
        if isinstance(module, nn.LayerNorm):
            shape = (5, 8)
        if isinstance(module, nn.Conv2d):
            shape = (5, module.in_channels, 9, 8)
        h = torch.randn(shape, device="cuda").to(dtype)
        pairs.append((index, h, torch.randn_like(module(h.float())).to(dtype), layer))

    def gather(optimizer: AdaFisher, widen: bool) -> None:
        for index, h, s, layer in pairs:
            optimizer._receive(index, *((x.float() if widen else x) for x in (h, s)), layer)

    for optimizer in optimizers:
        gather(optimizer, False)  # compiles
        optimizer.zero_grad()
    for _ in range(2):  # a process's first profile may be empty
        optimizers[0].zero_grad()
        names = kernels(lambda: gather(optimizers[0], False), tmp_path)
    assert set(names) == {"column_sums"}
    gather(optimizers[1], True)
    for optimizer in optimizers:
        optimizer._factors.update()
    for narrow, wide in zip(*(optimizer.factors().values() for optimizer in optimizers)):
        for a, b in zip(narrow, wide):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # float32 sums in another order


def test_an_unsampled_step_allocates_nothing() -> None:
    """Though every iteration brings gradients at new addresses."""
    import cupy

    optimizer, kept = trained(), []
    for _ in range(5):
        backward(optimizer)
        kept.append([p.grad for p in optimizer.model.parameters()])
        pool = cupy.get_default_memory_pool().used_bytes()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        optimizer.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert cupy.get_default_memory_pool().used_bytes() == pool
    assert len({grads[0].data_ptr() for grads in kept}) == 5


def test_memory_does_not_grow() -> None:
    """Sampled steps with batches of changing size reuse their workspaces, or free them."""
    optimizer = trained(every=1)
    sizes = (4, 7, 4, 2)

    def used() -> int:
        optimizer.zero_grad()
        for size in sizes:
            backward(optimizer, size)
            optimizer.step()
        torch.cuda.synchronize()
        optimizer.zero_grad()
        return torch.cuda.memory_allocated()

    used()
    second = used()
    for _ in range(5):
        assert used() == second


# Streams, graphs, devices


def wide(device: str) -> Net:
    """Large enough for many blocks in every kernel."""
    torch.manual_seed(7)
    model = Net()
    model.fc, model.ln, model.head = nn.Linear(6, 700), nn.LayerNorm(700), nn.Linear(700, 300)
    return model.to(device)


def large(device: str) -> list[Tensor]:
    torch.manual_seed(8)
    return [torch.randn(257, 3, 33, 31, device=device) for _ in range(4)]


def test_runs_repeat_bit_for_bit() -> None:
    assert_same(*(run(AdaFisher(wide("cuda"), TCov=2), large("cuda")) for _ in range(2)))


def test_work_follows_the_current_stream() -> None:
    """Each iteration starts with a wait on the stream: work on another one would not see its results."""
    batches, stream = large("cuda"), torch.cuda.Stream()
    optimizer = AdaFisher(wide("cuda"), TCov=2)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for x in batches:
            torch.cuda._sleep(LONG // 20)
            run(optimizer, [x])
    stream.synchronize()
    assert_same(optimizer, run(AdaFisher(wide("cuda"), TCov=2), batches))


def test_forward_and_backward_in_a_graph_with_the_step_outside() -> None:
    optimizer = AdaFisher(mlp("cuda"), TCov=100)
    run(optimizer, rows("cuda", 1))
    batches = rows("cuda", 4)
    x = batches[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as the manual of CUDA graphs asks for
        for _ in range(3):
            loss_of(optimizer.model, x).backward()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(optimizer.model, x).backward()
    for batch in batches:
        x.copy_(batch)
        graph.replay()  # writes the gradients anew
        optimizer.step()
    other = AdaFisher(mlp("cuda"), TCov=100)
    assert_same(optimizer, run(other, rows("cuda", 1) + batches), 1e-5)  # a captured cuBLAS may choose another kernel


# Refused


@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_model_that_moves_after_its_first_step_is_refused(before: str, after: str) -> None:
    optimizer = run(AdaFisher(mlp(before)), rows(before, 2))
    optimizer.model.to(after)
    loss_of(optimizer.model, rows(after, 1)[0]).backward()
    place = "cuda:0" if before == "cuda" else "cpu"
    with refused(optimizer, "step", f"must stay on {place}", "move the model before the first step"):
        optimizer.step()


def test_a_model_may_move_before_its_first_step() -> None:
    optimizer = AdaFisher(mlp("cpu"))
    optimizer.model.to("cuda")
    run(optimizer, rows("cuda", 2))
    assert optimizer.backend == "cuda"
    moved = AdaFisher(mlp("cpu").to("cuda"))
    assert_same(optimizer, run(moved, rows("cuda", 2)))


def test_other_dtypes_fall_back_to_the_reference_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float64
    monkeypatch.setattr(backend, "_warned", set())
    on_gpu = AdaFisher(mlp("cpu").to("cuda", dtype), TCov=1)
    with pytest.warns(UserWarning) as caught:
        run(on_gpu, [x.to("cuda", dtype) for x in rows("cpu", 3)])
    said = f"these arrays are {dtype}".replace("torch.", "")
    assert len([w for w in caught if said in str(w.message)]) == 1
    assert on_gpu.backend == "reference"
    on_cpu = run(AdaFisher(mlp("cpu").to(dtype), TCov=1), [x.to(dtype) for x in rows("cpu", 3)])
    for p, q in zip(on_gpu.model.parameters(), on_cpu.model.parameters()):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-9, atol=1e-9)  # rounding of three steps


def test_a_model_that_changes_to_float64_after_its_first_step_is_refused() -> None:
    """The kernels would read its memory as float32."""
    optimizer = run(AdaFisher(mlp("cuda")), rows("cuda", 2))
    optimizer.model.double()
    loss_of(optimizer.model, rows("cuda", 1)[0].double()).backward()
    with refused(optimizer, "step", "`0.weight` must", "float32", "got float64"):
        optimizer.step()


def test_parameters_of_another_dtype_that_join_later_are_refused() -> None:
    optimizer = run(AdaFisher(mlp("cuda")), rows("cuda", 2))
    extra = nn.Parameter(torch.ones(4, device="cuda", dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    with refused(optimizer, "step", "float32", "got float64"):
        optimizer.step()
    assert torch.equal(extra, torch.ones_like(extra))


def test_kernels_are_refused_for_other_dtypes_if_asked_for() -> None:
    optimizer = AdaFisher(mlp("cpu").to("cuda", torch.float64), backend="cuda")
    with pytest.raises(CafinError, match="the kernels take float32, bfloat16, float16 and these arrays are float64"):
        optimizer.step()


def test_momentum_of_another_dtype_is_refused() -> None:
    """The kernels write no float64."""
    optimizer = trained()
    backward(optimizer)
    state = optimizer.state[optimizer.model.head.weight]
    state["exp_avg"] = state["exp_avg"].double()
    with refused(optimizer, "momentum of head.weight", "float32", "float64"):
        optimizer.step()


def test_a_hook_that_changes_a_gradient_in_place_is_noticed() -> None:
    """It comes after ours, while the layer waits for a common launch: the layer is left out, with a warning; afterwards
    each layer is read at once."""
    one, other = (AdaFisher(mlp("cuda"), TCov=1) for _ in range(2))

    def pass_of(optimizer: AdaFisher, x: Tensor, spoils: bool) -> None:
        optimizer.zero_grad()
        first, *others = optimizer.model
        y = first(x)
        if spoils:
            y.register_hook(lambda s: s.mul_(0.5))
        for layer in others:
            y = layer(y)
        y.float().square().mean().backward()

    first, second = rows("cuda", 2)
    before = [f.clone() for f in one.factors()["0"]]
    with pytest.warns(UserWarning, match="changed in place before they were read: .*0"):
        pass_of(one, first, True)
    one.step()
    assert all(map(torch.equal, before, one.factors()["0"]))
    assert not torch.equal(one.factors()["3"][0], torch.ones_like(one.factors()["3"][0]))
    assert not any(one.skipped_refreshes().values())  # which tell of NaN alone
    other.load_state_dict(one.state_dict())
    other.model.load_state_dict(one.model.state_dict())
    for optimizer in (one, other):
        pass_of(optimizer, second, optimizer is one)
        optimizer.step()
    for mine, plain in zip(one.factors()["0"], other.factors()["0"]):
        assert torch.equal(mine, plain)  # read before the hook
