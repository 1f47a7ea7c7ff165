"""The simulated RTX 3060 against the rates published for one, by minimal schedules written out here."""

from __future__ import annotations

import pytest

from noria.api import (
    BufferUsage,
    DeviceBuffer,
    Event,
    ExpertRows,
    ExpertTable,
    Glu,
    HostBuffer,
    Queue,
    QueueKind,
    Span,
    Tensor,
    tensor_nbytes,
)
from noria.builtin.sim import SimDevice, open_sim

N_LAYER, N_TOKENS, N_EXPERT, N_EXPERT_USED, N_EMBD, N_FF_EXP = 40, 2048, 256, 8, 2048, 512
LAYER_NBYTES = 487_000_000  # experts of one layer, Q4_K_M
DENSE_PARAMS = 1_410_000_000  # everything that is not a routed expert
UNITS = [(0, 86), (86, 171), (171, 256)]


def tensor(device: SimDevice, type_: str, *shape: int) -> Tensor:
    buffer = device.alloc(tensor_nbytes(type_, shape), usage=BufferUsage.COMPUTE, label="tensor")
    return Tensor(buffer.span(), type_, shape)


class Box:
    """Qwen3.6-35B-A3B Q4_K_M on an RTX 3060, the experts of 26 of 40 layers in RAM; 2,048 tokens at once."""

    def __init__(self, n_slots: int, pinned: bool) -> None:
        self.device = open_sim("rtx3060-gen4")
        self.compute = self.device.queue(QueueKind.COMPUTE)
        self.slab_nbytes = LAYER_NBYTES // N_EXPERT // 3 // 4 * 4  # the alignment of copies
        unit_nbytes = 3 * self.slab_nbytes * 86
        self.slots = [self.device.alloc(unit_nbytes, usage=BufferUsage.SLOT, label=f"slot {i}") for i in range(n_slots)]
        self.resident = self.device.alloc(14 * LAYER_NBYTES, usage=BufferUsage.EXPERTS, label="resident experts")
        self.host: HostBuffer = self.device.alloc_host(LAYER_NBYTES, label="experts")
        if not pinned:
            self.host = self.device.wrap_host(self.host.array().data, label="mapped experts")
        self.where = tensor(self.device, "I32", N_EXPERT)
        self.w = tensor(self.device, "F16", DENSE_PARAMS // N_LAYER // N_EMBD, N_EMBD)
        self.x = tensor(self.device, "F16", N_TOKENS, N_EMBD)
        self.hidden = tensor(self.device, "F16", N_TOKENS, self.w.shape[0])
        self.acc = tensor(self.device, "F32", N_TOKENS, N_EMBD)
        self.rows = ExpertRows(
            ids=tensor(self.device, "I32", N_TOKENS, N_EXPERT_USED),
            weights=tensor(self.device, "F32", N_TOKENS, N_EXPERT_USED),
            pairs=tensor(self.device, "I32", N_TOKENS * N_EXPERT_USED),
            offsets=tensor(self.device, "I32", N_EXPERT + 1),
            positions=tensor(self.device, "I32", N_TOKENS, N_EXPERT_USED),
        )

    def dense(self) -> None:
        self.device.kernels.matmul(self.compute, self.hidden, self.w, self.x)

    def experts(self, unit: tuple[int, int], span: Span) -> None:
        gate, down = (
            ExpertTable(
                spans=(span,), where=self.where, type="Q4_K", n_out=n_out, n_in=n_in, slab_nbytes=self.slab_nbytes
            )
            for n_out, n_in in ((N_FF_EXP, N_EMBD), (N_EMBD, N_FF_EXP))
        )
        self.device.kernels.expert_ffn(
            self.compute, self.acc, self.x, gate, gate, down, self.rows, unit, 4096, Glu.SWIGLU
        )

    def upload(self, queue: Queue, unit: tuple[int, int], slot: DeviceBuffer) -> None:
        first, end = (3 * self.slab_nbytes * expert for expert in unit)
        queue.copy_h2d(slot.span(0, end - first), self.host.span(first, end - first))

    def measure(self) -> tuple[float, float]:
        """(tokens per second, share of the time without a kernel) of everything since the device was opened."""
        self.compute.record().wait()
        elapsed_ns = self.device.clock.now_ns
        return N_TOKENS / elapsed_ns * 1e9, 1 - self.device.compute.busy_ns / elapsed_ns


def run_in_line(box: Box, offloaded: set[int]) -> None:
    for layer in range(N_LAYER):
        box.dense()
        for unit in UNITS:
            if layer in offloaded:
                box.upload(box.compute, unit, box.slots[0])
            box.experts(unit, (box.slots[0] if layer in offloaded else box.resident).span())


def run_ring(box: Box, offloaded: set[int]) -> None:
    copy = box.device.queue(QueueKind.COPY)
    uploads = [(layer, unit) for layer in sorted(offloaded) for unit in UNITS]
    ready: list[Event] = []
    free: dict[int, Event] = {}

    def upload_next() -> None:
        i = len(ready)
        if i < len(uploads):
            slot = i % len(box.slots)
            if slot in free:
                copy.wait(free[slot])
            box.upload(copy, uploads[i][1], box.slots[slot])
            ready.append(copy.record("ready"))

    for _ in range(len(box.slots) - 1):
        upload_next()
    n_done = 0
    for layer in range(N_LAYER):
        box.dense()
        for unit in UNITS:
            if layer not in offloaded:
                box.experts(unit, box.resident.span())
                continue
            upload_next()
            slot = n_done % len(box.slots)
            box.compute.wait(ready[n_done])
            box.experts(unit, box.slots[slot].span())
            free[slot] = box.compute.record("free")
            n_done += 1


@pytest.mark.parametrize("offloaded", [set(range(26)), {i * 40 // 26 for i in range(26)}], ids=["first", "spread"])
def test_published_rates_of_an_rtx_3060(offloaded: set[int]) -> None:
    """Source: llama.cpp#25859, pp2048 of Qwen3.6-35B-A3B Q4_K_M with 26 layers of experts in RAM."""
    assert len(offloaded) == 26
    predicted = {}
    for arm, run, n_slots, pinned in (
        ("in line, pageable", run_in_line, 1, False),
        ("in line, pinned", run_in_line, 1, True),
        ("ring", run_ring, 4, True),
    ):
        box = Box(n_slots, pinned)
        run(box, offloaded)
        predicted[arm] = box.measure()
        assert box.device.compute.busy_ns / 1e9 == pytest.approx(1.04, rel=0.02)
    rates = {arm: tps for arm, (tps, _) in predicted.items()}
    assert rates == pytest.approx({"in line, pageable": 1143, "in line, pinned": 1385, "ring": 1880}, rel=0.15)
    assert predicted["in line, pageable"][1] == pytest.approx(0.42, abs=0.03)
    assert predicted["ring"][1] < 0.05


@pytest.mark.parametrize(("n_slots", "stalls"), [(2, True), (4, False)])
def test_too_few_slots_stall(n_slots: int, stalls: bool) -> None:
    """With every layer's experts in RAM the link is nearly as busy as the kernels, so lookahead matters."""
    box = Box(n_slots, pinned=True)
    run_ring(box, set(range(N_LAYER)))
    _, idle = box.measure()
    assert idle > 0.05 if stalls else idle < 0.02
