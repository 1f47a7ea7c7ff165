"""Memory of a simulated device: device memory is only counted, host memory is real but takes RAM when it is touched.

One thing that kernels write is known all the same: how they sort rows by expert, for the host may read that.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from noria.api.memory import BufferUsage, DeviceBuffer, HostBuffer, Span

if TYPE_CHECKING:
    from noria.api.backend import Device

# Pages of such a mapping count against neither RAM nor the overcommit limit before they are written, so the experts of
# a large model can be "page-locked" on a small machine. Linux; Python 3.11 has no name for the flag.
_MAP_NORESERVE = 0x4000


class SimDeviceBuffer(DeviceBuffer):
    """So many bytes of the device; there is nothing behind them.

    Attributes:
        known: the content of the few spans whose content is known.
    """

    def __init__(self, device: Device, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label, usage)
        self.known: dict[Span, npt.NDArray[np.uint8]] = {}

    def _free(self) -> None:
        return None


class SimHostBuffer(HostBuffer):
    """A view of host memory. Copies from the device leave it as it is, but for what is `known`."""

    def __init__(self, device: Device, memory: memoryview, label: str, pinned: bool) -> None:
        super().__init__(device, memory.nbytes, label, pinned)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)

    def array(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise ValueError(f"{self!r} has been freed")
        return self._array

    def _free(self) -> None:
        self._array = None


def lazy_memory(nbytes: int) -> memoryview:
    """Zeroed memory that takes RAM page by page when it is first written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return memoryview(mmap.mmap(-1, nbytes, flags=flags))
