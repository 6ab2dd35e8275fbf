"""`PYTHONPATH=tests python -m sanitize`: the tests of the kernels on a GPU under the tools of compute-sanitizer.

The tests are those on CuPy arrays that run on the emulated GPU too. Arrays come from the driver one by one, not from
CuPy's pool, so that the tools know where each ends. Every tool must first find a fault that is planted for it. Writes
tests/results/<date>-<device>-sanitizer.md and the tools' logs; ends with 1 if anything was found or a kernel was not
launched.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from cafin_cupy.runtime import IN_XLA, KERNELS

TESTS = Path(__file__).resolve().parent
# Tests on CuPy arrays that together launch every kernel, at every kind of layer and of number. All would take an hour.
FILES = (
    *("cuda_factors", "laws", "nonfinite", "odd", "optimizer", "precision", "schedule", "spread", "table"),
    *("jax_refresh", "update", "update_mixed", "xla_kernels"),
)
# Tests on PyTorch's arrays: they launch nothing of ours that the others do not, and initcheck, which must watch every
# kernel, takes minutes to load PyTorch's; and it slows with every array there is. Whole trainings launch cuBLAS's,
# thousands of times.
LEFT_OUT = "not torch-cuda and not learns_digits"
SLOW = " and not many_layers_of_many_sizes and not uploads_behind_a_busy_stream and not refusals_on_the_gpu"
NAMES = [name for names in (*KERNELS.values(), IN_XLA) for name in names]
LAUNCHES = "SANITIZE_LAUNCHES"  # where the plugin writes what was launched

# Of each tool: what is planted for it, as the body of a kernel of 64 threads that writes x, 64 floats, from an array y
# of 64 that nobody has written.
PLANTED = {
    "memcheck": "x[t + 64] = 1;",
    "racecheck": "__shared__ float s[64]; s[t] = x[t]; x[t] = s[63 - t];",
    "initcheck": "x[t] = y[t];",
    "synccheck": "if (t < 40) __syncthreads(); x[t] = 1;",
}
OPTIONS = {"memcheck": ("--leak-check", "no"), "racecheck": ("--racecheck-report", "analysis")}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def plant(tool: str) -> None:
    """Launch the kernel that is wrong in the way of this tool."""
    import cupy

    cupy.cuda.set_allocator(None)
    x, y = cupy.zeros(64, "f4"), cupy.empty(64, "f4")
    head = 'extern "C" __global__ void planted(float* x, const float* y) { const int t = threadIdx.x; '
    cupy.RawKernel(head + PLANTED[tool] + " }", "planted")((1,), (64,), (x, y))
    cupy.cuda.Device().synchronize()


# ---- The plugin of pytest ----


def pytest_configure() -> None:
    """Without CuPy's pool; and count launches."""
    import cupy

    from cafin_cupy import runtime

    cupy.cuda.set_allocator(None)
    launches: Counter[str] = Counter()
    call: Callable[..., None] = runtime.Launch.__call__

    def counted(self: Any, arguments: Any, grid: int, *rest: Any) -> None:
        launches[self._name] += grid > 0
        call(self, arguments, grid, *rest)

    runtime.Launch.__call__ = counted  # type: ignore[method-assign]
    pytest_unconfigure.launches = launches  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    Path(os.environ[LAUNCHES], f"{os.getpid()}.json").write_text(json.dumps(pytest_unconfigure.launches))  # type: ignore[attr-defined]


# ---- The program ----


def under(tool: str, options: list[str], command: list[str], log: Path, environment: dict[str, str]) -> int:
    """Errors that the tool counts in what the command runs; -1 where it does not come so far. All goes to `log`."""
    port = str(49152 + 100 * list(PLANTED).index(tool))  # tools that run at once must not meet
    words = ["compute-sanitizer", "--tool", tool, "--port", port, *OPTIONS.get(tool, ()), *options, *command]
    with log.open("w") as file:
        subprocess.run(words, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT, check=False)
    counts = [int(count) for count in SUMMARY.findall(log.read_text())]
    return sum(counts) if counts else -1


