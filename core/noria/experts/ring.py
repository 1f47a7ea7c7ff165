"""The prefetch ring: a few device slots through which units of experts pass, filled while earlier ones are computed.

Protocol. The ring owns its slots; a unit owns a slot from `fill` to `release`. Slots are used in turn.

    copy queue:     wait(slot.free)  copies  record(ready)
    compute queue:  wait(ready)      ops     record(free)

`ready` keeps compute from reading a slot before its copy is done; `free` keeps the copy from overwriting a slot that is
still being read. Both are waited for by the device where it can. Forbidden: filling a slot whose unit has not been
released (the caller never has more fills outstanding than there are slots), and enqueuing ops on a slot after its
`release`. Slots never grow or move: recorded work keeps their addresses.

Units whose experts are not page-locked pass through a bounce ring on their way (`noria.experts.bounce`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from noria.api import CopyRegion, DeviceBuffer, Event, ExpertTable, Queue, Span, Tensor, align_up
from noria.experts.bounce import Bounce
from noria.experts.chaos import Chaos
from noria.experts.meter import Meter
from noria.experts.slab import Unit, UnitLayout, unit_layout
from noria.experts.tables import RangeTables, TableKey, packed_table


@dataclass(slots=True)
class Slot:
    """A device buffer of the ring, and who used it last.

    Attributes:
        span: room for a unit.
        tables: device memory for the three tables of a packed unit; `staging`: their host side.
    """

    span: Span
    tables: Span
    staging: Span
    ready: Event | None = None
    free: Event | None = None
    unit: Unit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A unit whose copies have been enqueued. Valid until released."""

    unit: Unit
    slot: Slot
    tables: tuple[ExpertTable, ExpertTable, ExpertTable]
    ready: Event


@dataclass(frozen=True, slots=True)
class _Filling:
    """A unit that has a slot, and the events before and after the copy queue's wait for it."""

    unit: Unit
    slot: Slot
    before: Event | None
    start: Event | None


def slot_nbytes_for(layers: Iterable[Sequence[int]], n_expert: int, table_unit: int, alignment: int) -> int:
    """Bytes of a slot: the largest expert tensor, padded; at least one expert's unit. `layers`: slab sizes of each."""
    most = 0
    for slabs in layers:
        layout = unit_layout(slabs, table_unit, alignment)
        most = max(most, layout.nbytes(1), *(align_up(n_expert * stride, alignment) for stride in layout.strides))
    return most


