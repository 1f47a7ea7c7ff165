"""The ring under the real scheduler on a simulated device: every order that must hold, at random timings.

The device has no numbers, so nothing here can pass because a race went well: `HazardChecker` looks at what is enforced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from noria.api import Event, Queue, QueueKind, Span
from noria.builtin.sim import SimDevice, open_sim
from noria.experts import OFF, POLICIES, Decision, ExpertLayer, Movement, Prefetcher, Ring, Situation
from noria.experts.ring import Filled
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models.qwen3moe import build
from noria.runtime import EngineConfig, Session
from noria.runtime.link import measure_link
from noria.runtime.scheduler import StageRunner
from noria.testing.hazards import HazardChecker, HazardKind

N_LAYER = 4


def alternating(layer: ExpertLayer, situation: Situation) -> Decision:
    """Whole layers and selective ones by turns, so that they pass the ring to each other."""
    return Decision(movement=(Movement.WHOLE, Movement.SELECTIVE)[layer.layer % 2], why="test")


ALL_POLICIES = {**POLICIES, "alternating": alternating}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = tmp_path_factory.mktemp("ring") / "tiny.gguf"
    synthesize("tiny", path, n_layer=N_LAYER, sparse=True)  # 16 experts, 4 used; 3 to 4 units a layer
    with open_model(path) as file:
        yield file


@pytest.fixture(scope="module", autouse=True)
def link_measured_once() -> Iterator[None]:
    """The same link every time: measuring it takes longer than the rest of a case."""
    with pytest.MonkeyPatch.context() as patch, open_sim() as device:
        rates = measure_link(device)
        patch.setattr("noria.runtime.session.measure_link", lambda device: rates)
        yield


@dataclass(frozen=True)
class Step:
    """One call of the ring, and what is on the queues when it returns.

    Attributes:
        what: "fill", "acquire" or "release".
        n_computed: kernels enqueued so far.
        first_copy: index of the unit's first copy in the log of the copy queue.
    """

    what: str
    filled: Filled
    n_computed: int
    first_copy: int


class Trace:
    """Everything the ring is asked to do, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, device: SimDevice) -> None:
        self.device = device
        self.steps: list[Step] = []
        fill, acquire, release = Ring.fill, Ring.acquire, Ring.release

        def traced_fill(ring: Ring, unit: Any) -> Filled:
            first_copy = len(device.log(ring.copy))
            filled = fill(ring, unit)
            self._note("fill", filled, first_copy)
            return filled

        def traced_acquire(ring: Ring, filled: Filled, idle_since: Event | None) -> None:
            acquire(ring, filled, idle_since)
            self._note("acquire", filled)

        def traced_release(ring: Ring, filled: Filled) -> None:
            release(ring, filled)
            self._note("release", filled)

        patch.setattr(Ring, "fill", traced_fill)
        patch.setattr(Ring, "acquire", traced_acquire)
        patch.setattr(Ring, "release", traced_release)

    def _note(self, what: str, filled: Filled, first_copy: int = -1) -> None:
        n_computed = len(self.device.log(self.device.queue(QueueKind.COMPUTE)))
        self.steps.append(Step(what, filled, n_computed, first_copy))

    def n(self, what: str) -> int:
        return sum(step.what == what for step in self.steps)

    def check_ownership(self, n_slots: int) -> None:
        """A slot is filled, acquired and released by one unit before the next fills it; slots are used in turn."""
        owners: dict[int, tuple[Filled, str]] = {}
        slots: list[int] = []
        for step in self.steps:
            slot = id(step.filled.slot)
            match step.what:
                case "fill":
                    assert slot not in owners, "a slot was filled while a unit owned it"
                    owners[slot] = step.filled, "fill"
                    slots.append(slot)
                case "acquire":
                    assert owners[slot] == (step.filled, "fill")
                    owners[slot] = step.filled, "acquire"
                case "release":
                    assert owners.pop(slot) == (step.filled, "acquire")
        assert not owners, "a unit was never released"
        assert all(a == b for a, b in zip(slots, slots[n_slots:], strict=False))
        assert len(set(slots[:n_slots])) == min(n_slots, len(slots))


PROMPT = range(40)


