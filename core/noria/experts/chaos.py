"""Provoked hazards: poisoned slots and random delays, for checking that the ring's order holds by itself.

With it, a slot holds garbage until its copy is done, and either queue dawdles at random. Results must not change.
"""

from __future__ import annotations

import random

from noria.api import Device, Queue, Span
from noria.api.errors import FeatureUnsupported

POISON = 0xFF  # as f16 or f32 bits: NaN
MAX_DELAY_NS = 500_000


class Chaos:
    """One source of trouble for one device's ring. `slot_nbytes` host bytes of poison are allocated."""

    def __init__(self, device: Device, slot_nbytes: int, seed: int) -> None:
        self._random = random.Random(seed)
        buffer = device.alloc_host(slot_nbytes, label="poison")
        buffer.array()[:] = POISON
        self._poison = buffer.span()
        self._can_delay = True

    def spoil(self, copy: Queue, slot: Span) -> None:
        """Overwrite a slot that is about to be filled, then wait a while."""
        copy.copy_h2d(slot, self._poison.sub(0, slot.nbytes))
        self.dawdle(copy)

    def dawdle(self, queue: Queue) -> None:
        """Hold a queue up for a random time."""
        if self._can_delay and self._random.random() < 0.5:
            try:
                queue.delay(self._random.randrange(MAX_DELAY_NS))
            except FeatureUnsupported:
                self._can_delay = False
