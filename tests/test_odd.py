"""Arrays of odd forms, through `fused_step` and `AdaFisher`: the bits of contiguous ones, or a refusal that changes
nothing. Strides, addresses, shared memory, and arrays that move."""

from __future__ import annotations

import itertools
import math
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    EXAMPLES,
    FRAMEWORKS,
    Case,
    Device,
    bounds,
    cases,
    check_update,
    close,
    integral,
    make,
    moments,
    numpy_of,
    problem,
    refuses,
    run_raw,
    same_bits,
    seeds,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from cafin_cupy import AdaFisher, CafinTypeError, CafinValueError, Conv2d, Linear, fused_step
from cafin_cupy.arrays import view
from cafin_cupy.memory import share

LR = {"lr": 0.1, "beta": 0.7, "Lambda": 0.01, "weight_decay": 0.1}
KERNELS = ("cupy", "torch-cuda")
AROUND = 7.0  # lies where nothing may be written


class Form(NamedTuple):
    """How an array lies in a larger one.

    Attributes:
        order: its axes from the outermost in memory to the innermost.
        steps: of each axis; a negative one runs backwards, 0 repeats a single entry.
        front: elements of the larger array in front.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    front: int

    def lay(self, framework: str, x: np.ndarray[Any, Any], dtype: str = "float32") -> tuple[Any, Any]:
        """(the larger array, flat; the values of `x` within it). All else there is `AROUND`."""
        torches = framework.startswith("torch")
        room = [max(1, abs(step)) * n if step else min(n, 1) for n, step in zip(x.shape, self.steps)]
        size = math.prod(room)
        around = np.full(self.front + size + 3, AROUND, x.dtype if integral(x) else float)
        flat = make(framework, around, dtype)
        array = flat[self.front : self.front + size].reshape([room[axis] for axis in self.order])
        if x.ndim > 1:
            back = [self.order.index(axis) for axis in range(x.ndim)]
            array = array.permute(back) if torches else array.transpose(back)
        array = array[(..., *(slice(None, None, step or None) for step in self.steps))]
        entries = x[(..., *(slice(None) if step else slice(1) for step in self.steps))]
        array[...] = make(framework, entries, dtype)
        if 0 in self.steps:
            array = array.expand(x.shape) if torches else import_module(framework).broadcast_to(array, x.shape)
        return flat, array


@st.composite
def forms(draw: Any, ndim: int, steps: list[int]) -> Form:
    """A third of them contiguous or channels_last, anywhere."""
    axes, front = tuple(range(ndim)), draw(st.integers(0, 5))
    if draw(st.integers(0, 2)) == 0:
        return Form((0, 2, 3, 1) if ndim == 4 and draw(st.booleans()) else axes, (1,) * ndim, front)
    return Form(tuple(draw(st.permutations(axes))), tuple(draw(st.sampled_from(steps)) for _ in axes), front)


ONCE, BACKWARDS, REPEATED = [1, 1, 1, 2, 3], [-1, -2], [0, 0]  # torch has no negative steps


def steps_of(framework: str, repeated: bool = False) -> list[int]:
    return ONCE + (BACKWARDS if not framework.startswith("torch") else []) + (REPEATED if repeated else [])


def ordered(array: np.ndarray[Any, Any]) -> bool:
    """Contiguous or channels_last: what the kernels update."""
    return array.flags.c_contiguous or (array.ndim == 4 and array.transpose(0, 2, 3, 1).flags.c_contiguous)


def same_order(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.size == 0 or all(n == 1 or x == y for n, x, y in zip(a.shape, a.strides, b.strides))


def repeats(x: np.ndarray[Any, Any], form: Form) -> np.ndarray[Any, Any]:
    """The values that an array of this form can hold."""
    return np.broadcast_to(x[(..., *(slice(None) if step else slice(1) for step in form.steps))], x.shape).copy()


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(shapes, seeds, st.booleans(), st.data())
def test_any_strides_and_offsets(framework: str, shape: tuple[int, ...], seed: int, factors: bool, data: Any) -> None:
    """Parameter, gradient and momentum, each in a form of its own; half of the momenta in that of the parameter."""
    x = problem(shape, seed)
    factors = factors and x["p"].size > 0
    p_form = data.draw(forms(len(shape), steps_of(framework)))
    m_form = data.draw(st.one_of(st.just(p_form), forms(len(shape), steps_of(framework))))
    g_form = data.draw(forms(len(shape), steps_of(framework, repeated=True)))
    x["g"] = repeats(x["g"], g_form)
    laid = {name: form.lay(framework, x[name]) for name, form in (("p", p_form), ("g", g_form), ("m", m_form))}
    pair = (make(framework, x["H"]), make(framework, x["S"])) if factors else None
    (_, p), (_, g), (_, m) = laid.values()
    buffers = [flat for flat, _ in laid.values()]
    around = [np.count_nonzero(numpy_of(flat) == AROUND) for flat in buffers]
    twins = [form.lay("numpy", x[name])[1] for name, form in (("p", p_form), ("m", m_form))]
    if framework in KERNELS and not (ordered(twins[0]) and same_order(*twins)):
        with refuses(CafinValueError, "fused_step", "contiguous" if not ordered(twins[0]) else "strides"):
            fused_step([p], [g], [m], [pair], **LR)
        for name, array in (("p", p), ("g", g), ("m", m)):
            same_bits(numpy_of(array), x[name])
        return
    fused_step([p], [g], [m], [pair], **LR)
    want = [make(framework, x[name]) for name in "pgm"]
    fused_step([want[0]], [want[1]], [want[2]], [pair], **LR)
    for got, true in zip((p, m), (want[0], want[2])):
        same_bits(numpy_of(got), numpy_of(true))
    same_bits(numpy_of(g), x["g"])
    assert [np.count_nonzero(numpy_of(flat) == AROUND) for flat in buffers] == around  # untouched beside the arrays


@given(cases, seeds, st.data())
def test_any_strides_of_inputs_and_output_gradients(device: Device, case: Case, seed: int, data: Any) -> None:
    pair, exact = [], []
    for x in case.data(seed):
        form = data.draw(forms(x.ndim, steps_of(device.framework, repeated=True)))
        exact.append(repeats(x, form))
        pair.append(form.lay(device.framework, exact[-1], device.dtype)[1])
    wanted = moments(case, *exact)
    assume(not np.isnan(wanted[0]).any())  # an embedding that reads nothing but padding
    # Sums are added in an order that depends on strides, hence no bits; errors are relative to the absolute values.
    for mine, want, bound in zip(run_raw(device, case, [tuple(pair)]), wanted, bounds(case, *exact)):
        close(mine, want, device.tolerance, bound)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(seeds, st.data())
def test_steps_with_gradients_of_any_strides(framework: str, seed: int, data: Any) -> None:
    """Three steps of the optimizer, of which two are sampled, with parameters at any address."""
    case = next(case for case in EXAMPLES if case.kind is Conv2d)  # its weight may be channels_last
    layouts = [(0, 1, 2, 3), (0, 2, 3, 1)]
    forms_of_weight = st.builds(Form, st.sampled_from(layouts), st.just((1, 1, 1, 1)), st.integers(0, 5))
    laid, plain = [], []
    rng = np.random.default_rng(seed)
    for shape in (case.weight, case.weight[:1]):
        x = np.float32(rng.normal(size=shape))
        form = data.draw(forms_of_weight) if len(shape) == 4 else Form((0,), (1,), data.draw(st.integers(0, 5)))
        laid.append(form.lay(framework, x)[1])
        plain.append(make(framework, x))
    drawn = [data.draw(forms(len(a.shape), steps_of(framework, repeated=True))) for a in laid]
    optimizers = []
    for params, odd in ((laid, True), (plain, False)):
        layer = case.kind(*params, **case.options)
        opt = AdaFisher(params, [layer], TCov=2, weight_decay=0.1)
        for step in range(3):
            opt.accumulate(layer, *(make(framework, a) for a in case.data(step)))
            rng = np.random.default_rng(step)
            grads = [repeats(np.float32(rng.normal(size=a.shape)), form) for a, form in zip(params, drawn)]
            opt.step([form.lay(framework, g)[1] if odd else make(framework, g) for g, form in zip(grads, drawn)])
        optimizers.append(opt)
    one, other = ([*o.momenta, *o.factors()["0"]] for o in optimizers)
    for a, b in zip([*laid, *one], [*plain, *other]):
        same_bits(numpy_of(a), numpy_of(b))


def test_every_address_of_four_bytes(device: Device) -> None:
    """p, g and m each at every place between two multiples of 16 bytes: the same bits."""
    x = problem((7, 11))
    results = []
    for fronts in itertools.product(range(4), repeat=3):
        p, g, m = (Form((0, 1), (1, 1), front).lay(device.framework, x[name])[1] for name, front in zip("pgm", fronts))
        fused_step([p], [g], [m], [(make(device.framework, x["H"]), make(device.framework, x["S"]))], **LR)
        results.append((p, m))
    for p, m in results[1:]:
        same_bits(p, results[0][0])
        same_bits(m, results[0][1])
    check_update(*results[0], x, **LR)


# ---- Addresses between two elements ----


def unaligned(framework: str, shape: tuple[int, ...]) -> Any:
    """An array at an address that is no multiple of four: ones, on a CPU; no GPU may touch it."""
    size = math.prod(shape)
    if framework == "torch":
        array = torch.frombuffer(bytearray(4 * size + 1), dtype=torch.float32, offset=1).reshape(shape)
    else:
        xp = import_module(framework)
        array = xp.zeros(4 * size + 1, dtype=xp.uint8)[1:].view(xp.float32).reshape(shape)
    if framework != "cupy":
        array[...] = 1.0
    return array


@pytest.mark.parametrize("framework", ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_elements_at_no_multiple_of_their_size_are_refused(framework: str) -> None:
    words = ("multiples of its elements' size", "float32", "copy")
    arrays = {name: make(framework, np.ones(shape)) for name, shape in zip("pgmHS", [(4, 3)] * 3 + [(3,), (4,)])}
    names = {"p": "params[0]", "g": "grads[0]", "m": "momenta[0]", "H": "factors[0].H", "S": "factors[0].S"}
    for letter, name in names.items():
        given = {**arrays, letter: unaligned(framework, tuple(arrays[letter].shape))}
        others = [array for key, array in given.items() if key != letter]
        with refuses(CafinValueError, f"fused_step: `{name}` must", *words, unchanged=others):
            fused_step([given["p"]], [given["g"]], [given["m"]], [(given["H"], given["S"])], lr=0.1)
    with refuses(CafinValueError, "AdaFisher: `params[0]` must", *words):
        AdaFisher([unaligned(framework, (4, 3))])
    layer = Linear(arrays["p"])
    opt = AdaFisher([arrays["p"]], [layer])
    with refuses(CafinValueError, "step: `grads[0]` must", *words, unchanged=[arrays["p"], *opt.momenta]):
        opt.step([unaligned(framework, (4, 3))])
    h, s = unaligned(framework, (5, 3)), make(framework, np.ones((5, 4)))
    if opt.backend == "cuda":
        with refuses(CafinValueError, "accumulate: `h of Linear` must", *words):
            opt.accumulate(layer, h, s)
    else:
        opt.accumulate(layer, h, s)  # NumPy and torch read it


def test_fields_of_packed_records_are_refused() -> None:
    """Their strides are no multiples of the elements' size; those of a padded record are."""
    packed = np.zeros(4, [("flag", "u1"), ("x", "f4")])["x"]
    padded = np.zeros(4, [("i", "i4"), ("x", "f4")])["x"]
    g, m = np.ones(4, np.float32), np.zeros(4, np.float32)
    with refuses(CafinValueError, "`params[0]`", "multiples", "strides of (5,) bytes for float32", unchanged=[m]):
        fused_step([packed], [g], [m], lr=0.1)
    fused_step([padded], [g], [m], lr=0.1, beta=0.0)
    np.testing.assert_array_equal(padded, np.float32(-0.1))


