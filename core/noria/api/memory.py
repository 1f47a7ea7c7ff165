"""Memory that copies and kernels work on: buffers, and spans of them.

A backend subclasses `DeviceBuffer` and `HostBuffer`; everything else here is the same for all. A sub-range is a `Span`
made by the core, so a backend never implements views.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from noria.api.errors import TransferError

if TYPE_CHECKING:
    from noria.api.backend import Device


class BufferUsage(StrEnum):
    """What a device buffer is for: plan and counters add up by it, a backend may choose a memory type by it."""

    WEIGHTS = "weights"
    EXPERTS = "experts"  # resident experts
    SLOT = "slot"  # of the prefetch ring
    CACHE = "cache"  # expert cache
    KV = "kv"
    COMPUTE = "compute"  # activations, scratch, tables, logits


class Buffer(ABC):
    """A range of memory that belongs to one device's context. Freed by `free`, or with its device."""

    def __init__(self, device: Device, nbytes: int, label: str) -> None:
        self.device = device
        self.nbytes = nbytes
        self.label = label
        self.freed = False

    def span(self, offset: int = 0, nbytes: int | None = None) -> Span:
        """The bytes `[offset, offset + nbytes)`; to the end of the buffer by default."""
        return Span(self, offset, self.nbytes - offset if nbytes is None else nbytes)

    def free(self) -> None:
        """Give the memory back; a second call does nothing. The caller has waited for all work that uses it."""
        if not self.freed:
            self.freed = True
            self._free()
            self.device.buffer_freed(self)

    @abstractmethod
    def _free(self) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {self.nbytes} B, {self.device.info.id})"


class DeviceBuffer(Buffer):
    """Memory that the device's kernels read and write."""

    def __init__(self, device: Device, nbytes: int, label: str, usage: BufferUsage) -> None:
        super().__init__(device, nbytes, label)
        self.usage = usage


class HostBuffer(Buffer):
    """Host memory that the device can copy from and to.

    Attributes:
        pinned: the pages are locked (allocated so, or registered in place).
    """

    def __init__(self, device: Device, nbytes: int, label: str, pinned: bool) -> None:
        super().__init__(device, nbytes, label)
        self.pinned = pinned

    @abstractmethod
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as bytes, [nbytes]; valid until `free`. Read-only if the registered memory is."""


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes of `buffer` from `offset`. Does not keep the memory allocated."""

    buffer: Buffer
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0 or self.offset + self.nbytes > self.buffer.nbytes:
            raise TransferError(
                self.buffer.device.info.id,
                f"span [{self.offset}, {self.offset + self.nbytes}) lies outside {self.buffer!r}",
            )

    def sub(self, offset: int, nbytes: int) -> Span:
        """A span inside this one; `offset` counts from its start."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise TransferError(
                self.buffer.device.info.id,
                f"[{offset}, {offset + nbytes}) lies outside a span of {self.nbytes} bytes of {self.buffer!r}",
            )
        return Span(self.buffer, self.offset + offset, nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Span) -> bool:
        """Whether the two share a byte."""
        return self.buffer is other.buffer and self.offset < other.end and other.offset < self.end

    def host_view(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """The bytes of a host span as a 1-D array of `dtype`, without a copy."""
        if not isinstance(self.buffer, HostBuffer):
            raise TransferError(self.buffer.device.info.id, f"{self.buffer!r} is not host memory")
        return self.buffer.array()[self.offset : self.end].view(dtype)


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """One host-to-device copy of a batch. Both spans have the same size."""

    dst: Span
    src: Span


def align_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit
