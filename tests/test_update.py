"""`fused_step`: structures, frameworks, layouts, scalars, streams; and all that it refuses."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from helpers import FRAMEWORKS, Device, check_update, lay, make, numpy_of, problem, refuses, same_bits, seeds, updated
from hypothesis import given
from hypothesis import strategies as st

from cafin_cupy import BackendError, CafinTypeError, CafinValueError, fused_step
from cafin_cupy.arrays import View
from cafin_cupy.cuda_update import layout
from cafin_cupy.table import HYPER, WORDS

SHAPES = [(), (0,), (1,), (31,), (1023,), (3, 0), (64, 27), (13, 3, 3, 2), (4097,), (2, 4096, 3)]
LR = {"lr": 0.1, "beta": 0.7, "Lambda": 0.01}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("factors", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
def test_follows_the_reference(framework: str, factors: bool, decoupled: bool) -> None:
    xs = [problem(shape, seed) for seed, shape in enumerate(SHAPES)]
    p, g, m = ([make(framework, x[name]) for x in xs] for name in "pgm")
    pairs = [(make(framework, x["H"]), make(framework, x["S"])) if x["p"].size else None for x in xs]
    options = {**LR, "weight_decay": 0.3, "decoupled": decoupled, "step": 3}
    fused_step(p, g, m, pairs if factors else None, **options)
    for a, b, x in zip(p, m, xs):
        check_update(a, b, x, factors=factors and x["p"].size > 0, **options)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), seeds, st.data())
def test_any_shape(device: Device, shape: list[int], seed: int, data: Any) -> None:
    size = math.prod(shape)
    columns = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    x = problem(tuple(shape), seed, columns)
    p, g, m, H, S = (make(device.framework, x[k]) for k in ("p", "g", "m", "H", "S"))
    fused_step([p], [g], [m], [(H, S)], **LR, weight_decay=0.1, backend=device.backend)
    check_update(p, m, x, **LR, weight_decay=0.1)


@pytest.mark.parametrize("columns", [1, 7, 149797, 2**20 + 3])
def test_large_parameters(device: Device, columns: int) -> None:
    """2^20 + 3 = 7 * 149797 elements: many chunks, a last one of 3, rows that begin anywhere."""
    x = problem((2**20 + 3,), 1, columns)
    p, g, m, H, S = (make(device.framework, x[k]) for k in ("p", "g", "m", "H", "S"))
    fused_step([p], [g], [m], [(H, S)], **LR, backend=device.backend)
    check_update(p, m, x, **LR)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nested_structures(framework: str) -> None:
    x = problem((4, 3))

    def tree(name: str) -> Any:
        a, b, c = (make(framework, x[name]) for _ in range(3))
        return {"first": [a, (b,)], "second": {"deep": c}}

    p, g, m = tree("p"), tree("g"), tree("m")
    pair = make(framework, x["H"]), make(framework, x["S"])
    factors = {"second": {"deep": pair}, "first": (pair, [None])}  # mappings match by key, lists and tuples by place
    fused_step(p, g, m, factors, **LR)
    check_update(p["first"][0], m["first"][0], x, **LR)
    check_update(p["first"][1][0], m["first"][1][0], x, factors=False, **LR)
    check_update(p["second"]["deep"], m["second"]["deep"], x, **LR)


def test_a_single_array_is_a_structure_too(device: Device) -> None:
    x = problem((4, 3))
    p, g, m, H, S = (make(device.framework, x[k]) for k in ("p", "g", "m", "H", "S"))
    fused_step(p, g, m, (H, S), **LR, backend=device.backend)
    check_update(p, m, x, **LR)
    fused_step([], [], [], **LR)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("columns", [54, 1, 27, 6 * 54])
def test_weights_in_channels_last(framework: str, columns: int) -> None:
    """H is ordered (channel, tap) whatever the memory; other factors see the row-major matrix, or are refused."""
    x = problem((4, 6, 3, 3), columns=columns) if columns != 324 else problem((24, 6, 3, 3), columns=324)
    p, g, m = (make(framework, x[k]) for k in "pgm")
    if framework.startswith("torch"):
        p, m = (a.to(memory_format=import_module("torch").channels_last) for a in (p, m))
    else:
        p, m = (lay(import_module(framework), a, "channels_last") for a in (p, m))
    try:
        fused_step([p], [g], [m], [(make(framework, x["H"]), make(framework, x["S"]))], **LR)
    except CafinValueError as error:
        assert columns != 54 and "channels_last" in str(error)
        same_bits(np.ascontiguousarray(numpy_of(p)), x["p"])
    else:
        check_update(p, m, x, **LR)


FIT = 8 * WORDS // (8 + HYPER.size)  # so many parameters, each with scalars of its own, fit the arguments


@pytest.mark.parametrize("count", [3, FIT, FIT + 1, WORDS, WORDS + 1])
def test_each_parameter_at_its_own_step(device: Device, count: int) -> None:
    """Scalars and addresses in the arguments; scalars in a table; both in tables."""
    xs = [problem((5,), k) for k in range(count)]
    p, g, m = ([make(device.framework, x[name]) for x in xs] for name in "pgm")
    steps = [1 + (7 * k) % count for k in range(count)]
    for _ in range(2):  # the second call finds the tables of the first
        fused_step(p, g, m, **LR, step=steps, backend=device.backend)
    for a, b, x, t in zip(p, m, xs, steps):
        once = updated(x, factors=False, **LR, step=t)
        check_update(a, b, {**x, "p": once[0], "m": once[1]}, 4e-6, factors=False, **LR, step=t)


def test_backend_reference_on_any_device(device: Device) -> None:
    x = problem((4, 3))
    p, g, m = (make(device.framework, x[k]) for k in "pgm")
    fused_step([p], [g], [m], **LR, backend="reference")
    check_update(p, m, x, factors=False, **LR)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes_by_the_reference(dtype: str) -> None:
    x = {k: v.astype(dtype) for k, v in problem((4, 3)).items()}
    p, g, m = (x[k].copy() for k in "pgm")
    pair = [x[k].astype("float64" if dtype == "float64" else "float32") for k in "HS"]
    fused_step([p], [g], [m], [pair], **LR)
    check_update(p, m, x, 1e-12 if dtype == "float64" else 2e-3, **LR)  # float16 has 11 bits
    assert p.dtype == m.dtype == dtype


REFUSALS: list[tuple[dict[str, Any], type, list[str]]] = [
    ({"lr": -0.1}, CafinValueError, ["`lr`", ">= 0", "-0.1"]),
    ({"lr": math.nan}, CafinValueError, ["`lr`", "finite", "nan"]),
    ({"lr": 10**400}, CafinValueError, ["`lr`", "finite"]),
    ({"lr": "0.1"}, CafinTypeError, ["`lr`", "number", "'0.1'"]),
    ({"lr": None}, CafinTypeError, ["`lr`", "number", "None"]),
    ({"lr": [0.1]}, CafinTypeError, ["`lr`", "number", "[0.1]"]),
    ({"lr": np.ones(2)}, CafinTypeError, ["`lr`", "number"]),
    ({"lr": np.str_("0.1")}, CafinTypeError, ["`lr`", "number", "'0.1'"]),
    ({"beta": np.array(0.5 + 1j)}, CafinTypeError, ["`beta`", "number", "0.5+1.j"]),
    ({"decoupled": "False"}, CafinTypeError, ["`decoupled`", "True or False", "'False'"]),
    ({"error_if_nonfinite": "no"}, CafinTypeError, ["`error_if_nonfinite`", "True or False", "'no'"]),
    ({"beta": 1.0}, CafinValueError, ["`beta`", "[0, 1)", "1.0"]),
    ({"beta": -0.1}, CafinValueError, ["`beta`", "[0, 1)", "-0.1"]),
    ({"Lambda": 0.0}, CafinValueError, ["`Lambda`", "> 0", "got 0", "preconditioner"]),
    ({"weight_decay": -1.0}, CafinValueError, ["`weight_decay`", ">= 0", "-1"]),
    ({"step": 0}, CafinValueError, ["`step`", ">= 1", "0"]),
    ({"step": 1.5}, CafinValueError, ["`step`", "whole", "1.5"]),
    ({"step": [1, 2]}, CafinValueError, ["`step`", "list of 1", "list of 2"]),
    ({"backend": "gpu"}, CafinValueError, ["`backend`", '"cuda", "reference"', "'gpu'"]),
    ({"backend": "cuda"}, BackendError, ["`backend`", "'cuda'", "CPU", "GPU"]),
    ({"params": [None]}, CafinTypeError, ["`params[0]`", "__dlpack__", "NoneType"]),
    ({"params": ["p"]}, CafinTypeError, ["`params[0]`", "__dlpack__", "str"]),
    (
        {"params": [np.float32(1.0)], "grads": [np.float32(1.0)], "momenta": [np.float32(0.0)]},
        CafinTypeError,
        ["params"],
    ),
    ({"grads": None}, CafinValueError, ["`grads`", "list of 1", "NoneType"]),
    ({"grads": []}, CafinValueError, ["`grads`", "list of 1", "list of 0"]),
    ({"grads": {"a": 1}}, CafinValueError, ["`grads`", "list of 1", "mapping", "a"]),
    ({"grads": [None]}, CafinValueError, ["`grads[0]`", "array", "None", "zeros"]),
    ({"grads": [np.ones((3, 4), np.float32)]}, CafinValueError, ["`grads[0]`", "(4, 3)", "(3, 4)"]),
    ({"grads": [np.ones((4, 3))]}, CafinValueError, ["`grads[0]`", "float32", "float64", "convert"]),
    ({"grads": [np.ones((4, 3), np.int32)]}, CafinValueError, ["`grads[0]`", "float32", "int32"]),
    ({"momenta": [np.ones((4, 3))]}, CafinValueError, ["`momenta[0]`", "float32", "float64"]),
    ({"factors": []}, CafinValueError, ["`factors`", "list of 1"]),
    ({"factors": [np.ones(3)]}, CafinTypeError, ["`factors[0]`", "pair (H, S)", "ndarray"]),
    ({"factors": [(np.ones(3, np.float32), np.ones(3, np.float32))]}, CafinValueError, ["factors[0]", "12", "3 * 3"]),
    ({"factors": [(np.ones(3), np.ones(4))]}, CafinValueError, ["factors[0].H", "float32", "float64"]),
    ({"factors": [(np.ones((3, 1), np.float32), np.ones(4, np.float32))]}, CafinValueError, ["factors[0].H", "vector"]),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSALS, ids=lambda value: str(value)[:40])
def test_refusals(options: dict[str, Any], kind: type, words: list[str]) -> None:
    x = problem((4, 3))
    p, g, m = (x[k].copy() for k in "pgm")
    arguments = {"params": [p], "grads": [g], "momenta": [m], "factors": None, **LR, **options}
    with refuses(kind, "fused_step", *words, unchanged=[p, g, m]):
        fused_step(**arguments)


def test_refuses_a_tensor_of_several_elements_as_lr() -> None:
    with refuses(CafinTypeError, "`lr`", "number"):
        fused_step([np.ones(2)], [np.ones(2)], [np.ones(2)], lr=import_module("torch").ones(2))


@pytest.mark.gpu
def test_refusals_on_the_gpu() -> None:
    torch = import_module("torch")
    x = problem((4, 6, 3, 3))
    p, g, m = (make("torch-cuda", x[k]) for k in "pgm")
    far = make("torch", x["g"])
    H, S = (make("torch", x[k]) for k in "HS")
    rows = [
        (([p], [far], [m], None), CafinValueError, ["grads[0]", "cuda:0", "cpu"]),
        (([p], [g], [far], None), CafinValueError, ["momenta[0]", "cuda:0", "cpu"]),
        (([p, far], [g, far], [m, far], None), CafinValueError, ["[1]", "cuda:0", "cpu"]),
        (([p], [g], [m], [(H, S)]), CafinValueError, ["factors[0].H", "cuda:0", "cpu"]),
        (([p[:, ::2]], [g[:, ::2]], [m[:, ::2]], None), CafinValueError, ["params[0]", "contiguous", "strides"]),
        (([p], [g], [m.to(memory_format=torch.channels_last)], None), CafinValueError, ["momenta[0]", "strides"]),
        (([p.double()], [g.double()], [m.double()], None), BackendError, ["float32", "float64"]),
        (([p.bool()], [g.bool()], [m.bool()], None), CafinTypeError, ["params[0]", "floating-point", "bool"]),
    ]
    for arguments, kind, words in rows:
        with refuses(kind, "fused_step", *words, unchanged=[p, g, m, far]):
            fused_step(*arguments, **LR, backend="cuda")
    with refuses(CafinTypeError, "stream", "'main'", unchanged=[p, g, m]):
        fused_step([p], [g], [m], **LR, stream="main")


def test_a_matrix_of_too_many_columns_is_refused_or_counted_right() -> None:
    """The kernel counts columns in 32 bits."""
    huge = View(4096, (2**33,), (1,), "float32", 0, True, None)
    with refuses(CafinValueError, "params[0]", str(2**32)):
        layout("fused_step", "params[0]", huge, 2**33)
    assert layout("fused_step", "params[0]", huge, 2**31).columns == 2**31


NOTHING: dict[str, Any] = {"params": [], "grads": [], "momenta": []}


def test_no_parameters_are_welcome() -> None:
    fused_step(**NOTHING, lr=0.1)
    fused_step({}, {}, {}, {}, lr=0.1, step=[])


@pytest.mark.parametrize("name", ["grads", "momenta", "factors", "step"])
def test_no_parameters_but_something_for_them(name: str) -> None:
    """The list that is empty may be the one that is wrong."""
    with refuses(CafinValueError, "fused_step", f"`{name}` must be", "a list of 0", "list of 1"):
        fused_step(**{**NOTHING, name: [1] if name == "step" else [np.ones(2)]}, lr=0.1)
    with refuses(CafinValueError, "`backend`", "'gpu'"):
        fused_step(**NOTHING, lr=0.1, backend="gpu")


@pytest.mark.parametrize("stream", ["x", 0.5, object()])
def test_what_is_no_stream_is_refused_on_cpus_too(stream: Any) -> None:
    p, g, m = (np.ones(3, np.float32) for _ in "pgm")
    with refuses(CafinTypeError, "stream", "be a stream or its address"):
        fused_step([p], [g], [m], lr=0.1, stream=stream)
    assert p.tolist() == [1, 1, 1]
