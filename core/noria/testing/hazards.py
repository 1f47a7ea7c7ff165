"""Happens-before check of what is enqueued on devices: finds races that a lucky timing hides.

Order counts only where a device enforces it: work of one queue runs in order, and a queue that waits for an event runs
its later work after everything that the event stands for. Two accesses of the same bytes, one of them a write, that no
chain of these orders are a hazard, whichever came first this time. Waits of the host (`Event.wait`,
`Queue.synchronize`) are not seen and order nothing here.

Source: vector clocks, Mattern 1989, "Virtual time and global states of distributed systems".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from weakref import WeakKeyDictionary

from noria.api.memory import Buffer, Span
from noria.api.queue import Event, Observer, Queue


class HazardKind(StrEnum):
    READ_BEFORE_COPY = "read-before-copy"
    OVERWRITE_BEFORE_RELEASE = "overwrite-before-release"


@dataclass(frozen=True, slots=True)
class Submission:
    """One copy or kernel: the `number`-th on its queue, from 1."""

    queue: Queue
    number: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} (no. {self.number} on {self.queue.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Two submissions that nothing orders, in the order of the host's calls, and the bytes both of them touch."""

    kind: HazardKind
    earlier: Submission
    later: Submission
    span: Span

    def __str__(self) -> str:
        touched = f"[{self.span.offset}, {self.span.end}) of {self.span.buffer!r}"
        if self.kind is HazardKind.READ_BEFORE_COPY:
            return f"{self.kind}: {self.later} reads {touched} without waiting for {self.earlier}, which writes it"
        return f"{self.kind}: {self.later} writes {touched} without waiting for {self.earlier}, which uses it"


class HazardFound(AssertionError):
    """There are hazards; the text shows the first ones."""

    def __init__(self, hazards: Sequence[Hazard], n_shown: int = 5) -> None:
        self.hazards = tuple(hazards)
        more = [f"... and {len(hazards) - n_shown} more"] if len(hazards) > n_shown else []
        super().__init__("\n".join([f"{len(hazards)} hazards", *map(str, hazards[:n_shown]), *more]))


@dataclass(slots=True)
class _Segment:
    """Bytes `[start, end)` of one buffer with the same history.

    Attributes:
        write: the last write; older ones do not matter, for it has been checked against them.
        reads: the last read since then on each queue; it comes after all earlier ones of its queue.
    """

    start: int
    end: int
    write: Submission | None = None
    reads: dict[Queue, Submission] = field(default_factory=dict)

    def split(self, at: int) -> _Segment:
        """Cut off and return the part from `at` on."""
        rest = _Segment(at, self.end, self.write, dict(self.reads))
        self.end = at
        return rest


class _History:
    """The accesses of one buffer: segments in order, disjoint, only where anything has been accessed."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    def read(self, start: int, end: int, reader: Submission) -> list[_Segment]:
        """Note a read; returns the segments it touched."""
        first, last = self._cut(start, end)
        touched = self._segments[first:last]
        filled: list[_Segment] = []
        at = start
        for segment in touched:
            if at < segment.start:
                filled.append(_Segment(at, segment.start))
            filled.append(segment)
            at = segment.end
        if at < end:
            filled.append(_Segment(at, end))
        for segment in filled:
            segment.reads[reader.queue] = reader
        self._segments[first:last] = filled
        return touched

    def write(self, start: int, end: int, writer: Submission) -> list[_Segment]:
        """Note a write; returns the segments it replaced."""
        first, last = self._cut(start, end)
        replaced = self._segments[first:last]
        self._segments[first:last] = [_Segment(start, end, writer)]
        return replaced

    def _cut(self, start: int, end: int) -> tuple[int, int]:
        """Cut segments at both ends; returns the index range of those inside."""
        return self._cut_at(start), self._cut_at(end)

    def _cut_at(self, at: int) -> int:
        """Index of the first segment that starts at `at` or later, after cutting the one that contains `at`."""
        segments = self._segments
        i = bisect_right(segments, at, key=attrgetter("end"))
        if i < len(segments) and segments[i].start < at:
            segments.insert(i + 1, segments[i].split(at))
            i += 1
        return i


class HazardChecker:
    """An observer that collects hazards. Set it as the `observer` of one device, or of several that work together.

    Attributes:
        hazards: those found so far, in the order of the later submission.
    """

    def __init__(self) -> None:
        self.hazards: list[Hazard] = []
        self._clocks: dict[Queue, dict[Queue, int]] = {}  # of each queue: the last submission of each it comes after
        self._events: WeakKeyDictionary[Event, dict[Queue, int]] = WeakKeyDictionary()
        self._histories: WeakKeyDictionary[Buffer, _History] = WeakKeyDictionary()

    def check(self) -> None:
        """Fail if there is any hazard.

        Raises:
            HazardFound: there is.
        """
        if self.hazards:
            raise HazardFound(self.hazards)

    # --- Observer ------------------------------------------------------------------------------------------------

    def submitted(self, queue: Queue, label: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        clock = self._clocks.setdefault(queue, {})
        clock[queue] = clock.get(queue, 0) + 1
        submission = Submission(queue, clock[queue], label)
        for span in reads:
            touched = self._history(span.buffer).read(span.offset, span.end, submission) if span.nbytes else []
            writers = [(segment.write, segment) for segment in touched if segment.write is not None]
            self._report(HazardKind.READ_BEFORE_COPY, submission, span.buffer, writers)
        for span in writes:
            replaced = self._history(span.buffer).write(span.offset, span.end, submission) if span.nbytes else []
            users = [(read, segment) for segment in replaced for read in segment.reads.values()]
            users += [(segment.write, segment) for segment in replaced if segment.write is not None]
            self._report(HazardKind.OVERWRITE_BEFORE_RELEASE, submission, span.buffer, users)

    def recorded(self, queue: Queue, event: Event) -> None:
        self._events[event] = dict(self._clocks.get(queue, {}))

    def waited(self, queue: Queue, event: Event) -> None:
        clock = self._clocks.setdefault(queue, {})
        for other, number in self._events.get(event, {}).items():
            clock[other] = max(clock.get(other, 0), number)

    # -------------------------------------------------------------------------------------------------------------

    def _history(self, buffer: Buffer) -> _History:
        history = self._histories.get(buffer)
        if history is None:
            history = self._histories[buffer] = _History()
        return history

    def _report(
        self, kind: HazardKind, later: Submission, buffer: Buffer, accesses: list[tuple[Submission, _Segment]]
    ) -> None:
        """Add a hazard for each submission in `accesses` that `later` is not ordered after."""
        clock = self._clocks[later.queue]
        unordered: dict[Submission, tuple[int, int]] = {}
        for earlier, segment in accesses:
            if earlier.number > clock.get(earlier.queue, 0):
                start, end = unordered.get(earlier, (segment.start, segment.end))
                unordered[earlier] = min(start, segment.start), max(end, segment.end)
        self.hazards += [
            Hazard(kind=kind, earlier=earlier, later=later, span=Span(buffer, start, end - start))
            for earlier, (start, end) in unordered.items()
        ]


class ObserverGroup:
    """Several observers as one, for a device that is checked and counted at once."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def submitted(self, queue: Queue, label: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        for observer in self._observers:
            observer.submitted(queue, label, reads, writes)

    def recorded(self, queue: Queue, event: Event) -> None:
        for observer in self._observers:
            observer.recorded(queue, event)

    def waited(self, queue: Queue, event: Event) -> None:
        for observer in self._observers:
            observer.waited(queue, event)
