"""Timelines: spans of simulated queues on the host's clock, and the files made from them."""

from __future__ import annotations

import csv
import gzip
import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from noria.api import BufferUsage, Event, QueueKind
from noria.api.errors import ConfigError, DeviceError
from noria.builtin.sim import open_sim
from noria.runtime.timeline import RESOLVE_EVERY, WRITERS, Mark, Timeline, TimelineSpan, write_chrome_trace


class FixedEvent(Event):
    """An event whose time is given; `error` is what its work failed with."""

    def __init__(self, time_ns: int | None, *, is_done: bool = True, error: DeviceError | None = None) -> None:
        self.time_ns, self.is_done, self.error = time_ns, is_done, error

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.is_done = True

    def timestamp_ns(self) -> int | None:
        return self.time_ns


@pytest.fixture
def device():
    with open_sim() as device:
        yield device


@pytest.fixture
def queue(device):
    return device.queue(QueueKind.COMPUTE)


class Clocks:
    """The host's clock and a device's, set by hand."""

    host_ns = 10**15
    device_ns = 5_000

    def advance(self, host_ns: int, device_ns: int) -> None:
        self.host_ns += host_ns
        self.device_ns += device_ns


@pytest.fixture
def clocks(monkeypatch, device):
    clocks = Clocks()
    monkeypatch.setattr("noria.runtime.timeline.time", SimpleNamespace(perf_counter_ns=lambda: clocks.host_ns))
    monkeypatch.setattr(device, "clock_sync", lambda: (clocks.host_ns, clocks.device_ns))
    return clocks


# --- spans -----------------------------------------------------------------------------------------------------------


def test_queues_are_lanes_and_spans_last_as_long_as_the_work(device):
    timeline = Timeline()
    compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
    on_device = device.alloc(1 << 26, usage=BufferUsage.COMPUTE, label="x")
    on_host = device.alloc_host(1 << 26, label="x")
    begin = copy.record()
    copy.copy_h2d(on_device.span(), on_host.span())
    end = copy.record()
    timeline.span(copy, "copy", begin, end, nbytes=1 << 26)
    before = compute.record()
    compute.delay(1_000_000)
    timeline.span(compute, "kernel", before, compute.record())
    copied, computed = sorted(timeline.spans(), key=lambda span: span.name)

    assert (copied.lane, copied.args) == ("sim0/copy", {"nbytes": 1 << 26})
    assert copied.duration_ns == end.timestamp_ns() - begin.timestamp_ns()
    assert computed.lane == "sim0/compute"
    assert computed.duration_ns == pytest.approx(1_000_000, rel=0.02)
    assert computed.start_ns < copied.start_ns + copied.duration_ns, "they ran at the same time"


def test_device_times_move_to_the_clock_of_the_host(clocks, queue):
    timeline = Timeline()
    timeline.span(queue, "work", FixedEvent(5_100), FixedEvent(5_350))
    (span,) = timeline.spans()
    assert (span.start_ns, span.duration_ns) == (clocks.host_ns + 100, 250)


def test_the_drift_of_a_device_clock_is_spread_over_the_run(clocks, queue):
    timeline = Timeline()
    begin_ns = clocks.host_ns
    timeline.span(queue, "halfway", FixedEvent(5_000 + 10 * 10**9), FixedEvent(5_000 + 10 * 10**9 + 1000))
    clocks.advance(20 * 10**9 + 1_000_000, 20 * 10**9)
    (span,) = timeline.spans()
    assert span.start_ns == begin_ns + 10 * 10**9 + 500_000


def test_a_virtual_clock_is_not_taken_for_a_drifting_one(clocks, queue):
    timeline = Timeline()
    begin_ns = clocks.host_ns
    timeline.span(queue, "work", FixedEvent(5_000), FixedEvent(5_000 + 10**9))
    clocks.advance(1_000_000, 20 * 10**9)
    (span,) = timeline.spans()
    assert (span.start_ns, span.duration_ns) == (begin_ns, 10**9)


def test_a_simulated_host_begins_where_the_real_one_is(device, queue):
    timeline = Timeline()
    with timeline.host("before"):
        pass
    begin = queue.record()
    queue.delay(1_000)
    timeline.span(queue, "work", begin, queue.record())
    before, work = timeline.spans()
    assert 0 <= work.start_ns - before.start_ns < 10**9


def test_events_are_let_go_once_their_times_are_read(queue):
    timeline = Timeline()
    alive: weakref.WeakSet[FixedEvent] = weakref.WeakSet()
    for i in range(4 * RESOLVE_EVERY):
        event = FixedEvent(i)
        alive.add(event)
        timeline.span(queue, "work", event, event)
    assert len(alive) <= RESOLVE_EVERY
    assert len(timeline.spans()) == 4 * RESOLVE_EVERY


def test_a_backlog_is_not_walked_for_every_span(queue):
    timeline = Timeline()
    asked = 0

    class Busy(FixedEvent):
        def done(self) -> bool:
            nonlocal asked
            asked += 1
            return False

    n = 16 * RESOLVE_EVERY
    for _ in range(n):
        timeline.span(queue, "work", Busy(0), Busy(1))
    assert 0 < asked < 3 * n


def test_work_in_flight_is_kept_and_waited_for_at_the_end(queue):
    timeline = Timeline()
    slow = FixedEvent(7, is_done=False)
    timeline.span(queue, "slow", FixedEvent(3), slow)
    timeline.resolve()
    assert not slow.is_done, "resolve does not wait"
    assert [span.name for span in timeline.spans()] == ["slow"]


