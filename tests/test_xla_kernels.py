"""The kernels for JAX, built by the adapter's functions from shapes of any kind and launched without XLA: float64's
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax")
from helpers import (
    CUDA,
    LARGE_IMAGES,
    Case,
    channel_norms,
    close,
    convolutions,
    layer_norms,
    linears,
    same_bits,
    seeds,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xla_helpers import launched, plan, to_gpu

from cafin_cupy import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, Linear, reference
from cafin_cupy.adapters import jax_kernels, jax_ptx, jax_sums
from cafin_cupy.adapters.jax_kernels import Leaf, Part, Use
from cafin_cupy.cuda_update import TYPES, scalars
from cafin_cupy.layers.convolution import Conv
from cafin_cupy.rule import Hyper
from cafin_cupy.table import CHUNK

pytestmark = pytest.mark.gpu
COMPILED = settings(max_examples=max(2, settings().max_examples // 2))  # each is a source of its own


@pytest.fixture(autouse=True)
def _without_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_ptx.Kernel, "__call__", launched)


# ---- Update ----

KINDS = [kind for kind in product(TYPES, TYPES) if jax_kernels.takes(Leaf(1, 1, *kind, None, 0))]
NEIGHBOURS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # their distance, relative
OPTIONS = ("lr", "beta", "Lambda", "weight_decay", "decoupled")
HYPERS = [  # OPTIONS, with the step, and what gradients are divided by
    ((0.1, 0.9, 0.5, 0.1, False), 3, 1.0),
    ((0.03, 0.0, 1e-3, 0.0, False), 1, 1.0),
    ((0.05, 0.7, 0.01, 0.2, True), 50, 8.0),
]
SKIPS = len(HYPERS)  # the set of scalars of a step that does not happen


class Spec(NamedTuple):
    """A parameter: `stack` matrices of `rows` times `columns`."""

    kind: tuple[str, str]
    stack: int
    rows: int
    columns: int
    factors: bool
    hyper: int
    gap: int = 0  # factors of others before and behind its own


specs = st.builds(
    Spec,
    st.sampled_from(KINDS),
    st.integers(1, 4),
    *2 * [st.integers(0, 40) | st.sampled_from([64, 131])],
    st.booleans(),
    st.integers(0, SKIPS),
    st.integers(0, 3),
)


class Problem:
    """Parameters with all that an update needs, on the host."""

    def __init__(self, specs: Sequence[Spec], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.specs = specs
        self.leaves: list[Leaf] = []
        self.p, self.g, self.m = [], [], []
        self.H, self.S = [], []
        used: list[Any] = [np.zeros(0, np.float32)]
        for spec in specs:
            (dtype, momentum), shape = spec.kind, (spec.stack, spec.rows, spec.columns)
            for into, kind in ((self.p, dtype), (self.g, dtype), (self.m, momentum)):
                into.append(rng.standard_normal(shape, np.float32).astype(kind))
            H, S = (rng.random((spec.stack, n), np.float32) for n in (spec.columns, spec.rows))
            self.H.append(H)
            self.S.append(S)
            parts = []
            for factor in (H, S):
                apart = np.pad(factor, ((0, 0), (spec.gap, spec.gap // 2)), constant_values=np.nan)
                parts.append(Part(sum(x.size for x in used), apart.shape[1], spec.gap, factor.shape[1]))
                used.append(apart.ravel())
            use = Use(*parts) if spec.factors else None
            self.leaves.append(Leaf.of(self.p[-1], self.m[-1], use, 1, spec.hyper))
        self.factors = np.concatenate([*used, np.full(1, np.nan, np.float32)])

    def updated(self) -> tuple[list[Any], list[Any]]:
        """New parameters and momenta by the kernel."""
        sets = [scalars(Hyper(*hyper), step, scale) for hyper, step, scale in HYPERS]
        hypers = np.array([*sets, (*sets[0][:-2], 0.0, 0)], np.float32)
        p, g, m = ([to_gpu(x) for x in each] for each in (self.p, self.g, self.m))
        new = jax_kernels.update(self.leaves, p, g, m, to_gpu(self.factors), to_gpu(hypers))
        return tuple([x.get() for x in each] for each in new)  # type: ignore[return-value]

    def check(self) -> None:
        for k, (new_p, new_m) in enumerate(zip(*self.updated())):
            assert (new_p.dtype, new_m.dtype) == self.specs[k].kind
            if self.specs[k].hyper == SKIPS:
                same_bits(new_p, self.p[k])
                same_bits(new_m, self.m[k])
                continue
            for copy in range(self.specs[k].stack):
                self._check(k, copy, new_p[copy], new_m[copy])

    def _check(self, k: int, copy: int, new_p: Any, new_m: Any) -> None:
        """Half a unit in the last place of the type, and some 15 roundings of float32 of all that is added up."""
        hyper, step, scale = HYPERS[self.specs[k].hyper]
        p, g, m = (each[k][copy].astype(float) for each in (self.p, self.g, self.m))
        F = [each[k][copy].astype(float) if self.specs[k].factors else None for each in (self.H, self.S)]
        options = {**dict(zip(OPTIONS, hyper)), "step": step}
        want = reference.update(p, g / scale, m, *F, **options)
        sizes = reference.update(abs(p), abs(g) / scale, abs(m), *F, **options)
        added = 2 * abs(p) - sizes[0], sizes[1]  # the step goes down
        for got, exact, terms, kind in zip((new_p, new_m), want, added, self.specs[k].kind):
            slack = NEIGHBOURS[kind] / 2 * abs(exact) + 2.0**-20 * terms
            slack += 2.0**-25 if kind == "float16" else 0  # denormals have fewer digits
            error = abs(got.astype(float) - exact)
            assert np.all(error <= slack), (self.specs[k], copy, error.max())


@COMPILED
@given(st.lists(specs, min_size=1, max_size=6), seeds)
def test_updates_follow_float64(drawn: list[Spec], seed: int) -> None:
    Problem(drawn, seed).check()


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_chunks_tails_and_layers_at_odd_places(kind: tuple[str, str]) -> None:
    """Of a stack of odd matrices only some may be read by four elements at once."""
    shapes = [
        (1, 1, CHUNK),
        (1, 1, CHUNK + 1),
        (1, CHUNK - 1, 1),
        (2, 61, 135),
        (6, 3, 5),
        (2, 1, CHUNK + 3),
        (3, 2, 4),
    ]
    Problem([Spec(kind, *shape, bool(k % 4), k % SKIPS, k % 3) for k, shape in enumerate(shapes)]).check()


def test_many_leaves_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them empty, at either end of a launch too."""
    launches = []
    monkeypatch.setattr(jax_kernels, "ITEMS", 40)
    monkeypatch.setattr(jax_ptx.Kernel, "__call__", lambda *args: launches.append(args) or launched(*args))
    sizes = [(k % 3 + 1, k * 7 % 5, k * 11 % 9) for k in range(50)]
    assert sizes[0][1] == 0
    Problem([Spec(KINDS[k % len(KINDS)], *size, k % 3 > 0, k % 4) for k, size in enumerate(sizes)]).check()
    assert len(launches) == 3


