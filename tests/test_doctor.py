"""The doctor: each line in its good and its bad state, the verdict, and the program as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cafin_cupy import BackendError, doctor, environment, kernel_cache
from cafin_cupy.doctor import Check


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = environment.installed
    monkeypatch.setattr(environment, "installed", lambda module: module not in modules and found(module))


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Only these distributions are installed (underscores for hyphens)."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        environment, "version", lambda *names: next((known[name] for name in names if name in known), None)
    )


def problem(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: text)


@pytest.mark.parametrize("check", doctor.CHECKS)
def test_every_check_answers_here(check: Any) -> None:
    result = check()
    for found in result if isinstance(result, list) else [result]:
        assert found.status in doctor.SIGNS
        assert found.name and found.detail
        assert bool(found.mend) == (found.status in ("warn", "fail"))


def test_missing_core_ends_the_examination_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "array_api_compat", "torch", "jax")
    assert doctor.check_core() == ("fail", "core", "array-api-compat not found", "pip install array-api-compat")
    assert doctor.report() == 1
    printed = capsys.readouterr().out
    assert "-> pip install array-api-compat" in printed
    assert "training will not work here: see core" in printed
    assert "launch" not in printed


def test_no_driver_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "driver", lambda: None)
    assert doctor.check_gpu() == ("info", "gpu", "no NVIDIA GPU found (no driver)", "")


def test_a_driver_without_cupy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "driver", lambda: (13, 0))
    without(monkeypatch, "cupy")
    assert "driver for CUDA 13.0" in doctor.check_gpu().detail


@pytest.mark.parametrize(
    ("driver", "extra"), [(None, "cuda13"), ((12, 4), "cuda12"), ((13, 0), "cuda13"), ((14, 1), "cuda13")]
)
def test_missing_cupy_names_the_extra_for_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, extra: str
) -> None:
    monkeypatch.setattr(environment, "driver", lambda: driver)
    without(monkeypatch, "cupy")
    assert doctor.check_cupy() == ("warn", "cupy", "not found", f"pip install {environment.CUDA[extra]}")
    assert [check.status for check in doctor.check_kernels()] == ["info"]
    assert doctor.check_nvrtc().status == "info"


def test_two_cupy_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda module: True)
    with_versions(monkeypatch, cupy_cuda12x="14.2.0", cupy_cuda13x="14.2.0")
    status, _, detail, mend = doctor.check_cupy()
    assert (status, detail) == ("warn", "cupy-cuda12x and cupy-cuda13x overwrite each other")
    assert mend.startswith("uninstall both")


def test_cupy_for_another_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda module: True)
    monkeypatch.setattr(environment, "driver", lambda: (12, 4))
    with_versions(monkeypatch, cupy_cuda13x="14.2.0")
    status, _, detail, mend = doctor.check_cupy()
    assert (status, detail) == ("warn", "14.2.0, cupy-cuda13x does not suit the driver")
    assert mend == "uninstall it, then pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"


def test_nvrtc_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with_versions(monkeypatch, cupy_cuda12x="14.2.0")
    status, _, detail, mend = doctor.check_nvrtc()
    assert (status, detail) == ("warn", "cannot be loaded: libnvrtc.so.12: cannot open shared object file")
    assert mend == "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"


def test_headers_are_information(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch)
    detail = "no wheel found; the kernels here need none, CuPy's arrays need nvidia-cuda-runtime"
    assert doctor.check_headers() == ("info", "headers", detail, "")
    with_versions(monkeypatch, cupy_cuda12x="14.2.0")
    assert doctor.check_headers().detail == detail + "-cu12"
    with_versions(monkeypatch, nvidia_cuda_runtime="13.0.96")
    assert doctor.check_headers().detail == "wheel 13.0.96"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert doctor.check_cache().status == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    status, _, detail, mend = doctor.check_cache()
    assert status == "warn" and "cannot be written: Not a directory" in detail
    assert "CUPY_CACHE_DIR" in mend
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "folder"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert doctor.check_cache().mend == "unset CUPY_CACHE_IN_MEMORY"


def test_a_cache_that_the_process_has_left_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Not as the switch that the library has then set."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    monkeypatch.setattr(kernel_cache, "_left", None)
    kernel_cache.leave("the disk is full")
    status, _, detail, mend = doctor.check_cache()
    assert (status, mend) == ("warn", kernel_cache.MEND) and "the disk is full" in detail


@pytest.mark.parametrize(("driver", "status"), [((12, 4), "warn"), (None, "info")])
def test_a_driver_older_than_cupy_is_named(monkeypatch: pytest.MonkeyPatch, driver: Any, status: str) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime

    def refuse() -> int:
        raise runtime.CUDARuntimeError(35)  # cudaErrorInsufficientDriver

    monkeypatch.setattr(environment, "driver", lambda: driver)
    monkeypatch.setattr(runtime, "getDeviceCount", refuse)
    check = doctor.check_gpu()
    assert check.status == status
    if driver:
        assert "the driver is older than CuPy's CUDA" in check.detail and "serves CUDA 12.4" in check.mend


def test_a_cupy_that_cannot_be_imported_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("OSError: libfoo is of another world")

    monkeypatch.setattr(environment, "driver", lambda: (12, 4))
    monkeypatch.setattr(environment, "installed", lambda module: True)
    with_versions(monkeypatch, cupy_cuda12x="14.2.0")
    monkeypatch.setattr(kernel_cache, "import_cupy", fail)
    assert doctor.check_gpu().status == "info"
    for check in (doctor.check_cupy(), doctor.check_nvrtc()):
        assert check.status == "warn" and "libfoo" in check.detail and "pip install cupy-cuda12x" in check.mend


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cafin_cupy import runtime

    def compile_cubin(stem: str, arch: str) -> bytes:
        if stem == "fold":
            raise BackendError("kernels/fold.cu(7): error: expected a ;\nand more")
        return b""

    problem(monkeypatch, "no GPU")
    monkeypatch.setattr(runtime, "compile_cubin", compile_cubin)
    checks = {check.name: check for check in doctor.check_kernels()}
    assert set(checks) == {f"kernel {stem}" for stem in runtime.KERNELS}
    assert [name for name, check in checks.items() if check.status != "ok"] == ["kernel fold"]
    assert checks["kernel fold"].detail == "does not compile: kernels/fold.cu(7): error: expected a ;"
    assert checks["kernel fold"].mend


def launch_giving(monkeypatch: pytest.MonkeyPatch, factor: float) -> Check:
    pytest.importorskip("cupy")
    problem(monkeypatch, None)
    arrays = {"cuda": [np.full(3, factor, "f4")], "reference": [np.ones(3, "f4")]}
    monkeypatch.setattr(doctor, "small_problem", lambda xp, backend: arrays[backend])
    return doctor.check_launch()


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.000005, "ok"), (1.1, "fail"), (float("nan"), "fail")])
def test_launch_compares_with_the_reference(monkeypatch: pytest.MonkeyPatch, factor: float, status: str) -> None:
    assert launch_giving(monkeypatch, factor).status == status


@pytest.mark.parametrize(
    ("error", "status"), [(BackendError("no kernels"), "warn"), (RuntimeError("illegal access"), "fail")]
)
def test_a_launch_that_raises(monkeypatch: pytest.MonkeyPatch, error: Exception, status: str) -> None:
    pytest.importorskip("cupy")
    problem(monkeypatch, None)

    def broken(xp: Any, backend: str) -> None:
        raise error

    monkeypatch.setattr(doctor, "small_problem", broken)
    check = doctor.check_launch()
    assert (check.status, check.detail) == (status, str(error))
    assert check.mend


def test_small_problem_moves_every_parameter() -> None:
    arrays = doctor.small_problem(np, "reference")
    again = doctor.small_problem(np, "reference")
    assert len(arrays) == 15
    assert all(np.isfinite(a).all() and np.array_equal(a, b) for a, b in zip(arrays, again))


@pytest.mark.parametrize(
    ("source", "driver", "status", "detail"),
    [
        ("__version__ = '1.2'; gpu = True", None, "ok", "1.2, sees a GPU"),
        ("__version__ = '1.2'; gpu = False", None, "info", "1.2, sees no GPU"),
        ("__version__ = '1.2'; gpu = False", (13, 0), "warn", "1.2, sees no GPU"),
        ("raise ImportError('half installed')", None, "warn", "cannot be imported: ImportError: half installed"),
    ],
)
def test_framework(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, source: str, driver: Any, status: str, detail: str
) -> None:
    (tmp_path / "some_framework.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "driver", lambda: driver)
    check = doctor._framework("some_framework", "some_framework.gpu", "another build")
    assert (check.status, check.detail) == (status, detail)
    assert bool(check.mend) == (status == "warn")


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((0, "\n", ""), "ok", "runs the kernels in its programs"),
        ((0, "jax 0.6.2 is older\n", ""), "warn", "plain array code serves it: jax 0.6.2 is older"),
        ((1, "", "Traceback\nImportError: no driver\n"), "warn", "ImportError: no driver"),
    ],
)
def test_jax_on_a_gpu_is_asked_for_the_kernels(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], status: str, words: str
) -> None:
    monkeypatch.setattr(doctor, "_framework", lambda *args: doctor.Check("ok", "jax", "0.10.2, sees a GPU"))
    monkeypatch.setattr(doctor, "_asked", lambda program: subprocess.CompletedProcess([], *answer))
    check = doctor.check_jax()
    assert check.status == status and words in check.detail and check.detail.startswith("0.10.2, sees a GPU")


def test_a_missing_framework_is_information(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "jax")
    for check in (doctor.check_torch(), doctor.check_jax()):
        assert check.status == "info"
        assert f"pip install {check.name}" in check.detail


@pytest.mark.parametrize(
    ("value", "why_not", "status"),
    [
        (None, "no GPU", "info"),
        ("reference", None, "info"),
        ("cuda", None, "info"),
        ("cuda", "no GPU", "fail"),
        ("gpu", None, "fail"),
    ],
)
def test_forced_backend(monkeypatch: pytest.MonkeyPatch, value: str | None, why_not: str | None, status: str) -> None:
    if value is not None:
        monkeypatch.setenv("CAFIN_BACKEND", value)
    problem(monkeypatch, why_not)
    check = doctor.check_forced()
    assert check.status == status
    assert bool(check.mend) == (status == "fail")


GOOD = Check("ok", "launch", "fine")
WRONG = Check("fail", "launch", "differs")
BROKEN = Check("warn", "kernel fold", "does not compile")


@pytest.mark.parametrize(
    ("checks", "value", "why_not", "status", "words"),
    [
        ([GOOD], None, None, "ok", "fused CUDA kernels will run"),
        ([GOOD], "reference", None, "ok", "because CAFIN_BACKEND asks"),
        ([GOOD], None, "no GPU", "ok", "reference will run: no GPU"),
        ([BROKEN], None, None, "ok", "reference will run: kernel fold does not compile"),
        ([BROKEN], "cuda", None, "fail", "see kernel fold"),
        ([WRONG], None, None, "fail", "see launch"),
        ([WRONG], "reference", None, "ok", "because CAFIN_BACKEND asks"),
        ([WRONG, Check("fail", "core", "")], "reference", None, "fail", "see launch, core"),
    ],
)
def test_verdict(
    monkeypatch: pytest.MonkeyPatch,
    checks: list[Check],
    value: str | None,
    why_not: str | None,
    status: str,
    words: str,
) -> None:
    if value is not None:
        monkeypatch.setenv("CAFIN_BACKEND", value)
    problem(monkeypatch, why_not)
    verdict = doctor.verdict(checks)
    assert verdict.status == status
    assert words in verdict.detail


def run_doctor() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cafin_cupy", "doctor"], capture_output=True, text=True, check=False)


def test_the_program_fits_a_screen() -> None:
    ran = run_doctor()
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(lines) <= 25
    assert "verdict" in lines[-1] and "will run" in lines[-1]
    assert ran.stderr == ""


def test_the_program_fails_where_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAFIN_BACKEND", "gpu")
    ran = run_doctor()
    assert ran.returncode == 1
    assert "-> set it to cuda or reference, or unset it" in ran.stdout


@pytest.mark.gpu
def test_everything_is_well_on_a_gpu() -> None:
    checks = {check.name: check for check in doctor.examine()}
    for name in ("gpu", "cupy", "nvrtc", "launch"):
        assert checks[name].status == "ok", checks[name]
    assert all(check.status == "ok" for name, check in checks.items() if name.startswith("kernel"))
    assert "fused CUDA kernels will run" in checks["verdict"].detail
