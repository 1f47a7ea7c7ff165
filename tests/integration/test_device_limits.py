"""Devices that copy only aligned bytes or have only small buffers: the same plan, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.api import BufferUsage, Device, QueueKind
from noria.api.errors import DoesNotFit, TransferError
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.builtin.sim import OPTIONS as SIM_OPTIONS
from noria.builtin.sim import SimBackend, open_sim
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models import qwen3moe
from noria.runtime import EngineConfig, LoadMode, Session

TOKENS = np.arange(40, dtype=np.int32)
UNIT = 4096


@pytest.fixture
def file(demo_path: Path) -> Iterator[ModelFile]:
    with open_model(demo_path) as file:
        yield file


def open_reference(**caps: Any) -> Device:
    device = ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()})
    device.caps = replace(device.caps, host_gather=False, **caps)
    return device


def run(file: ModelFile, device: Device, **config: Any) -> np.ndarray:
    """Logits of a prompt in two batches, and of a token."""
    flags: dict[str, Any] = {"n_ctx": 64, "n_batch": 24, "n_ubatch": 16, "logits_all": True} | config
    model = qwen3moe.build(file)
    with Session(file, model, [device], lambda: device, EngineConfig(**flags)) as session:
        logits, routing = session.forward(TOKENS, logits_all=True, capture=True)
        assert device.allocated_peak == session.plan.stages[0].nbytes
        session.reset()
        forced, _ = session.forward(TOKENS, logits_all=True, forced=routing)
        assert np.array_equal(logits, forced)
        return np.concatenate([logits, session.forward([1])[0]])


RUNS: list[dict[str, Any]] = [
    {"n_cpu_moe": 0},
    {"n_cpu_moe": 99, "prefetch": "whole"},
    {"n_cpu_moe": 99, "prefetch": "selective", "load_mode": LoadMode.NONE},
]


# --- alignment of copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", RUNS, ids=str)
def test_copies_may_have_to_be_aligned(file: ModelFile, config: dict[str, Any]) -> None:
    """To much more than a slab or any small tensor has, so everything is padded."""
    assert any(t.slab_nbytes % UNIT for name, t in file.tensors.items() if "_exps" in name)
    with open_reference() as device:
        expected = run(file, device, **config)
    with open_reference(copy_alignment=UNIT, table_unit=UNIT, buffer_alignment=UNIT) as device:
        assert np.array_equal(run(file, device, **config), expected)


@pytest.mark.parametrize("unit", [4, 16])
def test_unaligned_copies_are_refused(unit: int) -> None:
    with open_sim() as device:
        device.caps = replace(device.caps, copy_alignment=unit)
        queue = device.queue(QueueKind.COPY)
        here = device.alloc(100, usage=BufferUsage.COMPUTE, label="here")
        host = device.alloc_host(50, label="host")
        for allowed in ((unit, 1, unit), (0, 3, unit), (unit, 43, 7)):  # (device offset, host offset, bytes)
            dst, src = here.span(allowed[0], allowed[2]), host.span(allowed[1], allowed[2])
            queue.copy_h2d(dst, src)
            queue.copy_d2h(src, dst)
        queue.copy_h2d(here.span(96), host.span(1, 4))  # the end of either will do
        for refused in ((2, 0, unit), (unit - 1, 0, unit), (0, 0, unit + 1), (unit, 3, 3)):
            dst, src = here.span(refused[0], refused[2]), host.span(refused[1], refused[2])
            with pytest.raises(TransferError, match=f"no multiple of {unit}"):
                queue.copy_h2d(dst, src)
            with pytest.raises(TransferError, match=f"no multiple of {unit}"):
                queue.copy_d2h(src, dst)
        with pytest.raises(TransferError, match=f"no multiple of {unit}"):
            queue.copy_d2d(here.span(0, unit), here.span(unit + 2, unit))


# --- small buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", RUNS, ids=str)
def test_no_buffer_is_larger_than_the_device_allows(file: ModelFile, config: dict[str, Any]) -> None:
    """As small as the largest tensor, or what a tile needs at once: weights, KV and slots are in several."""
    with open_reference() as device:
        expected = run(file, device, **config)
    most = max(t.nbytes for t in file.tensors.values())
    with open_reference(max_buffer_nbytes=most + UNIT) as device:
        assert np.array_equal(run(file, device, **config), expected)
        plan_config = EngineConfig(n_ctx=64, **config)
        with Session(file, qwen3moe.build(file), [device], lambda: device, plan_config) as session:
            buffers = session.plan.stages[0].buffers
            assert len(buffers["weights"].sizes) > 1
            assert max(size for buffer in buffers.values() for size in buffer.sizes) <= most + UNIT


def test_a_tensor_larger_than_a_buffer_is_named(file: ModelFile) -> None:
    largest = max(file.tensors.values(), key=lambda t: t.nbytes)
    words = rf"One buffer may have .*\(tensor {largest.name}\) needs one of"
    with open_reference(max_buffer_nbytes=largest.nbytes - 1) as device, pytest.raises(DoesNotFit, match=words):
        run(file, device)


def test_a_context_larger_than_a_buffer_is_cut(tmp_path: Path) -> None:
    synthesize("tiny", tmp_path / "tiny.gguf", n_layer=2, sparse=True)
    with open_model(tmp_path / "tiny.gguf") as file, open_sim() as device:
        device.caps = replace(device.caps, max_buffer_nbytes=max(t.nbytes for t in file.tensors.values()))
        model = qwen3moe.build(file)
        flags = {"n_batch": 32, "n_ubatch": 32, "n_cpu_moe": 0}
        with pytest.raises(DoesNotFit, match="'KV cache, 100000 cells' needs one of") as caught:
            Session(file, model, [device], lambda: device, EngineConfig(n_ctx=100_000, **flags))
        n_ctx = int(caught.value.remedy.split("-c ")[1].split(".")[0])
        Session(file, model, [device], lambda: device, EngineConfig(n_ctx=n_ctx, **flags)).close()


# --- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocking", "early"), [("none", True), ("copy", False)])
def test_the_second_ring_fills_while_the_first_device_computes(tmp_path: Path, blocking: str, early: bool) -> None:
    synthesize("tiny", tmp_path / "tiny.gguf", n_layer=4, sparse=True)
    backend, defaults = SimBackend(), {name: spec.default for name, spec in SIM_OPTIONS.items()}
    devices = [backend.open(0, defaults | {"blocking_submit": blocking}) for _ in range(2)]
    config = EngineConfig(n_ctx=64, n_cpu_moe=99, prefetch="whole")
    with ExitStack() as stack:
        file = stack.enter_context(open_model(tmp_path / "tiny.gguf"))
        args = (file, qwen3moe.build(file), devices, lambda: devices[0], config)
        session = stack.enter_context(Session(*args))
        compute, copy = devices[0].queue(QueueKind.COMPUTE), devices[1].queue(QueueKind.COPY)
        n_before = len(devices[1].log(copy))
        session.forward(TOKENS)
        first_copy = devices[1].log(copy)[n_before]
        assert (first_copy.start_ns < devices[0].log(compute)[-1].end_ns) == early
