"""Queues of the reference device: a worker thread each, so copies and ops really run beside each other and the host."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from noria.api import CopyRegion, Event, Queue, QueueKind, Span
from noria.api.errors import DeviceError, DeviceTimeout, KernelLaunchError
from noria.builtin.reference.memory import ReferenceDeviceBuffer, span_bytes

if TYPE_CHECKING:
    from noria.api import Device


class ReferenceEvent(Event):
    """Set by the worker of its queue."""

    def __init__(self, queue: ReferenceQueue, label: str) -> None:
        self.queue = queue
        self.label = label
        self.error: DeviceError | None = None
        self._finished = threading.Event()
        self._time_ns: int | None = None

    def finish(self, error: DeviceError | None) -> None:
        """Everything before the event has run, or `error` stopped it."""
        self.error = error
        self._time_ns = time.perf_counter_ns()
        self._finished.set()

    def finished(self) -> bool:
        """Block until `finish`; whether there was no error."""
        self._finished.wait()
        return self.error is None

    def done(self) -> bool:
        if not self._finished.is_set():
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._finished.wait(timeout_s):
            device = self.queue.device.info.id
            raise DeviceTimeout(device, f"event '{self.label}' of {self.queue.name} is not done after {timeout_s} s")
        if self.error is not None:
            raise self.error

    def timestamp_ns(self) -> int | None:
        return self._time_ns


class ReferenceQueue(Queue):
    """An in-order queue.

    Once a piece of work has failed, the rest is skipped and every later event carries the error, as do the events of
    queues that wait for one of them.
    """

    def __init__(self, device: Device, kind: QueueKind, index: int) -> None:
        super().__init__(device, kind, index)
        self._error: DeviceError | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._run_work, name=self.name, daemon=True)
        self._worker.start()

    def push(self, label: str, work: Callable[[], None], writes: Iterable[Span] = ()) -> None:
        """Have the worker run `work`, which may change `writes`."""
        self._work.put(partial(self._perform, label, work, writes))

    def _synchronize(self) -> None:
        self._record("synchronize").wait()

    def _delay(self, duration_ns: int) -> None:
        self._enqueue(partial(self.push, "delay", partial(time.sleep, duration_ns / 1e9)))

    def stop(self) -> None:
        """End the worker after what is enqueued."""
        self._work.put(None)
        self._worker.join()

    # --- the host's side -----------------------------------------------------------------------------------------

    def _copy_h2d(self, regions: Sequence[CopyRegion]) -> None:
        self.push("h2d", partial(_copy, regions), [region.dst for region in regions])

    def _copy_d2h(self, dst: Span, src: Span) -> None:
        self.push("d2h", partial(_copy, [CopyRegion(dst, src)]))

    def _copy_d2d(self, dst: Span, src: Span) -> None:
        self.push("d2d", partial(_copy, [CopyRegion(dst, src)]), [dst])

    def _record(self, label: str) -> ReferenceEvent:
        event = ReferenceEvent(self, label)
        self._work.put(lambda: event.finish(self._error))
        return event

    def _wait(self, event: Event) -> None:
        if self.device.caps.device_wait and isinstance(event, ReferenceEvent) and event.queue.device is self.device:
            self._work.put(partial(self._await, event))
        else:
            event.wait()

    # --- the worker's side ---------------------------------------------------------------------------------------

    def _run_work(self) -> None:
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            while (work := self._work.get()) is not None:
                work()

    def _perform(self, label: str, work: Callable[[], None], writes: Iterable[Span]) -> None:
        if self._error is not None:
            return
        try:
            work()
        except DeviceError as error:
            self._fail(error, error)
        except Exception as error:
            text = f"{label} failed on {self.name}: {type(error).__name__}: {error}"
            self._fail(KernelLaunchError(self.device.info.id, text), error)
        for span in writes:
            if isinstance(span.buffer, ReferenceDeviceBuffer):
                span.buffer.version += 1  # only now: what a reader made of a half-written state must not count

    def _fail(self, error: DeviceError, cause: Exception) -> None:
        traceback.clear_frames(cause.__traceback__)  # they hold views of buffers that are to be freed
        if error is not cause:
            error.__cause__ = cause
        self._error = error

    def _await(self, event: ReferenceEvent) -> None:
        if self._error is None and not event.finished():
            self._error = event.error


def _copy(regions: Sequence[CopyRegion]) -> None:
    for region in regions:
        span_bytes(region.dst)[:] = span_bytes(region.src)
