"""Queues and events of a simulated device.

When a call enqueues work, everything that it waits for has a known time already. So its own times are fixed at once: it
begins when the host has made the call, the queue's earlier work and waits are over, and the engine it needs is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria.api.errors import DeviceTimeout
from noria.api.memory import Buffer, CopyRegion, HostBuffer, Span
from noria.api.queue import Event, Queue, QueueKind
from noria.builtin.sim.clock import Lane
from noria.builtin.sim.memory import SimDeviceBuffer

if TYPE_CHECKING:
    from noria.builtin.sim.backend import SimDevice
    from noria.builtin.sim.kernels import Cost


@dataclass(frozen=True, slots=True)
class Work:
    """One copy or kernel, and when it ran."""

    label: str
    start_ns: int
    end_ns: int


class SimEvent(Event):
    """A moment on the virtual clock, known from the start; the host sees it when its own time has come there."""

    def __init__(self, device: SimDevice, label: str, time_ns: int) -> None:
        self.device = device
        self.label = label
        self.time_ns = time_ns

    def done(self) -> bool:
        clock = self.device.clock
        if clock.now_ns < self.time_ns:
            clock.advance(self.device.host_call_ns)  # asking takes time, so a host that polls gets there
            return False
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        clock = self.device.clock
        if timeout_s is not None and clock.now_ns + timeout_s * 1e9 < self.time_ns:
            clock.advance(int(timeout_s * 1e9))
            raise DeviceTimeout(self.device.info.id, f"event '{self.label}' is not done after {timeout_s} s")
        clock.advance_to(self.time_ns)

    def timestamp_ns(self) -> int | None:
        if not self.device.caps.event_timing or self.device.clock.now_ns < self.time_ns:
            return None
        return self.time_ns


class SimQueue(Queue):
    """An in-order queue.

    Attributes:
        log: everything that was enqueued, in order.
        tail_ns: when all of it, and all that was waited for, is over.
    """

    device: SimDevice

    def __init__(self, device: SimDevice, kind: QueueKind, index: int) -> None:
        super().__init__(device, kind, index)
        self.log: list[Work] = []
        self.tail_ns = 0

    def execute(self, label: str, cost: Cost) -> None:
        """Enqueue a kernel."""
        device = self.device
        device.host_call()
        start = max(device.clock.now_ns, self.tail_ns)
        duration = device.jittered(device.profile.kernel_ns(cost.flops, cost.nbytes))
        if cost.link_nbytes:
            _, gathered = device.h2d.reserve(start, device.jittered(cost.link_nbytes / device.profile.gather_gbps))
            duration = max(duration, gathered - start)
        self._append(label, *device.compute.reserve(start, duration))
        if device.profile.blocking_submit == "compute":
            device.clock.advance_to(self.tail_ns)

    def _synchronize(self) -> None:
        self.device.clock.advance_to(self.tail_ns)

    def _delay(self, duration_ns: int) -> None:
        self.device.host_call()
        start = max(self.device.clock.now_ns, self.tail_ns)
        self._append("delay", start, start + duration_ns)

    def _append(self, label: str, start_ns: int, end_ns: int) -> None:
        self.log.append(Work(label, start_ns, end_ns))
        self.tail_ns = end_ns

    def _copy_over_link(self, label: str, lane: Lane, host: Buffer, nbytes: int, pinned_ns: float) -> None:
        device = self.device
        device.host_call()
        pinned = isinstance(host, HostBuffer) and host.pinned
        earliest = max(device.clock.now_ns + device.copy_latency_ns, self.tail_ns)
        duration = device.jittered(pinned_ns if pinned else nbytes / device.profile.pageable_gbps)
        self._append(label, *lane.reserve(earliest, duration))
        if not pinned or device.profile.blocking_submit == "copy":
            device.clock.advance_to(self.tail_ns)

    def _copy_h2d(self, regions: Sequence[CopyRegion]) -> None:
        for region in regions:
            nbytes = region.src.nbytes
            self._copy_over_link("h2d", self.device.h2d, region.src.buffer, nbytes, self.device.profile.h2d_ns(nbytes))

    def _copy_d2h(self, dst: Span, src: Span) -> None:
        nbytes = src.nbytes
        self._copy_over_link("d2h", self.device.d2h, dst.buffer, nbytes, nbytes / self.device.profile.d2h_gbps)
        if isinstance(src.buffer, SimDeviceBuffer):
            for span, content in src.buffer.known.items():
                if src.offset <= span.offset and span.end <= src.end:
                    dst.host_view()[span.offset - src.offset : span.end - src.offset] = content

    def _copy_d2d(self, dst: Span, src: Span) -> None:
        device = self.device
        device.host_call()
        start = max(device.clock.now_ns, self.tail_ns)
        self._append("d2d", start, start + device.jittered(2 * src.nbytes / device.profile.memory_gbps))

    def _record(self, label: str) -> Event:
        self.device.host_call()
        return SimEvent(self.device, label, max(self.device.clock.now_ns, self.tail_ns))

    def _wait(self, event: Event) -> None:
        self.device.host_call()
        if self.device.caps.device_wait and isinstance(event, SimEvent) and event.device.clock is self.device.clock:
            self.tail_ns = max(self.tail_ns, event.time_ns)
        else:
            event.wait()
