"""What XLA is handed for an NVIDIA GPU, read from the lowered program on a machine that has none."""

from __future__ import annotations

import re
from typing import Any

import cubin
import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("cupy")  # its NVRTC
import jax
import jax.numpy as jnp
import jax_helpers  # noqa: F401  # no GPU for JAX
from helpers import refuses
from nvrtc import WHEELS, Nvrtc, find
from resources import PATH, architectures, read, source
from xla_helpers import examples

from cafin_cupy import BackendError, CafinValueError, runtime
from cafin_cupy.adapters import jax_kernels, jax_ptx
from cafin_cupy.adapters.jax import Dense, Layers, fused_adafisher, tap

FLAVOURS = ("sm_60", "sm_75", "sm_90", "sm_120")  # test_resources.py compiles one of each kernel for the others too

if tuple(map(int, jax.__version__.split(".")[:2])) < jax_ptx.OLDEST:
    pytest.skip("XLA's target for PTX came with jax 0.8", allow_module_level=True)

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "dense": ((37, 41), "float32"),
    "bias": ((41,), "float32"),
    "stack": ((3, 17, 19), "float32"),
    "half": ((23, 29), "bfloat16"),
    "plain": ((43,), "float16"),
    "scalar": ((), "float32"),
    "empty": ((0, 4), "float32"),
}
PARAMS = {name: jnp.ones(shape, dtype) for name, (shape, dtype) in SHAPES.items()}
KINDS = {
    "dense": Dense(weight="dense", bias="bias"),
    "stack": Dense(weight="stack", stack=1),
    "half": Dense(weight="half", input_major=False),
}
LAYERS = Layers(PARAMS, KINDS)
CALL = re.compile(r'custom_call @"?__gpu\$xla\.gpu\.ptx"?\(')


def lowered(call: Any, *arguments: Any, donate: Any = ()) -> str:
    """The text of a program for CUDA, but for the PTX in it."""
    traced = jax.jit(call, donate_argnums=donate).trace(*arguments)
    return re.sub(r'kernel_data = "[^"]*"', "", traced.lower(lowering_platforms=("cuda",)).as_text())


def of_step(layers: Layers = LAYERS, sums: Any = None, **options: Any) -> str:
    optimizer = fused_adafisher(0.1, layers=layers, backend="cuda", **options)
    state = optimizer.init(PARAMS)
    if sums is None:
        return lowered(optimizer.step, PARAMS, PARAMS, state, donate=(0, 2))
    return lowered(lambda p, g, s, f: optimizer.step(p, g, s, factors=f), PARAMS, PARAMS, state, sums, donate=(0, 2))


def test_one_call_updates_all_in_place() -> None:
    text = of_step()
    assert len(CALL.findall(text)) == 1
    n = len(PARAMS)
    pairs = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    assert [(int(a), int(b)) for a, b in pairs] == [(k, 2 + n + k) for k in range(2 * n)]
    main = next(line for line in text.splitlines() if "@main" in line)
    arguments = main.split(") -> (")[0].split("%arg")[1:]
    for name, (shape, dtype) in SHAPES.items():
        for kind in (dtype, "float32"):  # the parameter, and its momentum
            of_mlir = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[kind]
            mine = f"tensor<{'x'.join([*map(str, shape), of_mlir])}>"
            donated = [each for each in arguments if mine in each and "tf.aliasing_output" in each]
            assert len(donated) >= (2 if kind == dtype == "float32" else 1), name


@pytest.mark.parametrize("sampled", [False, True])
def test_parameters_are_nowhere_but_in_the_call(sampled: bool) -> None:
    """So nothing copies, joins or converts them."""
    text = of_step(sums=LAYERS.zeros() if sampled else None)
    for shape in ("37x41xf32", "23x29xbf16", "3x17x19xf32"):
        for line in text.splitlines():
            if f"tensor<{shape}>" in line:
                assert (
                    "@main" in line
                    or "stablehlo.return" in line
                    or " return " in line
                    or CALL.search(line)
                    or (line.strip().startswith("})"))
                ), line[:300]


def test_the_default_is_plain_array_code_where_there_is_no_gpu() -> None:
    optimizer = fused_adafisher(0.1, layers=LAYERS)
    assert jax_kernels.problem() == "JAX sees no NVIDIA GPU"
    assert not CALL.search(lowered(optimizer.step, PARAMS, PARAMS, optimizer.init(PARAMS)))


def test_the_same_program_runs_on_a_cpu() -> None:
    """The kernel is for CUDA alone; elsewhere the formulas serve."""
    results = []
    for backend in ("cuda", "reference"):
        optimizer = fused_adafisher(0.1, layers=LAYERS, backend=backend)
        results.append(jax.jit(optimizer.step)(PARAMS, PARAMS, optimizer.init(PARAMS)))
    for a, b in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "limit", "calls"), [("ARGUMENTS", 15, 3), ("ARGUMENTS", 5, 7), ("ITEMS", 4, 3)])
