"""One device's share of a model, loaded: its buffers, weights, KV cache and experts.

The buffers are those of the plan and no others; all are allocated before anything is read, so a plan that the device
does not honour fails at once.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain

import numpy as np
import numpy.typing as npt

from noria.api import (
    DeviceBuffer,
    ExpertRows,
    ExpertTable,
    HostBuffer,
    QueueKind,
    Span,
    Tensor,
    align_up,
    tensor_nbytes,
)
from noria.api.errors import DeviceError, OutOfDeviceMemory
from noria.experts import (
    Chaos,
    ExpertLayer,
    Ring,
    Slot,
    TableKey,
    Unit,
    padded,
    split_range,
)
from noria.gguf import ModelFile
from noria.models import Graph, Model, Workspace
from noria.runtime.config import EngineConfig
from noria.runtime.counters import RingMeter
from noria.runtime.host_store import HostStore, Progress, expert_layer
from noria.runtime.kv_cache import kv_views
from noria.runtime.placement import moe_layers
from noria.runtime.plan import Choice, StagePlan, batch_tensors, offsets_nbytes, stage_weights, weight_groups

Tables = tuple[ExpertTable, ExpertTable, ExpertTable]


class Stage:
    """A loaded stage.

    Attributes:
        recordable: no op leaves the device, so work can be recorded into programs.
        graph: the ops on this device.
        kv: the KV view of each layer.
        tokens, positions, hidden, x: tensors of the batch (`x` and `rows` only with experts).
        whole: tables over all experts of a layer, by layer: resident ones on the device, others in host memory.
        ring: None where nothing is streamed.
        store: the offloaded experts; None where there are none.
        inputs: host memory for tokens, then positions, of a batch.
    """

    def __init__(
        self,
        plan: StagePlan,
        choice: Choice,
        file: ModelFile,
        model: Model,
        config: EngineConfig,
        meter: RingMeter,
        progress: Progress,
        lockable_nbytes: int,
    ) -> None:
        self.plan, self.choice, self.model, self.config = plan, choice, model, config
        self.device, self.kernels = plan.spec.device, plan.spec.kernels
        self.layers = plan.spec.layers
        self.queue = self.device.queue(QueueKind.COMPUTE)
        self.moes = moe_layers(model, self.layers)
        self.recordable = all(support.usable for support in plan.dry.queries.values())
        self._moe_index = {layer: i for i, layer in enumerate(self.moes)}
        self.meter = meter
        self._alignment = self.device.caps.buffer_alignment
        self._buffers: dict[str, list[DeviceBuffer]] = {}
        self._host_buffers: list[HostBuffer] = []
        self.ring: Ring | None = None
        self.store: HostStore | None = None
        try:
            self._load(file, progress, lockable_nbytes)
        except BaseException:
            self.close()
            raise

    def _load(self, file: ModelFile, progress: Progress, lockable_nbytes: int) -> None:
        self._allocate()
        offloaded = {layer: moe for layer, moe in self.moes.items() if layer in self.plan.offloaded}
        if offloaded:
            self.store = HostStore(file, self.device, offloaded, self.plan.load_mode, lockable_nbytes, progress)
        self._make_batch()
        self._upload_tables()
        self.whole: dict[int, Tables] = {}
        self.graph = Graph(
            self.kernels,
            self.queue,
            self._upload_constants() | self._upload_weights(file, progress),
            Workspace(self._whole("workspace"), self._alignment),
            self._whole("scratch"),
        )
        self.kv = kv_views(
            self.model,
            self.layers,
            [buffer.span() for buffer in self._buffers.get("kv", [])],
            self.choice.n_ctx,
            self.choice.type_k,
            self.choice.type_v,
        )
        self.ring = self._make_ring() if self.plan.streamed else None
        if self.store is not None:
            for layer in self.store.layers.values():
                if layer.pinned and layer.layer in self.plan.readable:
                    self.whole[layer.layer] = self._tables_over(layer, [t.source for t in layer.tensors])

    # --- memory --------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Every device buffer of the plan, before anything is read."""
        try:
            for key, planned in self.plan.buffers.items():
                self._buffers[key] = []
                for i, nbytes in enumerate(planned.sizes):
                    label = f"{key} {i}" if len(planned.sizes) > 1 else key
                    self._buffers[key].append(self.device.alloc(nbytes, usage=planned.usage, label=label))
        except OutOfDeviceMemory as error:
            rows = "\n".join(self.plan.lines())
            error.args = (f"{error.args[0]}\nThe plan, in MiB:\n{rows}",)
            raise

    def _whole(self, name: str) -> Span:
        """All of a buffer that is one; a span of no bytes where the plan has no such buffer."""
        if name in self._buffers:
            return self._buffers[name][0].span()
        return self._buffers["batch"][0].span(0, 0)

    def _padded(self, nbytes: int) -> int:
        """Room for so many bytes in host memory, whatever is copied there beyond their end."""
        return align_up(nbytes, self.device.caps.copy_alignment)

    def _host(self, nbytes: int, label: str) -> HostBuffer:
        buffer = self.device.alloc_host(self._padded(nbytes), label=label)
        self._host_buffers.append(buffer)
        return buffer

    def _make_batch(self) -> None:
        span, offset = self._whole("batch"), 0
        tensors: dict[str, Tensor] = {}
        for name, (type, shape) in batch_tensors(self.model, self.plan.spec, self.choice.n_batch).items():
            nbytes = tensor_nbytes(type, shape)
            tensors[name] = Tensor(span.sub(offset, nbytes), type, shape)
            offset += align_up(nbytes, self._alignment)
        self.tokens, self.positions, self.hidden = tensors["tokens"], tensors["positions"], tensors["hidden"]
        self._batch = tensors
        p, n_batch = self.model.hparams, self.choice.n_batch
        self.inputs = self._host(2 * 4 * n_batch, "inputs")
        self._offsets_nbytes = offsets_nbytes(self.model, self.plan.spec)
        self._counts = self._host(max(len(self.moes), 1) * self._offsets_nbytes, "rows by expert")
        self._routing: HostBuffer | None = None
        self._hop: HostBuffer | None = None
        if not (self.plan.spec.embed and self.plan.spec.output):
            self._hop = self._host(n_batch * p.n_embd * 4, "hidden state between devices")
        if self.plan.spec.output:
            self.logits = self._host(self.plan.n_logits * p.n_vocab * 4, "logits")

    def x(self, n: int) -> Tensor:
        """The experts' input: activations [n, n_embd]."""
        return self._batch["x"].rows(0, n)

    def rows(self, n: int, layer: int) -> ExpertRows:
        """Routing of the first `n` tokens of the batch. Layers share all of it but the offsets, which outlast them."""
        b, k = self._batch, self.model.hparams.n_expert_used
        return ExpertRows(
            ids=b["ids"].rows(0, n),
            weights=b["weights"].rows(0, n),
            pairs=b["pairs"].rows(0, n * k),
            offsets=Tensor(self._offsets(layer), "I32", (self.model.hparams.n_expert + 1,)),
            positions=b["row_positions"].rows(0, n),
        )

    # --- weights -------------------------------------------------------------------------------------------------

    def _upload_constants(self) -> dict[str, Tensor]:
        """Copy what the model computed to the device."""
        tensors: dict[str, Tensor] = {}
        buffers = self._buffers.get("constants", [])
        for (name, values), buffer in zip(self.model.constants().items(), buffers, strict=True):
            staging = self.device.wrap_host(memoryview(values.tobytes()), label=name)
            tensors[name] = Tensor(buffer.span(0, values.nbytes), "F32", values.shape)
            self.copy_in(tensors[name].span, staging.span())
            self.queue.synchronize()
            staging.free()
        return tensors

    def _upload_weights(self, file: ModelFile, progress: Progress) -> dict[str, Tensor]:
        """Copy the weights and the resident experts to the device, from the mapped file."""
        sources = [self.device.wrap_host(m.data, label="model file") for m in file.mappings]
        self._host_buffers += sources
        names = stage_weights(file, self.model, self.plan.spec)
        resident = {layer: moe for layer, moe in self.moes.items() if layer not in self.plan.offloaded}
        total = sum(file.tensors[name].nbytes for name in names)
        total += sum(file.tensors[n].nbytes for moe in resident.values() for n in (moe.gate, moe.up, moe.down))
        weights: dict[str, Tensor] = {}
        done = 0
        groups = weight_groups(file, names, self.device.caps)
        for (group, _), buffer in zip(groups, self._buffers.get("weights", []), strict=True):
            offset = 0
            for name in group:
                info = file.tensors[name]
                span = buffer.span(offset, info.nbytes)
                self.copy_in(span, sources[info.shard].span(info.offset, info.nbytes))
                weights[name] = Tensor(span, info.type, info.shape)
                offset += align_up(info.nbytes, self._alignment)
                done += info.nbytes
        self.queue.synchronize()
        progress("uploading weights", done, total)
        buffers = iter(self._buffers.get("experts", []))
        for layer, moe in resident.items():
            infos = [file.tensors[name] for name in (moe.gate, moe.up, moe.down)]
            spans = {info.name: sources[info.shard].span(info.offset, info.nbytes) for info in infos}
            experts = expert_layer(file, layer, moe, spans)
            unit = Unit(layer=experts, experts=range(experts.n_expert))
            parts = [next(buffers).span() for _ in experts.tensors]
            self.queue.copy_regions(unit.regions(parts, self.plan.layouts[layer]))
            self.whole[layer] = self._tables_over(experts, parts)
            self.queue.synchronize()
            done += sum(info.nbytes for info in infos)
            progress("uploading weights", done, total)
        for source_buffer in sources:
            source_buffer.free()
        return weights

    # --- experts -------------------------------------------------------------------------------------------------

    def _upload_tables(self) -> None:
        tables = self.plan.tables
        if tables.nbytes:
            staging = self.device.alloc_host(tables.nbytes, label="expert tables")
            tables.upload(self.queue, self._whole("tables"), staging)
            staging.free()

    def _tables_over(self, layer: ExpertLayer, spans: list[Span]) -> Tables:
        """Tables over all experts of a layer, where they lie in `spans`."""
        strides = self.plan.layouts[layer.layer].strides
        gate, up, down = (
            ExpertTable(
                spans=(span,),
                where=self.plan.tables[TableKey(layer.n_expert, 0, layer.n_expert, stride)],
                type=t.type,
                n_out=t.n_out,
                n_in=t.n_in,
                slab_nbytes=t.slab_nbytes,
            )
            for t, span, stride in zip(layer.tensors, spans, strides, strict=True)
        )
        return gate, up, down

    def _make_ring(self) -> Ring:
        n_expert = self.model.hparams.n_expert
        table_nbytes = 3 * align_up(n_expert * 4, self._alignment)
        staging = self._host(self.choice.n_slots * table_nbytes, "slot tables")
        slots = []
        for i in range(self.choice.n_slots):
            span = self._buffers["slots"][i].span()
            slots.append(
                Slot(
                    span=span.sub(0, self.plan.slot_nbytes),
                    tables=span.sub(self.plan.slot_nbytes, table_nbytes),
                    staging=staging.span(i * table_nbytes, table_nbytes),
                )
            )
        kind = QueueKind.COMPUTE if self.choice.n_slots == 1 else QueueKind.COPY
        chaos = None
        if self.config.chaos_seed is not None:
            chaos = Chaos(self.device, self.plan.slot_nbytes, self.config.chaos_seed)
        return Ring(
            slots=slots,
            copy=self.device.queue(kind),
            compute=self.queue,
            range_tables=self.plan.tables,
            meter=self.meter,
            chaos=chaos,
        )

    def units(self, layer: int) -> list[Unit]:
        """The units that stream a whole layer."""
        assert self.store is not None, "this stage streams nothing"
        experts = self.store.layers[layer]
        capacity = self.capacity(layer)
        return [Unit(layer=experts, experts=r) for r in split_range(experts.n_expert, capacity)]

    def capacity(self, layer: int) -> int:
        """How many of a layer's experts fit a slot."""
        return self.plan.layouts[layer].capacity(self.plan.slot_nbytes)

    # --- host memory of a pass -----------------------------------------------------------------------------------

    def copy_in(self, dst: Span, src: Span) -> None:
        """Enqueue a copy of host memory to the start of a tensor here."""
        self.queue.copy_h2d(*padded(dst, src))

    def copy_out(self, dst: Span, src: Span) -> None:
        """Enqueue a copy of the start of a tensor here to host memory made by this stage."""
        self.queue.copy_d2h(*padded(dst, src))

    def _offsets(self, layer: int) -> Span:
        nbytes = (self.model.hparams.n_expert + 1) * 4
        return self._batch["offsets"].span.sub(self._moe_index[layer] * self._offsets_nbytes, nbytes)

    def fetch_counts(self, layer: int | None = None) -> None:
        """Enqueue the copy that `read_counts` reads: of one layer, or of all in one piece."""
        if layer is not None:
            offsets = self._offsets(layer)
            self.copy_out(self._counts.span(self._moe_index[layer] * self._offsets_nbytes, offsets.nbytes), offsets)
        elif self.moes:
            offsets = self._batch["offsets"].span
            self.copy_out(self._counts.span(0, offsets.nbytes), offsets)

    def read_counts(self) -> npt.NDArray[np.int32]:
        """How many rows each expert had in the last pass: I32 [layers with experts, n_expert]."""
        offsets = self._counts.span().host_view(np.int32).reshape(-1, self._offsets_nbytes // 4)
        return np.diff(offsets[: len(self.moes), : self.model.hparams.n_expert + 1], axis=1)

    def keep_routing(self) -> None:
        """Make room for the routing of a batch, forced or captured."""
        if self._routing is None and self.moes:
            nbytes = self._padded(self.choice.n_batch * self.model.hparams.n_expert_used * 4)
            self._routing = self._host(len(self.moes) * nbytes, "routing")

    def routing(self, layer: int, n: int) -> Span:
        """Routing of a layer for `n` tokens: I32 [n, n_expert_used]. After `keep_routing`."""
        assert self._routing is not None, "no room was made for routing"
        step = self._padded(self.choice.n_batch * self.model.hparams.n_expert_used * 4)
        return self._routing.span(self._moe_index[layer] * step, n * self.model.hparams.n_expert_used * 4)

    def hop(self, n: int) -> Span:
        """The hidden state on its way between devices: F32 [n, n_embd]."""
        assert self._hop is not None, "this stage is the only one"
        return self._hop.span(0, n * self.model.hparams.n_embd * 4)

    def drain(self) -> None:
        """Wait until nothing runs here any more, and take all slots back: also after a pass that was cut short."""
        for queue in {self.queue} if self.ring is None else {self.queue, self.ring.copy}:
            with suppress(DeviceError):  # whoever waited for its work has been told
                queue.synchronize()
        if self.ring is not None:
            self.ring.reset()

    def close(self) -> None:
        """Wait for the device and give all memory back; before the file is unmapped. A second call does nothing."""
        buffers = [*chain.from_iterable(self._buffers.values()), *self._host_buffers]
        if all(buffer.freed for buffer in buffers):  # by this, or with the device
            return
        self.drain()
        for buffer in buffers:
            with suppress(DeviceError):  # a lost device frees nothing
                buffer.free()
        if self.store is not None:
            self.store.close()
