"""The backend and its device: what there is, what it can do, and how to open it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from noria.api import Backend, BufferUsage, Device, DeviceCaps, DeviceInfo, DeviceKind, ProbeResult, Queue, QueueKind
from noria.api.errors import BackendUnavailable, OutOfDeviceMemory
from noria_acme.kernels import AcmeKernels
from noria_acme.memory import AcmeBuffer, AcmeHostBuffer
from noria_acme.queue import AcmeQueue

# Say only what is true: the core decides by these what it may do. All else has the defaults of the least able device.
CAPS = DeviceCaps(blocking_submit=True, event_timing=True)


def device_info(options: Mapping[str, Any]) -> DeviceInfo:
    memory_nbytes = options["memory_mib"] * 1024 * 1024
    return DeviceInfo(backend="acme", index=0, name="Acme 1000", kind=DeviceKind.CPU, memory_nbytes=memory_nbytes)


class AcmeBackend(Backend):
    name = "acme"
    api_version = (0, 1)  # the version this was written for: a literal, not what the installed noria happens to have

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        # A real one looks for its driver here and answers ProbeResult(reason=..., hint=...) if there is none.
        return ProbeResult(devices=(device_info(options),))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        if index != 0:
            raise BackendUnavailable(self.name, f"there is no device acme{index}", "There is one: acme0.")
        return AcmeDevice(device_info(options), CAPS)


class AcmeDevice(Device):
    def __init__(self, info: DeviceInfo, caps: DeviceCaps) -> None:
        super().__init__(info, caps)
        self.kernels = AcmeKernels(self)

    def memory_free(self) -> int:
        return self.info.memory_nbytes - sum(self.allocated.values())

    def clock_sync(self) -> tuple[int, int]:
        now_ns = time.perf_counter_ns()
        return now_ns, now_ns  # its clock is the host's

    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> AcmeBuffer:
        free = self.memory_free()
        if nbytes > free:
            raise OutOfDeviceMemory(self.info.id, label, nbytes, free, self.info.memory_nbytes)
        return AcmeBuffer(self, nbytes, label, usage)

    def _alloc_host(self, nbytes: int, label: str) -> AcmeHostBuffer:
        return AcmeHostBuffer(self, label, np.empty(nbytes, np.uint8))

    def _wrap_host(self, memory: memoryview, label: str) -> AcmeHostBuffer:
        return AcmeHostBuffer(self, label, np.frombuffer(memory, np.uint8))

    def _make_queue(self, kind: QueueKind, index: int) -> Queue:
        return AcmeQueue(self, kind, index)

    def _close(self) -> None:
        pass  # a real one gives its context back here
