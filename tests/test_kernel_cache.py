"""Compiled kernels on disk: with real compilations and real processes; what loads them is real only on a GPU."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cafin_cupy import BackendError, kernel_cache, runtime

cupy = pytest.importorskip("cupy")

ARCH = "sm_90"
FASTEST = "update"  # of the sources, to compile
PROCESSES = 8
CODE = bytes(range(256)) * 300


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, used by a library that has just been started."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    monkeypatch.setattr(kernel_cache, "_left", None)
    monkeypatch.setattr(kernel_cache, "_warned", False)
    yield tmp_path / "cache"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Entries


def test_an_entry_comes_back(folder: Path) -> None:
    assert kernel_cache.load("a") is None
    kernel_cache.save("a", CODE)
    kernel_cache.save("b", b"")
    assert (kernel_cache.load("a"), kernel_cache.load("b"), kernel_cache.load("c")) == (CODE, b"", None)
    assert files(folder) == ["a", "b"]


def damaged(entry: bytes) -> dict[str, bytes]:
    middle = len(entry) // 2
    return {
        "empty": b"",
        "half a digest": entry[:10],
        "digest alone": entry[:32],
        "all but the last byte": entry[:-1],
        "half": entry[:middle],
        "one bit": entry[:middle] + bytes([entry[middle] ^ 1]) + entry[middle + 1 :],
        "zeros at the end, as after a crash": entry[:middle] + bytes(len(entry) - middle),
        "garbage": b"\x7fELF" + os.urandom(1000),
        "code without a digest": entry[32:],
        "more": entry + b"\0",
    }


@pytest.mark.parametrize("damage", damaged(bytes(100)))
def test_a_damaged_entry_counts_as_missing_and_is_replaced(damage: str, folder: Path) -> None:
    kernel_cache.save("a", CODE)
    path = folder / "a"
    path.write_bytes(damaged(path.read_bytes())[damage])
    assert kernel_cache.load("a") is None
    kernel_cache.save("a", CODE)
    assert kernel_cache.load("a") == CODE
    assert files(folder) == ["a"]


def test_an_entry_of_another_user_counts_as_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder is shared, and its files are not."""
    kernel_cache.save("a", CODE)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        assert kernel_cache.load("a") is None
    assert os.stat(folder / "a").st_mode & 0o444 == 0o444 & ~_umask()  # ours can be read as the umask says


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_readers_never_see_half_an_entry(folder: Path) -> None:
    """While others write it again and again, as processes do that start at once."""
    kernel_cache.save("a", CODE)
    stop, seen = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen.append(kernel_cache.load("a") == CODE)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=lambda: [kernel_cache.save("a", CODE) for _ in range(100)]) for _ in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert seen and all(seen)
    assert files(folder) == ["a"]


# The folder


