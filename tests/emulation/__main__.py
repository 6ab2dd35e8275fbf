"""`PYTHONPATH=tests python -m emulation [options of pytest]`: the tests marked `gpu` on the emulated GPU, in order, and
those not marked `host` in random order under sanitizers.

Paths among the options take the place of `FILES`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import compiler

TESTS = Path(__file__).resolve().parent.parent
# The tests on CuPy arrays, and those that `lend_torch`; PyTorch's others need a GPU. All together launch every kernel.
FILES = (
    *("arrays", "backend", "copies", "cuda_factors", "curvature", "factors", "faults", "field_reports_large"),
    *("forks", "jax_eager", "jax_eager_refused", "jax_refresh", "jax_streams", "laws", "nonfinite"),
    *("nonfinite_moments", "odd", "odd_sizes", "optimizer", "precision", "readme"),
    *("recorder", "repeats", "runtime", "schedule", "spread", "state", "streams", "summary", "table"),
    *("torch_attention", "torch_by_hand", "torch_compiled", "torch_flat", "torch_groups", "torch_layers"),
    *("torch_loops", "torch_names", "torch_precision", "torch_scaler", "torch_situations", "torch_step_faults"),
    *("torch_verdict", "torch_verdict_host", "torch_zero", "update", "update_mixed", "verdict", "xla_kernels"),
    "emulation",
)


SELECTIONS = ("-k", "-m", "--deselect", "--lf", "--last-failed", "--sw")  # after which not every kernel is launched


def is_file(option: str) -> bool:
    """True of a test file, or a test in one."""
    path = Path(option.partition("::")[0])
    return path.suffix == ".py" and path.exists()


def gpus() -> int:
    """How many GPUs the driver of this machine offers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def run(name: str, marks: str, options: list[str], environment: dict[str, str]) -> bool:
    """True if pytest has passed the tests of these marks."""
    print(f"emulation: {name}", flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulation.plugin", "-m", marks, *options]
    passed = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode == 0
    print(f"emulation: {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - begin:.0f} s", flush=True)
    return passed


def main(options: list[str]) -> int:
    if gpus():
        print("emulation: skipped, as the tests run on this machine's GPU; CUDA_VISIBLE_DEVICES= hides it")
        return 0
    if compiler.compiler() is None and os.environ.get("CXX"):
        print(f"emulation: CXX must name a C++ compiler, without options, got {os.environ['CXX']}", file=sys.stderr)
        return 1
    if compiler.compiler() is None:
        print("emulation: skipped, as there is no C++ compiler; install g++, or set CXX")
        return 0
    sanitized = compiler.sanitized_environment()
    if sanitized is None:
        print("emulation: without sanitizers, as this compiler has no shared library of them; g++ has")
    given = any(is_file(option) for option in options)
    narrowed = given or any(option.startswith(SELECTIONS) for option in options)
    files = [] if given else [str(TESTS / f"test_{name}.py") for name in FILES]
    with tempfile.TemporaryDirectory(prefix="emulation-") as folder:  # for what a process that dies leaves behind
        common = {"TMPDIR": folder, "EMULATION_FOLDER": folder}
        common |= {"OMP_NUM_THREADS": "1", "EMULATION_ALL": "" if narrowed else "1"}
        options = [*options, *files]
        passed = [run("in order", "gpu", options, common)]
        name, common = "random order", {**common, "EMULATION_ORDER": "1", "HYPOTHESIS_EXAMPLES": "5"}
        if sanitized is not None:  # which write to the standard error of a process that they end
            name, common, options = f"{name}, sanitizers", {**common, **sanitized}, ["--capture=no", *options]
        passed.append(run(name, "gpu and not host", options, common))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
