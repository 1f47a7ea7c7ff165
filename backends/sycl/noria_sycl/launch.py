"""What launching a kernel takes: its profile, and tensors as its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from noria.api import DeviceKind, ExpertTable, Queue, Span, Tensor
from noria_sycl.queue import Arg, SyclQueue
from noria_sycl.runtime import Limits, LocalMemory

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

TABLE_UNIT = 16  # bytes, as in cl/common.h
I32, F32, U64 = np.int32, np.float32, np.uint64

Args = list[Arg]
_NOTHING: Args = [None, U64(0)]


class Profile(StrEnum):
    """What kernels are written for."""

    CPU = "cpu"  # a work group is one item, which works with vectors and has a core for itself
    GPU = "gpu"  # a work group shares local memory

    @classmethod
    def of(cls, limits: Limits) -> Profile:
        return cls.CPU if limits.kind is DeviceKind.CPU else cls.GPU


@dataclass(frozen=True, slots=True)
class Launcher:
    """Launches kernels of one device.

    Attributes:
        profile: which kernels.
        group: work items of a group of kernels that both profiles share; 1 on a CPU. A power of two.
        n_group: work groups that fill the device.
    """

    device: SyclDevice
    profile: Profile
    group: int
    n_group: int

    @classmethod
    def of(cls, device: SyclDevice, profile: Profile | None = None) -> Launcher:
        """With the profile of the device's kind, unless one is given."""
        limits = device.limits
        profile = profile or Profile.of(limits)
        if profile is Profile.CPU:
            return cls(device, profile, 1, 4 * limits.n_compute_unit)
        return cls(device, profile, min(128, _power_of_two(limits.max_group_size)), 16 * limits.n_compute_unit)

    @property
    def on_cpu(self) -> bool:
        return self.profile is Profile.CPU

    def __call__(
        self,
        queue: Queue,
        file: str,
        name: str,
        args: Args,
        groups: tuple[int, ...],
        defines: tuple[str, ...] = (),
        group: tuple[int, ...] | None = None,
    ) -> None:
        """Enqueue kernel `name` of cl/`file`.cl, built with `defines`, by this many groups; none is nothing to do.

        `group`: items of a group, if they are not those of `self.group`.

        Raises:
            KernelBuildError: it does not compile.
        """
        assert isinstance(queue, SyclQueue)
        if group is None:
            group = (self.group, *(1 for _ in groups[1:]))
        options = (f"-DGROUP={group[0]}", *(f"-D{define}" for define in defines))
        kernel = self.device.kernel(file, name, options)
        queue.launch(kernel, args, tuple(n * size for n, size in zip(groups, group, strict=True)), group)

    def share(self, n: int) -> tuple[int]:
        """Groups for n tasks that a kernel shares out among them."""
        return (min(n, self.n_group),)

    def share_numbers(self, n: int) -> tuple[int]:
        """Groups for n numbers, of which an item takes some."""
        return (min(n_blocks(n, 4096 if self.on_cpu else 8 * self.group), self.n_group),)


def span(span: Span) -> Args:
    """Parameters of some memory."""
    return [span.buffer, U64(span.offset)]


def tensor(tensor: Tensor | None) -> Args:
    """Parameters of a tensor; null for none."""
    return _NOTHING if tensor is None else span(tensor.span)


def table(table: ExpertTable) -> Args:
    """TABLE_PARAMETERS."""
    spans = [*table.spans, *[table.spans[0]] * (4 - len(table.spans))]
    return [arg for s in (*spans, table.where.span) for arg in span(s)]


def ints(*values: int) -> Args:
    """Parameters of type int."""
    return [I32(value) for value in values]


def local(nbytes: int) -> LocalMemory:
    """Local memory of a group."""
    return LocalMemory(nbytes)


def n_blocks(n: int, width: int) -> int:
    return -(-n // width)


def _power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)
