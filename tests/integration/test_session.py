"""Sessions: what one leaves behind, and what one pass must not leave to the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from noria.api import Device
from noria.api.errors import PluginError
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.builtin.reference.kernels import ReferenceKernels
from noria.experts import Decision, Movement
from noria.gguf import ModelFile, open_model
from noria.models import qwen3moe
from noria.runtime import EngineConfig, LoadMode, Session, Timeline
from noria.runtime.scheduler import StageRunner

TOKENS = [1, 40, 7, 200, 12, 9]


def open_reference(**options: object) -> Device:
    return ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()} | options)


@pytest.fixture
def file(demo_path: Path) -> Iterator[ModelFile]:
    with open_model(demo_path) as file:
        yield file


@pytest.fixture
def device() -> Iterator[Device]:
    with open_reference(host_gather=False) as device:
        yield device


def load(file: ModelFile, device: Device, **config: object) -> Session:
    model = qwen3moe.build(file)
    return Session(file, model, [device], open_reference, EngineConfig(**{"n_ctx": 64} | config))


def in_use(device: Device) -> tuple[int, int]:
    return sum(device.allocated.values()), len(device._buffers)


@pytest.mark.parametrize("n_cpu_moe", [0, 99])
def test_one_token_with_all_logits_and_then_without(file: ModelFile, device: Device, n_cpu_moe: int) -> None:
    """One token's work is recorded; with the logits of every position it is another program than without."""
    session = load(file, device, logits_all=True, n_cpu_moe=n_cpu_moe)
    expected = session.forward(TOKENS, logits_all=True)[0]
    for logits_all in (True, False):
        session.reset()
        first = session.forward(TOKENS[:1], logits_all=logits_all)[0]
        rest = [session.forward([token], logits_all=not logits_all)[0] for token in TOKENS[1:]]
        assert np.array_equal(np.concatenate([first, *rest]), expected)


def test_a_closed_session_gives_all_memory_back(file: ModelFile, device: Device) -> None:
    for config in ({"n_cpu_moe": 99}, {"n_cpu_moe": 1, "load_mode": LoadMode.NONE}, {"n_cpu_moe": 0}):
        session = load(file, device, **config)
        session.forward(TOKENS)
        assert in_use(device) > (0, 0)
        session.close()
        session.close()
        assert in_use(device) == (0, 0)


def test_a_session_may_be_closed_after_its_device(file: ModelFile) -> None:
    with open_reference() as device:
        session = load(file, device, n_cpu_moe=2)
    session.close()


@pytest.mark.parametrize("config", [{"n_cpu_moe": 0}, {"n_cpu_moe": 99}, {"n_cpu_moe": 99, "load_mode": LoadMode.NONE}])
def test_a_load_that_is_cut_short_gives_all_memory_back(file: ModelFile, device: Device, config: dict) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Session(file, qwen3moe.build(file), [device], open_reference, EngineConfig(**config), progress=interrupt)
    assert in_use(device) == (0, 0)


def test_a_pass_that_is_cut_short_does_not_break_the_next(
    file: ModelFile, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load(file, device, n_cpu_moe=99, prefetch="whole")
    expected = session.forward(TOKENS)[0]
    session.reset()

    def interrupt(self: StageRunner, *args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "_compute_unit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.forward(TOKENS)
    session.reset()
    assert np.array_equal(session.forward(TOKENS)[0], expected)


def test_host_layers_are_no_device_memory(file: ModelFile, device: Device) -> None:
    session = load(file, device, n_gpu_layers=2)
    on_device, on_host = session.plan.stages[1], session.plan.stages[0]
    assert on_host.spec.host
    assert on_host.nbytes > 0
    assert session.vram_peak_nbytes == on_device.nbytes


def test_sorting_is_planned_for_a_whole_batch(file: ModelFile, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sorted once for a batch of several tiles: scratch by the tile would be too small."""
    monkeypatch.setattr(
        ReferenceKernels, "_scratch_nbytes", lambda self, q: 1000 * q.n_rows if q.op == "sort_rows" else 0
    )
    session = load(file, device, n_batch=48, n_ubatch=16)
    assert session.plan.stages[0].buffers["scratch"].nbytes >= 48_000


@pytest.mark.parametrize("movement", [Movement.RESIDENT, Movement.GATHER])
def test_a_policy_that_chooses_the_impossible_is_named(file: ModelFile, device: Device, movement: Movement) -> None:
    config = EngineConfig(n_ctx=64, n_cpu_moe=99, prefetch="mine")
    policies = {"mine": lambda layer, situation: Decision(movement=movement, why="it likes to")}
    session = Session(file, qwen3moe.build(file), [device], open_reference, config, policies=policies)
    with pytest.raises(PluginError, match=f"chose {movement} for layer 0"):
        session.forward(TOKENS)


@pytest.mark.parametrize(("prefetch", "waits"), [("whole", []), ("selective", ["wait for routing"])])
def test_a_prompt_waits_for_the_device_at_its_end_only(
    file: ModelFile, device: Device, prefetch: str, waits: list[str]
) -> None:
    """Experts that are fetched selectively cost a wait in each of their layers, and nothing else does."""
    timeline = Timeline()
    config = EngineConfig(n_ctx=64, n_batch=4, n_ubatch=2, n_cpu_moe=99, prefetch=prefetch)
    with Session(file, qwen3moe.build(file), [device], open_reference, config, timeline=timeline) as session:
        session.forward(TOKENS[:4])
        names = [span.name for span in timeline.spans() if span.lane == "host/scheduler"]
        layers = session.model.hparams.n_layer
    assert [n for n in names if n.startswith("wait")] == waits * layers + ["wait for logits"]
    assert [n for n in names if n.startswith("enqueue")] == [f"enqueue layer {i}" for i in range(layers)]