# ---- Sums ----

FLOATS = sorted(TYPES)


@st.composite
def wide(draw: Any) -> Case:
    """Matrices and channels of many columns or rows: tiles with tails, several slices of rows, runs over tiles."""
    rows, width = draw(st.sampled_from([(1, 1300), (63, 600), (64, 600), (300, 257), (700, 40)]))
    rows, width, other = (draw(st.integers(max(1, n - 9), n)) for n in (rows, width, 140))
    kind = draw(st.sampled_from([Linear, GroupNorm, BatchNorm1d, LayerNorm]))
    if kind is Linear:
        return Case(Linear, (other, width), True, (rows, width), (rows, other))
    if kind is LayerNorm:
        return Case(LayerNorm, (width,), True, (rows, 3, width), (rows, 3, width))
    channels = draw(st.integers(1, 4))
    return Case(kind, (channels,), True, (rows, channels, width), (rows, channels, width))


def check_sums(case: Case, dtypes: Sequence[str], channels_last: bool, seed: int = 0) -> None:
    """The raw sums that the adapter makes of a call, twice."""
    core = case.layer()
    h, s = (x.astype(dtype) for x, dtype in zip(case.data(seed), dtypes))
    want = reference.raw_sums(core, h.astype(float), s.astype(float))
    bounds = reference.raw_sums(core, abs(h.astype(float)), abs(s.astype(float)))
    if channels_last:
        h, s = (np.ascontiguousarray(np.moveaxis(x, 1, -1)) for x in (h, s))
    planned = plan(core, h, s, channels_last)
    results = [jax_sums._launched(planned, core.shares, to_gpu(h), to_gpu(s)) for _ in range(2)]
    for first, again, exact, bound in zip(*results, want, bounds):
        close(first, exact, CUDA.tolerance, bound)
        same_bits(first, again)


def images(case: Case) -> bool:
    """True of layers whose arrays have channels, which may come last."""
    return issubclass(case.kind, (Conv, BatchNorm1d, BatchNorm2d, GroupNorm)) and len(case.h) > 2


layers = st.one_of(linears(), convolutions(), channel_norms(), layer_norms(), wide())
pairs_of_types = st.sampled_from(list(product(FLOATS, FLOATS)))


@COMPILED
@given(layers, pairs_of_types, st.booleans(), seeds)
@example(Case(Linear, (300, 513), True, (40, 513), (40, 300)), ("bfloat16", "float32"), False, 0)  # tiles with tails
@example(Case(GroupNorm, (3,), True, (70, 3, 515), (70, 3, 515)), ("float32", "float16"), False, 0)  # runs over tiles
@example(Case(GroupNorm, (3,), True, (70, 3, 515), (70, 3, 515)), ("float16", "bfloat16"), True, 0)
def test_sums_follow_float64(case: Case, dtypes: tuple[str, str], channels_last: bool, seed: int) -> None:
    check_sums(case, dtypes, channels_last and images(case), seed)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("case", [case for case in LARGE_IMAGES if issubclass(case.kind, Conv)], ids=str)
def test_sums_of_large_images(case: Case, channels_last: bool) -> None:
    check_sums(case, ("float32", "bfloat16"), channels_last)
