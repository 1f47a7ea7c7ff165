"""Cases of the ops that decide which row goes to which expert."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import ExpertRows, Gating, Op, RouterParams
from noria.testing import cases, expected
from noria.testing.accuracy import ELEMENT_NMSE, assert_close, assert_same_bits
from noria.testing.bench import Bench
from noria.testing.fixtures import ConformanceSuite


def random_ids(rng: np.random.Generator, n_tokens: int, n_expert: int, n_expert_used: int) -> NDArray[np.int32]:
    """Distinct experts for every token, [n_tokens, n_expert_used]; low numbers are the more popular."""
    popularity = 1 / np.arange(1, n_expert + 1)
    rows = [
        rng.choice(n_expert, n_expert_used, replace=False, p=popularity / popularity.sum()) for _ in range(n_tokens)
    ]
    return np.array(rows, np.int32)


class RoutingCases(ConformanceSuite):
    """route_topk and sort_rows."""

    @pytest.mark.parametrize("case", cases.ROUTER, ids=str)
    def test_route_topk(self, bench: Bench, rng: np.random.Generator, case: cases.RouterCase) -> None:
        """Scores far enough apart that rounding does not change their order."""
        logits = np.array([rng.permutation(case.n_expert) for _ in range(case.n_tokens)])
        self.route(bench, (logits * (8 / case.n_expert) - 4).astype(np.float32), case.n_expert_used, case.params)

    @pytest.mark.parametrize("gating", list(Gating))
    def test_route_topk_breaks_ties_by_number(self, bench: Bench, rng: np.random.Generator, gating: Gating) -> None:
        """Of equal logits the lower expert comes first, in the middle and where the choice ends."""
        params = RouterParams(gating=gating)
        self.route(bench, rng.integers(-2, 3, (40, 64)).astype(np.float32), 6, params)
        self.route(bench, np.zeros((1, 128), np.float32), 8, params)

    @pytest.mark.parametrize("gating", list(Gating))
    def test_route_topk_forced(self, bench: Bench, rng: np.random.Generator, gating: Gating) -> None:
        """Forced experts, in any order and none of them the best, get the weights of their scores."""
        logits = rng.normal(0, 2, (9, 32)).astype(np.float32)
        ids = random_ids(rng, 9, 32, 4)
        self.route(bench, logits, 4, RouterParams(gating=gating, scale=1.5), ids)

    @pytest.mark.parametrize(("n_tokens", "n_expert", "n_expert_used"), cases.SORTED)
    def test_sort_rows(
        self, bench: Bench, rng: np.random.Generator, n_tokens: int, n_expert: int, n_expert_used: int
    ) -> None:
        self.sort(bench, random_ids(rng, n_tokens, n_expert, n_expert_used), n_expert)

    @pytest.mark.parametrize("expert", [0, 3, 7])
    def test_sort_rows_of_one_expert(self, bench: Bench, expert: int) -> None:
        """All rows go to one expert, the first, one in the middle, the last; the others are empty."""
        self.sort(bench, np.full((70, 1), expert, np.int32), 8)

    def route(
        self,
        bench: Bench,
        logits: NDArray[np.float32],
        n_expert_used: int,
        params: RouterParams,
        forced: NDArray[np.int32] | None = None,
    ) -> None:
        """Run and compare one route_topk."""
        shape = (len(logits), n_expert_used)
        ids = bench.empty(shape, "I32") if forced is None else bench.tensor(forced, "I32")
        weights = bench.empty(shape)
        bench.op(Op.ROUTE_TOPK, ids, weights, bench.tensor(logits), params, forced=forced is not None)
        want_ids, want_weights = expected.route_topk(logits, n_expert_used, params, forced)
        assert_same_bits(bench.read(ids), want_ids, "ids")
        assert_close(bench.read(weights), want_weights, ELEMENT_NMSE["F32"], "weights")

    def sort(self, bench: Bench, ids: NDArray[np.int32], n_expert: int) -> None:
        """Run and compare one sort_rows."""
        rows = ExpertRows(
            ids=bench.tensor(ids, "I32"),
            weights=bench.empty(ids.shape),
            pairs=bench.empty((ids.size,), "I32"),
            offsets=bench.empty((n_expert + 1,), "I32"),
            positions=bench.empty(ids.shape, "I32"),
        )
        bench.op(Op.SORT_ROWS, rows)
        pairs, offsets, positions = expected.sort_rows(ids, n_expert)
        assert_same_bits(bench.read(rows.offsets), offsets, "offsets")
        assert_same_bits(bench.read(rows.pairs), pairs, "pairs")
        assert_same_bits(bench.read(rows.positions), positions, "positions")
