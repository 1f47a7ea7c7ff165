"""What the link between host and device can do, measured: the peak for counters, and the cost model of policies."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from noria.api import BufferUsage, CopyRegion, Device, DeviceBuffer, HostBuffer, Queue, QueueKind, align_up
from noria.api.errors import MIB, OutOfDeviceMemory, PinnedMemoryError

logger = logging.getLogger(__name__)

SMALLEST_NBYTES = 4096
PEAK_NBYTES, N_PEAK = 64 * MIB, 4
LARGEST_NBYTES = 16 * MIB  # larger copies are hardly faster
ROW_NS = 8_000_000  # smaller copies are timed in a row that takes about so long, ...
MAX_IN_A_ROW = 64  # ... has at most so many, and at most the largest one's bytes
EXPERT_NBYTES = 3 * MIB // 2  # one tensor of an expert of 768 x 2048 weights takes 0.8 to 1.6 MiB at 4 to 8 bits
BUDGET_NS = 50_000_000  # no size is begun whose copies would take longer
N_REPEAT = 5
PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates of copies in a row between page-locked host memory and a device, in GB/s (1e9), latency left out.

    Attributes:
        h2d_gbps: host to device, large copies, latency included: the link's measured peak.
        d2h_gbps: device to host, large copies.
        h2d_small_gbps: host to device, copies of one expert's size.
        pageable_gbps: host to device, large copies from memory that is not page-locked.
        latency_us: a copy of a few bytes on an idle queue, from the event before it to the event after it.
        samples: (bytes of one copy, ns of one copy) host to device, ascending in both.
    """

    h2d_gbps: float
    d2h_gbps: float
    h2d_small_gbps: float
    pageable_gbps: float
    latency_us: float
    samples: tuple[tuple[int, float], ...]

    def rate_gbps(self, nbytes: int) -> float:
        """Host-to-device GB/s of copies of `nbytes` each, between the measured sizes by their times."""
        return _rate_gbps(self.samples, nbytes)


# Where there is no room even for a measurement: a link of the third PCIe generation, 16 lanes wide.
UNMEASURED = LinkRates(
    h2d_gbps=12.0,
    d2h_gbps=12.0,
    h2d_small_gbps=10.0,
    pageable_gbps=6.0,
    latency_us=20.0,
    samples=((4096, 4096 / 12.0), (16 * MIB, 16 * MIB / 12.0)),
)


def measure_link(device: Device, *, expert_nbytes: int = EXPERT_NBYTES) -> LinkRates:
    """Measure the link of an idle device, in less than 0.2 s.

    Takes at most 64 MiB on either side for that time; where the device is nearly full, less and with less precision.

    Args:
        device: what is measured, by events where it times them, else by the host's clock.
        expert_nbytes: the size of copies that `h2d_small_gbps` is about.

    Raises:
        OutOfDeviceMemory: there is not even room for the smallest copy.
        PinnedMemoryError: the same, in the host's memory.
    """
    queue = device.queue(QueueKind.COPY)
    expert_nbytes = align_up(min(max(expert_nbytes, SMALLEST_NBYTES), LARGEST_NBYTES), device.caps.copy_alignment)
    latency_ns = _h2d_ns(queue, SMALLEST_NBYTES, pinned=True)
    sizes = sorted({SMALLEST_NBYTES, 256 * 1024, expert_nbytes, LARGEST_NBYTES})
    samples = _measure_sizes(queue, sizes, latency_ns)
    large = samples[-1][0]
    rates = LinkRates(
        h2d_gbps=_peak_gbps(queue, samples),
        d2h_gbps=large / _without(latency_ns, _d2h_ns(queue, large)),
        h2d_small_gbps=_rate_gbps(samples, expert_nbytes),
        pageable_gbps=large / _without(latency_ns, _h2d_ns(queue, large, pinned=False)),
        latency_us=latency_ns / 1e3,
        samples=samples,
    )
    logger.info(
        "%s: link %.1f GB/s (%.1f in copies of %.2f MiB, %.1f pageable), %.1f GB/s back, latency %.0f us",
        device.info.id,
        rates.h2d_gbps,
        rates.h2d_small_gbps,
        expert_nbytes / MIB,
        rates.pageable_gbps,
        rates.d2h_gbps,
        rates.latency_us,
    )
    return rates


