"""Every op on NumPy arrays, run by the worker of the queue.

The public methods of `Kernels` enqueue; the methods here run when their turn has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

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
from noria.builtin.reference.attention import attend, store_cells
from noria.builtin.reference.experts import (
    Ffn,
    Ints,
    TableWeights,
    WindowRows,
    choice_weights,
    choose,
    combine,
    expert_ffn,
    glu,
    scores,
    sort_rows,
    windows,
)
from noria.builtin.reference.matmul import matmul_rows
from noria.builtin.reference.memory import span_bytes
from noria.builtin.reference.queue import ReferenceQueue
from noria.builtin.reference.tensors import ACTIVATION_TYPES, F32Array, elements, load, store
from noria.builtin.reference.weights import Weights, to_shape
from noria.gguf import SUPPORTED_TYPES, block_facts

if TYPE_CHECKING:
    from noria.api import Device

_IN_PARTS = (Op.MATMULS, Op.ROPE_STORE)  # composites that save launches, which are cheap here
_WEIGHT_OPS = (Op.GET_ROWS, Op.MATMUL, Op.MUL_MAT_ID, Op.EXPERT_FFN)


class ReferenceKernels(Kernels):
    """The ops of the reference device.

    Everything is computed in f32. Whatever an op needs besides its operands is NumPy's own memory, so none asks for
    scratch.

    Attributes:
        weights: where weights become f32.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.weights = Weights()
        self._turns: tuple[object, F32Array, F32Array] = (None, np.empty(0, np.float32), np.empty(0, np.float32))

    def supports(self, query: OpQuery) -> Support:
        if query.activation not in ACTIVATION_TYPES or query.op in _IN_PARTS:
            return Support.MISSING
        types = {query.type, query.type2} - {""}
        if query.op in (Op.KV_STORE, Op.ATTENTION):
            if not types <= set(self.device.caps.kv_types) or not _fits_blocks(query):
                return Support.MISSING
        elif query.op in _WEIGHT_OPS:
            if not types <= set(SUPPORTED_TYPES):
                return Support.MISSING
        else:
            types = {"F32"}
        return Support.NATIVE if types == {"F32"} else Support.CONVERTED

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        if not isinstance(queue, ReferenceQueue) or queue.device is not self.device:
            raise KernelLaunchError(self.device.info.id, f"{query.op} was enqueued on {queue.name}, another device's")
        operands = {name: value for name, value in args.items() if name != "scratch"}
        work = partial(getattr(self, f"_{query.op}"), **operands)
        queue.submit(query.op, reads, writes, partial(queue.push, query.op, work, writes))

    # --- one row at a time ---------------------------------------------------------------------------------------

    def _get_rows(self, out: Tensor, table: Tensor, ids: Tensor) -> None:
        rows = span_bytes(table.span).reshape(table.n_rows, table.row_nbytes)[elements(ids)]
        store(out, to_shape(rows, table.type, out.shape))

    def _rms_norm(self, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        values = load(x)
        mean = np.square(values, dtype=np.float64).mean(axis=-1, keepdims=True)
        y = values * (1 / np.sqrt(mean + eps)).astype(np.float32)
        store(out, y if weight is None else y * elements(weight))

    def _add(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        store(out, load(a) + load(b))

    def _scale(self, out: Tensor, x: Tensor, factor: float) -> None:
        store(out, load(x) * np.float32(factor))

    def _glu(self, out: Tensor, gate: Tensor, up: Tensor, kind: Glu) -> None:
        store(out, glu(load(gate), load(up), kind))

    def _rope(self, x: Tensor, positions: Tensor, params: RopeParams, freq_factors: Tensor | None) -> None:
        cos, sin = self._turn(positions, params, freq_factors)
        values, half = load(x), params.n_dims // 2
        if params.neox:
            a, b = values[..., :half], values[..., half : params.n_dims]
        else:
            a, b = values[..., 0 : params.n_dims : 2], values[..., 1 : params.n_dims : 2]
        a[...], b[...] = a * cos - b * sin, a * sin + b * cos
        if x.type != "F32":
            store(x, values)

    def _turn(self, positions: Tensor, params: RopeParams, freq_factors: Tensor | None) -> tuple[F32Array, F32Array]:
        """Cosines and sines, [n, 1, n_dims/2]. The latest are kept: q and k of all layers turn alike."""
        at = elements(positions)
        factors = None if freq_factors is None else elements(freq_factors)
        key = (params, at.tobytes(), None if factors is None else factors.tobytes())
        kept, cos, sin = self._turns
        if kept != key:
            angles = rope_angles(at, params, factors).astype(np.float64)[:, None]
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._turns = key, cos, sin
        return cos, sin

    # --- sums ----------------------------------------------------------------------------------------------------

    def _matmul(self, out: Tensor, w: Tensor, x: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        y = matmul_rows(load(x).reshape(x.n_rows, -1), self.weights.get(w.span, w.type, w.shape))
        if bias is not None:
            y = y + elements(bias)
        y = y.reshape(out.shape)
        store(out, load(out) + y if accumulate else y)

    def _kv_store(self, kv: KVView, k: Tensor, v: Tensor, positions: Tensor) -> None:
        store_cells(kv, load(k), load(v), elements(positions))

    def _attention(
        self,
        out: Tensor,
        q: Tensor,
        kv: KVView,
        positions: Tensor,
        n_kv: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        sink = None if sinks is None else elements(sinks)
        store(out, attend(load(q), kv, elements(positions), scale, window, sink))

    def _top_k(self, values: Tensor, ids: Tensor, logits: Tensor) -> None:
        k = ids.shape[1]
        for value, id, row in zip(elements(values), elements(ids), elements(logits), strict=True):
            least = np.partition(row, row.size - k)[row.size - k]
            candidates = np.flatnonzero(row >= least)  # more than k where several are equal to the least
            id[:] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
            value[:] = row[id]

    # --- experts -------------------------------------------------------------------------------------------------

    def _route_topk(self, ids: Tensor, weights: Tensor, logits: Tensor, params: RouterParams, forced: bool) -> None:
        by = scores(elements(logits), params.gating)
        if not forced:
            elements(ids)[:] = choose(by, ids.shape[1])
        elements(weights)[:] = choice_weights(by, elements(ids), params)

    def _sort_rows(self, rows: ExpertRows) -> None:
        sort_rows(rows)

    def _mul_mat_id(
        self, out: Tensor, w: ExpertTable, x: Tensor, rows: ExpertRows, window: RowWindow, by_token: bool
    ) -> None:
        weights, values = TableWeights(w, self.weights), load(x)
        part = WindowRows.of(rows, window, weights.here)
        tokens = part.tokens(rows)
        for expert, first, end in part.experts:
            rows_in = values[tokens[first:end]] if by_token else values[first:end]
            store(out.rows(first, end), matmul_rows(rows_in, weights[expert]))

    def _combine(self, acc: Tensor, y: Tensor, w: ExpertTable, rows: ExpertRows, window: RowWindow) -> None:
        here = elements(w.where) >= 0
        part = WindowRows.of(rows, window, here)
        combine(elements(acc), load(y)[: part.end - part.first], here, rows, part.first)

    def _expert_ffn(
        self,
        acc: Tensor,
        x: Tensor,
        gate: ExpertTable,
        up: ExpertTable,
        down: ExpertTable,
        rows: ExpertRows,
        experts: tuple[int, int],
        chunk_rows: int,
        kind: Glu,
    ) -> None:
        tables = Ffn(*(TableWeights(table, self.weights) for table in (gate, up, down)))
        for window in windows(rows, experts, chunk_rows):
            expert_ffn(elements(acc), load(x), tables, rows, window, kind)


def rope_angles(positions: Ints, params: RopeParams, freq_factors: F32Array | None) -> F32Array:
    """The angle of each pair, [n, n_dims/2]. positions: [n]; freq_factors: [n_dims/2].

    Rounded to f32 at every step, each frequency made from the one before. At far positions the rounding is larger than
    that of all other ops together, so another order of steps would be another model than the one everybody runs.
    Source: llama.cpp ggml-cpu/ops.cpp, ggml_rope_cache_init.
    """
    n_pair = params.n_dims // 2
    steps = np.full((len(positions), n_pair), np.float32(params.base) ** np.float32(-2 / params.n_dims), np.float32)
    steps[:, 0] = positions
    angles: F32Array = np.multiply.accumulate(steps, axis=1)
    if freq_factors is not None:
        angles /= freq_factors
    return angles * np.float32(params.scale)


def _fits_blocks(query: OpQuery) -> bool:
    """Whether heads share KV heads evenly, and the rows of a cell are whole blocks of their types."""
    n_head, n_head_kv, d_k, d_v, _ = query.dims
    rows = ((query.type, n_head_kv * d_k), (query.type2, n_head_kv * d_v))
    return n_head % n_head_kv == 0 and all(n % block_facts(type)[0] == 0 for type, n in rows)
