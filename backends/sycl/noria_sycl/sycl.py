"""The runtime on dpctl: SYCL queues and unified shared memory, with the same kernels in OpenCL C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import dpctl
import numpy as np
from dpctl import memory, program

from noria.api import DeviceKind
from noria_sycl.runtime import (
    BuildError,
    Bytes,
    Found,
    Kernel,
    Limits,
    LocalMemory,
    Runtime,
    RuntimeQueue,
    RuntimeUnavailable,
)

_C_TYPES: dict[type, Callable[[Any], Any]] = {
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
    np.uint64: ctypes.c_uint64,
    np.float32: ctypes.c_float,
}


def find() -> list[Found]:
    """SYCL's devices that can be used, in SYCL's order: those of its OpenCL backend with USM host memory.

    SYCL takes OpenCL C nowhere else, and PoCL 3 has no such memory.
    """
    return [
        Found(
            name=device.name.strip(),
            kind=DeviceKind.CPU if device.is_cpu else DeviceKind.GPU,
            arch="SYCL",
            driver=f"{device.vendor} {device.driver_version}, dpctl {dpctl.__version__}",
            memory_nbytes=device.global_mem_size,
            open=partial(_open, device),
        )
        for device in dpctl.get_devices(backend="opencl")
        if (device.is_cpu or device.is_gpu) and device.has_aspect_usm_host_allocations
    ]


def _open(device: dpctl.SyclDevice) -> SyclRuntime:
    try:
        return SyclRuntime(device)
    except (MemoryError, *SyclRuntime.errors) as error:
        raise RuntimeUnavailable("sycl", str(error)) from error


class _Part:
    """Bytes of USM, as dpctl asks for them."""

    def __init__(self, handle: Any, offset: int, nbytes: int, queue: dpctl.SyclQueue) -> None:
        self.handle = handle
        self.__sycl_usm_array_interface__ = {
            "data": (handle._pointer + offset, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 1,
            "syclobj": queue,
        }


class SyclKernel(Kernel):
    """A kernel of SYCL; its arguments go with each launch."""

    def __init__(self, kernel: Any, name: str) -> None:
        self.name = name
        self._kernel = kernel

    def bind(self, args: Sequence[Any], *, keep: bool) -> Any:
        return self._kernel, [self._argument(arg) for arg in args]

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, np.generic):
            return _C_TYPES[type(arg)](arg.item())
        if isinstance(arg, LocalMemory):
            return dpctl.LocalAccessor("u1", (arg.nbytes,))
        return ctypes.c_uint64(0) if arg is None else arg  # NULL


class SyclRuntimeQueue(RuntimeQueue):
    """An in-order SYCL queue with profiling."""

    def __init__(self, context: dpctl.SyclContext, device: dpctl.SyclDevice) -> None:
        self.native = dpctl.SyclQueue(context, device, property=["in_order", "enable_profiling"])

    def copy_h2d(self, dst: Any, dst_offset: int, src: Bytes, after: Sequence[Any]) -> Any:
        return self.native.memcpy_async(self._part(dst, dst_offset, src.size), src, src.size, list(after))

    def copy_d2h(self, dst: Bytes, src: Any, src_offset: int, after: Sequence[Any]) -> Any:
        return self.native.memcpy_async(dst, self._part(src, src_offset, dst.size), dst.size, list(after))

    def copy_d2d(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int, after: Sequence[Any]) -> Any:
        to, at = self._part(dst, dst_offset, nbytes), self._part(src, src_offset, nbytes)
        return self.native.memcpy_async(to, at, nbytes, list(after))

    def launch(self, bound: Any, n_items: tuple[int, ...], group: tuple[int, ...], after: Sequence[Any]) -> Any:
        kernel, args = bound
        return self.native.submit_async(kernel, args, list(n_items[::-1]), list(group[::-1]), list(after))  # x is last

    def barrier(self, after: Sequence[Any]) -> Any:
        if after:
            self.native.submit_barrier(list(after))
        return self.native.submit_barrier()

    def flush(self) -> None:
        pass  # SYCL submits at once

    def finish(self) -> None:
        self.native.wait()

    def _part(self, handle: Any, offset: int, nbytes: int) -> Any:
        return memory.as_usm_memory(_Part(handle, offset, nbytes, self.native))


class SyclRuntime(Runtime):
    """A SYCL device in a context of its own."""

    # dpctl has no common base for what it raises, and some of it is a plain RuntimeError.
    errors = (
        dpctl.SyclKernelSubmitError,
        dpctl.SyclKernelInvalidRangeError,
        dpctl.SyclQueueCreationError,
        RuntimeError,
    )
    reads_host = True
    shares_host = False
    blocking_copies = False

    def __init__(self, device: dpctl.SyclDevice) -> None:
        self._device = device
        self._context = dpctl.SyclContext(device)
        self._queue = self.queue(copies=False)
        self.max_buffer_nbytes = device.max_mem_alloc_size
        self.limits = Limits(
            kind=DeviceKind.CPU if device.is_cpu else DeviceKind.GPU,
            vendor=device.vendor,
            n_compute_unit=device.max_compute_units,
            local_nbytes=device.local_mem_size,
            max_group_size=device.max_work_group_size,
            language=self._language(),
            extensions=frozenset(),
        )

    def _language(self) -> tuple[int, int]:
        for major, minor in ((3, 0), (2, 0)):
            try:
                self.build("__kernel void nothing() {}", (f"-cl-std=CL{major}.{minor}",))
                return major, minor
            except BuildError:
                pass
        return 1, 2

    # --- memory --------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Any:
        try:
            return memory.MemoryUSMDevice(nbytes, queue=self._queue.native)
        except memory.USMAllocationError as error:
            raise MemoryError(str(error)) from error

    def alloc_host(self, nbytes: int) -> tuple[Any, Bytes]:
        try:
            handle = memory.MemoryUSMHost(nbytes, queue=self._queue.native)
        except memory.USMAllocationError as error:
            raise MemoryError(str(error)) from error
        return handle, np.frombuffer(handle, np.uint8)

    def share_host(self, memory: Bytes) -> Any:
        raise MemoryError("SYCL locks no memory that exists")

    def free(self, handle: Any) -> None:
        pass  # with its last reference

    # --- kernels -------------------------------------------------------------------------------------------------

    def build(self, source: str, options: Sequence[str], binary: bytes | None = None) -> tuple[Any, bytes | None]:
        try:
            return program.create_program_from_source(self._queue.native, source, " ".join(options)), None
        except program.SyclProgramCompilationError as error:
            raise BuildError(str(error) or "SYCL gives no log; try runtime = 'opencl'") from error

    def kernel(self, program: Any, name: str) -> Kernel:
        return SyclKernel(program.get_sycl_kernel(name), name)

    # --- queues and events ---------------------------------------------------------------------------------------

    def queue(self, *, copies: bool) -> SyclRuntimeQueue:
        return SyclRuntimeQueue(self._context, self._device)

    def is_done(self, event: Any) -> bool:
        return bool(event.execution_status == dpctl.event_status_type.complete)

    def wait(self, event: Any) -> None:
        event.wait()

    def end_ns(self, event: Any) -> int | None:
        return int(event.profiling_info_end)

    def close(self) -> None:
        pass  # with the last reference