@contextmanager
def running(
    file: ModelFile, options: dict[str, Any], *, prefetch: str = "whole", **flags: Any
) -> Iterator[tuple[Session, SimDevice, HazardChecker, Trace]]:
    """A session whose device is watched."""
    config = EngineConfig(**{"n_cpu_moe": N_LAYER, "n_ctx": 256, "prefetch": prefetch, **flags})
    with open_sim(**options) as device, pytest.MonkeyPatch.context() as patch:
        checker = HazardChecker()
        device.observer = checker
        trace = Trace(patch, device)
        with Session(file, build(file), [device], lambda: device, config, policies=ALL_POLICIES) as session:
            yield session, device, checker, trace


# --- no hazard, whatever the device, the policy, the shape of the run and the timing ---------------------------------

SHAPES: list[tuple[dict[str, Any], Sequence[Sequence[int]]]] = [
    ({}, [PROMPT, [1], [2]]),
    ({"override_tensors": ((r"blk\.[12]\.", "GPU"),)}, [PROMPT, [1], [2]]),
    ({"n_cpu_moe": 2, "n_ubatch": 16}, [PROMPT, [1], [2]]),
    ({"n_ubatch": 8, "n_batch": 24}, [PROMPT, [1, 2, 3]]),
    ({"n_ubatch": 8, "n_batch": 8, "override_tensors": (("blk.0.ffn_.*_exps", "GPU"),)}, [PROMPT[:30], PROMPT]),
    ({"n_ubatch": 1, "n_batch": 3, "chaos_seed": 3}, [PROMPT[:5], [1], [2], [3]]),
]


@pytest.mark.parametrize("prefetch", ALL_POLICIES)
@pytest.mark.parametrize("copy_queues", [0, 1, 2])
@pytest.mark.parametrize("blocking_submit", ["none", "copy", "compute"])
@pytest.mark.parametrize("device_wait", ["yes", "no"])
def test_every_order_that_must_hold_is_enforced(
    file: ModelFile, device_wait: str, blocking_submit: str, copy_queues: int, prefetch: str
) -> None:
    inline = prefetch == OFF or not copy_queues
    number = crc32(f"{device_wait} {blocking_submit} {copy_queues} {prefetch}".encode())
    options = {"device_wait": device_wait, "blocking_submit": blocking_submit, "copy_queues": copy_queues}
    n_fills = 0
    for n_slots in (2, 5) if inline else range(2, 7):
        flags, passes = SHAPES[(number + n_slots) % len(SHAPES)]
        timed = options | {"jitter": 0.7, "seed": number + n_slots}
        with running(file, timed, prefetch=prefetch, prefetch_slots=n_slots, **flags) as (session, _, checker, trace):
            for tokens in passes:
                session.forward(np.array(tokens))
            checker.check()
            trace.check_ownership(session.plan.choice.n_slots)
            n_fills += trace.n("fill")
    assert n_fills > 0


def test_random_timing_is_random(file: ModelFile) -> None:
    def copies(seed: int) -> list[int]:
        with running(file, {"jitter": 0.7, "seed": seed}) as (session, device, _, _):
            session.forward(np.array(PROMPT))
            return [work.start_ns for work in device.log(device.queue(QueueKind.COPY))]

    assert copies(1) == copies(1)
    assert copies(1) != copies(2)


# --- a ring that breaks the protocol is found out --------------------------------------------------------------------

DEVICES = [{"device_wait": "yes"}, {"device_wait": "no"}, {"blocking_submit": "copy"}, {"copy_queues": 1}]


def without_wait(patch: pytest.MonkeyPatch, label: str) -> None:
    """Let queues no longer wait for events of this label."""
    wait = Queue.wait

    def forgetful(queue: Queue, event: Event) -> None:
        if event.label != label:
            wait(queue, event)

    patch.setattr(Queue, "wait", forgetful)


def release_first(patch: pytest.MonkeyPatch) -> None:
    """Give a slot back before the compute that reads it has been enqueued."""

    def compute_unit(runner: StageRunner, prefetcher: Prefetcher, n: int) -> None:
        filled = prefetcher.next()
        prefetcher.release(filled)
        runner._compute(filled.unit.layer.layer, n, filled.tables, filled.unit.bounds)

    patch.setattr(StageRunner, "_compute_unit", compute_unit)


