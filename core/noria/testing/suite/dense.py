"""Cases of the ops that treat every row alike."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Glu, Op
from noria.api.errors import KernelLaunchError
from noria.testing import cases, expected
from noria.testing.accuracy import ELEMENT_NMSE, SUM_NMSE, assert_close, assert_same_bits
from noria.testing.bench import Bench
from noria.testing.blocks import random_weights, wild_weights
from noria.testing.fixtures import ConformanceSuite

ROPE_NMSE = 1e-8  # f32 angles of some hundred radians are known to 1e-5
EPS = 1e-6


class DenseCases(ConformanceSuite):
    """get_rows, rms_norm, add, scale, matmul, rope, glu, top_k."""

    @pytest.mark.parametrize("type", cases.WEIGHT_TYPES)
    def test_get_rows_has_the_bits(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """Rows in f32 are bit for bit what gguf makes of them, for every scale a block can have."""
        table = wild_weights(rng, type, (40, 768))
        ids = np.concatenate((rng.permutation(40), [39, 0, 0, 7])).astype(np.int32)
        out = bench.empty((len(ids), 768))
        bench.op(Op.GET_ROWS, out, bench.weights(table), bench.tensor(ids, "I32"))
        assert_same_bits(bench.read(out), table.values[ids])

    def test_get_rows_of_one_token(self, bench: Bench, rng: np.random.Generator) -> None:
        table = random_weights(rng, "F16", (5000, 64))
        out = bench.empty((1, 64))
        bench.op(Op.GET_ROWS, out, bench.weights(table), bench.tensor(np.array([4999]), "I32"))
        assert_same_bits(bench.read(out), table.values[4999:])

    @pytest.mark.parametrize("case", cases.RMS_NORM, ids=str)
    def test_rms_norm(self, bench: Bench, rng: np.random.Generator, case: cases.NormCase) -> None:
        values = bench.normal(rng, *case.shape, std=3)
        weight = rng.normal(1, 0.3, case.shape[-1]).astype(np.float32) if case.weight else None
        x = bench.tensor(values, "F32" if case.f32_in else bench.activation)
        out = x if case.in_place else bench.out(*case.shape)
        bench.op(Op.RMS_NORM, out, x, None if weight is None else bench.tensor(weight), EPS)
        assert_close(bench.read(out), expected.rms_norm(values, weight, EPS), ELEMENT_NMSE[bench.activation])

    def test_rms_norm_of_zeros(self, bench: Bench) -> None:
        """A row of zeros stays one: eps keeps the division sane."""
        x = bench.act(np.zeros((2, 256)))
        bench.op(Op.RMS_NORM, x, x, None, EPS)
        assert not bench.read(x).any()

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("n_rows", cases.N_ROWS)
    def test_add(self, bench: Bench, rng: np.random.Generator, n_rows: int, in_place: bool) -> None:
        a, b = bench.normal(rng, n_rows, 320), bench.normal(rng, n_rows, 320)
        ta = bench.act(a)
        out = ta if in_place else bench.out(n_rows, 320)
        bench.op(Op.ADD, out, ta, bench.act(b))
        assert_close(bench.read(out), a.astype(np.float64) + b, ELEMENT_NMSE[bench.activation])

    @pytest.mark.parametrize("n_rows", cases.N_ROWS)
    def test_add_one_row_to_all(self, bench: Bench, rng: np.random.Generator, n_rows: int) -> None:
        """A bias in f32."""
        a, b = bench.normal(rng, n_rows, 320), rng.normal(0, 1, (1, 320)).astype(np.float32)
        ta = bench.act(a)
        bench.op(Op.ADD, ta, ta, bench.tensor(b))
        assert_close(bench.read(ta), a.astype(np.float64) + b, ELEMENT_NMSE[bench.activation])

    @pytest.mark.parametrize("in_place", [False, True])
    def test_scale(self, bench: Bench, rng: np.random.Generator, in_place: bool) -> None:
        values = bench.normal(rng, 13, 65)
        x = bench.act(values)
        out = x if in_place else bench.out(13, 65)
        bench.op(Op.SCALE, out, x, -0.37)
        assert_close(bench.read(out), values * -0.37, ELEMENT_NMSE[bench.activation])

    @pytest.mark.parametrize("case", cases.MATMUL, ids=str)
    def test_matmul(self, bench: Bench, rng: np.random.Generator, case: cases.MatmulCase) -> None:
        w = random_weights(rng, case.type, (case.n_out, case.n_in))
        x = bench.normal(rng, case.n_rows, case.n_in)
        bias = rng.normal(0, 1, case.n_out).astype(np.float32)
        before = bench.normal(rng, case.n_rows, case.n_out)
        want = expected.matmul(x, w.values) + (bias if case.bias else 0) + (before if case.accumulate else 0)
        out = bench.tensor(before, "F32" if case.out_f32 else bench.activation)
        tw, tx, tbias = bench.weights(w), bench.act(x), bench.tensor(bias) if case.bias else None
        bench.op(Op.MATMUL, out, tw, tx, bias=tbias, accumulate=case.accumulate)
        assert_close(bench.read(out), want, SUM_NMSE[bench.activation])

    @pytest.mark.parametrize("n_rows", cases.N_ROWS)
    @pytest.mark.parametrize("types", cases.MATMULS, ids="-".join)
    def test_matmuls_have_the_bits_of_matmul(
        self, bench: Bench, rng: np.random.Generator, types: tuple[str, ...], n_rows: int
    ) -> None:
        """Several products with one input are what they are one by one."""
        sizes = (264, 72, 40)[: len(types)]
        ws = [bench.weights(random_weights(rng, t, (n, 512))) for t, n in zip(types, sizes, strict=True)]
        x = bench.act(bench.normal(rng, n_rows, 512))
        biases = [bench.tensor(rng.normal(0, 1, n).astype(np.float32)) if i else None for i, n in enumerate(sizes)]
        outs = [bench.out(n_rows, n) for n in sizes]
        bench.op(Op.MATMULS, outs, ws, x, biases=biases)
        for out, w, bias in zip(outs, ws, biases, strict=True):
            alone = bench.out(*out.shape)
            bench.op(Op.MATMUL, alone, w, x, bias=bias)
            assert_same_bits(bench.read(out), bench.read(alone))

    def test_matmul_of_a_tile(self, bench: Bench, rng: np.random.Generator) -> None:
        """Rows in the middle of larger tensors, as a ubatch is of a batch: the other rows stay as they are."""
        w = random_weights(rng, "Q8_0", (64, 256))
        x = bench.normal(rng, 50, 256)
        tx, out = bench.act(x), bench.out(50, 64)
        before = bench.get(out.span)
        bench.op(Op.MATMUL, out.rows(16, 48), bench.weights(w), tx.rows(16, 48))
        after = bench.get(out.span)
        row = out.row_nbytes
        assert np.array_equal(after[: 16 * row], before[: 16 * row])
        assert np.array_equal(after[48 * row :], before[48 * row :])
        assert_close(bench.read(out)[16:48], expected.matmul(x[16:48], w.values), SUM_NMSE[bench.activation])

    @pytest.mark.parametrize("case", cases.ROPE, ids=str)
    def test_rope(self, bench: Bench, rng: np.random.Generator, case: cases.RopeCase) -> None:
        values = bench.normal(rng, case.n_rows, case.n_head, case.head_dim)
        positions = np.arange(case.first, case.first + case.n_rows, dtype=np.int32)
        factors = rng.uniform(1, 8, case.params.n_dims // 2).astype(np.float32) if case.freq_factors else None
        x = bench.act(values)
        t_factors = None if factors is None else bench.tensor(factors)
        bench.op(Op.ROPE, x, bench.tensor(positions, "I32"), case.params, t_factors)
        want = expected.rope(values, positions, case.params, factors)
        assert_close(bench.read(x), want, max(ROPE_NMSE, ELEMENT_NMSE[bench.activation]))

    def test_rope_reads_positions_when_it_runs(self, bench: Bench, rng: np.random.Generator) -> None:
        """A recorded rope turns by the positions that are on the device at each run."""
        params = cases.ROPE[0].params
        values = bench.normal(rng, 2, 4, 128)
        x, positions = bench.act(values), bench.tensor(np.zeros(2), "I32")
        bench.op(Op.ROPE, x, positions, params)  # skips the test if the op is missing
        with bench.queue.program("rope") as program:
            bench.device.kernels.rope(bench.queue, x, positions, params)
        for at in (3, 250):
            bench.queue.copy_d2d(x.span, bench.act(values).span)
            bench.queue.copy_d2d(positions.span, bench.tensor(np.array([at, at + 1]), "I32").span)
            bench.queue.run(program)
            want = expected.rope(values, np.array([at, at + 1]), params)
            assert_close(bench.read(x), want, max(ROPE_NMSE, ELEMENT_NMSE[bench.activation]))

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("kind", list(Glu))
    @pytest.mark.parametrize("n_rows", [1, 33])
    def test_glu(self, bench: Bench, rng: np.random.Generator, n_rows: int, kind: Glu, in_place: bool) -> None:
        """Extreme gates, where a careless exp overflows, included."""
        gate, up = bench.normal(rng, n_rows, 384, std=2), bench.normal(rng, n_rows, 384)
        gate[:, :4] = (-96, 96, 0, -12)
        t_gate = bench.act(gate)
        out = t_gate if in_place else bench.out(n_rows, 384)
        bench.op(Op.GLU, out, t_gate, bench.act(up), kind)
        assert_close(bench.read(out), expected.glu(gate, up, kind), ELEMENT_NMSE[bench.activation])

    @pytest.mark.parametrize(("n", "n_vocab", "k"), cases.TOP_K)
    def test_top_k(self, bench: Bench, rng: np.random.Generator, n: int, n_vocab: int, k: int) -> None:
        self.top_k(bench, rng.normal(0, 3, (n, n_vocab)).astype(np.float32), k)

    def test_top_k_breaks_ties_by_id(self, bench: Bench, rng: np.random.Generator) -> None:
        """Of equal logits the lower ids come first, in the middle and where the list ends."""
        self.top_k(bench, rng.integers(-3, 4, (3, 5000)).astype(np.float32), 700)
        self.top_k(bench, np.zeros((1, 3000), np.float32), 40)

    def test_wrong_shapes_are_refused(self, bench: Bench) -> None:
        """Shapes that do not fit together never reach a kernel."""
        kernels, queue = bench.device.kernels, bench.queue
        x, wide = bench.out(2, 64), bench.out(2, 128)
        ids, one_id = bench.empty((2, 3), "I32"), bench.empty((1, 3), "I32")
        with pytest.raises(KernelLaunchError, match="rms_norm"):
            kernels.rms_norm(queue, wide, x, None, EPS)
        with pytest.raises(KernelLaunchError, match="matmul"):
            kernels.matmul(queue, x, bench.empty((64, 96)), x)
        with pytest.raises(KernelLaunchError, match="top_k"):
            kernels.top_k(queue, bench.empty((2, 3)), one_id.reshape(1, 3), bench.empty((3, 64)))
        with pytest.raises(KernelLaunchError, match="route_topk"):
            kernels.route_topk(queue, ids, bench.empty((2, 3)), bench.empty((5, 8)), cases.ROUTER[0].params)

    def top_k(self, bench: Bench, logits: NDArray[np.float32], k: int) -> None:
        """Run and compare one top_k."""
        values, ids = bench.empty((len(logits), k)), bench.empty((len(logits), k), "I32")
        bench.op(Op.TOP_K, values, ids, bench.tensor(logits))
        want_values, want_ids = expected.top_k(logits, k)
        assert_same_bits(bench.read(ids), want_ids, "ids")
        assert_same_bits(bench.read(values), want_values, "values")
