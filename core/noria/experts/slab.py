"""Experts as bytes: the tensors of a layer in host RAM, and units of them as they go through the ring.

A *slab* is one expert's bytes of one tensor. In memory that kernels read, slabs of one tensor are `stride` bytes
apart, the slab padded to the device's table unit. A *unit* is what fills a slot: gate, up and down slabs of some
experts of one layer, part after part. What lies in the padding is anything: no kernel lets it matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from noria.api import CopyRegion, HostBuffer, Span, align_up, merge_regions


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """The experts of one tensor of one layer.

    Attributes:
        name: GGUF name.
        source: [n_expert] slabs one after another in host memory.
    """

    name: str
    type: str
    n_expert: int
    n_out: int
    n_in: int
    slab_nbytes: int
    source: Span

    def slab(self, expert: int) -> Span:
        return self.source.sub(expert * self.slab_nbytes, self.slab_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The routed experts of one layer, in host memory."""

    layer: int
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor

    @property
    def tensors(self) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        return self.gate, self.up, self.down

    @property
    def n_expert(self) -> int:
        return self.gate.n_expert

    @property
    def nbytes(self) -> int:
        """All experts, as they cross the bus."""
        return sum(t.n_expert * t.slab_nbytes for t in self.tensors)

    @property
    def pinned(self) -> bool:
        return all(getattr(t.source.buffer, "pinned", False) for t in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """Where the parts of a unit lie in a slot, for given slab sizes and padding."""

    strides: tuple[int, int, int]
    alignment: int

    def part_nbytes(self, n_experts: int) -> tuple[int, ...]:
        return tuple(align_up(n_experts * stride, self.alignment) for stride in self.strides)

    def nbytes(self, n_experts: int) -> int:
        """Slot bytes of a unit of `n_experts`."""
        return sum(self.part_nbytes(n_experts))

    def capacity(self, slot_nbytes: int) -> int:
        """How many experts fit a slot."""
        n = slot_nbytes // sum(self.strides)
        while n and self.nbytes(n) > slot_nbytes:
            n -= 1
        return n


def unit_layout(slab_nbytes: Sequence[int], table_unit: int, alignment: int) -> UnitLayout:
    """Layout for gate, up and down slabs of these sizes on a device with this table unit and buffer alignment."""
    gate, up, down = (align_up(nbytes, table_unit) for nbytes in slab_nbytes)
    return UnitLayout(strides=(gate, up, down), alignment=alignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some experts of one layer, ascending; a `range` when they are neighbours."""

    layer: ExpertLayer
    experts: Sequence[int]

    @property
    def bounds(self) -> tuple[int, int]:
        """The range of experts whose rows this unit computes; in it, experts outside the unit have no rows."""
        return self.experts[0], self.experts[-1] + 1

    @property
    def nbytes(self) -> int:
        """Bytes that cross the bus."""
        return len(self.experts) * sum(t.slab_nbytes for t in self.layer.tensors)

    def parts(self, slot: Span, layout: UnitLayout) -> tuple[Span, ...]:
        """The spans of gate, up and down in a slot."""
        spans, offset = [], 0
        for nbytes in layout.part_nbytes(len(self.experts)):
            spans.append(slot.sub(offset, nbytes))
            offset += nbytes
        return tuple(spans)

    def regions(self, parts: Sequence[Span], layout: UnitLayout) -> list[CopyRegion]:
        """The copies that fill `parts` of device memory with gate, up and down, neighbours merged."""
        regions: list[CopyRegion] = []
        for tensor, part, stride in zip(self.layer.tensors, parts, layout.strides, strict=True):
            nbytes = tensor.slab_nbytes
            if isinstance(self.experts, range) and stride == nbytes:
                n = len(self.experts)
                regions.append(
                    CopyRegion(part.sub(0, n * nbytes), tensor.source.sub(self.experts[0] * nbytes, n * nbytes))
                )
            else:
                slabs = [
                    CopyRegion(*padded(part.sub(i * stride, nbytes), tensor.slab(expert)))
                    for i, expert in enumerate(self.experts)
                ]
                regions += merge_regions(slabs)
        return regions


def padded(dst: Span, src: Span) -> tuple[Span, Span]:
    """Both sides of a copy between host and device, made longer so that the device can copy it (`copy_alignment`).

    The device's side is followed by padding. The host's is followed by anything, and nothing where its buffer ends.
    """
    host, device = (dst, src) if isinstance(dst.buffer, HostBuffer) else (src, dst)
    nbytes = align_up(src.nbytes, device.buffer.device.caps.copy_alignment)
    nbytes = min(nbytes, host.buffer.nbytes - host.offset)
    return Span(dst.buffer, dst.offset, nbytes), Span(src.buffer, src.offset, nbytes)


def split_range(n_expert: int, capacity: int) -> list[range]:
    """All experts as the fewest ranges of at most `capacity`, of nearly equal length."""
    n_units = -(-n_expert // capacity)
    bounds = [n_expert * i // n_units for i in range(n_units + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def split_used(experts: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Some experts, ascending, as groups of at most `capacity`."""
    return [tuple(experts[i : i + capacity]) for i in range(0, len(experts), capacity)]
