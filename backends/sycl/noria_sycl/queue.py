"""Queues, events and programs.

How ops launch kernels:

    kernel = device.kernel("rows", "rms_norm", ("-DX=float",))     # cl/rows.cl, built once, kept on disk
    queue.launch(kernel, args, n_items, group)                     # global and local size, in work items, x first

`args` are, in the order of the kernel's parameters, buffers (of the device, or of the host where `caps.host_gather`),
None for NULL, NumPy scalars (`np.uint64(offset)`, never a Python number), and `LocalMemory(nbytes)`. A tensor is two
arguments: its whole buffer, and the byte offset of its span as `ulong`; there are no sub-buffers, whose offsets would
have to be aligned. An expert table is up to four buffers with an offset each. A launch without items is skipped.
In a program the launch is kept, with its arguments, and made again by each run: what a kernel is given by value, no run
can change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from noria.api import Buffer, CopyRegion, Event, Program, Queue, QueueKind, Span
from noria.api.errors import DeviceTimeout, FeatureUnsupported
from noria_sycl.memory import SyclDeviceBuffer, SyclHostBuffer
from noria_sycl.runtime import EventError, Kernel, LocalMemory, translate

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

Arg = Buffer | np.generic | LocalMemory | None
Command = Callable[[Sequence[Any]], Any]  # enqueues something after these events of the runtime; its own event

_POLL_S = 20e-6


class SyclEvent(Event):
    """An event of the runtime; None in a program that has not run."""

    def __init__(self, queue: SyclQueue, label: str, native: Any) -> None:
        self.queue = queue
        self.label = label
        self._native = native

    @property
    def native(self) -> Any:
        if self._native is None:
            raise FeatureUnsupported(f"event '{self.label}' belongs to a program that has not been run")
        return self._native

    def arm(self, native: Any) -> None:
        """It stands for the latest run of its program."""
        self._native = native

    def done(self) -> bool:
        if self._native is None:
            return False
        device = self.queue.device
        try:
            return device.runtime.is_done(self._native)
        except device.runtime.errors as error:
            raise translate(device.info.id, error, f"event '{self.label}'") from error

    def wait(self, timeout_s: float | None = None) -> None:
        device = self.queue.device
        if timeout_s is None:
            try:
                device.runtime.wait(self.native)
            except device.runtime.errors as error:
                raise translate(device.info.id, error, f"event '{self.label}'") from error
            return
        assert self.native is not None
        end = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end:
                raise DeviceTimeout(device.info.id, f"event '{self.label}' is not done after {timeout_s} s")
            time.sleep(_POLL_S)

    def timestamp_ns(self) -> int | None:
        return self.queue.device.runtime.end_ns(self._native) if self.done() else None


class SyclProgram(Program):
    """Commands with their arguments; nothing of an op's Python runs again."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(key)
        self.steps: list[Callable[[], None]] = []


