"""Queues and events: what runs after what, and what the host can see of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Buffer, BufferUsage, Device, DeviceBuffer, DeviceKind, Event, HostBuffer, Queue, QueueKind
from noria.api.errors import DeviceError, DeviceTimeout
from noria.testing.bench import Bench, all_queues, busy, delay
from noria.testing.fixtures import ConformanceSuite, find_backend

DELAY_MS = 100.0
CLOCK_SLACK_NS = 5_000_000  # error allowed to `clock_sync`


class Graph:
    """Random copies on all queues of a device, with the waits that make their order that of the host's calls.

    A step writes new bytes to one of a few buffers, moves bytes from one to another, or reads one back. It waits for
    the last writer of what it reads, and for the last writer and all readers of what it writes.

    Attributes:
        steps: (event, events it comes after) of every step.
        reads: (host memory, what it must hold in the end) of every read.
    """

    N_BUFFER, NBYTES = 5, 16 * 1024

    def __init__(self, device: Device, rng: np.random.Generator) -> None:
        self.device, self.rng, self.queues = device, rng, all_queues(device)
        self.buffers = [
            device.alloc(self.NBYTES, usage=BufferUsage.COMPUTE, label=f"b{i}") for i in range(self.N_BUFFER)
        ]
        self.content: list[NDArray[np.uint8]] = []  # of the buffers, once everything so far has run
        self.host: list[HostBuffer] = []
        self.steps: list[tuple[Event, list[Event]]] = []
        self.reads: list[tuple[HostBuffer, NDArray[np.uint8]]] = []
        self.latest: dict[Queue, Event] = {}
        self.writer: dict[Buffer, tuple[Queue, Event]] = {}
        self.readers: dict[Buffer, list[tuple[Queue, Event]]] = defaultdict(list)
        for buffer in self.buffers:
            self.content.append(self._write(self.queues[0], buffer))

    def extend(self, n: int) -> None:
        """Enqueue `n` more steps."""
        for _ in range(n):
            queue = self.queues[self.rng.integers(len(self.queues))]
            dst, src = (int(i) for i in self.rng.choice(self.N_BUFFER, 2, replace=False))
            what = self.rng.random()
            if what < 0.3:
                self.content[dst] = self._write(queue, self.buffers[dst])
            elif what < 0.7:
                copy = partial(queue.copy_d2d, self.buffers[dst].span(), self.buffers[src].span())
                self._step(queue, copy, self.buffers[src], self.buffers[dst])
                self.content[dst] = self.content[src]
            else:
                host = self._host_memory()
                self._step(queue, partial(queue.copy_d2h, host.span(), self.buffers[src].span()), self.buffers[src])
                self.reads.append((host, self.content[src]))

    def close(self) -> None:
        for queue in self.queues:
            queue.synchronize()
        for buffer in (*self.buffers, *self.host):
            buffer.free()

    def _write(self, queue: Queue, buffer: DeviceBuffer) -> NDArray[np.uint8]:
        host, content = self._host_memory(), self.rng.integers(0, 256, self.NBYTES, dtype=np.uint8)
        host.array()[:] = content
        self._step(queue, partial(queue.copy_h2d, buffer.span(), host.span()), None, buffer)
        return content

    def _step(
        self, queue: Queue, copy: Callable[[], None], src: DeviceBuffer | None, dst: DeviceBuffer | None = None
    ) -> None:
        before = [self.writer[b] for b in (src, dst) if b is not None and b in self.writer]
        before += self.readers.pop(dst, []) if dst is not None else []
        for other, event in before:
            if other is not queue:
                queue.wait(event)
        copy()
        done = queue.record(f"step {len(self.steps)}")
        if src is not None:
            self.readers[src].append((queue, done))
        if dst is not None:
            self.writer[dst] = (queue, done)
        after = [event for _, event in before] + ([self.latest[queue]] if queue in self.latest else [])
        self.steps.append((done, after))
        self.latest[queue] = done

    def _host_memory(self) -> HostBuffer:
        host = self.device.alloc_host(self.NBYTES, label="step")
        self.host.append(host)
        return host


class QueueCases(ConformanceSuite):
    """In-order queues, events between them, and what the capabilities say about waiting."""

    def test_same_queue_for_same_arguments(self, device: Device) -> None:
        """One object a queue; without copy queues COPY is the compute queue; one too many is an error."""
        compute = device.queue(QueueKind.COMPUTE)
        assert device.queue(QueueKind.COMPUTE) is compute
        assert device.queue(QueueKind.COPY) is device.queue(QueueKind.COPY)
        assert len({id(q) for q in all_queues(device)}) == 1 + device.caps.copy_queues
        if device.caps.copy_queues:
            with pytest.raises(DeviceError, match="copy queues"):
                device.queue(QueueKind.COPY, device.caps.copy_queues)
        else:
            assert device.queue(QueueKind.COPY) is compute

    def test_capabilities_agree(self, device: Device) -> None:
        """Claims that only make sense together are made together."""
        caps = device.caps
        assert caps.copy_queues >= 0
        assert caps.copy_queues or not caps.async_copy
        assert caps.pinned_host or not caps.host_register
        assert caps.table_unit >= 16
        assert caps.activation_type in ("F32", "F16", "BF16")
        for unit in (caps.copy_alignment, caps.buffer_alignment, caps.table_unit):
            assert unit > 0
            assert unit & (unit - 1) == 0, f"alignment {unit} is not a power of two"

    def test_an_event_of_nothing(self, device: Device) -> None:
        """An event of an idle queue is soon done; waiting for it again costs nothing."""
        for queue in all_queues(device):
            event = queue.record("idle")
            event.wait(10)
            assert event.done()
            event.wait()
            event.wait(0)
            assert event.label == "idle"

    def test_record_flushes(self, bench: Bench) -> None:
        """An event becomes done though nobody flushes, waits or synchronizes."""
        for queue in bench.queues:
            queue.copy_h2d(bench.alloc(4096).span(), bench.host(np.zeros(4096, np.uint8)).span())
            event = queue.record()
            limit = time.monotonic() + 10
            while not event.done():
                assert time.monotonic() < limit, f"{queue.name}: an event is not done 10 s after its record"
                time.sleep(0.001)

    @pytest.mark.parametrize("seed", range(6))
    def test_random_graphs_of_copies(self, bench: Bench, seed: int) -> None:
        """Every read of any graph of copies over all queues gives what copying one by one gives."""
        graph = Graph(bench.device, np.random.default_rng(seed))
        for _ in range(20):
            for queue in bench.queues:
                delay(queue, graph.rng.uniform(0, 2))
            graph.extend(6)
        for queue in bench.queues:
            queue.synchronize()
        for i, (host, content) in enumerate(graph.reads):
            assert np.array_equal(host.array(), content), f"read {i} of {len(graph.reads)} came too early or too late"
        graph.close()

    @pytest.mark.parametrize("seed", range(4))
    def test_times_follow_the_order(self, device: Device, seed: int) -> None:
        """On any graph of copies no event is earlier than one it comes after, on its own queue or another."""
        if not device.caps.event_timing:
            pytest.skip("caps.event_timing is False")
        graph = Graph(device, np.random.default_rng(seed))
        graph.extend(60)
        for queue in graph.queues:
            queue.synchronize()
        for event, before in graph.steps:
            at = event.timestamp_ns()
            assert at is not None
            for earlier in before:
                assert (earlier.timestamp_ns() or 0) <= at, f"{event.label} is earlier than {earlier.label}"
        graph.close()

    def test_no_times_without_the_capability(self, device: Device) -> None:
        if device.caps.event_timing:
            pytest.skip("caps.event_timing is True: see test_times_follow_the_order")
        event = device.queue(QueueKind.COMPUTE).record()
        event.wait()
        assert event.timestamp_ns() is None

    def test_times_are_on_the_clock(self, device: Device) -> None:
        """`clock_sync` puts events where they happened: between the host's looks at the clock around them."""
        if not device.caps.event_timing:
            pytest.skip("caps.event_timing is False")
        host_before, before = device.clock_sync()
        queue = device.queue(QueueKind.COMPUTE)
        event = queue.record()
        event.wait()
        queue.synchronize()
        host_after, after = device.clock_sync()
        at = event.timestamp_ns()
        assert at is not None
        assert before - CLOCK_SLACK_NS <= at <= after + CLOCK_SLACK_NS
        if device.info.kind is not DeviceKind.SIMULATED:
            assert abs((after - before) - (host_after - host_before)) < CLOCK_SLACK_NS

    def test_a_delay_takes_its_time(self, device: Device) -> None:
        """The device's clock sees a delay, and no time before the work is done."""
        if not device.caps.event_timing:
            pytest.skip("caps.event_timing is False")
        queue = device.queue(QueueKind.COMPUTE)
        start = queue.record("start")
        busy(queue, DELAY_MS)
        end = queue.record("end")
        assert end.timestamp_ns() is None
        end.wait()
        took_ms = ((end.timestamp_ns() or 0) - (start.timestamp_ns() or 0)) / 1e6
        assert DELAY_MS * 0.5 < took_ms < DELAY_MS * 10

    def test_done_and_timeout(self, device: Device) -> None:
        """While a queue is busy its event is not done and a short wait raises; later it is done and nothing raises."""
        for queue in all_queues(device):
            busy(queue, DELAY_MS)
            event = queue.record("busy")
            assert not event.done()
            with pytest.raises(DeviceTimeout, match=device.info.id):
                event.wait(DELAY_MS / 1e3 / 20)
            event.wait(60)
            assert event.done()

    def test_synchronize_waits_for_all(self, device: Device) -> None:
        for queue in all_queues(device):
            busy(queue, DELAY_MS)
            event = queue.record()
            queue.synchronize()
            assert event.done()

    def test_who_waits_is_as_the_capabilities_say(self, device: Device) -> None:
        """`Queue.wait` returns at once with `device_wait`, and otherwise when the event is done."""
        if not device.caps.copy_queues:
            pytest.skip("caps.copy_queues is 0: there is one queue")
        compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
        busy(compute, DELAY_MS)
        event = compute.record("slow")
        copy.wait(event)
        after = copy.record("after")
        if device.caps.device_wait:
            assert not event.done()
            assert not after.done()
        else:
            assert event.done()
        after.wait()
        assert event.done()

    def test_waiting_for_an_event_of_long_ago(self, device: Device) -> None:
        """An event that is done, waited for by every queue many times, holds nobody up."""
        event = device.queue(QueueKind.COMPUTE).record()
        event.wait()
        for queue in all_queues(device):
            for _ in range(50):
                queue.wait(event)
            queue.record().wait(10)

    def test_waiting_for_itself(self, device: Device) -> None:
        """A queue may wait for its own event."""
        for queue in all_queues(device):
            queue.wait(queue.record())
            queue.record().wait(10)

    def test_waiting_for_another_device(self, bench: Bench) -> None:
        """An event of another backend, of which only `Event` is known, is waited for on the host."""
        foreign = ForeignEvent(DELAY_MS / 1e3)
        for queue in bench.queues:
            foreign.restart()
            queue.wait(foreign)
            queue.record().wait()
            assert foreign.done()

    def test_another_backend_may_wait_for_us(self, bench: Bench) -> None:
        """The events of this device are good for the queues of another backend."""
        backend, options = find_backend("reference")
        with backend.open(0, options) as other:
            delay(bench.queue, DELAY_MS)
            ours = bench.queue.record()
            theirs = other.queue(QueueKind.COMPUTE)
            theirs.wait(ours)
            theirs.record().wait()
            assert ours.done()


class ForeignEvent(Event):
    """An event of no device: done some seconds after `restart`."""

    label = "foreign"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        self.at = time.monotonic() + self.seconds

    def done(self) -> bool:
        return time.monotonic() >= self.at

    def wait(self, timeout_s: float | None = None) -> None:
        left = max(0.0, self.at - time.monotonic())
        if timeout_s is not None and timeout_s < left:
            time.sleep(timeout_s)
            raise DeviceTimeout("elsewhere", "the event is not done")
        time.sleep(left)
