"""Memory: of the device, host memory that copies use best, and plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from noria.api import BufferUsage, DeviceBuffer, HostBuffer
from noria.api.errors import OutOfDeviceMemory, PinnedMemoryError
from noria_sycl.runtime import Bytes, translate

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice


class SyclDeviceBuffer(DeviceBuffer):
    """Device memory.

    Attributes:
        handle: what kernels and copies take.
    """

    device: SyclDevice

    def __init__(self, device: SyclDevice, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label, usage)
        free = device.memory_free()
        try:
            if nbytes > free:  # drivers promise more than they have, and fail when it is first used
                raise MemoryError
            self.handle: Any = device.runtime.alloc(nbytes)
        except MemoryError as error:
            raise OutOfDeviceMemory(device.info.id, label, nbytes, free, device.info.memory_nbytes) from error
        except device.runtime.errors as error:
            raise translate(device.info.id, error, f"allocating {label}") from error

    def _free(self) -> None:
        try:
            self.device.runtime.free(self.handle)
        except self.device.runtime.errors as error:
            raise translate(self.device.info.id, error, f"freeing {self.label}") from error


class SyclHostBuffer(HostBuffer):
    """Host memory.

    Attributes:
        handle: what kernels take where `caps.host_gather`; None for memory that they cannot read.
    """

    device: SyclDevice

    def __init__(self, device: SyclDevice, memory: Bytes, label: str, handle: Any = None) -> None:
        super().__init__(device, memory.size, label, pinned=handle is not None)
        self.handle = handle
        self._memory = memory

    @classmethod
    def alloc(cls, device: SyclDevice, nbytes: int, label: str) -> SyclHostBuffer:
        """New memory that the driver has locked, or that is the device's own."""
        try:
            handle, memory = device.runtime.alloc_host(nbytes)
        except MemoryError as error:
            hint = "Free RAM, or keep experts in the mapped file (--load-mode mmap)."
            raise PinnedMemoryError(device.info.id, nbytes, str(error), hint) from error
        return cls(device, memory, label, handle)

    @classmethod
    def share(cls, device: SyclDevice, memory: memoryview, label: str) -> SyclHostBuffer:
        """Memory that exists, which is the device's own: kernels read it where it is."""
        array = np.frombuffer(memory, np.uint8)
        try:
            handle = device.runtime.share_host(array)
        except MemoryError as error:
            raise PinnedMemoryError(device.info.id, array.size, str(error), "Use --load-mode none.") from error
        return cls(device, array, label, handle)

    @classmethod
    def wrap(cls, device: SyclDevice, memory: memoryview, label: str) -> SyclHostBuffer:
        """Memory that exists, as it is."""
        return cls(device, np.frombuffer(memory, np.uint8), label)

    def array(self) -> Bytes:
        return self._memory

    def _free(self) -> None:
        self._memory = np.empty(0, np.uint8)  # lets go of the memory, so that a file can be unmapped
        if self.handle is not None:
            handle, self.handle = self.handle, None
            try:
                self.device.runtime.free(handle)
            except self.device.runtime.errors as error:
                raise translate(self.device.info.id, error, f"freeing {self.label}") from error