class SyclQueue(Queue):
    """An in-order queue of the runtime. Waits are given to the next command, and cost none of their own."""

    device: SyclDevice

    def __init__(self, device: SyclDevice, kind: QueueKind, index: int) -> None:
        super().__init__(device, kind, index)
        self._runtime_queue = device.runtime.queue(copies=kind is QueueKind.COPY)
        self._after: list[Any] = []  # events that the next command waits for
        self._last: Any = None  # event of the latest command

    @property
    def _keeps(self) -> bool:
        return self._recording is not None or self._runtime_queue.deferred

    # --- kernels -------------------------------------------------------------------------------------------------

    def launch(self, kernel: Kernel, args: Sequence[Arg], n_items: tuple[int, ...], group: tuple[int, ...]) -> None:
        """Enqueue a kernel; see the top of this file."""
        if 0 in n_items:
            return
        bound = kernel.bind(
            [arg.handle if isinstance(arg, SyclDeviceBuffer | SyclHostBuffer) else arg for arg in args],
            keep=self._keeps,
        )
        self._do(lambda after: self._runtime_queue.launch(bound, n_items, group, after))

    def _delay(self, duration_ns: int) -> None:
        n_turns = np.uint64(duration_ns * self.device.turns_per_ns)
        bound = self.device.delay_kernel.bind([self.device.delay_sink, n_turns], keep=self._keeps)
        self._do(lambda after: self._runtime_queue.launch(bound, (1,), (1,), after))

    # --- copies --------------------------------------------------------------------------------------------------

    def _copy_h2d(self, regions: Sequence[CopyRegion]) -> None:
        for region in regions:
            dst, src = region.dst, region.src
            assert isinstance(dst.buffer, SyclDeviceBuffer)
            if self._by_handle(src):
                self._copy_d2d(dst, src)
            elif src.nbytes:
                self._do(partial(self._runtime_queue.copy_h2d, dst.buffer.handle, dst.offset, src.host_view()))

    def _copy_d2h(self, dst: Span, src: Span) -> None:
        assert isinstance(src.buffer, SyclDeviceBuffer)
        if self._by_handle(dst):
            self._copy_d2d(dst, src)
        elif src.nbytes:
            self._do(partial(self._runtime_queue.copy_d2h, dst.host_view(), src.buffer.handle, src.offset))

    def _by_handle(self, host: Span) -> bool:
        """Whether a copy names host memory by its handle, not by its address."""
        assert isinstance(host.buffer, SyclHostBuffer)
        return self.device.runtime.copies_handles and host.buffer.handle is not None

    def _copy_d2d(self, dst: Span, src: Span) -> None:
        assert isinstance(dst.buffer, SyclDeviceBuffer | SyclHostBuffer)
        assert isinstance(src.buffer, SyclDeviceBuffer | SyclHostBuffer)
        if src.nbytes:
            to, at = dst.buffer.handle, src.buffer.handle
            self._do(partial(self._runtime_queue.copy_d2d, to, dst.offset, at, src.offset, src.nbytes))

    # --- order ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self._runtime_queue.flush()

    def _do(self, command: Command) -> None:
        """Enqueue a command, or keep it."""
        if self._recording is None:
            self._submit(command)
        else:
            assert isinstance(self._recording, SyclProgram)
            self._recording.steps.append(partial(self._submit, command))

    def _submit(self, command: Command) -> None:
        after, self._after = self._after, []
        try:
            self._last = command(after)
        except self.device.runtime.errors as error:
            raise translate(self.device.info.id, error, self.name) from error

    def _record(self, label: str) -> SyclEvent:
        return SyclEvent(self, label, self._mark())

    def _mark(self) -> Any:
        """An event of the runtime for everything so far: that of the latest command, unless it is long done."""
        runtime = self.device.runtime
        try:
            if self._last is None or self._after or runtime.is_done(self._last):
                self._submit(self._runtime_queue.barrier)
            self._runtime_queue.flush()
        except EventError:
            pass  # the latest command has failed: its event says so
        except runtime.errors as error:
            raise translate(self.device.info.id, error, self.name) from error
        return self._last

    def _wait(self, event: Event) -> None:
        if self._recording is None:
            self._wait_now(event)
        else:
            assert isinstance(self._recording, SyclProgram)
            self._recording.steps.append(lambda: self._wait_now(event))

    def _wait_now(self, event: Event) -> None:
        if not isinstance(event, SyclEvent) or event.queue.device is not self.device:
            event.wait()
        elif event.queue is not self:
            self._after.append(event.native)

    def _synchronize(self) -> None:
        runtime = self.device.runtime
        try:
            if self._after:
                self._submit(self._runtime_queue.barrier)
            self._runtime_queue.finish()
            if self._last is not None:
                runtime.wait(self._last)
        except runtime.errors as error:
            self._last = None  # told once
            raise translate(self.device.info.id, error, self.name) from error

    # --- programs ------------------------------------------------------------------------------------------------

    def _enqueue(self, call: Callable[[], None]) -> None:
        call()  # `_do` keeps what it enqueues

    def _begin_program(self, key: Hashable) -> SyclProgram:
        return SyclProgram(key)

    def _record_in_program(self, program: Program, label: str) -> SyclEvent:
        assert isinstance(program, SyclProgram)
        event = SyclEvent(self, label, None)
        program.steps.append(lambda: event.arm(self._mark()))
        return event

    def _run(self, program: Program) -> None:
        assert isinstance(program, SyclProgram)
        for step in program.steps:
            step()
