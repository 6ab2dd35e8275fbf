"""What several test files need: arrays of every framework and memory layout, layers with data, comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from cafin_cupy import (
    AdaFisher,
    Averaging,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    CafinError,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    SyncBatchNorm,
    TransposedLinear,
    reference,
)
from cafin_cupy.layers import Layer
from cafin_cupy.layers.convolution import ConvTranspose

FRAMEWORKS = [
    "numpy",
    "torch",
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
]
LAYOUTS = ["contiguous", "channels_last", "sliced", "inner", "offset", "transposed"]
# With this rule a layer's factors are the raw moments of the last sampled step.
RAW = Averaging(keep=0.0, add=1.0, normalize="after")


def integral(x: Any) -> bool:
    """True of NumPy's arrays of whole numbers: indices."""
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def make(framework: str, x: Any, dtype: str = "float32") -> Any:
    """A new array with the values of `x`; an array of whole numbers stays one."""
    x = np.array(x, dtype=x.dtype if integral(x) else dtype)
    if framework == "numpy":
        return x
    if framework in ("torch", "torch-cuda"):
        return import_module("torch").tensor(x, device="cuda" if framework == "torch-cuda" else "cpu")
    return import_module({"cupy": "cupy", "jax": "jax.numpy"}[framework]).asarray(x)


def numpy_of(x: Any) -> np.ndarray[Any, Any]:
    """A copy of any framework's array."""
    if hasattr(x, "detach"):
        return x.detach().cpu().numpy().copy()
    return np.array(x.get() if hasattr(x, "get") else x)


def lay(xp: Any, x: Any, layout: str) -> Any:
    """The values of `x` in another memory layout. Layouts of images leave other arrays contiguous."""
    if layout == "channels_last" and x.ndim in (3, 4, 5):
        return xp.moveaxis(xp.ascontiguousarray(xp.moveaxis(x, 1, -1)), -1, 1)
    if layout == "transposed" and x.ndim:
        return xp.ascontiguousarray(x.T).T
    between = math.nan if x.dtype.kind == "f" else -1
    if layout == "sliced" and x.ndim:  # every other row of a larger array
        y = xp.full((2 * x.shape[0], *x.shape[1:]), between, dtype=x.dtype)[::2]
    elif layout == "inner" and x.ndim:  # every other column
        y = xp.full((*x.shape[:-1], 2 * x.shape[-1]), between, dtype=x.dtype)[..., ::2]
    elif layout == "offset":  # an address that is no multiple of 16
        y = xp.zeros(x.size + 1, dtype=x.dtype)[1:].reshape(x.shape)
    else:
        return xp.array(x)
    y[...] = x
    return y


