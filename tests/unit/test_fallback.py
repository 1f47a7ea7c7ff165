"""Ops on the reference by way of the host: the same bits as on the reference itself, and nothing else changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from noria.api import (
    Device,
    DeviceBuffer,
    DeviceCaps,
    Glu,
    Kernels,
    KVView,
    Op,
    OpQuery,
    Queue,
    RopeParams,
    RouterParams,
    RowWindow,
    Span,
    Support,
    Tensor,
)
from noria.api.errors import FeatureUnsupported, OpUnsupported, PinnedMemoryError
from noria.runtime.fallback import FallbackKernels
from noria.runtime.timeline import Timeline
from noria.testing.bench import Bench
from noria.testing.blocks import random_weights
from noria.testing.fixtures import find_backend

Call = Callable[[Bench, Kernels, np.random.Generator], list[Span]]
PARTS = set(Op) - {Op.MATMULS, Op.ROPE_STORE, Op.EXPERT_FFN}
N_EXPERT, N_EMBD, N_FF = 8, 256, 256


class PartialKernels(Kernels):
    """The kernels of a device without some ops."""

    def __init__(self, whole: Kernels, answers: dict[Op, Support]) -> None:
        super().__init__(whole.device)
        self.whole = whole
        self.answers = answers
        self.ran: Counter[Op] = Counter()

    def supports(self, query: OpQuery) -> Support:
        return self.answers.get(query.op) or self.whole.supports(query)

    def _scratch_nbytes(self, query: OpQuery) -> int:
        return self.whole.scratch_nbytes(query)

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        self.ran[query.op] += 1
        self.whole.dispatch(queue, query, reads, writes, args)


class Devices:
    """Reference devices of one test; each is opened for itself and stands for another machine part."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.far = self.whole()

    def whole(self) -> Device:
        backend, options = find_backend("reference")
        return self._stack.enter_context(backend.open(0, options))

    def partial(
        self,
        answers: dict[Op, Support] | None = None,
        caps: Callable[[DeviceCaps], DeviceCaps] | None = None,
        **how: Any,
    ) -> tuple[Bench, FallbackKernels]:
        """A device that lacks ops, all of them by default, completed by fallback."""
        device = self.whole()
        device.caps = (caps or (lambda same: same))(device.caps)
        answers = dict.fromkeys(Op, Support.MISSING) if answers is None else answers
        return Bench(device), FallbackKernels(PartialKernels(device.kernels, answers), self.far, **how)


@pytest.fixture
def devices() -> Iterator[Devices]:
    with ExitStack() as stack:
        yield Devices(stack)


# --- one call of each op: what it runs, and the spans in which its effect must be the same ----------------------------


def scratch_of(bench: Bench, kernels: Kernels, query: OpQuery) -> Span | None:
    nbytes = kernels.scratch_nbytes(query)
    return bench.alloc(nbytes).span() if nbytes else None


def ints(bench: Bench, *values: int) -> Tensor:
    return bench.tensor(np.array(values), "I32")


