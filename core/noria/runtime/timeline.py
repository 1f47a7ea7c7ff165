"""When everything happened: spans on lanes, one lane a queue and lanes of the host, on the host's clock.

Device spans are pairs of events. Their times are read once the events are done, and moved from the device's clock to
the host's at the end, by what `Device.clock_sync` said at the first span and says then.

Source: the Trace Event Format of Chrome's tracing, which Perfetto opens.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from noria.api import Device, Event, Queue
from noria.api.errors import ConfigError, DeviceError

logger = logging.getLogger(__name__)

HOST = "host"
RESOLVE_EVERY = 1024  # pending spans whose events are looked at in one go
SAME_HOST_NS = 10**9  # a device whose host time is further from ours than this has a host of its own: it is simulated
LEAST_DRIFT_NS = 10**9  # over less, the error of one moment is larger than the drift
MAX_DRIFT = 1e-3  # real clocks differ less; more means that one of them is virtual


class Mark(StrEnum):
    SPAN = "span"
    INSTANT = "instant"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """One entry of a timeline.

    Attributes:
        lane: `process/thread`: `cuda0/copy`, `host/fallback`.
        start_ns: on the clock of `time.perf_counter_ns`.
        duration_ns: 0 for an instant and a counter.
        args: figures to show with it; a counter has its `value`.
    """

    mark: Mark
    lane: str
    name: str
    start_ns: int
    duration_ns: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)


TimelineWriter = Callable[[Sequence[TimelineSpan], Path], None]


class Timeline:
    """Collects spans. When disabled every call returns at once and nothing is kept.

    Args:
        enabled: whether anything is collected.
        max_spans: entries after which nothing more is kept; a warning says how many were left out.
    """

    def __init__(self, *, enabled: bool = True, max_spans: int = 500_000) -> None:
        self.enabled = enabled
        self.max_spans = max_spans
        self.n_dropped = 0
        # Tuples, not objects: a long run has hundreds of thousands. (mark, lane, name, start_ns, end_ns, args)
        self._entries: list[tuple[Mark, str, str, int, int, dict[str, Any]]] = []
        self._pending: list[tuple[str, str, Event, Event, dict[str, Any]]] = []
        self._resolve_at = RESOLVE_EVERY
        self._clocks: dict[str, _DeviceClock] = {}  # by device id, the process of a queue's lane

    def span(self, queue: Queue, name: str, start: Event, end: Event, **args: Any) -> None:
        """Work on `queue` from `start` to `end`, two of its events. Does not wait for them.

        An event of a program stands for the latest run, so its spans are resolved (`resolve`) before the next.
        """
        if not self.enabled or self._is_full():
            return
        if queue.device.info.id not in self._clocks:
            self._clocks[queue.device.info.id] = _DeviceClock(queue.device)
        self._pending.append((queue.name, name, start, end, args))
        if len(self._pending) >= self._resolve_at:
            self.resolve()

    def host(self, name: str, *, lane: str = HOST, **args: Any) -> AbstractContextManager[object]:
        """A span of the host while the `with` block runs."""
        return _HostSpan(self, f"{HOST}/{lane}", name, args) if self.enabled else _NOTHING

    def instant(self, name: str, *, lane: str = HOST, **args: Any) -> None:
        """Something that happens now."""
        now_ns = time.perf_counter_ns()
        self._add(Mark.INSTANT, f"{HOST}/{lane}", name, now_ns, now_ns, args)

    def counter(self, name: str, value: float) -> None:
        """A figure that changes over time, from now on `value`."""
        now_ns = time.perf_counter_ns()
        self._add(Mark.COUNTER, f"{HOST}/{HOST}", name, now_ns, now_ns, {"value": value})

    def resolve(self, *, wait: bool = False) -> None:
        """Read the times of pending spans whose events are done and let go of the events; all of them with `wait`."""
        pending, self._pending = self._pending, []
        for entry in pending:
            lane, name, start, end, args = entry
            try:
                if wait:
                    end.wait()
                elif not end.done():
                    self._pending.append(entry)
                    continue
                start_ns, end_ns = start.timestamp_ns(), end.timestamp_ns()
            except DeviceError:  # whoever waits for the work is told; here it only has no times
                start_ns = end_ns = None
            if start_ns is None or end_ns is None:
                self.n_dropped += 1
            else:
                self._entries.append((Mark.SPAN, lane, name, start_ns, max(start_ns, end_ns), args))
        # Twice what is still running, so that a long backlog is not walked for every span.
        self._resolve_at = 2 * len(self._pending) + RESOLVE_EVERY

    def spans(self) -> list[TimelineSpan]:
        """Everything so far by start, on the host's clock. Waits for pending events; devices must still be open."""
        self.resolve(wait=True)
        if self.n_dropped:
            logger.warning(
                "the timeline lacks %d spans: no event timing, failed work, or more than %d spans",
                self.n_dropped,
                self.max_spans,
            )
        to_host = {device: clock.aligned() for device, clock in self._clocks.items()}
        spans = []
        for mark, lane, name, start_ns, end_ns, args in self._entries:
            align = to_host.get(lane.partition("/")[0], _unchanged)
            start_ns, end_ns = align(start_ns), align(end_ns)
            spans.append(
                TimelineSpan(
                    mark=mark, lane=lane, name=name, start_ns=start_ns, duration_ns=end_ns - start_ns, args=args
                )
            )
        spans.sort(key=lambda span: (span.start_ns, -span.duration_ns))
        return spans

    def write(self, path: Path, writers: Mapping[str, TimelineWriter] | None = None) -> None:
        """Write `spans` by the writer of the path's suffix (`WRITERS` by default).

        Raises:
            ConfigError: nobody writes such files, or this one cannot be written.
        """
        write = find_writer(path, writers or WRITERS)
        try:
            write(self.spans(), path)
        except OSError as error:
            raise ConfigError(
                f"cannot write the timeline to {path}: {error.strerror or error}. "
                f"Name a file in a folder that exists and can be written to."
            ) from error

    def _add(self, mark: Mark, lane: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        if self.enabled and not self._is_full():
            self._entries.append((mark, lane, name, start_ns, end_ns, args))

    def _is_full(self) -> bool:
        full = len(self._entries) + len(self._pending) >= self.max_spans
        self.n_dropped += full
        return full


_NOTHING = nullcontext()


class _HostSpan:
    """What `Timeline.host` returns: adds itself when its block ends, also by an error."""

    __slots__ = ("_args", "_lane", "_name", "_start_ns", "_timeline")

    def __init__(self, timeline: Timeline, lane: str, name: str, args: dict[str, Any]) -> None:
        self._timeline, self._lane, self._name, self._args = timeline, lane, name, args

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = time.perf_counter_ns()
        self._timeline._add(Mark.SPAN, self._lane, self._name, self._start_ns, end_ns, self._args)


class _DeviceClock:
    """How a device's clock stands to the host's: one moment on both, and another one at the end to see the drift."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host_ns, self._device_ns = self._sync()

    def aligned(self) -> Callable[[int], int]:
        """A function from device time to host time."""
        host_ns, device_ns = self._sync()
        first_host_ns, first_device_ns = self._host_ns, self._device_ns
        drift = 0.0
        if device_ns - first_device_ns >= LEAST_DRIFT_NS:
            drift = (host_ns - first_host_ns) / (device_ns - first_device_ns) - 1.0
            drift = drift if abs(drift) <= MAX_DRIFT else 0.0

        def align(time_ns: int) -> int:
            since_ns = time_ns - first_device_ns
            return first_host_ns + since_ns + round(since_ns * drift)

        return align

    def _sync(self) -> tuple[int, int]:
        now_ns = time.perf_counter_ns()
        host_ns, device_ns = self._device.clock_sync()
        # A simulated host has its own time: it is taken to be now there what it is here.
        return (host_ns if abs(host_ns - now_ns) < SAME_HOST_NS else now_ns), device_ns


def _unchanged(time_ns: int) -> int:
    return time_ns


# --- files -----------------------------------------------------------------------------------------------------------


def write_chrome_trace(spans: Sequence[TimelineSpan], path: Path) -> None:
    """Write a JSON trace for Perfetto (https://ui.perfetto.dev); gzipped if `path` ends in `.gz`.

    Times start at zero. Processes are devices and the host, threads are lanes.
    """
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in _trace_events(spans):
            file.write(separator + json.dumps(event, default=str))
            separator = ",\n"
        file.write("\n]}\n")


def _trace_events(spans: Sequence[TimelineSpan]) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    tids: dict[str, int] = {}
    origin_ns = min((span.start_ns for span in spans), default=0)
    for span in spans:
        process, _, thread = span.lane.partition("/")
        if process not in pids:
            pids[process] = len(pids) + 1
            yield _metadata("process_name", pids[process], 0, process)
        if span.lane not in tids:
            tids[span.lane] = len(tids) + 1
            yield _metadata("thread_name", pids[process], tids[span.lane], thread)
        event: dict[str, Any] = {"name": span.name, "pid": pids[process], "tid": tids[span.lane]}
        event["ts"] = (span.start_ns - origin_ns) / 1e3
        match span.mark:
            case Mark.SPAN:
                event |= {"ph": "X", "dur": span.duration_ns / 1e3}
            case Mark.INSTANT:
                event |= {"ph": "i", "s": "t"}
            case Mark.COUNTER:
                event |= {"ph": "C"}
        if span.args:
            event["args"] = dict(span.args)
        yield event


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_csv(spans: Sequence[TimelineSpan], path: Path) -> None:
    """Write a table: mark, lane, name, start_us and duration_us as floats, args as JSON."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("mark", "lane", "name", "start_us", "duration_us", "args"))
        for span in spans:
            start_us, duration_us = (span.start_ns - origin_ns) / 1e3, span.duration_ns / 1e3
            args = json.dumps(dict(span.args), default=str)
            table.writerow((span.mark, span.lane, span.name, start_us, duration_us, args))


WRITERS: dict[str, TimelineWriter] = {
    ".json": write_chrome_trace,
    ".json.gz": write_chrome_trace,
    ".csv": write_csv,
}


def find_writer(path: Path, writers: Mapping[str, TimelineWriter]) -> TimelineWriter:
    """The writer of the longest suffix that `path` ends in.

    Raises:
        ConfigError: there is none.
    """
    suffixes = [suffix for suffix in writers if path.name.endswith(suffix)]
    if not suffixes:
        raise ConfigError(f"no writer for a timeline named {path}; its name may end in {', '.join(sorted(writers))}.")
    return writers[max(suffixes, key=len)]
