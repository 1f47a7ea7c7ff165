"""What the ring reports while it works, as a protocol: the runtime's counters and timeline listen."""

from __future__ import annotations

from typing import Protocol

from noria.api import Event, Queue
from noria.experts.slab import Unit


class Meter(Protocol):
    """Events may be None when `enabled` is false; times are read from them after the run."""

    enabled: bool

    def copied(self, queue: Queue, unit: Unit, before: Event | None, start: Event | None, end: Event) -> None:
        """A unit was copied from `start` to `end`; from `before` to `start` the copy queue waited for a free slot."""

    def stalled(self, queue: Queue, unit: Unit, before: Event | None, after: Event | None, *, inline: bool) -> None:
        """Compute waited for a unit's copies from `before` to `after`."""

    def computed(self, queue: Queue, unit: Unit, end: Event) -> None:
        """Compute was done with a unit at `end`."""
