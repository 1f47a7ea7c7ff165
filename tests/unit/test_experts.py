"""Units in slots, tables of where experts are, and the choice of how they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.api import BufferUsage, CopyRegion, QueueKind, align_up
from noria.api.tensor import WHERE_BUFFER_SHIFT, WHERE_OFFSET_MASK, where_entry
from noria.builtin.sim import SimDevice, open_sim
from noria.experts import (
    OFF,
    POLICIES,
    ExpertLayer,
    ExpertTensor,
    Movement,
    RangeTables,
    Situation,
    TableKey,
    Unit,
    slot_nbytes_for,
    split_range,
    split_used,
    uniform_coverage,
    unit_layout,
)
from noria.experts.tables import packed_table, range_table

N_EXPERT = 12

repeatable = settings(derandomize=True, deadline=None)


def layer_of(device: SimDevice, slabs: Sequence[int], n_expert: int = N_EXPERT, gap: int = 0) -> ExpertLayer:
    """Experts of these slab sizes in one host buffer, tensors `gap` bytes apart."""
    host = device.alloc_host(sum(n_expert * slab + gap for slab in slabs), label="experts")
    tensors, offset = [], 0
    for name, slab in zip(("gate", "up", "down"), slabs, strict=True):
        source = host.span(offset, n_expert * slab)
        tensors.append(
            ExpertTensor(name=name, type="Q4_K", n_expert=n_expert, n_out=1, n_in=1, slab_nbytes=slab, source=source)
        )
        offset += source.nbytes + gap
    gate, up, down = tensors
    return ExpertLayer(layer=3, gate=gate, up=up, down=down)


@pytest.fixture(scope="module")
def device():
    with open_sim() as device:
        yield device


# --- layouts ---------------------------------------------------------------------------------------------------------

slab_sizes = st.tuples(*[st.integers(1, 5000)] * 3)
table_units = st.sampled_from([16, 32, 256])
alignments = st.sampled_from([16, 64, 256, 512])


@repeatable
@given(slabs=slab_sizes, table_unit=table_units, alignment=alignments, slot_nbytes=st.integers(0, 200_000))
def test_the_capacity_of_a_slot_is_the_most_experts_that_fit(slabs, table_unit, alignment, slot_nbytes):
    layout = unit_layout(slabs, table_unit, alignment)
    n = layout.capacity(slot_nbytes)
    assert layout.nbytes(n) <= slot_nbytes < layout.nbytes(n + 1)


@repeatable
@given(slabs=slab_sizes, table_unit=table_units, alignment=alignments, n=st.integers(1, 40))
def test_strides_and_parts_are_padded_as_little_as_they_may(slabs, table_unit, alignment, n):
    layout = unit_layout(slabs, table_unit, alignment)
    for slab, stride, part in zip(slabs, layout.strides, layout.part_nbytes(n), strict=True):
        assert stride % table_unit == 0
        assert slab <= stride < slab + table_unit
        assert part % alignment == 0
        assert n * stride <= part < n * stride + alignment


def test_a_slot_has_the_padded_size_of_the_largest_expert_tensor():
    assert slot_nbytes_for([(1000, 1000, 1200), (900, 900, 1100)], 10, 16, 256) == align_up(10 * 1200, 256)
    assert slot_nbytes_for([(1001, 1000, 1000)], 10, 16, 256) == align_up(10 * 1008, 256)
    assert slot_nbytes_for([(1000, 1000, 1000)], 2, 16, 256) == 3 * 1024, "two experts' tensor is less than one unit"


@repeatable
@given(slabs=st.lists(slab_sizes, min_size=1, max_size=4), n_expert=st.integers(1, 64), table_unit=table_units)
def test_any_slot_holds_at_least_one_expert_of_every_layer(slabs, n_expert, table_unit):
    nbytes = slot_nbytes_for(slabs, n_expert, table_unit, 256)
    assert all(unit_layout(sizes, table_unit, 256).capacity(nbytes) >= 1 for sizes in slabs)


# --- splitting -------------------------------------------------------------------------------------------------------


@repeatable
@given(n_expert=st.integers(1, 600), capacity=st.integers(1, 700))
def test_split_range_covers_all_experts_once_in_the_fewest_even_parts(n_expert, capacity):
    parts = split_range(n_expert, capacity)
    assert [expert for part in parts for expert in part] == list(range(n_expert))
    assert len(parts) == -(-n_expert // capacity)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= capacity
    assert max(sizes) - min(sizes) <= 1


@repeatable
@given(used=st.sets(st.integers(0, 255), min_size=1), capacity=st.integers(1, 300))
def test_split_used_keeps_every_expert_once_in_ascending_ranges(used, capacity):
    groups = split_used(sorted(used), capacity)
    assert [expert for group in groups for expert in group] == sorted(used)
    assert all(len(group) == capacity for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= capacity


@repeatable
@given(used=st.sets(st.integers(0, 255), min_size=1), capacity=st.integers(1, 300))
def test_units_of_used_experts_compute_disjoint_ranges(device, used, capacity):
    layer = layer_of(device, (1, 1, 1), 256)
    bounds = [Unit(layer=layer, experts=group).bounds for group in split_used(sorted(used), capacity)]
    assert all(first < end for first, end in bounds)
    assert all(a[1] <= b[0] for a, b in pairwise(bounds))


# --- units -----------------------------------------------------------------------------------------------------------


def slot_after(regions: Sequence[CopyRegion], nbytes: int) -> npt.NDArray[np.uint8]:
    """What a slot of zeros holds after these copies of bytes that are not zero."""
    content = np.zeros(nbytes, np.uint8)
    for region in regions:
        assert region.dst.nbytes == region.src.nbytes
        assert not content[region.dst.offset : region.dst.end].any(), "two copies write the same bytes"
        content[region.dst.offset : region.dst.end] = region.src.host_view()
    return content


@pytest.mark.parametrize("gap", [0, 4096])
@pytest.mark.parametrize("slabs", [(64, 64, 96), (50, 50, 70), (64, 50, 16), (7, 7, 7)], ids=str)
@pytest.mark.parametrize(
    "experts", [range(12), range(3, 8), (5,), (0, 1, 2), (0, 3, 4, 11), (1, 3, 5, 7, 9, 11)], ids=str
)
def test_every_slab_lands_where_the_tables_say(device, slabs, experts, gap):
    layer = layer_of(device, slabs, gap=gap)
    memory = layer.gate.source.buffer.array()
    memory[:] = np.random.default_rng(1).integers(1, 256, len(memory))
    layout, unit = unit_layout(slabs, 16, 256), Unit(layer=layer, experts=experts)
    slot = device.alloc(layout.nbytes(N_EXPERT), usage=BufferUsage.SLOT, label="slot").span()
    content = slot_after(unit.regions(unit.parts(slot, layout), layout), slot.nbytes)
    for tensor, part, stride in zip(layer.tensors, unit.parts(slot, layout), layout.strides, strict=True):
        if isinstance(experts, range):
            where = range_table(TableKey(N_EXPERT, experts[0], experts[-1] + 1, stride), 16)
        else:
            where = packed_table(experts, N_EXPERT, stride, 16)
        assert np.flatnonzero(where >= 0).tolist() == list(experts)
        for expert in experts:
            at = part.offset + int(where[expert] & WHERE_OFFSET_MASK) * 16
            assert at + tensor.slab_nbytes <= part.end
            assert (content[at : at + tensor.slab_nbytes] == tensor.slab(expert).host_view()).all()


def test_parts_follow_each_other_inside_the_slot(device):
    layer, layout = layer_of(device, (50, 50, 70)), unit_layout((50, 50, 70), 16, 256)
    slot = device.alloc(10_000, usage=BufferUsage.SLOT, label="slot").span(256, 5000)
    parts = Unit(layer=layer, experts=range(5)).parts(slot, layout)
    assert [part.offset for part in parts] == [256, 256 + 512, 256 + 1024]
    assert parts[-1].end == 256 + layout.nbytes(5)


@pytest.mark.parametrize(
    ("slabs", "experts", "n_copies"),
    [
        ((64, 64, 96), range(12), 3),  # one copy a tensor
        ((64, 64, 96), (0, 1, 2), 3),
        ((64, 64, 96), (0, 1, 5, 6, 7, 9), 9),  # three runs
        ((50, 64, 96), range(12), 12 + 1 + 1),  # padded slabs are copied one by one
        ((50, 64, 96), (0, 1, 5), 3 + 2 + 2),
    ],
)
def test_neighbours_are_copied_at_once(device, slabs, experts, n_copies):
    layout = unit_layout(slabs, 16, 256)
    slot = device.alloc(layout.nbytes(N_EXPERT), usage=BufferUsage.SLOT, label="slot").span()
    unit = Unit(layer=layer_of(device, slabs), experts=experts)
    regions = unit.regions(unit.parts(slot, layout), layout)
    assert len(regions) == n_copies
    assert unit.nbytes == len(experts) * sum(slabs)
    assert sum(region.src.nbytes for region in regions) == len(experts) * sum(align_up(slab, 4) for slab in slabs)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_range_table_counts_from_its_first_expert():
    assert range_table(TableKey(6, 2, 5, 48), 16).tolist() == [-1, -1, 0, 3, 6, -1]


def test_a_packed_table_counts_from_the_first_chosen_expert():
    assert packed_table((1, 4, 5), 6, 48, 16).tolist() == [-1, 0, -1, -1, 3, 6]


def test_offsets_beyond_a_table_are_refused():
    stride = 1 << 30
    n_most = (WHERE_OFFSET_MASK + 1) * 16 // stride
    assert range_table(TableKey(n_most, 0, n_most, stride), 16)[-1] == (n_most - 1) * (stride // 16)
    assert packed_table(tuple(range(n_most)), n_most, stride, 16)[-1] < 1 << WHERE_BUFFER_SHIFT
    with pytest.raises(ValueError, match="does not fit a table"):
        range_table(TableKey(n_most + 1, 0, n_most + 1, stride), 16)
    with pytest.raises(ValueError, match="does not fit a table"):
        packed_table(tuple(range(n_most + 1)), n_most + 1, stride, 16)
    with pytest.raises(ValueError, match="does not fit a table"):
        where_entry(0, 24, 16)  # not a multiple of the unit


def test_each_range_table_is_uploaded_once_to_its_own_place(device):
    tables = RangeTables(16, 256)
    keys = [TableKey(100, 0, 100, 64), TableKey(100, 0, 50, 64), TableKey(100, 50, 100, 64)]
    for key in [*keys, keys[0]]:
        tables.add(key)
    assert tables.nbytes == 3 * 512
    span = device.alloc(4096, usage=BufferUsage.COMPUTE, label="tables").span(256, tables.nbytes)
    staging = device.alloc_host(tables.nbytes, label="tables")
    tables.upload(device.queue(QueueKind.COMPUTE), span, staging)
    for key in keys:
        tensor = tables[key]
        assert (tensor.type, tensor.shape, tensor.span.offset % 256) == ("I32", (100,), 0)
        at = tensor.span.offset - span.offset
        assert staging.span(at, 400).host_view(np.int32).tolist() == range_table(key, 16).tolist()
    assert len({tables[key].span for key in keys}) == 3


# --- policies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A link that moves large copies at `peak_gbps` and loses `overhead_us` a copy."""

    peak_gbps: float = 26.0
    overhead_us: float = 3.0
    latency_us: float = 18.0

    def rate_gbps(self, nbytes: int) -> float:
        return nbytes / (nbytes / self.peak_gbps + self.overhead_us * 1e3)


