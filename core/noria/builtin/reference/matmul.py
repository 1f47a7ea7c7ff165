"""Matrix products whose rows have the same bits whatever other rows are computed with them.

BLAS picks its kernels by the shape of a product, and inside one by the place of a row, so the sum behind one number may
be added up in another order when its row comes in other company. Two rules prevent that. Rows come in blocks of exactly
`ROW_BLOCK`, the last one filled up with zeros, so the shape is always the same. And the block is the *columns* of the
product `w @ block.T`, so its rows are lanes of one vector and all of them go the same way.

This is measured, not promised by BLAS. With the block as the rows of `block @ w.T`, 16 rows already give other bits at
other places on OpenBLAS's Haswell kernels, and so do 24 or more columns of `w @ block.T`. 16 columns hold on all x86-64
kernels in NumPy's OpenBLAS 0.3.31 (Katmai, Nehalem, Sandybridge, Haswell, SkylakeX, forced by OPENBLAS_CORETYPE), and
prefill is nearly as fast as in one product. The unit tests check it on whatever runs them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from noria.builtin.reference.tensors import F32Array
from noria.builtin.reference.threads import N_THREAD, run_all

ROW_BLOCK = 16
_OUT_BLOCK = 512  # outputs of one product at least, where there are so many; cut alike for any number of threads


def in_row_blocks(x: F32Array) -> F32Array:
    """`[..., n, n_in]` as `[..., n_block, ROW_BLOCK, n_in]`, filled up with zero rows; a view if there are none."""
    *outer, n, n_in = x.shape
    n_block = -(-n // ROW_BLOCK)
    if n % ROW_BLOCK:
        blocks = np.zeros((*outer, n_block * ROW_BLOCK, n_in), np.float32)
        blocks[..., :n, :] = x
        x = blocks
    return np.ascontiguousarray(x).reshape(*outer, n_block, ROW_BLOCK, n_in)


def matmul_rows(x: F32Array, w: F32Array) -> F32Array:
    """x @ w.T, contiguous [n, n_out]. x: [n, n_in]; w: [n_out, n_in], contiguous."""
    n, (n_out, n_in) = len(x), w.shape
    if n_out == 1:  # a matrix-vector product is another function of BLAS, where the place of a row matters
        return matmul_rows(x, np.repeat(w, 2, axis=0))[:, :1].copy()
    blocks = in_row_blocks(x).transpose(0, 2, 1)
    n_block = len(blocks)
    y = np.empty((n_block, n_out, ROW_BLOCK), np.float32)
    n_part = max(1, n_out // _OUT_BLOCK)
    per_task = max(1, n_block * n_part // (2 * N_THREAD))
    tasks = []
    for i in range(n_part):
        outs = slice(i * _OUT_BLOCK, (i + 1) * _OUT_BLOCK if i + 1 < n_part else n_out)
        for first in range(0, n_block, per_task):
            some = slice(first, first + per_task)
            tasks.append(partial(np.matmul, w[outs], blocks[some], out=y[some, outs]))
    run_all(tasks, y.size * n_in)
    if n_block == 1:
        return np.ascontiguousarray(y[0, :, :n].T)
    return y.transpose(0, 2, 1).reshape(-1, n_out)[:n]
