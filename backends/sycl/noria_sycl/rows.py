"""Ops that work row by row: on plain numbers, tables of rows, the KV cache, and rows routed to experts."""

from __future__ import annotations

import math

import numpy as np

from noria.api import (
    ExpertRows,
    ExpertTable,
    Gating,
    Glu,
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
from noria_sycl.launch import F32, U64, Args, Launcher, ints, local, n_blocks, span, tensor

WIDTH = 32  # numbers that kernels take at a time: rows of weights are multiples of this, or of the type's block
BLOCK_VALUES = {  # numbers a block of each weight type
    **dict.fromkeys(("F32", "F16", "BF16"), WIDTH),
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"), WIDTH),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 256),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 256),
}
KV_TYPES = ("F16", "Q8_0", "Q4_0", "F32")

_MAX_EXPERT, _MAX_EXPERT_USED = 512, 32  # as in cl/route.cl
_MAX_K, _TOP_K_BLOCK = 1024, 64  # as in cl/topk.cl
_GATING = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.TOPK_SOFTMAX: 2}


def supports(query: OpQuery) -> Support:
    """Whether the ops of this file run with these types and sizes."""
    match query.op:
        case Op.GET_ROWS:
            fits = takes(query.type, query.dims[1])
        case Op.RMS_NORM | Op.ADD | Op.SCALE | Op.ROPE | Op.GLU | Op.COMBINE:
            fits = query.type == query.activation == "F32"
        case Op.KV_STORE | Op.ROPE_STORE:
            _, n_head_kv, d_k, d_v, n_dims = query.dims
            fits = query.activation == "F32" and {query.type, query.type2} <= set(KV_TYPES)
            if query.op is Op.ROPE_STORE:
                fits &= d_k % WIDTH == d_v % WIDTH == n_dims % 2 == 0
            else:
                fits &= n_head_kv * d_k % WIDTH == n_head_kv * d_v % WIDTH == 0
        case Op.ROUTE_TOPK | Op.SORT_ROWS:
            n_expert, n_expert_used = query.dims
            fits = n_expert <= _MAX_EXPERT and n_expert_used <= _MAX_EXPERT_USED
        case Op.TOP_K:
            fits = query.dims[1] <= _MAX_K
        case _:
            fits = False
    return Support.NATIVE if fits else Support.MISSING


def takes(type: str, n_in: int) -> bool:
    """Whether kernels read weights of this type, in rows of `n_in`."""
    return type in BLOCK_VALUES and n_in % BLOCK_VALUES[type] == 0


def scratch_nbytes(launch: Launcher, query: OpQuery) -> int:
    """Scratch of the ops of this file."""
    if query.op is Op.SORT_ROWS and not launch.on_cpu:
        n_expert, n_expert_used = query.dims
        return n_blocks(query.n_rows * n_expert_used, launch.group) * n_expert * 4
    if query.op is Op.TOP_K:
        n_vocab, _ = query.dims
        return query.n_rows * (n_vocab + n_blocks(n_vocab, _TOP_K_BLOCK)) * 8
    return 0


# --- numbers and rows ---------------------------------------------------------------------------------------------


def get_rows(launch: Launcher, queue: Queue, out: Tensor, table: Tensor, ids: Tensor) -> None:
    n, width = ids.shape[0], table.shape[1]
    args = [*tensor(out), *tensor(table), *tensor(ids), *ints(width), U64(table.row_nbytes)]
    groups = (n_blocks(width, WIDTH * launch.group), n)
    launch(queue, "rows", "get_rows", args, groups, (f"QUANT={table.type}",))


