"""Ops that work row by row: on plain numbers, tables of rows, the KV cache, and rows routed to experts."""

from __future__ import annotations

import math
from functools import cache

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
from noria_cuda.launch import C_TYPE, Launcher, address, pointer

BLOCK_VALUES = {  # numbers a block of each weight type; those of element types are read 8 at a time
    **dict.fromkeys(("F32", "F16", "BF16"), 8),
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 256),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 256),
}
CELL_VALUES = {"F16": 1, "Q8_0": 32, "Q4_0": 32}  # numbers a block of each type of KV cache
ACTIVATIONS = ("F32", "F16", "BF16")

_BLOCK = 256  # threads
_THREAD_VALUES = 8  # numbers a thread
_MAX_EXPERT = 512
_MAX_EXPERT_USED = 32
_MAX_K = 1024
_SORT_FEW, _SORT_CHUNK = 64, 4096  # pairs, as in cu/sort.cu
_TOP_K_PART = 8192  # as in cu/topk.cu
_GATING = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.TOPK_SOFTMAX: 2}
_GLU = {Glu.SWIGLU: "swiglu", Glu.GEGLU: "geglu"}


def supports(query: OpQuery) -> Support:
    """Whether the ops of this file run with these types and sizes."""
    match query.op:
        case Op.GET_ROWS:
            width = BLOCK_VALUES.get(query.type)
            fits = width is not None and query.dims[1] % width == 0
        case Op.RMS_NORM | Op.ADD | Op.SCALE | Op.ROPE | Op.GLU:
            fits = query.type in ACTIVATIONS and query.activation in ACTIVATIONS
        case Op.COMBINE:
            fits = query.type in ACTIVATIONS and query.dims[0] % _THREAD_VALUES == 0
        case Op.KV_STORE:
            _, n_head_kv, d_k, d_v, _ = query.dims
            fits = query.activation in ACTIVATIONS and all(
                type in CELL_VALUES and n_head_kv * d % CELL_VALUES[type] == 0
                for type, d in ((query.type, d_k), (query.type2, d_v))
            )
        case Op.ROPE_STORE:
            _, _, d_k, d_v, n_dims = query.dims
            fits = query.activation in ACTIVATIONS and query.type == query.type2 == "F16"
            fits &= d_k % 8 == d_v % 8 == n_dims % 16 == 0 and max(d_k, d_v) <= 32 * _THREAD_VALUES
        case Op.ROUTE_TOPK | Op.SORT_ROWS:
            n_expert, n_expert_used = query.dims
            fits = n_expert <= _MAX_EXPERT and n_expert_used <= _MAX_EXPERT_USED
        case Op.TOP_K:
            fits = query.dims[1] <= _MAX_K
        case _:
            fits = False
    return Support.NATIVE if fits else Support.MISSING


def scratch_nbytes(query: OpQuery) -> int:
    """Scratch of the ops of this file."""
    if query.op is Op.SORT_ROWS and (n_pair := query.n_rows * query.dims[1]) > _SORT_CHUNK:
        return _n_blocks(n_pair, _SORT_CHUNK) * query.dims[0] * 4
    if query.op is Op.TOP_K:
        n_vocab, k = query.dims
        return query.n_rows * (_n_blocks(n_vocab, _TOP_K_PART) * _TOP_K_PART + _n_kept(n_vocab, k)) * 8
    return 0


# --- numbers and rows ---------------------------------------------------------------------------------------------


def get_rows(launch: Launcher, queue: Queue, out: Tensor, table: Tensor, ids: Tensor) -> None:
    n, width = ids.shape[0], table.shape[1]
    grid = (n, _n_blocks(width, _BLOCK * _THREAD_VALUES), 1)
    args = (pointer(out), pointer(table), pointer(ids), width, table.row_nbytes)
    launch(queue, "rows", "get_rows", grid, _BLOCK, args, (f"QUANT={table.type}", f"Y={C_TYPE[out.type]}"))


