"""Running model code without running anything: how the memory plan learns what a tile needs, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from noria.api import (
    BufferUsage,
    Device,
    DeviceBuffer,
    Kernels,
    KVView,
    Op,
    OpQuery,
    Queue,
    Span,
    Support,
    Tensor,
)
from noria.gguf import ModelFile
from noria.models import Graph, Model, Workspace

ENDLESS = 1 << 60


class PhantomBuffer(DeviceBuffer):
    """An endless buffer that is not there."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, ENDLESS, "phantom", BufferUsage.COMPUTE)

    def _free(self) -> None:
        return None


class NotingKernels(Kernels):
    """Kernels that only note which ops are asked for, and the scratch they need on the real device."""

    def __init__(self, real: Kernels) -> None:
        super().__init__(real.device)
        self.real = real
        self.queries: dict[OpQuery, Support] = {}
        self.scratch_peak = 0

    def supports(self, query: OpQuery) -> Support:
        return self.real.supports(query)

    def _scratch_nbytes(self, query: OpQuery) -> int:
        return self.real.scratch_nbytes(query)

    def note(self, query: OpQuery) -> None:
        self.queries[query] = self.real.supports(query)
        self.scratch_peak = max(self.scratch_peak, self.real.scratch_nbytes(query))

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        self.note(query)


class DryRun:
    """One device's share of a model, run for tiles of `n_ubatch` tokens and of one. Rows are sorted for whole batches.

    Attributes:
        workspace_nbytes, scratch_nbytes: the most any part of it needs.
        queries: every op with its types and sizes, and how the device supports it.
    """

    def __init__(
        self,
        file: ModelFile,
        model: Model,
        kernels: Kernels,
        layers: Sequence[int],
        kv_views: dict[int, KVView],
        *,
        n_batch: int,
        n_ubatch: int,
        n_kv: int,
        n_logits: int,
        with_embedding: bool,
        with_output: bool,
    ) -> None:
        device = kernels.device
        noting = NotingKernels(kernels)
        phantom = PhantomBuffer(device)
        weights = {
            spec.name: Tensor(phantom.span(0, file.tensors[spec.name].nbytes), file.tensors[spec.name].type, spec.shape)
            for spec in model.weights()
            if spec.name in file.tensors
        }
        for name, values in model.constants().items():
            weights[name] = Tensor(phantom.span(0, values.nbytes), "F32", values.shape)
        workspace = Workspace(phantom.span(), device.caps.buffer_alignment)
        no_queue = cast(Queue, None)  # the noting kernels enqueue nothing
        g = Graph(noting, no_queue, weights, workspace, phantom.span())
        p = model.hparams

        def tensor(type: str, *shape: int) -> Tensor:
            return Workspace(phantom.span(), device.caps.buffer_alignment).tensor(type, *shape)

        for n, n_sorted in {(n_ubatch, n_batch), (1, 1)}:
            h, positions = tensor("F32", n, p.n_embd), tensor("I32", n)
            if with_embedding:
                model.embed(g, h, positions)
            for layer in layers:
                with workspace.scope():
                    model.attention(g, layer, h, positions, kv_views[layer], n_kv)
                with workspace.scope():
                    if (moe := model.moe(layer)) is None:
                        model.ffn(g, layer, h)
                        continue
                    x = tensor(device.caps.activation_type, n, p.n_embd)
                    ids, pair_weights = tensor("I32", n, p.n_expert_used), tensor("F32", n, p.n_expert_used)
                    model.route(g, layer, h, x, ids, pair_weights, forced=False)
                dims = (p.n_expert, p.n_expert_used)
                noting.note(OpQuery(op=Op.SORT_ROWS, type="I32", n_rows=n_sorted, dims=dims))
                gate, up, down = (file.tensors[name] for name in (moe.gate, moe.up, moe.down))
                types = (gate.type, up.type, down.type)
                _note_experts(noting, types, gate.shape, device.caps.activation_type, n * dims[1])
        if with_output:
            for n in {n_logits, 1}:
                with workspace.scope():
                    model.output(g, tensor("F32", n, p.n_embd))
        self.workspace_nbytes = workspace.peak
        self.scratch_nbytes = noting.scratch_peak
        self.queries = noting.queries


def _note_experts(
    noting: NotingKernels, types: tuple[str, str, str], shape: tuple[int, ...], activation: str, n_rows: int
) -> None:
    """Note expert_ffn, or where it is a composite, its parts; the scratch is that of the whole either way."""
    (gate, up, down), (n_expert, n_ff, n_embd) = types, shape
    wholes = [
        OpQuery(
            op=Op.EXPERT_FFN, type=type, type2=down, activation=activation, n_rows=n_rows, dims=(n_expert, n_ff, n_embd)
        )
        for type in (gate, up)
    ]
    noting.scratch_peak = max(noting.scratch_peak, *(noting.real.scratch_nbytes(query) for query in wholes))
    if all(noting.real.supports(query).usable for query in wholes):
        for query in wholes:
            noting.note(query)
        return
    for type, dims in (
        (gate, (n_expert, n_ff, n_embd)),
        (up, (n_expert, n_ff, n_embd)),
        (down, (n_expert, n_embd, n_ff)),
    ):
        noting.note(OpQuery(op=Op.MUL_MAT_ID, type=type, activation=activation, n_rows=n_rows, dims=dims))
    noting.note(OpQuery(op=Op.GLU, type=activation, activation=activation, n_rows=n_rows, dims=(n_ff,)))
    noting.note(OpQuery(op=Op.COMBINE, type=activation, activation=activation, n_rows=n_rows, dims=(n_embd,)))