# ---- Shared memory ----


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_neighbours_in_one_buffer(framework: str) -> None:
    """Parameters, momenta and gradients as slices of flat buffers, as some frameworks keep them: the bits of arrays of
    their own."""
    sizes = [5, 0, 1, 16, 3, 1031]
    x = problem((sum(sizes),))
    flat = {name: make(framework, x[name]) for name in "pgm"}
    edges = list(itertools.accumulate(sizes, initial=0))
    parts = {name: [a[i:j] for i, j in zip(edges, edges[1:])] for name, a in flat.items()}
    alone = {name: [make(framework, x[name][i:j]) for i, j in zip(edges, edges[1:])] for name in "pgm"}
    for arrays in (parts, alone):
        fused_step(arrays["p"], arrays["g"], arrays["m"], **LR)
    for name in "pm":
        same_bits(flat[name], np.concatenate([numpy_of(a) for a in alone[name]]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_interleaved_parameters(framework: str) -> None:
    """Columns of one matrix have no byte in common. The kernels want contiguous ones."""
    x = problem((6, 5))
    whole = make(framework, x["p"])
    p = [whole[:, :2], whole[:, 2:]]
    g, m = ([make(framework, x[name][:, cut]) for cut in (slice(0, 2), slice(2, 5))] for name in "gm")
    if framework in KERNELS:
        with refuses(CafinValueError, "`params[0]`", "contiguous", unchanged=[whole, *m]):
            fused_step(p, g, m, **LR)
        return
    fused_step(p, g, m, **LR)
    check_update(whole, np.concatenate([numpy_of(a) for a in m], axis=1), x, factors=False, **LR)
    with refuses(CafinValueError, "`params[1]`", "share memory with `params[0]`", unchanged=[whole, *m]):
        fused_step([p[0], whole[:, 1:4]], g, m, **LR)


@given(st.data())
def test_whether_two_arrays_share_memory(data: Any) -> None:
    """Against NumPy, which solves it exactly."""
    flat = np.zeros(60, np.float32)

    def draw() -> np.ndarray[Any, Any]:
        ndim = data.draw(st.integers(1, 3))
        form = data.draw(forms(ndim, [1, 2, -1, 3]))
        shape = [data.draw(st.integers(1, 2)) for _ in range(ndim)]
        room = [abs(step) * n for n, step in zip(shape, form.steps)]
        size = math.prod(room)
        if size + form.front > flat.size:
            return flat[form.front :]
        array = flat[form.front : form.front + size].reshape([room[axis] for axis in form.order])
        return array.transpose(np.argsort(form.order))[tuple(slice(None, None, step) for step in form.steps)]

    a, b = draw(), draw()
    assert share(view(a), view(b)) == np.shares_memory(a, b)


# ---- Arrays that move ----


def test_tensors_that_are_given_other_memory_are_refused() -> None:
    """`p.data = ...` leaves the optimizer with the old memory, which may serve others by now."""
    moves = {
        "a copy": lambda p: p.data.clone(),
        "a slice": lambda p: p.data[:2],
        "transposed": lambda p: p.data.t(),
        "another type": lambda p: p.data.double(),
        "as integers": lambda p: p.data.view(torch.int32),
    }
    for name, move in moves.items():
        p, other = torch.ones(3, 3), torch.ones(3)
        opt = AdaFisher([other, p])
        p.data = move(p)
        with refuses(CafinValueError, "step: `params[1]` must keep its memory", "new optimizer", unchanged=[other, p]):
            opt.step([torch.ones(3), torch.ones(3, 3)])
        assert opt.steps == 0, name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_momenta_that_are_replaced_are_refused(framework: str) -> None:
    p = make(framework, np.ones(3))
    opt = AdaFisher([p])
    kept = opt.momenta[0]
    opt.momenta[0] = make(framework, np.ones(3))
    with refuses(CafinValueError, "step: `momenta[0]` must stay", "load_state_dict", unchanged=[p]):
        opt.step([make(framework, np.ones(3))])
    opt.momenta[0] = kept
    if framework.startswith("torch"):
        kept.data = kept.data.clone()
        with refuses(CafinValueError, "step: `momenta[0]` must stay", unchanged=[p, kept]):
            opt.step([make(framework, np.ones(3))])


def test_another_shape_in_place_is_refused() -> None:
    a, b = np.ones(3), np.ones((2, 3))
    opt = AdaFisher([a, b])
    b.shape = (3, 2)
    with refuses(CafinValueError, "step: `params[1]` must keep its memory, shape and type", unchanged=[a, b]):
        opt.step([np.ones(3), np.ones((2, 3))])


def test_unusable_kinds_are_named_before_their_gradients() -> None:
    for dtype in (np.complex64, np.int32, bool):
        p, m = np.ones(3, dtype), np.ones(3, dtype)
        with refuses(CafinTypeError, "`params[0]`", "real floating-point numbers (float16", np.dtype(dtype).name):
            fused_step([p], [np.ones(3, np.float32)], [m], lr=0.1)
