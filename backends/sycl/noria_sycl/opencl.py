"""The runtime on PyOpenCL: every OpenCL driver there is."""

from __future__ import annotations

import mmap
import re
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from warnings import catch_warnings

import numpy as np
import pyopencl as cl

from noria.api import DeviceKind
from noria_sycl import nvidia
from noria_sycl.copy_thread import CopyThread, ThreadedEvent
from noria_sycl.runtime import (
    BuildError,
    Bytes,
    EventError,
    Found,
    Kernel,
    Limits,
    LocalMemory,
    Runtime,
    RuntimeQueue,
    RuntimeUnavailable,
)

_OLDEST = (1, 2)
_NVIDIA = "nvidia"
_GENERIC = ("rusticl", "Clover", "Portable Computing Language")  # drivers of many vendors' GPUs


def find(copy_thread: str = "auto") -> list[Found]:
    """OpenCL's devices that can be used, by driver.

    Args:
        copy_thread: "on", "off", or "auto": where copies block otherwise.
    """
    devices: list[cl.Device] = []
    for platform in sorted(cl.get_platforms(), key=lambda platform: str(platform.name)):
        with suppress(cl.Error):  # a driver without a device says so by an error
            devices += platform.get_devices(cl.device_type.CPU | cl.device_type.GPU)
    return [_found(device, copy_thread) for device in _once([d for d in devices if _usable(d)])]


def _usable(device: cl.Device) -> bool:
    compiles = device.available and device.compiler_available
    return bool(compiles and device.address_bits == 64 and _version(device) >= _OLDEST)


def _once(devices: Sequence[cl.Device]) -> list[cl.Device]:
    """Every GPU by one driver, its vendor's rather than a generic one; the CPU by the newest of each driver.

    PoCL may be there twice, from pip and from the system.
    """

    def generic(device: cl.Device) -> bool:
        return device.platform.name.strip() in _GENERIC

    gpus = [device for device in devices if device.type & cl.device_type.GPU]
    served = {gpu.vendor_id for gpu in gpus if not generic(gpu)}
    cpus: dict[str, cl.Device] = {}
    for device in devices:
        if device not in gpus:
            name = device.platform.name
            cpus[name] = max(cpus.get(name, device), device, key=_driver_version)
    return [gpu for gpu in gpus if not (generic(gpu) and gpu.vendor_id in served)] + list(cpus.values())


def _driver_version(device: cl.Device) -> list[int]:
    """[3, 1] of "3.1+debian"."""
    return [int(part) for part in re.findall(r"\d+", device.driver_version)[:2]]


def _found(device: cl.Device, copy_thread: str) -> Found:
    return Found(
        name=device.name.strip(),
        kind=_kind(device),
        arch=" ".join(device.version.split()[:2]),  # "OpenCL 3.0"
        driver=f"{device.platform.name.strip()} {device.driver_version.strip()}",
        memory_nbytes=device.global_mem_size,
        open=partial(_open, device, copy_thread),
    )


def _open(device: cl.Device, copy_thread: str) -> OpenClRuntime:
    try:
        return OpenClRuntime(device, copy_thread)
    except cl.Error as error:
        raise RuntimeUnavailable("opencl", str(error)) from error


def _kind(device: cl.Device) -> DeviceKind:
    if device.type & cl.device_type.CPU:
        return DeviceKind.CPU
    return DeviceKind.INTEGRATED if device.host_unified_memory else DeviceKind.GPU


