"""The bounce ring: a little page-locked memory through which experts pass that could not be page-locked themselves.

A unit comes in chunks. Each is copied to a buffer here by threads of the host (staged), and from there to its place in
a slot by the device (sent); a buffer is staged anew once its copy is done. Units are staged in the order in which they
are expected, as far ahead as there are buffers, so the host's copies and the device's run beside each other. Nothing
here waits: what has to be waited for is handed to the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from noria.api import CopyRegion, Event, HostBuffer, Queue, Span, align_up
from noria.api.errors import DeviceError

N_BUFFERS = 8
BUFFER_NBYTES = 8 << 20  # a device copies it at the link's full rate, and the host in about a millisecond


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a unit: `nbytes` of its slot from `offset` on, of which `pieces` matter: (offset in here, source)."""

    offset: int
    nbytes: int
    pieces: tuple[tuple[int, Span], ...]


def chunks(regions: Iterable[CopyRegion], slot: Span, most: int, alignment: int) -> list[Chunk]:
    """The copies that fill a unit's `slot`, in order, as chunks of at most `most` bytes, a multiple of `alignment`."""
    cut: list[Chunk] = []
    first, end, pieces = 0, 0, list[tuple[int, Span]]()

    def close() -> None:
        if pieces:
            cut.append(Chunk(first, align_up(end - first, alignment), tuple(pieces)))
            pieces.clear()

    for region in regions:
        at, source = region.dst.offset - slot.offset, region.src
        while source.nbytes:
            if not pieces or at - first >= most:
                close()
                first = at
            n = min(source.nbytes, first + most - at)
            pieces.append((at - first, source.sub(0, n)))
            at, end, source = at + n, at + n, source.sub(n, source.nbytes - n)
    close()
    return cut


class Bounce:
    """Buffers of one size, used in turn, on the way to one queue."""

    def __init__(self, buffers: Sequence[HostBuffer], copy: Queue) -> None:
        self.copy = copy
        self._buffers = buffers
        self._idle = deque(buffers)
        self._expected: deque[Chunk] = deque()
        self._staged: deque[tuple[Chunk, HostBuffer, Event]] = deque()
        self._sent: deque[tuple[HostBuffer, Event]] = deque()
        self._n_chunks: deque[int] = deque()  # of each unit that is expected

    def expect(self, regions: Iterable[CopyRegion], slot: Span) -> None:
        """A unit comes next after those expected so far; `regions` would fill it into `slot`, whichever it will get."""
        cut = chunks(regions, slot, self._buffers[0].nbytes, self.copy.device.caps.copy_alignment)
        self._n_chunks.append(len(cut))
        self._expected += cut
        self._stage()

    def pour(self, slot: Span) -> Iterator[Event]:
        """Enqueue the copies of the unit that was expected first into its slot.

        Yields events: to be resumed when the last one is done.
        """
        for _ in range(self._n_chunks.popleft()):
            self._stage()
            while not self._staged:
                yield self._sent[0][1]
                self._stage()
            chunk, buffer, ready = self._staged[0]
            yield ready
            self._staged.popleft()
            self.copy.copy_h2d(slot.sub(chunk.offset, chunk.nbytes), buffer.span(0, chunk.nbytes))
            self._sent.append((buffer, self.copy.record("bounced")))
        self._stage()

    def reset(self) -> None:
        """Forget what was expected. The queue is idle."""
        for _, _, ready in self._staged:
            with suppress(DeviceError):  # whoever poured it has been told
                ready.wait()
        for part in (self._expected, self._staged, self._sent, self._n_chunks, self._idle):
            part.clear()
        self._idle.extend(self._buffers)

    def _stage(self) -> None:
        """Begin to copy what is expected to the buffers that are free."""
        while self._sent and self._sent[0][1].done():
            self._idle.append(self._sent.popleft()[0])
        while self._expected and self._idle:
            chunk, buffer = self._expected.popleft(), self._idle.popleft()
            pieces = [CopyRegion(buffer.span(offset, source.nbytes), source) for offset, source in chunk.pieces]
            self._staged.append((chunk, buffer, self.copy.device.copy_host(pieces, label="staged experts")))
