"""The ops a backend implements, one method an op.

The public methods check shapes and enqueue; a backend overrides the method of the same name with an underscore for
every op it has, and `supports` to say so. All tensors are on the queue's device. An op allocates nothing: it may use
`scratch`, of `scratch_nbytes(query)` bytes, whose content means nothing before and after. Accumulation is in f32.

Whatever changes from run to run of a recorded program (positions, token ids, tables) is read from device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from noria.api.errors import KernelLaunchError
from noria.api.memory import Span, align_up
from noria.api.ops import Glu, Op, OpQuery, RopeParams, RouterParams, Support
from noria.api.tensor import ExpertRows, ExpertTable, KVView, RowWindow, Tensor, tensor_nbytes

if TYPE_CHECKING:
    from noria.api.backend import Device
    from noria.api.queue import Queue


class Kernels:
    """The ops of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def supports(self, query: OpQuery) -> Support:
        """Whether this op runs here with these types and sizes."""
        return Support.MISSING

    @final
    def scratch_nbytes(self, query: OpQuery) -> int:
        """Scratch bytes the op needs for this query. Grows with `n_rows` and `dims`, so the largest tile bounds all."""
        if query.op is Op.EXPERT_FFN and not self.supports(query).usable:
            return sum(_parts_nbytes(self, query))
        if query.op is Op.MATMULS and not self.supports(query).usable:
            return self.scratch_nbytes(replace(query, op=Op.MATMUL))
        return align_up(self._scratch_nbytes(query), self.device.caps.buffer_alignment)

    def _scratch_nbytes(self, query: OpQuery) -> int:
        """The backend's part of `scratch_nbytes`, for an op it supports."""
        return 0

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        """Enqueue the op of `query`. One place, so that a wrapper can send an op elsewhere."""
        queue.submit(query.op, reads, writes, partial(getattr(self, f"_{query.op}"), queue, **args))

    def _check(self, op: Op, **same: tuple[int, int]) -> None:
        for name, (have, want) in same.items():
            if have != want:
                raise KernelLaunchError(self.device.info.id, f"{op}: {name} is {have}, expected {want}")

    # --- the ops -------------------------------------------------------------------------------------------------

    @final
    def get_rows(self, queue: Queue, out: Tensor, table: Tensor, ids: Tensor) -> None:
        """out[i] = table[ids[i]] in f32. out: F32 [n, n_embd]; table: any type [n_vocab, n_embd]; ids: I32 [n]."""
        self._check(Op.GET_ROWS, rows=(out.shape[0], ids.shape[0]), width=(out.shape[-1], table.shape[-1]))
        query = OpQuery(op=Op.GET_ROWS, type=table.type, n_rows=ids.shape[0], dims=table.shape)
        self.dispatch(queue, query, [table.span, ids.span], [out.span], {"out": out, "table": table, "ids": ids})

    @final
    def rms_norm(self, queue: Queue, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight along the last axis.

        x: F32 or activations [..., n]; weight: F32 [n]. `out` may be `x`.
        Source: Zhang & Sennrich 2019, arXiv 1910.07467.
        """
        self._check(Op.RMS_NORM, rows=(out.n_rows, x.n_rows), width=(out.shape[-1], x.shape[-1]))
        query = OpQuery(op=Op.RMS_NORM, type=x.type, activation=out.type, n_rows=x.n_rows, dims=(x.shape[-1],))
        reads = [x.span] if weight is None else [x.span, weight.span]
        self.dispatch(queue, query, reads, [out.span], {"out": out, "x": x, "weight": weight, "eps": eps})

    @final
    def add(self, queue: Queue, out: Tensor, a: Tensor, b: Tensor) -> None:
        """out = a + b; `b` has the shape of `a` or is one row, added to every row. `out` may be `a`."""
        self._check(Op.ADD, rows=(out.n_rows, a.n_rows), width=(b.shape[-1], a.shape[-1]))
        query = OpQuery(op=Op.ADD, type=b.type, activation=a.type, n_rows=a.n_rows, dims=(a.shape[-1],))
        self.dispatch(queue, query, [a.span, b.span], [out.span], {"out": out, "a": a, "b": b})

    @final
    def scale(self, queue: Queue, out: Tensor, x: Tensor, factor: float) -> None:
        """out = x * factor. `out` may be `x`."""
        self._check(Op.SCALE, rows=(out.n_rows, x.n_rows), width=(out.shape[-1], x.shape[-1]))
        query = OpQuery(op=Op.SCALE, type=x.type, activation=x.type, n_rows=x.n_rows, dims=(x.shape[-1],))
        self.dispatch(queue, query, [x.span], [out.span], {"out": out, "x": x, "factor": factor})

    @final
    def matmul(
        self,
        queue: Queue,
        out: Tensor,
        w: Tensor,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
        scratch: Span | None = None,
    ) -> None:
        """out = x @ w.T + bias, or out += that if `accumulate` (the residual).

        w: any type [n_out, n_in]; x: activations [n, n_in]; out: [n, n_out]; bias: F32 [n_out].
        """
        self._check(
            Op.MATMUL, rows=(out.n_rows, x.n_rows), n_in=(x.shape[-1], w.shape[1]), n_out=(out.shape[-1], w.shape[0])
        )
        query = OpQuery(op=Op.MATMUL, type=w.type, activation=x.type, n_rows=x.n_rows, dims=w.shape)
        reads = [w.span, x.span] + ([bias.span] if bias else []) + ([out.span] if accumulate else [])
        args = {"out": out, "w": w, "x": x, "bias": bias, "accumulate": accumulate, "scratch": scratch}
        self.dispatch(queue, query, reads, _with(scratch, out.span), args)

    @final
    def rope(
        self, queue: Queue, x: Tensor, positions: Tensor, params: RopeParams, freq_factors: Tensor | None = None
    ) -> None:
        """Turn x in place by position.

        x: activations [n, n_head, head_dim]; positions: I32 [n]; freq_factors: F32 [n_dims/2].
        Source: Su et al. 2021, arXiv 2104.09864.
        """
        self._check(Op.ROPE, rows=(x.shape[0], positions.shape[0]))
        query = OpQuery(op=Op.ROPE, type=x.type, activation=x.type, n_rows=x.shape[0], dims=x.shape[1:])
        reads = [x.span, positions.span] + ([freq_factors.span] if freq_factors else [])
        args = {"x": x, "positions": positions, "params": params, "freq_factors": freq_factors}
        self.dispatch(queue, query, reads, [x.span], args)

    @final
    def kv_store(self, queue: Queue, kv: KVView, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write K and V rows into the cells `positions`, converting to the cache's types.

        k: activations [n, n_head_kv, d_k]; v: [n, n_head_kv, d_v]; positions: I32 [n].
        """
        self._check(
            Op.KV_STORE,
            rows=(k.shape[0], positions.shape[0]),
            k_width=(k.shape[-1] * k.shape[-2], kv.n_head_kv * kv.d_k),
            v_width=(v.shape[-1] * v.shape[-2], kv.n_head_kv * kv.d_v),
        )
        dims = (kv.n_head_kv, kv.n_head_kv, kv.d_k, kv.d_v, kv.n_cell)
        query = OpQuery(
            op=Op.KV_STORE, type=kv.k_type, type2=kv.v_type, activation=k.type, n_rows=k.shape[0], dims=dims
        )
        args = {"kv": kv, "k": k, "v": v, "positions": positions}
        self.dispatch(queue, query, [k.span, v.span, positions.span], [kv.span], args)

    @final
    def attention(
        self,
        queue: Queue,
        out: Tensor,
        q: Tensor,
        kv: KVView,
        positions: Tensor,
        *,
        n_kv: int,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        scratch: Span | None = None,
    ) -> None:
        """Causal attention of q over the cells of one layer.

        Row i sees cells c with c <= positions[i] (and c > positions[i] - window); head h reads KV head
        h * n_head_kv / n_head. With `sinks` (F32 [n_head]) each head's softmax has one more term exp(sink) whose value
        is zero. `n_kv` is the host's bound: no position is n_kv or more; with several rows it is exact, one more than
        the last position. Cells beyond a row's position may hold anything.

        q: activations [n, n_head, d_k]; out: [n, n_head, d_v]; positions: I32 [n], ascending by one.
        Source: Dao 2023, arXiv 2307.08691 (tiling with an online softmax).
        """
        self._check(
            Op.ATTENTION, rows=(q.shape[0], positions.shape[0]), d_k=(q.shape[2], kv.d_k), d_v=(out.shape[2], kv.d_v)
        )
        dims = (q.shape[1], kv.n_head_kv, kv.d_k, kv.d_v, n_kv)
        query = OpQuery(
            op=Op.ATTENTION, type=kv.k_type, type2=kv.v_type, activation=q.type, n_rows=q.shape[0], dims=dims
        )
        reads = [q.span, kv.span, positions.span] + ([sinks.span] if sinks else [])
        args = {"out": out, "q": q, "kv": kv, "positions": positions, "n_kv": n_kv, "scale": scale}
        args |= {"window": window, "sinks": sinks, "scratch": scratch}
        self.dispatch(queue, query, reads, _with(scratch, out.span), args)

    @final
    def route_topk(
        self, queue: Queue, ids: Tensor, weights: Tensor, logits: Tensor, params: RouterParams, *, forced: bool = False
    ) -> None:
        """Choose experts: the n_expert_used best scores of each token, best first; a tie goes to the lower expert.

        With `forced`, `ids` is read instead of written, and only the weights follow from the scores. The ids are valid
        experts whatever the logits are (NaNs too): later kernels follow them.
        logits: F32 [n, n_expert]; ids: I32 [n, n_expert_used]; weights: F32 [n, n_expert_used].
        """
        self._check(Op.ROUTE_TOPK, rows=(ids.shape[0], logits.shape[0]))
        dims = (logits.shape[1], ids.shape[1])
        query = OpQuery(op=Op.ROUTE_TOPK, type=logits.type, n_rows=logits.shape[0], dims=dims)
        reads, writes = [logits.span], [ids.span, weights.span]
        if forced:
            reads, writes = [logits.span, ids.span], [weights.span]
        args = {"ids": ids, "weights": weights, "logits": logits, "params": params, "forced": forced}
        self.dispatch(queue, query, reads, writes, args)

    @final
    def sort_rows(self, queue: Queue, rows: ExpertRows, scratch: Span | None = None) -> None:
        """Fill `rows.pairs`, `rows.offsets` and `rows.positions` from `rows.ids`, stably, without the host."""
        self._check(Op.SORT_ROWS, pairs=(rows.pairs.shape[0], rows.n_tokens * rows.n_expert_used))
        query = OpQuery(op=Op.SORT_ROWS, type="I32", n_rows=rows.n_tokens, dims=(rows.n_expert, rows.n_expert_used))
        writes = [rows.pairs.span, rows.offsets.span, rows.positions.span]
        args = {"rows": rows, "scratch": scratch}
        self.dispatch(queue, query, [rows.ids.span], _with(scratch, *writes), args)

    @final
    def mul_mat_id(
        self,
        queue: Queue,
        out: Tensor,
        w: ExpertTable,
        x: Tensor,
        rows: ExpertRows,
        window: RowWindow,
        *,
        by_token: bool,
        scratch: Span | None = None,
    ) -> None:
        """out[r] = W[expert of row r] @ x[.] for every row of the window whose expert is in the table.

        `by_token`: x is [n_tokens, n_in] and row r reads its token; otherwise x is [window.n_rows, n_in] and row r
        reads row r. Rows of experts that are not in the table are left as they are.
        out: activations [window.n_rows, n_out].
        """
        self._check(
            Op.MUL_MAT_ID,
            n_in=(x.shape[-1], w.n_in),
            n_out=(out.shape[-1], w.n_out),
            rows=(out.shape[0], window.n_rows),
        )
        query = OpQuery(
            op=Op.MUL_MAT_ID,
            type=w.type,
            activation=x.type,
            n_rows=window.n_rows,
            dims=(rows.n_expert, w.n_out, w.n_in),
        )
        reads = [*w.spans, w.where.span, x.span, rows.pairs.span, rows.offsets.span]
        args = {"out": out, "w": w, "x": x, "rows": rows, "window": window, "by_token": by_token, "scratch": scratch}
        self.dispatch(queue, query, reads, _with(scratch, out.span), args)

    @final
    def glu(self, queue: Queue, out: Tensor, gate: Tensor, up: Tensor, kind: Glu) -> None:
        """out = f(gate) * up, element by element. `out` may be `gate`. All activations [n, n_ff]."""
        self._check(Op.GLU, rows=(gate.n_rows, up.n_rows), width=(gate.shape[-1], up.shape[-1]))
        query = OpQuery(op=Op.GLU, type=gate.type, activation=gate.type, n_rows=gate.n_rows, dims=(gate.shape[-1],))
        self.dispatch(
            queue, query, [gate.span, up.span], [out.span], {"out": out, "gate": gate, "up": up, "kind": kind}
        )

    @final
    def combine(
        self, queue: Queue, acc: Tensor, y: Tensor, w: ExpertTable, rows: ExpertRows, window: RowWindow
    ) -> None:
        """acc[token] += weight * y[row] for every row of the window whose expert is in the table `w`.

        In f32, one row after another in ascending order of rows, so windows in ascending order give the same bits
        however the rows are cut. acc: F32 [n_tokens, n_embd]; y: activations [window.n_rows, n_embd].
        """
        self._check(Op.COMBINE, rows=(acc.shape[0], rows.n_tokens), width=(y.shape[-1], acc.shape[-1]))
        query = OpQuery(op=Op.COMBINE, type=y.type, activation=y.type, n_rows=window.n_rows, dims=(y.shape[-1],))
        reads = [acc.span, y.span, w.where.span, rows.weights.span, rows.pairs.span, rows.positions.span]
        reads += [rows.offsets.span, rows.ids.span]
        self.dispatch(queue, query, reads, [acc.span], {"acc": acc, "y": y, "w": w, "rows": rows, "window": window})

    @final
    def top_k(self, queue: Queue, values: Tensor, ids: Tensor, logits: Tensor, scratch: Span | None = None) -> None:
        """The k largest of each row, largest first, ties by lower id; k <= 1024.

        values: F32 [n, k]; ids: I32 [n, k]; logits: F32 [n, n_vocab].
        """
        self._check(Op.TOP_K, rows=(values.shape[0], logits.shape[0]), k=(values.shape[1], ids.shape[1]))
        query = OpQuery(op=Op.TOP_K, n_rows=logits.shape[0], dims=(logits.shape[1], ids.shape[1]))
        args = {"values": values, "ids": ids, "logits": logits, "scratch": scratch}
        self.dispatch(queue, query, [logits.span], _with(scratch, values.span, ids.span), args)

    @final
    def matmuls(
        self,
        queue: Queue,
        outs: Sequence[Tensor],
        ws: Sequence[Tensor],
        x: Tensor,
        *,
        biases: Sequence[Tensor | None],
        scratch: Span | None = None,
    ) -> None:
        """outs[i] = x @ ws[i].T + biases[i]: several products with one input, such as q, k and v.

        A composite with a default in terms of matmul; a backend may fuse it, with the bits of that. Support is asked
        for each of `ws`, of which each is as in `matmul`.
        """
        queries = [OpQuery(op=Op.MATMULS, type=w.type, activation=x.type, n_rows=x.n_rows, dims=w.shape) for w in ws]
        if not all(self.supports(query).usable for query in queries):
            for out, w, bias in zip(outs, ws, biases, strict=True):
                self.matmul(queue, out, w, x, bias=bias, scratch=scratch)
            return
        for out, w in zip(outs, ws, strict=True):
            self._check(Op.MATMULS, n_in=(x.shape[-1], w.shape[1]), n_out=(out.shape[-1], w.shape[0]))
        reads = [x.span, *(w.span for w in ws), *(bias.span for bias in biases if bias is not None)]
        args = {"outs": outs, "ws": ws, "x": x, "biases": biases, "scratch": scratch}
        self.dispatch(queue, queries[0], reads, _with(scratch, *(out.span for out in outs)), args)

    @final
    def rope_store(
        self,
        queue: Queue,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KVView,
        positions: Tensor,
        params: RopeParams,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        freq_factors: Tensor | None = None,
    ) -> None:
        """Turn q and k by position, each head normalized first where it has weights for that; store K and V.

        What comes between the projections and attention. A composite with a default in terms of rms_norm, rope and
        kv_store; a backend may fuse it, rounding where these round. q is changed in place; k may hold anything
        afterwards. V must not be a part of K in the cells.

        q: activations [n, n_head, d_k]; k: [n, n_head_kv, d_k]; v: [n, n_head_kv, d_v]; q_norm, k_norm: F32 [d_k].
        """
        self._check(Op.ROPE_STORE, rows=(q.shape[0], positions.shape[0]), d_k=(q.shape[2], kv.d_k))
        dims = (q.shape[1], kv.n_head_kv, kv.d_k, kv.d_v, params.n_dims)
        query = OpQuery(
            op=Op.ROPE_STORE, type=kv.k_type, type2=kv.v_type, activation=q.type, n_rows=q.shape[0], dims=dims
        )
        if not self.supports(query).usable:
            for x, weight in ((q, q_norm), (k, k_norm)):
                if weight is not None:
                    self.rms_norm(queue, x, x, weight, eps)
                self.rope(queue, x, positions, params, freq_factors)
            self.kv_store(queue, kv, k, v, positions)
            return
        reads = [q.span, k.span, v.span, positions.span]
        reads += [tensor.span for tensor in (q_norm, k_norm, freq_factors) if tensor is not None]
        args = {"q": q, "k": k, "v": v, "kv": kv, "positions": positions, "params": params}
        args |= {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "freq_factors": freq_factors}
        self.dispatch(queue, query, reads, [q.span, k.span, kv.span], args)

    @final
    def expert_ffn(
        self,
        queue: Queue,
        acc: Tensor,
        x: Tensor,
        gate: ExpertTable,
        up: ExpertTable,
        down: ExpertTable,
        rows: ExpertRows,
        experts: tuple[int, int],
        chunk_rows: int,
        kind: Glu,
        *,
        scratch: Span | None = None,
    ) -> None:
        """acc[token] += weight * down(f(gate(x)) * up(x)) for all rows of the experts [experts[0], experts[1]).

        What a unit of experts is for. Scratch is that of `chunk_rows` rows (the query's `n_rows`), so more rows than
        that are computed in chunks. A composite with a default in terms of mul_mat_id, glu and combine; a backend may
        fuse it as it likes, keeping the order in which `combine` adds. Rows of experts that are not in the tables are
        skipped. The host knows only the bound of rows, not how many there are, so chunks without rows must cost next to
        nothing. `up` may have another type than `gate`; support is then asked for both.

        x: activations [n_tokens, n_embd]; acc: F32 [n_tokens, n_embd].
        """
        self._check(Op.EXPERT_FFN, n_embd=(x.shape[-1], gate.n_in), n_ff=(down.n_in, gate.n_out))
        dims = (rows.n_expert, gate.n_out, gate.n_in)
        query = OpQuery(
            op=Op.EXPERT_FFN, type=gate.type, type2=down.type, activation=x.type, n_rows=chunk_rows, dims=dims
        )
        supported = self.supports(query).usable
        if supported and up.type != gate.type:
            supported = self.supports(replace(query, type=up.type)).usable
        if not supported:
            most = rows.n_tokens * min(rows.n_expert_used, experts[1] - experts[0])
            for first in range(0, most, chunk_rows):
                window = RowWindow(
                    first_expert=experts[0],
                    end_expert=experts[1],
                    first_row=first,
                    n_rows=min(chunk_rows, most - first),
                )
                _expert_ffn_of_parts(self, queue, query, acc, x, gate, up, down, rows, window, kind, scratch)
            return
        reads = [*gate.spans, *up.spans, *down.spans, gate.where.span, up.where.span, down.where.span, x.span, acc.span]
        reads += [rows.ids.span, rows.weights.span, rows.pairs.span, rows.offsets.span, rows.positions.span]
        args = {"acc": acc, "x": x, "gate": gate, "up": up, "down": down, "rows": rows, "experts": experts}
        args |= {"chunk_rows": chunk_rows, "kind": kind, "scratch": scratch}
        self.dispatch(queue, query, reads, _with(scratch, acc.span), args)


def _with(scratch: Span | None, *spans: Span) -> list[Span]:
    return [*spans] if scratch is None else [*spans, scratch]


def _parts_nbytes(kernels: Kernels, query: OpQuery) -> tuple[int, int, int]:
    """Bytes of one [n_rows, n_ff] tensor, twice, and of what follows: the down rows and the scratch of the parts."""
    n_expert, n_ff, n_embd = query.dims
    alignment = kernels.device.caps.buffer_alignment
    hidden = align_up(tensor_nbytes(query.activation, (query.n_rows, n_ff)), alignment)
    y = align_up(tensor_nbytes(query.activation, (query.n_rows, n_embd)), alignment)
    inner = max(
        kernels.scratch_nbytes(
            OpQuery(op=Op.MUL_MAT_ID, type=t, activation=query.activation, n_rows=query.n_rows, dims=(n_expert, *shape))
        )
        for t, shape in ((query.type, (n_ff, n_embd)), (query.type2, (n_embd, n_ff)))
    )
    return hidden, hidden, y + inner


def _expert_ffn_of_parts(
    kernels: Kernels,
    queue: Queue,
    query: OpQuery,
    acc: Tensor,
    x: Tensor,
    gate: ExpertTable,
    up: ExpertTable,
    down: ExpertTable,
    rows: ExpertRows,
    window: RowWindow,
    kind: Glu,
    scratch: Span | None,
) -> None:
    """The default of `expert_ffn`; its intermediate tensors lie in `scratch`."""
    n = window.n_rows
    hidden_nbytes, _, rest = _parts_nbytes(kernels, query)
    if scratch is None or scratch.nbytes < 2 * hidden_nbytes + rest:
        raise KernelLaunchError(kernels.device.info.id, f"{query} needs {2 * hidden_nbytes + rest} bytes of scratch")

    def tensor(offset: int, width: int) -> Tensor:
        shape = (n, width)
        return Tensor(scratch.sub(offset, tensor_nbytes(x.type, shape)), x.type, shape)

    g, u = tensor(0, gate.n_out), tensor(hidden_nbytes, up.n_out)
    y = tensor(2 * hidden_nbytes, down.n_out)
    y_end = 2 * hidden_nbytes + align_up(y.span.nbytes, kernels.device.caps.buffer_alignment)
    inner = scratch.sub(y_end, scratch.nbytes - y_end) if scratch.nbytes > y_end else None
    kernels.mul_mat_id(queue, g, gate, x, rows, window, by_token=True, scratch=inner)
    kernels.mul_mat_id(queue, u, up, x, rows, window, by_token=True, scratch=inner)
    kernels.glu(queue, g, g, u, kind)
    kernels.mul_mat_id(queue, y, down, g, rows, window, by_token=False, scratch=inner)
    kernels.combine(queue, acc, y, down, rows, window)
