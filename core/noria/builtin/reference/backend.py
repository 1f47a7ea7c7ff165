"""The reference backend and its device: the CPU, looked at as if it were a GPU with memory of its own."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from noria.api import (
    API_VERSION,
    Backend,
    Buffer,
    BufferUsage,
    Device,
    DeviceCaps,
    DeviceInfo,
    DeviceKind,
    OptionSpec,
    ProbeResult,
    QueueKind,
)
from noria.api.errors import MIB, BackendUnavailable, ConfigError, OutOfDeviceMemory, PinnedMemoryError
from noria.api.queue import Queue
from noria.builtin.reference.kernels import ReferenceKernels
from noria.builtin.reference.memory import (
    ReferenceDeviceBuffer,
    ReferenceHostBuffer,
    aligned_empty,
)
from noria.builtin.reference.queue import ReferenceQueue
from noria.builtin.reference.threads import single_threaded_blas
from noria.experts.host_memory import available_memory_nbytes, machine_memory_nbytes

OPTIONS: dict[str, OptionSpec] = {
    "memory_mib": OptionSpec(default=0, help="MiB of device memory, a hard limit (0 = as much as the machine has RAM)"),
    "copy_queues": OptionSpec(default=1, help="copy queues beside the compute queue"),
    "device_wait": OptionSpec(default=True, help="a queue waits for another's event without the host"),
    "host_gather": OptionSpec(default=True, help="ops may read experts from host memory"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check the values of options.

    Raises:
        ConfigError: one makes no sense; the text begins with its name.
    """
    for name in ("memory_mib", "copy_queues"):
        if options[name] < 0:
            raise ConfigError(f"{name}: must be 0 or more, not {options[name]}.")


class ReferenceBackend(Backend):
    """One device: this machine's CPU."""

    name = "reference"
    api_version = API_VERSION

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        return ProbeResult(devices=(_info(options),))

    def open(self, index: int, options: Mapping[str, Any]) -> ReferenceDevice:
        if index:
            raise BackendUnavailable(self.name, f"there is no device {self.name}{index}", f"Use {self.name}0.")
        check_options(options)
        caps = DeviceCaps(
            async_copy=options["copy_queues"] > 0,
            copy_queues=options["copy_queues"],
            device_wait=options["device_wait"],
            event_timing=True,
            pinned_host=True,
            host_register=True,
            host_gather=options["host_gather"],
            kv_types=("F32", "F16", "Q8_0", "Q4_0"),
            copy_alignment=1,
            buffer_alignment=64,
        )
        return ReferenceDevice(_info(options), caps)


class ReferenceDevice(Device):
    """The CPU. Device memory is RAM that is counted apart, and each queue is a thread."""

    kernels: ReferenceKernels

    def __init__(self, info: DeviceInfo, caps: DeviceCaps) -> None:
        super().__init__(info, caps)
        single_threaded_blas.acquire()
        self.kernels = ReferenceKernels(self)
        # RAM is taken when pages are first written, so what is available now says nothing of what has been promised.
        self._limit = min(info.memory_nbytes, available_memory_nbytes() - self.kernels.weights.budget_nbytes)

    def memory_free(self) -> int:
        return max(0, min(self._limit - sum(self.allocated.values()), available_memory_nbytes()))

    def buffer_freed(self, buffer: Buffer) -> None:
        super().buffer_freed(buffer)
        self.kernels.weights.forget(buffer)

    def clock_sync(self) -> tuple[int, int]:
        now_ns = time.perf_counter_ns()
        return now_ns, now_ns

    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> ReferenceDeviceBuffer:
        try:
            if nbytes <= self.memory_free():
                return ReferenceDeviceBuffer(self, nbytes, label, usage)
        except MemoryError:
            pass
        raise OutOfDeviceMemory(self.info.id, label, nbytes, self.memory_free(), self.info.memory_nbytes)

    def _alloc_host(self, nbytes: int, label: str) -> ReferenceHostBuffer:
        try:
            return ReferenceHostBuffer(self, aligned_empty(nbytes), label, pinned=True)
        except MemoryError as error:
            raise PinnedMemoryError(self.info.id, nbytes, f"the system has no memory for {label}") from error

    def _register_host(self, memory: memoryview, label: str) -> ReferenceHostBuffer:
        return ReferenceHostBuffer(self, np.frombuffer(memory, np.uint8), label, pinned=True)

    def _wrap_host(self, memory: memoryview, label: str) -> ReferenceHostBuffer:
        return ReferenceHostBuffer(self, np.frombuffer(memory, np.uint8), label, pinned=False)

    def _make_queue(self, kind: QueueKind, index: int) -> Queue:
        return ReferenceQueue(self, kind, index)

    def _close(self) -> None:
        for queue in self._queues.values():
            assert isinstance(queue, ReferenceQueue)
            queue.stop()
        single_threaded_blas.release()


def _info(options: Mapping[str, Any]) -> DeviceInfo:
    return DeviceInfo(
        backend=ReferenceBackend.name,
        index=0,
        name=_cpu_name(),
        kind=DeviceKind.CPU,
        arch=platform.machine(),
        driver=f"NumPy {np.__version__}",
        memory_nbytes=options["memory_mib"] * MIB or machine_memory_nbytes(),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "CPU"
