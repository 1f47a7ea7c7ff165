"""What the ops cost on a simulated device.

Only sizes are known, never contents. So tokens are taken to choose experts evenly and independently of each other,
every expert of a window is taken to be in the table, and the last query of a batch to see `n_kv` cells. The host gets
to read the same assumption: `sort_rows` makes up rows for as many experts as so many tokens use on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from noria.api.errors import KernelLaunchError
from noria.api.kernels import Kernels
from noria.api.memory import HostBuffer, Span
from noria.api.ops import Op, OpQuery, Support
from noria.api.queue import Queue
from noria.api.tensor import ExpertRows, ExpertTable, KVView, RowWindow, Tensor
from noria.builtin.sim.memory import SimDeviceBuffer
from noria.builtin.sim.queue import SimQueue

if TYPE_CHECKING:
    from noria.builtin.sim.backend import SimDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a kernel does.

    Attributes:
        flops: floating point operations, those of matrices.
        nbytes: bytes read and written in device memory.
        link_nbytes: bytes read from host memory.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    link_nbytes: float = 0.0


class SimKernels(Kernels):
    """Every op with every type; none needs scratch. `seed` is that of the routing."""

    def __init__(self, device: SimDevice, seed: int) -> None:
        super().__init__(device)
        self._random = Random(seed)

    def supports(self, query: OpQuery) -> Support:
        return Support.NATIVE

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        if not isinstance(queue, SimQueue) or queue.device is not self.device:
            raise KernelLaunchError(self.device.info.id, f"{queue.name} is not a queue of this device")
        cost = self._cost(query.op, reads, writes, args)

        def run() -> None:
            queue.execute(query.op, cost)
            if query.op is Op.SORT_ROWS:
                self._sort(args["rows"])

        queue.submit(query.op, reads, writes, run)

    def _sort(self, rows: ExpertRows) -> None:
        """Make up `rows.offsets`, from another first expert each time."""
        offsets, first = rows.offsets.span, self._random.randrange(rows.n_expert)
        if isinstance(offsets.buffer, SimDeviceBuffer):
            offsets.buffer.known[offsets] = _even_offsets(rows, first).view(np.uint8)

    def _cost(self, op: Op, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]) -> Cost:
        match op:
            case Op.GET_ROWS:
                return Cost(nbytes=args["out"].n_rows * args["table"].row_nbytes + args["out"].span.nbytes)
            case Op.MATMUL:
                return _matmul(args["out"], args["w"], args["x"], args["accumulate"])
            case Op.MATMULS:
                costs = [_matmul(out, w, args["x"], False) for out, w in zip(args["outs"], args["ws"], strict=True)]
                return Cost(flops=sum(cost.flops for cost in costs), nbytes=sum(cost.nbytes for cost in costs))
            case Op.KV_STORE:
                return Cost(nbytes=2 * (args["k"].span.nbytes + args["v"].span.nbytes))
            case Op.ROPE_STORE:
                return Cost(nbytes=2 * sum(args[name].span.nbytes for name in "qkv"))
            case Op.ATTENTION:
                return _attention(args["out"], args["q"], args["kv"], args["n_kv"], args["window"])
            case Op.MUL_MAT_ID:
                row_nbytes = args["out"].row_nbytes + args["x"].row_nbytes
                return self._experts([args["w"]], row_nbytes, args["rows"], *_share(args["rows"], args["window"]))
            case Op.EXPERT_FFN:
                row_nbytes = args["x"].row_nbytes + 2 * args["acc"].row_nbytes
                tables = [args["gate"], args["up"], args["down"]]
                return self._experts(tables, row_nbytes, args["rows"], *_share(args["rows"], _all_rows(args)))
            case Op.COMBINE:
                n_rows, _ = _share(args["rows"], args["window"])
                return Cost(nbytes=n_rows * (args["y"].row_nbytes + 2 * args["acc"].row_nbytes))
            case _:
                scratch = args.get("scratch")
                return Cost(nbytes=sum(span.nbytes for span in (*reads, *writes) if span is not scratch))

    def _experts(
        self, tables: list[ExpertTable], row_nbytes: int, rows: ExpertRows, n_rows: float, n_used: float
    ) -> Cost:
        """The matrices of `n_used` experts of each table, read once and applied to `n_rows` rows."""
        flops, nbytes, link_nbytes = 0.0, n_rows * row_nbytes, 0.0
        for table in tables:
            flops += 2 * n_rows * table.n_out * table.n_in
            on_host = self._on_host(table, rows.n_expert)
            nbytes += n_used * table.slab_nbytes * (1 - on_host)
            link_nbytes += n_used * table.slab_nbytes * on_host
        return Cost(flops=flops, nbytes=nbytes, link_nbytes=link_nbytes)

    def _on_host(self, table: ExpertTable, n_expert: int) -> float:
        """Share of the experts that a kernel reads from host memory: those the device spans have no room for."""
        host_buffers = [span.buffer for span in table.spans if isinstance(span.buffer, HostBuffer)]
        if not host_buffers:
            return 0.0
        for buffer in host_buffers:
            if not (self.device.caps.host_gather and buffer.pinned):
                raise KernelLaunchError(self.device.info.id, f"a kernel cannot read {buffer!r}, a span of its table")
        device_nbytes = sum(span.nbytes for span in table.spans if span.buffer not in host_buffers)
        return max(0.0, 1 - device_nbytes / (n_expert * table.slab_nbytes))


def _matmul(out: Tensor, w: Tensor, x: Tensor, accumulate: bool) -> Cost:
    n_out, n_in = w.shape
    nbytes = w.span.nbytes + x.span.nbytes + out.span.nbytes * (2 if accumulate else 1)
    return Cost(flops=2 * x.n_rows * n_out * n_in, nbytes=nbytes)


def _attention(out: Tensor, q: Tensor, kv: KVView, n_kv: int, window: int | None) -> Cost:
    n, n_head, _ = q.shape
    n_seen = n_kv - (n - 1) / 2  # a row's average: the last row sees n_kv cells, the one before it one less
    n_read = n_kv
    if window is not None:
        n_seen = min(n_seen, window)
        n_read = min(n_kv, window + n - 1)
    cell_nbytes = kv.span.nbytes / kv.n_cell
    return Cost(
        flops=2 * n * n_head * max(n_seen, 1) * (kv.d_k + kv.d_v),
        nbytes=n_read * cell_nbytes + q.span.nbytes + out.span.nbytes,
    )


def _all_rows(args: dict[str, Any]) -> RowWindow:
    """All rows of the experts of an `expert_ffn`."""
    first, end = args["experts"]
    n_pairs = args["rows"].n_tokens * args["rows"].n_expert_used
    return RowWindow(first_expert=first, end_expert=end, first_row=0, n_rows=n_pairs)


def _coverage(rows: ExpertRows) -> float:
    """Share of the experts that are used, on average over all routings."""
    return 1 - (1 - rows.n_expert_used / rows.n_expert) ** rows.n_tokens


def _even_offsets(rows: ExpertRows, first: int) -> npt.NDArray[np.int32]:
    """`rows.offsets`, I32 [n_expert + 1], if as many experts as are used on average, from `first` on at equal
    distances, share the rows evenly."""
    n_used = round(_coverage(rows) * rows.n_expert)
    used = (first + np.arange(n_used) * rows.n_expert // n_used) % rows.n_expert
    n_rows = np.zeros(rows.n_expert, np.int32)
    n_rows[used] = np.diff(np.arange(n_used + 1) * rows.pairs.shape[0] // n_used)
    return np.concatenate([[0], np.cumsum(n_rows)]).astype(np.int32)


def _share(rows: ExpertRows, window: RowWindow) -> tuple[float, float]:
    """Rows that the window holds and experts that they use, on average over all routings."""
    n_window = window.end_expert - window.first_expert
    n_all = rows.n_tokens * rows.n_expert_used * n_window / rows.n_expert
    n_rows = min(max(n_all - window.first_row, 0.0), window.n_rows)
    if n_rows == 0:
        return 0.0, 0.0
    return n_rows, n_window * _coverage(rows) * n_rows / n_all
