"""An open device."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

from noria.api import BufferUsage, Device, DeviceCaps, DeviceInfo, DeviceKind, Queue, QueueKind
from noria_sycl.kernels import KV_TYPES, TABLE_UNIT, SyclKernels
from noria_sycl.memory import SyclDeviceBuffer, SyclHostBuffer
from noria_sycl.programs import Programs
from noria_sycl.queue import SyclQueue
from noria_sycl.runtime import Kernel, Limits, Runtime, translate

_CALIBRATION_TURNS = 1_000_000


class SyclDevice(Device):
    """A device, by a context of its own: nothing of it is global, so a process may open it twice.

    Attributes:
        runtime: the library that reaches it.
        programs: its kernels.
    """

    kernels: SyclKernels

    def __init__(self, info: DeviceInfo, runtime: Runtime, *, in_place: bool = True) -> None:
        super().__init__(info, _caps(info, runtime, in_place))
        self.runtime = runtime
        self.programs = Programs(info.id, f"{info.name}, {info.driver}", runtime)
        try:
            self._clock = runtime.queue(copies=False)
            self._clock_word = runtime.alloc(4)
        except runtime.errors as error:
            raise translate(info.id, error, "opening the device") from error
        self.kernels = SyclKernels(self)

    @property
    def limits(self) -> Limits:
        """What kernels are chosen by."""
        return self.runtime.limits

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Kernel:
        """Kernel `name` of cl/`file`.cl, built with `options`; always the same object.

        Raises:
            KernelBuildError: it does not compile.
        """
        return self.programs.kernel(file, name, options)

    # --- memory --------------------------------------------------------------------------------------------------

    def memory_free(self) -> int:
        return max(0, self.info.memory_nbytes - sum(self.allocated.values()))  # OpenCL tells nothing else

    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> SyclDeviceBuffer:
        return SyclDeviceBuffer(self, nbytes, label, usage)

    def _alloc_host(self, nbytes: int, label: str) -> SyclHostBuffer:
        return SyclHostBuffer.alloc(self, nbytes, label)

    def _register_host(self, memory: memoryview, label: str) -> SyclHostBuffer:
        return SyclHostBuffer.share(self, memory, label)

    def _wrap_host(self, memory: memoryview, label: str) -> SyclHostBuffer:
        return SyclHostBuffer.wrap(self, memory, label)

    # --- queues and time -----------------------------------------------------------------------------------------

    def _make_queue(self, kind: QueueKind, index: int) -> Queue:
        return SyclQueue(self, kind, index)

    def clock_sync(self) -> tuple[int, int]:
        try:
            event = self._clock.copy_h2d(self._clock_word, 0, np.zeros(4, np.uint8), ())
            self._clock.finish()
            now_ns = time.perf_counter_ns()
            return now_ns, self.runtime.end_ns(event) or 0
        except self.runtime.errors as error:
            raise translate(self.info.id, error, "reading the clock") from error

    # --- delays --------------------------------------------------------------------------------------------------

    @cached_property
    def delay_kernel(self) -> Kernel:
        """Keeps a queue busy for a number of turns."""
        return self.kernel("delay", "delay")

    @property
    def delay_sink(self) -> Any:
        """Handle of a word that nothing is written to."""
        return self._clock_word

    @cached_property
    def turns_per_ns(self) -> float:
        """How fast `delay_kernel` turns."""
        took_ns = []
        for _ in range(3):
            bound = self.delay_kernel.bind([self.delay_sink, np.uint64(_CALIBRATION_TURNS)], keep=False)
            start = time.perf_counter_ns()
            self._clock.launch(bound, (1,), (1,), ())
            self._clock.finish()
            took_ns.append(time.perf_counter_ns() - start)
        return _CALIBRATION_TURNS / min(took_ns)

    def _close(self) -> None:
        self.runtime.close()


def _caps(info: DeviceInfo, runtime: Runtime, in_place: bool) -> DeviceCaps:
    return DeviceCaps(
        async_copy=True,
        copy_queues=1,
        device_wait=True,
        blocking_submit=runtime.blocking_copies,
        event_timing=True,
        pinned_host=True,
        host_register=runtime.shares_host,
        host_gather=runtime.reads_host and in_place,
        unified_memory=info.kind is not DeviceKind.GPU and in_place,
        activation_type="F32",
        kv_types=KV_TYPES,
        table_unit=TABLE_UNIT,
        copy_alignment=1,
        buffer_alignment=256,
        max_buffer_nbytes=runtime.max_buffer_nbytes,
    )