def rms_norm(launch: Launcher, queue: Queue, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
    args = [*tensor(out), *tensor(x), *tensor(weight), *ints(x.n_rows, x.shape[-1]), F32(eps)]
    launch(queue, "elementwise", "rms_norm", args, launch.share(x.n_rows))


def add(launch: Launcher, queue: Queue, out: Tensor, a: Tensor, b: Tensor) -> None:
    n = math.prod(a.shape)
    args = [*tensor(out), *tensor(a), *tensor(b), U64(n), U64(math.prod(b.shape))]
    launch(queue, "elementwise", "add", args, launch.share_numbers(n))


def scale(launch: Launcher, queue: Queue, out: Tensor, x: Tensor, factor: float) -> None:
    n = math.prod(x.shape)
    launch(queue, "elementwise", "scale", [*tensor(out), *tensor(x), F32(factor), U64(n)], launch.share_numbers(n))


def glu(launch: Launcher, queue: Queue, out: Tensor, gate: Tensor, up: Tensor, kind: Glu) -> None:
    n = math.prod(gate.shape)
    args = [*tensor(out), *tensor(gate), *tensor(up), U64(n)]
    launch(queue, "elementwise", "glu", args, launch.share_numbers(n), glu_defines(kind))


def glu_defines(kind: Glu) -> tuple[str, ...]:
    """Macros of cl/glu.h."""
    return ("GEGLU",) if kind is Glu.GEGLU else ()


def rope(
    launch: Launcher, queue: Queue, x: Tensor, positions: Tensor, params: RopeParams, freq_factors: Tensor | None
) -> None:
    args = [*tensor(x), *tensor(positions), *tensor(freq_factors), *ints(*x.shape, params.n_dims, int(params.neox))]
    args += [_step(params), F32(params.scale), local(params.n_dims * 4)]
    launch(queue, "heads", "rope", args, launch.share(x.shape[0]), _cell_types("F32", "F32"))


def kv_store(launch: Launcher, queue: Queue, kv: KVView, k: Tensor, v: Tensor, positions: Tensor) -> None:
    for rows, type, d, offset in ((k, kv.k_type, kv.d_k, 0), (v, kv.v_type, kv.d_v, kv.v_offset)):
        width = kv.n_head_kv * d
        args = [*span(kv.span), *tensor(rows), *tensor(positions), *ints(width), U64(kv.row_nbytes), U64(offset)]
        groups = (n_blocks(width, WIDTH * launch.group), rows.shape[0])
        launch(queue, "heads", "kv_store", args, groups, _cell_types(type, type))


def rope_store(
    launch: Launcher,
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
    n, n_head, d_k = q.shape
    args = [*tensor(q), *tensor(k), *tensor(v), *span(kv.span), *tensor(positions)]
    args += [*tensor(q_norm), *tensor(k_norm), *tensor(freq_factors), F32(eps), _step(params), F32(params.scale)]
    args += [*ints(n), U64(kv.row_nbytes), U64(kv.v_offset), *ints(n_head, kv.n_head_kv, d_k, kv.d_v)]
    args += [*ints(params.n_dims, int(params.neox)), local(params.n_dims * 4)]
    groups = launch.share(n * (n_head + 2 * kv.n_head_kv))
    launch(queue, "heads", "rope_store", args, groups, _cell_types(kv.k_type, kv.v_type))


def _step(params: RopeParams) -> np.float32:
    """Quotient of the frequencies of one pair and the one before."""
    return F32(params.base) ** F32(-2 / params.n_dims)


def _cell_types(k_type: str, v_type: str) -> tuple[str, str]:
    return f"K_TYPE={k_type}", f"V_TYPE={v_type}"


def top_k(launch: Launcher, queue: Queue, values: Tensor, ids: Tensor, logits: Tensor, scratch: Span | None) -> None:
    assert scratch is not None
    (n, n_vocab), k = logits.shape, ids.shape[1]
    args = [*tensor(values), *tensor(ids), *tensor(logits), *span(scratch), *ints(n_vocab, k)]
    launch(queue, "topk", "top_k", args, (n,))


# --- routed rows --------------------------------------------------------------------------------------------------


def route_topk(
    launch: Launcher, queue: Queue, ids: Tensor, weights: Tensor, logits: Tensor, params: RouterParams, forced: bool
) -> None:
    n, n_expert = logits.shape
    args = [*tensor(ids), *tensor(weights), *tensor(logits), *ints(n, n_expert, ids.shape[1])]
    args += [*ints(_GATING[params.gating], int(params.normalize)), F32(params.scale), *ints(int(forced))]
    launch(queue, "route", "route_topk", args, launch.share(n))


def sort_rows(launch: Launcher, queue: Queue, rows: ExpertRows, scratch: Span | None) -> None:
    n, n_expert = rows.n_tokens * rows.n_expert_used, rows.n_expert
    args = [*tensor(rows.pairs), *tensor(rows.offsets), *tensor(rows.positions), *tensor(rows.ids)]
    args += ints(n, rows.n_expert_used, n_expert)
    if launch.on_cpu:
        launch(queue, "sort", "sort_all", args, (1,))
    elif n <= launch.group:
        launch(queue, "sort", "sort_few", args, (1,))
    else:
        assert scratch is not None
        counts, n_part = span(scratch), n_blocks(n, launch.group)
        launch(queue, "sort", "sort_count", [*counts, *tensor(rows.ids), *ints(n, n_expert)], (n_part,))
        launch(queue, "sort", "sort_add", [*counts, *tensor(rows.offsets), *ints(n_part, n_expert)], (1,))
        launch(queue, "sort", "sort_place", [*args, *counts], (n_part,))


def combine(
    launch: Launcher, queue: Queue, acc: Tensor, y: Tensor, w: ExpertTable, rows: ExpertRows, window: RowWindow
) -> None:
    add_rows(launch, queue, acc, tensor(y), (w, w, w), rows, window)


def add_rows(
    launch: Launcher,
    queue: Queue,
    acc: Tensor,
    y: Args,
    tables: tuple[ExpertTable, ExpertTable, ExpertTable],
    rows: ExpertRows,
    window: RowWindow,
) -> None:
    """acc[token] += weight * y[row] for the rows of the window whose experts are in all tables."""
    args = [*tensor(acc), *y, *(arg for table in tables for arg in tensor(table.where))]
    for part in (rows.weights, rows.positions, rows.ids, rows.pairs, rows.offsets):
        args += tensor(part)
    args += ints(rows.n_expert_used, *window_of(window), rows.n_tokens, acc.shape[-1])
    launch(queue, "combine", "combine", args, launch.share(rows.n_tokens))


def window_of(window: RowWindow) -> tuple[int, int, int, int]:
    """A window as kernels get it."""
    return window.first_expert, window.end_expert, window.first_row, window.n_rows