def test_more_leaves_than_a_launch_takes(name: str, limit: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_kernels, name, limit)
    leaves = [jax_kernels.Leaf.of(p, p, None, int(name == "stack"), 0) for name, p in sorted(PARAMS.items())]
    chosen = jax_kernels.batches(leaves)
    assert [k for each in chosen for k in each] == list(range(len(leaves)))  # each once, in order
    assert len(chosen) == calls
    launched = sum(any(leaves[k].size for k in each) for each in chosen)
    optimizer = fused_adafisher(0.1, layers=Layers(PARAMS, {"stack": KINDS["stack"]}), backend="cuda")
    text = lowered(lambda *args: optimizer.step(*args), PARAMS, PARAMS, optimizer.init(PARAMS))
    assert len(CALL.findall(text)) == launched


def test_vmap_of_the_kernel_is_refused() -> None:
    optimizer = fused_adafisher(0.1, layers=None, backend="cuda")
    batch = {name: jnp.stack([p, p]) for name, p in PARAMS.items()}
    with refuses(CafinValueError, "fused_adafisher", "outside of `jax.vmap`", 'backend="reference"'):
        jax.eval_shape(jax.vmap(lambda p: optimizer.step(p, p, optimizer.init(p))), batch)


def test_types_that_the_kernel_does_not_know_are_refused_by_it_alone() -> None:
    params = {"w": jnp.ones((4, 3), "float16")}
    asked = fused_adafisher(0.1, layers=None, momentum_dtype="bfloat16", backend="cuda")
    with refuses(BackendError, "fused_adafisher", "`w`", "float16 with momentum of bfloat16", "reference"):
        asked.step(params, params, asked.init(params))
    free = fused_adafisher(0.1, layers=None, momentum_dtype="bfloat16")
    assert free.step(params, params, free.init(params))[0]["w"].dtype == jnp.float16


def test_a_stack_that_would_take_the_compiler_minutes_is_left_to_array_code() -> None:
    params = {"w": jnp.ones((jax_kernels.ITEMS + 1, 2, 2))}
    layers = Layers(params, {"w": Dense(weight="w", stack=1)})
    asked = fused_adafisher(0.1, layers=layers, backend="cuda")
    with refuses(BackendError, "fused_adafisher", "`w`", "stack of at most 1000", "stack of 1001"):
        asked.step(params, params, asked.init(params))
    free = fused_adafisher(0.1, layers=layers)
    assert free.step(params, params, free.init(params))[0]["w"].shape == params["w"].shape


@pytest.mark.parametrize(
    ("driver", "written", "kept"),
    [
        ((13, 0), "9.5", "9.0"),
        ((13, 5), "9.5", "9.5"),
        ((13, 0), "8.8", "8.8"),
        ((12, 9), "9.0", "8.8"),
        ((12, 8), "8.8", "8.7"),
        ((12, 5), "8.7", "8.5"),
        ((12, 4), "8.7", "8.4"),
        ((12, 0), "8.4", "8.0"),
        ((14, 1), "9.0", "9.0"),
        (None, "9.5", "9.5"),
    ],
)
def test_ptx_names_no_later_version_than_the_driver_knows(driver: Any, written: str, kept: str) -> None:
    text = f"// compiled\n.version {written}\n.target sm_90\n// .version 1.0\n"
    assert jax_ptx.lowered(text, driver) == text.replace(written, kept)


def test_ptx_is_for_the_oldest_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, capability: str) -> None:
            self.compute_capability = capability

    monkeypatch.setattr(jax, "devices", lambda kind: [Device("10.0"), Device("9.0")])
    assert jax_ptx.architecture.__wrapped__() == "90"


# ---- Sources that are written for a model ----


def test_sums_of_a_sampled_step_are_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAFIN_BACKEND", "cuda")
    params = {"w": jnp.ones((37, 41))}
    layers = Layers(params, {"w": Dense(weight="w")})

    def loss(p: Any, taps: Any, x: Any) -> Any:
        return tap(layers["w"], x, x @ p["w"], taps["w"]).sum()

    text = lowered(jax.grad(loss, argnums=(0, 1)), params, layers.zeros(), jnp.ones((64, 37)))
    assert len(CALL.findall(text)) == 2  # column sums of input and output gradient, and their fold
    unsampled = lowered(jax.grad(loss), params, layers.zeros(), jnp.ones((64, 37)))
    assert not CALL.search(unsampled)


CASES = [
    pytest.param(nvrtc, arch, id=f"{major}-{arch}")
    for major, nvrtc in ((major, find(major)) for major in WHEELS)
    if nvrtc is not None
    for arch in architectures(nvrtc)
    if arch in FLAVOURS
]


@pytest.mark.parametrize(("nvrtc", "arch"), CASES)
def test_sources_compile_without_local_memory(nvrtc: Nvrtc, arch: str) -> None:
    """Those that test_resources.py does not compile."""
    for kernel in examples():
        if kernel.source == source(kernel.name):
            continue
        code, _ = nvrtc.compile(kernel.source, f"{kernel.name}.cu", runtime.cubin_options(arch))
        taken = cubin.resources(code)[kernel.name]
        assert taken.local == 0, kernel.name
        assert taken.threads == kernel.threads, kernel.name


def test_kernels_are_compiled_for_the_threads_that_they_are_launched_with() -> None:
    """Those in the table of test_resources.py; the others' above."""
    listed = read(PATH.read_text(encoding="utf-8"))
    for kernel in examples():
        threads = {taken.threads for key, taken in listed.items() if key.kernel == kernel.name}
        assert threads == {kernel.threads}, kernel.name
