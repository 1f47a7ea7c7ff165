"""The ops of a SYCL device: which module has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noria.api import (
    ExpertRows,
    ExpertTable,
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
from noria.api.errors import KernelLaunchError
from noria_sycl import attention, matmul
from noria_sycl import experts as expert_ops
from noria_sycl import rows as row_ops
from noria_sycl.launch import TABLE_UNIT, Launcher, Profile
from noria_sycl.queue import SyclQueue
from noria_sycl.rows import KV_TYPES

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

__all__ = ["KV_TYPES", "TABLE_UNIT", "SyclKernels"]


class SyclKernels(Kernels):
    """Every op takes weights as they are in the file, and activations in F32."""

    device: SyclDevice

    def __init__(self, device: SyclDevice, profile: Profile | None = None) -> None:
        """`profile`: instead of that of the device's kind."""
        super().__init__(device)
        self.launch = Launcher.of(device, profile)

    def supports(self, query: OpQuery) -> Support:
        match query.op:
            case Op.MATMUL | Op.MATMULS:
                return matmul.supports(self.launch, query)
            case Op.MUL_MAT_ID | Op.EXPERT_FFN:
                return expert_ops.supports(query)
            case Op.ATTENTION:
                return attention.supports(self.launch, query)
        return row_ops.supports(query)

    def _scratch_nbytes(self, query: OpQuery) -> int:
        match query.op:
            case Op.MUL_MAT_ID | Op.EXPERT_FFN:
                return expert_ops.scratch_nbytes(self.launch, query)
            case Op.ATTENTION:
                return attention.scratch_nbytes(self.launch, query)
        return row_ops.scratch_nbytes(self.launch, query)

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        if not isinstance(queue, SyclQueue) or queue.device is not self.device:
            raise KernelLaunchError(self.device.info.id, f"{query.op} was enqueued on {queue.name}, another device's")
        super().dispatch(queue, query, reads, writes, args)

    # --- rows ----------------------------------------------------------------------------------------------------

    def _get_rows(self, queue: Queue, out: Tensor, table: Tensor, ids: Tensor) -> None:
        row_ops.get_rows(self.launch, queue, out, table, ids)

    def _rms_norm(self, queue: Queue, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        row_ops.rms_norm(self.launch, queue, out, x, weight, eps)

    def _add(self, queue: Queue, out: Tensor, a: Tensor, b: Tensor) -> None:
        row_ops.add(self.launch, queue, out, a, b)

    def _scale(self, queue: Queue, out: Tensor, x: Tensor, factor: float) -> None:
        row_ops.scale(self.launch, queue, out, x, factor)

    def _glu(self, queue: Queue, out: Tensor, gate: Tensor, up: Tensor, kind: Glu) -> None:
        row_ops.glu(self.launch, queue, out, gate, up, kind)

    def _rope(
        self, queue: Queue, x: Tensor, positions: Tensor, params: RopeParams, freq_factors: Tensor | None
    ) -> None:
        row_ops.rope(self.launch, queue, x, positions, params, freq_factors)

    def _kv_store(self, queue: Queue, kv: KVView, k: Tensor, v: Tensor, positions: Tensor) -> None:
        row_ops.kv_store(self.launch, queue, kv, k, v, positions)

    def _rope_store(
        self,
        queue: Queue,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KVView,
        positions: Tensor,
        params: RopeParams,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        freq_factors: Tensor | None,
    ) -> None:
        row_ops.rope_store(self.launch, queue, q, k, v, kv, positions, params, q_norm, k_norm, eps, freq_factors)

    def _top_k(self, queue: Queue, values: Tensor, ids: Tensor, logits: Tensor, scratch: Span | None) -> None:
        row_ops.top_k(self.launch, queue, values, ids, logits, scratch)

    # --- dense ---------------------------------------------------------------------------------------------------

    def _matmul(
        self,
        queue: Queue,
        out: Tensor,
        w: Tensor,
        x: Tensor,
        bias: Tensor | None,
        accumulate: bool,
        scratch: Span | None,
    ) -> None:
        matmul.matmul(self.launch, queue, out, w, x, bias, accumulate)

    def _matmuls(
        self,
        queue: Queue,
        outs: Sequence[Tensor],
        ws: Sequence[Tensor],
        x: Tensor,
        biases: Sequence[Tensor | None],
        scratch: Span | None,
    ) -> None:
        matmul.matmuls(self.launch, queue, outs, ws, x, biases)

    def _attention(
        self,
        queue: Queue,
        out: Tensor,
        q: Tensor,
        kv: KVView,
        positions: Tensor,
        n_kv: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        scratch: Span | None,
    ) -> None:
        attention.attention(self.launch, queue, out, q, kv, positions, n_kv, scale, window, sinks, scratch)

    # --- experts -------------------------------------------------------------------------------------------------

    def _route_topk(
        self, queue: Queue, ids: Tensor, weights: Tensor, logits: Tensor, params: RouterParams, forced: bool
    ) -> None:
        row_ops.route_topk(self.launch, queue, ids, weights, logits, params, forced)

    def _sort_rows(self, queue: Queue, rows: ExpertRows, scratch: Span | None) -> None:
        row_ops.sort_rows(self.launch, queue, rows, scratch)

    def _combine(
        self, queue: Queue, acc: Tensor, y: Tensor, w: ExpertTable, rows: ExpertRows, window: RowWindow
    ) -> None:
        row_ops.combine(self.launch, queue, acc, y, w, rows, window)

    def _mul_mat_id(
        self,
        queue: Queue,
        out: Tensor,
        w: ExpertTable,
        x: Tensor,
        rows: ExpertRows,
        window: RowWindow,
        by_token: bool,
        scratch: Span | None,
    ) -> None:
        expert_ops.mul_mat_id(self.launch, queue, out, w, x, rows, window, by_token, scratch)

    def _expert_ffn(
        self,
        queue: Queue,
        acc: Tensor,
        x: Tensor,
        gate: ExpertTable,
        up: ExpertTable,
        down: ExpertTable,
        rows: ExpertRows,
        experts: tuple[int, int],
        chunk_rows: int,
        kind: Glu,
        scratch: Span | None,
    ) -> None:
        expert_ops.expert_ffn(self.launch, queue, acc, x, gate, up, down, rows, experts, chunk_rows, kind, scratch)
