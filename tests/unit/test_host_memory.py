"""RAM: how much there is, and plans that would take more of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.api import BufferUsage, Device, DeviceKind
from noria.api.errors import DoesNotFit, OutOfDeviceMemory
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.builtin.sim import open_sim
from noria.experts.host_memory import available_memory_nbytes, machine_memory_nbytes
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models.qwen3moe import build
from noria.runtime import EngineConfig, LoadMode, MemoryPlan, Session, plan_memory

MIB = 1024 * 1024
N_LAYER = 8


# --- how much there is -----------------------------------------------------------------------------------------------


def system(root: Path, available_mib: int, groups: dict[str, tuple[str, int, int]], path: str = "/") -> Path:
    """A system with so much available memory and these control groups: (limit, used, of it file pages), in MiB."""
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 9999 kB\nMemFree: 1 kB\nMemAvailable:   {available_mib * 1024} kB\n"
    (root / "proc/meminfo").write_text(text, encoding="ascii")
    (root / "proc/self/cgroup").write_text(f"1:name=old:/old\n0::{path}\n", encoding="ascii")
    for name, (limit, used, cached) in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit if limit == "max" else str(int(limit) * MIB), encoding="ascii")
        (folder / "memory.current").write_text(str(used * MIB), encoding="ascii")
        stat = f"anon 5\nactive_file {cached * MIB}\ninactive_file 0\n"
        (folder / "memory.stat").write_text(stat, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("groups", "path", "expected_mib"),
    [
        ({}, "/", 4000),
        ({"": ("max", 100, 0)}, "/", 4000),
        ({"": ("1000", 300, 100)}, "/", 800),  # a container sees its own group as the root
        ({"user/job": ("max", 1, 0), "user": ("600", 500, 50)}, "/user/job", 150),  # the parent's limit counts too
        ({"user/job": ("9000", 1, 0), "other": ("10", 1, 0)}, "/user/job", 4000),
        ({"": ("1000", 1300, 100)}, "/", 0),
    ],
    ids=str,
)
def test_what_is_available(tmp_path: Path, groups: dict[str, Any], path: str, expected_mib: int) -> None:
    assert available_memory_nbytes(system(tmp_path, 4000, groups, path)) == expected_mib * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory_nbytes(tmp_path) == machine_memory_nbytes()
    assert 0 < available_memory_nbytes() <= machine_memory_nbytes()


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how much RAM is available, in MiB."""

    def available(mib: float) -> None:
        for module in ("runtime.planner", "builtin.reference.backend", "builtin.reference.weights"):
            monkeypatch.setattr(f"noria.{module}.available_memory_nbytes", lambda: int(mib * MIB))

    return available


def open_reference(kind: DeviceKind = DeviceKind.CPU, **caps: Any) -> Device:
    """The reference, or a device of another kind that computes as it does."""
    device = ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()})
    if kind is DeviceKind.GPU:
        device.memory_free = lambda: 1 << 40  # type: ignore[method-assign]
    device.info = replace(device.info, kind=kind, memory_nbytes=MIB)  # of which a part is left alone
    device.caps = replace(device.caps, **caps)
    return device


def test_the_reference_promises_no_more_than_there_is(ram: Any) -> None:
    ram(80)
    with ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()}) as device:
        assert device.memory_free() == 70 * MIB, "the rest is for weights as f32"
        buffer = device.alloc(30 * MIB, usage=BufferUsage.WEIGHTS, label="weights")  # takes no RAM before it is written
        assert device.memory_free() == 40 * MIB
        ram(20)  # somebody else took it
        assert device.memory_free() == 20 * MIB
        with pytest.raises(OutOfDeviceMemory):
            device.alloc(21 * MIB, usage=BufferUsage.WEIGHTS, label="more")
        buffer.free()


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = tmp_path_factory.mktemp("ram") / "tiny.gguf"
    synthesize("tiny", path, n_layer=N_LAYER, seed=3)
    with open_model(path) as file:
        yield file


def plan_of(file: ModelFile, device: Device, **flags: Any) -> MemoryPlan:
    config = EngineConfig(**{"n_ctx": 64, "n_cpu_moe": N_LAYER} | flags)
    return plan_memory(file, build(file), [device], lambda: device, config)


def host_mib(file: ModelFile) -> float:
    return sum(t.nbytes for name, t in file.tensors.items() if "_exps" in name) / MIB


