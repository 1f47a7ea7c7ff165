"""Libraries of CUDA that are called through ctypes, wherever pip, conda or the system has put them."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def driver() -> ctypes.CDLL:
    """CUDA's driver, for the few functions of it that CuPy does not have."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def load_library(name: str) -> ctypes.CDLL:
    """One of CUDA's libraries, by its name in NVIDIA's packages (`nvrtc`, `cublas`).

    Raises:
        ImportError, OSError: it is not here.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib(name).abs_path
    except DynamicLibNotFoundError as error:
        raise OSError(f"CUDA's library {name} was not found") from error
    return ctypes.CDLL(path)
