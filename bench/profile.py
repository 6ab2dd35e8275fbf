"""Each of our kernels under Nsight Compute: `python -m bench.profile` writes bench/results/<date>-<device>-ncu.json
and a table beside it.

`ncu` runs this module once more as its child, which makes one unsampled update of a large matrix and all factors of the
ResNet-18; its warm-up is not profiled.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cafin_cupy.runtime import KERNELS

from . import models
from .contenders import contenders
from .context import FULL
from .environment import ROOT, environment, stem
from .tables import NONE, number, table
from .workloads import resnet

MATRIX = (10_000, 10_000)  # of the update
NAMES = [name for names in KERNELS.values() for name in names]
METRICS = {  # of ncu -> ours
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__bytes.sum.per_second": "bytes_per_second",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}
PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SHOWN = 5  # largest and smallest launches

Launch = dict[str, Any]


def command(ncu: str, device: str) -> list[str]:
    """The call of ncu. Clocks stay as they are, since in training nobody locks them."""
    child = [sys.executable, "-m", "bench.profile", "--child", "--device", device]
    metrics, kernels = ",".join(METRICS), f"regex:^({'|'.join(NAMES)})$"
    options = ["--profile-from-start", "off", "--clock-control", "none", "--print-units", "base"]
    return [ncu, "--csv", *options, "--kernel-name", kernels, "--metrics", metrics, *child]


def child(device: torch.device) -> None:
    """What is profiled."""
    torch.cuda.set_device(device)
    (ours,) = [contender for contender in contenders() if contender.key == "ours"]
    assert ours.construct is not None
    stack = models.matrices([MATRIX], device)
    optimizer = ours.make(stack)
    models.feed(stack)
    work = resnet(FULL.batch, FULL.image, FULL.width, device)
    construct = ours.construct(ours.make(work.model()), work.pairs())
    for _ in range(3):
        optimizer.step()
        construct()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    optimizer.step()
    construct()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()


def parse(printed: str) -> list[Launch]:
    """The launches in what `ncu --csv` printed, a line for each metric of a launch; empty if there is no table."""
    lines = printed.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, Launch] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        key = METRICS.get(row["Metric Name"])
        if key is not None:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
            launch["grid"] = row.get("Grid Size")
            launch[key] = float(row["Metric Value"].replace(",", "")) * _unit(row["Metric Unit"])
    return list(launches.values())


def _unit(unit: str) -> float:
    """What a value is multiplied by: times become microseconds, rates bytes a second."""
    if unit.endswith("byte/second"):
        return PREFIXES.get(unit[0].upper(), 1.0) if unit != "byte/second" else 1.0
    return UNITS.get(unit, 1.0)


def summed(launches: list[Launch]) -> list[dict[str, Any]]:
    """Number and total time of each kernel's launches; its other figures are means weighted by time."""
    rows = []
    for name in dict.fromkeys(launch["kernel"] for launch in launches):
        own = [launch for launch in launches if launch["kernel"] == name]
        total = sum(launch["us"] for launch in own)
        row = {"kernel": name, "launches": len(own), "us": total}
        for key in ("dram_percent", "bytes_per_second", "registers", "occupancy_percent"):
            row[key] = sum(launch[key] * launch["us"] for launch in own) / total
        rows.append(row)
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [f"{row['dram_percent']:.0f}%", number(row["bytes_per_second"] / 1e9)]
    return [number(row["us"]), *shares, f"{row['registers']:.0f}", f"{row['occupancy_percent']:.0f}%"]


def render(record: dict[str, Any]) -> str:
    """The Markdown of a profile."""
    facts, launches = record["environment"], record["launches"]
    head = ["µs", "DRAM, of peak", "GB/s", "registers", "occupancy"]
    rows = [[row["kernel"], str(row["launches"]), *_cells(row)] for row in summed(launches)]
    parts = [
        f"# Kernels on {facts['device']}",
        f"Nsight Compute, clocks not locked, caches flushed before each launch; CUDA {facts['cuda']}, PyTorch "
        f"{facts['torch']}, CuPy {facts['cupy']}; {facts['date']}; commit {facts['commit'] or 'unknown'}. `update`: "
        f"{MATRIX[0] * MATRIX[1]:,} parameters; the others: all factors of ResNet-18, batch {FULL.batch}. Figures of "
        "several launches are means weighted by time.",
        table(["", "launches", *head], rows),
    ]
    ordered = sorted((one for one in launches if one["kernel"] == "column_sums"), key=lambda one: -one["us"])
    for what, some in (("longest", ordered[:SHOWN]), ("shortest", ordered[SHOWN:][-SHOWN:])):
        if some:
            rows = [[one["grid"] or NONE, *_cells(one)] for one in some]
            parts += [f"The {what} launches of `column_sums`, each of a large layer or of several small ones:"]
            parts += [table(["grid", *head], rows)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0: written; 1: ncu failed; 2: there is no ncu, or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    device = torch.device("cuda", torch.device(chosen.device).index or 0)
    if chosen.child:
        child(device)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        found = "no `ncu` on PATH; it comes with the CUDA toolkit" if ncu is None else "no CUDA device"
        print(f"bench.profile: Nsight Compute and an NVIDIA GPU must be there, got {found}", file=sys.stderr)
        return 2
    done = subprocess.run(command(ncu, str(device)), cwd=ROOT, capture_output=True, text=True, check=False)
    launches = parse(done.stdout)
    if done.returncode or not launches:
        print(f"bench.profile: ncu failed ({done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
        return 1
    record: dict[str, Any] = {"environment": environment(device), "launches": launches}
    path = chosen.out / f"{stem(record['environment'], 'ncu')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(record))
    print(f"profile: {path}, {path.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