def _peak_gbps(queue: Queue, samples: Sequence[tuple[int, float]]) -> float:
    """What a few large copies in a row reach, latency included: no run's copies do better for long."""
    nbytes, ns = samples[-1]
    if (1 + N_REPEAT) * ns * N_PEAK * PEAK_NBYTES / nbytes <= BUDGET_NS:
        with suppress(OutOfDeviceMemory, PinnedMemoryError), _buffers(queue.device, PEAK_NBYTES, pinned=True) as ends:
            copies = [CopyRegion(ends[0].span(), ends[1].span())] * N_PEAK
            return N_PEAK * PEAK_NBYTES / _timed_ns(queue, lambda: queue.copy_regions(copies))
    return nbytes / ns


def _measure_sizes(queue: Queue, sizes: Sequence[int], latency_ns: float) -> tuple[tuple[int, float], ...]:
    """The samples of as many sizes, from the smallest on, as memory and time allow: one at least."""
    samples: list[tuple[int, float]] = []
    for nbytes in sizes:
        last_nbytes, last_ns = samples[-1] if samples else (nbytes, 0.0)
        if (1 + N_REPEAT) * last_ns * nbytes / last_nbytes > BUDGET_NS:
            break
        try:
            ns = _in_a_row_ns(queue, nbytes, latency_ns)
        except (OutOfDeviceMemory, PinnedMemoryError):
            if not samples:
                raise
            break
        samples.append((nbytes, max(ns, last_ns)))
    return tuple(samples)


def _in_a_row_ns(queue: Queue, nbytes: int, latency_ns: float) -> float:
    """ns of one copy to the device among several that follow each other."""
    device = queue.device
    n = max(1, min(MAX_IN_A_ROW, LARGEST_NBYTES // nbytes, device.memory_free() // 2 // nbytes))
    n = n if device.caps.region_copy else 1
    with _buffers(device, n * nbytes, pinned=True) as (dst, src):
        regions = [CopyRegion(dst.span(i * nbytes, nbytes), src.span(i * nbytes, nbytes)) for i in range(n)]
        single_ns = _once_ns(queue, lambda: queue.copy_regions(regions[:1]))
        n = max(1, min(n, int(ROW_NS / single_ns)))
        return _without(latency_ns, _timed_ns(queue, lambda: queue.copy_regions(regions[:n]))) / n


def _without(latency_ns: float, ns: float) -> float:
    """A duration less the latency, but not less than half of it: latencies vary."""
    return max(ns - latency_ns, ns / 2)


def _rate_gbps(samples: tuple[tuple[int, float], ...], nbytes: int) -> float:
    sizes, times = zip(*samples, strict=True)
    if nbytes >= sizes[-1]:
        return float(sizes[-1] / times[-1])
    return nbytes / float(np.interp(nbytes, sizes, times))


def _h2d_ns(queue: Queue, nbytes: int, *, pinned: bool) -> float:
    with _buffers(queue.device, nbytes, pinned) as (dst, src):
        return _timed_ns(queue, lambda: queue.copy_h2d(dst.span(), src.span()))


def _d2h_ns(queue: Queue, nbytes: int) -> float:
    with _buffers(queue.device, nbytes, pinned=True) as (src, dst):
        return _timed_ns(queue, lambda: queue.copy_d2h(dst.span(), src.span()))


@contextmanager
def _buffers(device: Device, nbytes: int, pinned: bool) -> Iterator[tuple[DeviceBuffer, HostBuffer]]:
    on_device = device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="link measurement")
    try:
        if pinned:
            on_host = device.alloc_host(nbytes, label="link measurement")
        else:
            on_host = device.wrap_host(memoryview(bytearray(nbytes)), label="link measurement")
        try:
            on_host.array()[::PAGE_NBYTES] = 1  # pages that nobody wrote are one page of zeros, and cheaper to read
            yield on_device, on_host
        finally:
            on_host.free()
    finally:
        on_device.free()


def _timed_ns(queue: Queue, enqueue: Callable[[], None]) -> float:
    """Median duration of what `enqueue` enqueues, after one run to warm up."""
    durations = [_once_ns(queue, enqueue) for _ in range(1 + N_REPEAT)][1:]
    return statistics.median(durations)


def _once_ns(queue: Queue, enqueue: Callable[[], None]) -> int:
    queue.synchronize()
    host_begin_ns, _ = queue.device.clock_sync()  # the host's clock, a simulated one where the device is
    begin = queue.record("link")
    enqueue()
    end = queue.record("link")
    end.wait()
    host_end_ns, _ = queue.device.clock_sync()
    begin_ns, end_ns = begin.timestamp_ns(), end.timestamp_ns()
    if begin_ns is None or end_ns is None:
        begin_ns, end_ns = host_begin_ns, host_end_ns
    return max(1, end_ns - begin_ns)  # a coarse clock may not have moved