def test_copies_beyond_the_ram_are_refused_with_a_way_out(file: ModelFile, ram: Any) -> None:
    needed = host_mib(file)
    with open_reference(DeviceKind.GPU) as gpu:
        ram(needed * 32 / 31 - 1)  # a part is left alone
        with pytest.raises(DoesNotFit, match=r"host RAM: the plan is (0\.9|1\.0) MiB over") as caught:
            plan_of(file, gpu, load_mode=LoadMode.NONE)
        assert caught.value.remedy == "The smallest single change that fits: --load-mode mmap."
        assert f"{needed:.1f}  of {needed - 31 / 32:.1f} usable" in caught.value.table
        plan_of(file, gpu, load_mode=LoadMode.MMAP)
        ram(needed * 32 / 31 + 1)
        plan = plan_of(file, gpu, load_mode=LoadMode.NONE)
        assert (plan.copied_nbytes, plan.mapped_nbytes, plan.notes) == (plan.host_nbytes, 0, [])


def test_a_mapped_file_beyond_the_ram_is_said(file: ModelFile, ram: Any) -> None:
    with open_reference(DeviceKind.GPU) as gpu:
        ram(host_mib(file) * 2)
        assert plan_of(file, gpu).notes == []
        ram(host_mib(file) / 2)
        [note] = plan_of(file, gpu).notes
    assert "MiB of experts stay in the file" in note
    assert "read from disk again and again" in note


def test_auto_maps_what_it_cannot_copy(file: ModelFile, ram: Any) -> None:
    """Where a mapping cannot be page-locked, `auto` would copy."""
    with open_reference(DeviceKind.GPU, host_register=False) as gpu:
        for mib, mode in ((2 * host_mib(file), LoadMode.NONE), (host_mib(file), LoadMode.MMAP)):
            ram(mib)
            plan = plan_of(file, gpu)
            assert plan.stages[0].load_mode is mode
            assert any("not page-locked" in note for note in plan.notes) == (mode is LoadMode.MMAP)


def test_a_cpu_and_its_copies_of_experts_share_the_ram(file: ModelFile, ram: Any) -> None:
    """Either alone would fit."""
    ram(1 << 20)
    with open_reference() as device:
        plan = plan_of(file, device, load_mode=LoadMode.NONE)
        buffers, copies = plan.stages[0].nbytes, plan.host_nbytes
        assert copies > 0
        ram((max(buffers, copies) + min(buffers, copies) / 2) / MIB * 32 / 31)
        with pytest.raises(DoesNotFit, match="host RAM: the plan is") as caught:
            plan_of(file, device, load_mode=LoadMode.NONE, n_batch=64, n_ubatch=64)
        assert caught.value.shortfall == pytest.approx(min(buffers, copies) / 2, rel=0.01)


def test_a_simulator_reads_nothing_and_needs_no_ram(file: ModelFile, ram: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ram(1)
    monkeypatch.setattr(ModelFile, "read_into", lambda *args: pytest.fail("read"))
    config = EngineConfig(n_ctx=64, n_cpu_moe=N_LAYER, load_mode=LoadMode.NONE)
    with open_sim() as device, Session(file, build(file), [device], lambda: device, config) as session:
        session.forward([1, 2, 3])
        assert session.plan.host_capacity is None
        assert session.notes == []
        assert session.stages[0].store is not None
        assert session.stages[0].store.pinned_nbytes == session.plan.host_nbytes


def test_no_more_is_page_locked_than_there_is_ram_for(file: ModelFile, ram: Any) -> None:
    """The rest is copied from pageable memory, and the results are the same."""
    logits = []
    for share in (2.0, 0.5, 0.0):
        ram(host_mib(file) * share)
        with open_reference(DeviceKind.GPU) as gpu:
            config = EngineConfig(n_ctx=64, n_cpu_moe=N_LAYER)
            with Session(file, build(file), [gpu], lambda: gpu, config) as session:
                store = session.stages[0].store
                assert store is not None
                assert store.locked_nbytes <= max(session.plan.lockable_nbytes, 0)
                assert (store.pageable_nbytes == 0) == (share == 2.0)
                assert (store.pinned_nbytes > 0) == (share > 0)
                said = any("there is RAM for" in note for note in session.notes)
                assert said == (share < 2.0)
                logits.append(session.forward([5, 6, 7])[0])
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])
