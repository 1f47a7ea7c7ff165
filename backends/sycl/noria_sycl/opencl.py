"""The runtime on PyOpenCL: every OpenCL driver there is."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyopencl as cl

from noria.api import DeviceKind
from noria_sycl.runtime import BuildError, Bytes, EventError, Kernel, Limits, LocalMemory, Runtime, RuntimeQueue

_NVIDIA = "nvidia"


def device_kind(device: cl.Device) -> DeviceKind:
    """What kind of device it is."""
    if device.type & cl.device_type.CPU:
        return DeviceKind.CPU
    return DeviceKind.INTEGRATED if device.host_unified_memory else DeviceKind.GPU


def device_limits(device: cl.Device) -> Limits:
    """The limits of a device, asked of the device itself: its platform may speak a newer OpenCL than it does."""
    return Limits(
        kind=device_kind(device),
        vendor=device.vendor.strip(),
        n_compute_unit=device.max_compute_units,
        local_nbytes=device.local_mem_size,
        max_group_size=device.max_work_group_size,
        language=_language(device),
        extensions=frozenset(device.extensions.split()),
    )


def _language(device: cl.Device) -> tuple[int, int]:
    """From "OpenCL C 1.2 ...". A device of OpenCL 3 may say 1.2 there, and list the versions it takes elsewhere."""
    major, _, minor = device.opencl_c_version.split()[2].partition(".")
    language = (int(major), int(minor))
    if _version(device) >= (3, 0):
        with suppress(cl.Error, AttributeError):
            every = (v.version for v in device.opencl_c_all_versions)
            language = max(language, *((v >> 22, v >> 12 & 0x3FF) for v in every))
    return language


def _version(device: cl.Device) -> tuple[int, int]:
    """From "OpenCL 3.0 ..."."""
    major, _, minor = device.version.split()[1].partition(".")
    return int(major), int(minor)


class OpenClKernel(Kernel):
    """A function of a program. PyOpenCL is ten times as fast at setting arguments once it knows their types."""

    def __init__(self, program: Any, name: str) -> None:
        self.name = name
        self._program = program
        self._types: list[type | None] | None = None
        self._shared: Any = None

    def bind(self, args: Sequence[Any], *, keep: bool) -> Any:
        if self._types is None:
            self._types = [type(arg) if isinstance(arg, np.generic) else None for arg in args]
            self._shared = self._make()
        kernel = self._make() if keep else self._shared
        kernel.set_args(*[cl.LocalMemory(arg.nbytes) if isinstance(arg, LocalMemory) else arg for arg in args])
        return kernel

    def _make(self) -> Any:
        kernel = cl.Kernel(self._program, self.name)
        kernel.set_scalar_arg_dtypes(self._types)
        return kernel


class OpenClQueue(RuntimeQueue):
    """A command queue with profiling."""

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._queue = cl.CommandQueue(context, device, cl.command_queue_properties.PROFILING_ENABLE)
        # PyOpenCL's events of copies block in their destructor until they are done, so they are let go of afterwards.
        self._copies: deque[cl.Event] = deque()

    def copy_h2d(self, dst: Any, dst_offset: int, src: Bytes, after: Sequence[Any]) -> Any:
        return self._keep(
            cl.enqueue_copy(self._queue, dst, src, dst_offset=dst_offset, is_blocking=False, wait_for=after or None)
        )

    def copy_d2h(self, dst: Bytes, src: Any, src_offset: int, after: Sequence[Any]) -> Any:
        return self._keep(
            cl.enqueue_copy(self._queue, dst, src, src_offset=src_offset, is_blocking=False, wait_for=after or None)
        )

    def copy_d2d(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int, after: Sequence[Any]) -> Any:
        return cl.enqueue_copy(
            self._queue,
            dst,
            src,
            byte_count=nbytes,
            src_offset=src_offset,
            dst_offset=dst_offset,
            wait_for=after or None,
        )

    def launch(self, bound: Any, n_items: tuple[int, ...], group: tuple[int, ...], after: Sequence[Any]) -> Any:
        return cl.enqueue_nd_range_kernel(self._queue, bound, n_items, group, None, after or None)

    def barrier(self, after: Sequence[Any]) -> Any:
        if after:
            cl.enqueue_barrier(self._queue, wait_for=after)
        return cl.enqueue_marker(self._queue)

    def flush(self) -> None:
        self._queue.flush()

    def finish(self) -> None:
        self._queue.finish()
        self._copies.clear()

    def _keep(self, copy: cl.Event) -> cl.Event:
        copies = self._copies
        while copies and copies[0].command_execution_status <= cl.command_execution_status.COMPLETE:
            copies.popleft()
        copies.append(copy)
        return copy


class OpenClRuntime(Runtime):
    """An OpenCL device in a context of its own."""

    errors = (cl.Error, EventError)

    def __init__(self, device: cl.Device) -> None:
        self._device = device
        self._context = cl.Context([device])
        self._maps = cl.CommandQueue(self._context, device)
        self.limits = device_limits(device)
        self.max_buffer_nbytes = device.max_mem_alloc_size
        on_cpu = self.limits.kind is DeviceKind.CPU
        self.reads_host = self.shares_host = on_cpu  # elsewhere a driver may copy or move what a kernel touches
        self.blocking_copies = _NVIDIA in self.limits.vendor.lower()

    # --- memory --------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Any:
        try:
            return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, nbytes)
        except cl.MemoryError as error:
            raise MemoryError(str(error)) from error

    def alloc_host(self, nbytes: int) -> tuple[Any, Bytes]:
        if self.shares_host:
            memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # begins with a page
            return self.share_host(memory), memory
        try:
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
            handle = cl.Buffer(self._context, flags, nbytes)
            access = cl.map_flags.READ | cl.map_flags.WRITE
            memory, _ = cl.enqueue_map_buffer(self._maps, handle, access, 0, (nbytes,), np.uint8)
        except cl.Error as error:
            raise MemoryError(str(error)) from error
        return handle, memory

    def share_host(self, memory: Bytes) -> Any:
        access = cl.mem_flags.READ_WRITE if memory.flags.writeable else cl.mem_flags.READ_ONLY
        try:
            return cl.Buffer(self._context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=memory)
        except cl.Error as error:
            raise MemoryError(str(error)) from error

    def free(self, handle: Any) -> None:
        handle.release()

    # --- kernels -------------------------------------------------------------------------------------------------

    def build(self, source: str, options: Sequence[str], binary: bytes | None = None) -> tuple[Any, bytes | None]:
        make = cl._cl._Program  # the class under cl.Program, which has a cache of its own
        try:
            program = make(self._context, *([source] if binary is None else [[self._device], [binary]]))
            program.build(" ".join(options).encode(), [self._device])
        except cl.Error as error:
            raise BuildError(str(error)) from error
        if binary is not None:
            return program, binary
        return program, program.get_info(cl.program_info.BINARIES)[0] or None

    def kernel(self, program: Any, name: str) -> Kernel:
        return OpenClKernel(program, name)

    # --- queues and events ---------------------------------------------------------------------------------------

    def queue(self) -> RuntimeQueue:
        return OpenClQueue(self._context, self._device)

    def is_done(self, event: Any) -> bool:
        status = event.command_execution_status
        if status < 0:
            raise EventError(f"the device reports error {status}")
        return bool(status == cl.command_execution_status.COMPLETE)

    def wait(self, event: Any) -> None:
        event.wait()
        self.is_done(event)

    def end_ns(self, event: Any) -> int | None:
        try:
            return int(event.profile.end)
        except cl.Error:  # some drivers do not time markers
            return None

    def close(self) -> None:
        with suppress(cl.Error):
            self._maps.finish()