@pytest.fixture(scope="module")
def layer(device) -> ExpertLayer:
    """The experts of a layer of Qwen3-30B-A3B in Q4_K: 128 of 3 x 0.9 MB."""
    return layer_of(device, (884_736,) * 3, 128)


def decide(
    policy: str,
    layer: ExpertLayer,
    n_tokens: int,
    link: Link,
    *,
    gather: bool = False,
    prefetch: bool = True,
    compute_us: float = 0.0,
):
    situation = Situation(
        n_tokens=n_tokens,
        coverage=uniform_coverage(n_tokens, layer.n_expert, 8),
        compute_us=compute_us,
        rates=link,
        can_gather=gather,
        can_prefetch=prefetch,
    )
    return POLICIES[policy](layer, situation)


def microseconds(layer: ExpertLayer, n_tokens: int, link: Link) -> dict[Movement, float]:
    """What each movement takes, counted copy by copy for tokens that choose at random."""
    coverage = uniform_coverage(n_tokens, layer.n_expert, 8)
    n_runs = max(1.0, 3 * layer.n_expert * coverage * (1 - coverage))  # a run ends where the next expert is not used
    nbytes = coverage * layer.nbytes
    return {
        Movement.WHOLE: layer.nbytes / link.peak_gbps / 1e3 + 3 * link.overhead_us,
        Movement.SELECTIVE: nbytes / link.peak_gbps / 1e3 + n_runs * link.overhead_us + 2 * link.latency_us,
        Movement.GATHER: nbytes / (0.89 * link.peak_gbps) / 1e3,
    }


