"""Faults that users of neighbouring projects reported, each with its public thread and the right behaviour: devices,
processes, and who holds memory for how long. See test_field_reports.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    assert_same,
    everything,
    exact_float32,
    hook_count,
    images,
    loss_of,
    mlp,
    net,
    python,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
)

from cafin_cupy import CafinError, runtime  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402
from cafin_cupy.arrays import view  # noqa: E402

gpu = pytest.mark.gpu
LONG = 1_000_000_000  # clock cycles: about half a second of an idle wait on the GPU


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_float32():
        yield


def sliced(g: Tensor) -> Tensor:
    wide = torch.full((*g.shape[:-1], 2 * g.shape[-1]), torch.nan, device=g.device)
    wide[..., ::2] = g
    return wide[..., ::2]


@pytest.fixture
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of one rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("when", ["model", "parameter", "afterwards", "gradient"])
def test_a_tensor_that_wraps_others(when: str) -> None:
    """bitsandbytes 1633: illegal access under FSDP2, as a DTensor has no memory of its own: the rank's part is updated
    (more in shard_checks.py), others are refused before anything has changed; and where fully_shard replaces the
    parameters later, no silence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = mlp("cpu")
    if when == "model":
        fully_shard(model)
        got, alone = run(AdaFisher(model, TCov=1), rows("cpu", 2)), run(AdaFisher(mlp("cpu"), TCov=1), rows("cpu", 2))
        for p, q in zip(got.model.parameters(), alone.model.parameters()):
            assert torch.equal(p.full_tensor(), q)
            assert torch.equal(got.state[p]["exp_avg"].full_tensor(), alone.state[q]["exp_avg"])
        return
    if when == "parameter":
        hooks = hook_count(model)
        model[3].weight = nn.Parameter(DTensor.from_local(model[3].weight.detach(), mesh, [Partial()]))
        with pytest.raises(CafinError, match=r"AdaFisher: `model \(3.weight\)` must be sharded or replicated"):
            AdaFisher(model)
        assert hook_count(model) == hooks
        return
    optimizer = run(AdaFisher(model, TCov=1), rows("cpu", 2))
    optimizer.zero_grad()
    if when == "afterwards":
        before = [p.detach().clone() for p in model.parameters()]
        fully_shard(model)
    loss_of(model, rows("cpu", 1)[0]).backward()
    if when == "gradient":
        weight = model[3].weight
        weight.grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
        with refused(optimizer, "step: `gradient of 3.weight` must", "memory of its own", "DTensor"):
            optimizer.step()
        return
    factors = [f.clone() for pair in optimizer.factors().values() for f in pair]
    with pytest.raises(CafinError, match="step: `model` must keep the parameters that the optimizer was made for"):
        optimizer.step()
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before))
    assert all(map(torch.equal, factors, (f for pair in optimizer.factors().values() for f in pair)))
    assert optimizer.steps == 2


def test_kernels_need_no_headers_and_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy 8466: NVRTC does not find cuda_fp16.h without a toolkit. No header is included, whatever the kernel reads;
    and a missing NVRTC is named with its wheel."""
    for stem in runtime.KERNELS:
        assert "#include" not in runtime.source(stem), stem

    def missing() -> bool:
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    monkeypatch.setattr(runtime, "_cuda_works", missing)
    assert "nvidia-cuda-nvrtc" in (runtime.cuda_problem() or "")


@pytest.mark.multi_gpu
@gpu
@pytest.mark.parametrize("current", [0, 1])
def test_each_gpu_has_kernels_of_its_own_and_the_current_one_stays(current: int) -> None:
    """cupy 5795, 9094: a kernel loaded for one GPU is an invalid handle on another, and the current device is reset to
    0. Here one on each, whichever is current, and the same bits from both."""
    torch.cuda.set_device(current)
    try:
        found = []
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            optimizer = run(AdaFisher(net(device), TCov=2), [x.to(device) for x in images("cpu", 4, 4, 4)])
            found.append({key: v.cpu() for key, v in everything(optimizer).items() if isinstance(v, Tensor)})
            assert torch.cuda.current_device() == current
        for other in found[1:]:
            assert all(torch.equal(v, other[key]) for key, v in found[0].items())
    finally:
        torch.cuda.set_device(0)


def test_bfloat16_is_never_taken_over_by_dlpack(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy 8801: CuPy 13 ends with a segmentation fault in `from_dlpack` of a bfloat16 tensor on a GPU. PyTorch's are
    read by their address, and others are refused before."""
    cupy = pytest.importorskip("cupy")
    calls: list[Any] = []
    monkeypatch.setattr(cupy, "from_dlpack", calls.append)
    x = torch.ones(6, 5, dtype=torch.bfloat16, device=device)
    assert view(x).ptr == x.data_ptr()
    model = mlp(device)
    optimizer = AdaFisher(model, TCov=1)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(x.float()).float().square().mean()
    loss.backward()
    optimizer.step()

    class Foreign:
        """On a GPU, of a framework with no other protocol."""

        dtype = "bfloat16"

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(CafinError, match=r"`x` must .*bfloat16"):
        view(Foreign(), "f", "x")
    assert calls == []


