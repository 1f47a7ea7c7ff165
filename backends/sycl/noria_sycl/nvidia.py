"""Memory of NVIDIA's driver that stays in the host's RAM: its extension cl_nv_create_buffer, unknown to PyOpenCL.

This driver moves an ordinary buffer to the GPU when a kernel or a copy takes it, ALLOC_HOST_PTR or not, and blocks the
host in copies from its address. A buffer made here stays where it is: kernels read it over the bus, and copies from it
run beside the host.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pyopencl as cl

from noria_sycl.runtime import Bytes

EXTENSION = "cl_nv_create_buffer"
_FUNCTION = b"clCreateBufferNV"
_LOCATION_HOST = 1  # CL_MEM_LOCATION_HOST_NV
PINNED = 2  # CL_MEM_PINNED_NV: page-locked, but moved like any other buffer


def create_buffer(
    context: cl.Context,
    device: cl.Device,
    flags: int,
    nbytes: int,
    memory: Bytes | None = None,
    kind: int = _LOCATION_HOST,
) -> cl.Buffer:
    """A buffer in the host's RAM; with `memory`, over that (flag USE_HOST_PTR), which must live as long.

    Raises:
        MemoryError: the driver refuses it.
    """
    loader = ctypes.CDLL(cl._cl.__file__)  # finds the functions of the OpenCL loader that PyOpenCL brings
    find: Any = loader.clGetExtensionFunctionAddressForPlatform
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    address = find(device.platform.int_ptr, _FUNCTION)
    if not address:
        raise MemoryError(f"the driver has no {_FUNCTION.decode()}")
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    create = ctypes.CFUNCTYPE(pointer, pointer, u64, u64, ctypes.c_size_t, pointer, pointer)(address)
    status = ctypes.c_int32(0)
    place = None if memory is None else memory.ctypes.data
    handle = create(context.int_ptr, flags, kind, nbytes, place, ctypes.addressof(status))
    if not handle or status.value:
        raise MemoryError(f"{_FUNCTION.decode()} answers with error {status.value}")
    return cl.Buffer.from_int_ptr(handle, retain=False)
