"""Ring: many payloads through few slots, with nothing but the contract, and every chance to go wrong.

Between two payloads a slot is filled with poison, and random delays on either queue change what comes first. A slot
that is read before its copy, or overwritten before its reader is done, shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import (
    BufferUsage,
    CopyRegion,
    Device,
    DeviceBuffer,
    Event,
    ExpertTable,
    HostBuffer,
    Op,
    QueueKind,
    RowWindow,
    align_up,
    where_entry,
)
from noria.testing.accuracy import assert_same_bits
from noria.testing.bench import POISON, Bench, delay
from noria.testing.blocks import random_weights
from noria.testing.fixtures import ConformanceSuite

N_PAYLOAD = 24
N_LAYER, N_EXPERT, N_EXPERT_USED, N_TOKENS = 6, 8, 2, 5
UNIT = 3  # experts that share a slot
N_OUT, N_EMBD = 64, 256

Regions = Callable[[DeviceBuffer], Sequence[CopyRegion]]
Use = Callable[[DeviceBuffer], None]


@dataclass
class Slot:
    """A device buffer, and the events of what was last done with it."""

    buffer: DeviceBuffer
    ready: Event | None = None
    free: Event | None = None


class MiniRing:
    """Slots used in turn; each fill waits for the slot's last reader, each reader for the fill.

    Attributes:
        used: (ready, free) events of every payload so far.
    """

    def __init__(self, device: Device, n_slots: int, nbytes: int, rng: np.random.Generator) -> None:
        self.copy, self.compute = device.queue(QueueKind.COPY), device.queue(QueueKind.COMPUTE)
        self.rng = rng
        self.slots = [Slot(device.alloc(nbytes, usage=BufferUsage.SLOT, label=f"slot{i}")) for i in range(n_slots)]
        self.poison: HostBuffer = device.alloc_host(nbytes, label="poison")
        self.poison.array()[:] = POISON
        self.used: list[tuple[Event, Event]] = []

    def stream(self, payloads: Sequence[tuple[Regions, Use]]) -> None:
        """Copy and use all payloads, the copies as far ahead as there are slots."""
        n_ahead = len(self.slots) - 1
        for i in range(len(payloads) + n_ahead):
            if i < len(payloads):
                self._fill(self.slots[i % len(self.slots)], payloads[i][0])
            if i >= n_ahead:
                self._use(self.slots[(i - n_ahead) % len(self.slots)], payloads[i - n_ahead][1])

    def _fill(self, slot: Slot, regions: Regions) -> None:
        if slot.free is not None:
            self.copy.wait(slot.free)
        self.copy.copy_h2d(slot.buffer.span(), self.poison.span())
        self._maybe_delay()
        self.copy.copy_regions(regions(slot.buffer))
        slot.ready = self.copy.record("ready")

    def _use(self, slot: Slot, use: Use) -> None:
        assert slot.ready is not None
        self.compute.wait(slot.ready)
        self._maybe_delay()
        use(slot.buffer)
        slot.free = self.compute.record("free")
        self.used.append((slot.ready, slot.free))

    def _maybe_delay(self) -> None:
        if self.rng.random() < 0.4:
            delay((self.copy, self.compute)[self.rng.integers(2)], self.rng.uniform(0, 3))

    def close(self) -> None:
        for queue in (self.copy, self.compute):
            queue.synchronize()
        for buffer in (self.poison, *(slot.buffer for slot in self.slots)):
            buffer.free()


class Layer:
    """Experts of one layer in host memory, rows routed to them, and their outputs without streaming.

    Attributes:
        used: the experts that have rows.
        step: bytes from one expert to the next.
        resident, streamed: the two results; the second is poison until all payloads have been used.
    """

    def __init__(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        self.bench = bench
        self.weights = random_weights(rng, type, (N_EXPERT, N_OUT, N_EMBD))
        ids = np.array([rng.choice(N_EXPERT, N_EXPERT_USED, replace=False) for _ in range(N_TOKENS)])
        self.used = {int(e) for e in ids.flat}
        self.rows = bench.rows(ids, np.ones(ids.shape), N_EXPERT)
        self.x = bench.act(bench.normal(rng, N_TOKENS, N_EMBD))
        self.window = RowWindow(first_expert=0, end_expert=N_EXPERT, first_row=0, n_rows=ids.size)
        self.resident, self.streamed = bench.out(ids.size, N_OUT), bench.out(ids.size, N_OUT)
        self.slab_nbytes = self.weights.data.size // N_EXPERT
        self.step = align_up(self.slab_nbytes, max(bench.caps.table_unit, bench.caps.copy_alignment))
        image: NDArray[np.uint8] = np.zeros((N_EXPERT, self.step), np.uint8)
        image[:, : self.slab_nbytes] = self.weights.data.reshape(N_EXPERT, self.slab_nbytes)
        self.source = bench.host(image.reshape(-1))
        args = (self.resident, bench.table(self.weights), self.x, self.rows, self.window)
        self.scratch = bench.scratch(Op.MUL_MAT_ID, *args, by_token=True)
        bench.op(Op.MUL_MAT_ID, *args, by_token=True)

    def payload(self, places: dict[int, int]) -> tuple[Regions, Use]:
        """Some experts go to these places of a slot and are computed from there."""
        where = np.full(N_EXPERT, -1, np.int32)
        for e, place in places.items():
            where[e] = where_entry(0, place * self.step, self.bench.caps.table_unit)
        where_tensor = self.bench.tensor(where, "I32")

        def regions(slot: DeviceBuffer) -> list[CopyRegion]:
            return [
                CopyRegion(slot.span(place * self.step, self.step), self.source.span(e * self.step, self.step))
                for e, place in places.items()
            ]

        def use(slot: DeviceBuffer) -> None:
            table = ExpertTable(
                spans=(slot.span(),),
                where=where_tensor,
                type=self.weights.type,
                n_out=N_OUT,
                n_in=N_EMBD,
                slab_nbytes=self.slab_nbytes,
            )
            self.bench.device.kernels.mul_mat_id(
                self.bench.queue,
                self.streamed,
                table,
                self.x,
                self.rows,
                self.window,
                by_token=True,
                scratch=self.scratch,
            )

        return regions, use


class RingSuite(ConformanceSuite):
    """Streaming gives what is there without streaming. Without a copy queue the copies are on the compute queue."""

    @pytest.mark.parametrize("n_slots", [2, 3, 4])
    def test_streamed_bytes(self, bench: Bench, rng: np.random.Generator, n_slots: int) -> None:
        """Every payload is what its reader finds in the slot."""
        nbytes = align_up(200_000, bench.caps.copy_alignment)
        payloads = rng.integers(0, 256, (N_PAYLOAD, nbytes), dtype=np.uint8)
        sources = [bench.host(payload) for payload in payloads]
        outs = [bench.alloc(nbytes) for _ in payloads]

        def payload(source: HostBuffer, out: DeviceBuffer) -> tuple[Regions, Use]:
            return (
                lambda slot: [CopyRegion(slot.span(), source.span())],
                lambda slot: bench.queue.copy_d2d(out.span(), slot.span()),
            )

        ring = MiniRing(bench.device, n_slots, nbytes, rng)
        ring.stream([payload(source, out) for source, out in zip(sources, outs, strict=True)])
        ring.close()
        for i, (out, want) in enumerate(zip(outs, payloads, strict=True)):
            assert np.array_equal(bench.content(out), want), f"payload {i} was not what its reader found"

    @pytest.mark.parametrize("type", ["F32", "Q8_0", "Q4_K"])
    @pytest.mark.parametrize("fill", ["whole", "selective", "packed"])
    @pytest.mark.parametrize("n_slots", [2, 3, 4])
    def test_streamed_experts(self, bench: Bench, rng: np.random.Generator, n_slots: int, fill: str, type: str) -> None:
        """Experts computed from slots, a few at a time, have the bits of experts that lie on the device.

        The slot holds all experts of a unit; or only those in use, at their places (the holes hold poison); or only
        those, close together.
        """
        if not bench.caps.region_copy:
            pytest.skip("caps.region_copy is False: a slot is not filled in parts")
        layers = [Layer(bench, rng, type) for _ in range(N_LAYER)]
        payloads = []
        for layer in layers:
            for first in range(0, N_EXPERT, UNIT):
                unit = range(first, min(first + UNIT, N_EXPERT))
                wanted = [e for e in unit if fill == "whole" or e in layer.used]
                if wanted:
                    places = range(len(wanted)) if fill == "packed" else [e - first for e in wanted]
                    payloads.append(layer.payload(dict(zip(wanted, places, strict=True))))
        ring = MiniRing(bench.device, n_slots, UNIT * layers[0].step, rng)
        ring.stream(payloads)
        ring.close()
        for i, layer in enumerate(layers):
            assert_same_bits(bench.read(layer.streamed), bench.read(layer.resident), f"layer {i}")

    @pytest.mark.parametrize("n_slots", [2, 3, 4])
    def test_times_of_slots(self, device: Device, rng: np.random.Generator, n_slots: int) -> None:
        """On the device's clock a slot is ready before it is free, and free before it is ready again."""
        if not device.caps.event_timing:
            pytest.skip("caps.event_timing is False")
        nbytes = 1 << 20
        source = device.alloc_host(nbytes, label="source")
        out = device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="out")
        ring = MiniRing(device, n_slots, nbytes, rng)
        compute = device.queue(QueueKind.COMPUTE)
        ring.stream(
            [
                (
                    lambda slot: [CopyRegion(slot.span(), source.span())],
                    lambda slot: compute.copy_d2d(out.span(), slot.span()),
                )
            ]
            * N_PAYLOAD
        )
        ring.close()
        times = [(ready.timestamp_ns() or 0, free.timestamp_ns() or 0) for ready, free in ring.used]
        for i, (ready, free) in enumerate(times):
            assert 0 < ready <= free
            assert i < n_slots or times[i - n_slots][1] <= ready, f"payload {i} came before its slot was free"
        source.free()
        out.free()
