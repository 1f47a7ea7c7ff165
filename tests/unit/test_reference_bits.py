"""A row's result on the reference has the same bits whatever rows are computed with it, and wherever calls are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import (
    BufferUsage,
    ExpertTable,
    Gating,
    Glu,
    KVView,
    Op,
    OpQuery,
    RopeParams,
    RouterParams,
    Support,
    Tensor,
)
from noria.builtin.reference import OPTIONS, ReferenceBackend, threads
from noria.builtin.reference.kernels import ReferenceKernels
from noria.builtin.reference.matmul import ROW_BLOCK, matmul_rows
from noria.gguf import row_nbytes
from noria.testing.accuracy import assert_close, assert_same_bits
from noria.testing.bench import POISON, Bench
from noria.testing.blocks import encode, random_weights, rounded
from noria.testing.suite.routing import random_ids

N = 70  # rows: several blocks, the last one incomplete
CUTS = {
    "one by one": list(range(N + 1)),
    "sevens": [*range(0, N, 7), N],
    "blocks": [*range(0, N, ROW_BLOCK), N],
    "33": [0, 33, 66, N],
    "uneven": [0, 1, 18, 20, 53, 69, N],
}
Array = NDArray[Any]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()}) as device:
        bench = Bench(device)
        yield bench
        bench.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(list(request.node.name.encode()))


def assert_cuts_do_not_matter(run: Callable[[int, int], Array]) -> None:
    """`run` gives the result of rows [first, end), computed in one call."""
    whole = run(0, N)
    for name, cuts in CUTS.items():
        assert_same_bits(np.concatenate([run(*part) for part in pairwise(cuts)]), whole, f"cut into {name}")


# --- matrix products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_in", [1, 32, 64, 96, 192, 320, 768, 1000, 2048])
@pytest.mark.parametrize("n_out", [1, 2, 7, 16, 60, 257, 512, 1025])
def test_products_do_not_depend_on_company(rng: np.random.Generator, n_in: int, n_out: int) -> None:
    x, w = (rng.normal(0, 1, (n, n_in)).astype(np.float32) for n in (40, n_out))
    whole = matmul_rows(x, w)
    assert_close(whole, x.astype(np.float64) @ w.astype(np.float64).T, 1e-12)
    for shift in (1, 3, 8, 15):
        assert_same_bits(np.roll(matmul_rows(np.roll(x, shift, 0), w), -shift, 0), whole, f"rolled by {shift}")
    assert_same_bits(np.concatenate([matmul_rows(x[i : i + 1], w) for i in range(0, 40, 13)]), whole[::13], "alone")


_ALL_KERNELS = f"""
import numpy as np
from noria.builtin.reference.matmul import matmul_rows
rng = np.random.default_rng(0)
for n_in in (31, 32, 256, 768, 1000):
    for n_out in (1, 2, 8, 17, 60, 256, 700):
        x, w = (rng.standard_normal((n, n_in), dtype=np.float32) for n in ({2 * ROW_BLOCK}, n_out))
        whole = matmul_rows(x, w)
        for shift in range({ROW_BLOCK}):
            moved = np.roll(matmul_rows(np.roll(x, shift, 0), w), -shift, 0)
            assert np.array_equal(moved, whole), (n_in, n_out, shift)
