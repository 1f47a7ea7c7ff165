"""The memory plan: every buffer of a run, counted before anything is loaded.

Sizes come from the tensors of the file, from the contract's own layouts, and from running the model code dry, so a plan
is exact: the engine allocates these buffers and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from noria.api import BufferUsage
from noria.experts import RangeTables, UnitLayout
from noria.gguf import ModelFile
from noria.models import Model
from noria.runtime.dryrun import DryRun
from noria.runtime.placement import StageSpec

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The numbers a plan is made for."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_slots: int
    n_cpu_moe: int
    type_k: str
    type_v: str


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One row of the plan: a buffer, or several of one kind."""

    label: str
    usage: BufferUsage
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The buffers of one stage.

    Attributes:
        offloaded: its layers whose experts stay in host RAM.
        streamed: whether those pass through slots here. They do not on the host device, nor where host and device
            share their memory.
        readable: those of them whose every slab a table can point at where it lies in the file.
        slot_nbytes: of one slot; 0 without a ring.
        layouts: how a unit of each offloaded layer lies in a slot.
        tables: the expert tables to upload.
        n_logits: rows of logits computed at once.
        buffers: what is allocated, by a key the stage knows it by.
    """

    spec: StageSpec
    offloaded: frozenset[int]
    streamed: bool
    readable: frozenset[int]
    slot_nbytes: int
    layouts: dict[int, UnitLayout]
    tables: RangeTables
    n_logits: int
    dry: DryRun
    buffers: dict[str, PlannedBuffer]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def lines(self) -> list[str]:
        """Rows of a plain table, in MiB."""
        return [f"    {buffer.label:<32}{buffer.nbytes / MIB:>12.1f}" for buffer in self.buffers.values()]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan that may or may not fit.

    Attributes:
        capacity: what each stage's device may use, by stage.
        host_nbytes: experts in host RAM.
        notes: what was changed to make it fit, one line each.
    """

    choice: Choice
    stages: list[StagePlan]
    capacity: list[int]
    host_nbytes: int
    notes: list[str] = field(default_factory=list)

    @property
    def shortfall(self) -> int:
        """Bytes missing on the device that is most over; 0 or less if it fits."""
        used: dict[int, int] = {}
        room: dict[int, int] = {}
        for stage, capacity in zip(self.stages, self.capacity, strict=True):
            key = id(stage.spec.device)
            used[key] = used.get(key, 0) + stage.nbytes
            room[key] = capacity
        return max(used[key] - room[key] for key in used)

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """(device, what, bytes), in the order of a table."""
        for stage in self.stages:
            for buffer in stage.buffers.values():
                yield stage.spec.device.info.id, buffer.label, buffer.nbytes

    def text(self) -> str:
        """The plan as a plain table, in MiB."""
        c = self.choice
        lines = [
            f"memory plan (-c {c.n_ctx} -b {c.n_batch} -ub {c.n_ubatch} -ncmoe {c.n_cpu_moe} "
            f"-ctk {c.type_k.lower()} -ctv {c.type_v.lower()} --prefetch-slots {c.n_slots}), MiB:"
        ]
        for stage, capacity in zip(self.stages, self.capacity, strict=True):
            layers = f"layers {stage.spec.layers[0]}-{stage.spec.layers[-1]}" if stage.spec.layers else "output"
            lines.append(f"  {stage.spec.device.info.id} ({stage.spec.device.info.name}), {layers}")
            lines += stage.lines()
            lines.append(f"    {'sum':<32}{stage.nbytes / MIB:>12.1f}  of {capacity / MIB:.1f} usable")
        lines.append(f"  host RAM\n    {'experts':<32}{self.host_nbytes / MIB:>12.1f}")
        return "\n".join(lines)


def stage_weights(file: ModelFile, model: Model, spec: StageSpec) -> list[str]:
    """Names of the non-expert tensors a stage holds, each once."""
    names: dict[str, None] = {}
    for w in model.weights():
        here = (
            (w.layer is None and spec.embed)
            or (w.layer == model.hparams.n_layer and spec.output)
            or (w.layer is not None and w.layer in spec.layers)
        )
        if here and not w.experts and w.name in file.tensors:
            names[w.name] = None
    return list(names)


def batch_tensors(model: Model, spec: StageSpec, n_batch: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(type, shape) of what a stage keeps for a whole batch."""
    p = model.hparams
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "tokens": ("I32", (n_batch,)),
        "positions": ("I32", (n_batch,)),
        "hidden": ("F32", (n_batch, p.n_embd)),
    }
    if p.n_expert:
        k = p.n_expert_used
        tensors |= {
            "x": (spec.device.caps.activation_type, (n_batch, p.n_embd)),
            "ids": ("I32", (n_batch, k)),
            "weights": ("F32", (n_batch, k)),
            "pairs": ("I32", (n_batch * k,)),
            "offsets": ("I32", (p.n_expert + 1,)),
            "row_positions": ("I32", (n_batch, k)),
        }
    return tensors
