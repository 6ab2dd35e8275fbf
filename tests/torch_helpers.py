"""What the tests of the PyTorch adapter share: a recorder of layers, the formulas in float64, comparisons."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from helpers import RAW
from torch import Tensor, nn
from torch_cases import Conv1D

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher

torch.set_num_threads(1)  # tensors are small, and parallel test processes would fight for the cores

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-5  # float32 sums of at most a few thousand terms, relative to the largest entry


@contextmanager
def exact_float32() -> Iterator[None]:
    """TF32 would round the products of the model itself, and cuDNN may choose another algorithm each time."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    matmul.allow_tf32 = before


@pytest.fixture(name="gpu")
def kernels_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device of the kernels: a GPU, or the emulated one, which has tensors of the CPU."""
    import cupy

    if cupy.cuda.Module.__module__ == "emulation.device":
        sys.modules["emulation.device"].lend_torch(monkeypatch)
        yield "cpu"
    else:
        with exact_float32():
            yield "cuda"


@pytest.fixture(params=["reference", pytest.param("kernels", marks=pytest.mark.gpu)], name="device")
def either_device(request: pytest.FixtureRequest) -> str:
    """The reference on the CPU, and the kernels on the `gpu`."""
    return "cpu" if request.param == "reference" else request.getfixturevalue("gpu")


@pytest.fixture(params=DEVICES, name="device")
def torch_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the models live; a test module that imports this runs its tests on each. The emulated GPU has tensors of
    the CPU."""
    if request.param == "cuda":
        import cupy

        if cupy.cuda.Module.__module__ == "emulation.device":
            sys.modules["emulation.device"].lend_torch(monkeypatch)
            yield "cpu"
            return
    with exact_float32():
        yield request.param


Seen = dict[str, list[tuple[nn.Module, Tensor, Tensor]]]