def test_a_folder_that_can_be_written_is_no_problem(folder: Path) -> None:
    assert kernel_cache.problem() is None
    assert not folder.exists()  # nobody has asked for it yet


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "Not a directory"),
        ("file/folder", "Not a directory"),
        ("", "CUPY_CACHE_DIR is empty"),
        ("nowhere", "No such file"),
        ("nowhere/folder", "No such file"),
        ("circle", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made(
    name: str, words: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / name) if name else "")
    problem = kernel_cache.problem()
    assert problem is not None and words in problem
    assert kernel_cache.load("a") is None
    kernel_cache.save("a", CODE)
    assert kernel_cache.in_memory()
    kernel_cache.save("a", CODE)  # no further attempt
    with pytest.warns(UserWarning, match="compiled anew in each process, as .*CUPY_CACHE_DIR") as caught:
        kernel_cache.warn()
        kernel_cache.warn()
    assert len(caught) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_is_full_leaves_no_rest(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(self: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", replace)
    kernel_cache.save("a", CODE)
    assert files(folder) == []
    with pytest.warns(UserWarning, match=f"{folder} cannot be written: {os.strerror(code)}"):
        kernel_cache.warn()


def test_ctrl_c_leaves_no_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        kernel_cache.save("a", CODE)
    assert files(folder) == [] and not kernel_cache.in_memory()


def test_nothing_is_kept_where_cupy_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.save("a", CODE)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert kernel_cache.load("a") is None
    kernel_cache.save("b", CODE)
    assert files(folder) == ["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for
        kernel_cache.warn()


# Compiling


def test_code_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = runtime.cubin(FASTEST, ARCH)
    assert code == runtime.compile_cubin(FASTEST, ARCH)
    (entry,) = files(folder)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "compile_cubin", None)
        assert runtime.cubin(FASTEST, ARCH) == code
    assert entry.startswith("cafin_cupy-update-") and entry.endswith(".cubin")


def test_what_decides_on_the_code_decides_on_the_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(kernel_cache, "load", lambda key: asked.append(key) or b"code")
    runtime.cubin(FASTEST, ARCH)
    runtime.cubin(FASTEST, "sm_80")
    runtime.cubin("fold", ARCH)
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (99, 0))
        runtime.cubin(FASTEST, ARCH)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "source", lambda stem: "// another")
        runtime.cubin(FASTEST, ARCH)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "options", lambda dtype: ("-DCHUNK=1",))
        runtime.cubin(FASTEST, ARCH)
    runtime.cubin(FASTEST, ARCH)
    assert len(set(asked)) == 6 and asked[0] == asked[-1]


def test_no_header_must_be_installed() -> None:
    """CuPy's own way of compiling needs some."""
    for stem in runtime.KERNELS:
        assert "#include" not in runtime.source(stem)
    assert not any(option.startswith("-I") for option in runtime.cubin_options(ARCH))


class Device:
    """In place of CuPy's on a machine without a GPU."""

    compute_capability = "90"

    def __init__(self, number: int) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Module:
    loaded: list[bytes]

    def load(self, code: bytes) -> None:
        assert code[:4] == b"\x7fELF", "the driver would refuse it, or worse"
        self.loaded.append(code)

    def get_function(self, name: str) -> Any:
        return name


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the driver is given, instead of a GPU."""
    monkeypatch.setattr(Module, "loaded", [], raising=False)
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy.cuda, "Module", Module)
    monkeypatch.setattr(runtime, "_driver", lambda: None)
    for known in ("_modules", "_functions"):
        monkeypatch.setattr(runtime, known, {})
    return Module.loaded


def start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("_modules", "_functions"):
        monkeypatch.setattr(runtime, known, {})


def test_damaged_entries_are_compiled_anew_and_never_loaded(
    folder: Path, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "KERNELS", {FASTEST: runtime.KERNELS[FASTEST]})
    runtime.prepare(0)
    (path,) = folder.iterdir()
    for damage in ("garbage", "half", "empty"):
        path.write_bytes(damaged(path.read_bytes())[damage])
        start_again(monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nobody needs to know
            runtime.prepare(0)
    assert loads == [loads[0]] * 4
    monkeypatch.setattr(runtime, "compile_cubin", None)
    start_again(monkeypatch)
    runtime.prepare(0)  # mended
    assert len(loads) == 5


def test_without_a_cache_all_kernels_load_with_one_warning(
    folder: Path, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads compile, and none can save."""
    folder.touch()
    monkeypatch.setattr(runtime, "compile_cubin", lambda *_: b"\x7fELF")
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        runtime.prepare(0)
        start_again(monkeypatch)
        runtime.prepare(0)
    assert len(caught) == 1 and len(loads) == 2 * len(set(runtime.KERNELS) - runtime.ON_DEMAND)


# Processes


