"""A queue whose commands are enqueued by a thread of its own, for drivers whose copies block whoever asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pyopencl as cl

from noria_sycl.runtime import Bytes, EventError, RuntimeQueue


class ThreadedEvent:
    """What stands for a command that the thread may not have enqueued yet.

    Attributes:
        gate: an event that the host completes, for other queues to wait for.
        native: the command's own event, once it is done.
    """

    def __init__(self, context: cl.Context) -> None:
        self.gate = cl.UserEvent(context)
        self.native: Any = None
        self._error: Exception | None = None
        self._finished = threading.Event()

    def finish(self, native: Any, error: Exception | None) -> None:
        """Called by the thread."""
        self.native, self._error = native, error
        with suppress(cl.Error):  # whoever waits for it has gone with its queue
            self.gate.set_status(cl.command_execution_status.COMPLETE if error is None else -1)
        self._finished.set()

    def is_done(self) -> bool:
        """Raises EventError if the command failed."""
        if self._error is not None:
            raise EventError(str(self._error))
        return self._finished.is_set()

    def wait(self) -> None:
        """Raises EventError if the command failed."""
        self._finished.wait()
        self.is_done()


class CopyThread(RuntimeQueue):
    """`inner`, used by a thread. It lives until `close`."""

    deferred = True

    def __init__(self, context: cl.Context, inner: RuntimeQueue) -> None:
        self._context = context
        self._inner = inner
        self._commands: SimpleQueue[tuple[Callable[[], Any], ThreadedEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="noria-copies", daemon=True)
        self._thread.start()

    def copy_h2d(self, dst: Any, dst_offset: int, src: Bytes, after: Sequence[Any]) -> Any:
        return self._later(lambda: self._inner.copy_h2d(dst, dst_offset, src, after))

    def copy_d2h(self, dst: Bytes, src: Any, src_offset: int, after: Sequence[Any]) -> Any:
        return self._later(lambda: self._inner.copy_d2h(dst, src, src_offset, after))

    def copy_d2d(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int, after: Sequence[Any]) -> Any:
        return self._later(lambda: self._inner.copy_d2d(dst, dst_offset, src, src_offset, nbytes, after))

    def launch(self, bound: Any, n_items: tuple[int, ...], group: tuple[int, ...], after: Sequence[Any]) -> Any:
        return self._later(lambda: self._inner.launch(bound, n_items, group, after))

    def barrier(self, after: Sequence[Any]) -> Any:
        return self._later(lambda: self._inner.barrier(after))

    def flush(self) -> None:
        pass  # the thread does, by waiting

    def finish(self) -> None:
        with suppress(EventError):  # whoever has the event of what failed is told
            self._later(lambda: self._inner.barrier(())).wait()

    def close(self) -> None:
        """End the thread, after everything that has been asked for."""
        self._commands.put(None)
        self._thread.join()

    def _later(self, command: Callable[[], Any]) -> ThreadedEvent:
        event = ThreadedEvent(self._context)
        self._commands.put((command, event))
        return event

    def _work(self) -> None:
        while (item := self._commands.get()) is not None:
            command, event = item
            native, error = None, None
            try:
                native = command()
                native.wait()
            except (cl.Error, EventError) as failure:
                error = failure
            event.finish(native, error)
            del item, command, event, native  # a buffer that nobody else holds is not kept until the next command
