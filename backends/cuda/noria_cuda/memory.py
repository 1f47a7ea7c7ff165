"""Memory: of the device, page-locked, registered in place, and plain."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from mmap import PAGESIZE
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime
from cupy.cuda.runtime import CUDARuntimeError

from noria.api import BufferUsage, DeviceBuffer, HostBuffer, Span, align_up
from noria.api.errors import OutOfDeviceMemory, PinnedMemoryError
from noria_cuda.errors import ALREADY_REGISTERED, OUT_OF_MEMORY, translate

if TYPE_CHECKING:
    from noria_cuda.device import CudaDevice

_PORTABLE = 1  # cudaHostAllocPortable, cudaHostRegisterPortable: for every device
_READ_ONLY = 8  # cudaHostRegisterReadOnly


class CudaDeviceBuffer(DeviceBuffer):
    """cudaMalloc."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label, usage)
        device.activate()
        try:
            self.ptr: int = runtime.malloc(nbytes)
        except CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise translate(device.info.id, error, f"allocating {label}") from error
            total = device.info.memory_nbytes
            raise OutOfDeviceMemory(device.info.id, label, nbytes, device.memory_free(), total) from error

    def _free(self) -> None:
        self.device.activate()
        try:
            runtime.free(self.ptr)
        except CUDARuntimeError as error:
            raise translate(self.device.info.id, error, f"freeing {self.label}") from error


class PinnedRange:
    """Page-locked memory of this process, unlocked once nobody uses it: pages can be locked once, for all devices."""

    _all: ClassVar[list[PinnedRange]] = []

    def __init__(self, ptr: int, nbytes: int, *, registered: bool) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.registered = registered
        self.n_user = 1
        self._all.append(self)

    @classmethod
    def alloc(cls, nbytes: int) -> PinnedRange:
        """New memory."""
        return cls(runtime.hostAlloc(nbytes, _PORTABLE), nbytes, registered=False)

    @classmethod
    def register(cls, ptr: int, nbytes: int, *, readonly: bool) -> PinnedRange:
        """Memory that exists; that which is locked already is shared."""
        for locked in cls._all:
            if locked.ptr <= ptr and ptr + nbytes <= locked.ptr + locked.nbytes:
                locked.n_user += 1
                return locked
        runtime.hostRegister(ptr, nbytes, _PORTABLE | (_READ_ONLY if readonly else 0))
        return cls(ptr, nbytes, registered=True)

    @classmethod
    def cuts(cls, ptr: int, nbytes: int) -> list[int]:
        """Where memory must be cut so that each piece is locked or is not: CUDA refuses to copy what is in between.

        Whole pages are locked, so a range has two places at each of its ends.
        """
        places = set()
        for locked in cls._all:
            end = locked.ptr + locked.nbytes
            places |= {locked.ptr, locked.ptr // PAGESIZE * PAGESIZE, end, align_up(end, PAGESIZE)}
        return sorted(place for place in places if ptr < place < ptr + nbytes)

    def release(self) -> None:
        self.n_user -= 1
        if self.n_user:
            return
        self._all.remove(self)
        if self.registered:
            runtime.hostUnregister(self.ptr)
        else:
            runtime.freeHost(self.ptr)


class CudaHostBuffer(HostBuffer):
    """Host memory that copies, and kernels where `caps.host_gather`, can reach at `ptr`."""

    device: CudaDevice

    def __init__(
        self,
        device: CudaDevice,
        array: npt.NDArray[np.uint8],
        label: str,
        locked: PinnedRange | None = None,
    ) -> None:
        super().__init__(device, array.size, label, pinned=locked is not None)
        self.ptr: int = array.ctypes.data
        self._array = array
        self._locked = locked

    @classmethod
    def alloc(cls, device: CudaDevice, nbytes: int, label: str) -> CudaHostBuffer:
        """New page-locked memory."""
        device.activate()
        try:
            locked = PinnedRange.alloc(nbytes)
        except CUDARuntimeError as error:
            raise _refused(device, nbytes, error) from error
        return cls(device, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(locked.ptr)), label, locked)

    @classmethod
    def register(cls, device: CudaDevice, memory: memoryview, label: str) -> CudaHostBuffer:
        """Memory that exists, page-locked where it is."""
        device.activate()
        array = np.frombuffer(memory, np.uint8)
        if memory.readonly and not device.registers_readonly:
            raise PinnedMemoryError(
                device.info.id, array.size, "this system cannot lock read-only memory", "Use --load-mode none."
            )
        try:
            locked = PinnedRange.register(array.ctypes.data, array.size, readonly=memory.readonly)
        except CUDARuntimeError as error:
            raise _refused(device, array.size, error) from error
        return cls(device, array, label, locked)

    @classmethod
    def wrap(cls, device: CudaDevice, memory: memoryview, label: str) -> CudaHostBuffer:
        """Memory that exists, as it is."""
        return cls(device, np.frombuffer(memory, np.uint8), label)

    def array(self) -> npt.NDArray[np.uint8]:
        return self._array

    def pieces(self, span: Span) -> list[tuple[int, int]]:
        """A span of this buffer as (offset in it, bytes) of what CUDA copies at once."""
        begin = self.ptr + span.offset
        if self._locked is not None:
            return [(0, span.nbytes)]
        places = [begin, *PinnedRange.cuts(begin, span.nbytes), begin + span.nbytes]
        return [(at - begin, end - at) for at, end in pairwise(places)]

    def _free(self) -> None:
        self._array = np.empty(0, np.uint8)  # lets go of the memory, so that a file can be unmapped
        if self._locked is None:
            return
        self.device.activate()
        try:
            self._locked.release()
        except CUDARuntimeError as error:
            raise translate(self.device.info.id, error, f"unlocking {self.label}") from error


def _refused(device: CudaDevice, nbytes: int, error: CUDARuntimeError) -> PinnedMemoryError:
    """Why memory was not locked. CuPy has cleared the error, so that no later call reports it again."""
    hint = "Use --load-mode none, or lock less."
    if error.status == OUT_OF_MEMORY:
        hint = "Free RAM or raise the limit of locked memory (ulimit -l, or that of the container)."
    elif error.status == ALREADY_REGISTERED:
        hint = "A part of it is locked already, by another library of this process."
    return PinnedMemoryError(device.info.id, nbytes, str(error), hint)
