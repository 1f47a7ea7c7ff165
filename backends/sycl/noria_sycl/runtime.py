"""What the backend needs of a library that reaches devices: PyOpenCL or dpctl.

Everything above this line is the same for both: buffers, queues, programs and ops. Handles of memory and events are the
library's own objects; nothing but the runtime that made them looks inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.api import DeviceKind
from noria.api.errors import DeviceError, KernelLaunchError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a kernel must know of the device to be chosen and sized. Asked of the device, never of its platform.

    Attributes:
        kind: CPU, GPU or a GPU in the host's RAM.
        vendor: as the device tells it.
        n_compute_unit: cores of a CPU, multiprocessors of a GPU.
        local_nbytes: local memory that one work group may have.
        max_group_size: work items that one work group may have.
        language: newest OpenCL C that its compiler takes, (3, 0) for example.
        extensions: of OpenCL. Whether a feature works is asked by compiling: `SyclDevice.compiles`.
    """

    kind: DeviceKind
    vendor: str
    n_compute_unit: int
    local_nbytes: int
    max_group_size: int
    language: tuple[int, int]
    extensions: frozenset[str]


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """A kernel argument: local memory of this many bytes for every work group."""

    nbytes: int


class Kernel(ABC):
    """One `__kernel` function of a built program."""

    name: str

    @abstractmethod
    def bind(self, args: Sequence[Any], *, keep: bool) -> Any:
        """What `RuntimeQueue.launch` takes: the kernel with its arguments.

        Args:
            args: handles of memory, None for a pointer that is not used, NumPy scalars, `LocalMemory`. Each call gives
                the same types at the same places.
            keep: it may be launched later, and more than once; without, only now, before the next call.
        """


class RuntimeQueue(ABC):
    """An in-order queue. Every command begins after all events of `after`, and answers with its own event.

    Attributes:
        deferred: a launch may read what it was given after it has returned.
    """

    deferred: bool = False

    @abstractmethod
    def copy_h2d(self, dst: Any, dst_offset: int, src: Bytes, after: Sequence[Any]) -> Any: ...

    @abstractmethod
    def copy_d2h(self, dst: Bytes, src: Any, src_offset: int, after: Sequence[Any]) -> Any: ...

    @abstractmethod
    def copy_d2d(
        self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int, after: Sequence[Any]
    ) -> Any: ...

    @abstractmethod
    def launch(self, bound: Any, n_items: tuple[int, ...], group: tuple[int, ...], after: Sequence[Any]) -> Any: ...

    @abstractmethod
    def barrier(self, after: Sequence[Any]) -> Any:
        """An event for everything enqueued so far and everything in `after`."""

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...


class Runtime(ABC):
    """One device, opened through one library.

    Attributes:
        limits: of the device.
        max_buffer_nbytes: largest single allocation.
        reads_host: kernels may take the handles of `alloc_host` and `share_host`, and read host memory in place.
        shares_host: `share_host` works.
        copies_handles: copies between the device and host memory that has a handle go from handle to handle.
        blocking_copies: a copy on a queue that is not for copies may block the host until it is done.
        errors: what the library raises, and EventError.
    """

    limits: Limits
    max_buffer_nbytes: int
    reads_host: bool
    shares_host: bool
    copies_handles: bool = False
    blocking_copies: bool
    errors: tuple[type[Exception], ...]

    # --- memory --------------------------------------------------------------------------------------------------

    @abstractmethod
    def alloc(self, nbytes: int) -> Any:
        """Device memory.

        Raises:
            MemoryError: there is none.
        """

    @abstractmethod
    def alloc_host(self, nbytes: int) -> tuple[Any, Bytes]:
        """Host memory that copies use best: (handle, its bytes).

        Raises:
            MemoryError: there is none.
        """

    @abstractmethod
    def share_host(self, memory: Bytes) -> Any:
        """A handle of host memory that exists, for kernels to read in place (`shares_host`).

        Raises:
            MemoryError: the driver refuses it.
        """

    @abstractmethod
    def free(self, handle: Any) -> None: ...

    # --- kernels -------------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, source: str, options: Sequence[str], binary: bytes | None = None) -> tuple[Any, bytes | None]:
        """(program, its binary to be kept, if there is one). With `binary`, which is one kept earlier, nothing is
        compiled.

        Raises:
            BuildError: it does not compile, or the binary is refused.
        """

    @abstractmethod
    def kernel(self, program: Any, name: str) -> Kernel: ...

    # --- queues and events ---------------------------------------------------------------------------------------

    @abstractmethod
    def queue(self, *, copies: bool) -> RuntimeQueue:
        """A new queue; `copies` is what most of its commands are."""

    @abstractmethod
    def is_done(self, event: Any) -> bool:
        """Raises one of `errors` if its work failed."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Raises one of `errors` if its work failed."""

    @abstractmethod
    def end_ns(self, event: Any) -> int | None:
        """When the work of an event that is done was complete, on the device's clock."""

    @abstractmethod
    def close(self) -> None:
        """After all queues have been waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A device that a library has found, not yet opened.

    Attributes:
        arch: the version of its language.
        driver: whose it is, and its version.
        open: raises RuntimeUnavailable if the device cannot be opened.
    """

    name: str
    kind: DeviceKind
    arch: str
    driver: str
    memory_nbytes: int
    open: Callable[[], Runtime]


class RuntimeUnavailable(Exception):
    """A runtime finds no device, or cannot open it; the text says why."""

    def __init__(self, runtime: str, text: str) -> None:
        self.runtime = runtime
        super().__init__(text)


class BuildError(Exception):
    """A program did not compile; the text is the compiler's log."""


class EventError(Exception):
    """The work of an event failed."""


def translate(device_id: str, error: Exception, what: str) -> DeviceError:
    """The error to raise for one of a library's; `what` failed."""
    return KernelLaunchError(device_id, f"{what}: {error}")