def get_rows(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    out, table = bench.empty((4, 256)), bench.weights(random_weights(rng, "Q6_K", (40, 256)))
    kernels.get_rows(bench.queue, out, table, ints(bench, 7, 39, 3, 7))
    return [out.span, table.span]


def rms_norm(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    x, weight = bench.act(rng.normal(size=(3, 100))), bench.tensor(rng.normal(size=100))
    kernels.rms_norm(bench.queue, x, x, weight, 1e-6)
    return [x.span]


def add(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    both = bench.act(rng.normal(size=(6, 33)))  # two operands that share a buffer, and the result is one of them
    kernels.add(bench.queue, both.rows(0, 3), both.rows(0, 3), both.rows(2, 5))
    return [both.span]


def scale(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    out, x = bench.out(3, 33), bench.act(rng.normal(size=(3, 33)))
    kernels.scale(bench.queue, out, x, 0.3)
    return [out.span, x.span]


def matmul(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    w, x = random_weights(rng, "Q4_K", (24, 256)), bench.act(rng.normal(size=(5, 256)))
    out, bias = bench.tensor(rng.normal(size=(5, 24))), bench.tensor(rng.normal(size=24))
    query = OpQuery(op=Op.MATMUL, type="Q4_K", activation=bench.activation, n_rows=5, dims=(24, 256))
    scratch = scratch_of(bench, kernels, query)
    kernels.matmul(bench.queue, out, bench.weights(w), x, bias=bias, accumulate=True, scratch=scratch)
    return [out.span]


def rope(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    x, factors = bench.act(rng.normal(size=(3, 2, 64))), bench.tensor(rng.uniform(1, 2, 32))
    params = RopeParams(n_dims=64, base=1e4, neox=True)
    kernels.rope(bench.queue, x, ints(bench, 5, 6, 7), params, factors)
    return [x.span]


def cells(bench: Bench, rng: np.random.Generator, *, v_after_k: bool = False) -> KVView:
    """40 cells of numbers; V lies beside K, or after the K of all cells."""
    data = rng.normal(size=(40, 2, 2, 64)).astype(np.float16)
    row_nbytes = 2 * 64 * 2 * (1 if v_after_k else 2)
    return KVView(
        span=bench.put(data.reshape(-1).view(np.uint8)),
        k_type="F16",
        v_type="F16",
        n_cell=40,
        n_head_kv=2,
        d_k=64,
        d_v=64,
        row_nbytes=row_nbytes,
        v_offset=40 * row_nbytes if v_after_k else 2 * 64 * 2,
    )


def kv_store(bench: Bench, kernels: Kernels, rng: np.random.Generator, v_after_k: bool = False) -> list[Span]:
    kv = cells(bench, rng, v_after_k=v_after_k)
    k, v = (bench.act(rng.normal(size=(3, 2, 64))) for _ in range(2))
    positions = ints(bench, 11, 12, 13)
    kernels.kv_store(bench.queue, kv, k, v, positions)
    return [kv.span, positions.span]


def attention(bench: Bench, kernels: Kernels, rng: np.random.Generator, v_after_k: bool = False) -> list[Span]:
    kv, q, out = cells(bench, rng, v_after_k=v_after_k), bench.act(rng.normal(size=(3, 4, 64))), bench.out(3, 4, 64)
    query = OpQuery(
        op=Op.ATTENTION, type="F16", type2="F16", activation=bench.activation, n_rows=3, dims=(4, 2, 64, 64, 20)
    )
    scratch = scratch_of(bench, kernels, query)
    sinks = bench.tensor(rng.normal(size=4))
    kernels.attention(
        bench.queue, out, q, kv, ints(bench, 11, 12, 13), n_kv=20, scale=0.125, window=9, sinks=sinks, scratch=scratch
    )
    return [out.span, kv.span]


def kv_store_with_v_after_k(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    return kv_store(bench, kernels, rng, v_after_k=True)


def attention_with_v_after_k(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    return attention(bench, kernels, rng, v_after_k=True)


def route_topk(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    ids, weights = bench.empty((5, 2), "I32"), bench.empty((5, 2))
    logits = bench.tensor(rng.normal(size=(5, N_EXPERT)))
    kernels.route_topk(bench.queue, ids, weights, logits, RouterParams())
    kernels.route_topk(bench.queue, ids, weights, logits, RouterParams(scale=2.0), forced=True)
    return [ids.span, weights.span]


IDS = np.array([[1, 6], [6, 2], [1, 2], [5, 1], [6, 1]], np.int32)  # nobody chooses 0, 3, 4 and 7


def sort_rows(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    rows = bench.rows(IDS, np.ones(IDS.shape), N_EXPERT)
    unsorted = replace(
        rows,
        pairs=bench.empty(rows.pairs.shape, "I32"),
        offsets=bench.empty(rows.offsets.shape, "I32"),
        positions=bench.empty(rows.positions.shape, "I32"),
    )
    query = OpQuery(op=Op.SORT_ROWS, type="I32", n_rows=len(IDS), dims=(N_EXPERT, 2))
    kernels.sort_rows(bench.queue, unsorted, scratch_of(bench, kernels, query))
    return [unsorted.pairs.span, unsorted.offsets.span, unsorted.positions.span]


def mul_mat_id(
    bench: Bench, kernels: Kernels, rng: np.random.Generator, experts: tuple[int, ...] = (0, 1, 2, 5)
) -> list[Span]:
    """Rows of experts that are not in the table stay poisoned; some of the window's rows are none."""
    w = random_weights(rng, "Q4_K", (N_EXPERT, 24, N_EMBD))
    rows, x = bench.rows(IDS, np.ones(IDS.shape), N_EXPERT), bench.act(rng.normal(size=(len(IDS), N_EMBD)))
    table = bench.table(w, experts, n_spans=2)
    window = RowWindow(first_expert=1, end_expert=7, first_row=2, n_rows=20)
    out = bench.out(20, 24)
    query = OpQuery(op=Op.MUL_MAT_ID, type="Q4_K", activation=bench.activation, n_rows=20, dims=(N_EXPERT, 24, N_EMBD))
    scratch = scratch_of(bench, kernels, query)
    kernels.mul_mat_id(bench.queue, out, table, x, rows, window, by_token=True, scratch=scratch)
    return [out.span, table.where.span]


def glu(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    gate, up = (bench.act(rng.normal(size=(3, 33))) for _ in range(2))
    kernels.glu(bench.queue, gate, gate, up, Glu.GEGLU)
    return [gate.span, up.span]


def combine(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    rows = bench.rows(IDS, rng.uniform(size=IDS.shape), N_EXPERT)
    acc, y = bench.tensor(rng.normal(size=(len(IDS), N_EMBD))), bench.act(rng.normal(size=(IDS.size, N_EMBD)))
    table = bench.table(random_weights(rng, "Q4_K", (N_EXPERT, N_EMBD, N_FF)), experts=(1, 5))
    window = RowWindow(first_expert=0, end_expert=N_EXPERT, first_row=0, n_rows=IDS.size)
    kernels.combine(bench.queue, acc, y, table, rows, window)
    return [acc.span]


def top_k(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    values, ids = bench.empty((2, 5)), bench.empty((2, 5), "I32")
    scratch = scratch_of(bench, kernels, OpQuery(op=Op.TOP_K, n_rows=2, dims=(101, 5)))
    kernels.top_k(bench.queue, values, ids, bench.tensor(rng.normal(size=(2, 101))), scratch)
    return [values.span, ids.span]


def expert_ffn(bench: Bench, kernels: Kernels, rng: np.random.Generator) -> list[Span]:
    rows, acc = bench.rows(IDS, rng.uniform(size=IDS.shape), N_EXPERT), bench.tensor(rng.normal(size=(5, N_EMBD)))
    gate, up = (bench.table(random_weights(rng, "Q4_K", (N_EXPERT, N_FF, N_EMBD))) for _ in range(2))
    down = bench.table(random_weights(rng, "Q6_K", (N_EXPERT, N_EMBD, N_FF)))
    query = OpQuery(
        op=Op.EXPERT_FFN,
        type="Q4_K",
        type2="Q6_K",
        activation=bench.activation,
        n_rows=4,
        dims=(N_EXPERT, N_FF, N_EMBD),
    )
    scratch = scratch_of(bench, kernels, query)
    x = bench.act(rng.normal(size=(5, N_EMBD)))
    kernels.expert_ffn(bench.queue, acc, x, gate, up, down, rows, (1, 7), 4, Glu.SWIGLU, scratch=scratch)
    return [acc.span]


CALLS = [
    *(get_rows, rms_norm, add, scale, matmul, rope, kv_store, kv_store_with_v_after_k),
    *(attention, attention_with_v_after_k, route_topk, sort_rows, mul_mat_id, glu, combine, top_k),
]


def bits(bench: Bench, kernels: Kernels, call: Call) -> list[bytes]:
    """What is in the spans of a call afterwards; memory around them is checked too."""
    return [bench.get(span).tobytes() for span in call(bench, kernels, np.random.default_rng(0))]


def test_every_op_has_a_call():
    ops = {call.__name__.partition("_with")[0] for call in CALLS}
    assert ops == {str(op) for op in PARTS}


def like(**changes: Any) -> Callable[[DeviceCaps], DeviceCaps]:
    return lambda caps: replace(caps, **changes)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    "caps",
    [like(host_gather=False), like(host_gather=True), like(copy_alignment=64, table_unit=128)],
    ids=["copies", "gathers", "aligned"],
)
def test_an_op_has_the_bits_of_the_reference(devices, call, caps):
    direct = devices.whole()
    direct.caps = caps(direct.caps)
    bench, kernels = devices.partial(caps=caps)
    assert bits(bench, kernels, call) == bits(Bench(direct), direct.kernels, call)
    assert kernels.calls.total() == kernels.calls[Op(call.__name__.partition("_with")[0])] > 0


def test_an_op_that_the_device_has_never_leaves_it(devices):
    bench, kernels = devices.partial(answers={Op.GLU: Support.MISSING})
    whole = devices.whole()
    assert bits(bench, kernels, matmul) == bits(Bench(whole), whole.kernels, matmul)
    assert kernels.primary.ran == {Op.MATMUL: 1}
    assert not kernels.calls


# --- order, amount, accounts -----------------------------------------------------------------------------------------


def test_it_waits_for_what_the_queue_was_given_before(devices):
    bench, kernels = devices.partial()
    x, out = bench.tensor(np.zeros(8)), bench.empty((8,))
    ones = bench.host(np.ones(8, np.float32).view(np.uint8))
    bench.queue.delay(20_000_000)
    bench.queue.copy_h2d(x.span, ones.span())
    kernels.scale(bench.queue, out, x, 3.0)
    assert bench.read(out).tolist() == [3.0] * 8


def test_only_what_an_op_touches_is_copied(devices):
    bench, kernels = devices.partial(caps=like(host_gather=False))
    rng = np.random.default_rng(0)

    def nbytes_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        before = kernels.nbytes
        call(*args, **kwargs)
        return kernels.nbytes - before

    table = bench.weights(random_weights(rng, "F32", (4000, 64)))
    out, ids = bench.empty((1, 64)), ints(bench, 3999)
    assert nbytes_of(kernels.get_rows, bench.queue, out, table, ids) == 3 * 64 * 4 + 4, "a row, and out there and back"

    stored, positions = 2 * 3 * 2 * 64 * 4, 3 * 4
    assert nbytes_of(kv_store, bench, kernels, rng) == 2 * 3 * 512 + stored + positions, "three cells there and back"

    q, sinks = 3 * 4 * 64 * 4, 4 * 4
    assert nbytes_of(attention, bench, kernels, rng) == 20 * 512 + 3 * q + positions + sinks, "the cells below n_kv"

    needed = nbytes_of(mul_mat_id, bench, kernels, rng, experts=(1, 2, 5))
    assert nbytes_of(mul_mat_id, bench, kernels, rng, experts=(0, 1, 2, 3, 4, 5, 7)) == needed, "experts that have rows"
    one_slab = 24 * N_EMBD * 144 // 256
    assert nbytes_of(mul_mat_id, bench, kernels, rng, experts=(1, 2)) == needed - one_slab


def test_copies_are_aligned_as_the_device_asks(devices):
    bench, kernels = devices.partial(caps=like(copy_alignment=64))
    copied: list[Span] = []

    class Watcher:
        def submitted(self, queue: Queue, label: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
            copied.extend(span for span in (*reads, *writes) if isinstance(span.buffer, DeviceBuffer))

        def recorded(self, queue: Queue, event: object) -> None: ...
        def waited(self, queue: Queue, event: object) -> None: ...

    both = bench.tensor(np.arange(60, dtype=np.float32).reshape(6, 10))
    bench.device.observer = Watcher()
    kernels.scale(bench.queue, both.rows(1, 3), both.rows(3, 5), 2.0)
    bench.device.observer = None
    assert copied
    assert all(span.offset % 64 == 0 and span.nbytes % 64 == 0 for span in copied)
    assert bench.read(both)[:, 0].tolist() == [0.0, 60.0, 80.0, 30.0, 40.0, 50.0]


def test_memory_is_kept_for_the_next_op(devices):
    bench, kernels = devices.partial()
    bits(bench, kernels, matmul)
    before = sum(devices.far.allocated.values())
    bits(bench, kernels, matmul)
    bits(bench, kernels, add)
    assert sum(devices.far.allocated.values()) == before > 0


def test_a_refused_allocation_can_be_tried_again(devices, monkeypatch):
    bench, kernels = devices.partial()
    x = bench.act(np.ones((2, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "_alloc_host", Mock(side_effect=PinnedMemoryError("reference0", 1, "no")))
        with pytest.raises(PinnedMemoryError):
            kernels.scale(bench.queue, x, x, 2.0)
    kernels.scale(bench.queue, x, x, 2.0)
    assert (bench.read(x) == 2.0).all()


def test_each_op_and_types_are_named_once(devices, caplog):
    bench, kernels = devices.partial(answers={Op.GLU: Support.MISSING, Op.SCALE: Support.MISSING})
    with caplog.at_level(logging.WARNING, "noria.runtime.fallback"):
        for call in (glu, glu, scale, glu, scale):
            bits(bench, kernels, call)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"{bench.device.info.id} has no kernel for glu[F32/F32] rows=3 dims=33",
        f"{bench.device.info.id} has no kernel for scale[F32/F32] rows=3 dims=33",
    ]
    assert kernels.calls == {Op.GLU: 3, Op.SCALE: 2}
    assert kernels.time_ns > 0


def test_the_timeline_has_a_lane_for_it(devices):
    timeline = Timeline()
    bench, kernels = devices.partial(timeline=timeline)
    bits(bench, kernels, glu)
    (span,) = timeline.spans()
    assert (span.lane, span.name) == ("host/fallback", "glu[F32/F32] rows=3 dims=33")
    assert 0 < span.duration_ns <= kernels.time_ns


# --- composites ------------------------------------------------------------------------------------------------------


def test_a_composite_is_made_of_the_parts_the_device_has(devices):
    bench, kernels = devices.partial(answers={Op.EXPERT_FFN: Support.MISSING})
    whole = devices.whole()
    in_parts = PartialKernels(whole.kernels, {Op.EXPERT_FFN: Support.MISSING})
    assert bits(bench, kernels, expert_ffn) == bits(Bench(whole), in_parts, expert_ffn)
    assert not kernels.calls
    assert kernels.primary.ran == {Op.MUL_MAT_ID: 9, Op.GLU: 3, Op.COMBINE: 3}, "ten rows in chunks of four"


def test_only_the_missing_part_of_a_composite_leaves_the_device(devices):
    bench, kernels = devices.partial(answers={Op.EXPERT_FFN: Support.MISSING, Op.GLU: Support.MISSING})
    whole = devices.whole()
    in_parts = PartialKernels(whole.kernels, {Op.EXPERT_FFN: Support.MISSING})
    assert bits(bench, kernels, expert_ffn) == bits(Bench(whole), in_parts, expert_ffn)
    assert kernels.calls == {Op.GLU: 3}
    assert kernels.primary.ran == {Op.MUL_MAT_ID: 9, Op.COMBINE: 3}


# --- what is refused -------------------------------------------------------------------------------------------------

GLU_QUERY = OpQuery(op=Op.GLU, dims=(32,))
ATTENTION_QUERY = OpQuery(op=Op.ATTENTION, type="Q8_0", type2="Q8_0", dims=(4, 2, 64, 64, 20))


def test_strict_kernels_name_what_is_missing_and_what_to_do(devices):
    bench, kernels = devices.partial(answers={Op.GLU: Support.MISSING}, strict=True)
    with pytest.raises(OpUnsupported, match=r"no kernel for glu\[F32/F32\] rows=3.*--no-fallback") as raised:
        bits(bench, kernels, glu)
    assert raised.value.query.op is Op.GLU
    with pytest.raises(OpUnsupported, match="--no-fallback"):
        kernels.scratch_nbytes(GLU_QUERY)
    assert not kernels.calls


def test_the_impossible_is_refused_also_without_strict(devices):
    _, kernels = devices.partial(answers={Op.ATTENTION: Support.IMPOSSIBLE}, caps=like(kv_types=("F16", "Q4_0")))
    with pytest.raises(OpUnsupported, match=r"attention\[Q8_0/Q8_0/F32\].*-ctk, -ctv\): F16, Q4_0"):
        kernels.scratch_nbytes(ATTENTION_QUERY)


def test_a_refusal_names_the_types_that_the_device_has(devices):
    _, kernels = devices.partial()

    class TwoTypes(Kernels):
        def supports(self, query: OpQuery) -> Support:
            return Support.NATIVE if query.type in ("F16", "Q4_0") else Support.IMPOSSIBLE

    kernels.primary = TwoTypes(kernels.device)
    with pytest.raises(OpUnsupported, match=r"has matmul for these types: F16, Q4_0\."):
        kernels.scratch_nbytes(OpQuery(op=Op.MATMUL, type="Q6_K", dims=(8, 256)))


def test_what_the_reference_lacks_too_is_refused(devices, monkeypatch):
    bench, kernels = devices.partial()
    monkeypatch.setattr(devices.far.kernels, "supports", lambda query: Support.MISSING)
    with pytest.raises(OpUnsupported, match=f"{devices.far.info.id} has none either"):
        bits(bench, kernels, glu)


def test_it_cannot_be_recorded_into_a_program(devices):
    bench, kernels = devices.partial()
    x = bench.act(np.ones((2, 32)))
    with pytest.raises(FeatureUnsupported, match=r"scale\[F32/F32\].*program"), bench.queue.program("token"):
        kernels.scale(bench.queue, x, x, 2.0)
    whole = devices.whole()
    assert bits(bench, kernels, glu) == bits(Bench(whole), whole.kernels, glu)


def test_scratch_is_that_of_the_device_and_none_for_what_leaves_it(devices):
    _, kernels = devices.partial(answers={Op.TOP_K: Support.MISSING})
    attention = replace(ATTENTION_QUERY, n_rows=64)
    assert kernels.scratch_nbytes(attention) == kernels.primary.whole.scratch_nbytes(attention)
    assert kernels.scratch_nbytes(OpQuery(op=Op.TOP_K, dims=(1000, 5))) == 0
