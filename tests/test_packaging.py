"""What users of the installed package rely on: a light import, one version, the sources of the kernels."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import cafin_cupy
from cafin_cupy import environment, runtime

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = (ROOT / "cafin_cupy").is_dir()  # else the tests of an sdist run on the installed wheel


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def python(program: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env).stdout


@pytest.mark.parametrize("module", ["cafin_cupy", "cafin_cupy.runtime", "cafin_cupy.doctor", "cafin_cupy.__main__"])
def test_import_brings_no_framework(module: str) -> None:
    frameworks = ("torch", "jax", "cupy", "sklearn", "matplotlib", "tqdm")
    loaded = python(f"import sys, {module}; print([name for name in {frameworks} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_every_public_name_exists_without_a_framework() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'jax', 'cupy']))"
    assert (
        python(f"{blocked}; import cafin_cupy as c; [getattr(c, name) for name in c.__all__]; print('well')")
        == "well\n"
    )


def test_one_version() -> None:
    declared = setup_cfg()["metadata"]["version"]
    assert cafin_cupy.__version__ == declared
    if not CHECKOUT:
        assert metadata.version("cafin_cupy") == declared


def test_kernels_are_package_data() -> None:
    files = {file.name for file in resources.files("cafin_cupy.kernels").iterdir()}
    sources = {f"{stem}.cu" for stem in (*runtime.KERNELS, *runtime.IN_XLA)}
    assert {file for file in files if file.endswith(".cu")} == sources  # else tests would miss a kernel
    sources |= {f"{name}.cuh" for name in ("average", "column_sums", "common", "fold", "rounding", "update")}
    assert sources <= files
    assert CHECKOUT or files == sources  # what is written for readers is not installed


def test_typed() -> None:
    assert resources.files("cafin_cupy").joinpath("py.typed").is_file()


def test_extras_and_core_requirements() -> None:
    options = setup_cfg()["options"]
    core = {line.split(">")[0] for line in options["install_requires"].split()}
    assert core == {"numpy", "array-api-compat"}
    extras = setup_cfg()["options.extras_require"]
    assert set(extras) == {"torch", "jax", "cuda12", "cuda13", "train", "bench", "test", "dev"}


def test_mends_install_what_the_extras_name() -> None:
    extras = setup_cfg()["options.extras_require"]
    for extra, wheels in environment.CUDA.items():
        assert set(shlex.split(wheels)) <= {line.removesuffix(">=13.6") for line in extras[extra].split()}
    assert set(environment.TRAIN.values()) == {line.split(">")[0] for line in extras["train"].split()}


def test_every_requirement_is_pinned() -> None:
    """constraints.txt must name each package that an extra names, or `make` would install what nobody tested."""
    path = ROOT / "constraints.txt"
    pins = {line.split("==")[0].lower() for line in path.read_text().splitlines() if "==" in line}
    sections = setup_cfg()
    named = [line for extra in sections["options.extras_require"].values() for line in extra.split("\n")]
    named += sections["options"]["install_requires"].split("\n")
    wanted = {re.split("[>[; ]", line.strip())[0].lower() for line in named if line.strip() and line[0] != "#"}
    assert wanted - pins == set()


def test_wheel_sources_are_complete() -> None:
    """Every module of a checkout is listed in `packages`; nothing is left out of the wheel by a forgotten line."""
    packages = [name.strip() for name in setup_cfg()["options"]["packages"].split(",")]
    if not CHECKOUT:
        pytest.skip("the tests run on an installed package")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "cafin_cupy").rglob("*.py")}
    assert {str(folder).replace(os.sep, ".") for folder in folders} <= set(packages)
    assert not (ROOT / "kernels" / "__init__.py").exists()
