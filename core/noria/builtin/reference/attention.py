"""The KV cache and attention over it.

A row's result has the same bits however rows are cut into calls. Keys are taken in blocks that begin at multiples of
`KEY_BLOCK`, query rows in blocks of `ROW_BLOCK`, so every product has one shape. The greatest score of a row does not
depend on an order, so it is found first, over all keys; then each block's weights and weighted values are computed and
the blocks are added one after another. Blocks that a row does not see add zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

from noria.api import ELEMENT_TYPES, KVView
from noria.builtin.reference.matmul import ROW_BLOCK, in_row_blocks
from noria.builtin.reference.memory import span_bytes
from noria.builtin.reference.tensors import F32Array, store_f32, to_f32
from noria.builtin.reference.threads import run_all
from noria.builtin.reference.weights import to_shape
from noria.gguf import row_nbytes

KEY_BLOCK = 64
_MOST_SCORES = 1 << 20  # scores held at once, unless one block of queries has more

_Ints = npt.NDArray[np.int32]


def store_cells(kv: KVView, k: F32Array, v: F32Array, positions: _Ints) -> None:
    """Write rows into the cells `positions`. k: [n, n_head_kv, d_k]; v: [n, n_head_kv, d_v]."""
    for values, type, d, offset in ((k, kv.k_type, kv.d_k, 0), (v, kv.v_type, kv.d_v, kv.v_offset)):
        rows = values.reshape(len(positions), kv.n_head_kv * d)
        cells = _cells(kv, type, d, offset)
        if type in ELEMENT_TYPES:
            stored = np.empty(rows.shape, cells.dtype)
            store_f32(stored, type, rows)
            cells[positions] = stored
        else:
            cells[positions] = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type])


def attend(
    q: F32Array,
    kv: KVView,
    positions: _Ints,
    scale: float,
    window: int | None,
    sinks: F32Array | None,
) -> F32Array:
    """Attention of every query over the cells it sees: [n, n_head, d_v]. q: [n, n_head, d_k]; positions: [n]."""
    n, n_head, d_k = q.shape
    n_group = n_head // kv.n_head_kv  # heads that share a KV head
    lowest = 0 if window is None else max(0, int(positions.min()) - window + 1)
    first = lowest // KEY_BLOCK * KEY_BLOCK
    end = int(positions.max()) + 1
    k = _key_blocks(kv, kv.k_type, kv.d_k, 0, first, lowest, end)
    v = _key_blocks(kv, kv.v_type, kv.d_v, kv.v_offset, first, lowest, end)
    k_cells = np.arange(first, first + k.shape[1] * KEY_BLOCK, dtype=np.int32).reshape(-1, KEY_BLOCK, 1)

    # One row a query and head of a group: row i * n_group + h.
    rows = (q * np.float32(scale)).reshape(n, kv.n_head_kv, n_group, d_k).swapaxes(0, 1)
    queries = in_row_blocks(rows.reshape(kv.n_head_kv, n * n_group, d_k))  # [n_head_kv, n_block, ROW_BLOCK, d_k]
    n_block = queries.shape[1]
    sees = np.full(n_block * ROW_BLOCK, positions[0], np.int32)
    sees[: n * n_group] = np.repeat(positions, n_group)
    sees = sees.reshape(n_block, 1, 1, ROW_BLOCK)
    sink = np.full((kv.n_head_kv, n_block * ROW_BLOCK), -np.inf, np.float32)
    if sinks is not None:
        sink[:, : n * n_group] = np.tile(sinks.reshape(kv.n_head_kv, n_group), n)
    sink = sink.reshape(kv.n_head_kv, n_block, ROW_BLOCK)

    out = np.empty((kv.n_head_kv, n_block, ROW_BLOCK, kv.d_v), np.float32)
    step = max(1, _MOST_SCORES // (kv.n_head_kv * k_cells.size * ROW_BLOCK))

    def attend_part(part: slice) -> None:
        n_key_block = (int(sees[part].max()) - first) // KEY_BLOCK + 1
        cells = k_cells[:n_key_block]
        hidden = cells > sees[part]  # [n_block, n_key_block, KEY_BLOCK, ROW_BLOCK]
        if window is not None:
            hidden |= cells <= sees[part] - window
        out[:, part] = _softmax_sum(queries[:, part], k[:, :n_key_block], v[:, :n_key_block], hidden, sink[:, part])

    run_all([partial(attend_part, slice(at, at + step)) for at in range(0, n_block, step)], queries.size * k_cells.size)
    heads = out.reshape(kv.n_head_kv, n_block * ROW_BLOCK, kv.d_v)[:, : n * n_group]
    return heads.reshape(kv.n_head_kv, n, n_group, kv.d_v).swapaxes(0, 1).reshape(n, n_head, kv.d_v)


def _softmax_sum(q: F32Array, k: F32Array, v: F32Array, hidden: npt.NDArray[np.bool_], sink: F32Array) -> F32Array:
    """[n_head_kv, n_block, ROW_BLOCK, d_v].

    q: [n_head_kv, n_block, ROW_BLOCK, d_k]; k, v: [n_head_kv, n_key_block, KEY_BLOCK, d]; hidden: [n_block,
    n_key_block, KEY_BLOCK, ROW_BLOCK]; sink: [n_head_kv, n_block, ROW_BLOCK], -inf where there is none.
    """
    # First the scores, then the weights: [n_head_kv, n_block, n_key_block, KEY_BLOCK, ROW_BLOCK].
    p = np.matmul(k[:, None], q[:, :, None].swapaxes(3, 4))
    np.copyto(p, -np.inf, where=hidden)
    top = np.maximum(p.max(axis=(2, 3)), sink)
    p -= top[:, :, None, None]
    np.exp(p, out=p)
    weights = p.sum(axis=3)  # [n_head_kv, n_block, n_key_block, ROW_BLOCK]
    values = np.matmul(v.swapaxes(2, 3)[:, None], p)  # [n_head_kv, n_block, n_key_block, d_v, ROW_BLOCK]
    weight = np.exp(sink - top)
    value: F32Array = np.zeros_like(values[:, :, 0])
    for block in range(k.shape[1]):
        weight += weights[:, :, block]
        value += values[:, :, block]
    value /= weight[:, :, None]
    return value.swapaxes(2, 3)


def _key_blocks(kv: KVView, type: str, d: int, offset: int, first: int, lowest: int, end: int) -> F32Array:
    """The cells [lowest, end) in blocks from `first` on, zeros around them: [n_head_kv, n_key_block, KEY_BLOCK, d].

    The zeros matter: what lies in other cells may be NaN, and a weight of zero does not make that zero.
    """
    n_key_block = -(-(end - first) // KEY_BLOCK)
    blocks = np.zeros((n_key_block * KEY_BLOCK, kv.n_head_kv, d), np.float32)
    cells = _cells(kv, type, d, offset)[lowest:end]
    if type in ELEMENT_TYPES:
        values = to_f32(cells, type)
    else:
        values = to_shape(np.ascontiguousarray(cells), type, (end - lowest, kv.n_head_kv * d))
    blocks[lowest - first : end - first] = values.reshape(-1, kv.n_head_kv, d)
    return blocks.reshape(n_key_block, KEY_BLOCK, kv.n_head_kv, d).transpose(2, 0, 1, 3)


def _cells(kv: KVView, type: str, d: int, offset: int) -> npt.NDArray[Any]:
    """The K or V rows of all cells, without a copy: numbers of an element type, otherwise bytes. [n_cell, row]."""
    dtype = ELEMENT_TYPES.get(type, np.dtype(np.uint8))
    n = row_nbytes(type, kv.n_head_kv * d) // dtype.itemsize
    return np.ndarray(
        (kv.n_cell, n), dtype, buffer=span_bytes(kv.span), offset=offset, strides=(kv.row_nbytes, dtype.itemsize)
    )