def rms_norm(launch: Launcher, queue: Queue, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
    n_row, n, defines = x.n_rows, x.shape[-1], _types(x.type, x.type, out.type)
    if n <= 32 * _THREAD_VALUES:
        lanes = 16 if n <= 16 * _THREAD_VALUES else 32
        grid = (_n_blocks(n_row, _BLOCK // lanes), 1, 1)
        args: tuple[int | float, ...] = (pointer(out), pointer(x), pointer(weight), n_row, n, eps)
        launch(queue, "elementwise", f"rms_norm_{lanes}", grid, _BLOCK, args, defines)
    else:
        args = (pointer(out), pointer(x), pointer(weight), n, eps)
        launch(queue, "elementwise", "rms_norm", (n_row, 1, 1), _BLOCK, args, defines)


def add(launch: Launcher, queue: Queue, out: Tensor, a: Tensor, b: Tensor) -> None:
    _map(launch, queue, "add", out, a, b, (math.prod(b.shape),))


def scale(launch: Launcher, queue: Queue, out: Tensor, x: Tensor, factor: float) -> None:
    n = math.prod(x.shape)
    args = (pointer(out), pointer(x), factor, n)
    launch(queue, "elementwise", "scale", _grid(n), _BLOCK, args, _types(x.type, x.type, out.type))


def glu(launch: Launcher, queue: Queue, out: Tensor, gate: Tensor, up: Tensor, kind: Glu) -> None:
    _map(launch, queue, _GLU[kind], out, gate, up, ())


def _map(launch: Launcher, queue: Queue, name: str, out: Tensor, a: Tensor, b: Tensor, more: tuple[int, ...]) -> None:
    n = math.prod(a.shape)
    args = (pointer(out), pointer(a), pointer(b), n, *more)
    launch(queue, "elementwise", name, _grid(n), _BLOCK, args, _types(a.type, b.type, out.type))


def rope(
    launch: Launcher, queue: Queue, x: Tensor, positions: Tensor, params: RopeParams, freq_factors: Tensor | None
) -> None:
    n, n_head, head_dim = x.shape
    args = (
        *(pointer(x), pointer(positions), pointer(freq_factors), *_log2_base(params), params.scale),
        *(n_head, head_dim, params.n_dims, int(params.neox)),
    )
    launch(queue, "rope", "rope", (n, 1, 1), _BLOCK, args, (f"X={C_TYPE[x.type]}",), shared=4 * params.n_dims)


def kv_store(launch: Launcher, queue: Queue, kv: KVView, k: Tensor, v: Tensor, positions: Tensor) -> None:
    for rows, type, d, offset in ((k, kv.k_type, kv.d_k, 0), (v, kv.v_type, kv.d_v, kv.v_offset)):
        width = kv.n_head_kv * d
        grid = (rows.shape[0], _n_blocks(width, _BLOCK), 1)
        args = (address(kv.span) + offset, pointer(rows), pointer(positions), width, kv.row_nbytes)
        launch(queue, "kv", "kv_store", grid, _BLOCK, args, (f"X={C_TYPE[rows.type]}", f"STORE={type}"))


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
    lanes = 16 if max(d_k, kv.d_v) <= 16 * _THREAD_VALUES else 32
    args = (
        *(pointer(q), pointer(k), pointer(v), address(kv.span), pointer(positions)),
        *(pointer(q_norm), pointer(k_norm), pointer(freq_factors), eps, *_log2_base(params), params.scale),
        *(kv.row_nbytes, kv.v_offset, n_head, kv.n_head_kv, d_k, kv.d_v, params.n_dims, int(params.neox)),
    )
    grid = (n, _n_blocks(n_head + 2 * kv.n_head_kv, _BLOCK // lanes), 1)
    defines = (f"X={C_TYPE[q.type]}", f"LANES={lanes}")
    launch(queue, "heads", "rope_store", grid, _BLOCK, args, defines, shared=4 * params.n_dims)


def _log2_base(params: RopeParams) -> tuple[float, float]:
    """Logarithm of the base of the angles, as two numbers of f32."""
    log2_base = math.log2(params.base)
    high = float(np.float32(log2_base))
    return high, log2_base - high


def top_k(launch: Launcher, queue: Queue, values: Tensor, ids: Tensor, logits: Tensor, scratch: Span | None) -> None:
    assert scratch is not None
    (n, n_vocab), k = logits.shape, ids.shape[1]
    n_part, candidates = _n_blocks(n_vocab, _TOP_K_PART), address(scratch)
    kept = candidates + n * n_part * _TOP_K_PART * 8
    launch(queue, "topk", "top_k_parts", (n_part, n, 1), 1024, (pointer(logits), candidates, kept, n_vocab, k))
    args = (pointer(values), pointer(ids), pointer(logits), kept, n_vocab, _n_kept(n_vocab, k), k)
    launch(queue, "topk", "top_k_merge", (n, 1, 1), 1024, args)


def _n_kept(n_vocab: int, k: int) -> int:
    """What the parts of a row leave of it."""
    n_full, rest = divmod(n_vocab - 1, _TOP_K_PART)
    return n_full * min(k, _TOP_K_PART) + min(k, rest + 1)


# --- routed rows --------------------------------------------------------------------------------------------------


def route_topk(
    launch: Launcher, queue: Queue, ids: Tensor, weights: Tensor, logits: Tensor, params: RouterParams, forced: bool
) -> None:
    n, n_expert = logits.shape
    args = (
        *(pointer(ids), pointer(weights), pointer(logits), n, n_expert, ids.shape[1]),
        *(_GATING[params.gating], int(params.normalize), params.scale, int(forced)),
    )
    launch(queue, "route", "route_topk", (_n_blocks(n, 4), 1, 1), 128, args, (f"PER_LANE={_n_blocks(n_expert, 32)}",))


def sort_rows(launch: Launcher, queue: Queue, rows: ExpertRows, scratch: Span | None) -> None:
    n, k, n_expert = rows.n_tokens * rows.n_expert_used, rows.n_expert_used, rows.n_expert
    pairs, offsets, positions, ids = map(pointer, (rows.pairs, rows.offsets, rows.positions, rows.ids))
    if n <= _SORT_CHUNK:
        name = "sort_few" if n <= _SORT_FEW else "sort_small"
        launch(queue, "sort", name, (1, 1, 1), _BLOCK, (pairs, offsets, positions, ids, n, k, n_expert))
        return
    assert scratch is not None
    counts, n_chunk = address(scratch), _n_blocks(n, _SORT_CHUNK)
    launch(queue, "sort", "sort_count", (n_chunk, 1, 1), _BLOCK, (counts, ids, n, n_expert))
    launch(queue, "sort", "sort_add", (1, 1, 1), _MAX_EXPERT, (counts, offsets, n_chunk, n_expert))
    launch(queue, "sort", "sort_place", (n_chunk, 1, 1), _BLOCK, (pairs, positions, ids, counts, n, k, n_expert))


def combine(
    launch: Launcher, queue: Queue, acc: Tensor, y: Tensor, w: ExpertTable, rows: ExpertRows, window: RowWindow
) -> None:
    n_embd = acc.shape[-1]
    args = (
        *(pointer(acc), pointer(y), pointer(w.where), pointer(rows.ids), pointer(rows.weights), pointer(rows.pairs)),
        *(pointer(rows.offsets), pointer(rows.positions), rows.n_expert_used),
        *(window.first_expert, window.end_expert, window.first_row, window.n_rows, n_embd),
    )
    grid = (rows.n_tokens, _n_blocks(n_embd, _BLOCK * _THREAD_VALUES), 1)
    launch(queue, "combine", "combine", grid, _BLOCK, args, (f"X={C_TYPE[y.type]}",))


@cache
def _types(x: str, w: str, y: str) -> tuple[str, str, str]:
    return f"X={C_TYPE[x]}", f"W={C_TYPE[w]}", f"Y={C_TYPE[y]}"


def _grid(n: int) -> tuple[int, int, int]:
    """For n numbers."""
    return _n_blocks(n, _BLOCK * _THREAD_VALUES), 1, 1


def _n_blocks(n: int, width: int) -> int:
    return -(-n // width)
