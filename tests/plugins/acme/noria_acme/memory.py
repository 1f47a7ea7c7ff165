"""Buffers. Parts of a buffer are made by the core: a `Span` is a buffer, an offset and a size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from noria.api import ELEMENT_TYPES, BufferUsage, Device, DeviceBuffer, HostBuffer, Span, Tensor


class AcmeBuffer(DeviceBuffer):
    """Device memory; a real backend keeps a driver's handle here."""

    def __init__(self, device: Device, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label, usage)
        self.memory: npt.NDArray[np.uint8] = np.empty(nbytes, np.uint8)

    def _free(self) -> None:
        self.memory = np.empty(0, np.uint8)


class AcmeHostBuffer(HostBuffer):
    """Host memory. This device can copy from any, so nothing is page-locked."""

    def __init__(self, device: Device, label: str, memory: npt.NDArray[np.uint8]) -> None:
        super().__init__(device, memory.nbytes, label, pinned=False)
        self._memory = memory

    def array(self) -> npt.NDArray[np.uint8]:
        return self._memory

    def _free(self) -> None:
        self._memory = np.empty(0, np.uint8)


def device_bytes(span: Span) -> npt.NDArray[np.uint8]:
    """The bytes of a device span, without a copy."""
    assert isinstance(span.buffer, AcmeBuffer)  # the core hands a device only its own buffers
    return span.buffer.memory[span.offset : span.end]


def elements(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor of one of `ELEMENT_TYPES` as an array, without a copy."""
    return device_bytes(tensor.span).view(ELEMENT_TYPES[tensor.type]).reshape(tensor.shape)
