"""Faults that users of neighbouring projects reported: tensors of more than 2^31 elements, which 32-bit arithmetic on
the device or the host misses, silently or with an illegal access. Every product is made in 64 bits here.

On the emulated GPU the tensors lie in sparse files, and the kernels run where offsets are large. On a GPU with enough
memory they are real, and every element is compared.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from helpers import RAW, close, numpy_of

from cafin_cupy import (
    AdaFisher,
    BatchNorm2d,
    Conv2d,
    LayerNorm,
    Linear,
    cuda_factors,
    cuda_sums,
    cuda_update,
    fused_step,
    reference,
    table,
    update,
)
from cafin_cupy.arrays import view
from cafin_cupy.layers import Layer

pytestmark = pytest.mark.gpu
REPORTED = 2_359_332_864  # elements
CHUNK = table.CHUNK
LR = {"lr": 0.1, "beta": 0.7, "Lambda": 0.01}


# ---- On the emulated GPU ----


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    if not issubclass(module.ndarray, np.ndarray):
        pytest.skip("a GPU has real memory, see below")
    return module


def sparse(cupy: Any, count: int, dtype: str = "float32") -> Any:
    """An array of zeros that takes memory only where it is touched."""
    return np.memmap(tempfile.TemporaryFile(), dtype, "w+", shape=(count,)).view(cupy.ndarray)


LAYOUTS = {
    "without factors": ((REPORTED,), 0),
    "with factors": ((65_537, 36_001), 36_001),
    "one column": ((2**31 + 4099, 1), 1),
    "long rows": ((3, 2**30 + 77), 2**30 + 77),
    "one row": ((1, 2**31 + 4099), 2**31 + 4099),
    "channels_last": ((29_959, 7_993, 3, 3), 9 * 7_993),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_parameter_of_more_than_2_31_elements_is_updated_to_its_end(
    name: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/apex 1654, pytorch 101449: illegal access. DeepSpeed 7640: the size turns negative as an int32, and the
    weights are silently never updated. cupy 7539: `row * width + column` as an int is wrong."""
    shape, columns = LAYOUTS[name]
    size = int(np.prod(shape))
    assert size > 2**31
    chunks = sorted({0, 1, 2**31 // CHUNK - 1, 2**31 // CHUNK, 2**31 // CHUNK + 1, (size - 1) // CHUNK})
    flat = [sparse(cupy, size) for _ in "pgm"]
    rng = np.random.default_rng(0)
    spans = [slice(chunk * CHUNK, min(size, (chunk + 1) * CHUNK)) for chunk in chunks]
    before = [[np.float32(rng.normal(size=span.stop - span.start)) for span in spans] for _ in "pgm"]
    for array, parts in zip(flat, before):
        for span, part in zip(spans, parts):
            array[span] = cupy.asarray(part)
    H, S = (sparse(cupy, n) for n in (columns, size // columns)) if columns else (None, None)

    def few(blocks: list[int], like: Any, device: int) -> table.DeviceTable:
        """Of all blocks, those that have something to do."""
        assert blocks == [-(-size // CHUNK)]
        made = table.DeviceTable(table.Share, len(chunks), like, device)
        made.rows["number"] = chunks
        return made

    def laid(array: Any) -> Any:
        if name != "channels_last":
            return array.reshape(shape)
        out, channels, height, width = shape
        return array.reshape((out, height, width, channels)).transpose((0, 3, 1, 2))

    monkeypatch.setattr(cuda_update.table, "shares", few)
    monkeypatch.setattr(update, "_launchers", {})
    if columns:
        for array in (H, S):  # at the places that the chunks meet
            array[:9000], array[-9000:] = cupy.asarray(np.float32(0.5)), cupy.asarray(np.float32(2.0))
    pairs = [(H, S)] if columns else None
    fused_step([laid(flat[0])], [laid(flat[1])], [laid(flat[2])], pairs, **LR, weight_decay=0.1)
    for index, span in enumerate(spans):
        p, g, m = (parts[index].astype(float) for parts in before)
        F = None
        if columns:
            place = np.arange(span.start, span.stop)
            row, column = place // columns, place % columns
            if name == "channels_last":  # memory holds (tap, channel) where H is ordered (channel, tap)
                column = column % shape[1] * 9 + column // shape[1]
            F = numpy_of(H[column]).astype(float) * numpy_of(S[row]).astype(float)
        want_p, want_m = _by_hand(p, g, m, F)
        close(flat[0][span], want_p, 2e-6, np.append(want_p, p))
        close(flat[2][span], want_m, 2e-6)
    for array in (flat[0], flat[2]):  # and nothing else has moved
        for start in (2 * CHUNK, 2**31 // CHUNK * CHUNK - 2 * CHUNK):
            assert not numpy_of(array[start : start + CHUNK]).any()


def _by_hand(p: Any, g: Any, m: Any, F: Any) -> tuple[Any, Any]:
    """The first step with weight decay 0.1."""
    g = g + 0.1 * p
    m = LR["beta"] * m + (1 - LR["beta"]) * g
    return p - LR["lr"] / (1 - LR["beta"]) * m / (1.0 if F is None else F + LR["Lambda"]), m


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_lie_more_than_2_31_elements_apart_are_summed(dtype: str, cupy: Any) -> None:
    """cupy 7539, Liger-Kernel 1483: above 8 GB, `row * stride` as an int is wrong. Here the rows of a slice of a larger
    array, which is read where it lies."""
    rng = np.random.default_rng(1)
    layer = Linear(cupy.zeros((30, 40), cupy.float32))
    arrays = []
    for width in (40, 30):
        far = sparse(cupy, 5 * (2**29 + 7), dtype).reshape((5, -1))[:, 3 : width + 3]
        far[...] = cupy.asarray(rng.normal(size=(5, width)).astype(dtype))
        arrays.append(far)
    opt = AdaFisher([layer.weight], [layer], averaging=RAW)
    opt.accumulate(layer, *arrays)
    opt.step([cupy.zeros((30, 40), cupy.float32)])
    for mine, x in zip(opt.factors()["0"], arrays):
        close(mine, (numpy_of(x).astype(float) ** 2).mean(axis=0), 1e-5)


@pytest.mark.parametrize("images", [1, 2])
def test_images_of_more_than_2_31_pixels_are_summed_to_their_end(images: int, cupy: Any) -> None:
    """The same above 8 GB in one row: the last two blocks of a batch normalisation's input, by the kernel alone."""
    channels, height, width = 3, 26_755, 26_771
    columns = channels * height * width
    x = sparse(cupy, images * columns)
    layer = BatchNorm2d(cupy.ones(channels, cupy.float32))
    factors = cuda_factors.CudaFactors([layer], RAW, 0)
    sums = factors._sums[0]
    factors._plan(layer, sums, *[view(x.reshape((images, channels, height, width)))] * 2, 0)
    operand = sums.operands[0]
    length, slices, parts, scale = (operand[name].item() for name in ("length", "slices", "parts", "scale"))
    last = sums.halves[0].blocks // slices - 2
    begin = last * length
    filled = np.float32(np.random.default_rng(2).normal(size=(images, columns - begin)))
    for image, row in enumerate(filled):
        x[image * columns + begin : (image + 1) * columns] = cupy.asarray(row)
    arguments = factors._column_arguments
    arguments.values["operand"][0], arguments.values["count"] = operand, 1
    arguments.values["operand"][0]["first"] = -last  # so that block 0 of the launch is that of tile `last`
    factors._column_sums(arguments, 2, 0)
    partial = np.frombuffer(numpy_of(sums.halves[0].memory), np.float32).reshape(slices, parts, channels)
    first = (channels - 1) * height * width // length  # tile of the last channel
    for k in range(2):
        exact = filled[:, k * length : (k + 1) * length].astype(float) * scale
        close(partial[0, last + k - first, -1], exact.sum(), 1e-5, abs(exact).sum())


def test_an_image_of_more_than_2_31_pixels_is_folded(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where pixels are sorted into taps: `y * row_step + x` by the fold alone. Each tap meets nine pixels."""
    height, width, stride = 46_349, 46_351, 23_170
    monkeypatch.setattr(cuda_sums, "allocate", lambda like, size: (x := sparse(cupy, -(-size // 4)), x.data.ptr))
    layer = Conv2d(cupy.zeros((1, 1, 2, 2), cupy.float32), stride=stride, padding=1)
    factors = cuda_factors.CudaFactors([layer], RAW, 0)
    h, s = sparse(cupy, height * width).reshape((1, 1, height, width)), cupy.zeros((1, 1, 3, 3), cupy.float32)
    sums = factors._sums[0]
    factors._plan(layer, sums, view(h), view(s), 0)
    pixels = sums.halves[0].memory.reshape((height, width))
    want, rng = np.zeros((2, 2)), np.random.default_rng(3)
    for i, j, oy, ox in np.ndindex(2, 2, 3, 3):
        y, x = oy * stride + i - 1, ox * stride + j - 1
        if y >= 0 and x >= 0:
            pixels[y, x] = cupy.asarray(np.float32(rng.random()))
            want[i, j] += float(pixels[y, x])
    sums.unfolded = True
    factors._fold_all(0)
    close(sums.halves[0].sums.reshape((2, 2)), want, 1e-6)


# ---- On a GPU ----


def on_gpu(gigabytes: float) -> Any:
    """torch, where so much memory is free."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no emulated GPU")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, and there are {free:.0f}")
    return torch


def uniform(torch: Any, *shape: int, seed: int) -> Any:
    """Above 0, so that no error of a sum hides behind a sum near 0."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, device="cuda").uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize("size", [2**31 + 4099, REPORTED])
def test_a_large_parameter_on_a_gpu(size: int) -> None:
    """NVIDIA/apex 1654, DeepSpeed 7640: by the optimizer of a model, two steps, each element."""
    torch = on_gpu(5 * 4 * size / 2**30)
    from cafin_cupy.adapters.torch import AdaFisher as TorchAdaFisher

    model = torch.nn.ParameterList([torch.nn.Parameter(uniform(torch, size, seed=1))])
    with pytest.warns(UserWarning, match="no factors"):
        optimizer = TorchAdaFisher(model, lr=0.1, beta=0.7, weight_decay=0.1)
    (p,) = model
    before = p.detach().clone()
    p.grad = uniform(torch, size, seed=2)
    for _ in range(2):
        optimizer.step()
    assert optimizer.backend == "cuda"
    for start in range(0, size, 2**26):
        span = slice(start, start + 2**26)
        want, m = before[span].double(), torch.zeros(1, device="cuda", dtype=torch.float64)
        for t in (1, 2):
            m = 0.7 * m + 0.3 * (p.grad[span].double() + 0.1 * want)
            want = want - 0.1 / (1 - 0.7**t) * m
        torch.testing.assert_close(p.detach()[span].double(), want, rtol=2e-6, atol=2e-6)  # float32, two steps
        torch.testing.assert_close(optimizer.state[p]["exp_avg"][span].double(), m, rtol=2e-6, atol=0)


@pytest.mark.parametrize("columns", [36_001, 1, 2**30 + 77])
def test_a_large_matrix_on_a_gpu(columns: int) -> None:
    """cupy 7539, Liger-Kernel 1483: with factors, found by row and column."""
    rows = -(-(2**31 + 4099) // columns)
    torch = on_gpu((4 * 4 * rows * columns + 4 * (rows + columns)) / 2**30 + 4)
    p, g, m = (uniform(torch, rows, columns, seed=seed) for seed in range(3))
    H, S = uniform(torch, columns, seed=3), uniform(torch, rows, seed=4)
    before = p.clone()
    m.zero_()
    fused_step([p], [g], [m], [(H, S)], **LR)
    step = max(1, 2**26 // columns)
    for start in range(0, rows, step):
        for left in range(0, columns, 2**26):
            at = (slice(start, start + step), slice(left, left + 2**26))
            F = S[at[0], None].double() * H[None, at[1]].double() + LR["Lambda"]
            want = before[at].double() - LR["lr"] * g[at].double() / F
            torch.testing.assert_close(p[at].double(), want, rtol=2e-6, atol=2e-6)  # float32, one step


LARGE: dict[str, tuple[Callable[..., Layer], tuple[int, ...], tuple[int, ...], float]] = {
    "linear, many rows": (lambda zeros: Linear(zeros(3, 1031)), (2**21 + 3, 1031), (2**21 + 3, 3), 1e-5),
    "linear, long rows": (lambda zeros: Linear(zeros(3, 2**24 + 5)), (131, 2**24 + 5), (131, 3), 1e-5),
    "convolution": (lambda zeros: Conv2d(zeros(2, 3, 3, 3), stride=5), (67, 3, 3301, 3299), (67, 2, 660, 660), 1e-5),
    "convolution, one image": (
        *(lambda zeros: Conv2d(zeros(2, 1, 3, 2), stride=7), (1, 1, 46_349, 46_351), (1, 2, 6621, 6622)),
        1e-5,
    ),
    "layer norm": (lambda zeros: LayerNorm(zeros(1031)), (2**13 + 1, 257, 1031), (2**13 + 1, 257, 1031), 1e-5),
    # fold.cuh adds up to 700,000 partial sums one by one, each time with half a unit of the last place
    "batch norm": (lambda zeros: BatchNorm2d(zeros(5)), (3, 5, 11_987, 11_999), (3, 5, 11_987, 11_999), 1e-4),
    "batch norm, one image": (
        *(lambda zeros: BatchNorm2d(zeros(3)), (1, 3, 26_755, 26_771), (1, 3, 26_755, 26_771)),
        1e-4,
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_activations_on_a_gpu(name: str) -> None:
    """cupy 7539, Liger-Kernel 1483: every kernel that reads activations of more than 2^31 elements."""
    make, h_shape, s_shape, tolerance = LARGE[name]
    sizes = math.prod(h_shape), math.prod(s_shape)
    torch = on_gpu((6 * sum(sizes) + 24 * max(sizes) / min(16, h_shape[0])) / 2**30 + 2)
    h, s = (uniform(torch, *shape, seed=seed) for seed, shape in enumerate((h_shape, s_shape)))
    assert max(sizes) > 2**31
    layer = make(lambda *shape: torch.zeros(shape, device="cuda"))
    opt = AdaFisher([layer.weight], [layer], averaging=RAW)
    opt.accumulate(layer, h, s)
    opt.step([torch.zeros_like(layer.weight)])
    part = -(-h_shape[0] // 16)
    spans = (slice(k, k + part) for k in range(0, h_shape[0], part))
    exact_sums = reduce(reference.add_sums, (reference.raw_sums(layer, h[at].double(), s[at].double()) for at in spans))
    for mine, exact in zip(opt.factors()["0"], reference.raw_moments(layer, exact_sums)):
        close(mine, exact, tolerance)
