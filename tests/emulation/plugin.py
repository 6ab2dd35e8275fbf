"""The emulated GPU for pytest: `PYTHONPATH=tests python -m pytest -p emulation.plugin -m gpu tests/test_update.py`."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from . import compiler, device

# PyTorch has no stand-in: what asks for its CUDA is not for the emulated GPU.
NO_CUDA = re.compile("not compiled with CUDA|requires CUDA|No CUDA GPUs|Found no NVIDIA driver|dummy base class")

launches: Counter[str] = Counter()  # of each kernel, in all processes


def pytest_configure(config: pytest.Config) -> None:
    # Left to choose, the library answers a failure with the reference and a warning: no kernel would be tested.
    config.addinivalue_line("filterwarnings", "error:cafin_cupy. the reference backend runs on the GPU")
    device.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "gpus"):  # conftest.py, which would ask PyTorch
            plugin.gpus = lambda: (1, "")
    left_out = [item for item in items if "torch-cuda" in item.nodeid]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What the imported libraries have made stays, so no collection of garbage need look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except (RuntimeError, AssertionError) as error:  # of PyTorch, which asserts that it is built with CUDA
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        raised_by = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
        if NO_CUDA.search(str(error)) and (isinstance(error, RuntimeError) or raised_by.startswith("torch")):
            pytest.skip("PyTorch has no emulated GPU")
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist: a worker has ended."""
    launches.update(getattr(node, "workeroutput", {}).get("launches", {}))


def _missing() -> str:
    """What makes a run worthless: the kernels that were not launched."""
    from cafin_cupy.runtime import IN_XLA, KERNELS

    if not launches:
        return "none, so no kernel was tested"
    unused = {name for names in (*KERNELS.values(), IN_XLA) for name in names} - set(launches)
    return f"not launched: {', '.join(sorted(unused))}" if unused and os.environ.get("EMULATION_ALL") == "1" else ""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    launches.update(compiler.launches)
    if hasattr(session.config, "workeroutput"):  # a worker itself
        session.config.workeroutput["launches"] = dict(launches)
    elif _missing() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = [f"{name} {count}" for name, count in sorted(launches.items())]
    terminalreporter.write_line(f"emulated launches: {', '.join(filter(None, [*counts, _missing()]))}")
