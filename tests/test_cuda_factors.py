"""How the kernels read arrays, checked without a GPU; and the bookkeeping of partial sums over calls and steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers import (
    CUDA,
    LARGE_IMAGES,
    LAYOUTS,
    RAW,
    Case,
    Device,
    bounds,
    cases,
    close,
    convolutions,
    integral,
    lay,
    numpy_of,
    seeds,
)
from hypothesis import example, given
from hypothesis import strategies as st

from cafin_cupy import (
    AdaFisher,
    Conv2d,
    ConvTranspose1d,
    Embedding,
    LayerNorm,
    Linear,
    cuda_factors,
    reference,
)
from cafin_cupy.arrays import view
from cafin_cupy.cuda_factors import CudaFactors
from cafin_cupy.layers import Columns
from cafin_cupy.layers.convolution import Convolution
from cafin_cupy.matrix import COLUMN_SUMS_BLOCK, ENOUGH_BLOCKS, LEAST_ROWS, Matrix, matrix, split


def read(array: np.ndarray, how: Matrix) -> np.ndarray:
    """(rows, segments * run): what the kernel column_sums reads, by addresses alone."""
    place = np.arange(how.rows)[:, None] * how.stride + np.arange(how.segments * how.run)
    reach = int(place.max()) + 1
    return np.lib.stride_tricks.as_strided(array, (reach,), (array.itemsize,))[place]


def sums(columns: Columns, array: np.ndarray, how: Matrix) -> np.ndarray:
    """The raw sums that column_sums and fold would make of it."""
    x = read(array, how)
    if columns.patches:
        pixels = np.sum(x**2, axis=0)
        axes = np.ogrid[tuple(slice(n) for n in (array.shape[1], *columns.patches[0].image))]
        image = pixels[sum(place * step for place, step in zip(axes, how.steps))]
        return np.concatenate([reference._fold(np, image, patches) for patches in columns.patches])
    return (x**columns.power).sum(axis=0).reshape(how.segments, how.run).sum(axis=1) * columns.scale


def in_place(case: Case, layout: str, shape: tuple[int, ...]) -> bool:
    """Layouts that must be read as they lie: samples at any distance, channels_last images."""
    if issubclass(case.kind, (Linear, LayerNorm, Embedding)) and layout == "channels_last":
        return len(shape) not in (3, 4, 5)
    return layout in ("contiguous", "offset", "channels_last") or (
        layout == "sliced" and issubclass(case.kind, Convolution)
    )


IMAGE_NORM = Case(LayerNorm, (3, 4, 5), True, (2, 3, 4, 5), (2, 3, 4, 5))  # its results have the pixels' order


@given(cases, seeds, st.sampled_from(LAYOUTS))
@example(IMAGE_NORM, 0, "channels_last")
def test_arrays_are_read_as_they_lie(case: Case, seed: int, layout: str) -> None:
    arrays = [lay(np, x, layout) for x in case.data(seed)]
    wanted = reference.raw_sums(case.layer(), *arrays)
    limits = reference.raw_sums(case.layer(), *map(abs, arrays))
    arrays = case.layer().read(*arrays)
    plans = case.layer().columns(*(array.shape for array in arrays))
    for array, columns, exact, bound in zip(arrays, plans, wanted, limits):
        how = matrix(view(array), columns)
        if how is None:
            assert not in_place(case, layout, array.shape)
        else:
            close(sums(columns, array, how), exact, 1e-12, bound)


@given(convolutions(), st.sampled_from(["contiguous", "channels_last"]))
def test_a_single_image_has_its_pixels_in_order(case: Case, layout: str) -> None:
    case = case._replace(h=(1, *case.h[1:]), s=(1, *case.s[1:]))
    h, s = (lay(np, x, layout) for x in case.data())
    columns = case.layer().columns(case.h, case.s)[0]
    how = matrix(view(h), columns)
    assert how is not None
    close(sums(columns, h, how), reference.raw_sums(case.layer(), h, s).H, 1e-12)


def test_rows_of_a_sequence_are_read_without_a_copy() -> None:
    tokens = np.random.default_rng(0).normal(size=(6, 5, 8))
    columns = Linear(np.zeros((3, 8))).columns((6, 8), (6, 3))[0]
    assert matrix(view(tokens[:, 2]), columns) == Matrix(6, 40, 8, 1)
    assert matrix(view(np.broadcast_to(tokens[0, 0], (6, 8))), columns) == Matrix(6, 0, 8, 1)
    assert matrix(view(tokens[:, :, 2][:, :5]), Linear(np.zeros((3, 5))).columns((6, 5), (6, 3))[0]) is None


@given(st.integers(1, 10**7), st.integers(1, 10**5))
def test_split(rows: int, tiles: int) -> None:
    slices, height = split(rows, tiles)
    assert slices >= 1 and height % (COLUMN_SUMS_BLOCK // 32) == 0
    assert (slices - 1) * height < rows <= slices * height  # every slice has rows, and every row a slice
    assert slices == 1 or height >= LEAST_ROWS
    assert slices <= max(1, -(-ENOUGH_BLOCKS // tiles))


CALLS = [
    Case(Linear, (6, 20), True, (0, 20), (0, 6)),
    Case(Conv2d, (4, 3, 3, 3), True, (0, 3, 9, 8), (0, 4, 9, 8), {"padding": 1}),
    Case(Conv2d, (6, 1, 3, 2), False, (0, 3, 7, 6), (0, 6, 3, 5), {"stride": (2, 1), "groups": 3}),
    Case(LayerNorm, (11,), True, (0, 5, 11), (0, 5, 11)),
    Case(ConvTranspose1d, (4, 3, 3), True, (0, 4, 5), (0, 6, 11), {"stride": 2, "groups": 2}),
    Case(Embedding, (9, 4), False, (0, 3), (0, 3, 4)),
]


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, len(CALLS) - 1),
                st.integers(1, 40),
                st.sampled_from(["contiguous", "channels_last", "sliced"]),
            ),
            max_size=8,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_calls_in_any_order_add_up(device: Device, steps: list[list[tuple[int, int, str]]]) -> None:
    """Any layers, batch sizes and layouts, in any order, over several steps: a step has the sums of its own calls."""
    layers = [case.layer(lambda shape: device.zeros(*shape)) for case in CALLS]
    opt = AdaFisher([a.weight for a in layers], layers, averaging=RAW, TCov=1, backend=device.backend)
    known = [tuple(numpy_of(F) for F in pair) for pair in opt.factors().values()]
    for number, calls in enumerate(steps):
        seen: dict[int, list[Any]] = {}
        for place, (index, batch, layout) in enumerate(calls):
            case = CALLS[index]
            pair = case._replace(h=(batch, *case.h[1:]), s=(batch, *case.s[1:])).data(100 * number + place)
            opt.accumulate(layers[index], *(device.array(x, layout) for x in pair))
            seen.setdefault(index, []).append(pair)
        opt.step([device.zeros(*a.weight.shape) for a in layers])
        for index, (name, pair) in enumerate(opt.factors().items()):
            if index not in seen:  # no call: the factors stay
                for now, then in zip(pair, known[index]):
                    np.testing.assert_array_equal(numpy_of(now), then, err_msg=name)
                continue
            h, s = (np.concatenate(parts) for parts in zip(*seen[index]))
            case, layer = CALLS[index], CALLS[index].layer()
            want = reference.raw_moments(layer, reference.raw_sums(layer, h, s))
            for got, exact, bound in zip(pair, want, bounds(case, h, s)):
                close(got, exact, device.tolerance, bound)
            known[index] = tuple(numpy_of(F) for F in pair)


def test_discard_forgets_the_calls(device: Device) -> None:
    case = CALLS[0]._replace(h=(7, 20), s=(7, 6))
    layer = case.layer(lambda shape: device.zeros(*shape))
    opt = AdaFisher([layer.weight], [layer], averaging=RAW, TCov=1, backend=device.backend)
    for seed in (1, 2):
        opt.accumulate(layer, *(device.array(x) for x in case.data(seed)))
        if seed == 1:
            opt.discard()
    opt.step([device.zeros(6, 20)])
    want = reference.raw_moments(case.layer(), reference.raw_sums(case.layer(), *case.data(2)))
    for got, exact in zip(opt.factors()["0"], want):
        close(got, exact, device.tolerance)


@pytest.mark.gpu
@given(cases, seeds, st.sampled_from(LAYOUTS), st.sampled_from(["both", "h", "s"]))
@example(Case(Linear, (300, 513), True, (40, 513), (40, 300)), 0, "contiguous", "both")  # tiles with and without a tail
def test_sixteen_bit_arrays_are_read_as_they_are(case: Case, seed: int, layout: str, which: str) -> None:
    """Sums of float16 arrays are those of the numbers they hold, added in float32."""
    import cupy

    arrays, exact = [], []
    for name, x in zip("hs", case.data(seed)):
        dtype = x.dtype if integral(x) else np.float16 if which in ("both", name) else np.float32
        exact.append(x if integral(x) else x.astype(dtype).astype(float))
        arrays.append(lay(cupy, cupy.asarray(x.astype(dtype)), layout))
    layer = case.layer(lambda shape: cupy.zeros(shape, cupy.float32))
    opt = AdaFisher([layer.weight], [layer], averaging=RAW, TCov=1)
    opt.accumulate(layer, *arrays)
    opt.step([cupy.zeros(layer.weight.shape, cupy.float32)])
    want = reference.raw_moments(case.layer(), reference.raw_sums(case.layer(), *exact))
    for got, moment, bound in zip(next(iter(opt.factors().values())), want, bounds(case, *exact)):
        close(got, moment, CUDA.tolerance, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE_IMAGES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_images_and_kernels(case: Case, layout: str) -> None:
    h, s = case.data(3)
    layer = case.layer(lambda shape: CUDA.zeros(*shape))
    opt = AdaFisher([layer.weight], [layer], averaging=RAW, TCov=1)
    opt.accumulate(layer, *(CUDA.array(x, layout) for x in (h, s)))
    opt.step([CUDA.zeros(*layer.weight.shape)])
    want = reference.raw_moments(case.layer(), reference.raw_sums(case.layer(), h, s))
    for got, moment, bound in zip(next(iter(opt.factors().values())), want, bounds(case, h, s)):
        close(got, moment, CUDA.tolerance, bound)


@pytest.mark.gpu
@given(
    st.lists(st.tuples(st.integers(0, len(CALLS) - 1), st.integers(1, 30)), min_size=1, max_size=40),
    st.sampled_from([0, 3000, 10**9]),
)
def test_calls_that_wait_for_one_another_change_no_bit(calls: list[tuple[int, int]], batch_bytes: int) -> None:
    """A layer's sums do not depend on which others share its launch, nor on when it comes."""
    results = []
    for deferred in (False, True):
        layers = [case.layer(lambda shape: CUDA.zeros(*shape)) for case in CALLS]
        factors = CudaFactors(layers, RAW, 0)
        with mock.patch.object(cuda_factors, "BATCH_BYTES", batch_bytes):
            for place, (index, batch) in enumerate(calls):
                case = CALLS[index]
                pair = case._replace(h=(batch, *case.h[1:]), s=(batch, *case.s[1:])).data(place)
                (factors.defer if deferred else factors.accumulate)(index, *map(CUDA.array, pair))
            factors.update()
        results.append([numpy_of(F) for F in (*factors.H, *factors.S)])
    for immediate, waited in zip(*results):
        np.testing.assert_array_equal(immediate, waited)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["kernels", "reference"])
def test_many_layers_of_many_sizes(wanted: str) -> None:
    """300 layers in one fold and one average; both backends on the GPU's own arrays."""
    import cupy

    rng = np.random.default_rng(3)
    shapes = [(int(a), int(b)) for a, b in rng.integers(1, 70, (300, 2))]
    layers = [Linear(cupy.zeros(shape, cupy.float32), cupy.zeros(shape[0], cupy.float32)) for shape in shapes]
    params = [a for layer in layers for a in (layer.weight, layer.bias)]
    opt = AdaFisher(params, layers, averaging=RAW, backend="cuda" if wanted == "kernels" else "reference")
    data = [(rng.normal(size=(9, b)), rng.normal(size=(9, a))) for a, b in shapes]
    for layer, (h, s) in zip(layers, data):
        opt.accumulate(layer, cupy.asarray(h, cupy.float32), cupy.asarray(s, cupy.float32))
    opt.step([cupy.zeros_like(p) for p in params])
    for (H, S), (h, s) in zip(opt.factors().values(), data):
        close(H, np.append((h**2).mean(axis=0), 1.0), 1e-5)
        close(S, (s**2).mean(axis=0), 1e-5)
