"""NVRTC, NVIDIA's run-time compiler: the six functions that are needed, through ctypes.

Source: NVIDIA, "NVRTC" user guide (nvrtc.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

from noria_cuda.libraries import load_library


class NvrtcError(Exception):
    """A program did not compile; the text is the compiler's log."""


@cache
def _library() -> ctypes.CDLL:
    library = load_library("nvrtc")
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@cache
def version() -> tuple[int, int]:
    """Version of the compiler, that of its CUDA.

    Raises:
        ImportError, OSError: NVRTC is not here.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities it makes code for (75 = 7.5), ascending."""
    n = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(n)))
    archs = (ctypes.c_int * n.value)()
    _check(_library().nvrtcGetSupportedArchs(archs))
    return tuple(archs)


def compile(text: str, name: str, headers: Mapping[str, str], options: Sequence[str], *, machine_code: bool) -> bytes:
    """Compile one program to a cubin, or to PTX.

    Args:
        text: the program; `name` stands for it in messages.
        headers: text of each header it may include, by the name it is included by.
        options: of the compiler.
        machine_code: cubin (the options name an `sm_` architecture) or PTX (a `compute_` one).

    Raises:
        NvrtcError: with the log.
    """
    library, program = _library(), ctypes.c_void_p()
    sources = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), sources, names)
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), flags):
            log = _bytes(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
            raise NvrtcError(log.rstrip(b"\0\n").decode(errors="replace"))
        if machine_code:
            return _bytes(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
        return _bytes(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer) -> bytes:
    nbytes = ctypes.c_size_t()
    _check(size(program, ctypes.byref(nbytes)))
    buffer = ctypes.create_string_buffer(nbytes.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        text: bytes = _library().nvrtcGetErrorString(status)
        raise NvrtcError(text.decode())