def strided(framework: str, x: Any, layout: str, dtype: str = "float32") -> Any:
    """`make` in a layout of `lay`, "expanded" (of one row) included."""
    x = np.asarray(x, x.dtype if integral(x) else dtype)
    torch = import_module("torch") if framework.startswith("torch") else None
    if layout == "expanded":
        row = make(framework, x[:1], dtype)
        return row.expand(x.shape) if torch else import_module(framework).broadcast_to(row, x.shape)
    if torch is None:
        return lay(import_module(framework), make(framework, x, dtype), layout)
    source, values = lay(np, x, layout), make(framework, x, dtype)
    if layout == "offset":
        return torch.cat([values.new_zeros(1), values.reshape(-1)])[1:].reshape(x.shape)
    strides = [n // x.itemsize for n in source.strides]
    return torch.empty_strided(x.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


class Device(NamedTuple):
    """Where a test's arrays live, in which precision, and how close to float64 its results are."""

    framework: str
    backend: str
    dtype: str
    tolerance: float

    def array(self, x: Any, layout: str = "contiguous") -> Any:
        return lay(import_module(self.framework), make(self.framework, x, self.dtype), layout)

    def zeros(self, *shape: int) -> Any:
        return self.array(np.zeros(shape))


CPU = Device("numpy", "reference", "float64", 1e-12)  # a few roundings of float64
CUDA = Device("cupy", "cuda", "float32", 1e-5)  # float32 sums of up to some thousand terms, as the oracle cases allow


class Case(NamedTuple):
    """A layer type with the shapes of its arrays."""

    kind: type[Layer]
    weight: tuple[int, ...]
    bias: bool
    h: tuple[int, ...]
    s: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def layer(self, array: Any = np.zeros) -> Layer:
        """A descriptor whose arrays are `array(shape)`."""
        units = self.weight[-1] if self.kind is TransposedLinear else self.weight[0]
        if issubclass(self.kind, ConvTranspose):
            units = self.s[1]
        units = math.prod(self.weight) if issubclass(self.kind, LayerNorm) else units
        return self.kind(array(self.weight), array((units,)) if self.bias else None, **self.options)

    def data(self, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """h and s, exact in float32; indices for an embedding, not all of them padding."""
        rng = np.random.default_rng(seed)
        h, s = (np.float32(rng.normal(0.5, 1.0, shape)).astype(float) for shape in (self.h, self.s))
        if self.kind is not Embedding:
            return h, s
        h = rng.integers(0, self.weight[0], self.h)
        padding = self.options.get("padding_idx")
        if padding is not None and np.all(h == padding % self.weight[0]):
            h.reshape(-1)[0] = (padding + 1) % self.weight[0]
        return h, s

    def of(self, x: Any) -> np.ndarray[Any, Any]:
        """An array of the type of h."""
        return np.asarray(x, np.int64 if self.kind is Embedding else float)


@st.composite
def linears(draw: Any) -> Case:
    lead = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    d_in, d_out = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    kind, weight = draw(st.sampled_from([(Linear, (d_out, d_in)), (TransposedLinear, (d_in, d_out))]))
    return Case(kind, weight, draw(st.booleans()), (*lead, d_in), (*lead, d_out))


@st.composite
def embeddings(draw: Any) -> Case:
    lead = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    rows, width = draw(st.integers(2, 13)), draw(st.integers(1, 13))
    padding = draw(st.none() | st.integers(-rows, rows - 1))
    return Case(Embedding, (rows, width), False, lead, (*lead, width), {"padding_idx": padding})


@st.composite
def convolutions(draw: Any, least: int = 1, most: int = 3) -> Case:
    """Strides above the kernel, padding above it, dilation, groups down to depthwise, and outputs that only the padding
    behind the image explains; images of `least` to `most` axes."""
    count = draw(st.integers(least, most))
    groups, c_in, c_out = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    small = 1 if count == 3 else 0  # volumes have many pixels

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    kernel, stride, padding, dilation = each(1, 4 - small), each(1, 5), each(0, 6 - 3 * small), each(1, 3 - small)
    image, output = [], []
    for k, t, p, d, m, e in zip(kernel, stride, padding, dilation, each(0, 7 - 3 * small), each(0, 1)):
        reach = d * (k - 1) + 1
        size = max(1, reach - 2 * p) + m
        image.append(size)
        output.append((size + 2 * p - reach) // t + 1 + e)
    batch = draw(st.sampled_from([1, 2, 5]))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    h, s = (batch, groups * c_in, *image), (batch, groups * c_out, *output)
    kind = (Conv1d, Conv2d, Conv3d)[count - 1]
    return Case(kind, (groups * c_out, c_in, *kernel), draw(st.booleans()), h, s, options)


TRANSPOSED = {Conv1d: ConvTranspose1d, Conv2d: ConvTranspose2d, Conv3d: ConvTranspose3d}


@st.composite
def transposed_convolutions(draw: Any) -> Case:
    """With input and output exchanged."""
    case = draw(convolutions())
    return case._replace(kind=TRANSPOSED[case.kind], h=case.s, s=case.h)


PIXEL_AXES = {
    **{BatchNorm1d: (0, 1), BatchNorm2d: (2, 2), BatchNorm3d: (3, 3)},
    **dict.fromkeys((GroupNorm, InstanceNorm, SyncBatchNorm), (0, 4)),
}


@st.composite
def channel_norms(draw: Any) -> Case:
    kind = draw(st.sampled_from(list(PIXEL_AXES)))
    axes = draw(st.integers(*PIXEL_AXES[kind]))
    most = (13, 13, 13, 5, 3)[axes]
    pixels = (draw(st.integers(1, most)) for _ in range(axes))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 7)), *pixels)
    return Case(kind, (shape[1],), draw(st.booleans()), shape, shape)


@st.composite
def layer_norms(draw: Any) -> Case:
    kind = draw(st.sampled_from([LayerNorm, RMSNorm]))
    normalized = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    lead = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    bias = kind is LayerNorm and draw(st.booleans())
    return Case(kind, normalized, bias, (*lead, *normalized), (*lead, *normalized))


cases = st.one_of(linears(), embeddings(), convolutions(), transposed_convolutions(), channel_norms(), layer_norms())
seeds = st.integers(0, 2**16)

# One of each kind for tests that want no search.
EXAMPLES = [
    Case(Linear, (3, 5), True, (4, 2, 5), (4, 2, 3)),
    Case(TransposedLinear, (5, 3), True, (4, 2, 5), (4, 2, 3)),
    Case(Embedding, (7, 3), False, (4, 5), (4, 5, 3), {"padding_idx": 2}),
    Case(Conv1d, (4, 3, 3), True, (4, 3, 11), (4, 4, 6), {"stride": 2, "padding": 1}),
    Case(Conv2d, (4, 2, 3, 2), True, (4, 4, 7, 6), (4, 4, 4, 6), {"stride": (2, 1), "padding": 1, "groups": 2}),
    Case(
        Conv3d,
        (4, 1, 2, 3, 2),
        True,
        (4, 2, 4, 5, 6),
        (4, 4, 3, 3, 5),
        {"stride": (1, 2, 1), "padding": (0, 1, 0), "groups": 2},
    ),
    Case(ConvTranspose1d, (4, 3, 3), True, (4, 4, 6), (4, 3, 11), {"stride": 2, "padding": 1}),
    Case(
        ConvTranspose2d, (4, 2, 3, 2), True, (4, 4, 4, 6), (4, 4, 7, 6), {"stride": (2, 1), "padding": 1, "groups": 2}
    ),
    Case(ConvTranspose3d, (4, 1, 2, 1, 2), True, (4, 4, 3, 3, 5), (4, 2, 4, 5, 6), {"stride": (1, 2, 1), "groups": 2}),
    Case(BatchNorm1d, (3,), True, (4, 3), (4, 3)),
    Case(BatchNorm2d, (3,), True, (4, 3, 5, 2), (4, 3, 5, 2)),
    Case(BatchNorm3d, (3,), True, (4, 3, 2, 5, 2), (4, 3, 2, 5, 2)),
    Case(SyncBatchNorm, (3,), True, (4, 3, 7), (4, 3, 7)),
    Case(GroupNorm, (4,), True, (4, 4, 5), (4, 4, 5)),
    Case(InstanceNorm, (3,), True, (4, 3, 5, 2), (4, 3, 5, 2)),
    Case(LayerNorm, (5,), True, (4, 3, 5), (4, 3, 5)),
    Case(RMSNorm, (5,), False, (4, 3, 5), (4, 3, 5)),
]

# Several warps for a kernel row; more taps in a row than lanes; many slices; all of these; few rows; depth.
LARGE_IMAGES = [
    Case(Conv2d, (2, 2, 3, 3), True, (2, 2, 70, 75), (2, 2, 35, 38), {"padding": 1, "stride": 2}),
    Case(Conv2d, (1, 1, 2, 40), False, (3, 1, 5, 90), (3, 1, 4, 26), {"stride": (1, 2)}),
    Case(Conv2d, (1, 1, 3, 34), False, (300, 1, 40, 40), (300, 1, 38, 7), {}),
    Case(Conv2d, (3, 3, 16, 16), True, (2, 3, 48, 64), (2, 3, 3, 4), {"stride": 16}),
    Case(Linear, (4, 3), True, (5000, 3), (5000, 4)),
    Case(Conv1d, (2, 2, 5), True, (2, 2, 1000), (2, 2, 998), {"padding": 1}),
    Case(Conv1d, (2, 1, 40), True, (2, 2, 5000), (2, 2, 1654), {"stride": 3, "groups": 2}),
    Case(Conv2d, (1, 1, 2, 3), True, (2, 1, 4, 700), (2, 1, 3, 700), {"padding": (0, 1)}),
    Case(Conv3d, (2, 2, 3, 3, 3), True, (300, 2, 6, 7, 8), (300, 2, 3, 4, 4), {"padding": 1, "stride": 2}),
    Case(ConvTranspose2d, (3, 2, 3, 3), True, (300, 3, 20, 35), (300, 2, 41, 71), {"stride": 2, "groups": 1}),
    Case(Conv3d, (1, 1, 2, 3, 2), False, (2, 1, 5, 40, 70), (2, 1, 4, 38, 69)),
]


def arrays(layer: Layer) -> list[Any]:
    """Weight, and bias if there is one."""
    return [array for array in (layer.weight, layer.bias) if array is not None]


def example_id(case: Case) -> str:
    return case.kind.__name__


def moments(case: Case, h: Any, s: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Raw moments by the reference, in float64."""
    layer = case.layer()
    H, S = reference.raw_moments(layer, reference.raw_sums(layer, case.of(h), np.asarray(s, float)))
    return H, S


def bounds(case: Case, h: Any, s: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Moments of the absolute values: what rounding errors are relative to where signs cancel."""
    return moments(case, abs(h), abs(s))


def run_raw(
    device: Device, case: Case, pairs: Sequence[tuple[Any, Any]], **options: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Raw moments of one sampled step by the public optimizer, from (h, s) pairs that lie on the device."""
    layer = case.layer(lambda shape: device.zeros(*shape))
    params = arrays(layer)
    opt = AdaFisher(params, layers=[layer], averaging=RAW, backend=device.backend)
    for h, s in pairs:
        opt.accumulate(layer, h, s)
    opt.step([device.zeros(*p.shape) for p in params], **options)
    H, S = opt.factors()["0"]
    return numpy_of(H), numpy_of(S)


def pair_of_layers(device: Device, case: Case, rule: Averaging, **options: Any) -> tuple[AdaFisher, list[Any]]:
    """An optimizer of two layers of one kind, sampling every step, and the layers."""
    layers = [case.layer(lambda shape: device.zeros(*shape)) for _ in range(2)]
    params = [layer.weight for layer in layers]
    return AdaFisher(params, layers, averaging=rule, TCov=1, backend=device.backend, **options), layers


def take(opt: AdaFisher, device: Device, *pairs: tuple[Any, Any]) -> None:
    """A step in which the layers see (h, s), and gradients are 0."""
    for layer, pair in zip(opt._layers, pairs):
        opt.accumulate(layer, *map(device.array, pair))
    opt.step([device.zeros(*layer.weight.shape) for layer in opt._layers])


def close(got: Any, want: Any, tolerance: float, scale: Any = None) -> None:
    """|got - want| <= tolerance * the largest entry of `scale` (of `want` if None), and finite."""
    got, want = numpy_of(got).astype(float), numpy_of(want).astype(float)
    assert got.shape == want.shape
    if want.size == 0:
        return
    largest = np.max(np.abs(want if scale is None else numpy_of(scale).astype(float)))
    error = np.max(np.abs(got - want))
    assert error <= tolerance * largest, f"error {error:.3g} with entries up to {largest:.3g}: {got} is not {want}"


def problem(shape: tuple[int, ...], seed: int = 0, columns: int | None = None) -> dict[str, Any]:
    """p, g, m, and H, S for a matrix of `columns` columns (the trailing axes if None), exact in float32."""
    rng = np.random.default_rng(seed)
    p, g, m = (np.float32(rng.normal(size=shape)) for _ in range(3))
    columns = math.prod(shape[1:]) if columns is None else columns
    rows = p.size // columns if columns else 0
    return {"p": p, "g": g, "m": m, "H": np.float32(rng.random(columns)), "S": np.float32(rng.random(rows))}


def updated(x: dict[str, Any], factors: bool = True, **options: Any) -> tuple[Any, Any]:
    wide = {name: np.asarray(value, float) for name, value in x.items()}
    pair = (wide["H"], wide["S"]) if factors else (None, None)
    return reference.update(wide["p"], wide["g"], wide["m"], *pair, **options)


def check_update(p: Any, m: Any, x: dict[str, Any], tolerance: float = 2e-6, **options: Any) -> None:
    """float32: a few roundings, relative to the larger of the parameter and its step."""
    want_p, want_m = updated(x, **options)
    close(p, want_p, tolerance, np.append(want_p, x["p"]))
    close(m, want_m, tolerance)


def same_bits(a: Any, b: Any) -> None:
    a, b = numpy_of(a), numpy_of(b)
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@contextmanager
def refuses(kind: type[CafinError], *words: str, unchanged: Sequence[Any] = ()) -> Iterator[None]:
    """The block raises `kind` with a message that holds all `words`, and leaves the arrays `unchanged`, bit for bit."""
    before = [numpy_of(a) for a in unchanged]
    with pytest.raises(CafinError) as caught:
        yield
    assert type(caught.value) is kind, caught.value
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    for now, then in zip(unchanged, before):
        same_bits(now, then)