LINKS = [Link(), Link(peak_gbps=6.0), Link(peak_gbps=55.0), Link(overhead_us=30.0), Link(latency_us=500.0)]


@pytest.mark.parametrize("link", LINKS, ids=str)
@pytest.mark.parametrize("gather", [True, False], ids=["gather", "no gather"])
def test_auto_is_never_slower_than_any_one_way(layer, link, gather):
    for n_tokens in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048):
        us = microseconds(layer, n_tokens, link)
        if not gather:
            del us[Movement.GATHER]
        chosen = decide("auto", layer, n_tokens, link, gather=gather).movement
        assert us[chosen] <= 1.02 * min(us.values()), n_tokens


def test_auto_goes_from_the_used_experts_to_whole_streams(layer):
    def movements(gather: bool) -> list[Movement]:
        return [decide("auto", layer, n, Link(), gather=gather).movement for n in (1, 16, 512)]

    assert movements(gather=False) == [Movement.SELECTIVE, Movement.SELECTIVE, Movement.WHOLE]
    assert movements(gather=True) == [Movement.GATHER, Movement.SELECTIVE, Movement.WHOLE]


def test_full_coverage_is_streamed_ahead_of_the_compute_even_where_a_copy_less_would_be_faster(layer):
    n_tokens = 62  # 98.2 % of the experts, and a link on which the others' bytes are dear
    slow = Link(peak_gbps=1.0)
    us = microseconds(layer, n_tokens, slow)
    assert us[Movement.SELECTIVE] < us[Movement.WHOLE]
    assert decide("auto", layer, n_tokens, slow).movement is Movement.WHOLE
    assert decide("auto", layer, n_tokens, slow, prefetch=False).movement is Movement.SELECTIVE


