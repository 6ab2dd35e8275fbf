"""Arrays of other libraries: how they are seen, which kinds and layouts work, and which are refused."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FRAMEWORKS, LAYOUTS, Device, check_update, lay, make, problem, refuses, same_bits, strided

from cafin_cupy import AdaFisher, CafinError, CafinTypeError, CafinValueError, Linear, fused_step
from cafin_cupy.arrays import current_stream, known, view
from cafin_cupy.trees import leaves, leaves_like, structure

LR = {"lr": 0.1, "beta": 0.7, "Lambda": 0.01}


class OnlyDLPack:
    """Speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnlyCudaArrayInterface:
    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


WRAPPED = [
    ("numpy", OnlyDLPack),
    ("torch", OnlyDLPack),
    pytest.param("cupy", OnlyDLPack, marks=pytest.mark.gpu),
    pytest.param("torch-cuda", OnlyDLPack, marks=pytest.mark.gpu),
    pytest.param("cupy", OnlyCudaArrayInterface, marks=pytest.mark.gpu),
    pytest.param("torch-cuda", OnlyCudaArrayInterface, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("framework", "wrap"), WRAPPED)
def test_arrays_that_speak_a_protocol_alone(framework: str, wrap: type) -> None:
    x = problem((5, 3))
    arrays = {name: make(framework, value) for name, value in x.items()}
    p, g, m, H, S = (wrap(arrays[k]) for k in ("p", "g", "m", "H", "S"))
    fused_step([p], [g], [m], [(H, S)], **LR)
    check_update(arrays["p"], arrays["m"], x, **LR)


@pytest.mark.parametrize("framework", ["torch", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_tensors_that_require_gradients(framework: str) -> None:
    x = problem((5, 3))
    p, g, m = (make(framework, x[k]) for k in "pgm")
    p.requires_grad_()
    fused_step([p], [g], [m], **LR, weight_decay=0.1)
    check_update(p, m, x, factors=False, **LR, weight_decay=0.1)
    assert p.is_leaf and not m.requires_grad


@pytest.mark.parametrize("framework", ["torch", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_activations_that_require_gradients(framework: str) -> None:
    """The optimizer keeps no graph alive, and records none."""
    weight = make(framework, np.ones((5, 3))).requires_grad_()
    layer = Linear(weight)
    opt = AdaFisher([weight], [layer], averaging="paper")
    h = make(framework, np.ones((4, 3))).requires_grad_() * 2
    opt.accumulate(layer, h, h @ weight.T)
    opt.step([make(framework, np.ones((5, 3)))])
    assert weight.is_leaf and float(weight.detach()[0, 0]) != 1.0
    assert not any(a.requires_grad for a in (*opt.momenta, *opt.factors()["0"]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_gradients_of_any_layout(framework: str, layout: str) -> None:
    """The same bits as from a contiguous one."""
    x = problem((4, 6, 3, 2))
    x["g"][:] = x["g"][:1] if layout == "expanded" else x["g"]
    results = []
    for g in (make(framework, x["g"]), strided(framework, x["g"], layout)):
        p, m, H, S = (make(framework, x[k]) for k in ("p", "m", "H", "S"))
        fused_step([p], [g], [m], [(H, S)], **LR)
        check_update(p, m, x, **LR)
        results.append((p, m))
    for a, b in zip(*results):
        same_bits(a, b)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_may_share_memory(framework: str) -> None:
    """They are only read: pieces of one array, and one array for two parameters."""
    x = problem((4, 6))
    whole, p, m = (make(framework, x[k]) for k in "gpm")
    parts = [[make(framework, x[k][:, i : i + 3]) for i in (0, 3)] for k in "pm"]
    fused_step(parts[0], [whole[:, :3], whole[:, 3:]], parts[1], **LR)
    fused_step([p, other := make(framework, x["p"])], [whole, whole], [m, make(framework, x["m"])], **LR)
    for i, (a, b) in enumerate(zip(*parts)):
        check_update(a, b, {k: v[:, 3 * i : 3 * i + 3] for k, v in x.items() if k in "pgm"}, factors=False, **LR)
    same_bits(p, other)


def test_addresses_that_are_no_multiple_of_16(device: Device) -> None:
    xp = import_module(device.framework)
    x = problem((7, 11))
    for moved in ("p", "g", "m", "pgm"):
        p, g, m = (lay(xp, xp.asarray(x[k]), "offset" if k in moved else "contiguous") for k in "pgm")
        fused_step([p], [g], [m], **LR, backend=device.backend)
        check_update(p, m, x, factors=False, **LR)


@pytest.mark.parametrize("stored", ["sliced", "inner", "transposed", "channels_last"])
def test_strided_parameters_by_the_reference(stored: str) -> None:
    x = problem((4, 2, 3, 2))
    p = lay(np, x["p"], stored)
    for m in (lay(np, x["m"], stored), x["m"].copy()):
        start = p.copy()
        fused_step([p], [x["g"]], [m], [(x["H"], x["S"])], **LR, backend="reference")
        check_update(p, m, x, **LR)
        p[...] = start


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_view(framework: str, layout: str) -> None:
    x = np.arange(120, dtype="float32").reshape(2, 3, 4, 5)
    array = strided(framework, x, layout)
    v = view(array)
    assert (v.shape, v.dtype, v.size, v.owner is array) == ((2, 3, 4, 5), "float32", 120, True)
    assert v.device == (0 if framework in ("cupy", "torch-cuda") else "cpu")
    assert v.contiguous == (layout in ("contiguous", "offset"))
    if framework == "torch":
        assert (v.ptr, v.strides) == (array.data_ptr(), array.stride())
    if framework == "numpy":
        assert v.ptr == array.ctypes.data
        assert v.strides == tuple(n // 4 for n in array.strides)
    last = v.ptr + 4 * sum(s * (n - 1) for s, n in zip(v.strides, v.shape))
    assert v.extent == (v.ptr, last + 4)


def test_view_of_small_arrays() -> None:
    for shape in ((), (0,), (1,), (3, 0, 2), (1, 1)):
        v = view(np.zeros(shape))
        assert (v.contiguous, v.writable, v.shape) == (True, True, shape)
        assert v.extent[1] - v.extent[0] == 8 * v.size
    assert view(np.zeros((1, 5)).T).contiguous  # strides of axes of length 1 say nothing


UNUSABLE = [
    (3.0, CafinTypeError, "float"),
    ("text", CafinTypeError, "str"),
    (None, CafinTypeError, "NoneType"),
    (np.zeros(3, ">f4"), CafinTypeError, ">f4"),
    (np.array(["a"]), CafinTypeError, "native-endian numbers"),
    (torch.zeros(3).to_sparse(), CafinTypeError, "sparse"),
    (torch.zeros(3, device="meta"), CafinTypeError, "meta"),
    (np.ndarray, CafinTypeError, "type"),  # classes have the attributes of their arrays
    (torch.Tensor, CafinTypeError, "got _TensorMeta"),
    (OnlyDLPack(torch.zeros(3, dtype=torch.bfloat16)), CafinTypeError, "shareable with numpy by DLPack"),
]


@pytest.mark.parametrize(("array", "kind", "word"), UNUSABLE, ids=lambda value: str(value)[:20])
def test_what_is_no_usable_array(array: Any, kind: type, word: str) -> None:
    with refuses(kind, "fused_step: `params[3]` must", word):
        view(array, "fused_step", "params[3]")


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_jax_arrays_are_never_changed_in_place(platform: str) -> None:
    jax = import_module("jax")
    if platform == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("this JAX is built without CUDA")
    x, y, z = (jax.device_put(np.full(3, n, np.float32), jax.devices(platform)[0]) for n in (1, 2, 3))
    with refuses(CafinTypeError, "fused_step", "`params[0]`", unchanged=[x, y, z]):
        fused_step([x], [y], [z], lr=0.1)


def test_leaves() -> None:
    tree = {"b": [1, (2, {"x": 3})], "a": 4}
    assert list(leaves(tree, "p")) == [("p['b'][0]", 1), ("p['b'][1][0]", 2), ("p['b'][1][1]['x']", 3), ("p['a']", 4)]
    other = {"a": (40,), "b": ([10], (None, {"x": 30}))}  # parts of any kind may stand where the template has leaves
    assert [part for _, part in leaves_like(tree, other, "f", "g")] == [[10], None, 30, (40,)]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": 1}, ["g", "['a', 'b']", "['a']"]),
        ({"a": 1, "b": [1, 2], "c": 3}, ["g", "['a', 'b', 'c']"]),
        ({"a": 1, "b": [1]}, ["g['b']", "list of 2", "list of 1"]),
        ({"a": 1, "b": 5}, ["g['b']", "list of 2", "int"]),
        ([1, [1, 2]], ["g", "list of 2"]),
    ],
)
def test_other_structures_are_refused(tree: Any, words: list[str]) -> None:
    with refuses(CafinValueError, "f: `", *words):
        list(leaves_like({"a": 1, "b": [2, 3]}, tree, "f", "g"))


def endless() -> Any:
    tree: list[Any] = [np.ones(3)]
    tree.append(tree)
    return tree


def deep() -> Any:
    tree: Any = np.ones(3)
    for _ in range(5000):
        tree = [tree]
    return tree


@pytest.mark.parametrize("tree", [endless(), {"a": endless()}, deep()], ids=["itself", "within a dict", "deep"])
def test_lists_that_hold_themselves_are_refused(tree: Any) -> None:
    """Wherever they are passed, and in the messages about them."""
    w, g, m = (np.ones(3) for _ in range(3))
    words = "`params` must be nested at most 100 deep"
    calls: list[tuple[Any, str]] = [
        (lambda: fused_step(tree, [g], [m], lr=0.1), words),
        (lambda: fused_step([w], tree, [m], lr=0.1), "`grads"),
        (lambda: fused_step([w], [g], [tree], lr=0.1), "`momenta[0]`"),
        (lambda: fused_step([w], [g], [m], [tree], lr=0.1), "`factors"),
        (lambda: fused_step([w], [g], [m], lr=0.1, step=[tree]), "`step"),
        (lambda: fused_step([w], [g], [m], lr=tree), "`lr` must be a number"),
        (lambda: AdaFisher(tree), words),
        (lambda: AdaFisher([w], TCov=tree), "`TCov`"),
        (lambda: AdaFisher([w]).step(tree), "`grads"),
        (lambda: AdaFisher([w]).accumulate(tree, g, g), "`layer`"),
        (lambda: AdaFisher([w]).load_state_dict({"steps": tree, "momenta": [m], "H": [], "S": []}), "state['steps']"),
    ]
    for call, word in calls:
        with pytest.raises(CafinError) as caught:
            call()
        assert word in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_that_share_memory_are_refused(framework: str) -> None:
    base = make(framework, np.arange(20.0))
    a, b = base[:8], base[12:]
    g, m = (make(framework, np.ones(8)) for _ in range(2))
    h, n = (make(framework, np.ones(8)) for _ in range(2))
    rows = [
        ([a, a], [g, h], [m, n]),  # the same parameter twice
        ([a, base[7:15]], [g, h], [m, n]),  # one element in common
        ([a, b], [g, a], [m, n]),  # a gradient that is a parameter
        ([a, b], [g, base[2:10]], [m, n]),
        ([a, b], [g, h], [m, m]),  # one momentum for two
        ([a, b], [g, h], [m, a]),
        ([a, b], [g, n], [m, n]),  # a gradient that is a momentum
    ]
    for p, grads, momenta in rows:
        with refuses(CafinValueError, "fused_step", "share memory", "copy", unchanged=[base, g, m, h, n]):
            fused_step(p, grads, momenta, lr=0.1)
    with refuses(CafinValueError, "share memory", unchanged=[base, g, m]):
        fused_step([a], [g], [m], [(base[4:5], base[8:16])], lr=0.1)  # H would change under the step
    fused_step([a, b, base[8:12]], [g, h, g[:4]], [m, n, make(framework, np.ones(4))], lr=0.1)  # neighbours


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_expanded_parameters_are_refused(framework: str) -> None:
    p = strided(framework, np.ones((3, 4)), "expanded")
    g, m = (make(framework, np.ones((3, 4))) for _ in range(2))
    kind = CafinTypeError if framework == "numpy" else CafinValueError  # NumPy exports it read-only
    for params, momenta, name in ((p, m, "params[0]"), (m, p, "momenta[0]")):
        with refuses(kind, name, unchanged=[p, g, m]):
            fused_step([params], [g], [momenta], lr=0.1)


def test_read_only_arrays_are_refused() -> None:
    x = np.ones(3)
    x.flags.writeable = False
    with refuses(CafinTypeError, "`params[0]`", "writable", "read-only", "copy", unchanged=[x]):
        fused_step([x], [np.ones(3)], [np.ones(3)], lr=0.1)
    with refuses(CafinTypeError, "`momenta[0]`", "writable", "read-only", "copy", unchanged=[x]):
        fused_step([np.ones(3)], [np.ones(3)], [x], lr=0.1)
    fused_step([np.ones(3)], [x], [np.ones(3)], lr=0.1)  # a gradient is only read


def test_numpy_scalars_are_arrays_to_read() -> None:
    """As NumPy's sums give them. They have no memory that could be written."""
    for see in (known, lambda x, *words: view(x, *words).owner):
        seen = see(np.float32(3.0), "f", "x")
        assert isinstance(seen, np.ndarray)
        assert (seen.shape, float(seen), seen.flags.writeable) == ((), 3.0, False)


def test_keys_of_jax_are_no_arrays() -> None:
    key = import_module("jax").random.key(0)
    for see in (known, view):
        with refuses(CafinTypeError, "f: `x` must be an array with __dlpack__"):
            see(key, "f", "x")


def test_structures_are_the_callers_again() -> None:
    given = {"a": [1, (2, {"x": 3})], "b": 4}
    kept = structure(given)
    given["a"].clear()
    given["c"] = 5
    assert list(leaves(kept, "p")) == [("p['a'][0]", 1), ("p['a'][1][0]", 2), ("p['a'][1][1]['x']", 3), ("p['b']", 4)]


def test_the_stream_of_a_cpu_tensor_is_not_asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch without CUDA does not even have the function; arrays of two frameworks may lead here."""
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=10 + device)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert current_stream(torch.ones(1), 3) == 13
