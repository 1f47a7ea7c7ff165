"""Queues, events and programs: how work is ordered on a device.

A queue runs what is enqueued in order. Enqueuing never waits for the device unless `caps.blocking_submit` says so; only
`synchronize`, `Event.wait` and (without `caps.device_wait`) `wait` block. The public methods check, account and report
to the device's observer; a backend writes the methods with an underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, final

from noria.api.errors import DeviceError, FeatureUnsupported, TransferError
from noria.api.memory import Buffer, CopyRegion, DeviceBuffer, HostBuffer, Span

if TYPE_CHECKING:
    from noria.api.backend import Device


class QueueKind(StrEnum):
    COMPUTE = "compute"
    COPY = "copy"


class Observer(Protocol):
    """Told of everything enqueued on a device, in the order of the host's calls. Used by hazard checks and counters."""

    def submitted(self, queue: Queue, label: str, reads: Sequence[Span], writes: Sequence[Span]) -> None: ...
    def recorded(self, queue: Queue, event: Event) -> None: ...
    def waited(self, queue: Queue, event: Event) -> None: ...


class Event(ABC):
    """Completion of everything enqueued on a queue before `Queue.record` returned it.

    An event recorded inside a program stands for the program's latest run; before the first run it is not done.
    """

    label: str
    program: Program | None = None  # the program it was recorded in

    @abstractmethod
    def done(self) -> bool:
        """Whether the work is complete; never blocks.

        Raises:
            DeviceError: the work failed.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the work is complete.

        Raises:
            DeviceError: the work failed.
            DeviceTimeout: it took longer than `timeout_s`.
        """

    def timestamp_ns(self) -> int | None:
        """When the work was complete, on the device's clock; None without `caps.event_timing` or before it is done."""
        return None


class Program:
    """A recorded sequence of work on one queue, to be repeated by `Queue.run`.

    Whatever changes between runs is read from device memory; Python numbers used while recording belong in the key.
    """

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.calls: list[Callable[[], None]] = []
        self.reports: list[Callable[[Observer], None]] = []  # what an observer is told at every run
        self.held: list[Buffer] = []  # sources of its copies


