"""Memory of the reference device: NumPy arrays of bytes, "device" and host alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from noria.api import BufferUsage, DeviceBuffer, HostBuffer, Span
from noria.api.errors import DeviceError

if TYPE_CHECKING:
    from noria.api import Device

_ALIGNMENT = 64  # a cache line


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that take RAM page by page when they are first written."""
    memory = np.empty(nbytes + _ALIGNMENT - 1, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + nbytes]


class ReferenceDeviceBuffer(DeviceBuffer):
    """Device memory.

    Attributes:
        version: grows with every write, so that what was computed from the content is known to be out of date.
    """

    def __init__(self, device: Device, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label, usage)
        self.version = 0
        self._bytes: npt.NDArray[np.uint8] | None = aligned_empty(nbytes)

    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as bytes, [nbytes]."""
        if self._bytes is None:
            raise DeviceError(self.device.info.id, f"{self!r} is used after it was freed")
        return self._bytes

    def _free(self) -> None:
        self._bytes = None


class ReferenceHostBuffer(HostBuffer):
    """Host memory, allocated or somebody else's. Nothing refers to it any more after `free`."""

    def __init__(self, device: Device, array: npt.NDArray[np.uint8], label: str, pinned: bool) -> None:
        super().__init__(device, array.nbytes, label, pinned)
        self._bytes: npt.NDArray[np.uint8] | None = array

    def array(self) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            raise DeviceError(self.device.info.id, f"{self!r} is used after it was freed")
        return self._bytes

    def _free(self) -> None:
        self._bytes = None


def span_bytes(span: Span) -> npt.NDArray[np.uint8]:
    """The bytes of a span, [nbytes], without a copy."""
    buffer = span.buffer
    if not isinstance(buffer, ReferenceDeviceBuffer | ReferenceHostBuffer):
        raise DeviceError(buffer.device.info.id, f"{buffer!r} is not memory of the reference backend")
    return buffer.array()[span.offset : span.end]


def span_view(span: Span, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A span as a 1-D array of `dtype`, without a copy."""
    return span_bytes(span).view(dtype)