def check(tool: str, options: list[str], folder: Path) -> dict[str, Any]:
    """The tool's run over the tests."""
    log = folder / f"{tool}.log"
    planted = under(tool, [], [sys.executable, __file__, "--plant", tool], log, {}) > 0
    paths = os.pathsep.join(map(str, filter(None, (TESTS, TESTS.parent, os.environ.get("PYTHONPATH")))))
    environment = {"HYPOTHESIS_EXAMPLES": "2", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # as without CuPy's pool
    # Where memory was written matters to initcheck, so it must watch all kernels; the others only ours.
    ours = [] if tool == "initcheck" else [word for name in NAMES for word in ("--kernel-name", f"kernel_name={name}")]
    words = [sys.executable, "-m", "pytest", "-v", "-p", "sanitize", "-p", "no:cacheprovider", "-m", "gpu", *options]
    chosen = LEFT_OUT + (SLOW if tool == "initcheck" else "")
    files = [str(TESTS / f"test_{name}.py") for name in FILES]
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as launches:
        errors = under(tool, ours, [*words, "-k", chosen, *files], log, {**environment, LAUNCHES: launches})
        for file in Path(launches).iterdir():  # of each process
            counts.update(json.loads(file.read_text()))
    tests = re.search(r"^(.*\b(?:passed|failed|error)\b.*) in [\d.]+s", log.read_text(), re.MULTILINE)
    return {
        "tool": tool,
        "planted": planted,
        "errors": errors,
        "tests": tests[1].strip("= ") if tests else "did not end",
        "launches": dict(counts),
        "seconds": time.monotonic() - begin,
    }


def report(runs: list[dict[str, Any]], facts: str) -> str:
    lines = ["# Kernels under compute-sanitizer", "", facts, ""]
    lines += [
        "Tests on CuPy arrays; launches of each kernel. *Planted*: the tool found the fault that was planted for it.",
        "",
        f"| tool | errors | planted | tests | {' | '.join(NAMES)} | s |",
        "| --- | ---: | --- | --- | " + "---: | " * (len(NAMES) + 1),
    ]
    for run in runs:
        counts = " | ".join(f"{run['launches'].get(name, 0):,}" for name in NAMES)
        found = "found" if run["planted"] else "NOT FOUND"
        errors = run["errors"] if run["errors"] >= 0 else "–"
        lines.append(f"| {run['tool']} | {errors} | {found} | {run['tests']} | {counts} | {run['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def good(run: dict[str, Any]) -> bool:
    passed = "passed" in run["tests"] and not re.search("failed|error", run["tests"])
    return run["errors"] == 0 and run["planted"] and passed and all(run["launches"].get(name) for name in NAMES)


def conditions() -> tuple[str, str]:
    """(name of the device, date, device and versions as a sentence)."""
    import cupy

    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    words = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"Version (\S+)", words)
    driver, commit = (
        subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)
        .stdout.strip()
        .partition("\n")[0]
        for command in (
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            ["git", "rev-parse", "--short=12", "HEAD"],
        )
    )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    number = version[1].rstrip(",") if version else words.strip()
    facts = f"{device}; driver {driver}, compute-sanitizer {number}, CuPy {cupy.__version__}; {now}; commit {commit}."
    return device, facts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sanitize", description=__doc__)
    parser.add_argument("--plant", choices=PLANTED, help=argparse.SUPPRESS)
    parser.add_argument("--tools", default=",".join(PLANTED), help="only these, with commas")
    parser.add_argument("--out", type=Path, default=TESTS / "results", help="folder of the report")
    chosen, options = parser.parse_known_args(argv)
    if chosen.plant:
        plant(chosen.plant)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer must be on the PATH; it comes with NVIDIA's CUDA toolkit", file=sys.stderr)
        return 2
    device, facts = conditions()
    chosen.out.mkdir(parents=True, exist_ok=True)
    tools = chosen.tools.split(",")
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = chosen.out / f"{datetime.date.today().isoformat()}-{name}-sanitizer.md"
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(tools)) as pool:  # each of them is slow by itself, and leaves the GPU idle
        for done in as_completed([pool.submit(check, tool, options, chosen.out) for tool in tools]):
            runs.append(done.result())
            print(json.dumps(runs[-1]), flush=True)
            path.write_text(report(runs, facts))  # what a run that is cut short has found so far is kept
    print(f"report: {path}")
    return 0 if all(map(good, runs)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