def test_each_run_of_a_program_has_its_own_times(device, queue):
    timeline = Timeline()
    with queue.program("token") as program:
        begin = queue.record()
        queue._enqueue(lambda: queue.delay(2_000))
        end = queue.record()
    for _ in range(3):
        queue.run(program)
        timeline.span(queue, "token", begin, end)
        queue.synchronize()
        timeline.resolve()
    starts = [span.start_ns for span in timeline.spans()]
    assert starts == sorted(set(starts))
    assert len(starts) == 3


def test_failed_and_untimed_work_is_left_out_with_a_warning(caplog, queue):
    timeline = Timeline()
    timeline.span(queue, "failed", FixedEvent(0), FixedEvent(1, error=DeviceError("sim0", "lost")))
    timeline.span(queue, "untimed", FixedEvent(None), FixedEvent(None))
    timeline.span(queue, "good", FixedEvent(0), FixedEvent(1))
    assert [span.name for span in timeline.spans()] == ["good"]
    assert "lacks 2 spans" in caplog.text


def test_no_duration_is_negative(queue):
    timeline = Timeline()
    timeline.span(queue, "jitter", FixedEvent(10), FixedEvent(9))
    assert timeline.spans()[0].duration_ns == 0


def test_the_host_has_lanes_too_and_errors_end_spans():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.host("load", lane="loader", nbytes=7), timeline.host("inner"):
        raise KeyError
    timeline.instant("routing read")
    timeline.counter("cache hits", 3)
    load, inner, instant, counter = timeline.spans()
    assert (load.lane, load.name, load.args) == ("host/loader", "load", {"nbytes": 7})
    assert load.start_ns <= inner.start_ns
    assert inner.duration_ns <= load.duration_ns
    assert instant.mark is Mark.INSTANT
    assert (counter.mark, counter.args) == (Mark.COUNTER, {"value": 3})


def test_a_disabled_timeline_keeps_nothing_and_looks_at_nothing(queue):
    timeline = Timeline(enabled=False)
    broken = FixedEvent(0, error=DeviceError("sim0", "lost"))
    for _ in range(2 * RESOLVE_EVERY):
        timeline.span(queue, "work", broken, broken)
    assert isinstance(timeline.host("x"), nullcontext)
    timeline.instant("x")
    timeline.counter("x", 1)
    assert timeline.spans() == []


def test_a_full_timeline_keeps_no_more(caplog, queue):
    timeline = Timeline(max_spans=3)
    for i in range(4):
        timeline.span(queue, f"work {i}", FixedEvent(i), FixedEvent(i + 1))
    timeline.instant("too late")
    assert [span.name for span in timeline.spans()] == ["work 0", "work 1", "work 2"]
    assert "lacks 2 spans" in caplog.text


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def timeline(clocks, device):
    """Two spans on each of two queues, one of them inside the other's, and marks of the host."""
    timeline = Timeline()
    compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
    timeline.counter("hits", 0.5)
    for i in range(2):
        clocks.advance(1_000, 1_000)
        at = clocks.device_ns
        timeline.span(compute, f"ffn {i}", FixedEvent(at), FixedEvent(at + 900), layer=i)
        timeline.span(copy, f"experts {i}", FixedEvent(at + 100), FixedEvent(at + 333))
        timeline.instant(f"done {i}")
    return timeline


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_is_what_perfetto_reads(tmp_path: Path, timeline, name):
    timeline.write(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    events = trace["traceEvents"]

    names = {("process_name", e["pid"]): e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["host", "sim0"]
    assert sorted(lanes.values()) == ["compute", "copy", "host"]
    assert {e["ph"] for e in events} == {"M", "X", "i", "C"}

    body = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in body] == sorted(e["ts"] for e in body)
    assert body[0]["ts"] == 0.0
    seen: set[tuple[int, int]] = set()
    for event in events:
        lane = event["pid"], event["tid"]
        if event["name"] == "thread_name":
            seen.add(lane)
        elif event["ph"] != "M":
            assert lane in seen, "a lane is named before it is used"
            assert isinstance(event["ts"], float)
    spans = {e["name"]: e for e in body if e["ph"] == "X"}
    assert sorted(spans) == ["experts 0", "experts 1", "ffn 0", "ffn 1"]
    assert (spans["ffn 1"]["ts"], spans["ffn 1"]["dur"], spans["ffn 1"]["args"]) == (2.0, 0.9, {"layer": 1})
    assert lanes[spans["experts 0"]["pid"], spans["experts 0"]["tid"]] == "copy"
    assert next(e for e in body if e["ph"] == "C")["args"] == {"value": 0.5}


def test_an_empty_trace_is_a_trace(tmp_path):
    write_chrome_trace([], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_a_table_for_spreadsheets(tmp_path, timeline):
    timeline.write(tmp_path / "trace.csv")
    with (tmp_path / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    row = next(row for row in rows if row["name"] == "ffn 1")
    assert row == {
        "mark": "span",
        "lane": "sim0/compute",
        "name": "ffn 1",
        "start_us": "2.0",
        "duration_us": "0.9",
        "args": '{"layer": 1}',
    }


def test_plugins_add_suffixes_and_the_longest_wins(tmp_path, timeline):
    written: list[tuple[str, list[str]]] = []

    def note(spans: list[TimelineSpan], path: Path) -> None:
        written.append((path.name, [span.name for span in spans]))

    timeline.write(tmp_path / "a.mine.json", WRITERS | {".mine.json": note})
    assert written[0][0] == "a.mine.json"
    assert written[0][1][0] == "hits"
    assert not (tmp_path / "a.mine.json").exists()


def test_an_unknown_suffix_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"trace\.xml.*\.csv, \.json, \.json\.gz"):
        Timeline().write(tmp_path / "trace.xml")


def test_a_path_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no-such-folder/trace\.json.*No such file"):
        Timeline().write(tmp_path / "no-such-folder" / "trace.json")