class Queue(ABC):
    """An in-order queue of one device."""

    def __init__(self, device: Device, kind: QueueKind, index: int) -> None:
        self.device = device
        self.kind = kind
        self.index = index
        self._recording: Program | None = None
        self._unrecorded: list[Buffer] = []  # sources of copies enqueued since the last event
        self._held: deque[tuple[Event, list[Buffer]]] = deque()  # sources kept alive until their event is done

    @property
    def name(self) -> str:
        return f"{self.device.info.id}/{self.kind}{self.index or ''}"

    @property
    def recording(self) -> bool:
        """Whether a program is being recorded."""
        return self._recording is not None

    # --- copies --------------------------------------------------------------------------------------------------

    @final
    def copy_h2d(self, dst: Span, src: Span) -> None:
        """Copy host memory to the device.

        `src` stays unchanged until a later event is done; the queue keeps its buffer object alive until then.
        """
        self.copy_regions((CopyRegion(dst, src),))

    @final
    def copy_regions(self, regions: Sequence[CopyRegion]) -> None:
        """Copy several host ranges to the device; neighbours should be merged by the caller (`merge_regions`)."""
        for region in regions:
            self._check_copy(region.dst, region.src, DeviceBuffer, HostBuffer)
            self._unrecorded.append(region.src.buffer)
        self.submit("h2d", [r.src for r in regions], [r.dst for r in regions], lambda: self._copy_h2d(regions))

    @final
    def copy_d2h(self, dst: Span, src: Span) -> None:
        """Copy device memory to the host. `dst` may be read after a later event is done."""
        self._check_copy(dst, src, HostBuffer, DeviceBuffer)
        self._unrecorded.append(dst.buffer)
        self.submit("d2h", [src], [dst], lambda: self._copy_d2h(dst, src))

    @final
    def copy_d2d(self, dst: Span, src: Span) -> None:
        """Copy inside the device."""
        self._check_copy(dst, src, DeviceBuffer, DeviceBuffer)
        self.submit("d2d", [src], [dst], lambda: self._copy_d2d(dst, src))

    def _check_copy(self, dst: Span, src: Span, dst_kind: type, src_kind: type) -> None:
        where, unit = self.device.info.id, self.device.caps.copy_alignment
        if dst.nbytes != src.nbytes:
            raise TransferError(where, f"copy of {src.nbytes} bytes into {dst.nbytes} bytes of {dst.buffer!r}")
        for span, kind in ((dst, dst_kind), (src, src_kind)):
            if not isinstance(span.buffer, kind) or span.buffer.device is not self.device:
                raise TransferError(where, f"{span.buffer!r} is not a {kind.__name__} of this device")
            if span.buffer.freed:
                raise TransferError(where, f"{span.buffer!r} has been freed")
            if not self.device.caps.region_copy and (span.offset or span.nbytes != span.buffer.nbytes):
                raise TransferError(where, f"this device copies whole buffers only, not a part of {span.buffer!r}")
            if isinstance(span.buffer, DeviceBuffer) and span.offset % unit:
                raise TransferError(where, f"copy at offset {span.offset} of {span.buffer!r}, no multiple of {unit}")
        if dst.nbytes % unit and all(span.end != span.buffer.nbytes for span in (dst, src)):
            text = f"copy of {dst.nbytes} bytes, no multiple of {unit}, that ends inside {dst.buffer!r} and its source"
            raise TransferError(where, text)
        if isinstance(dst.buffer, HostBuffer) and not dst.buffer.array().flags.writeable:
            raise TransferError(where, f"{dst.buffer!r} is read-only memory")

    # --- order ---------------------------------------------------------------------------------------------------

    @final
    def record(self, label: str = "") -> Event:
        """An event for everything enqueued so far; implies `flush`."""
        program = self._recording
        event = self._record(label) if program is None else self._record_in_program(program, label)
        self._report(lambda observer: observer.recorded(self, event))
        if program is not None:
            event.program = program
            return event
        if self._unrecorded:
            self._held.append((event, self._unrecorded))
            self._unrecorded = []
        while self._held and _is_settled(self._held[0][0]):
            self._held.popleft()
        return event

    @final
    def wait(self, event: Event) -> None:
        """Later work on this queue runs after `event`. Blocks the host without `caps.device_wait`, and for an event of
        another backend.

        Raises:
            FeatureUnsupported: in a program, on an event from outside: later runs would not wait for anything new.
        """
        if self._recording is not None and event.program is None:
            raise FeatureUnsupported(
                f"{self.name}: a program cannot wait for '{event.label}', which was recorded outside of one; "
                f"wait for it before running the program"
            )
        self._report(lambda observer: observer.waited(self, event))
        self._enqueue(lambda: self._wait(event.latest if isinstance(event, _ProgramEvent) else event))

    def flush(self) -> None:  # noqa: B027 - optional
        """Hand what is enqueued to the device."""

    @final
    def synchronize(self) -> None:
        """Block the host until everything enqueued is complete.

        Raises:
            DeviceError: some of it failed.
            FeatureUnsupported: a program is being recorded.
        """
        if self._recording is not None:
            raise FeatureUnsupported(
                f"{self.name}: nothing runs while a program is recorded, so nothing can be waited for"
            )
        self._synchronize()

    @final
    def delay(self, duration_ns: int) -> None:
        """Keep the queue busy for about `duration_ns`. Hazard tests use it to change what happens first.

        Raises:
            FeatureUnsupported: the backend has no such thing.
        """
        self._enqueue(lambda: self._delay(duration_ns))

    # --- programs ------------------------------------------------------------------------------------------------

    @contextmanager
    def program(self, key: Hashable) -> Iterator[Program]:
        """Record what is enqueued on this queue inside the `with` block instead of running it."""
        if self._recording is not None:
            raise FeatureUnsupported(f"{self.name}: a program is already being recorded")
        outside, self._unrecorded = self._unrecorded, []
        program = self._recording = self._begin_program(key)
        try:
            yield program
        except BaseException:
            self._recording = None
            self._abandon_program(program)
            raise
        else:
            self._recording = None
            self._end_program(program)
        finally:
            program.held, self._unrecorded = self._unrecorded, outside

    @final
    def run(self, program: Program) -> None:
        """Enqueue a recorded program once more."""
        if self.device.observer is not None:
            for report in program.reports:
                report(self.device.observer)
        self._run(program)

    # --- for the core --------------------------------------------------------------------------------------------

    @final
    def submit(self, label: str, reads: Sequence[Span], writes: Sequence[Span], call: Callable[[], None]) -> None:
        """Enqueue one piece of work by `call`; `reads` and `writes` are what it may touch."""
        self._report(lambda observer: observer.submitted(self, label, reads, writes))
        self._enqueue(call)

    def _report(self, report: Callable[[Observer], None]) -> None:
        """Tell the observer now, or at every run of the program being recorded."""
        if self._recording is not None:
            self._recording.reports.append(report)
        elif self.device.observer is not None:
            report(self.device.observer)

    # --- the backend's part --------------------------------------------------------------------------------------

    @abstractmethod
    def _copy_h2d(self, regions: Sequence[CopyRegion]) -> None: ...

    @abstractmethod
    def _copy_d2h(self, dst: Span, src: Span) -> None: ...

    @abstractmethod
    def _copy_d2d(self, dst: Span, src: Span) -> None: ...

    @abstractmethod
    def _record(self, label: str) -> Event: ...

    @abstractmethod
    def _wait(self, event: Event) -> None: ...

    @abstractmethod
    def _synchronize(self) -> None: ...

    def _delay(self, duration_ns: int) -> None:
        raise FeatureUnsupported(f"{self.name}: this backend cannot delay a queue")

    # The default program keeps the calls; a backend that captures overrides these six together.

    def _enqueue(self, call: Callable[[], None]) -> None:
        if self._recording is not None:
            self._recording.calls.append(call)
        else:
            call()

    def _begin_program(self, key: Hashable) -> Program:
        return Program(key)

    def _record_in_program(self, program: Program, label: str) -> Event:
        event = _ProgramEvent(label)
        program.calls.append(lambda: event.arm(self._record(label)))
        return event

    def _end_program(self, program: Program) -> None:
        return None

    def _abandon_program(self, program: Program) -> None:
        """Recording was cut short by an exception, which is on its way to the caller."""
        return None

    def _run(self, program: Program) -> None:
        for call in program.calls:
            call()


