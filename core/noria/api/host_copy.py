"""Copies inside host memory, on threads beside the caller: how experts that are not page-locked get to memory that is.

NumPy releases the interpreter while it copies, so the caller goes on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from noria.api.errors import DeviceTimeout, TransferError
from noria.api.memory import CopyRegion
from noria.api.queue import Event

N_THREAD = min(4, os.cpu_count() or 1)  # one copies some 10 GB/s, a link takes up to 55
PIECE_NBYTES = 1 << 20  # of one thread's share; handing it over takes some ten microseconds

_Bytes = npt.NDArray[np.uint8]
_Pair = tuple[_Bytes, _Bytes]


class HostCopy(Event):
    """Copies that run, or have run."""

    def __init__(self, device: str, label: str, parts: Sequence[Future[None]]) -> None:
        self.label = label
        self._device, self._parts = device, parts

    def done(self) -> bool:
        if not all(part.done() for part in self._parts):
            return False
        self._raise()
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if wait(self._parts, timeout_s).not_done:
            raise DeviceTimeout(self._device, f"'{self.label}' is not done after {timeout_s} s")
        self._raise()

    def _raise(self) -> None:
        for part in self._parts:
            if (error := part.exception()) is not None:
                raise TransferError(self._device, f"'{self.label}' failed: {error}") from error


class HostCopier:
    """The threads of one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(N_THREAD, f"{device}/host copy")

    def copy(self, regions: Sequence[CopyRegion], label: str) -> HostCopy:
        """Begin to copy."""
        shares = _shares([(region.dst.host_view(), region.src.host_view()) for region in regions])
        return HostCopy(self._device, label, [self._pool.submit(_copy, share) for share in shares])

    def close(self) -> None:
        """Wait for all copies and end the threads."""
        self._pool.shutdown()


def _copy(pairs: Sequence[_Pair]) -> None:
    for dst, src in pairs:
        dst[:] = src


def _shares(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """The same copies, `PIECE_NBYTES` or less together; large ones are cut."""
    share: list[_Pair] = []
    room = PIECE_NBYTES
    for dst, src in pairs:
        while len(src):
            n = min(room, len(src))
            share.append((dst[:n], src[:n]))
            dst, src, room = dst[n:], src[n:], room - n
            if not room:
                yield share
                share, room = [], PIECE_NBYTES
    if share:
        yield share
