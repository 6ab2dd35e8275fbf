"""Where and under which conditions a run was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from .context import Run

ROOT = Path(__file__).resolve().parent.parent


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, commit and date."""
    cuda = device.type == "cuda"
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "processor": _processor(),
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "torch": torch.__version__,
        "cupy": _cupy(),
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        facts["memory"] = properties.total_memory
        facts["multiprocessors"] = properties.multi_processor_count
        facts["l2"] = getattr(properties, "L2_cache_size", None)
    return facts


def conditions(run: Run, mode: str, tf32: bool) -> dict[str, Any]:
    """What was set, the same for all contenders."""
    return {
        "mode": mode,
        "model": run.work.name,
        "batch": run.sizes.batch,
        "dtype": "float32",
        "tf32": tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "threads": None if run.cuda else torch.get_num_threads(),
        "rounds": run.sizes.rounds,
        "contenders": {contender.key: contender.label for contender in run.contenders},
        "bytes_per_parameter": {contender.key: contender.bytes for contender in run.contenders},
        "data": "normal random numbers",
        "order": "contenders interleaved round by round",
    }


def stem(facts: dict[str, Any], mode: str) -> str:
    """File name of a run's results, without suffix."""
    if mode == "cpu":
        return f"{facts['date'][:10]}-cpu"
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    return f"{facts['date'][:10]}-{device}" + ("" if mode == "full" else f"-{mode}")


def _processor() -> str | None:
    """The CPU's name, where Linux tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def _command(*words: str) -> str | None:
    """First line of what a command prints; None where it cannot run."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _commit() -> str | None:
    commit = _command("git", "rev-parse", "--short=12", "HEAD")
    if commit and _command("git", "status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    return commit or None


def _cupy() -> str | None:
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
