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

from cafin_cupy import AdaFisher, Averaging, BatchNorm2d, CafinError, Conv2d, LayerNorm, Linear, reference
from cafin_cupy.layers import Layer

FRAMEWORKS = [
    "numpy",
    "torch",
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
]
LAYOUTS = ["contiguous", "channels_last", "sliced", "inner", "offset", "transposed"]
# With this rule a layer's factors are the raw moments of the last sampled step.
RAW = Averaging(keep=0.0, add=1.0, normalize="after")


def make(framework: str, x: Any, dtype: str = "float32") -> Any:
    """A new array with the values of `x`."""
    x = np.array(x, dtype=dtype)
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
    if layout == "channels_last" and x.ndim == 4:
        return xp.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    if layout == "transposed":
        return xp.ascontiguousarray(x.T).T
    if layout == "sliced" and x.ndim:  # every other row of a larger array
        y = xp.full((2 * x.shape[0], *x.shape[1:]), math.nan, dtype=x.dtype)[::2]
    elif layout == "inner" and x.ndim:  # every other column
        y = xp.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)[..., ::2]
    elif layout == "offset":  # an address that is no multiple of 16
        y = xp.zeros(x.size + 1, dtype=x.dtype)[1:].reshape(x.shape)
    else:
        return xp.array(x)
    y[...] = x
    return y


def strided(framework: str, x: Any, layout: str, dtype: str = "float32") -> Any:
    """`make` in a layout of `lay`, "expanded" (of one row) included."""
    x = np.asarray(x, dtype)
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
        units = math.prod(self.weight) if self.kind is LayerNorm else self.weight[0]
        return self.kind(array(self.weight), array((units,)) if self.bias else None, **self.options)

    def data(self, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """h and s, exact in float32."""
        rng = np.random.default_rng(seed)
        h, s = (np.float32(rng.normal(0.5, 1.0, shape)).astype(float) for shape in (self.h, self.s))
        return h, s


@st.composite
def linears(draw: Any) -> Case:
    lead = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    d_in, d_out = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    return Case(Linear, (d_out, d_in), draw(st.booleans()), (*lead, d_in), (*lead, d_out))


@st.composite
def convolutions(draw: Any) -> Case:
    """Strides above the kernel, padding above it, dilation, groups down to depthwise, and output rows that only the
    padding behind the image explains."""
    two = lambda least, most: (draw(st.integers(least, most)), draw(st.integers(least, most)))  # noqa: E731
    groups, c_in, c_out = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kernel, stride, padding, dilation, more, extra = two(1, 4), two(1, 5), two(0, 6), two(1, 3), two(0, 7), two(0, 1)
    image, output = [], []
    for k, t, p, d, m, e in zip(kernel, stride, padding, dilation, more, extra):
        reach = d * (k - 1) + 1
        size = max(1, reach - 2 * p) + m
        image.append(size)
        output.append((size + 2 * p - reach) // t + 1 + e)
    batch = draw(st.sampled_from([1, 2, 5]))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    h, s = (batch, groups * c_in, *image), (batch, groups * c_out, *output)
    return Case(Conv2d, (groups * c_out, c_in, *kernel), draw(st.booleans()), h, s, options)


@st.composite
def batch_norms(draw: Any) -> Case:
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(1, 13)), draw(st.integers(1, 13)))
    return Case(BatchNorm2d, (shape[1],), draw(st.booleans()), shape, shape)


@st.composite
def layer_norms(draw: Any) -> Case:
    normalized = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    lead = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    return Case(LayerNorm, normalized, draw(st.booleans()), (*lead, *normalized), (*lead, *normalized))


cases = st.one_of(linears(), convolutions(), batch_norms(), layer_norms())
seeds = st.integers(0, 2**16)

# One of each kind for tests that want no search.
EXAMPLES = [
    Case(Linear, (3, 5), True, (4, 2, 5), (4, 2, 3)),
    Case(Conv2d, (4, 2, 3, 2), True, (4, 4, 7, 6), (4, 4, 4, 6), {"stride": (2, 1), "padding": 1, "groups": 2}),
    Case(BatchNorm2d, (3,), True, (4, 3, 5, 2), (4, 3, 5, 2)),
    Case(LayerNorm, (5,), True, (4, 3, 5), (4, 3, 5)),
]


def example_id(case: Case) -> str:
    return case.kind.__name__


def moments(case: Case, h: Any, s: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Raw moments by the reference, in float64."""
    layer = case.layer()
    H, S = reference.raw_moments(layer, reference.raw_sums(layer, np.asarray(h, float), np.asarray(s, float)))
    return H, S


def bounds(case: Case, h: Any, s: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Moments of the absolute values: what rounding errors are relative to where signs cancel."""
    return moments(case, abs(h), abs(s))


def run_raw(
    device: Device, case: Case, pairs: Sequence[tuple[Any, Any]], **options: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Raw moments of one sampled step by the public optimizer, from (h, s) pairs that lie on the device."""
    layer = case.layer(lambda shape: device.zeros(*shape))
    params = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
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