def hazards_of(file: ModelFile, options: dict[str, Any], prefetch: str, n_slots: int) -> set[HazardKind]:
    with running(file, options, prefetch=prefetch, prefetch_slots=n_slots) as (session, _, checker, trace):
        for tokens in (PROMPT, [1], [2]):
            session.forward(np.array(tokens))
        slots = {id(step.filled.slot.span.buffer) for step in trace.steps}
        assert all(id(hazard.span.buffer) in slots for hazard in checker.hazards), "the slots are what is raced for"
        return {hazard.kind for hazard in checker.hazards}


broken = pytest.mark.parametrize(
    ("options", "prefetch", "n_slots"),
    list(product(DEVICES, ["whole", "selective", "alternating"], [2, 4])),
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)


@broken
def test_a_ring_that_does_not_wait_for_ready_is_found_out(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], prefetch: str, n_slots: int
) -> None:
    without_wait(monkeypatch, "ready")
    assert HazardKind.READ_BEFORE_COPY in hazards_of(file, options, prefetch, n_slots)


@broken
def test_a_ring_that_does_not_wait_for_free_is_found_out(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], prefetch: str, n_slots: int
) -> None:
    without_wait(monkeypatch, "free")
    assert HazardKind.OVERWRITE_BEFORE_RELEASE in hazards_of(file, options, prefetch, n_slots)


@broken
def test_a_release_before_the_compute_is_found_out(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], prefetch: str, n_slots: int
) -> None:
    release_first(monkeypatch)
    assert HazardKind.OVERWRITE_BEFORE_RELEASE in hazards_of(file, options, prefetch, n_slots)


@broken
def test_without_a_fault_the_same_runs_are_clean(
    file: ModelFile, options: dict[str, Any], prefetch: str, n_slots: int
) -> None:
    assert hazards_of(file, options, prefetch, n_slots) == set()


def test_a_slot_that_is_owned_is_not_filled(file: ModelFile) -> None:
    with running(file, {}, prefetch_slots=3) as (session, _, _, _):
        stage = session.stages[0]
        assert stage.ring is not None
        units = stage.units(0) + stage.units(1)
        filled = [stage.ring.fill(unit) for unit in units[:3]]
        with pytest.raises(AssertionError, match="still holds"):
            stage.ring.fill(units[3])
        stage.ring.release(filled[0])


# --- how far ahead ---------------------------------------------------------------------------------------------------


def fills_at_acquire(trace: Trace) -> list[int]:
    """For each unit in turn: how many had been submitted to the copy queue when compute was made to wait for it."""
    n_fills, at = 0, []
    for step in trace.steps:
        n_fills += step.what == "fill"
        if step.what == "acquire":
            at.append(n_fills)
    return at


@pytest.mark.parametrize("n_slots", range(2, 7))
@pytest.mark.parametrize(
    ("device_wait", "lookahead"),
    [("yes", {2: 1, 3: 2, 4: 3, 5: 4, 6: 5}), ("no", {2: 1, 3: 1, 4: 2, 5: 3, 6: 4})],
)
@pytest.mark.parametrize("blocking_submit", ["none", "compute"])
def test_the_next_copies_are_submitted_before_compute_waits_for_the_current_one(
    file: ModelFile, device_wait: str, lookahead: dict[int, int], n_slots: int, blocking_submit: str
) -> None:
    options = {"device_wait": device_wait, "blocking_submit": blocking_submit}
    with running(file, options, prefetch_slots=n_slots) as (session, _, _, trace):
        session.forward(np.array(PROMPT))
        n_units = sum(len(session.stages[0].units(layer)) for layer in range(N_LAYER))
        assert n_units > n_slots
        expected = [min(i + 1 + lookahead[n_slots], n_units) for i in range(n_units)]
        assert fills_at_acquire(trace) == expected


@pytest.mark.parametrize("n_slots", [2, 4])
def test_where_copying_blocks_it_comes_after_the_compute_it_runs_beside(file: ModelFile, n_slots: int) -> None:
    options = {"blocking_submit": "copy", "tflops": 0.1}  # so slow that a unit takes about as long as its copies
    with running(file, options, prefetch_slots=n_slots) as (session, device, _, trace):
        session.forward(np.array(PROMPT))
        assert session.stages[0].ring is not None
        copies = device.log(session.stages[0].ring.copy)
        kernels = device.log(device.queue(QueueKind.COMPUTE))
        later = [step for step in trace.steps if step.what == "fill"][n_slots:]
        assert all(copies[step.first_copy].start_ns < kernels[step.n_computed - 1].end_ns for step in later)
        ring_ns = session.take_counters().wall_ns
    with running(file, options, prefetch=OFF) as (session, _, _, _):
        session.forward(np.array(PROMPT))
        assert ring_ns < 0.9 * session.take_counters().wall_ns


