"""The happens-before checker, on schedules made by hand and on random ones checked by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from weakref import ref

import pytest

from noria.api import BufferUsage, DeviceBuffer, Event, HostBuffer, Observer, Queue, QueueKind, Span
from noria.builtin.sim import SimDevice, open_sim
from noria.testing.hazards import Hazard, HazardChecker, HazardFound, HazardKind, ObserverGroup

SLOT_NBYTES = 1024


class Rig:
    """A device with a checker, and work on it that only says what it reads and writes."""

    def __init__(self) -> None:
        self.device: SimDevice = open_sim(copy_queues=2)
        self.checker = HazardChecker()
        self.device.observer = self.checker
        self.compute = self.device.queue(QueueKind.COMPUTE)
        self.copy = self.device.queue(QueueKind.COPY)
        self.third = self.device.queue(QueueKind.COPY, 1)
        self.host: HostBuffer = self.device.alloc_host(SLOT_NBYTES, label="experts")

    def slot(self, label: str = "slot") -> DeviceBuffer:
        return self.device.alloc(SLOT_NBYTES, usage=BufferUsage.SLOT, label=label)

    def fill(self, queue: Queue, slot: DeviceBuffer, offset: int = 0, nbytes: int = SLOT_NBYTES) -> None:
        queue.copy_h2d(slot.span(offset, nbytes), self.host.span(offset, nbytes))

    def read(self, queue: Queue, *spans: Span) -> None:
        queue.submit("read", spans, [], lambda: None)

    def write(self, queue: Queue, *spans: Span) -> None:
        queue.submit("write", [], spans, lambda: None)

    @property
    def kinds(self) -> list[HazardKind]:
        return [hazard.kind for hazard in self.checker.hazards]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    with rig.device:
        yield rig


# --- the ring --------------------------------------------------------------------------------------------------------


def run_ring(rig: Rig, n_slots: int = 3, n_units: int = 10, *, wait_ready: bool = True, wait_free: bool = True) -> None:
    slots = [rig.slot(f"slot {i}") for i in range(n_slots)]
    ready: dict[int, Event] = {}
    free: dict[int, Event] = {}

    def fill(unit: int) -> None:
        slot = unit % n_slots
        if wait_free and slot in free:
            rig.copy.wait(free[slot])
        rig.fill(rig.copy, slots[slot])
        ready[slot] = rig.copy.record("ready")

    for unit in range(n_slots - 1):
        fill(unit)
    for unit in range(n_units):
        if unit + n_slots - 1 < n_units:
            fill(unit + n_slots - 1)
        slot = unit % n_slots
        if wait_ready:
            rig.compute.wait(ready[slot])
        rig.read(rig.compute, slots[slot].span())
        free[slot] = rig.compute.record("free")


@pytest.mark.parametrize("n_slots", [2, 3, 5])
def test_a_correct_ring_has_no_hazard(rig: Rig, n_slots: int) -> None:
    run_ring(rig, n_slots)
    rig.checker.check()


def test_a_ring_that_does_not_wait_for_ready_reads_before_the_copy(rig: Rig) -> None:
    run_ring(rig, wait_ready=False)
    first = rig.checker.hazards[0]
    assert (first.kind, first.later.label, first.later.number) == (HazardKind.READ_BEFORE_COPY, "read", 1)
    assert (first.earlier.queue, first.earlier.label, first.earlier.number) == (rig.copy, "h2d", 1)
    assert rig.kinds.count(HazardKind.READ_BEFORE_COPY) == 10


def test_a_ring_that_does_not_wait_for_free_overwrites(rig: Rig) -> None:
    run_ring(rig, wait_free=False)
    assert set(rig.kinds) == {HazardKind.OVERWRITE_BEFORE_RELEASE}
    first = rig.checker.hazards[0]
    assert (first.later.queue, first.later.number) == (rig.copy, 4)  # the first that fills a slot again
    assert (first.earlier.queue, first.earlier.number) == (rig.compute, 1)
    assert len(rig.checker.hazards) == 7


# --- what is ordered -------------------------------------------------------------------------------------------------


def test_one_queue_is_in_order(rig: Rig) -> None:
    slot = rig.slot()
    for _ in range(3):
        rig.fill(rig.compute, slot)
        rig.read(rig.compute, slot.span())
    rig.compute.submit("update", [slot.span()], [slot.span()], lambda: None)
    rig.checker.check()


def test_order_passes_through_a_third_queue(rig: Rig) -> None:
    slot = rig.slot()
    rig.fill(rig.copy, slot)
    rig.third.wait(rig.copy.record())
    rig.compute.wait(rig.third.record())
    rig.read(rig.compute, slot.span())
    rig.checker.check()


def test_a_wait_orders_nothing_that_came_after_the_event(rig: Rig) -> None:
    slot = rig.slot()
    event = rig.copy.record()
    rig.fill(rig.copy, slot)
    rig.compute.wait(event)
    rig.read(rig.compute, slot.span())
    assert rig.kinds == [HazardKind.READ_BEFORE_COPY]


def test_a_wait_orders_only_what_comes_after_it(rig: Rig) -> None:
    slot = rig.slot()
    rig.fill(rig.copy, slot)
    rig.read(rig.compute, slot.span())
    rig.compute.wait(rig.copy.record())
    rig.read(rig.compute, slot.span())
    assert [hazard.later.number for hazard in rig.checker.hazards] == [1]


def test_two_writers_and_two_readers(rig: Rig) -> None:
    slot = rig.slot()
    rig.write(rig.compute, slot.span())
    rig.write(rig.copy, slot.span())
    assert rig.kinds == [HazardKind.OVERWRITE_BEFORE_RELEASE]
    other = rig.slot()
    rig.read(rig.compute, other.span())
    rig.read(rig.copy, other.span())
    assert len(rig.checker.hazards) == 1


def test_every_reader_has_to_be_waited_for(rig: Rig) -> None:
    slot = rig.slot()
    rig.read(rig.compute, slot.span())
    rig.read(rig.third, slot.span())
    rig.copy.wait(rig.third.record())
    rig.fill(rig.copy, slot)
    assert [hazard.earlier.queue for hazard in rig.checker.hazards] == [rig.compute]


def test_a_repeated_program_counts_each_time(rig: Rig) -> None:
    slot = rig.slot()
    with rig.compute.program("step") as program:
        rig.read(rig.compute, slot.span())
    assert not rig.checker.hazards
    rig.fill(rig.copy, slot)
    rig.compute.wait(rig.copy.record())
    rig.compute.run(program)
    rig.checker.check()
    rig.fill(rig.copy, slot)
    rig.compute.run(program)
    assert rig.kinds == [HazardKind.OVERWRITE_BEFORE_RELEASE, HazardKind.READ_BEFORE_COPY]


# --- what overlaps ---------------------------------------------------------------------------------------------------


def test_parts_of_a_buffer_are_apart(rig: Rig) -> None:
    slot = rig.slot()
    rig.fill(rig.copy, slot, 0, 512)
    ready = rig.copy.record()
    rig.fill(rig.copy, slot, 512, 512)
    rig.compute.wait(ready)
    rig.read(rig.compute, slot.span(0, 512))
    rig.checker.check()
    rig.read(rig.compute, slot.span(500, 24))
    (hazard,) = rig.checker.hazards
    assert (hazard.earlier.number, hazard.span.offset, hazard.span.nbytes) == (2, 512, 12)


def test_an_overwritten_part_leaves_the_rest(rig: Rig) -> None:
    slot = rig.slot()
    rig.write(rig.copy, slot.span())
    rig.compute.wait(rig.copy.record())
    rig.write(rig.third, slot.span(256, 256))  # unordered with the first write
    rig.read(rig.compute, slot.span(0, 256), slot.span(512, 512))
    assert [(h.span.offset, h.span.nbytes) for h in rig.checker.hazards] == [(256, 256)]
    rig.read(rig.compute, slot.span())
    assert [h.kind for h in rig.checker.hazards[1:]] == [HazardKind.READ_BEFORE_COPY]
    assert rig.checker.hazards[1].span == slot.span(256, 256)


def test_an_overwritten_part_leaves_the_readers_of_the_rest(rig: Rig) -> None:
    slot = rig.slot()
    rig.read(rig.compute, slot.span())
    rig.copy.wait(rig.compute.record())
    rig.write(rig.copy, slot.span(256, 256))
    rig.third.wait(rig.copy.record())
    rig.write(rig.third, slot.span(0, 512))
    rig.checker.check()
    rig.write(rig.device.queue(QueueKind.COMPUTE, 1), slot.span(768, 256))
    assert [(h.earlier.queue, h.span.offset, h.span.nbytes) for h in rig.checker.hazards] == [(rig.compute, 768, 256)]


def test_one_hazard_for_a_pair_however_the_bytes_are_cut(rig: Rig) -> None:
    slot = rig.slot()
    rig.write(rig.copy, slot.span())
    rig.compute.wait(rig.copy.record())
    for offset in range(0, SLOT_NBYTES, 100):
        rig.read(rig.compute, slot.span(offset, 10))
    rig.write(rig.copy, slot.span(0, 300))
    rig.write(rig.third, slot.span(0, 500))
    pairs = [(h.later.label, h.earlier.queue.name, h.earlier.number) for h in rig.checker.hazards]
    assert len(pairs) == len(set(pairs))
    assert len([h for h in rig.checker.hazards if h.earlier == rig.checker.hazards[-1].earlier]) == 1


def test_empty_spans_touch_nothing(rig: Rig) -> None:
    slot = rig.slot()
    rig.write(rig.copy, slot.span())
    rig.read(rig.compute, slot.span(10, 0))
    rig.write(rig.compute, slot.span(10, 0))
    rig.checker.check()


class BruteForce:
    """Knows of every step which steps it comes after, and compares every pair of accesses."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []  # of each step
        self.accesses: list[tuple[int, bool, range]] = []  # step, whether it writes, bytes
        self.order: dict[int, set[int]] = {}  # of each queue: what its next step comes after

    def step(self, queue: int, waits_for: int | None = None) -> None:
        order = self.order.setdefault(queue, set())
        if waits_for is not None:
            order |= self.before[waits_for]
        self.before.append(order | {len(self.before)})
        self.order[queue] = set(self.before[-1])

    def conflicts(self, queue: int, writes: bool, touched: range) -> bool:
        """Whether an access by `queue` now conflicts with an earlier one that it is not ordered after."""
        return any(
            (writes or wrote) and range(max(old.start, touched.start), min(old.stop, touched.stop))
            for step, wrote, old in self.accesses
            if step not in self.order.get(queue, set())
        )


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules(rig: Rig, seed: int) -> None:
    """No hazard while all accesses are ordered, and one as soon as one is not."""
    random = Random(seed)
    queues = [rig.compute, rig.copy, rig.third]
    slot = rig.slot()
    truth = BruteForce()
    events: list[tuple[int, Event]] = []
    n_ordered = random.randrange(60)  # accesses before the first hazard may come
    while True:
        q = random.randrange(3)
        action = random.choices(["access", "record", "wait"], [5, 2, 3])[0]
        if action == "wait" and events:
            recorded, event = random.choice(events[-4:])
            queues[q].wait(event)
            truth.step(q, waits_for=recorded)
        elif action == "record":
            events.append((len(truth.before), queues[q].record()))
            truth.step(q)
        elif action == "access":
            start, writes = random.randrange(8), random.random() < 0.4
            touched = range(start, random.randrange(start + 1, 9))
            hazard = truth.conflicts(q, writes, touched)
            if hazard and len(truth.accesses) < n_ordered:
                continue
            truth.accesses.append((len(truth.before), writes, touched))
            truth.step(q)
            (rig.write if writes else rig.read)(queues[q], slot.span(start, len(touched)))
            assert bool(rig.checker.hazards) == hazard
            if hazard:
                return


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_error_names_both_submissions_and_the_bytes(rig: Rig) -> None:
    slot = rig.slot("slot 7")
    rig.fill(rig.copy, slot)
    for _ in range(7):
        rig.read(rig.compute, slot.span(64, 128))
    with pytest.raises(HazardFound) as found:
        rig.checker.check()
    text = str(found.value)
    assert isinstance(found.value, AssertionError)
    assert "7 hazards" in text
    assert "read-before-copy: read (no. 1 on sim0/compute) reads [64, 192) of SimDeviceBuffer('slot 7'" in text
    assert "without waiting for h2d (no. 1 on sim0/copy)" in text
    assert text.endswith("... and 2 more")
    assert found.value.hazards == tuple(rig.checker.hazards)
    assert isinstance(found.value.hazards[0], Hazard)


def test_a_group_passes_everything_on_to_each(rig: Rig) -> None:
    other = HazardChecker()
    group: Observer = ObserverGroup(rig.checker, other)
    rig.device.observer = group
    run_ring(rig)
    rig.checker.check()
    other.check()
    rig.fill(rig.third, rig.slot())
    run_ring(rig, wait_free=False)
    assert other.hazards == rig.checker.hazards != []


def test_freed_buffers_are_forgotten(rig: Rig) -> None:
    slot = rig.slot()
    rig.write(rig.copy, slot.span())
    slot.free()
    kept = ref(slot)
    del slot
    assert kept() is None