class _ProgramEvent(Event):
    """Event of a program that keeps its calls: stands for the event of the latest run."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._latest: Event | None = None

    def arm(self, event: Event) -> None:
        self._latest = event

    @property
    def latest(self) -> Event:
        if self._latest is None:
            raise FeatureUnsupported(f"event '{self.label}' belongs to a program that has not been run")
        return self._latest

    def done(self) -> bool:
        return self._latest is not None and self._latest.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self.latest.wait(timeout_s)

    def timestamp_ns(self) -> int | None:
        return self._latest.timestamp_ns() if self._latest is not None else None


def _is_settled(event: Event) -> bool:
    """Whether nothing of the event's work is still to come. Its error is told to whoever waits for it."""
    try:
        return event.done()
    except DeviceError:
        return True


def merge_regions(regions: Sequence[CopyRegion]) -> list[CopyRegion]:
    """Join regions that follow each other in both source and destination: few large copies use a link best."""
    merged: list[CopyRegion] = []
    for region in regions:
        if merged:
            last = merged[-1]
            if (
                last.dst.buffer is region.dst.buffer
                and last.src.buffer is region.src.buffer
                and last.dst.end == region.dst.offset
                and last.src.end == region.src.offset
            ):
                nbytes = last.src.nbytes + region.src.nbytes
                merged[-1] = CopyRegion(
                    Span(last.dst.buffer, last.dst.offset, nbytes), Span(last.src.buffer, last.src.offset, nbytes)
                )
                continue
        merged.append(region)
    return merged
