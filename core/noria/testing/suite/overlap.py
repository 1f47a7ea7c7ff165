"""Overlap: what a device claims to do at the same time really happens at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from noria.api import BufferUsage, Device, Event, Queue, QueueKind
from noria.testing.bench import busy
from noria.testing.fixtures import ConformanceSuite

MIB = 1 << 20
LONG_MS = 200.0


class OverlapSuite(ConformanceSuite):
    """A busy queue does not hold up the others, nor the host.

    One queue is kept busy by a delay, so the outcome does not depend on how fast anything is.
    """

    @pytest.fixture
    def overlapping(self, device: Device) -> Device:
        """The device under test, if it claims that anything overlaps."""
        if not (device.caps.async_copy and device.caps.copy_queues):
            pytest.skip("caps.async_copy is False or caps.copy_queues is 0: nothing overlaps")
        return device

    def test_copies_pass_a_busy_compute_queue(self, overlapping: Device) -> None:
        """Copies to the device and back are done while the compute queue is busy."""
        compute, copy = overlapping.queue(QueueKind.COMPUTE), overlapping.queue(QueueKind.COPY)
        self.passes(overlapping, compute, copy, self.copies(overlapping, copy))

    def test_compute_passes_a_busy_copy_queue(self, overlapping: Device) -> None:
        """The compute queue works while the copy queue is busy."""
        compute, copy = overlapping.queue(QueueKind.COMPUTE), overlapping.queue(QueueKind.COPY)
        self.passes(overlapping, copy, compute, self.copies(overlapping, compute))

    def test_copy_queues_pass_each_other(self, overlapping: Device) -> None:
        """Of several copy queues none is held up by another."""
        if overlapping.caps.copy_queues < 2:
            pytest.skip("there is one copy queue")
        first, second = overlapping.queue(QueueKind.COPY, 0), overlapping.queue(QueueKind.COPY, 1)
        self.passes(overlapping, first, second, self.copies(overlapping, second))
        self.passes(overlapping, second, first, self.copies(overlapping, first))

    def test_host_is_not_held_up(self, overlapping: Device) -> None:
        """Copies behind a busy queue are enqueued at once."""
        if overlapping.caps.blocking_submit:
            pytest.skip("caps.blocking_submit is True: enqueuing may block")
        copy = overlapping.queue(QueueKind.COPY)
        submit = self.copies(overlapping, copy)
        busy(copy, LONG_MS)
        start = time.monotonic()
        submit()
        event = copy.record()
        assert (time.monotonic() - start) * 1e3 < LONG_MS / 2
        assert not event.done()
        event.wait()

    def test_a_long_copy_overlaps_compute(self, overlapping: Device) -> None:
        """On the device's own clock a copy of many megabytes and work on the compute queue share their time."""
        if not overlapping.caps.event_timing:
            pytest.skip("caps.event_timing is False")
        compute, copy = overlapping.queue(QueueKind.COMPUTE), overlapping.queue(QueueKind.COPY)
        dst = overlapping.alloc(64 * MIB, usage=BufferUsage.SLOT, label="overlap")
        src = overlapping.alloc_host(64 * MIB, label="overlap")
        begin = [q.record("begin") for q in (compute, copy)]
        copy.copy_h2d(dst.span(), src.span())
        busy(compute, LONG_MS)
        end = [q.record("end") for q in (compute, copy)]
        for event in end:
            event.wait()
        starts, ends = ([e.timestamp_ns() or 0 for e in events] for events in (begin, end))
        shared = min(ends) - max(starts)
        shorter = min(e - s for s, e in zip(starts, ends, strict=True))
        assert shared > 0.5 * shorter

    def passes(self, device: Device, blocked: Queue, other: Queue, submit: Callable[[], None]) -> None:
        """Assert that what `submit` enqueues on `other` is done while `blocked` is busy."""
        if device.caps.blocking_submit:
            pytest.skip("caps.blocking_submit is True: a busy queue may be a busy host")
        busy(blocked, LONG_MS)
        held: Event = blocked.record("busy")
        submit()
        event = other.record("passing")
        event.wait()
        assert not held.done(), f"{other.name} was done no sooner than {blocked.name}"
        held.wait()
        if device.caps.event_timing:
            assert (event.timestamp_ns() or 0) < (held.timestamp_ns() or 0)

    def copies(self, device: Device, queue: Queue) -> Callable[[], None]:
        """A round trip of a megabyte on `queue`, allocated now and enqueued by the result."""
        buffer = device.alloc(MIB, usage=BufferUsage.SLOT, label="overlap")
        host = device.alloc_host(MIB, label="overlap")

        def submit() -> None:
            queue.copy_h2d(buffer.span(), host.span())
            queue.copy_d2h(host.span(), buffer.span())

        return submit