def start(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUPY_CACHE")}
    command = [sys.executable, "-W", "always", "-c", program, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**env, **variables}
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out, err


COMPILE = """
import hashlib, sys
from cafin_cupy import kernel_cache, runtime
kernel_cache.import_cupy()
code = runtime.cubin(sys.argv[1], "sm_90")
kernel_cache.warn()
import cupy  # works from now on
print(hashlib.sha256(code).hexdigest(), kernel_cache.in_memory())
"""


def digest() -> str:
    return hashlib.sha256(runtime.compile_cubin(FASTEST, ARCH)).hexdigest()


def test_many_processes_may_start_at_once(tmp_path: Path) -> None:
    """With an empty cache, and then with one that is garbage."""
    folder = tmp_path / "cache"
    for count in (PROCESSES, 2):
        started = [start(COMPILE, FASTEST, CUPY_CACHE_DIR=str(folder)) for _ in range(count)]
        assert [ended(process) for process in started] == [(f"{digest()} False\n", "")] * count
        (entry,) = folder.iterdir()
        entry.write_bytes(b"garbage")


@pytest.mark.parametrize("trouble", ["a file", "below a file", "full", "empty name"])
def test_a_process_without_a_cache_compiles_and_warns_once(trouble: str, tmp_path: Path) -> None:
    """CuPy itself could not be imported where its folder cannot be made. A limit on the size of files is as good as a
    full disk: the system ends the write with an error."""
    (tmp_path / "file").touch()
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    name = {"a file": "file", "below a file": "file/folder", "full": "cache", "empty name": ""}[trouble]
    process = start(
        (limit if trouble == "full" else "") + COMPILE, FASTEST, CUPY_CACHE_DIR=str(tmp_path / name) if name else ""
    )
    out, err = ended(process)
    assert out == f"{digest()} True\n"
    assert err.count("Warning") == 1 and "kernels are compiled anew in each process" in err
    assert not (tmp_path / "cache").exists() or files(tmp_path / "cache") == []


TRAIN = """
import sys
import torch
from cafin_cupy.adapters.torch import AdaFisher
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)).cuda()
optimizer = AdaFisher(model, TCov=2, backend="cuda")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 5, device="cuda")).square().sum().backward()
    optimizer.step()
print(float(sum(p.double().sum() for p in model.parameters())))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("trouble", ["empty", "garbage", "a file"])
def test_processes_train_whatever_the_cache_is_like(trouble: str, tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no emulated GPU")
    folder = tmp_path / "cache"
    ((first, _),) = [ended(start(TRAIN, CUPY_CACHE_DIR=str(folder)))]
    if trouble == "garbage":
        for entry in folder.iterdir():
            entry.write_bytes(b"\x7fELF" + bytes(50000))
    else:
        for entry in folder.iterdir():
            entry.unlink()
    if trouble == "a file":
        folder.rmdir()
        folder.touch()
    results = [ended(process) for process in [start(TRAIN, CUPY_CACHE_DIR=str(folder)) for _ in range(PROCESSES)]]
    assert {out for out, _ in results} == {first}
    assert all(err.count("compiled anew") == (trouble == "a file") for _, err in results)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("raise OSError('libnvrtc.so is of another world')", "OSError: libnvrtc.so is of another world"),
        ("raise AttributeError('partially initialized')", "AttributeError: partially initialized"),
        ("pass", "only a part of it is there"),
        ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
    ],
)
def test_a_broken_cupy_is_named(broken: str, words: str, tmp_path: Path) -> None:
    """Whatever its import does, the reference runs, and "cuda" is refused with the mend."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(broken)
    program = "from cafin_cupy import runtime; print(runtime.cuda_problem()); print(runtime.cuda_problem())"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    out, _ = ended(start(program, PYTHONPATH=path))
    for line in out.splitlines():
        assert line.startswith("CuPy cannot be imported (") and "install the extra cafin-cupy[cuda12]" in line
    assert words in out.splitlines()[0]


@pytest.mark.usefixtures("folder")
def test_nvrtc_that_is_missing_names_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", missing)
    monkeypatch.setattr(cupy.cuda.nvrtc, "createProgram", missing)
    for call in (runtime.cubin, runtime.compile_cubin):
        with pytest.raises(BackendError, match=r"libnvrtc.so.12.*install nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc"):
            call(FASTEST, ARCH)