def test_compute_that_a_whole_stream_hides_counts_for_it(layer):
    """Used experts are copied in turn with the compute, a whole stream beside it."""
    link = Link(peak_gbps=55.0)
    n_tokens = 40  # nine tenths of the experts
    assert decide("auto", layer, n_tokens, link).movement is Movement.SELECTIVE
    assert decide("auto", layer, n_tokens, link, compute_us=1500).movement is Movement.WHOLE
    assert decide("auto", layer, n_tokens, link, compute_us=1500, prefetch=False).movement is Movement.SELECTIVE


def test_small_copies_that_cost_more_than_they_save_are_not_made(device):
    tiny = layer_of(device, (4096,) * 3, 16)
    assert decide("auto", tiny, 1, Link()).movement is Movement.WHOLE


def test_off_decides_by_copies_alone(layer):
    assert decide(OFF, layer, 1, Link(), gather=True).movement is Movement.SELECTIVE
    assert decide(OFF, layer, 512, Link(), gather=True).movement is Movement.WHOLE


@pytest.mark.parametrize("name", ["whole", "selective"])
@pytest.mark.parametrize("n_tokens", [1, 2048])
def test_what_is_asked_for_is_done(layer, name, n_tokens):
    assert decide(name, layer, n_tokens, Link(), gather=True).movement == name


def test_the_reason_names_the_experts_and_the_costs(layer):
    why = decide("auto", layer, 1, Link(), gather=True).why
    us = microseconds(layer, 1, Link())
    assert why.startswith("8 of 128 experts: ")
    assert f"gather {us[Movement.GATHER]:.0f} us" in why
    assert f"whole {us[Movement.WHOLE]:.0f} us" in why


@repeatable
@given(n_expert=st.integers(2, 512), data=st.data())
def test_uniform_coverage(n_expert, data):
    n_used = data.draw(st.integers(1, n_expert))
    assert uniform_coverage(1, n_expert, n_used) == pytest.approx(n_used / n_expert)
    shares = [uniform_coverage(n, n_expert, n_used) for n in range(1, 40)]
    assert shares == sorted(shares)
    assert shares[-1] <= 1


def test_uniform_coverage_is_what_random_routing_covers():
    rng = np.random.default_rng(0)
    for n_tokens in (1, 8, 32, 128):
        used = [len(np.unique([rng.permutation(64)[:4] for _ in range(n_tokens)])) / 64 for _ in range(50)]
        assert np.mean(used) == pytest.approx(uniform_coverage(n_tokens, 64, 4), abs=0.02)