"""


@pytest.mark.parametrize("core", ["Haswell", "Sandybridge", "Nehalem"])
def test_products_on_other_blas_kernels(core: str) -> None:
    """OpenBLAS can be told to be on an older x86 core; other builds of BLAS take no notice."""
    env = {**os.environ, "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _ALL_KERNELS], check=True, env=env, timeout=120)


def test_products_do_not_depend_on_threads(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = rng.normal(0, 1, (N, 96)).astype(np.float32), rng.normal(0, 1, (1500, 96)).astype(np.float32)
    results = []
    for worth, n_thread in ((sys.maxsize, 1), (0, 2), (0, 5)):
        monkeypatch.setattr(threads, "_WORTH_SHARING", worth)
        monkeypatch.setattr(threads, "N_THREAD", n_thread)
        monkeypatch.setattr("noria.builtin.reference.matmul.N_THREAD", n_thread)
        results.append(matmul_rows(x, w))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("type", ["F32", "F16", "Q4_K", "Q6_K", "Q5_0"])
def test_matmul(bench: Bench, rng: np.random.Generator, type: str) -> None:
    w, bias = bench.weights(random_weights(rng, type, (48, 256))), bench.tensor(rng.normal(0, 1, 48))
    x, before = rng.normal(0, 1, (N, 256)), rng.normal(0, 1, (N, 48))

    def run(first: int, end: int) -> Array:
        out = bench.tensor(before[first:end])
        bench.op(Op.MATMUL, out, w, bench.tensor(x[first:end]), bias=bias, accumulate=True)
        return bench.read(out)

    assert_cuts_do_not_matter(run)


# --- one row at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 64, 100, 1000, 4096])
def test_rms_norm(bench: Bench, rng: np.random.Generator, n: int) -> None:
    x, weight = rng.normal(0, 1, (N, n)), bench.tensor(rng.normal(0, 1, n))

    def run(first: int, end: int) -> Array:
        out = bench.out(end - first, n)
        bench.op(Op.RMS_NORM, out, bench.tensor(x[first:end]), weight, 1e-6)
        return bench.read(out)

    assert_cuts_do_not_matter(run)


@pytest.mark.parametrize("neox", [True, False])
def test_rope(bench: Bench, rng: np.random.Generator, neox: bool) -> None:
    values, positions = rng.normal(0, 1, (N, 3, 40)), np.arange(1000, 1000 + N)
    factors = bench.tensor(rng.uniform(1, 8, 17))

    def run(first: int, end: int) -> Array:
        x, at = bench.tensor(values[first:end]), bench.tensor(positions[first:end], "I32")
        bench.op(Op.ROPE, x, at, RopeParams(n_dims=34, base=1e4, neox=neox), factors)
        return bench.read(x)

    assert_cuts_do_not_matter(run)


@pytest.mark.parametrize("kind", list(Glu))
@pytest.mark.parametrize("n_ff", [1, 37, 256])
def test_glu(bench: Bench, rng: np.random.Generator, kind: Glu, n_ff: int) -> None:
    gate, up = rng.normal(0, 3, (2, N, n_ff))

    def run(first: int, end: int) -> Array:
        out = bench.out(end - first, n_ff)
        bench.op(Op.GLU, out, bench.tensor(gate[first:end]), bench.tensor(up[first:end]), kind)
        return bench.read(out)

    assert_cuts_do_not_matter(run)


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("n_expert", [5, 60, 128])
def test_route_topk(bench: Bench, rng: np.random.Generator, gating: Gating, n_expert: int) -> None:
    logits = rng.normal(0, 1, (N, n_expert))

    def run(first: int, end: int) -> Array:
        ids, weights = bench.empty((end - first, 4), "I32"), bench.empty((end - first, 4))
        bench.op(Op.ROUTE_TOPK, ids, weights, bench.tensor(logits[first:end]), RouterParams(gating=gating, scale=2.5))
        return np.concatenate([bench.read(ids).view(np.float32), bench.read(weights)], axis=1)

    assert_cuts_do_not_matter(run)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (50, False), (3, True)])
@pytest.mark.parametrize("n_cached", [0, 100])
def test_attention(
    bench: Bench, rng: np.random.Generator, type: str, window: int | None, sinks: bool, n_cached: int
) -> None:
    """Rows are stored and attend as in prefill by tiles: cells after those of a tile hold NaN."""
    n_head, n_head_kv, d_k, d_v, n_cell = 6, 2, 48, 32, n_cached + N + 5
    row, v_offset = (row_nbytes(type, n_head_kv * d) for d in (d_k + d_v, d_k))
    q, k, v = (rng.normal(0, 1, (n_cached + N, *s)) for s in ((n_head, d_k), (n_head_kv, d_k), (n_head_kv, d_v)))
    sink = bench.tensor(rng.normal(0, 1, n_head)) if sinks else None

    def cache() -> KVView:
        span = bench.put(np.full(n_cell * row, POISON, np.uint8), BufferUsage.KV)
        shape = {"n_cell": n_cell, "n_head_kv": n_head_kv, "d_k": d_k, "d_v": d_v, "row_nbytes": row}
        return KVView(span=span, k_type=type, v_type=type, v_offset=v_offset, **shape)

    def store(kv: KVView, first: int, end: int) -> Tensor:
        positions = bench.tensor(np.arange(first, end), "I32")
        bench.op(Op.KV_STORE, kv, bench.tensor(k[first:end]), bench.tensor(v[first:end]), positions)
        return positions

    def run(cuts: list[int]) -> tuple[Array, Array]:
        kv, results = cache(), []
        if n_cached:
            store(kv, 0, n_cached)
        for first, end in pairwise(n_cached + cut for cut in cuts):
            positions, out = store(kv, first, end), bench.out(end - first, n_head, d_v)
            args = {"n_kv": end, "scale": d_k**-0.5, "window": window, "sinks": sink}
            bench.op(Op.ATTENTION, out, bench.tensor(q[first:end]), kv, positions, **args)
            results.append(bench.read(out))
        return np.concatenate(results), bench.get(kv.span)

    whole, cells = run([0, N])
    assert np.all(np.isfinite(whole))
    for name, cuts in CUTS.items():
        got, got_cells = run(cuts)
        assert_same_bits(got_cells, cells, f"cells, cut into {name}")
        assert_same_bits(got, whole, f"cut into {name}")


def test_attention_by_parts(bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many scores are held at once."""
    n_head, d, row = 4, 16, 4 * 4 * 16 * 2
    span = bench.put(rng.normal(0, 1, N * row // 4).astype(np.float32).view(np.uint8), BufferUsage.KV)
    shape = {"n_cell": N, "n_head_kv": n_head, "d_k": d, "d_v": d, "row_nbytes": row, "v_offset": row // 2}
    kv = KVView(span=span, k_type="F32", v_type="F32", **shape)
    q, positions = bench.tensor(rng.normal(0, 1, (N, n_head, d))), bench.tensor(np.arange(N), "I32")
    results = []
    for most in (1, 1 << 13, 1 << 20):
        monkeypatch.setattr("noria.builtin.reference.attention._MOST_SCORES", most)
        out = bench.out(N, n_head, d)
        bench.op(Op.ATTENTION, out, q, kv, positions, n_kv=N, scale=0.25)
        results.append(bench.read(out))
    assert_same_bits(results[0], results[2])
    assert_same_bits(results[1], results[2])


# --- experts ---------------------------------------------------------------------------------------------------------


class Layer:
    """Experts of one layer and a routed batch."""

    n_expert, n_embd, n_ff = 6, 64, 96

    def __init__(self, bench: Bench, rng: np.random.Generator) -> None:
        self.bench = bench
        self.weights = [
            random_weights(rng, type, shape)
            for type, shape in (
                ("Q8_0", (self.n_expert, self.n_ff, self.n_embd)),
                ("Q8_0", (self.n_expert, self.n_ff, self.n_embd)),
                ("Q5_0", (self.n_expert, self.n_embd, self.n_ff)),
            )
        ]
        self.x = rng.normal(0, 1, (N, self.n_embd)).astype(np.float32)
        self.ids = random_ids(rng, N, self.n_expert, 3)
        self.choice_weights = rng.uniform(0, 1, self.ids.shape).astype(np.float32)

    def tables(self, experts: list[int] | None = None, n_spans: int = 1) -> list[ExpertTable]:
        return [self.bench.table(w, experts, n_spans) for w in self.weights]

    def run(self, first: int, end: int, *calls: list[ExpertTable], chunk_rows: int = 40) -> Array:
        """What `expert_ffn` with each of these tables in turn makes of zeros, for tokens [first, end)."""
        bench = self.bench
        rows = bench.rows(self.ids[first:end], self.choice_weights[first:end], self.n_expert)
        acc, x = bench.tensor(np.zeros((end - first, self.n_embd))), bench.tensor(self.x[first:end])
        for tables in calls:
            bench.op(Op.EXPERT_FFN, acc, x, *tables, rows, (0, self.n_expert), chunk_rows, Glu.SWIGLU)
        return bench.read(acc)


def test_expert_ffn_of_cut_batches(bench: Bench, rng: np.random.Generator) -> None:
    """A token's sum does not depend on which other tokens its experts work on."""
    layer = Layer(bench, rng)
    tables = layer.tables()
    assert_cuts_do_not_matter(lambda first, end: layer.run(first, end, tables))


def test_expert_ffn_is_its_parts(bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused op gives the bits of mul_mat_id, glu and combine, in chunks of any size."""
    layer = Layer(bench, rng)
    fused = [layer.run(0, N, layer.tables(n_spans=n), chunk_rows=c) for n, c in ((1, 7), (4, 1000))]
    supports = ReferenceKernels.supports

    def without_ffn(kernels: ReferenceKernels, query: OpQuery) -> Support:
        return Support.MISSING if query.op is Op.EXPERT_FFN else supports(kernels, query)

    monkeypatch.setattr(ReferenceKernels, "supports", without_ffn)
    parts = layer.run(0, N, layer.tables(), chunk_rows=33)
    for result in fused:
        assert_same_bits(result, parts)


def test_expert_ffn_on_many_threads(bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(bench, rng)
    alone = layer.run(0, N, layer.tables())
    monkeypatch.setattr(threads, "_WORTH_SHARING", 0)
    monkeypatch.setattr(threads, "N_THREAD", 4)
    assert_same_bits(layer.run(0, N, layer.tables()), alone)


def test_tables_in_ascending_order_give_the_bits_of_one(bench: Bench, rng: np.random.Generator) -> None:
    """Tables that share no expert, with holes, in device and host memory."""
    layer = Layer(bench, rng)
    parts = [layer.tables([0, 1], n_spans=2), layer.tables([2]), layer.tables([3, 4, 5], n_spans=3)]
    assert_same_bits(layer.run(0, N, *parts), layer.run(0, N, layer.tables()))


def test_a_token_may_choose_an_expert_twice(bench: Bench, rng: np.random.Generator) -> None:
    """Forced routing may say so; both rows count."""
    layer = Layer(bench, rng)
    layer.ids[:, 1] = layer.ids[:, 0]
    twice = layer.run(0, N, layer.tables())
    layer.choice_weights[:, 0] += layer.choice_weights[:, 1]
    layer.choice_weights[:, 1] = 0
    assert_close(twice, layer.run(0, N, layer.tables()), 1e-12)


# --- 16-bit activations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["F16", "BF16"])
def test_narrow_activations_are_rounded_results(bench: Bench, rng: np.random.Generator, type: str) -> None:
    """An op on 16-bit activations computes in f32 and rounds once: it stands in for backends that have such."""
    w = bench.weights(random_weights(rng, "Q8_0", (40, 64)))
    x = rounded(rng.normal(0, 1, (20, 64)), type)
    wide, narrow = bench.out(20, 40), bench.empty((20, 40), type)
    bench.op(Op.MATMUL, wide, w, bench.tensor(x))
    bench.op(Op.MATMUL, narrow, w, bench.tensor(x, type))
    assert_same_bits(bench.get(narrow.span), encode(bench.read(wide), type))
