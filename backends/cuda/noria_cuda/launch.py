"""Launching kernels, as cheaply as Python allows: a decode step has hundreds of them, and the host must stay ahead."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cupy.cuda import driver, runtime
from cupy.cuda.function import Module

from noria.api import ExpertTable, Queue, Span, Tensor
from noria.api.errors import KernelBuildError
from noria_cuda.compile import awaiting, load_or_compile, signatures
from noria_cuda.libraries import driver as cuda_driver
from noria_cuda.nvrtc import NvrtcError

if TYPE_CHECKING:
    from noria_cuda.queue import CudaQueue

C_TYPE = {"F32": "float", "F16": "f16", "BF16": "bf16", "I32": "int"}  # of the elements of a tensor, in cu/

TABLE_UNIT = 16  # bytes, as in cu/common.cuh

_DEFAULT_SHARED_NBYTES = 32 * 1024  # a block may have 48 KiB without asking, static arrays included
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEPENDENT_SM, _DEPENDENT_DRIVER = 90, 12040


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a kernel must know of the device to be chosen and sized.

    Attributes:
        sm: compute capability (90 = 9.0).
        n_sm: multiprocessors.
        shared_nbytes: shared memory that one block may have at most.
        dependent_launch: whether kernels of a program may be launched before the one before them is done.
    """

    sm: int
    n_sm: int
    shared_nbytes: int
    dependent_launch: bool = False

    @classmethod
    def of(cls, index: int, *, dependent_launch: bool = True) -> Limits:
        """Those of a device; `dependent_launch` where it has that."""
        p = runtime.getDeviceProperties(index)
        sm = 10 * p["major"] + p["minor"]
        has_it = sm >= _DEPENDENT_SM and runtime.driverGetVersion() >= _DEPENDENT_DRIVER
        return cls(
            sm=sm,
            n_sm=p["multiProcessorCount"],
            shared_nbytes=runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
            dependent_launch=dependent_launch and has_it,
        )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("n_attribute", ctypes.c_uint)),
    )


_PROGRAMMATIC = _Attribute(6, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Kernel:
    """One `__global__` function with room for its arguments.

    Attributes:
        awaits: whether it waits for the kernel before it by itself (`await_previous` in cu/common.cuh).
    """

    def __init__(self, function: Any, parameters: Sequence[str], *, awaits: bool) -> None:
        self.function = function
        self.awaits = awaits
        self.shared_nbytes = _DEFAULT_SHARED_NBYTES
        packer = struct.Struct("@" + "".join(parameters))
        self._pack_into = packer.pack_into
        self._arguments = ctypes.create_string_buffer(packer.size)
        at = ctypes.addressof(self._arguments)
        ends = (struct.calcsize("@" + "".join(parameters[: i + 1])) for i in range(len(parameters)))
        begins = [at + end - struct.calcsize(p) for p, end in zip(parameters, ends, strict=True)]
        self._pointers = (ctypes.c_void_p * len(begins))(*begins)
        self._pointers_at = ctypes.addressof(self._pointers)

    def launch(
        self, stream: int, grid: tuple[int, int, int], block: int, args: Sequence[Any], shared: int, *, early: bool
    ) -> None:
        """`early`: it may begin before the kernel before it is done, for which it then waits by itself."""
        if shared > self.shared_nbytes:
            driver.funcSetAttribute(self.function.ptr, _MAX_DYNAMIC_SHARED, shared)
            self.shared_nbytes = shared
        self._pack_into(self._arguments, 0, *args)
        if not early:
            driver.launchKernel(self.function.ptr, *grid, block, 1, 1, shared, stream, self._pointers_at, 0)
            return
        config = _Config(*grid, block, 1, 1, shared, stream, ctypes.addressof(_PROGRAMMATIC), 1)
        function, arguments = ctypes.c_void_p(self.function.ptr), ctypes.c_void_p(self._pointers_at)
        status = cuda_driver().cuLaunchKernelEx(ctypes.byref(config), function, arguments, None)
        if status:
            raise driver.CUDADriverError(status)


class Launcher:
    """The kernels of one device; a source is compiled or read from the cache when it is first needed."""

    def __init__(self, device_id: str, limits: Limits) -> None:
        self.device_id = device_id
        self.limits = limits
        self._modules: dict[tuple[str, tuple[str, ...]], Module] = {}
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Kernel] = {}

    def __call__(
        self,
        queue: Queue,
        file: str,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Any],
        defines: tuple[str, ...] = (),
        shared: int = 0,
    ) -> None:
        """Enqueue kernel `name` of cu/`file`.cu, compiled with `defines`; an empty grid is nothing to do.

        In a program, where no memory is copied and nothing waited for between two kernels, the second may be launched
        before the first is done, if it awaits that by itself.

        Raises:
            KernelBuildError: it does not compile.
        """
        kernel = self._kernels.get((file, name, defines)) or self._load(file, name, defines)
        if grid[0] and grid[1] and grid[2]:
            cuda_queue = cast("CudaQueue", queue)
            early = self.limits.dependent_launch and kernel.awaits and queue.recording and cuda_queue.ends_in_kernel
            kernel.launch(cuda_queue.stream_ptr, grid, block, args, shared, early=early)
            cuda_queue.ends_in_kernel = True

    def _load(self, file: str, name: str, defines: tuple[str, ...]) -> Kernel:
        module = self._modules.get((file, defines))
        if module is None:
            try:
                code = load_or_compile(file, self.limits.sm, defines)
            except NvrtcError as error:
                raise KernelBuildError(self.device_id, f"{file} ({', '.join(defines)})", str(error)) from error
            module = self._modules[file, defines] = Module()
            module.load(code)
        kernel = Kernel(module.get_function(name), signatures(file)[name], awaits=name in awaiting(file))
        self._kernels[file, name, defines] = kernel
        return kernel


def address(span: Span) -> int:
    """Where a span of device memory, or of host memory that kernels can read, begins."""
    ptr: int = span.buffer.ptr  # type: ignore[attr-defined]
    return ptr + span.offset


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor begins; 0 for none."""
    return 0 if tensor is None else address(tensor.span)


def table_args(table: ExpertTable) -> tuple[int, ...]:
    """A `Table` parameter."""
    spans = [address(span) for span in table.spans]
    return (*spans, *[0] * (4 - len(spans)), pointer(table.where))
