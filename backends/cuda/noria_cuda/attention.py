"""Attention over the KV cache: few rows with their keys split over blocks, many on matrix units.

Very many rows run in cuDNN where it is there. It has no fast kernel for rows that see all of the past and a triangle of
their own keys, so these are two calls, merged by the logarithms of their sums.
"""

from __future__ import annotations

from typing import Any

from noria.api import KVView, OpQuery, Queue, Span, Support, Tensor, align_up
from noria_cuda import cudnn
from noria_cuda.launch import C_TYPE, Launcher, Limits, address, pointer
from noria_cuda.rows import ACTIVATIONS, CELL_VALUES

SPLIT_ROWS = 4  # at most so many rows have their keys split over blocks

_CUDNN_ROWS = 256  # from so many rows on
_CUDNN_D = (64, 128)
_CUDNN_SM = 80
_KEYS = 64  # of a block, as in cu/attention.cu
_QUERIES = 128


def supports(limits: Limits, query: OpQuery) -> Support:
    """Whether attention runs with these types and sizes."""
    _, _, d_k, d_v, _ = query.dims
    fits = query.activation in ACTIVATIONS and _tile_nbytes(d_k, d_v, 1) <= limits.shared_nbytes
    fits &= all(
        t in CELL_VALUES and d % max(CELL_VALUES[t], 8) == 0 for t, d in ((query.type, d_k), (query.type2, d_v))
    )
    return Support.NATIVE if fits else Support.MISSING


def scratch_nbytes(limits: Limits, query: OpQuery) -> int:
    """Scratch of attention: parts of split rows, or the cache in f16."""
    n_head, n_head_kv, d_k, d_v, n_kv = query.dims
    parts = min(query.n_rows, SPLIT_ROWS) * n_head * -(-n_kv // _KEYS) * (d_v + 2) * 4
    if query.n_rows <= SPLIT_ROWS:
        return parts
    cells = 0 if query.type == query.type2 == "F16" else align_up(n_kv * n_head_kv * (d_k + d_v) * 2, 256)
    queries = query.n_rows * n_head * d_k * 2 if query.n_rows >= _CUDNN_ROWS else 0
    return max(parts, cells + queries)


def attention(
    launch: Launcher,
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
    """Kernels.attention."""
    n, n_head, _ = q.shape
    n_group = n_head // kv.n_head_kv
    cells = address(kv.span)
    cache = (cells, kv.row_nbytes, kv.v_offset)
    d = (f"ACT={C_TYPE[q.type]}", f"D_K={kv.d_k}", f"D_V={kv.d_v}")
    types = (f"K_TYPE={kv.k_type}", f"V_TYPE={kv.v_type}")
    if n <= SPLIT_ROWS:
        assert scratch is not None, "attention of few rows needs scratch"
        parts, n_split = address(scratch), -(-n_kv // _KEYS)
        shared = _KEYS * (_row_nbytes(kv.d_k) + _row_nbytes(kv.d_v)) + 4 * n_group * (kv.d_k + _KEYS)
        args: tuple[int | float, ...] = (parts, pointer(q), *cache, pointer(positions), n_group, scale, window or 0)
        launch(queue, "attention", "attend_split", (n_split, kv.n_head_kv, n), 256, args, (*d, *types), shared)
        args = (pointer(out), parts, pointer(positions), pointer(sinks), n_split, window or 0)
        launch(queue, "attention", "attend_merge", (n_head, n, 1), align_up(kv.d_v, 32), args, (*d, *types))
        return
    free = 0  # the first byte of scratch that is
    if not kv.k_type == kv.v_type == "F16":
        assert scratch is not None, "attention over a quantized cache needs scratch"
        free = align_up(n_kv * kv.n_head_kv * (kv.d_k + kv.d_v) * 2, 256)
        args = (address(scratch), *cache, kv.n_head_kv, n_kv)
        grid = (min(8 * launch.limits.n_sm, n_kv), 1, 1)
        launch(queue, "attention", "unpack_cells", grid, 256, args, (*d, *types))
        row_nbytes = kv.n_head_kv * (kv.d_k + kv.d_v) * 2
        cache = (address(scratch), row_nbytes, kv.n_head_kv * kv.d_k * 2)
    plain = not window and sinks is None and n_head % 2 == 0
    if plain and n >= _CUDNN_ROWS and kv.d_k == kv.d_v in _CUDNN_D and launch.limits.sm >= _CUDNN_SM:
        assert scratch is not None, "attention of many rows needs scratch"
        if not queue.recording and cudnn.is_available():
            _by_cudnn(launch, queue, out, q, cache, kv, positions, n_kv - n, scale, address(scratch) + free)
            return
    stages = 2 if _tile_nbytes(kv.d_k, kv.d_v, 2) <= launch.limits.shared_nbytes else 1
    args = (
        *(pointer(out), pointer(q), *cache, pointer(positions), pointer(sinks)),
        *(n, n_head, n_group, scale, window or 0),
    )
    defines = (*d, "K_TYPE=F16", "V_TYPE=F16", f"STAGES={stages}")
    launch(
        queue,
        "attention",
        "attend_tile",
        (n_head, -(-n // _QUERIES), 1),
        256,
        args,
        defines,
        _tile_nbytes(kv.d_k, kv.d_v, stages),
    )


def _by_cudnn(
    launch: Launcher,
    queue: Queue,
    out: Tensor,
    q: Tensor,
    cache: tuple[int, int, int],
    kv: KVView,
    positions: Tensor,
    n_past: int,
    scale: float,
    queries: int,
) -> None:
    """Rows at positions from `n_past` on; `cache`: address of f16 cells, bytes of one, and to V in it."""
    n, n_head, d = q.shape
    cells, row_nbytes, v_offset = cache
    size = n * n_head * d
    defines = (f"ACT={C_TYPE[q.type]}", f"D_K={d}", f"D_V={d}", "K_TYPE=F16", "V_TYPE=F16")
    grid = (-(-size // 2048), 1, 1)
    launch(queue, "attention", "queries_to_f16", grid, 256, (queries, pointer(q), size), defines)
    device = queue.device.ordinal  # type: ignore[attr-defined]
    rows = cudnn.f16_tensor(device, queries, (1, n_head, n, d), (size, d, n_head * d, 1))

    def attend(first: int, end: int, *, is_causal: bool) -> tuple[Any, Any]:
        shape, strides = (1, kv.n_head_kv, end - first, d), (0, d, row_nbytes // 2, 1)
        at = cells + first * row_nbytes
        k, v = (cudnn.f16_tensor(device, at + offset, shape, strides) for offset in (0, v_offset))
        return cudnn.attend(queue, rows, k, v, scale, is_causal=is_causal)

    square, square_log = attend(n_past, n_past + n, is_causal=True)
    args = [pointer(out), square.data_ptr(), square_log.data_ptr(), 0, 0, pointer(positions), n_past, n]
    if n_past:
        past, past_log = attend(0, n_past, is_causal=False)
        args[3:5] = past.data_ptr(), past_log.data_ptr()
    launch(queue, "attention", "merge_past", (n_head // 2, n, 1), d // 4, args, defines)


def _tile_nbytes(d_k: int, d_v: int, stages: int) -> int:
    """Shared memory of attend_tile."""
    return max(stages * _KEYS * (_row_nbytes(d_k) + _row_nbytes(d_v)), _QUERIES * _row_nbytes(d_k))


def _row_nbytes(d: int) -> int:
    """A row of f16 in shared memory."""
    return align_up(d, 64) * 2
