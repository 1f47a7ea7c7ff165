"""The memory plan: every buffer of a run, counted before anything is loaded.

Sizes come from the tensors of the file, from the contract's own layouts, and from running the model code dry, so a plan
is exact: the engine allocates these buffers and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from noria.api import BufferUsage, DeviceCaps, DeviceKind, align_up
from noria.experts import RangeTables, UnitLayout
from noria.gguf import ModelFile
from noria.models import Model
from noria.runtime.config import LoadMode
from noria.runtime.dryrun import DryRun
from noria.runtime.placement import StageSpec, moe_layers

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

    @property
    def prefetch_flag(self) -> str:
        """How a user asks for as many slots."""
        return f"--prefetch-slots {self.n_slots}" if self.n_slots > 1 else "--prefetch off"


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One row of the plan: a buffer, or several of one kind, with the bytes of each."""

    label: str
    usage: BufferUsage
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The buffers of one stage.

    Attributes:
        offloaded: its layers whose experts stay in host RAM.
        streamed: whether those pass through slots here. They do not on the host device, nor where host and device
            share their memory.
        readable: those of them whose every slab a table can point at where it lies in the file.
        load_mode: how they come to be in RAM.
        host_nbytes: of their experts.
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
    load_mode: LoadMode
    host_nbytes: int
    slot_nbytes: int
    layouts: dict[int, UnitLayout]
    tables: RangeTables
    n_logits: int
    dry: DryRun
    buffers: dict[str, PlannedBuffer]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def copied_nbytes(self) -> int:
        """RAM for copies of experts."""
        return self.host_nbytes if self.load_mode is LoadMode.NONE and not self.simulated else 0

    @property
    def mapped_nbytes(self) -> int:
        """Experts in the mapped file, which the system may drop and read again."""
        return self.host_nbytes if self.load_mode is LoadMode.MMAP and not self.simulated else 0

    @property
    def ram_nbytes(self) -> int:
        """RAM for the buffers of a device that has no other memory."""
        device = self.spec.device
        return self.nbytes if device.info.kind is DeviceKind.CPU or device.caps.unified_memory else 0

    @property
    def simulated(self) -> bool:
        """Whether the device computes no numbers: then experts are neither read nor kept."""
        return self.spec.device.info.kind is DeviceKind.SIMULATED

    @property
    def oversize(self) -> int:
        """By how many bytes the largest buffer is over what one may have; 0 or less if it is not."""
        sizes = (nbytes for buffer in self.buffers.values() for nbytes in buffer.sizes)
        return max(sizes) - self.spec.device.caps.max_buffer_nbytes

    def lines(self) -> list[str]:
        """Rows of a plain table, in MiB."""
        return [f"    {buffer.label:<32}{buffer.nbytes / MIB:>12.1f}" for buffer in self.buffers.values()]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan that may or may not fit.

    Attributes:
        capacity: what each stage's device may use, by stage.
        ram_capacity: RAM that the run may use.
        notes: what was changed to make it fit, one line each.
    """

    choice: Choice
    stages: list[StagePlan]
    capacity: list[int]
    ram_capacity: int
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
        oversize = [stage.oversize for stage in self.stages if stage.oversize > 0]
        return max([*oversize, *(used[key] - room[key] for key in used)])

    @property
    def host_nbytes(self) -> int:
        """Experts in host RAM."""
        return sum(stage.host_nbytes for stage in self.stages)

    @property
    def host_capacity(self) -> int | None:
        """RAM for experts: what devices without memory of their own leave. None = no limit, on simulators."""
        if all(stage.simulated for stage in self.stages):
            return None
        return self.ram_capacity - sum(stage.ram_nbytes for stage in self.stages)

    @property
    def host_shortfall(self) -> int:
        """Bytes of RAM missing for what cannot be dropped; 0 or less if it fits. Mapped experts can be."""
        return 0 if self.host_capacity is None else self.copied_nbytes - self.host_capacity

    @property
    def lockable_nbytes(self) -> int:
        """RAM that is left to page-lock the mapped file in."""
        return self.ram_capacity - sum(stage.ram_nbytes for stage in self.stages) - self.copied_nbytes

    @property
    def copied_nbytes(self) -> int:
        return sum(stage.copied_nbytes for stage in self.stages)

    @property
    def mapped_nbytes(self) -> int:
        return sum(stage.mapped_nbytes for stage in self.stages)

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
            f"-ctk {c.type_k.lower()} -ctv {c.type_v.lower()} {c.prefetch_flag}), MiB:"
        ]
        for stage, capacity in zip(self.stages, self.capacity, strict=True):
            layers = f"layers {stage.spec.layers[0]}-{stage.spec.layers[-1]}" if stage.spec.layers else "output"
            lines.append(f"  {stage.spec.device.info.id} ({stage.spec.device.info.name}), {layers}")
            lines += stage.lines()
            lines.append(f"    {'sum':<32}{stage.nbytes / MIB:>12.1f}  of {capacity / MIB:.1f} usable")
        usable = "" if self.host_capacity is None else f"  of {max(self.host_capacity, 0) / MIB:.1f} usable"
        lines.append(f"  host RAM\n    {'experts':<32}{self.host_nbytes / MIB:>12.1f}{usable}")
        return "\n".join(lines)


def stage_weights(file: ModelFile, model: Model, spec: StageSpec) -> list[str]:
    """Names of the non-expert tensors a stage reads from the file, each once."""
    names: dict[str, None] = {}
    computed = model.constants()
    for w in model.weights():
        here = (
            (w.layer is None and spec.embed)
            or (w.layer == model.hparams.n_layer and spec.output)
            or (w.layer is not None and w.layer in spec.layers)
        )
        if here and not w.experts and w.name in file.tensors and w.name not in computed:
            names[w.name] = None
    return list(names)


def weight_groups(file: ModelFile, names: Sequence[str], caps: DeviceCaps) -> list[tuple[list[str], int]]:
    """Which weights lie together in a buffer, in this order, and its bytes: as few buffers as the device allows."""
    groups: list[tuple[list[str], int]] = []
    for name in names:
        nbytes = align_up(file.tensors[name].nbytes, caps.buffer_alignment)
        if groups and groups[-1][1] + nbytes <= caps.max_buffer_nbytes:
            group, size = groups[-1]
            groups[-1] = ([*group, name], size + nbytes)
        else:
            groups.append(([name], nbytes))
    return groups


def offsets_nbytes(model: Model, spec: StageSpec) -> int:
    """Bytes from one layer's `ExpertRows.offsets` to the next one's."""
    return align_up((model.hparams.n_expert + 1) * 4, spec.device.caps.buffer_alignment)


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
            "offsets": ("I32", (len(moe_layers(model, spec.layers)), offsets_nbytes(model, spec) // 4)),
            "row_positions": ("I32", (n_batch, k)),
        }
    return tensors