@pytest.mark.parametrize("device_wait", ["yes", "no"])
def test_copies_run_ahead_through_resident_layers(file: ModelFile, device_wait: str) -> None:
    """Only the last layer is in RAM: its units fill the slots while the first layers compute."""
    flags = {"override_tensors": ((r"blk\.[0-2]\.", "GPU"),), "prefetch_slots": 4}
    with running(file, {"device_wait": device_wait}, **flags) as (session, device, _, trace):
        compute = device.queue(QueueKind.COMPUTE)
        n_loaded = len(device.log(compute))
        session.forward(np.array(PROMPT))
        assert session.stages[0].ring is not None
        copies = device.log(session.stages[0].ring.copy)
        ffn_ends = [work.end_ns for work in device.log(compute)[n_loaded:] if work.label == "expert_ffn"]
        fills = [step for step in trace.steps if step.what == "fill"]
        assert {step.filled.unit.layer.layer for step in fills} == {3}
        n_ahead = min(len(fills), 4 if device_wait == "yes" else 3)
        for step in fills[:n_ahead]:
            assert copies[step.first_copy].start_ns < ffn_ends[0]
            assert step.n_computed <= n_loaded + 2, "submitted before the first layer, after the inputs"


@pytest.mark.parametrize("prefetch", ["whole", "alternating"])
def test_the_first_fills_begin_before_the_first_attention(file: ModelFile, prefetch: str) -> None:
    class Order:
        """Labels of all work by the order of the host's calls."""

        def __init__(self) -> None:
            self.labels: list[tuple[QueueKind, str]] = []

        def submitted(self, queue: Queue, label: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
            self.labels.append((queue.kind, label))

        def recorded(self, queue: Queue, event: Event) -> None: ...

        def waited(self, queue: Queue, event: Event) -> None: ...

    with running(file, {}, prefetch=prefetch) as (session, device, _, _):
        device.observer = order = Order()
        session.forward(np.array(PROMPT))
    first_kernel = next(i for i, (_, label) in enumerate(order.labels) if label not in ("h2d", "d2h"))
    assert order.labels[:first_kernel].count((QueueKind.COPY, "h2d")) >= 3


def test_selective_layers_take_only_what_is_used(file: ModelFile) -> None:
    """One token uses 4 of 16 experts: so many of the bytes cross the bus, and what is read back says so."""
    with running(file, {}, prefetch="selective") as (session, _, _, trace):
        session.forward(np.array([1]))
        counters = session.take_counters()
        layers = session.stages[0].store.layers.values()  # type: ignore[union-attr]
        assert counters.h2d_nbytes == sum(layer.nbytes for layer in layers) // 4
        assert counters.expert_coverage_pct == 25.0
        used = [step.filled.unit.experts for step in trace.steps if step.what == "fill"]
        assert len({tuple(experts) for experts in used}) > 1, "every layer would use the same experts"


def test_prefetch_off_runs_the_same_copies_on_the_compute_queue(file: ModelFile) -> None:
    with running(file, {}, prefetch="whole") as (session, device, _, _):
        session.forward(np.array(PROMPT))
        beside = session.take_counters()
        assert len(device.log(device.queue(QueueKind.COPY))) > 0
    with running(file, {}, prefetch=OFF) as (session, device, _, trace):
        session.forward(np.array(PROMPT))
        in_line = session.take_counters()
        assert len(device.log(device.queue(QueueKind.COPY))) == 0
        assert fills_at_acquire(trace) == list(range(1, trace.n("fill") + 1))
    assert in_line.h2d_nbytes == beside.h2d_nbytes
    assert in_line.stall_ns == in_line.copy_busy_ns
    assert beside.stall_ns < in_line.stall_ns / 2
    assert beside.wall_ns < in_line.wall_ns
