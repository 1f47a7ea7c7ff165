"""Attention over the KV cache."""

from __future__ import annotations

from noria.api import KVView, OpQuery, Queue, Span, Support, Tensor
from noria_sycl.launch import F32, U64, Launcher, ints, local, n_blocks, span, tensor
from noria_sycl.rows import KV_TYPES, WIDTH

_LOCAL_NBYTES = 192 * 1024  # of a core's cache
_SPLIT_ROWS = 4  # on a GPU, at most so many rows have their keys split over groups
_SPLIT_KEYS = 64  # of a group then, as in cl/attention_gpu.cl
_SPLIT_GROUP = 64
_TILE_GROUP = 128  # as there


def supports(launch: Launcher, query: OpQuery) -> Support:
    """Whether attention runs with these types and sizes."""
    n_head, n_head_kv, d_k, d_v, _ = query.dims
    fits = query.activation == "F32" and {query.type, query.type2} <= set(KV_TYPES)
    fits &= n_head % n_head_kv == d_k % WIDTH == d_v % WIDTH == 0
    return Support.NATIVE if fits and _sizes(launch, d_k, d_v, query.n_rows) else Support.MISSING


def scratch_nbytes(launch: Launcher, query: OpQuery) -> int:
    """Scratch of attention: on a GPU, the parts of split rows."""
    n_head, _, _, d_v, n_kv = query.dims
    if launch.on_cpu or query.n_rows > _SPLIT_ROWS:
        return 0
    return query.n_rows * n_head * n_blocks(n_kv, _SPLIT_KEYS) * (d_v + 2) * 4


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
    cells = [*span(kv.span), *tensor(positions)]
    place = [U64(kv.row_nbytes), U64(kv.v_offset)]
    rest = [F32(scale), *ints(window or 0)]
    defines = (f"K_TYPE={kv.k_type}", f"V_TYPE={kv.v_type}", f"D_K={kv.d_k}", f"D_V={kv.d_v}")
    if not launch.on_cpu and n <= _SPLIT_ROWS:
        assert scratch is not None, "attention of few rows needs scratch"
        n_split = n_blocks(n_kv, _SPLIT_KEYS)
        args = [*span(scratch), *tensor(q), *cells, *place, *ints(n_head, n_group), *rest]
        groups = (n_split, n_head, n)
        launch(queue, "attention_gpu", "attend_split", args, groups, (*defines, *_tile(0, 0)), (_SPLIT_GROUP, 1, 1))
        args = [*tensor(out), *span(scratch), *tensor(positions), *tensor(sinks), *ints(n_split, window or 0)]
        launch(queue, "attention_gpu", "attend_merge", args, (n_head, n), (*defines, *_tile(0, 0)), (_SPLIT_GROUP, 1))
        return
    args = [*tensor(out), *tensor(q), *cells, *tensor(sinks), *place, *ints(n, n_head, n_group), *rest]
    sizes = _sizes(launch, kv.d_k, kv.d_v, n * n_group)
    assert sizes is not None
    queries, keys = sizes
    blocks = (n_blocks(n * n_group, queries), kv.n_head_kv)
    if launch.on_cpu:
        args.append(local(_cpu_nbytes(kv.d_k, kv.d_v, queries, keys)))
        launch(queue, "attention_cpu", "attend", args, blocks, (*defines, *_tile(queries, keys)))
    else:
        launch(queue, "attention_gpu", "attend_tile", args, blocks, (*defines, *_tile(queries, keys)), (_TILE_GROUP, 1))


def _sizes(launch: Launcher, d_k: int, d_v: int, n_row: int) -> tuple[int, int] | None:
    """Queries and keys of a tile: the largest for which there is local memory; None if there are none.

    Keys depend on the sizes of heads alone: how they are cut decides the order of sums.
    """
    if launch.on_cpu:
        most = min(_LOCAL_NBYTES, launch.device.limits.local_nbytes)
        for keys in (64, 32, 16):
            if _cpu_nbytes(d_k, d_v, 48, keys) <= most:
                return (12 if n_row <= 12 else 48), keys
        return None
    most = launch.device.limits.local_nbytes
    for queries, keys in ((32, 32), (16, 32), (16, 16), (8, 16)):
        if _gpu_nbytes(d_k, d_v, queries, keys) <= most:
            return queries, keys
    return None


def _tile(queries: int, keys: int) -> tuple[str, str]:
    return f"QUERIES={queries}", f"KEYS={keys}"


def _cpu_nbytes(d_k: int, d_v: int, queries: int, keys: int) -> int:
    """Local memory of `attend`: a tile of keys and values, scores, what is added up."""
    return 4 * (keys * (d_k + d_v) + queries * (keys + d_v))


def _gpu_nbytes(d_k: int, d_v: int, queries: int, keys: int) -> int:
    """Local memory of `attend_tile`: queries, keys or values, scores."""
    return 4 * (queries * d_k + keys * (max(d_k, d_v) + 4) + queries * (keys + 4) + 4 * queries)
