"""What is installed, and what the NVIDIA driver offers; found without importing a framework or touching a device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from importlib import metadata, util

from .errors import BackendError

# The extra [train]: each module and the name under which it is installed.
TRAIN = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}

TRAIN_JAX = {"jax": "jax", "flax": "flax", "optax": "optax", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}

PROFILE = {"torch": "torch"}

# What the extras [cuda12] and [cuda13] need at least.
CUDA = {
    "cuda12": "cupy-cuda12x nvidia-cuda-nvrtc-cu12",
    "cuda13": "cupy-cuda13x 'nvidia-cuda-nvrtc>=13,<14'",
}


def installed(module: str) -> bool:
    """Whether `import module` would find something."""
    return util.find_spec(module) is not None


def version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def require(command: str, modules: Mapping[str, str]) -> None:
    """Raise a `BackendError` that names what a command still needs of `modules`, if anything."""
    missing = [name for module, name in modules.items() if not installed(module)]
    if missing:
        raise BackendError(f"{command}: needs {', '.join(missing)}; install with: pip install {' '.join(missing)}")


def driver() -> tuple[int, int] | None:
    """The newest CUDA version (major, minor) that the NVIDIA driver serves; None without a driver."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    number = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if status == 0 and number.value else None


def cuda_extra() -> str:
    """The extra whose CuPy suits the driver; "cuda13" where there is none to ask."""
    found = driver()
    return "cuda12" if found is not None and found[0] < 13 else "cuda13"


# What CUDA says of code or a library that is made for a later driver; the last, what the loader says.
_TOO_OLD = (
    *("InsufficientDriver", "SystemDriverMismatch", "CompatNotSupportedOnDevice", "UNSUPPORTED_PTX_VERSION"),
    *("NO_BINARY_FOR_GPU", "INVALID_IMAGE", "INVALID_PTX", "no kernel image", "cuLaunchKernelEx"),
)


def driver_mend(text: str) -> str | None:
    """The mend for an error of CUDA's where the driver is too old; None where it is not, or there is none."""
    found = driver()
    if found is None or not any(sign in text for sign in _TOO_OLD):
        return None
    return (
        f"the driver serves CUDA {found[0]}.{found[1]}: install the extra cafin-cupy[{cuda_extra()}] with an "
        "nvidia-cuda-nvrtc of no later version, or a newer driver"
    )
