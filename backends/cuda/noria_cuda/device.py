"""An open CUDA device."""

from __future__ import annotations

import time
from contextlib import suppress

from cupy.cuda import runtime
from cupy.cuda.runtime import CUDARuntimeError

from noria.api import BufferUsage, Device, DeviceCaps, DeviceInfo, DeviceKind, Queue, QueueKind
from noria_cuda.errors import CUDA_ERRORS, translate
from noria_cuda.kernels import CudaKernels
from noria_cuda.launch import TABLE_UNIT, Launcher, Limits
from noria_cuda.memory import CudaDeviceBuffer, CudaHostBuffer
from noria_cuda.queue import CudaQueue

_REBASE_NS = 10_000_000_000


class CudaDevice(Device):
    """A GPU, by its primary context: nothing of it is global, so a process may open it twice.

    Attributes:
        ordinal: CUDA's number for it.
        limits: what kernels are chosen by.
        launch: launches its kernels.
        registers_readonly: whether read-only memory can be page-locked.
    """

    kernels: CudaKernels

    def __init__(self, info: DeviceInfo, ordinal: int, *, dependent_launch: bool = True) -> None:
        self.ordinal = ordinal
        self.limits = Limits.of(ordinal, dependent_launch=dependent_launch)
        self.registers_readonly = bool(_attribute(ordinal, "HostRegisterReadOnlySupported"))
        super().__init__(info, _caps(info, ordinal, self.limits))
        self.activate()
        self._events: list[int] = []  # handles that nobody uses
        self._clock = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        self._base, self._base_ns = self._stamp(), 0
        self.launch = Launcher(info.id, self.limits)
        self.kernels = CudaKernels(self)

    def activate(self) -> None:
        """Make it the calling thread's device, as every call needs that makes or uses something on it."""
        try:
            runtime.setDevice(self.ordinal)
        except CUDARuntimeError as error:
            raise translate(self.info.id, error, "using the device") from error

    # --- memory --------------------------------------------------------------------------------------------------

    def memory_free(self) -> int:
        self.activate()
        try:
            return int(runtime.memGetInfo()[0])
        except CUDARuntimeError as error:
            raise translate(self.info.id, error, "asking for free memory") from error

    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> CudaDeviceBuffer:
        return CudaDeviceBuffer(self, nbytes, label, usage)

    def _alloc_host(self, nbytes: int, label: str) -> CudaHostBuffer:
        return CudaHostBuffer.alloc(self, nbytes, label)

    def _register_host(self, memory: memoryview, label: str) -> CudaHostBuffer:
        return CudaHostBuffer.register(self, memory, label)

    def _wrap_host(self, memory: memoryview, label: str) -> CudaHostBuffer:
        return CudaHostBuffer.wrap(self, memory, label)

    # --- queues and time -----------------------------------------------------------------------------------------

    def _make_queue(self, kind: QueueKind, index: int) -> Queue:
        return CudaQueue(self, kind, index)

    def take_event(self) -> int:
        """The handle of an event, from the pool or new."""
        if self._events:
            return self._events.pop()
        self.activate()
        try:
            handle: int = runtime.eventCreateWithFlags(runtime.eventDefault)
        except CUDARuntimeError as error:
            raise translate(self.info.id, error, "making an event") from error
        return handle

    def give_event(self, handle: int) -> None:
        """Back to the pool. Waits for it that are enqueued are not affected by recording it again."""
        if self._closed:
            with suppress(*CUDA_ERRORS):
                runtime.eventDestroy(handle)
        else:
            self._events.append(handle)

    def time_ns(self, handle: int) -> int:
        """When a done event was recorded, on the device's clock."""
        return int(self._base_ns + round(runtime.eventElapsedTime(self._base, handle) * 1e6))

    def clock_sync(self) -> tuple[int, int]:
        self.activate()
        handle = self._stamp()
        now_ns, at_ns = time.perf_counter_ns(), self.time_ns(handle)
        if at_ns - self._base_ns > _REBASE_NS:  # CUDA gives f32 milliseconds: the further away, the coarser
            self._base, handle, self._base_ns = handle, self._base, at_ns
        self.give_event(handle)
        return now_ns, at_ns

    def _stamp(self) -> int:
        """The handle of an event that is done now."""
        handle = self.take_event()
        try:
            runtime.eventRecord(handle, self._clock)
            runtime.eventSynchronize(handle)
        except CUDARuntimeError as error:
            raise translate(self.info.id, error, "reading the clock") from error
        return handle

    def _close(self) -> None:
        for queue in self._queues.values():
            assert isinstance(queue, CudaQueue)
            queue.close()
        with suppress(*CUDA_ERRORS):
            runtime.streamDestroy(self._clock)
        for handle in (*self._events, self._base):
            self.give_event(handle)
        self._events.clear()


def _caps(info: DeviceInfo, ordinal: int, limits: Limits) -> DeviceCaps:
    n_copy_engine = _attribute(ordinal, "AsyncEngineCount")
    return DeviceCaps(
        async_copy=n_copy_engine > 0,
        copy_queues=min(2, n_copy_engine),
        device_wait=True,
        event_timing=True,
        pinned_host=True,
        host_register=bool(_attribute(ordinal, "HostRegisterSupported")),
        host_gather=bool(_attribute(ordinal, "CanUseHostPointerForRegisteredMem")),
        unified_memory=info.kind is DeviceKind.INTEGRATED,
        programs=True,
        activation_type="BF16" if limits.sm >= 80 else "F16",  # the range of f32 where matrix units take it
        kv_types=("F16", "Q8_0", "Q4_0"),
        table_unit=TABLE_UNIT,
        copy_alignment=1,
        buffer_alignment=256,
    )


def _attribute(ordinal: int, name: str) -> int:
    return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), ordinal))
