"""Makes memory plans: counts what a choice needs, and finds the best choice that fits within what the user fixed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from noria.api import BufferUsage, align_up, tensor_nbytes
from noria.api.errors import DoesNotFit, OpUnsupported
from noria.api.ops import Op, Support
from noria.experts import (
    RangeTables,
    TableKey,
    UnitLayout,
    slot_nbytes_for,
    split_range,
    unit_layout,
)
from noria.experts.host_memory import available_memory_nbytes
from noria.gguf import ModelFile
from noria.models import Model, MoeSpec
from noria.plugins.config import MIN_SLOTS
from noria.runtime.config import EngineConfig, LoadMode
from noria.runtime.dryrun import DryRun, PhantomBuffer
from noria.runtime.host_store import resolve
from noria.runtime.kv_cache import kv_layer_nbytes, kv_views
from noria.runtime.placement import StageSpec, is_auto, moe_layers, most_cpu_moe, offloaded_layers
from noria.runtime.plan import (
    MIB,
    Choice,
    MemoryPlan,
    PlannedBuffer,
    StagePlan,
    batch_tensors,
    stage_weights,
    weight_groups,
)
from noria.runtime.remedy import LEAST_N_TOKENS, remedy

DEFAULT_N_CTX = 4096
DEFAULT_N_UBATCH = 2048
# What is given up for room, and down to what, in the order of what it costs: first tokens beyond those whose compute
# hides the copies anyway, last what makes experts cross the bus more often and kernels small.
GIVE_UP = (
    ("n_batch", 4 * DEFAULT_N_UBATCH),
    ("n_ubatch", 512),
    ("n_slots", MIN_SLOTS),
    ("n_batch", 512),
    ("n_ubatch", LEAST_N_TOKENS),
    ("n_batch", LEAST_N_TOKENS),
    ("n_slots", 1),  # no ring at all: one slot, filled in line with the compute
)
LOGITS_NBYTES = 64 * MIB  # of all positions' logits, this much at a time


class Planner:
    """Makes plans for one model on given stages."""

    def __init__(self, file: ModelFile, model: Model, stages: Sequence[StageSpec], config: EngineConfig) -> None:
        self.file, self.model, self.stages, self.config = file, model, stages, config
        self.most_cpu_moe = most_cpu_moe(model, stages, config)
        self.capacity = [self._capacity(stage) for stage in stages]
        ram_nbytes = available_memory_nbytes()
        self.ram_capacity = ram_nbytes - _margin(ram_nbytes)
        self._can_prefetch = any(stage.device.caps.copy_queues for stage in stages if not stage.host)
        self._dry: dict[tuple[int, int, int, int, int, str, str], DryRun] = {}

    def _capacity(self, stage: StageSpec) -> int:
        """Usable bytes: what is free less a margin, or what the user named."""
        if self.config.memory_nbytes is not None and not stage.host:
            return self.config.memory_nbytes
        return stage.device.memory_free() - _margin(stage.device.info.memory_nbytes)

    # --- choosing ------------------------------------------------------------------------------------------------

    def make(self) -> MemoryPlan:
        """The best plan within what the user fixed.

        Raises:
            DoesNotFit: there is none; says by how much, and names the smallest single change that would fit. Also where
                it fits the devices, but not the RAM.
            OpUnsupported: a device cannot run an op of this model at all, or may not fall back.
            ConfigError: the flags contradict each other or the model.
        """
        tried = self.find()
        if tried.shortfall > 0:
            words = self._oversize(tried) + remedy(self, lambda plan: plan.shortfall)
            raise DoesNotFit(_tightest(tried), tried.shortfall, words, tried.text())
        if tried.host_shortfall > 0:
            words = remedy(self, lambda plan: plan.host_shortfall)
            raise DoesNotFit("host RAM", tried.host_shortfall, words, tried.text())
        self._check_ops(tried)
        return tried

    def find(self) -> MemoryPlan:
        """The first candidate that fits the devices, or the last one tried."""
        first = self.first_choice()
        for choice in self._candidates(first):
            plan = self.plan(choice)
            if plan.shortfall <= 0:
                return replace(plan, notes=self._notes(first, plan))
        return plan

    def _notes(self, first: Choice, plan: MemoryPlan) -> list[str]:
        notes = _given_up(first, plan)
        if not self._can_prefetch and not self.config.inline and any(stage.streamed for stage in plan.stages):
            notes.append(
                "prefetch is off: no copies run beside the compute on this device, so they run in line with it"
            )
        notes += self._ram_notes(plan)
        moes = moe_layers(self.model, range(self.model.hparams.n_layer)).values()
        experts = [name for moe in moes for name in (moe.gate, moe.up, moe.down)]
        for pattern, target in self.config.override_tensors:
            if not any(re.search(pattern, name) for name in experts):
                notes.append(
                    f"-ot {pattern}={target} does nothing: it matches no expert tensor, and only those can move"
                )
        return notes

    def _ram_notes(self, plan: MemoryPlan) -> list[str]:
        notes: list[str] = []
        if plan.host_capacity is None:
            return notes
        if any(stage.load_mode is not self._load_mode(stage.spec) for stage in plan.stages if stage.host_nbytes):
            notes.append(
                f"experts are not page-locked: copies of {plan.host_nbytes / MIB:.0f} MiB would be, for which "
                f"{plan.host_capacity / MIB:.0f} MiB of RAM are not enough"
            )
        room = plan.host_capacity - plan.copied_nbytes
        if plan.mapped_nbytes > room:
            notes.append(
                f"{plan.mapped_nbytes / MIB:.0f} MiB of experts stay in the file, and {max(room, 0) / MIB:.0f} MiB of "
                f"RAM are left for them: they will be read from disk again and again. Keep more layers on the device "
                f"(a lower -ncmoe), or use a smaller quantization"
            )
        return notes

    def first_choice(self) -> Choice:
        """What is planned where there is room for everything."""
        config, hparams = self.config, self.model.hparams
        n_ctx = config.n_ctx or min(DEFAULT_N_CTX, hparams.n_ctx_train)
        n_batch = min(config.n_prompt or n_ctx, n_ctx) if is_auto(config.n_batch) else min(int(config.n_batch), n_ctx)
        n_ubatch = DEFAULT_N_UBATCH if is_auto(config.n_ubatch) else int(config.n_ubatch)
        return Choice(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(n_ubatch, n_batch),
            n_slots=config.prefetch_slots if self._can_prefetch and not config.inline else 1,
            n_cpu_moe=0 if is_auto(config.n_cpu_moe) else min(int(config.n_cpu_moe), self.most_cpu_moe),
            type_k=config.type_k,
            type_v=config.type_v,
        )

    def _candidates(self, first: Choice) -> Iterator[Choice]:
        """Choices within what the user fixed, best first."""
        config = self.config
        yield self._with_least_cpu_moe(first)
        choice = replace(first, n_cpu_moe=self.most_cpu_moe) if is_auto(config.n_cpu_moe) else first
        lowerable = {"n_batch": is_auto(config.n_batch), "n_ubatch": is_auto(config.n_ubatch)}
        lowerable["n_slots"] = not config.keep_slots
        for key, least in GIVE_UP:
            least = max(least, choice.n_ubatch) if key == "n_batch" else least
            while lowerable[key] and (value := getattr(choice, key)) > least:
                value = value - 1 if key == "n_slots" else max(value // 2, least)
                choice = replace(choice, **{key: value})
                yield choice

    def _with_least_cpu_moe(self, choice: Choice) -> Choice:
        """With -ncmoe auto: the fewest offloaded layers that fit (all of them if none do)."""
        if not is_auto(self.config.n_cpu_moe):
            return choice
        if self.plan(replace(choice, n_cpu_moe=0)).shortfall <= 0:  # apart: the first offloaded layer brings the ring
            return replace(choice, n_cpu_moe=0)
        low, high = min(1, self.most_cpu_moe), self.most_cpu_moe
        while low < high:
            middle = (low + high) // 2
            if self.plan(replace(choice, n_cpu_moe=middle)).shortfall <= 0:
                high = middle
            else:
                low = middle + 1
        return replace(choice, n_cpu_moe=high)

    def changed(self, **changes: Any) -> MemoryPlan:
        """What would be found with another configuration."""
        other = Planner(self.file, self.model, self.stages, replace(self.config, **changes))
        other.capacity, other.ram_capacity, other._dry = self.capacity, self.ram_capacity, self._dry
        return other.find()

    def _oversize(self, plan: MemoryPlan) -> str:
        """What is larger than a buffer may be, if anything is."""
        for stage in plan.stages:
            most = stage.spec.device.caps.max_buffer_nbytes
            for buffer in stage.buffers.values():
                if max(buffer.sizes) > most:
                    names = [t.name for t in self.file.tensors.values() if t.nbytes > most]
                    which = f" (tensor {names[0]})" if names else ""
                    return (
                        f"One buffer may have {most / MIB:.1f} MiB there, '{buffer.label}'{which} needs one of "
                        f"{max(buffer.sizes) / MIB:.1f} MiB. "
                    )
        return ""

    def _check_ops(self, plan: MemoryPlan) -> None:
        for stage in plan.stages:
            for query, support in stage.dry.queries.items():
                device = stage.spec.device
                hint = ""
                if query.op in (Op.ATTENTION, Op.KV_STORE):
                    hint = f"KV types of {device.info.id}: {', '.join(device.caps.kv_types)} (-ctk, -ctv)."
                if support is Support.IMPOSSIBLE:
                    raise OpUnsupported(device.info.backend, query, hint)
                if support is Support.MISSING and not self.config.fallback:
                    hint = hint or "Leave out --no-fallback to run it on the reference, slowly."
                    raise OpUnsupported(device.info.backend, query, hint)

    # --- counting ------------------------------------------------------------------------------------------------

    def plan(self, choice: Choice) -> MemoryPlan:
        """Count every buffer of `choice`."""
        offloaded = offloaded_layers(self.model, self.stages, self.config, choice.n_cpu_moe)
        stages = [self._stage(i, stage, choice, offloaded) for i, stage in enumerate(self.stages)]
        plan = MemoryPlan(choice=choice, stages=stages, capacity=self.capacity, ram_capacity=self.ram_capacity)
        if self.config.load_mode is LoadMode.AUTO and plan.copied_nbytes and plan.host_shortfall > 0:
            plan = replace(plan, stages=[replace(stage, load_mode=LoadMode.MMAP) for stage in stages])
        return plan

    def _load_mode(self, spec: StageSpec) -> LoadMode:
        return resolve(self.config.load_mode, spec.device.caps)

    def _stage(self, index: int, spec: StageSpec, choice: Choice, offloaded: frozenset[int]) -> StagePlan:
        caps, hparams = spec.device.caps, self.model.hparams

        def aligned(nbytes: int) -> int:
            return align_up(nbytes, caps.buffer_alignment)

        moes = moe_layers(self.model, spec.layers)
        slabs = {
            layer: tuple(_slab_nbytes(self.file, name) for name in (moe.gate, moe.up, moe.down))
            for layer, moe in moes.items()
        }
        layouts = {layer: unit_layout(sizes, caps.table_unit, caps.buffer_alignment) for layer, sizes in slabs.items()}
        here = frozenset(layer for layer in moes if layer in offloaded)
        readable = frozenset(
            layer
            for layer in here
            if caps.host_gather
            and layouts[layer].strides == slabs[layer]
            and self._aligned(moes[layer], caps.table_unit)
        )
        in_place = spec.host or (caps.unified_memory and caps.host_gather)
        if in_place:  # its kernels read experts where they are; those they cannot read are copied for good
            here = readable
        streamed = bool(here) and not in_place
        n_expert = hparams.n_expert
        slot = 0
        if streamed:
            slot = slot_nbytes_for([slabs[layer] for layer in here], n_expert, caps.table_unit, caps.buffer_alignment)
            most = (caps.max_buffer_nbytes - 3 * aligned(n_expert * 4)) // caps.buffer_alignment * caps.buffer_alignment
            slot = max(min(slot, most), *(layouts[layer].nbytes(1) for layer in here))
        tables = self._tables(spec, layouts, here, slot)
        n_logits = 1
        if self.config.logits_all:
            n_logits = max(1, min(choice.n_ubatch, LOGITS_NBYTES // (hparams.n_vocab * 4)))
        dry = self._dry_run(index, spec, choice, n_logits)
        weights = weight_groups(self.file, stage_weights(self.file, self.model, spec), caps)
        kv = (
            kv_layer_nbytes(self.model, i, choice.n_ctx, choice.type_k, choice.type_v, caps.buffer_alignment)
            for i in spec.layers
        )
        batch = sum(
            aligned(tensor_nbytes(*entry)) for entry in batch_tensors(self.model, spec, choice.n_batch).values()
        )
        slots = choice.n_slots * [slot + 3 * aligned(n_expert * 4)] if streamed else []
        resident = [layer for layer in moes if layer not in here]
        buffers: dict[str, PlannedBuffer] = {}

        def add(key: str, label: str, usage: BufferUsage, *sizes: int) -> None:
            if any(sizes):
                buffers[key] = PlannedBuffer(label, usage, sizes)

        add("weights", "weights", BufferUsage.WEIGHTS, *(nbytes for _, nbytes in weights))
        constants = self.model.constants().values()
        add("constants", "constants", BufferUsage.WEIGHTS, *(aligned(values.nbytes) for values in constants))
        parts = (nbytes for layer in resident for nbytes in layouts[layer].part_nbytes(n_expert))
        add("experts", f"experts of {len(resident)} layers", BufferUsage.EXPERTS, *parts)
        add("kv", f"KV cache, {choice.n_ctx} cells", BufferUsage.KV, *kv)
        add("slots", f"ring, {choice.n_slots} slots" if choice.n_slots > 1 else "slot", BufferUsage.SLOT, *slots)
        add("tables", "expert tables", BufferUsage.COMPUTE, tables.nbytes)
        add("batch", f"batch of {choice.n_batch} tokens", BufferUsage.COMPUTE, batch)
        add("workspace", f"workspace of {choice.n_ubatch} tokens", BufferUsage.COMPUTE, dry.workspace_nbytes)
        add("scratch", "scratch", BufferUsage.COMPUTE, dry.scratch_nbytes)
        return StagePlan(
            spec=spec,
            offloaded=here,
            streamed=streamed,
            readable=readable,
            load_mode=self._load_mode(spec),
            host_nbytes=sum(n_expert * sum(slabs[layer]) for layer in here),
            slot_nbytes=slot,
            layouts=layouts,
            tables=tables,
            n_logits=n_logits,
            dry=dry,
            buffers=buffers,
        )

    def _aligned(self, moe: MoeSpec, table_unit: int) -> bool:
        return all(self.file.tensors[name].offset % table_unit == 0 for name in (moe.gate, moe.up, moe.down))

    def _tables(
        self, spec: StageSpec, layouts: dict[int, UnitLayout], offloaded: frozenset[int], slot_nbytes: int
    ) -> RangeTables:
        """Every range table this stage can need: resident and gathered layers, and whole units of each ring layout."""
        caps, n_expert = spec.device.caps, self.model.hparams.n_expert
        tables = RangeTables(caps.table_unit, caps.buffer_alignment)
        for layer, layout in layouts.items():
            ranges = [range(n_expert)]
            if layer in offloaded and slot_nbytes:
                ranges += split_range(n_expert, layout.capacity(slot_nbytes))
            for experts in ranges:
                for stride in layout.strides:
                    tables.add(TableKey(n_expert, experts[0], experts[-1] + 1, stride))
        return tables

    def _dry_run(self, index: int, spec: StageSpec, choice: Choice, n_logits: int) -> DryRun:
        key = (index, choice.n_batch, choice.n_ubatch, choice.n_ctx, n_logits, choice.type_k, choice.type_v)
        if key not in self._dry:
            phantom = PhantomBuffer(spec.device).span()
            spans = [phantom] * len(spec.layers)
            views = kv_views(self.model, spec.layers, spans, choice.n_ctx, choice.type_k, choice.type_v)
            self._dry[key] = DryRun(
                self.file,
                self.model,
                spec.kernels,
                spec.layers,
                views,
                n_batch=choice.n_batch,
                n_ubatch=choice.n_ubatch,
                n_kv=choice.n_ctx,
                n_logits=n_logits,
                with_embedding=spec.embed,
                with_output=spec.output,
            )
        return self._dry[key]


def _given_up(first: Choice, plan: MemoryPlan) -> list[str]:
    """What the plan lacks of the first choice, one line each."""
    notes, choice = [], plan.choice
    if choice.n_batch < first.n_batch:
        notes.append(f"-b lowered to {choice.n_batch}: experts cross the bus once for each so many tokens")
    if choice.n_ubatch < first.n_ubatch:
        notes.append(f"-ub lowered to {choice.n_ubatch} to fit")
    if choice.n_slots < first.n_slots and any(stage.streamed for stage in plan.stages):
        if choice.n_slots == 1:
            notes.append("prefetch is off: there is room for one slot only, copies run in line with the compute")
        else:
            notes.append(f"the ring has {choice.n_slots} slots instead of {first.n_slots}: there is no room for more")
    return notes


def _margin(nbytes: int) -> int:
    """What is left alone of so much memory."""
    return min(512 * MIB, nbytes // 32)


def _tightest(plan: MemoryPlan) -> str:
    """The device that lacks most."""
    over = [
        max(stage.nbytes - capacity, stage.oversize) for stage, capacity in zip(plan.stages, plan.capacity, strict=True)
    ]
    return plan.stages[over.index(max(over))].spec.device.info.id


def _slab_nbytes(file: ModelFile, name: str) -> int:
    info = file.tensors[name]
    return info.nbytes // info.shape[0]


__all__ = ["Choice", "MemoryPlan", "Planner", "StagePlan", "batch_tensors", "stage_weights"]