@dataclass
class Ring:
    """Slots, the two queues, and what is metered. `copy` is the compute queue itself when prefetch is off.

    Without `bounce`, experts that are not page-locked are copied from where they are: slowly, and the host may wait.
    """

    slots: list[Slot]
    copy: Queue
    compute: Queue
    range_tables: RangeTables
    meter: Meter
    chaos: Chaos | None = None
    bounce: Bounce | None = None
    _turn: int = field(default=0, init=False)

    @property
    def inline(self) -> bool:
        return self.copy is self.compute

    @property
    def slot_nbytes(self) -> int:
        return self.slots[0].span.nbytes

    @property
    def buffers(self) -> set[DeviceBuffer]:
        return {slot.span.buffer for slot in self.slots if isinstance(slot.span.buffer, DeviceBuffer)}

    def bounces(self, unit: Unit) -> bool:
        """Whether a unit passes through the bounce ring: then it is expected, and poured instead of filled."""
        return self.bounce is not None and not unit.layer.pinned

    def fill(self, unit: Unit) -> Filled:
        """Enqueue the copies of `unit` into the next slot."""
        filling = self._begin(unit)
        self.copy.copy_regions(self._regions(unit, filling.slot))
        return self._finish(filling)

    def expect(self, unit: Unit) -> None:
        """Announce a unit that will be poured, after all others that are expected."""
        assert self.bounce is not None
        self.bounce.expect(self._regions(unit, self.slots[0]), self.slots[0].span)

    def pour(self, unit: Unit) -> Generator[Event, None, Filled]:
        """`fill` for the unit that was expected first. Yields events: to be resumed when the last one is done."""
        assert self.bounce is not None
        filling = self._begin(unit)
        yield from self.bounce.pour(filling.slot.span)
        return self._finish(filling)

    def _begin(self, unit: Unit) -> _Filling:
        """Take the next slot, once the compute is done with it."""
        slot = self.slots[self._turn % len(self.slots)]
        assert slot.unit is None, f"slot {self._turn % len(self.slots)} still holds experts of layer {slot.unit}"
        self._turn += 1
        slot.unit = unit
        before = self.copy.record("copy idle") if self.meter.enabled else None
        if slot.free is not None:
            self.copy.wait(slot.free)
        if self.chaos is not None:
            self.chaos.spoil(self.copy, slot.span)
        return _Filling(unit, slot, before, self.copy.record("copy start") if self.meter.enabled else None)

    def _finish(self, filling: _Filling) -> Filled:
        """Everything has been enqueued but the tables."""
        unit, slot = filling.unit, filling.slot
        layout = self._layout(unit)
        wheres = self._range_wheres(unit, layout.strides) or self._packed_wheres(unit, layout.strides, slot)
        gate, up, down = (
            ExpertTable(spans=(part,), where=where, type=t.type, n_out=t.n_out, n_in=t.n_in, slab_nbytes=t.slab_nbytes)
            for t, part, where in zip(unit.layer.tensors, unit.parts(slot.span, layout), wheres, strict=True)
        )
        slot.ready = self.copy.record("ready")
        self.meter.copied(self.copy, unit, filling.before, filling.start, slot.ready)
        return Filled(unit=unit, slot=slot, tables=(gate, up, down), ready=slot.ready)

    def _layout(self, unit: Unit) -> UnitLayout:
        caps = self.copy.device.caps
        return unit_layout([t.slab_nbytes for t in unit.layer.tensors], caps.table_unit, caps.buffer_alignment)

    def _regions(self, unit: Unit, slot: Slot) -> list[CopyRegion]:
        layout = self._layout(unit)
        return unit.regions(unit.parts(slot.span, layout), layout)

    def acquire(self, filled: Filled, idle_since: Event | None = None) -> None:
        """Make compute wait for the unit's copies. `idle_since`: of compute, if it ran out of work before this."""
        before = idle_since
        if before is None and self.meter.enabled:
            before = self.compute.record("compute idle")
        if not self.inline:
            self.compute.wait(filled.ready)
        after = self.compute.record("compute start") if self.meter.enabled else None
        self.meter.stalled(self.compute, filled.unit, before, after, inline=self.inline)
        if self.chaos is not None:
            self.chaos.dawdle(self.compute)

    def release(self, filled: Filled) -> None:
        """Give the slot back once the compute enqueued so far is done."""
        if self.chaos is not None:
            self.chaos.dawdle(self.compute)
        filled.slot.free = self.compute.record("free")
        filled.slot.unit = None
        self.meter.computed(self.compute, filled.unit, filled.slot.free)

    def reset(self) -> None:
        """Take all slots back. Both queues are idle."""
        for slot in self.slots:
            slot.unit = None
        if self.bounce is not None:
            self.bounce.reset()

    def _range_wheres(self, unit: Unit, strides: Sequence[int]) -> list[Tensor] | None:
        if not isinstance(unit.experts, range):
            return None
        first, end = unit.bounds
        return [self.range_tables[TableKey(unit.layer.n_expert, first, end, stride)] for stride in strides]

    def _packed_wheres(self, unit: Unit, strides: Sequence[int], slot: Slot) -> list[Tensor]:
        """Tables of experts that were only known now: copied with the unit, under the same two events."""
        if slot.ready is not None:
            slot.ready.wait()  # the staging memory may still be read by the last fill of this slot
        n_expert, unit_nbytes = unit.layer.n_expert, self.copy.device.caps.table_unit
        wheres = []
        step = slot.tables.nbytes // 3
        for i, stride in enumerate(strides):
            table = packed_table(tuple(unit.experts), n_expert, stride, unit_nbytes)
            slot.staging.sub(i * step, n_expert * 4).host_view(np.int32)[:] = table
            wheres.append(Tensor(slot.tables.sub(i * step, n_expert * 4), "I32", (n_expert,)))
        self.copy.copy_h2d(slot.tables, slot.staging)
        return wheres


