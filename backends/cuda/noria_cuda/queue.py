"""Streams, events and captured graphs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cupy.cuda import runtime
from cupy.cuda.runtime import CUDARuntimeError

from noria.api import CopyRegion, Event, Program, Queue, QueueKind, Span
from noria.api.errors import DeviceTimeout, FeatureUnsupported, KernelLaunchError
from noria_cuda.errors import CUDA_ERRORS, NOT_READY, translate
from noria_cuda.launch import address
from noria_cuda.libraries import driver
from noria_cuda.memory import CudaHostBuffer

if TYPE_CHECKING:
    from noria_cuda.device import CudaDevice

_EXTERNAL = 1  # cudaEventRecordExternal, cudaEventWaitExternal
_POLL_S = 20e-6


class CudaEvent(Event):
    """A CUDA event; its handle comes from a pool of the device and goes back there.

    Attributes:
        armed: False in a program that has not run.
    """

    def __init__(self, device: CudaDevice, label: str, *, armed: bool = True) -> None:
        self.device = device
        self.label = label
        self.armed = armed
        self.handle = device.take_event()

    def done(self) -> bool:
        if not self.armed:
            return False
        status: int = runtime.eventQuery(self.handle)
        if status in (0, NOT_READY):
            return status == 0
        raise translate(self.device.info.id, CUDARuntimeError(status), f"event '{self.label}'")

    def wait(self, timeout_s: float | None = None) -> None:
        self.check_armed()
        if timeout_s is None:
            try:
                runtime.eventSynchronize(self.handle)
            except CUDARuntimeError as error:
                raise translate(self.device.info.id, error, f"event '{self.label}'") from error
            return
        end = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end:
                raise DeviceTimeout(self.device.info.id, f"event '{self.label}' is not done after {timeout_s} s")
            time.sleep(_POLL_S)

    def timestamp_ns(self) -> int | None:
        return self.device.time_ns(self.handle) if self.done() else None

    def check_armed(self) -> None:
        """Raise FeatureUnsupported for an event of a program that has not run."""
        if not self.armed:
            raise FeatureUnsupported(f"event '{self.label}' belongs to a program that has not been run")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.device.give_event(self.handle)


class CudaProgram(Program):
    """A graph, and the events in it: their handles must not be recorded anew elsewhere while it lives."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(key)
        self.graph = 0
        self.events: list[CudaEvent] = []

    def __del__(self) -> None:
        if self.graph:
            with suppress(*CUDA_ERRORS):
                runtime.graphExecDestroy(self.graph)


class CudaQueue(Queue):
    """A stream that does not synchronize with the default stream.

    Attributes:
        stream_ptr: its handle.
        ends_in_kernel: whether the latest work of the program being recorded is a kernel that the launcher enqueued.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice, kind: QueueKind, index: int) -> None:
        super().__init__(device, kind, index)
        device.activate()
        self.stream_ptr: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        self.ends_in_kernel = False

    def close(self) -> None:
        """Give the stream back."""
        with suppress(*CUDA_ERRORS):  # a lost device has no streams
            runtime.streamDestroy(self.stream_ptr)

    # --- copies --------------------------------------------------------------------------------------------------

    def _copy_h2d(self, regions: Sequence[CopyRegion]) -> None:
        for region in regions:
            self._copy(region.dst, region.src, region.src, runtime.memcpyHostToDevice)

    def _copy_d2h(self, dst: Span, src: Span) -> None:
        self._copy(dst, src, dst, runtime.memcpyDeviceToHost)

    def _copy(self, dst: Span, src: Span, host: Span, kind: int) -> None:
        assert isinstance(host.buffer, CudaHostBuffer)
        self.ends_in_kernel = False
        to, at = address(dst), address(src)
        for offset, nbytes in host.buffer.pieces(host):
            runtime.memcpyAsync(to + offset, at + offset, nbytes, kind, self.stream_ptr)

    def _copy_d2d(self, dst: Span, src: Span) -> None:
        self.ends_in_kernel = False
        runtime.memcpyAsync(address(dst), address(src), src.nbytes, runtime.memcpyDeviceToDevice, self.stream_ptr)

    # --- order ---------------------------------------------------------------------------------------------------

    def _record(self, label: str) -> CudaEvent:
        self.device.activate()
        event = CudaEvent(self.device, label)
        try:
            runtime.eventRecord(event.handle, self.stream_ptr)
        except CUDARuntimeError as error:
            raise translate(self.device.info.id, error, f"{self.name}: recording '{label}'") from error
        return event

    def _wait(self, event: Event) -> None:
        self.ends_in_kernel = False
        if not isinstance(event, CudaEvent):
            event.wait()
        elif self.recording:
            runtime.streamWaitEvent(self.stream_ptr, event.handle, _EXTERNAL)
        else:
            event.check_armed()
            runtime.streamWaitEvent(self.stream_ptr, event.handle, 0)

    def _synchronize(self) -> None:
        self.device.activate()
        try:
            runtime.streamSynchronize(self.stream_ptr)
        except CUDARuntimeError as error:
            raise translate(self.device.info.id, error, self.name) from error

    def _delay(self, duration_ns: int) -> None:
        self.device.launch(self, "delay", "delay", (1, 1, 1), 1, (duration_ns,))

    # --- programs: a captured graph ------------------------------------------------------------------------------

    def _enqueue(self, call: Callable[[], None]) -> None:
        self.device.activate()
        try:
            call()
        except CUDA_ERRORS as error:
            raise translate(self.device.info.id, error, self.name) from error

    def _begin_program(self, key: Hashable) -> CudaProgram:
        self.ends_in_kernel = False
        # Relaxed: whoever allocates or asks an event of another queue meanwhile must not break the recording.
        self._enqueue(lambda: runtime.streamBeginCapture(self.stream_ptr, runtime.streamCaptureModeRelaxed))
        return CudaProgram(key)

    def _record_in_program(self, program: Program, label: str) -> CudaEvent:
        assert isinstance(program, CudaProgram)
        self.ends_in_kernel = False
        event = CudaEvent(self.device, label, armed=False)
        program.events.append(event)
        # External: the event is recorded at every run, and not an edge of the graph. CuPy has no such function.
        status = driver().cuEventRecordWithFlags(
            ctypes.c_void_p(event.handle), ctypes.c_void_p(self.stream_ptr), ctypes.c_uint(_EXTERNAL)
        )
        if status:
            raise KernelLaunchError(
                self.device.info.id, f"{self.name}: recording '{label}' in a program: CUDA {status}"
            )
        return event

    def _end_program(self, program: Program) -> None:
        assert isinstance(program, CudaProgram)

        def instantiate() -> None:
            captured = runtime.streamEndCapture(self.stream_ptr)
            program.graph = runtime.graphInstantiate(captured)
            runtime.graphDestroy(captured)

        self._enqueue(instantiate)

    def _abandon_program(self, program: Program) -> None:
        with suppress(*CUDA_ERRORS):  # the capture may be invalid: that it ends is all that matters
            runtime.graphDestroy(runtime.streamEndCapture(self.stream_ptr))

    def _run(self, program: Program) -> None:
        assert isinstance(program, CudaProgram)
        self._enqueue(lambda: runtime.graphLaunch(program.graph, self.stream_ptr))
        for event in program.events:
            event.armed = True
