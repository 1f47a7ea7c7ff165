"""From the sources in cu/ to machine code, kept on disk.

A source is compiled the first time a kernel of it is launched, once for each set of macros: `QUANT=Q4_K`, `ACT=bf16`
take the place of templates, so nothing is compiled that no model asks for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from noria_cuda import nvrtc

SOURCES = Path(__file__).parent / "cu"
_OPTIONS = ("--std=c++17",)
_FORMATS = {"int": "i", "u32": "I", "u64": "Q", "float": "f", "Table": "5Q"}  # of `struct`; pointers are "Q"
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s+)*(\w+)\(([^)]*)\)')

log = logging.getLogger(__name__)


@cache
def source(file: str) -> str:
    """The text of cu/`file`.cu."""
    return (SOURCES / f"{file}.cu").read_text(encoding="utf-8")


@cache
def signatures(file: str) -> dict[str, list[str]]:
    """The parameters of each kernel of a source, as `struct` formats."""
    text = re.sub(r"//[^\n]*", "", source(file))
    return {name: [_format(p) for p in parameters.split(",")] for name, parameters in _KERNEL.findall(text)}


@cache
def awaiting(file: str) -> frozenset[str]:
    """The kernels of a source that wait by themselves for the kernel before them."""
    bodies = source(file).split('extern "C" __global__')[1:]
    kernels = (_KERNEL.match('extern "C" __global__' + body) for body in bodies)
    return frozenset(
        kernel[1]
        for kernel, body in zip(kernels, bodies, strict=True)
        if kernel and "await_previous();" in body.split("\n}\n")[0]
    )


def _format(parameter: str) -> str:
    return "Q" if "*" in parameter else _FORMATS[parameter.replace("const ", "").split()[0]]


@cache
def _headers() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.cuh"))}


def compile_source(file: str, sm: int, defines: Sequence[str] = ()) -> bytes:
    """cu/`file`.cu for compute capability `sm` (90 = 9.0).

    A GPU newer than the compiler gets PTX for the newest one the compiler knows, which the driver finishes.

    Raises:
        NvrtcError: it does not compile.
    """
    known = nvrtc.architectures()
    if sm in known:  # "a": with the instructions that this very generation has, wgmma for one
        arch = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
    else:
        arch = f"compute_{max((a for a in known if a < sm), default=known[0])}"
    options = [f"--gpu-architecture={arch}", *_OPTIONS, *(f"--define-macro={define}" for define in defines)]
    return nvrtc.compile(source(file), f"{file}.cu", _headers(), options, machine_code=arch.startswith("sm_"))


def load_or_compile(file: str, sm: int, defines: Sequence[str] = ()) -> bytes:
    """The same from the cache on disk, where it is put if it is not there.

    Raises:
        NvrtcError: it does not compile.
    """
    key = hashlib.sha256()
    for part in (file, str(sm), *defines, *map(str, nvrtc.version()), *_OPTIONS, source(file), *_headers().values()):
        key.update(part.encode() + b"\0")
    path = user_cache_path("noria") / "cuda" / f"{file}-sm_{sm}-{key.hexdigest()[:32]}"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_source(file, sm, defines)
        _keep(path, code)
        return code


def _keep(path: Path, code: bytes) -> None:
    """Written aside and moved into place, so that no other process reads a part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(name).replace(path)
    except OSError as error:
        log.warning("compiled kernels cannot be kept in %s, so every start compiles them: %s", path.parent, error)
