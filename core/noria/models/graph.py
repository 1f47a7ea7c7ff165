"""The ops as model code writes them: weights by name, outputs in a workspace, one queue.

A `Graph` belongs to one device. Its workspace is a stack inside one buffer: `scope` gives back what was allocated in
it. Run with kernels that only take notes, the same model code tells the memory plan how much workspace and scratch it
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from noria.api import (
    ExpertRows,
    ExpertTable,
    Glu,
    Kernels,
    KVView,
    Queue,
    RopeParams,
    RouterParams,
    RowWindow,
    Span,
    Tensor,
    align_up,
    tensor_nbytes,
)
from noria.api.errors import ModelError


@dataclass
class Workspace:
    """A stack of tensors in `span`. `peak` is the most it ever held, in bytes."""

    span: Span
    alignment: int
    used: int = 0
    peak: int = 0

    def tensor(self, type: str, *shape: int) -> Tensor:
        nbytes = tensor_nbytes(type, shape)
        tensor = Tensor(self.span.sub(self.used, nbytes), type, shape)
        self.used += align_up(nbytes, self.alignment)
        self.peak = max(self.peak, self.used)
        return tensor

    @contextmanager
    def scope(self) -> Iterator[None]:
        used = self.used
        try:
            yield
        finally:
            self.used = used


class Graph:
    """Enqueues ops on one device's compute queue. Methods return tensors that live until the current scope ends."""

    def __init__(
        self, kernels: Kernels, queue: Queue, weights: Mapping[str, Tensor], workspace: Workspace, scratch: Span
    ) -> None:
        self.kernels = kernels
        self.queue = queue
        self.weights = weights
        self.workspace = workspace
        self.scratch = scratch
        self.activation_type = kernels.device.caps.activation_type

    def weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise ModelError(f"the model has no tensor '{name}' on {self.kernels.device.info.id}")
        return self.weights[name]

    def has(self, name: str) -> bool:
        return name in self.weights

    def new(self, *shape: int, type: str | None = None) -> Tensor:
        return self.workspace.tensor(type or self.activation_type, *shape)

    def embed(self, out: Tensor, table: str, ids: Tensor) -> None:
        """out: F32 [n, n_embd]; ids: I32 [n]."""
        self.kernels.get_rows(self.queue, out, self.weight(table), ids)

    def rms_norm(self, x: Tensor, name: str, eps: float, out: Tensor | None = None) -> Tensor:
        out = out or self.new(*x.shape)
        self.kernels.rms_norm(self.queue, out, x, self.weight(f"{name}.weight"), eps)
        return out

    def linear(self, x: Tensor, name: str, type: str | None = None) -> Tensor:
        """x [n, n_in] -> [n, n_out], with `name`.bias if the file has one; a weight of one row is [n_in] there."""
        w = self.weight(f"{name}.weight")
        w = w.reshape(1, *w.shape) if len(w.shape) == 1 else w
        out = self.new(x.shape[0], w.shape[0], type=type)
        self.kernels.matmul(self.queue, out, w, x, bias=self.weights.get(f"{name}.bias"), scratch=self.scratch)
        return out

    def linears(self, x: Tensor, *names: str) -> list[Tensor]:
        """`linear` by each of these names."""
        ws = [self.weight(f"{name}.weight") for name in names]
        outs = [self.new(x.shape[0], w.shape[0]) for w in ws]
        biases = [self.weights.get(f"{name}.bias") for name in names]
        self.kernels.matmuls(self.queue, outs, ws, x, biases=biases, scratch=self.scratch)
        return outs

    def linear_add(self, h: Tensor, x: Tensor, name: str) -> None:
        """h += linear(x): the end of a residual branch. h: F32 [n, n_embd]."""
        w, bias = self.weight(f"{name}.weight"), self.weights.get(f"{name}.bias")
        self.kernels.matmul(self.queue, h, w, x, bias=bias, accumulate=True, scratch=self.scratch)

    def add_weighed(self, h: Tensor, y: Tensor, scores: Tensor, router: RouterParams) -> None:
        """h += y, each row with the weight that `router` makes of its score: what a mixture of one expert adds.

        h: F32 [n, n_embd]; y: activations [n, n_embd]; scores: F32 [n, 1].
        """
        n = h.shape[0]
        ids, weights = self.new(n, 1, type="I32"), self.new(n, 1, type="F32")
        self.kernels.route_topk(self.queue, ids, weights, scores, router)
        pairs, positions = self.new(n, type="I32"), self.new(n, 1, type="I32")
        rows = ExpertRows(ids=ids, weights=weights, pairs=pairs, offsets=self.new(2, type="I32"), positions=positions)
        self.kernels.sort_rows(self.queue, rows, self.scratch)
        # The one expert is number 0, and the table that says it is here holds a 0: an id.
        where = ids.rows(0, 1).reshape(1)
        table = ExpertTable(spans=(y.span,), where=where, type="F32", n_out=y.shape[1], n_in=0, slab_nbytes=0)
        window = RowWindow(first_expert=0, end_expert=1, first_row=0, n_rows=n)
        self.kernels.combine(self.queue, h, y, table, rows, window)

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KVView,
        positions: Tensor,
        params: RopeParams,
        *,
        q_norm: str | None,
        k_norm: str | None,
        freq_factors: str,
        eps: float,
    ) -> None:
        """Normalize each head of q and k by the weights of these names, turn them in place, store k and v."""
        self.kernels.rope_store(
            *(self.queue, q, k, v, kv, positions, params),
            q_norm=None if q_norm is None else self.weight(q_norm),
            k_norm=None if k_norm is None else self.weight(k_norm),
            eps=eps,
            freq_factors=self.weights.get(freq_factors),
        )

    def attend(self, q: Tensor, kv: KVView, positions: Tensor, *, n_kv: int, scale: float) -> Tensor:
        """Attend with q over what is stored: [n, n_head, d_k] -> [n, n_head * d_v]."""
        out = self.new(q.shape[0], q.shape[1], kv.d_v)
        self.kernels.attention(self.queue, out, q, kv, positions, n_kv=n_kv, scale=scale, scratch=self.scratch)
        return out.reshape(q.shape[0], q.shape[1] * kv.d_v)

    def glu(self, gate: Tensor, up: Tensor, kind: Glu) -> Tensor:
        """In place of `gate`."""
        self.kernels.glu(self.queue, gate, gate, up, kind)
        return gate
