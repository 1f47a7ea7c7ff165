"""Backends and devices: what a plugin provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, ClassVar, Self, final

from noria.api.caps import DeviceCaps
from noria.api.errors import DeviceError, FeatureUnsupported, OutOfDeviceMemory
from noria.api.host_copy import HostCopier
from noria.api.kernels import Kernels
from noria.api.memory import Buffer, BufferUsage, CopyRegion, DeviceBuffer, HostBuffer
from noria.api.queue import Event, Observer, Queue, QueueKind


class DeviceKind(StrEnum):
    GPU = "gpu"
    INTEGRATED = "integrated"  # a GPU that shares the host's RAM
    CPU = "cpu"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is.

    Attributes:
        backend: name of its backend.
        index: its number there; `id` is the two together (`cuda0`).
        arch: the vendor's word for its generation (`sm_90`, `gfx1201`).
        memory_nbytes: all its memory.
    """

    backend: str
    index: int
    name: str
    kind: DeviceKind
    arch: str = ""
    driver: str = ""
    memory_nbytes: int = 0

    @property
    def id(self) -> str:
        return f"{self.backend}{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Answer of `Backend.probe`: devices, or the reason why there are none and what to do about it."""

    devices: tuple[DeviceInfo, ...] = ()
    reason: str = ""
    hint: str = ""

    @property
    def available(self) -> bool:
        return bool(self.devices)


class Backend(ABC):
    """One kind of devices. Made by the factory of a `BackendSpec`; making it imports no GPU library."""

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]]

    @abstractmethod
    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        """Find devices. Never raises, never hangs, leaves nothing open."""

    @abstractmethod
    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        """Open device `index`; `options` are those of the `BackendSpec`, complete with defaults.

        Raises:
            BackendUnavailable: there is no such device or it cannot be used.
        """


