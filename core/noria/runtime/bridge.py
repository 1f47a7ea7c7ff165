"""Memory between two devices that do not know each other: spans of one, brought to the other by way of the host.

A `Layout` says where each span lies in a `Bridge`; offsets are the same in host memory and on the far device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from noria.api import (
    Buffer,
    BufferUsage,
    Device,
    DeviceBuffer,
    DeviceCaps,
    HostBuffer,
    Queue,
    QueueKind,
    Span,
    align_up,
)
from noria.api.errors import MIB


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of the near device that is copied as a whole, and its offset in the bridge."""

    span: Span
    offset: int

    def at(self, buffer: Buffer) -> Span:
        return buffer.span(self.offset, self.span.nbytes)


class Layout:
    """Where things lie in a bridge.

    Attributes:
        pieces: cover all the spans; spans that share bytes share a piece, so what aliases here aliases there.
        end: how large the bridge has to be.
    """

    def __init__(self, spans: Iterable[Span], near: DeviceCaps, far: DeviceCaps) -> None:
        self.end = 0
        self._alignment = lcm(near.copy_alignment, far.copy_alignment, far.buffer_alignment, far.table_unit)
        self.pieces = [Piece(cover, self.take(cover.nbytes)) for cover in _covers(spans, near)]

    def take(self, nbytes: int) -> int:
        """Room for something that does not come from the near device; its offset."""
        offset = self.end
        self.end = align_up(offset + nbytes, self._alignment)
        return offset

    def find(self, span: Span) -> int:
        """The offset of a span that lies in a piece."""
        for piece in self.pieces:
            whole = piece.span
            if whole.buffer is span.buffer and whole.offset <= span.offset and span.end <= whole.end:
                return piece.offset + span.offset - whole.offset
        raise ValueError(f"{span} was not laid out")


def _covers(spans: Iterable[Span], caps: DeviceCaps) -> list[Span]:
    """The spans as the device can copy them, those that share bytes joined."""
    covers: list[Span] = []
    for span in sorted((_copyable(span, caps) for span in spans), key=lambda span: (id(span.buffer), span.offset)):
        if covers and covers[-1].overlaps(span):
            last = covers.pop()
            covers.append(Span(span.buffer, last.offset, max(last.end, span.end) - last.offset))
        else:
            covers.append(span)
    return covers


def _copyable(span: Span, caps: DeviceCaps) -> Span:
    """The smallest span around this one that the device copies."""
    if isinstance(span.buffer, HostBuffer):
        return span
    offset = span.offset // caps.copy_alignment * caps.copy_alignment
    return Span(span.buffer, offset, min(align_up(span.end, caps.copy_alignment), span.buffer.nbytes) - offset)


class Bridge:
    """Memory on both sides of the way, at first none; and the copies over it. `bring` and `give_back` wait.

    Attributes:
        here: host memory that the near device copies from and to.
        there: memory of the far device.
        far_queue: where the far device works.
        nbytes_copied: between the near device and the host so far, both ways.
    """

    here: HostBuffer
    there: DeviceBuffer

    def __init__(self, near: Device, far: Device, label: str) -> None:
        self.nbytes_copied = 0
        self._near, self._far, self._label = near, far, label
        self._buffers: list[Buffer] = []
        self._nbytes = 0

    @property
    def far_queue(self) -> Queue:
        return self._far.queue(QueueKind.COMPUTE)

    def reserve(self, nbytes: int) -> None:
        """Make both sides at least this large; what lay there before may be lost."""
        if nbytes <= self._nbytes:
            return
        self._nbytes = 0
        while self._buffers:
            self._buffers.pop().free()
        nbytes = align_up(nbytes, MIB)
        self.there = self._far.alloc(nbytes, usage=BufferUsage.COMPUTE, label=self._label)
        self._buffers.append(self.there)
        self.here = self._near.alloc_host(nbytes, label=self._label)
        self._buffers.append(self.here)
        self._here_of_far = self._far.wrap_host(self.here.array().data, label=self._label)  # the same memory
        self._buffers.append(self._here_of_far)
        self._nbytes = nbytes

    def bring(self, queue: Queue, pieces: Sequence[Piece]) -> None:
        """Near device to host, after everything that `queue` was given so far."""
        for piece in pieces:
            here = piece.at(self.here)
            if isinstance(piece.span.buffer, HostBuffer):  # which the near device's kernels read in place
                here.host_view()[:] = piece.span.host_view()
            else:
                queue.copy_d2h(here, piece.span)
                self.nbytes_copied += piece.span.nbytes
        queue.record(self._label).wait()

    def cross(self, nbytes: int) -> None:
        """Host to far device, everything up to `nbytes`."""
        self.far_queue.copy_h2d(self.there.span(0, nbytes), self._here_of_far.span(0, nbytes))

    def give_back(self, queue: Queue, pieces: Sequence[Piece]) -> None:
        """Far device to host, after all its work, and from there to the near device."""
        for piece in pieces:
            self.far_queue.copy_d2h(piece.at(self._here_of_far), piece.at(self.there))
        self.far_queue.record(self._label).wait()
        for piece in pieces:
            queue.copy_h2d(piece.span, piece.at(self.here))
            self.nbytes_copied += piece.span.nbytes
        queue.record(self._label).wait()
