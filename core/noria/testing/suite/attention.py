"""Cases of the KV cache: writing to it and attending over it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import BufferUsage, KVView, Op, align_up
from noria.gguf import row_nbytes
from noria.runtime.kv_cache import ROW_ALIGNMENT
from noria.testing import cases, expected
from noria.testing.accuracy import ELEMENT_NMSE, SUM_NMSE, assert_close, assert_same_bits, nmse
from noria.testing.bench import POISON, Bench
from noria.testing.blocks import decode, encode, rounded
from noria.testing.fixtures import ConformanceSuite

# Where K and V have 16 bits or fewer, matrix units may round q and the weights of the softmax to 16 bits too.
NARROW_KV_NMSE = 1e-6
ROPE_NMSE = 1e-8  # f32 angles of some hundred radians are known to 1e-5
EPS = 1e-6


class Cells:
    """The bytes of a KV cache on the host, poison at first.

    Attributes:
        data: uint8 [n_cell, row_nbytes].
    """

    def __init__(self, case: cases.AttentionCase, n_cell: int) -> None:
        self.case = case
        self.k_nbytes = row_nbytes(case.k_type, case.n_head_kv * case.d_k)
        self.v_nbytes = row_nbytes(case.v_type, case.n_head_kv * case.d_v)
        padded = align_up(self.k_nbytes, ROW_ALIGNMENT)
        self.v_offset = 0 if case.v_in_k else padded
        row = padded if case.v_in_k else padded + align_up(self.v_nbytes, ROW_ALIGNMENT)
        self.data = np.full((n_cell, row), POISON, np.uint8)

    def k(self) -> NDArray[np.uint8]:
        return self.data[:, : self.k_nbytes]

    def v(self) -> NDArray[np.uint8]:
        return self.data[:, self.v_offset : self.v_offset + self.v_nbytes]

    def values(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K [n_cell, n_head_kv, d_k] and V [n_cell, n_head_kv, d_v] as numbers."""
        c, n = self.case, len(self.data)
        return (
            decode(np.ascontiguousarray(self.k()).reshape(-1), c.k_type, (n, c.n_head_kv, c.d_k)),
            decode(np.ascontiguousarray(self.v()).reshape(-1), c.v_type, (n, c.n_head_kv, c.d_v)),
        )

    def fill(self, rng: np.random.Generator, n: int) -> None:
        """Random numbers in the first `n` cells."""
        c = self.case
        if not c.v_in_k:
            v = rng.normal(0, 1, (n, c.n_head_kv * c.d_v))
            self.v()[:n] = encode(v, c.v_type).reshape(n, -1)
        self.k()[:n] = encode(rng.normal(0, 1, (n, c.n_head_kv * c.d_k)), c.k_type).reshape(n, -1)

    def view(self, bench: Bench) -> KVView:
        """A copy on the device."""
        return KVView(
            span=bench.put(self.data.reshape(-1), BufferUsage.KV),
            k_type=self.case.k_type,
            v_type=self.case.v_type,
            n_cell=len(self.data),
            n_head_kv=self.case.n_head_kv,
            d_k=self.case.d_k,
            d_v=self.case.d_v,
            row_nbytes=self.data.shape[1],
            v_offset=self.v_offset,
        )


def require_kv_types(bench: Bench, case: cases.AttentionCase) -> None:
    for type in (case.k_type, case.v_type):
        if type not in bench.caps.kv_types:
            pytest.skip(f"caps.kv_types has no {type}")


