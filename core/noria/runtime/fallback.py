"""Ops that a backend does not have: they run on the reference device, by way of the host.

Wrapping its kernels makes a device complete: what they support goes to them untouched. For the rest the host waits for
the queue, brings what the op touches to the reference, runs it there and brings the results back. That is slow, so it
is counted, named once for each op and types, and shown on the timeline; `strict` makes it an error.

Operands are found by walking the arguments, so a new op needs nothing here. Where an op would take along far more than
it touches (all rows of a table, all cells of a KV cache, all experts), `_narrowed` finds out which part it needs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.api import (
    Device,
    ExpertTable,
    Kernels,
    KVView,
    Op,
    OpQuery,
    Queue,
    RowWindow,
    Span,
    Support,
    Tensor,
    where_entry,
)
from noria.api.errors import FeatureUnsupported, OpUnsupported
from noria.gguf import SUPPORTED_TYPES
from noria.runtime.bridge import Bridge, Layout
from noria.runtime.timeline import Timeline

logger = logging.getLogger(__name__)

LANE = "fallback"
_Ints = npt.NDArray[np.int32]


class FallbackKernels(Kernels):
    """The kernels of a device, and the reference for the ops that it lacks.

    `supports` answers for the device alone, so a composite that it lacks is still made of the parts that it has.

    Args:
        primary: the device's own kernels.
        reference: a device that has every op; it stays the caller's.
        strict: refuse to run anything on the reference.
        timeline: shows what ran on the reference, on the lane `host/fallback`.

    Attributes:
        calls: how many ops ran on the reference.
        time_ns: how long the host took for them.
    """

    def __init__(
        self, primary: Kernels, reference: Device, *, strict: bool = False, timeline: Timeline | None = None
    ) -> None:
        super().__init__(primary.device)
        self.primary = primary
        self.reference = reference
        self.strict = strict
        self.calls: Counter[Op] = Counter()
        self.time_ns = 0
        self._timeline = timeline or Timeline(enabled=False)
        self._named: set[tuple[str, ...]] = set()
        self._bridge = Bridge(primary.device, reference, LANE)

    @property
    def nbytes(self) -> int:
        """What was copied for them between device and host, both ways."""
        return self._bridge.nbytes_copied

    def supports(self, query: OpQuery) -> Support:
        return self.primary.supports(query)

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        if self._is_native(query):
            self.primary.dispatch(queue, query, reads, writes, args)
            return
        if queue.recording:
            raise FeatureUnsupported(
                f"{queue.name}: {query} runs on {self.reference.info.id} through the host, so it cannot be part of a "
                f"program; enqueue it outside of one"
            )
        self._name_once(query)
        begin_ns = time.perf_counter_ns()
        with self._timeline.host(str(query), lane=LANE):
            self._run_on_reference(queue, query, reads, writes, args)
        self.calls[query.op] += 1
        self.time_ns += time.perf_counter_ns() - begin_ns

    def _scratch_nbytes(self, query: OpQuery) -> int:
        return self.primary.scratch_nbytes(query) if self._is_native(query) else 0

    # --- who runs it ---------------------------------------------------------------------------------------------

    def _is_native(self, query: OpQuery) -> bool:
        """Whether the op runs on the device itself; otherwise it runs on the reference.

        Raises:
            OpUnsupported: it runs on neither, or must not leave the device.
        """
        support, backend = self.supports(query), self.device.info.backend
        if support.usable:
            return True
        if support is Support.IMPOSSIBLE:
            raise OpUnsupported(backend, query, f"This device cannot do it. {self._alternatives(query)}")
        if not self.reference.kernels.supports(query).usable:
            raise OpUnsupported(
                backend, query, f"{self.reference.info.id} has none either. {self._alternatives(query)}"
            )
        if self.strict:
            instead = f"Without --no-fallback it runs on {self.reference.info.id} through the host, which is slow."
            raise OpUnsupported(backend, query, f"{instead} {self._alternatives(query)}")
        return False

    def _alternatives(self, query: OpQuery) -> str:
        """What the device can do instead, as a sentence."""
        device = self.device
        if query.op in (Op.KV_STORE, Op.ATTENTION):
            return f"KV types of {device.info.id} (-ctk, -ctv): {', '.join(device.caps.kv_types)}."
        types = [t for t in SUPPORTED_TYPES if self.supports(replace(query, type=t)).usable]
        return f"{device.info.id} has {query.op} for these types: {', '.join(types) or 'none'}."

    def _name_once(self, query: OpQuery) -> None:
        name = (query.op, query.type, query.type2, query.activation)
        if name not in self._named:
            self._named.add(name)
            logger.warning(
                "%s has no kernel for %s: it runs on %s through the host, slowly (--no-fallback makes it an error)",
                self.device.info.id,
                query,
                self.reference.info.id,
            )

    # --- there and back ------------------------------------------------------------------------------------------

    def _run_on_reference(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        """Run the op on twins of its operands, and return when the results are on the device.

        All operands are brought along, also those only written: an op may leave parts of them as they are.
        """
        results = [span for span in writes if span != args.get("scratch")]
        needed = self._narrowed(queue, query, reads, args)
        layout = self._layout(span for span in _spans(needed.args) if span not in needed.values)
        values = {span: layout.take(span.nbytes) for span in needed.values}
        scratch_nbytes = self.reference.kernels.scratch_nbytes(query) if "scratch" in args else 0
        scratch_offset = layout.take(scratch_nbytes)
        bridge = self._bridge
        bridge.reserve(layout.end)

        def twin(span: Span) -> Span:
            return bridge.there.span(values[span] if span in values else layout.find(span), span.nbytes)

        twins = {name: _mapped(value, twin) for name, value in needed.args.items()}
        if scratch_nbytes:
            twins["scratch"] = bridge.there.span(scratch_offset, scratch_nbytes)
        if needed.experts is not None:
            table: ExpertTable = twins["w"]
            where = needed.values[needed.args["w"].where.span]
            for expert, slab in zip(needed.experts, table.spans, strict=True):
                where[expert] = where_entry(0, slab.offset, self.reference.caps.table_unit)
            twins["w"] = replace(table, spans=(bridge.there.span(),))

        bridge.bring(queue, layout.pieces)
        for span, offset in values.items():
            bridge.here.span(offset, span.nbytes).host_view(np.int32)[:] = needed.values[span]
        bridge.cross(layout.end)
        getattr(self.reference.kernels, query.op)(bridge.far_queue, **twins)
        written = [piece for piece in layout.pieces if any(piece.span.overlaps(result) for result in results)]
        bridge.give_back(queue, written)

    def _narrowed(self, queue: Queue, query: OpQuery, reads: Sequence[Span], args: dict[str, Any]) -> _Needed:
        """The part of the operands that this call touches; indices are changed to count from its start."""
        args = {name: None if name == "scratch" else value for name, value in args.items()}
        if query.op is Op.GET_ROWS:
            ids: Tensor = args["ids"]
            (rows,) = self._fetch(queue, ids)
            first, end = int(rows.min()), int(rows.max()) + 1
            return _Needed(args | {"table": args["table"].rows(first, end)}, {ids.span: rows - np.int32(first)})
        if query.op is Op.KV_STORE:
            positions: Tensor = args["positions"]
            (cells,) = self._fetch(queue, positions)
            first, end = int(cells.min()), int(cells.max()) + 1
            return _Needed(args | {"kv": _cells(args["kv"], first, end)}, {positions.span: cells - np.int32(first)})
        if query.op is Op.ATTENTION:
            return _Needed(args | {"kv": _cells(args["kv"], 0, min(args["n_kv"], args["kv"].n_cell))})
        table = args.get("w")
        if not isinstance(table, ExpertTable):
            return _Needed(args)
        where, offsets = self._fetch(queue, table.where, args["rows"].offsets)
        here = where >= 0
        experts: list[int] = []
        if set(table.spans) <= set(reads):  # the op reads weights and not only which experts are here
            experts = np.flatnonzero(here & _has_rows(offsets, args["window"])).tolist()
        slabs = tuple(table.slab(int(where[expert])) for expert in experts)
        values = {table.where.span: np.where(here, np.int32(0), np.int32(-1))}
        return _Needed(args | {"w": replace(table, spans=slabs)}, values, experts)

    def _fetch(self, queue: Queue, *tensors: Tensor) -> list[_Ints]:
        """What I32 tensors hold, after everything enqueued so far."""
        layout = self._layout(tensor.span for tensor in tensors)
        bridge = self._bridge
        bridge.reserve(layout.end)
        bridge.bring(queue, layout.pieces)
        spans = [bridge.here.span(layout.find(tensor.span), tensor.span.nbytes) for tensor in tensors]
        return [span.host_view(np.int32).copy() for span in spans]

    def _layout(self, spans: Iterable[Span]) -> Layout:
        return Layout(spans, self.device.caps, self.reference.caps)


@dataclass(frozen=True, slots=True)
class _Needed:
    """Operands of one call, cut down to what it touches.

    Attributes:
        args: of the op.
        values: I32 operands that have other values there than on the device.
        experts: whose slabs are the spans of the table `w`, if there is one.
    """

    args: dict[str, Any]
    values: dict[Span, _Ints] = field(default_factory=dict)
    experts: list[int] | None = None


def _cells(kv: KVView, first: int, end: int) -> KVView:
    """The cells [first, end) as a cache of their own."""
    beyond = kv.v_offset if kv.v_offset >= kv.row_nbytes else 0  # V rows may lie after the K rows of all cells
    begin, stop = first * kv.row_nbytes, min(end * kv.row_nbytes + beyond, kv.span.nbytes)
    return replace(kv, span=kv.span.sub(begin, stop - begin), n_cell=end - first)


def _has_rows(offsets: _Ints, window: RowWindow) -> npt.NDArray[np.bool_]:
    """Which experts have rows in the window: [n_expert]."""
    first = int(offsets[window.first_expert]) + window.first_row
    end = min(first + window.n_rows, int(offsets[window.end_expert]))
    overlapping: npt.NDArray[np.bool_] = np.minimum(offsets[1:], end) > np.maximum(offsets[:-1], first)
    return overlapping


def _mapped(value: Any, change: Callable[[Span], Span]) -> Any:
    """`value` with every span in it changed."""
    if isinstance(value, Span):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    return value


def _spans(args: dict[str, Any]) -> list[Span]:
    """Every span in the arguments, once."""
    found: dict[Span, None] = {}

    def note(span: Span) -> Span:
        found[span] = None
        return span

    _mapped(tuple(args.values()), note)
    return list(found)