def _limits(device: cl.Device) -> Limits:
    """The limits of a device, asked of the device itself: its platform may speak a newer OpenCL than it does."""
    return Limits(
        kind=_kind(device),
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


def _natives(after: Sequence[Any]) -> list[cl.Event] | None:
    """Events as a command takes them."""
    return [event.gate if isinstance(event, ThreadedEvent) else event for event in after] or None


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
            cl.enqueue_copy(self._queue, dst, src, dst_offset=dst_offset, is_blocking=False, wait_for=_natives(after))
        )

    def copy_d2h(self, dst: Bytes, src: Any, src_offset: int, after: Sequence[Any]) -> Any:
        return self._keep(
            cl.enqueue_copy(self._queue, dst, src, src_offset=src_offset, is_blocking=False, wait_for=_natives(after))
        )

    def copy_d2d(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int, after: Sequence[Any]) -> Any:
        return cl.enqueue_copy(
            self._queue,
            dst,
            src,
            byte_count=nbytes,
            src_offset=src_offset,
            dst_offset=dst_offset,
            wait_for=_natives(after),
        )

    def launch(self, bound: Any, n_items: tuple[int, ...], group: tuple[int, ...], after: Sequence[Any]) -> Any:
        return cl.enqueue_nd_range_kernel(self._queue, bound, n_items, group, None, _natives(after))

    def barrier(self, after: Sequence[Any]) -> Any:
        if after:
            cl.enqueue_barrier(self._queue, wait_for=_natives(after))
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

    def __init__(self, device: cl.Device, copy_thread: str = "auto") -> None:
        self._device = device
        self._context = cl.Context([device])
        self._maps = cl.CommandQueue(self._context, device)
        self.limits = _limits(device)
        self.max_buffer_nbytes = device.max_mem_alloc_size
        on_cpu = self.limits.kind is DeviceKind.CPU
        self._located = nvidia.EXTENSION in self.limits.extensions
        self.reads_host = on_cpu or self._located  # else a driver may move what a kernel touches
        self.shares_host = on_cpu or (self._located and self._shares_files())
        self.copies_handles = self._located
        self.blocking_copies = _NVIDIA in self.limits.vendor.lower() and not self._located
        self._copy_thread = copy_thread == "on" or (copy_thread == "auto" and self.blocking_copies)
        self._threads: list[CopyThread] = []

    # --- memory --------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Any:
        try:
            handle = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, nbytes)
            if (
                self.limits.kind is not DeviceKind.CPU
            ):  # or a driver allocates when memory is first used, and fails then
                cl.enqueue_migrate_mem_objects(self._maps, [handle], cl.mem_migration_flags.CONTENT_UNDEFINED).wait()
            return handle
        except cl.MemoryError as error:
            raise MemoryError(str(error)) from error

    def alloc_host(self, nbytes: int) -> tuple[Any, Bytes]:
        if self.limits.kind is DeviceKind.CPU:
            memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # begins with a page
            return self.share_host(memory), memory
        try:
            flags = cl.mem_flags.READ_WRITE
            if self._located:
                handle = nvidia.create_buffer(self._context, self._device, flags, nbytes)
            else:
                handle = cl.Buffer(self._context, flags | cl.mem_flags.ALLOC_HOST_PTR, nbytes)
            access = cl.map_flags.READ | cl.map_flags.WRITE
            memory, _ = cl.enqueue_map_buffer(self._maps, handle, access, 0, (nbytes,), np.uint8)
        except cl.Error as error:
            raise MemoryError(str(error)) from error
        return handle, memory

    def share_host(self, memory: Bytes) -> Any:
        flags = cl.mem_flags.READ_WRITE if memory.flags.writeable else cl.mem_flags.READ_ONLY
        flags |= cl.mem_flags.USE_HOST_PTR
        try:
            if self._located:
                return nvidia.create_buffer(self._context, self._device, flags, memory.size, memory)
            return cl.Buffer(self._context, flags, hostbuf=memory)
        except cl.Error as error:
            raise MemoryError(str(error)) from error

    def _shares_files(self) -> bool:
        """Whether a mapped file is taken, which is memory that nobody may write."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
            try:
                self.share_host(memory).release()
            except MemoryError:
                return False
        return True

    def free(self, handle: Any) -> None:
        handle.release()

    # --- kernels -------------------------------------------------------------------------------------------------

    def build(self, source: str, options: Sequence[str], binary: bytes | None = None) -> tuple[Any, bytes | None]:
        make = cl._cl._Program  # the class under cl.Program, which has a cache of its own
        try:
            program = make(self._context, *([source] if binary is None else [[self._device], [binary]]))
            with catch_warnings(action="ignore", category=cl.CompilerWarning):
                program.build(" ".join(options).encode(), [self._device])
        except cl.Error as error:
            raise BuildError(str(error)) from error
        if binary is not None:
            return program, binary
        return program, program.get_info(cl.program_info.BINARIES)[0] or None

    def kernel(self, program: Any, name: str) -> Kernel:
        return OpenClKernel(program, name)

    # --- queues and events ---------------------------------------------------------------------------------------

    def queue(self, *, copies: bool) -> RuntimeQueue:
        queue = OpenClQueue(self._context, self._device)
        if not (copies and self._copy_thread):
            return queue
        self._threads.append(CopyThread(self._context, queue))
        return self._threads[-1]

    def is_done(self, event: Any) -> bool:
        if isinstance(event, ThreadedEvent):
            return event.is_done()
        status = event.command_execution_status
        if status < 0:
            raise EventError(f"the device reports error {status}")
        return bool(status == cl.command_execution_status.COMPLETE)

    def wait(self, event: Any) -> None:
        event.wait()
        if not isinstance(event, ThreadedEvent):
            self.is_done(event)

    def end_ns(self, event: Any) -> int | None:
        native = event.native if isinstance(event, ThreadedEvent) else event
        try:
            return int(native.profile.end)
        except cl.Error:  # some drivers do not time markers
            return None

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        with suppress(cl.Error):
            self._maps.finish()