class Prefetcher:
    """Sends a sequence of units through the ring, as far ahead of the compute as the slots allow.

    With waits on the device, all other slots are being filled while one is computed. Where waits block the host, one
    slot less: then the slot to be filled next was released a whole unit ago, and the host hardly waits. Where
    copying itself blocks, copies are submitted after the compute they should run beside.

    The next unit that bounces is always expected. The host waits for its bytes only if it has nothing else to enqueue.

    `idle_since` is the end of the compute that the first unit was chosen by, where the host waited for that.
    """

    def __init__(self, ring: Ring, units: Iterator[Unit], idle_since: Event | None = None) -> None:
        self.ring = ring
        self._units = units
        self._idle_since = idle_since
        self._coming: deque[Unit] = deque()  # taken from `units`
        self._pouring: Generator[Event, None, Filled] | None = None
        self._awaited: Event | None = None  # before pouring goes on
        self._pending: deque[Filled] = deque()
        caps = ring.compute.device.caps
        n_slots = len(ring.slots)
        self._ahead = n_slots - 1 if caps.device_wait else max(1, n_slots - 2)
        if ring.inline:
            self._ahead = 0  # a copy in line with the compute gains nothing from being early
        self._compute_first = caps.blocking_submit and not caps.async_copy and not ring.inline

    def start(self) -> None:
        """Begin to fill, before the first unit is asked for."""
        if not self.ring.inline:
            self._fill(self._ahead + 1)

    def next(self) -> Filled:
        """The next unit, with compute made to wait for it."""
        self._fill(1 if self._compute_first else self._ahead + 1)
        if not self._pending:
            if self._idle_since is None and self.ring.meter.enabled:
                self._idle_since = self.ring.compute.record("compute idle")
            self._fill_one(wait=True)
        filled = self._pending.popleft()
        self.ring.acquire(filled, self._idle_since)
        self._idle_since = None
        return filled

    def release(self, filled: Filled) -> None:
        """Done with a unit: everything that reads it has been enqueued."""
        self.ring.release(filled)
        if self._compute_first:
            self._fill(self._ahead)

    def go_on(self) -> None:
        """Send on what has arrived in the bounce ring meanwhile. No unit is held."""
        if self._pouring is not None:
            self._fill(self._ahead + 1)

    def _fill(self, count: int) -> None:
        """Fill slots until so many wait for the compute, but wait for nothing."""
        while len(self._pending) < min(count, len(self.ring.slots)) and self._fill_one(wait=False):
            pass

    def _fill_one(self, *, wait: bool) -> bool:
        """Fill a slot; whether that is done, rather than that there is no unit or that the host would have to wait."""
        if self._pouring is None:
            unit = self._take()
            if unit is None:
                return False
            if not self.ring.bounces(unit):
                self._pending.append(self.ring.fill(unit))
                return True
            self._pouring = self.ring.pour(unit)
        try:
            while True:
                if self._awaited is None:
                    self._awaited = next(self._pouring)
                if wait:
                    self._awaited.wait()
                elif not self._awaited.done():
                    return False
                self._awaited = None
        except StopIteration as poured:
            self._pouring = None
            self._pending.append(poured.value)
            return True

    def _take(self) -> Unit | None:
        """The next unit; one after it that bounces is expected by now, if there is any."""
        while not self._coming or (self.ring.bounce is not None and not self._bounces_later()):
            unit = next(self._units, None)
            if unit is None:
                break
            self._coming.append(unit)
            if self.ring.bounces(unit):
                self.ring.expect(unit)
        return self._coming.popleft() if self._coming else None

    def _bounces_later(self) -> bool:
        return any(self.ring.bounces(unit) for unit in islice(self._coming, 1, None))
