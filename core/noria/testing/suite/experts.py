"""Cases of the ops that compute experts: mul_mat_id, combine, expert_ffn."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import ExpertRows, ExpertTable, Glu, Op, RowWindow, Tensor
from noria.testing import cases, expected
from noria.testing.accuracy import ELEMENT_NMSE, SUM_NMSE, assert_close, assert_same_bits
from noria.testing.bench import Bench
from noria.testing.blocks import Weights, random_weights
from noria.testing.fixtures import ConformanceSuite
from noria.testing.suite.routing import random_ids

N_EXPERT, N_OUT, N_EMBD, N_FF = 8, 40, 256, 256


class Routed:
    """A batch that has been routed: activations, choices and their weights, on the host and on the device."""

    def __init__(
        self, bench: Bench, rng: np.random.Generator, ids: NDArray[np.int32], n_expert: int = N_EXPERT
    ) -> None:
        self.ids, self.n_expert = ids, n_expert
        self.choice_weights = rng.uniform(0.05, 1, ids.shape).astype(np.float32)
        self.pairs, self.offsets, _ = expected.sort_rows(ids, n_expert)
        self.rows: ExpertRows = bench.rows(ids, self.choice_weights, n_expert)
        self.x = bench.normal(rng, len(ids), N_EMBD)

    @property
    def all(self) -> RowWindow:
        """The window of all rows."""
        return RowWindow(first_expert=0, end_expert=self.n_expert, first_row=0, n_rows=self.ids.size)

    def rows_of(self, window: RowWindow, experts: Iterable[int] | None = None) -> list[tuple[int, int, int, int]]:
        """(row in the window, expert, token, choice) of the rows it holds, of these experts."""
        start = int(self.offsets[window.first_expert]) + window.first_row
        end = min(start + window.n_rows, int(self.offsets[window.end_expert]))
        wanted = set(range(self.n_expert) if experts is None else experts)
        found = []
        for row in range(start, end):
            token, choice = divmod(int(self.pairs[row]), self.ids.shape[1])
            if (e := int(self.ids[token, choice])) in wanted:
                found.append((row - start, e, token, choice))
        return found


class ExpertCases(ConformanceSuite):
    """Experts lie anywhere, come in parts, and the result is that of all of them lying still."""

    # --- mul_mat_id ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("n_tokens", "n_expert", "n_expert_used"), cases.ROUTED)
    @pytest.mark.parametrize("type", cases.WEIGHT_TYPES)
    def test_mul_mat_id(
        self, bench: Bench, rng: np.random.Generator, type: str, n_tokens: int, n_expert: int, n_expert_used: int
    ) -> None:
        """All rows of a batch, each by the experts of its token."""
        w = random_weights(rng, type, (n_expert, N_OUT, N_EMBD))
        routed = Routed(bench, rng, random_ids(rng, n_tokens, n_expert, n_expert_used), n_expert)
        self.mul_mat_id(bench, w, routed, routed.all)

    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_mul_mat_id_of_rows(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """The down projection: row r of the result comes from row r of the input."""
        w = random_weights(rng, type, (N_EXPERT, N_OUT, N_FF))
        routed = Routed(bench, rng, random_ids(rng, 33, N_EXPERT, 2))
        self.mul_mat_id(bench, w, routed, routed.all, x=bench.normal(rng, routed.ids.size, N_FF))

    @pytest.mark.parametrize("n_tokens", [1, 70])
    @pytest.mark.parametrize("expert", [0, 5, 7])
    def test_mul_mat_id_of_one_expert(self, bench: Bench, rng: np.random.Generator, expert: int, n_tokens: int) -> None:
        """All rows go to one expert and the others have none."""
        w = random_weights(rng, "Q8_0", (N_EXPERT, N_OUT, N_EMBD))
        routed = Routed(bench, rng, np.full((n_tokens, 1), expert, np.int32))
        self.mul_mat_id(bench, w, routed, routed.all)

    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_mul_mat_id_of_absent_experts(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """Rows of experts that are not in the table keep their bytes."""
        w = random_weights(rng, type, (N_EXPERT, N_OUT, N_EMBD))
        routed = Routed(bench, rng, random_ids(rng, 33, N_EXPERT, 4))
        self.mul_mat_id(bench, w, routed, routed.all, experts=[0, 3, 4])
        self.mul_mat_id(bench, w, routed, routed.all, experts=[])

    @pytest.mark.parametrize("n_spans", [2, 3, 4])
    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_mul_mat_id_of_several_spans(self, bench: Bench, rng: np.random.Generator, type: str, n_spans: int) -> None:
        """Experts lie in several buffers, one of them in host memory where the device can gather, with gaps."""
        w = random_weights(rng, type, (N_EXPERT, N_OUT, N_EMBD))
        for n_tokens in (1, 33):
            routed = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 4))
            self.mul_mat_id(bench, w, routed, routed.all, n_spans=n_spans)

    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_mul_mat_id_of_windows(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """Some experts, rows from the middle, more room than rows, and none at all."""
        w = random_weights(rng, type, (N_EXPERT, N_OUT, N_EMBD))
        ids = random_ids(rng, 50, N_EXPERT - 1, 3)
        ids[ids >= 4] += 1  # nobody chooses expert 4
        routed = Routed(bench, rng, ids)
        for first, end, row, n_rows in ((2, 6, 0, 60), (0, 8, 17, 31), (1, 3, 5, 200), (4, 5, 0, 8), (0, 8, 150, 10)):
            window = RowWindow(first_expert=first, end_expert=end, first_row=row, n_rows=n_rows)
            self.mul_mat_id(bench, w, routed, window)
            self.mul_mat_id(bench, w, routed, window, x=bench.normal(rng, n_rows, N_EMBD))

    @pytest.mark.parametrize("n_tokens", [1, 33])
    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_mul_mat_id_in_parts(self, bench: Bench, rng: np.random.Generator, type: str, n_tokens: int) -> None:
        """Calls with tables that share no expert give together the bits of one call."""
        w = random_weights(rng, type, (N_EXPERT, N_OUT, N_EMBD))
        routed = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 4))
        whole, parts = (bench.out(routed.ids.size, N_OUT) for _ in range(2))
        x = bench.act(routed.x)
        bench.op(Op.MUL_MAT_ID, whole, bench.table(w), x, routed.rows, routed.all, by_token=True)
        for experts in ([6, 1], [0, 2, 3], [4], [5, 7]):
            table = bench.table(w, experts)
            bench.op(Op.MUL_MAT_ID, parts, table, x, routed.rows, routed.all, by_token=True)
        assert_same_bits(bench.read(parts), bench.read(whole))

    def mul_mat_id(
        self,
        bench: Bench,
        w: Weights,
        routed: Routed,
        window: RowWindow,
        *,
        x: NDArray[np.float32] | None = None,
        experts: Iterable[int] | None = None,
        n_spans: int = 1,
    ) -> None:
        """Run and compare one mul_mat_id, of the rows of tokens unless there is an `x` of rows."""
        out = bench.out(window.n_rows, w.shape[1])
        before = bench.get(out.span).reshape(window.n_rows, -1)
        table, source = bench.table(w, experts, n_spans), bench.act(routed.x if x is None else x)
        bench.op(Op.MUL_MAT_ID, out, table, source, routed.rows, window, by_token=x is None)
        got, after = bench.read(out), bench.get(out.span).reshape(before.shape)
        here = routed.rows_of(window, experts)
        there = sorted({row for row, *_ in routed.rows_of(window)} - {row for row, *_ in here})
        assert np.array_equal(after[there], before[there]), "rows of experts that are not in the table have changed"
        want = np.zeros(got.shape)
        for e in {e for _, e, _, _ in here}:
            mine = [(row, token) for row, other, token, _ in here if other == e]
            inputs = routed.x[[token for _, token in mine]] if x is None else x[[row for row, _ in mine]]
            want[[row for row, _ in mine]] = expected.matmul(inputs, w.values[e])
        computed = [row for row, *_ in here]
        assert_close(got[computed], want[computed], SUM_NMSE[bench.activation])

    # --- combine -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("experts", [None, [1, 2, 6], []], ids=["all", "some", "none"])
    @pytest.mark.parametrize("n_tokens", [1, 33])
    def test_combine(self, bench: Bench, rng: np.random.Generator, n_tokens: int, experts: list[int] | None) -> None:
        """Rows are added to what their tokens have, each with the weight of its choice; absent experts add nothing."""
        routed = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 4))
        before, y = rng.normal(0, 1, (n_tokens, N_EMBD)).astype(np.float32), bench.normal(rng, routed.ids.size, N_EMBD)
        want = before.astype(np.float64)
        here = routed.rows_of(routed.all, experts)
        for row, _, token, choice in here:
            want[token] += routed.choice_weights[token, choice] * y[row].astype(np.float64)
        y[[row for row in range(len(y)) if row not in {row for row, *_ in here}]] = np.nan
        acc, table = bench.tensor(before), self.any_table(bench, rng, experts)
        bench.op(Op.COMBINE, acc, bench.act(y), table, routed.rows, routed.all)
        assert_close(bench.read(acc), want, ELEMENT_NMSE["F32"])

    @pytest.mark.parametrize("n_tokens", [1, 33])
    def test_combine_of_one_expert(self, bench: Bench, rng: np.random.Generator, n_tokens: int) -> None:
        """A shared expert: a mixture of one, every row with a weight of its own."""
        routed = Routed(bench, rng, np.zeros((n_tokens, 1), np.int32), n_expert=1)
        before, y = (rng.normal(0, 1, (n_tokens, N_EMBD)).astype(np.float32), bench.normal(rng, n_tokens, N_EMBD))
        acc = bench.tensor(before)
        table = bench.table(random_weights(rng, "F32", (1, N_EMBD, N_FF)))
        bench.op(Op.COMBINE, acc, bench.act(y), table, routed.rows, routed.all)
        want = before + routed.choice_weights.astype(np.float64) * y.astype(np.float64)
        assert_close(bench.read(acc), want, ELEMENT_NMSE["F32"])

    @pytest.mark.parametrize("n_tokens", [1, 33])
    def test_combine_in_windows(self, bench: Bench, rng: np.random.Generator, n_tokens: int) -> None:
        """Windows in ascending order give the bits of one, wherever the rows are cut."""
        routed = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 4))
        n_rows = routed.ids.size
        before, y = rng.normal(0, 1, (n_tokens, N_EMBD)).astype(np.float32), bench.normal(rng, n_rows, N_EMBD)
        table, t_y = self.any_table(bench, rng), bench.act(y)
        whole = bench.tensor(before)
        bench.op(Op.COMBINE, whole, t_y, table, routed.rows, routed.all)
        for _ in range(4):
            cuts = sorted({0, n_rows, *(int(c) for c in rng.integers(0, n_rows + 1, 5))})
            acc = bench.tensor(before)
            for first, end in pairwise(cuts):
                window = RowWindow(first_expert=0, end_expert=N_EXPERT, first_row=first, n_rows=end - first)
                bench.op(Op.COMBINE, acc, t_y.rows(first, end), table, routed.rows, window)
            assert_same_bits(bench.read(acc), bench.read(whole), f"rows cut at {cuts}")
        acc = bench.tensor(before)
        for e in range(N_EXPERT):
            first, end = int(routed.offsets[e]), int(routed.offsets[e + 1])
            if end > first:
                window = RowWindow(first_expert=e, end_expert=e + 1, first_row=0, n_rows=end - first)
                bench.op(Op.COMBINE, acc, t_y.rows(first, end), table, routed.rows, window)
        assert_same_bits(bench.read(acc), bench.read(whole), "one expert after another")

    def any_table(self, bench: Bench, rng: np.random.Generator, experts: list[int] | None = None) -> ExpertTable:
        """A table of which only the presence of experts matters."""
        return bench.table(random_weights(rng, "F32", (N_EXPERT, N_EMBD, 32)), experts)

    # --- expert_ffn ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("n_tokens", [1, 33])
    @pytest.mark.parametrize(("type", "down_type"), cases.FFN_TYPES)
    def test_expert_ffn(self, bench: Bench, rng: np.random.Generator, type: str, down_type: str, n_tokens: int) -> None:
        """Gate, up, activation, down and the sum over a token's experts, in one."""
        routed = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 2))
        self.ffn(bench, Ffn(rng, type, down_type), routed)

    @pytest.mark.parametrize("kind", list(Glu))
    @pytest.mark.parametrize("experts", [None, [1, 2, 6], []], ids=["all", "some", "none"])
    def test_expert_ffn_of_absent_experts(
        self, bench: Bench, rng: np.random.Generator, experts: list[int] | None, kind: Glu
    ) -> None:
        """Experts that are not in the tables add nothing."""
        routed = Routed(bench, rng, random_ids(rng, 33, N_EXPERT, 4))
        self.ffn(bench, Ffn(rng, "Q4_K", "Q6_K", kind), routed, experts=experts)

    @pytest.mark.parametrize("chunk_rows", [1, 5, 32, 4096])
    def test_expert_ffn_in_chunks(self, bench: Bench, rng: np.random.Generator, chunk_rows: int) -> None:
        """More rows than the scratch has room for, down to one at a time."""
        routed = Routed(bench, rng, random_ids(rng, 20, N_EXPERT, 4))
        self.ffn(bench, Ffn(rng, "Q8_0", "Q8_0"), routed, chunk_rows=chunk_rows)

    @pytest.mark.parametrize("chunk_rows", [7, 1000])
    @pytest.mark.parametrize("n_tokens", [1, 33])
    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_expert_ffn_in_units(
        self, bench: Bench, rng: np.random.Generator, type: str, n_tokens: int, chunk_rows: int
    ) -> None:
        """Ranges of experts, one after another, give the bits of all experts at once, wherever they are cut."""
        routed, ffn = Routed(bench, rng, random_ids(rng, n_tokens, N_EXPERT, 4)), Ffn(rng, type, type)
        whole = ffn.run(bench, routed, [(0, N_EXPERT)], chunk_rows)
        for cuts in ((0, 3, 8), (0, 1, 2, 4, 5, 8)):
            assert_same_bits(ffn.run(bench, routed, list(pairwise(cuts)), chunk_rows), whole, f"cut at {list(cuts)}")

    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_expert_ffn_from_anywhere(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """Experts from four buffers give the bits of experts from one."""
        routed, ffn = Routed(bench, rng, random_ids(rng, 33, N_EXPERT, 4)), Ffn(rng, type, type)
        one, four = (ffn.run(bench, routed, [(0, N_EXPERT)], 64, n_spans=n) for n in (1, 4))
        assert_same_bits(four, one)

    def ffn(
        self,
        bench: Bench,
        ffn: Ffn,
        routed: Routed,
        *,
        experts: list[int] | None = None,
        chunk_rows: int = 1000,
    ) -> None:
        """Run and compare one expert_ffn."""
        got = ffn.run(bench, routed, [(0, N_EXPERT)], chunk_rows, experts)
        present = set(range(N_EXPERT) if experts is None else experts)
        gate, up, down = (w.values for w in (ffn.gate, ffn.up, ffn.down))
        want = 1 + expected.expert_ffn(routed.x, gate, up, down, routed.ids, routed.choice_weights, ffn.kind, present)
        assert_close(got, want, SUM_NMSE[bench.activation])


class Ffn:
    """The experts of a layer."""

    def __init__(self, rng: np.random.Generator, type: str, down_type: str, kind: Glu = Glu.SWIGLU) -> None:
        self.gate, self.up = (random_weights(rng, type, (N_EXPERT, N_FF, N_EMBD)) for _ in range(2))
        self.down = random_weights(rng, down_type, (N_EXPERT, N_EMBD, N_FF))
        self.kind = kind

    def run(
        self,
        bench: Bench,
        routed: Routed,
        ranges: list[tuple[int, int]],
        chunk_rows: int,
        experts: list[int] | None = None,
        n_spans: int = 1,
    ) -> NDArray[np.float32]:
        """What ranges of experts, one after another, make of ones."""
        acc: Tensor = bench.tensor(np.ones((len(routed.ids), N_EMBD)))
        x, tables = bench.act(routed.x), [bench.table(w, experts, n_spans) for w in (self.gate, self.up, self.down)]
        for unit in ranges:
            bench.op(Op.EXPERT_FFN, acc, x, *tables, routed.rows, unit, chunk_rows, self.kind)
        return np.asarray(bench.read(acc), np.float32)
