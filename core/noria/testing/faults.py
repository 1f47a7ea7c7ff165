"""Faults on purpose: an allocation that fails, and a system that page-locks no more than so much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from noria.api import Buffer, Device, HostBuffer
from noria.api.errors import OutOfDeviceMemory, PinnedMemoryError

Allocate = Callable[..., Buffer]


@contextmanager
def failing_allocation(*devices: Device, number: int | None) -> Iterator[list[str]]:
    """Let the `number`-th allocation on these devices (from 0, of any kind) fail as if there were no memory left.

    Yields:
        A list of what was asked for, one label an allocation; it grows.
    """
    labels: list[str] = []

    def refuse(device: Device, kind: str, nbytes: int, label: str) -> None:
        labels.append(f"{kind} {label}")
        if len(labels) - 1 != number:
            return
        if kind == "device":
            raise OutOfDeviceMemory(device.info.id, label, nbytes, 0, device.info.memory_nbytes)
        raise PinnedMemoryError(device.info.id, nbytes, f"{label}: a test wants it so")

    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(_watched(device, refuse))
        yield labels


@contextmanager
def pin_limit(device: Device, nbytes: int) -> Iterator[None]:
    """Page-lock at most `nbytes` at a time; what lives already counts."""

    def refuse(device: Device, kind: str, wanted: int, label: str) -> None:
        pinned = sum(buffer.nbytes for buffer in device._buffers if isinstance(buffer, HostBuffer) and buffer.pinned)
        if kind != "device" and pinned + wanted > nbytes:
            raise PinnedMemoryError(device.info.id, wanted, f"{pinned} of {nbytes} bytes are locked")

    with _watched(device, refuse):
        yield


@contextmanager
def _watched(device: Device, refuse: Callable[[Device, str, int, str], None]) -> Iterator[None]:
    """Ask `refuse` (device, "device" or "host" or "register", bytes, label) before each allocation."""

    def watch(kind: str, allocate: Allocate) -> Allocate:
        def watched(what: Any, *args: Any) -> Buffer:
            refuse(device, kind, what if isinstance(what, int) else len(what), args[-1])
            return allocate(what, *args)

        return watched

    with ExitStack() as stack:
        for name, kind in (("_alloc", "device"), ("_alloc_host", "host"), ("_register_host", "register")):
            stack.enter_context(patch.object(device, name, watch(kind, getattr(device, name))))
        yield