class AttentionCases(ConformanceSuite):
    """attention, kv_store and rope_store. Cells that no row may see hold NaN."""

    @pytest.mark.parametrize("case", cases.ATTENTION, ids=str)
    def test_attention(self, bench: Bench, rng: np.random.Generator, case: cases.AttentionCase) -> None:
        require_kv_types(bench, case)
        n_kv = case.n_cached + case.n_rows
        cells = Cells(case, n_kv + case.slack)
        cells.fill(rng, n_kv)
        q = bench.normal(rng, case.n_rows, case.n_head, case.d_k)
        positions = np.arange(case.n_cached, n_kv, dtype=np.int32)
        sinks = rng.normal(0, 2, case.n_head).astype(np.float32) if case.sinks else None
        out = bench.out(case.n_rows, case.n_head, case.d_v)
        bench.op(
            Op.ATTENTION,
            out,
            bench.act(q),
            cells.view(bench),
            bench.tensor(positions, "I32"),
            n_kv=n_kv + case.slack,
            scale=case.d_k**-0.5,
            window=case.window,
            sinks=None if sinks is None else bench.tensor(sinks),
        )
        want = expected.attention(q, *cells.values(), positions, case.d_k**-0.5, case.window, sinks)
        exact = case.k_type == case.v_type == "F32"
        assert_close(bench.read(out), want, max(SUM_NMSE[bench.activation], 0 if exact else NARROW_KV_NMSE))

    def test_attention_of_large_scores(self, bench: Bench, rng: np.random.Generator) -> None:
        """Scores of some hundreds do not overflow, and the best cell takes all."""
        case = cases.AttentionCase(n_rows=7, n_cached=90)
        require_kv_types(bench, case)
        cells = Cells(case, 97)
        cells.fill(rng, 97)
        q, positions = bench.normal(rng, 7, 4, 64), np.arange(90, 97, dtype=np.int32)
        out = bench.out(7, 4, 64)
        args = (out, bench.act(q), cells.view(bench), bench.tensor(positions, "I32"))
        bench.op(Op.ATTENTION, *args, n_kv=97, scale=20.0)
        want = expected.attention(q, *cells.values(), positions, 20.0, None, None)
        assert_close(bench.read(out), want, max(SUM_NMSE[bench.activation], NARROW_KV_NMSE))

    @pytest.mark.parametrize("case", cases.KV_STORE, ids=str)
    def test_kv_store(self, bench: Bench, rng: np.random.Generator, case: cases.AttentionCase) -> None:
        """Rows go to their cells, rounded no worse than gguf's quantizer rounds; other cells keep their bytes."""
        require_kv_types(bench, case)
        cells = Cells(case, 50)
        positions = rng.permutation(50)[: case.n_rows].astype(np.int32)
        k = bench.normal(rng, case.n_rows, case.n_head_kv, case.d_k)
        v = k[:, :, : case.d_v].copy() if case.v_in_k else bench.normal(rng, case.n_rows, case.n_head_kv, case.d_v)
        kv = cells.view(bench)
        bench.op(Op.KV_STORE, kv, bench.act(k), bench.act(v), bench.tensor(positions, "I32"))
        before = cells.data
        cells.data = bench.get(kv.span).reshape(before.shape)
        others = np.setdiff1d(np.arange(50), positions)
        assert np.array_equal(cells.data[others], before[others]), "cells that are not in `positions` have changed"
        for name, type, stored, want in zip("kv", (case.k_type, case.v_type), cells.values(), (k, v), strict=True):
            got, best = stored[positions], rounded(want, type)
            if type in ("F32", "F16", "BF16"):
                assert_same_bits(np.ascontiguousarray(got), best, name)
            else:
                limit = 1.05 * nmse(best.astype(np.float64), want)
                error = nmse(got.astype(np.float64), want)
                assert error <= limit, f"{name}: NMSE {error:.2e} after rounding to {type}, gguf's is {limit:.2e}"

    @pytest.mark.parametrize("case", cases.ROPE_STORE, ids=str)
    def test_rope_store(self, bench: Bench, rng: np.random.Generator, case: cases.RopeStoreCase) -> None:
        """Heads are normalized and turned, and stored no worse than rounded; other cells keep their bytes."""
        c = case.cells
        require_kv_types(bench, c)
        cells = Cells(c, 50)
        positions = np.arange(11, 11 + c.n_rows, dtype=np.int32)
        q, k = (bench.normal(rng, c.n_rows, n, c.d_k) for n in (c.n_head, c.n_head_kv))
        v = bench.normal(rng, c.n_rows, c.n_head_kv, c.d_v)
        norms = [rng.normal(1, 0.3, c.d_k).astype(np.float32) if case.norm else None for _ in "qk"]
        factors = rng.uniform(1, 4, case.params.n_dims // 2).astype(np.float32) if case.factors else None
        tensors = [None if values is None else bench.tensor(values) for values in (*norms, factors)]
        tq, kv = bench.act(q), cells.view(bench)
        bench.op(
            Op.ROPE_STORE,
            *(tq, bench.act(k), bench.act(v), kv, bench.tensor(positions, "I32"), case.params),
            q_norm=tensors[0],
            k_norm=tensors[1],
            eps=EPS,
            freq_factors=tensors[2],
        )
        want = [
            expected.rope(x if w is None else expected.rms_norm(x, w, EPS), positions, case.params, factors)
            for x, w in zip((q, k), norms, strict=True)
        ]
        before = cells.data
        cells.data = bench.get(kv.span).reshape(before.shape)
        others = np.setdiff1d(np.arange(50), positions)
        assert np.array_equal(cells.data[others], before[others]), "cells that are not in `positions` have changed"
        limit = max(2 * ELEMENT_NMSE[bench.activation], ROPE_NMSE)
        assert_close(bench.read(tq), want[0], limit, "q")
        kinds = ("k", c.k_type, want[1]), ("v", c.v_type, v.astype(np.float64))
        for (name, type, values), stored in zip(kinds, cells.values(), strict=True):
            of_type = nmse(rounded(values.astype(np.float32), type).astype(np.float64), values)
            assert_close(stored[positions], values, limit + 1.2 * of_type, name)

    def test_kv_store_then_attention(self, bench: Bench, rng: np.random.Generator) -> None:
        """Token after token is stored and attends, by positions that a recorded program reads on the device."""
        case, n = cases.AttentionCase(n_rows=1), 5
        require_kv_types(bench, case)
        kv = Cells(case, n).view(bench)
        q, k = bench.normal(rng, n, 4, 64), bench.normal(rng, n, 2, 64)
        v = bench.normal(rng, n, 2, 64)
        tq, tk, tv = bench.act(q[:1]), bench.act(k[:1]), bench.act(v[:1])
        position, out = bench.tensor(np.array([0]), "I32"), bench.out(1, 4, 64)
        bench.op(Op.KV_STORE, kv, tk, tv, position)  # these two skip the test if the ops are missing
        scratch = bench.scratch(Op.ATTENTION, out, tq, kv, position, n_kv=n, scale=0.125)
        kernels = bench.device.kernels
        with bench.queue.program("step") as program:
            kernels.kv_store(bench.queue, kv, tk, tv, position)
            kernels.attention(bench.queue, out, tq, kv, position, n_kv=n, scale=0.125, scratch=scratch)
        k_stored, v_stored = rounded(k, case.k_type), rounded(v, case.v_type)
        for i in range(n):
            for tensor, values in ((tq, q), (tk, k), (tv, v)):
                bench.queue.copy_d2d(tensor.span, bench.act(values[i : i + 1]).span)
            bench.queue.copy_d2d(position.span, bench.tensor(np.array([i]), "I32").span)
            bench.queue.run(program)
            want = expected.attention(q[i : i + 1], k_stored, v_stored, np.array([i]), 0.125, None, None)
            assert_close(bench.read(out), want, max(SUM_NMSE[bench.activation], NARROW_KV_NMSE), f"token {i}")
