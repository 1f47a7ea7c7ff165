"""Programs: recorded once, run many times, with everything that changes read when they run."""

from __future__ import annotations

import numpy as np
import pytest

from noria.api import Op, Program
from noria.api.errors import FeatureUnsupported
from noria.testing.accuracy import assert_same_bits
from noria.testing.bench import MARGIN, POISON, Bench, busy
from noria.testing.fixtures import ConformanceSuite

NBYTES = 64 * 1024
DELAY_MS = 100.0


class ProgramCases(ConformanceSuite):
    """`Queue.program` and `Queue.run`."""

    def test_recording_runs_nothing(self, bench: Bench) -> None:
        a, b = bench.alloc(NBYTES), bench.alloc(NBYTES)
        bench.write(a, np.full(NBYTES, MARGIN, np.uint8))
        bench.write(b, np.full(NBYTES, POISON, np.uint8))
        with bench.queue.program("copy") as program:
            bench.queue.copy_d2d(b.span(), a.span())
        assert isinstance(program, Program)
        assert program.key == "copy"
        assert np.all(bench.content(b) == POISON)
        bench.queue.run(program)
        assert np.all(bench.content(b) == MARGIN)

    def test_runs_follow_one_another(self, bench: Bench, rng: np.random.Generator) -> None:
        """Runs enqueued without the host between them each see what the one before left."""
        contents = rng.integers(0, 256, (3, NBYTES), dtype=np.uint8)
        a, b, c = (bench.alloc(NBYTES) for _ in contents)
        for buffer, content in zip((a, b, c), contents, strict=True):
            bench.write(buffer, content)
        with bench.queue.program("swap a and b") as program:
            bench.queue.copy_d2d(c.span(), a.span())
            bench.queue.copy_d2d(a.span(), b.span())
            bench.queue.copy_d2d(b.span(), c.span())
        for _ in range(7):
            bench.queue.run(program)
        assert np.array_equal(bench.content(a), contents[1])
        assert np.array_equal(bench.content(b), contents[0])

    def test_copies_read_when_they_run(self, bench: Bench, rng: np.random.Generator) -> None:
        """Host memory is read, and written, by the copies of each run."""
        source, back = bench.host(np.zeros(NBYTES, np.uint8)), bench.host(np.zeros(NBYTES, np.uint8))
        a = bench.alloc(NBYTES)
        with bench.queue.program("there and back") as program:
            bench.queue.copy_h2d(a.span(), source.span())
            bench.queue.copy_d2h(back.span(), a.span())
        for _ in range(4):
            source.array()[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
            bench.queue.run(program)
            bench.queue.record().wait()
            assert np.array_equal(back.array(), source.array())

    def test_ops_read_when_they_run(self, bench: Bench, rng: np.random.Generator) -> None:
        """An op of a program works on what its tensors hold at each run."""
        x, out = bench.act(bench.normal(rng, 3, 64)), bench.out(3, 64)
        bench.op(Op.SCALE, out, x, 2.0)  # skips the test if the op is missing
        with bench.queue.program("scale") as program:
            bench.device.kernels.scale(bench.queue, out, x, 2.0)
        for _ in range(3):
            values = bench.normal(rng, 3, 64)
            bench.queue.copy_d2d(x.span, bench.act(values).span)
            bench.queue.run(program)
            assert_same_bits(bench.read(out), 2 * values)

    def test_event_stands_for_the_latest_run(self, bench: Bench, rng: np.random.Generator) -> None:
        """An event inside a program is done when the latest run has come past it, and not when an earlier one had."""
        a, b = bench.alloc(NBYTES), bench.alloc(NBYTES)
        with bench.queue.program("copy and tell") as program:
            bench.queue.copy_d2d(b.span(), a.span())
            event = bench.queue.record("copied")
            bench.queue.copy_d2d(a.span(), b.span())
        assert event.label == "copied"
        for _ in range(3):
            content = rng.integers(0, 256, NBYTES, dtype=np.uint8)
            bench.write(a, content)
            bench.queue.run(program)
            event.wait(10)
            assert event.done()
            assert np.array_equal(bench.content(b), content)
        busy(bench.queue, DELAY_MS)
        bench.queue.run(program)
        bench.queue.flush()
        assert not event.done()
        event.wait()
        assert event.done()

    def test_queues_wait_for_programs(self, bench: Bench, rng: np.random.Generator) -> None:
        """A program on each of two queues, and an event from one to the other inside them, on every run."""
        if not bench.caps.copy_queues:
            pytest.skip("caps.copy_queues is 0: there is one queue")
        source, back = bench.host(np.zeros(NBYTES, np.uint8)), bench.host(np.zeros(NBYTES, np.uint8))
        slot, out = bench.alloc(NBYTES), bench.alloc(NBYTES)
        with bench.copy_queue.program("fill") as fill:
            bench.copy_queue.copy_h2d(slot.span(), source.span())
            ready = bench.copy_queue.record("ready")
        with bench.queue.program("use") as use:
            bench.queue.wait(ready)
            bench.queue.copy_d2d(out.span(), slot.span())
            bench.queue.copy_d2h(back.span(), out.span())
            used = bench.queue.record("used")
        for delayed in (bench.copy_queue, bench.queue, bench.copy_queue):
            source.array()[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
            busy(delayed, 20)
            bench.copy_queue.run(fill)
            bench.queue.run(use)
            used.wait(10)
            assert np.array_equal(back.array(), source.array())

    def test_one_program_at_a_time(self, bench: Bench) -> None:
        """Recording inside a recording is refused, and the outer one goes on."""
        a, b = bench.alloc(NBYTES), bench.alloc(NBYTES)
        bench.write(a, np.full(NBYTES, MARGIN, np.uint8))
        with bench.queue.program("outer") as program:
            with pytest.raises(FeatureUnsupported), bench.queue.program("inner"):
                pass
            bench.queue.copy_d2d(b.span(), a.span())
        bench.queue.run(program)
        assert np.all(bench.content(b) == MARGIN)

    def test_queue_works_after_a_failed_recording(self, bench: Bench) -> None:
        """An error inside the block reaches the caller, and the queue is out of recording."""
        a, b = bench.alloc(NBYTES), bench.alloc(NBYTES)
        bench.write(a, np.full(NBYTES, MARGIN, np.uint8))

        def fail() -> None:
            with bench.queue.program("failing"):
                bench.queue.copy_d2d(b.span(), a.span())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        bench.queue.copy_d2d(b.span(), a.span())
        assert np.all(bench.content(b) == MARGIN)