def record(model: nn.Module) -> Seen:
    """From now on (module, input, output gradient) of every backward, in float64 on the CPU, by module name."""
    seen: Seen = {}

    def tap(name: str) -> Callable[..., None]:
        def forward(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            h = (args[0] if args else next(iter(kwargs.values()))).detach().cpu().clone()
            h = h.double() if h.is_floating_point() else h
            if output.requires_grad:
                add = seen.setdefault(name, []).append
                output.register_hook(lambda s: add((module, h, s.detach().cpu().double().clone())))

        return forward

    for name, module in model.named_modules():
        if isinstance(
            module, (nn.Linear, Conv1D, nn.Embedding, *CONVS, *TRANSPOSED, *CHANNEL_NORMS, nn.LayerNorm, nn.RMSNorm)
        ):
            module.register_forward_hook(tap(name), with_kwargs=True)
    return seen


CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def patches_of(padded: Tensor, kernel: Any, stride: Any, dilation: Any) -> Tensor:
    """(B, C, positions, taps) of an image (B, C, ...) of any number of axes."""
    axes = range(len(kernel))
    counts = [(n - d * (k - 1) - 1) // t + 1 for n, k, t, d in zip(padded.shape[2:], kernel, stride, dilation)]
    found = []
    for tap in product(*map(range, kernel)):
        first = [tap[a] * dilation[a] for a in axes]
        seen = [slice(first[a], first[a] + (counts[a] - 1) * stride[a] + 1, stride[a]) for a in axes]
        found.append(padded[(..., *seen)].flatten(2))
    return torch.stack(found, dim=-1)


def conv_sums(module: Any, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor, int]:
    h, s = (x if x.dim() == 2 + len(module.kernel_size) else x.unsqueeze(0) for x in (h, s))
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = nn.functional.pad(h, module._reversed_padding_repeated_twice, mode=mode)
    patches = patches_of(padded, module.kernel_size, module.stride, module.dilation)
    patches = patches.unflatten(1, (module.groups, -1))  # (B, groups, c, positions, taps)
    return (patches**2).sum((0, 1, 3)).flatten(), (s.flatten(2) ** 2).sum((0, 2)), s.numel() // s.shape[1]


def transposed_moments(calls: list[tuple[Any, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Input and output exchanged: the patches are those of the output gradient, around each input pixel."""
    module = calls[0][0]
    groups, K, axes = module.groups, module.weight[0].numel(), len(module.kernel_size)
    H, S, bias, read = 0.0, 0.0, 0.0, 0
    for _, h, s in calls:
        h, s = (x if x.dim() == 2 + axes else x.unsqueeze(0) for x in (h, s))
        reach = [
            (n - 1) * t + d * (k - 1) + 1 - p
            for n, t, d, k, p in zip(
                h.shape[2:], module.stride, module.dilation, module.kernel_size, module.padding, strict=True
            )
        ]  # pixels of the output that the last input pixel meets
        behind = [max(0, end - n) for end, n in zip(reach, s.shape[2:])]
        around = [x for p, more in reversed(list(zip(module.padding, behind))) for x in (p, more)]
        patches = patches_of(nn.functional.pad(s, around), module.kernel_size, module.stride, module.dilation)
        positions = h[0, 0].numel()
        patches = patches.unflatten(1, (groups, -1))
        H = H + h.flatten(2).square().sum((0, 2))
        S = S + patches.square().sum((0, 1, 3)).flatten()
        bias = bias + s.flatten(2).square().sum((0, 2)) * positions / s[0, 0].numel()
        read += len(h) * positions
    if module.bias is None:
        return H / read, S / (read * K)
    return torch.cat([H / read, torch.ones(1)]), torch.cat([S, groups * bias]) / (read * K)


def raw_moments(calls: list[tuple[Any, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Raw moments (H, S) of all calls of a layer in one step, as the descriptors derive them."""
    module = calls[0][0]
    if isinstance(module, nn.Embedding):
        h, s = (torch.cat([c[k].reshape(-1, *c[k].shape[c[1].dim() :]) for c in calls]) for k in (1, 2))
        read = h != (-1 if module.padding_idx is None else module.padding_idx)
        return nn.functional.one_hot(h[read], module.num_embeddings).double().mean(0), (s[read] ** 2).mean(0)
    if isinstance(module, (nn.Linear, Conv1D)):
        h, s = (torch.cat([c[k].reshape(-1, c[k].shape[-1]) for c in calls]) for k in (1, 2))
        H, S, entry = (h**2).mean(0), (s**2).mean(0), 1.0
    elif isinstance(module, TRANSPOSED):
        return transposed_moments(calls)
    elif isinstance(module, CONVS):
        sums = [conv_sums(*call) for call in calls]
        n, K = sum(n for *_, n in sums), module.weight[0].numel()
        H, S, entry = sum(a for a, *_ in sums) / (n * K), sum(b for _, b, _ in sums) / n, module.groups / K
    else:
        channels = isinstance(module, CHANNEL_NORMS)
        inner = len(getattr(module, "normalized_shape", ()))
        if isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)):
            inner = int(type(module).__name__[-2]) + 1
        pairs = [tuple(x if x.dim() > inner else x.unsqueeze(0) for x in call[1:]) for call in calls]
        batch, units = sum(len(h) for h, _ in pairs), max(h.shape[1] for h, _ in pairs)
        u = torch.zeros(units, dtype=torch.float64)
        for h, _ in pairs:
            Q = math.prod(h.shape[2:])
            u[: h.shape[1]] += h.reshape(len(h), h.shape[1], -1).sum((0, 2)) / Q**2
        rows = None if channels else (-1, *module.weight.shape, 1)
        total = sum(s.reshape(rows or (*s.shape[:2], -1)).sum((0, -1)).flatten() for _, s in pairs)
        H, S, entry = (u**2).sum().reshape(1) / batch**2, total**2 / batch, units / batch**2
        return torch.cat([H, torch.tensor([entry])]), S  # two entries, with or without a bias
    return (H if module.bias is None else torch.cat([H, torch.tensor([entry])])), S


def near(got: Tensor, true: Tensor, what: str = "", tolerance: float = TOLERANCE) -> None:
    assert got.shape == true.shape, what
    if true.numel():
        error = (got.detach().cpu().double() - true.detach().cpu().double()).abs().max().item()
        largest = true.abs().max().item()
        assert error <= tolerance * largest, f"{what}: error {error:.2e} of {largest:.2e}"


def assert_moments(optimizer: AdaFisher, seen: Seen) -> None:
    """The optimizer, made with helpers.RAW, holds the moments of all that was seen since the last call."""
    assert seen
    for name, calls in seen.items():
        for got, true, letter in zip(optimizer.factors()[name], raw_moments(calls), "HS"):
            near(got, true, f"{letter} of {name}")
    seen.clear()


def start(model: nn.Module, device: str, **options: Any) -> tuple[nn.Module, AdaFisher, Seen]:
    """A model whose factors are the raw moments of each step, its optimizer, and a record of what its layers see."""
    model = model.to(device)
    seen = record(model)
    return model, AdaFisher(model, TCov=1, averaging=RAW, **options), seen


def weighted(out: Tensor) -> Tensor:
    """A loss whose gradient has another value and sign at every place."""
    n = max(1, out.numel())
    return (out.float() * torch.arange(n, device=out.device).reshape(out.shape).sin()).sum() / n


class Net(nn.Module):
    """Every layer type; convolution, norm and activation in place, and a residual addition in place."""

    def __init__(self, inplace: bool = True, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.act = nn.ReLU(inplace=inplace)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.fc = nn.Linear(6, 8)
        self.ln = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        y = self.conv(x)
        y = self.act(y.add_(x) if self.inplace else y + x)
        return self.head(self.act(self.ln(self.fc(y.mean((2, 3))))))


def net(device: str, **options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options).to(device)


class Tokens(nn.Module):
    """Parameters that no layer owns, before, between and behind the layers."""

    def __init__(self, order: tuple[str, ...] = ("cls", "fc", "scale", "norm", "head")) -> None:
        super().__init__()
        torch.manual_seed(5)
        made = {
            "cls": nn.Parameter(torch.randn(5)),
            "fc": nn.Linear(5, 7),
            "scale": nn.Parameter(torch.randn(7)),
            "norm": nn.LayerNorm(7),
            "head": nn.Linear(7, 3),
        }
        for name in order:
            setattr(self, name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.fc(x + self.cls)) * self.scale))


def images(device: str, *sizes: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(n, 3, 9, 8, device=device) for n in sizes]


def mlp(device: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(device)


def rows(device: str, count: int, batch: int = 6) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(batch, 5, device=device) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def run(optimizer: Any, batches: list[Tensor], micro: int = 1) -> Any:
    """Train the optimizer's model on the batches, each split into `micro` parts."""
    for x in batches:
        optimizer.zero_grad()
        for part in x.chunk(micro):
            (loss_of(optimizer.model, part) / micro).backward()
        optimizer.step()
    return optimizer


def everything(optimizer: AdaFisher) -> dict[str, Any]:
    """Copies of all that a step may change."""
    found: dict[str, Any] = {"steps": optimizer.steps}
    for name, p in optimizer.model.named_parameters():
        state = optimizer.state.get(p, {})
        found[name] = p.detach().clone()
        found[f"step of {name}"] = int(state.get("step", 0))
        found[f"momentum of {name}"] = state["exp_avg"].clone() if "exp_avg" in state else torch.zeros_like(p)
        if "master" in state:
            found[f"master of {name}"] = state["master"].clone()
    for name, pair in optimizer.factors().items():
        found[f"H of {name}"], found[f"S of {name}"] = (f.clone() for f in pair)
    for name, count in optimizer.skipped_refreshes().items():
        found[f"skipped of {name}"] = count
    return found


def assert_same(a: AdaFisher, b: Any, tolerance: float = 0.0) -> None:
    """Two runs agree, bit for bit or to `tolerance` of each tensor's largest entry; `b` may be `everything` of one."""
    one, other = everything(a), b if isinstance(b, dict) else everything(b)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not isinstance(value, Tensor):
            assert value == other[name], name
        elif tolerance:
            near(value, other[name], name, tolerance)
        else:
            assert torch.equal(value, other[name]), name


def assert_equal_trees(a: Any, b: Any) -> None:
    """Two state dicts agree, in tensors, types and structure."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_layout=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_trees(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal_trees(x, y)
    else:
        assert a is b or a == b


@contextmanager
def refused(optimizer: AdaFisher, *words: str) -> Iterator[None]:
    """The block raises a CafinError that holds all `words`, and changes nothing."""
    before = everything(optimizer)
    with pytest.raises(CafinError) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert_same(optimizer, before)


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def split_groups(optimizer: AdaFisher) -> AdaFisher:
    """No decay and half the rate for vectors, as scripts do it."""
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [p for p in parameters if p.dim() > 1]
    optimizer.add_param_group({"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-4})
    return optimizer


def scaler_of(device: str, scale: float = 2.0**10) -> Any:
    return torch.amp.GradScaler(device, init_scale=scale, growth_interval=2)


def scaled_run(
    optimizer: AdaFisher, scaler: Any, batches: list[Tensor], clip: float = 0.0, micro: int = 1
) -> AdaFisher:
    for x in batches:
        optimizer.zero_grad()
        for part in x.chunk(micro):
            scaler.scale(loss_of(optimizer.model, part) / micro).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer.model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return optimizer


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # the ranks are on this machine, whatever its name resolves to
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