class Device(ABC):
    """An open device. A context manager; closing it frees everything that was allocated through it."""

    def __init__(self, info: DeviceInfo, caps: DeviceCaps) -> None:
        self.info = info
        self.caps = caps
        self.observer: Observer | None = None
        self.allocated: dict[BufferUsage, int] = dict.fromkeys(BufferUsage, 0)  # device bytes now, by usage
        self.allocated_peak = 0
        self._buffers: set[Buffer] = set()
        self._queues: dict[tuple[QueueKind, int], Queue] = {}
        self._host_copier: HostCopier | None = None
        self._closed = False

    kernels: Kernels

    # --- memory --------------------------------------------------------------------------------------------------

    @final
    def alloc(self, nbytes: int, *, usage: BufferUsage, label: str) -> DeviceBuffer:
        """Allocate device memory; its content is undefined.

        Raises:
            OutOfDeviceMemory: it does not fit, or is larger than one buffer may be.
        """
        self._check_open()
        if nbytes <= 0:
            raise DeviceError(self.info.id, f"cannot allocate {nbytes} bytes for {label}")
        if nbytes > self.caps.max_buffer_nbytes:
            raise OutOfDeviceMemory(
                self.info.id,
                label,
                nbytes,
                self.memory_free(),
                self.info.memory_nbytes,
                f"One buffer may have at most {self.caps.max_buffer_nbytes} bytes on this device.",
            )
        if self.caps.max_buffers is not None and len(self._buffers) >= self.caps.max_buffers:
            raise OutOfDeviceMemory(
                self.info.id,
                label,
                nbytes,
                self.memory_free(),
                self.info.memory_nbytes,
                f"At most {self.caps.max_buffers} buffers may live at once on this device.",
            )
        buffer = self._alloc(nbytes, usage, label)
        self._buffers.add(buffer)
        self.allocated[usage] += nbytes
        self.allocated_peak = max(self.allocated_peak, sum(self.allocated.values()))
        return buffer

    @final
    def alloc_host(self, nbytes: int, *, label: str) -> HostBuffer:
        """Allocate host memory, page-locked where `caps.pinned_host`.

        Raises:
            PinnedMemoryError: the system refused to lock it; never answered by a silent pageable buffer.
        """
        self._check_open()
        buffer = self._alloc_host(nbytes, label)
        self._buffers.add(buffer)
        return buffer

    @final
    def register_host(self, memory: memoryview, *, label: str) -> HostBuffer:
        """Page-lock memory that exists, such as a mapped file (`caps.host_register`), for as long as the buffer lives.

        The caller keeps `memory` mapped until after `free`. Memory that this backend has locked already, for another
        device, is locked once and serves both.

        Raises:
            FeatureUnsupported: without `caps.host_register`.
            PinnedMemoryError: the system refused.
        """
        self._check_open()
        if not self.caps.host_register:
            raise FeatureUnsupported(f"{self.info.id}: this device cannot page-lock existing memory")
        buffer = self._register_host(memory, label)
        self._buffers.add(buffer)
        return buffer

    @final
    def wrap_host(self, memory: memoryview, *, label: str) -> HostBuffer:
        """Make existing memory a source of copies without locking it: copies from it are slow and may block."""
        self._check_open()
        buffer = self._wrap_host(memory, label)
        self._buffers.add(buffer)
        return buffer

    @final
    def copy_host(self, regions: Sequence[CopyRegion], *, label: str = "host copy") -> Event:
        """Begin to copy inside host memory, beside the caller and all queues; what the event stands for.

        Nothing orders it but its event and the host: sources and targets are left alone until it is done.
        """
        self._check_open()
        return self._copy_host(regions, label)

    @abstractmethod
    def memory_free(self) -> int:
        """Bytes that can still be allocated, as the system sees it now."""

    def buffer_freed(self, buffer: Buffer) -> None:
        """Called by `Buffer.free`."""
        self._buffers.discard(buffer)
        if isinstance(buffer, DeviceBuffer):
            self.allocated[buffer.usage] -= buffer.nbytes

    # --- queues --------------------------------------------------------------------------------------------------

    @final
    def queue(self, kind: QueueKind, index: int = 0) -> Queue:
        """The queue of this kind and number; always the same object. Without copy queues, COPY is the compute queue."""
        self._check_open()
        if kind is QueueKind.COPY and index >= self.caps.copy_queues:
            if self.caps.copy_queues:
                raise DeviceError(self.info.id, f"there are {self.caps.copy_queues} copy queues, not {index + 1}")
            kind, index = QueueKind.COMPUTE, 0
        if (kind, index) not in self._queues:
            self._queues[kind, index] = self._make_queue(kind, index)
        return self._queues[kind, index]

    @abstractmethod
    def clock_sync(self) -> tuple[int, int]:
        """(host ns, device ns of `Event.timestamp_ns`) of one moment, to align timelines.

        Host time is `time.perf_counter_ns`, or virtual where the device's clock is.
        """

    # --- life ----------------------------------------------------------------------------------------------------

    @final
    def close(self) -> None:
        """Wait for all queues, free all buffers, release the device; a second call does nothing."""
        if self._closed:
            return
        try:
            if self._host_copier is not None:
                self._host_copier.close()
            for queue in self._queues.values():
                with suppress(DeviceError):  # whoever waits for its events has been told
                    queue.synchronize()
            for buffer in list(self._buffers):
                with suppress(DeviceError):  # a lost device frees nothing, and there is nothing left to free
                    buffer.free()
        finally:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(self.info.id, "the device has been closed")

    # --- the backend's part --------------------------------------------------------------------------------------

    @abstractmethod
    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> DeviceBuffer: ...

    @abstractmethod
    def _alloc_host(self, nbytes: int, label: str) -> HostBuffer: ...

    def _register_host(self, memory: memoryview, label: str) -> HostBuffer:
        raise FeatureUnsupported(f"{self.info.id}: this device cannot page-lock existing memory")

    @abstractmethod
    def _wrap_host(self, memory: memoryview, label: str) -> HostBuffer: ...

    def _copy_host(self, regions: Sequence[CopyRegion], label: str) -> Event:
        """By threads of the core; a device on a clock of its own has another way."""
        if self._host_copier is None:
            self._host_copier = HostCopier(self.info.id)
        return self._host_copier.copy(regions, label)

    @abstractmethod
    def _make_queue(self, kind: QueueKind, index: int) -> Queue: ...

    @abstractmethod
    def _close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option of a backend in plugins.toml. The type of a value is that of the default.

    Attributes:
        default: used when nothing is set.
        help: one line.
        choices: all allowed values, if they are few.
    """

    default: bool | int | float | str
    help: str
    choices: tuple[str, ...] = field(default=())
