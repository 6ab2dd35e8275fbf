"""`python -m cafin_cupy doctor`: what will run here, and why; each line that is not well says how to mend it.

A check is a function that returns a `Check` (or several): "warn" leaves training possible, on the reference, "fail"
does not. Nothing is imported before its check asks for it, so the doctor also runs where much is missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import __version__, environment, kernel_cache
from .errors import BackendError, CafinError

ARCH = "sm_80"  # what kernels are compiled for where there is no GPU to ask
TOLERANCE = 1e-5  # kernels against the reference, relative to each array's largest entry
SIGNS = {"ok": "  ok", "info": "   -", "warn": "WARN", "fail": "FAIL"}


class Check(NamedTuple):
    """One line of the report. status: "ok", "info", "warn" (the reference still runs) or "fail" (training will not)."""

    status: str
    name: str
    detail: str
    mend: str = ""


def forced() -> str | None:
    """The backend that CAFIN_BACKEND asks for; None leaves the choice.

    Raises:
        CafinValueError: it names no backend.
    """
    from .backend import requested

    return requested(None, "doctor")


def cuda_problem() -> str | None:
    """Why the CUDA backend cannot run here; None if it can."""
    from .runtime import cuda_problem as ask

    return ask()


def check_python() -> Check:
    return Check("ok", "python", f"{platform.python_version()}, cafin_cupy {__version__}")


def check_core() -> Check:
    modules = {"numpy": "numpy", "array-api-compat": "array_api_compat"}
    missing = [name for name, module in modules.items() if not environment.installed(module)]
    if missing:
        return Check("fail", "core", f"{' and '.join(missing)} not found", f"pip install {' '.join(missing)}")
    return Check("ok", "core", ", ".join(f"{name} {environment.version(name)}" for name in modules))


def check_gpu() -> Check:
    version = environment.driver()
    if version is None:
        return Check("info", "gpu", "no NVIDIA GPU found (no driver)")
    serves = f"driver for CUDA {version[0]}.{version[1]}"
    if not environment.installed("cupy"):
        return Check("info", "gpu", f"{serves}; CuPy is needed to ask for more")
    try:
        cupy = kernel_cache.import_cupy()
    except ImportError:
        return Check("info", "gpu", f"{serves}; CuPy is needed to ask for more, see below")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        cards = [cupy.cuda.runtime.getDeviceProperties(number) for number in range(count)]
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if (mend := environment.driver_mend(str(error))) is not None:
            return Check("warn", "gpu", f"the driver is older than CuPy's CUDA ({error})", mend)
        return Check(
            "warn", "gpu", f"no NVIDIA GPU found ({error}); {serves}", "nvidia-smi tells whether the driver runs"
        )
    names = [f"{card['name'].decode()} (sm_{card['major']}{card['minor']})" for card in cards]
    return Check("ok", "gpu", f"{', '.join(sorted(set(names)))} x {count}, {serves}")


def check_cupy() -> Check:
    extra = environment.cuda_extra()
    install = f"pip install {environment.CUDA[extra]}"
    wheels = [name for name in ("cupy-cuda12x", "cupy-cuda13x") if environment.version(name)]
    if not environment.installed("cupy"):
        return Check("warn", "cupy", "not found", install)
    if len(wheels) > 1:
        return Check("warn", "cupy", f"{' and '.join(wheels)} overwrite each other", f"uninstall both, then {install}")
    found = environment.version(*wheels, "cupy")
    if environment.driver() and wheels and wheels[0] != f"cupy-{extra}x":
        return Check("warn", "cupy", f"{found}, {wheels[0]} does not suit the driver", f"uninstall it, then {install}")
    try:
        cupy = kernel_cache.import_cupy()
    except ImportError as error:
        return Check("warn", "cupy", f"cannot be imported: {_first_line(error)}", install)
    return Check("ok", "cupy", f"{cupy.__version__} ({', '.join(wheels) or 'own build'})")


def check_nvrtc() -> Check:
    if not environment.installed("cupy"):
        return Check("info", "nvrtc", "not checked, needs CuPy")
    try:
        major, minor = kernel_cache.import_cupy().cuda.nvrtc.getVersion()
    except Exception as error:  # CuPy's own kinds: the library is missing, or cannot be loaded
        wheels = environment.CUDA["cuda12" if environment.version("cupy-cuda12x") else "cuda13"]
        return Check("warn", "nvrtc", f"cannot be loaded: {_first_line(error)}", f"pip install {wheels}")
    return Check("ok", "nvrtc", f"CUDA {major}.{minor}")


def check_headers() -> Check:
    found = environment.version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
    if found:
        return Check("info", "headers", f"wheel {found}")
    wheel = "nvidia-cuda-runtime" + ("-cu12" if environment.version("cupy-cuda12x") else "")
    return Check("info", "headers", f"no wheel found; the kernels here need none, CuPy's arrays need {wheel}")


def check_cache() -> Check:
    if (problem := kernel_cache.problem()) is not None:
        return Check("warn", "cache", f"every process compiles anew, as {problem}", kernel_cache.MEND)
    if kernel_cache.in_memory():
        return Check("warn", "cache", "in memory: every process compiles anew", "unset CUPY_CACHE_IN_MEMORY")
    return Check("ok", "cache", f"{kernel_cache.folder()} can be written")


def check_kernels() -> list[Check]:
    """Compile every source: for the GPU, or by NVRTC alone where there is none."""
    if not environment.installed("cupy"):
        return [Check("info", "kernels", "not compiled, needs CuPy")]
    from . import runtime

    device = cuda_problem() is None
    checks = []
    for stem, names in runtime.KERNELS.items():
        name, start = f"kernel {stem}", time.perf_counter()
        try:
            if device:
                for function in names:
                    runtime.function(stem, function, 0)
            else:
                runtime.compile_cubin(stem, ARCH)
        except Exception as error:  # whatever the compiler, the driver or the cache folder raise is the finding
            mend = "mend the lines above first; if they are well, report this line"
            checks.append(Check("warn", name, f"does not compile: {_first_line(error)}", mend))
            continue
        seconds = time.perf_counter() - start
        checks.append(Check("ok", name, f"compiled for {'GPU 0' if device else ARCH} in {seconds:.2f} s"))
    return checks


def check_launch() -> Check:
    """Three updates of one layer of each kind on the GPU, against the reference in NumPy."""
    if cuda_problem() is not None:
        return Check("info", "launch", "not tried: the CUDA backend cannot run here")
    import cupy
    import numpy

    mend = "set CAFIN_BACKEND=reference meanwhile, and report this line"
    try:
        ours = [cupy.asnumpy(array) for array in small_problem(cupy, "cuda")]
    except BackendError as error:
        return Check("warn", "launch", _first_line(error), "mend the kernels above")
    except Exception as error:  # a launch that fails raises CuPy's kinds; it is the finding
        return Check("fail", "launch", _first_line(error), mend)
    truth = small_problem(numpy, "reference")
    largest = max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(ours, truth, strict=True))
    if not largest <= TOLERANCE:
        return Check("fail", "launch", f"differs from the reference by {largest:.1e}", mend)
    return Check("ok", "launch", f"equals the reference within {largest:.1e}")


def small_problem(xp: Any, backend: str) -> list[Any]:
    """The parameters after three updates of one layer for each way of reading, in the arrays of `xp`
    (numpy or cupy)."""
    from numpy.random import default_rng

    from . import (
        AdaFisher,
        BatchNorm2d,
        Conv2d,
        Conv3d,
        ConvTranspose2d,
        Embedding,
        LayerNorm,
        Linear,
        TransposedLinear,
    )

    random = default_rng(0)

    def draw(*shape: int) -> Any:
        return xp.asarray(random.standard_normal(shape, dtype="float32"))

    images = (4, 6, 9, 9)
    layers = {
        Linear(draw(7, 5), draw(7), name="linear"): (draw(4, 5), draw(4, 7)),
        Conv2d(draw(6, 3, 3, 3), draw(6), padding=1, name="conv"): (draw(4, 3, 9, 9), draw(*images)),
        BatchNorm2d(draw(6), draw(6), name="batchnorm"): (draw(*images), draw(*images)),
        LayerNorm(draw(5), draw(5), name="layernorm"): (draw(4, 3, 5), draw(4, 3, 5)),
        TransposedLinear(draw(5, 7), draw(7), name="transposed"): (draw(4, 5), draw(4, 7)),
        Conv3d(draw(4, 2, 2, 3, 2), draw(4), name="volumes"): (draw(3, 2, 3, 4, 5), draw(3, 4, 2, 2, 4)),
        ConvTranspose2d(draw(4, 2, 3, 3), draw(4), stride=2, groups=2, name="upsampling"): (
            draw(3, 4, 3, 4),
            draw(3, 4, 7, 9),
        ),
        Embedding(draw(9, 3), padding_idx=0, name="table"): (xp.asarray(random.integers(0, 9, (4, 5))), draw(4, 5, 3)),
    }
    arrays = [array for layer in layers for array in (layer.weight, layer.bias)]
    parameters = [array for array in arrays if array is not None]
    optimizer = AdaFisher(parameters, list(layers), TCov=2, weight_decay=1e-2, backend=backend)
    for _ in range(3):
        if optimizer.samples:
            for layer, (h, s) in layers.items():
                optimizer.accumulate(layer, h, s)
        optimizer.step([draw(*array.shape) for array in parameters])
    return parameters


def check_torch() -> Check:
    return _framework("torch", "torch.cuda.is_available()", "a PyTorch build for the CUDA version of the driver")


def check_jax() -> Check:
    check = _framework("jax", "jax.default_backend() == 'gpu'", f"pip install 'jax[{environment.cuda_extra()}]'")
    if check.status != "ok":
        return check
    ran = _asked("from cafin_cupy.adapters import jax_kernels; print(jax_kernels.problem() or '')")
    problem = ran.stdout.strip() if ran.returncode == 0 else _last_line(ran.stderr)
    if problem:
        return Check("warn", "jax", f"{check.detail}; plain array code serves it: {problem}")
    return Check("ok", "jax", f"{check.detail}, and runs the kernels in its programs")


def check_forced() -> Check:
    name = "CAFIN_BACKEND"
    try:
        backend = forced()
    except CafinError:
        return Check("fail", name, f"is {os.environ[name]!r}", "set it to cuda or reference, or unset it")
    if backend == "cuda" and cuda_problem() is not None:
        return Check("fail", name, "asks for cuda, which cannot run here", "unset it, or mend the lines above")
    return Check("info", name, backend or "leaves the choice")


def verdict(checks: list[Check]) -> Check:
    """The last line: which backend will run."""
    failed = [check.name for check in checks if check.status == "fail"]
    broken = [check.name for check in checks if check.status == "warn" and check.name.startswith("kernel")]
    hopeless = Check("fail", "verdict", f"training will not work here: see {', '.join(failed or broken)}")
    if failed not in ([], ["launch"]):
        return hopeless
    backend = forced()
    if backend == "reference":
        return Check("ok", "verdict", "the reference will run, because CAFIN_BACKEND asks for it")
    if failed or (broken and backend == "cuda"):
        return hopeless
    problem = cuda_problem() or (f"{', '.join(broken)} does not compile" if broken else None)
    if problem:
        return Check("ok", "verdict", f"the reference will run: {problem}")
    return Check("ok", "verdict", "the fused CUDA kernels will run for arrays on a GPU, the reference for others")


CHECKS: list[Callable[[], Check | list[Check]]] = [
    check_python,
    check_core,
    check_gpu,
    check_cupy,
    check_nvrtc,
    check_headers,
    check_cache,
    check_kernels,
    check_launch,
    check_torch,
    check_jax,
    check_forced,
]
NEED_CORE = (check_kernels, check_launch, check_forced)


def examine() -> list[Check]:
    """All checks, then the verdict. Where the core cannot be imported, what needs it is left out."""
    checks: list[Check] = []
    for check in CHECKS:
        if check in NEED_CORE and any(found.name == "core" and found.status == "fail" for found in checks):
            continue
        result = check()
        checks += result if isinstance(result, list) else [result]
    return [*checks, verdict(checks)]


def report() -> int:
    """Print the report; the exit code: 0 if training will work here, on whichever backend."""
    checks = examine()
    for status, name, detail, mend in checks:
        print(f"{SIGNS[status]}  {name:<18} {detail}" + (f"\n{'':6}{'':<18} -> {mend}" if mend else ""))
    return int(checks[-1].status == "fail")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _framework(module: str, sees_gpu: str, mend: str) -> Check:
    """Version of a framework, and whether it sees a GPU; asked in its own process, because JAX keeps what it takes."""
    if not environment.installed(module):
        return Check("info", module, f"not found; its adapter needs pip install {module}")
    ran = _asked(f"import {module}; print({module}.__version__, {sees_gpu})")
    if ran.returncode:
        mend = f"reinstall it: pip install --force-reinstall {module}"
        return Check("warn", module, f"cannot be imported: {_last_line(ran.stderr)}", mend)
    found, sees = ran.stdout.split()
    if sees == "True":
        return Check("ok", module, f"{found}, sees a GPU")
    return Check(
        "warn" if environment.driver() else "info",
        module,
        f"{found}, sees no GPU",
        mend if environment.driver() else "",
    )


def _asked(program: str) -> subprocess.CompletedProcess[str]:
    """What a program says in a process of its own."""
    quiet = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=quiet, check=False)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