CONSTRUCT = """
import os, sys, torch
from cafin_cupy.adapters.torch import AdaFisher
def train(optimizer, x):
    optimizer.model(x).sum().backward()
    optimizer.step()
    return optimizer.backend
optimizer = AdaFisher(torch.nn.Linear(3, 2))
"""


def test_on_the_cpu_nothing_touches_cuda() -> None:
    """cupy 3341, pycuda 137: CUDA is touched at import, and a later fork cannot use it. Neither the import nor training
    touches it here."""
    train = """
assert train(optimizer, torch.ones(4, 3)) == "reference"
print(torch.cuda.is_initialized(), "cupy" in sys.modules)
"""
    assert python(CONSTRUCT + train).communicate()[0] == "False False\n"


@gpu
@pytest.mark.parametrize("used", [False, True], ids=["before CUDA is used", "after"])
def test_a_forked_process_may_use_the_gpu_or_is_told_to_spawn(used: bool) -> None:
    """cupy 3341, pycuda 137: an optimizer that was made before a fork trains in the child; once CUDA has been used, the
    child is told what to do."""
    fork = """
if sys.argv[1] == "True":
    torch.ones(3).cuda()
child = os.fork()
if child == 0:
    try:
        optimizer.model.cuda()
        assert train(optimizer, torch.ones(4, 3).cuda()) == "cuda"
        torch.cuda.synchronize()
        print("trained", flush=True)
    except Exception as error:
        print("spawn" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    said = python(CONSTRUCT + fork, str(used)).communicate()[0].splitlines()
    # Python 3.12 warns of the fork as well, in the parent.
    assert [line for line in said if line in ("True", "False", "trained")] == ["True" if used else "trained"], said


def test_what_a_step_has_read_is_given_back(device: str) -> None:
    """pytorch 9261: memory taken over by DLPack is never freed. Neither the step nor its factors hold on to a gradient,
    contiguous or copied, or to an activation."""
    optimizer = AdaFisher(net(device), TCov=1)
    gone: list[weakref.ref[Tensor]] = []
    for x in images(device, 3, 3, 3):
        optimizer.zero_grad()
        hidden = optimizer.model.conv(optimizer.model.stem(x))
        hidden.mean((2, 3)).square().mean().backward()
        for k, p in enumerate(p for p in optimizer.model.parameters() if p.grad is not None):
            p.grad = sliced(p.grad) if k % 2 else p.grad
            gone.append(weakref.ref(p.grad))
        gone += [weakref.ref(x), weakref.ref(hidden)]
        optimizer.step()
        del x, hidden
    optimizer.zero_grad()
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []


@gpu
def test_what_a_step_will_read_is_not_given_back_too_early() -> None:
    """cutile-python 88: a temporary is freed before the asynchronous launch reads it. Copies of strided gradients stay
    until the launch is ordered: with a busy GPU, and memory asked for right behind the step."""
    strided, plain = (AdaFisher(net("cuda"), TCov=2) for _ in range(2))
    for x in images("cuda", 3, 3, 3):
        for optimizer in (strided, plain):
            optimizer.zero_grad()
            loss_of(optimizer.model, x).backward()
        for p in strided.model.parameters():
            p.grad = sliced(p.grad)
        torch.cuda._sleep(LONG // 10)
        strided.step()
        strided.zero_grad()
        spoil = [torch.full_like(p, torch.nan) for p in strided.model.parameters() for _ in range(4)]
        plain.step()
        assert_same(strided, plain)
        del spoil


@gpu
@pytest.mark.parametrize("every", [1, 100], ids=["sampled", "unsampled"])
def test_no_step_waits_for_the_gpu(every: int) -> None:
    """Advanced_Optimizers 5: half of a step is hidden waiting, by `.item()` or `bool(tensor)`. The GPU is kept busy in
    front of the steps, and is still so when the host has passed them all."""
    optimizer, expected = (run(AdaFisher(net("cuda"), TCov=every), images("cuda", 4, 4, 4)) for _ in range(2))
    assert hook_count(optimizer.model) == (6 if every == 1 else 0)
    batches = images("cuda", *[4] * 3)
    busy = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(optimizer, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    assert_same(optimizer, run(expected, batches))
