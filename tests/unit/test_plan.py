"""The memory plan: exact to the byte, `auto` that works around what is fixed, and remedies that hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.api import BufferUsage, Device, Op
from noria.api.errors import DoesNotFit, OutOfDeviceMemory
from noria.builtin.reference import OPTIONS as REFERENCE_OPTIONS
from noria.builtin.reference import ReferenceBackend
from noria.builtin.sim import OPTIONS, SimBackend, SimDevice, open_sim
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models.qwen3moe import build
from noria.runtime import EngineConfig, LoadMode, MemoryPlan, Session, plan_memory

MIB = 1024 * 1024
N_LAYER = 8
BIG_N_LAYER = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    """A small model of zeros, which can be loaded anywhere."""
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    synthesize("tiny", path, n_layer=N_LAYER, sparse=True)
    with open_model(path) as file:
        yield file


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    """6 GB of model that take no disk space, for plans: a layer's experts are 432 or 498 MiB."""
    path = tmp_path_factory.mktemp("plan") / "qwen3-40x256.gguf"
    synthesize("qwen3-40x256", path, n_layer=BIG_N_LAYER, sparse=True)
    with open_model(path) as file:
        yield file


def open_device(name: str) -> Device:
    if name == "sim":
        return open_sim()
    return ReferenceBackend().open(0, {name: spec.default for name, spec in REFERENCE_OPTIONS.items()})


def open_sims(*memory_mib: int) -> tuple[list[SimDevice], SimDevice]:
    """Devices with so much memory, and one more that plays the host; one clock."""
    backend, defaults = SimBackend(), {name: spec.default for name, spec in OPTIONS.items()}
    devices = [backend.open(0, defaults | {"memory_nbytes": mib * MIB}) for mib in memory_mib]
    return devices, backend.open(1, defaults)


def plan_of(file: ModelFile, memory_mib: float = 0, **flags: Any) -> MemoryPlan:
    """A plan for one simulated device."""
    if memory_mib:
        flags["memory_nbytes"] = int(memory_mib * MIB)
    with open_sim() as device:
        return plan_memory(file, build(file), [device], lambda: device, EngineConfig(**flags))


# --- exact -----------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "resident": {"n_cpu_moe": 0},
    "offloaded": {"n_cpu_moe": N_LAYER, "n_batch": 96, "n_ubatch": 16},
    "some": {"n_cpu_moe": 3, "prefetch_slots": 6, "load_mode": LoadMode.NONE},
    "named": {"override_tensors": ((r"blk\.[25]\.ffn_.*_exps", "CPU"), ("exps", "GPU")), "prefetch": "selective"},
    "quantized": {"n_cpu_moe": 2, "type_k": "Q8_0", "type_v": "Q4_0", "n_ctx": 300},
    "every logit": {"n_cpu_moe": 2, "logits_all": True, "n_ubatch": 32},
    "in line": {"n_cpu_moe": 5, "prefetch": "off"},
    "chaos": {"n_cpu_moe": 5, "chaos_seed": 1},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("device_name", ["sim", "reference"])
def test_a_session_allocates_what_was_planned_and_nothing_else(file: ModelFile, device_name: str, run: str) -> None:
    config = EngineConfig(**{"n_ctx": 256, **RUNS[run]})
    with open_device(device_name) as device, Session(file, build(file), [device], lambda: device, config) as session:
        planned: dict[BufferUsage, int] = dict.fromkeys(BufferUsage, 0)
        for stage in session.plan.stages:
            for buffer in stage.buffers.values():
                planned[buffer.usage] += buffer.nbytes
        assert device.allocated == planned
        session.forward(np.arange(100), logits_all=config.logits_all)
        session.forward([1], logits_all=config.logits_all)
        assert device.allocated == planned
        assert device.allocated_peak == sum(planned.values()) == session.plan.stages[0].nbytes
        stores = [stage.store for stage in session.stages if stage.store is not None]
        assert sum(s.pinned_nbytes + s.pageable_nbytes for s in stores) == session.plan.host_nbytes


def test_devices_and_the_host_allocate_their_parts(file: ModelFile) -> None:
    devices, host = open_sims(4096, 12288)
    config = EngineConfig(n_gpu_layers=7, n_cpu_moe=3, n_ctx=256)
    with ExitStack() as stack:
        for device in (*devices, host):
            stack.enter_context(device)
        session = stack.enter_context(Session(file, build(file), devices, lambda: host, config))
        session.forward(np.arange(100))
        assert [stage.spec.device for stage in session.plan.stages] == [host, *devices]
        for stage in session.plan.stages:
            assert stage.spec.device.allocated_peak == stage.nbytes


def test_a_plan_that_the_device_does_not_honour_fails_at_once_and_shows_it(file: ModelFile) -> None:
    with open_sim(memory_nbytes=10 * MIB) as device:
        config = EngineConfig(n_ctx=2048, memory_nbytes=64 * MIB)
        with pytest.raises(OutOfDeviceMemory, match=r"The plan, in MiB:\n +weights"):
            Session(file, build(file), [device], lambda: device, config)


def test_the_table_adds_up(big: ModelFile) -> None:
    plan = plan_of(big, n_cpu_moe=7, n_ctx=8192, type_k="Q8_0", type_v="Q4_0")
    assert sum(nbytes for _, _, nbytes in plan.rows()) == plan.stages[0].nbytes
    text = plan.text()
    assert "-c 8192 -b 8192 -ub 2048 -ncmoe 7 -ctk q8_0 -ctv q4_0 --prefetch-slots 4" in text
    rows = [float(m[1]) for m in re.finditer(r"^    (?!sum|experts  ).*?(\d+\.\d)$", text, re.M)]
    assert sum(rows) == pytest.approx(plan.stages[0].nbytes / MIB, abs=1)
    assert f"sum{plan.stages[0].nbytes / MIB:>41.1f}  of 11904.0 usable" in text


def test_what_things_cost(big: ModelFile) -> None:
    """Sizes that follow from the model's shapes alone."""
    plan = plan_of(big, 1 << 20, n_cpu_moe=7, n_ctx=4096)
    buffers = plan.stages[0].buffers
    assert buffers["kv"].nbytes == 4096 * BIG_N_LAYER * 2 * 4 * 128 * 2
    experts = {name: t.nbytes for name, t in big.tensors.items() if "_exps" in name}
    assert plan.stages[0].slot_nbytes == max(experts.values())
    assert buffers["slots"].nbytes == 4 * (max(experts.values()) + 3 * 256 * 4)
    offloaded = plan.stages[0].offloaded
    assert len(offloaded) == 7
    assert len(buffers["kv"].sizes) == BIG_N_LAYER, "a buffer each"
    assert plan.host_nbytes == sum(n for name, n in experts.items() if int(name.split(".")[1]) in offloaded)
    everything = sum(t.nbytes for t in big.tensors.values())
    assert buffers["weights"].nbytes + buffers["experts"].nbytes + plan.host_nbytes == everything


def test_nothing_is_streamed_without_a_ring(file: ModelFile) -> None:
    plan = plan_of(file, n_cpu_moe=0)
    assert plan.host_nbytes == 0
    assert "slots" not in plan.stages[0].buffers
    assert not plan.stages[0].streamed


# --- auto ------------------------------------------------------------------------------------------------------------


def needed_mib(file: ModelFile, **flags: Any) -> float:
    """What exactly these flags take, with nothing to choose."""
    plan = plan_of(file, 1 << 20, **WISHES | flags)
    return plan.stages[0].nbytes / MIB


# What `auto` stands for where there is room, and all experts in RAM.
WISHES = {"n_cpu_moe": BIG_N_LAYER, "n_ctx": 4096, "n_batch": 4096, "n_ubatch": 2048, "keep_slots": True}


def test_auto_gives_up_as_little_as_memory_demands(big: ModelFile) -> None:
    """From all experts on the device down to a ring of two slots: never more of anything with less memory."""
    wished = needed_mib(big)
    memory = [*range(8000, int(wished), -300), *(wished - 40 * i for i in range(12))]
    plans = [plan_of(big, mib) for mib in memory]
    assert all(plan.shortfall <= 0 for plan in plans)
    assert {plan.choice.n_ctx for plan in plans} == {4096}
    n_cpu_moe = [plan.choice.n_cpu_moe for plan in plans]
    assert n_cpu_moe == sorted(n_cpu_moe)
    assert set(n_cpu_moe) >= {0, BIG_N_LAYER // 2, BIG_N_LAYER}
    for key in ("n_ubatch", "n_slots", "n_batch"):
        values = [getattr(plan.choice, key) for plan in plans]
        assert values == sorted(values, reverse=True), key
    assert plans[-1].choice.n_slots == 2


def test_auto_offloads_no_layer_more_than_it_must(big: ModelFile) -> None:
    for mib in (6000, 5000, 4000, 3000):
        choice = plan_of(big, mib).choice
        assert (choice.n_batch, choice.n_ubatch, choice.n_slots) == (4096, 2048, 4)
        assert 0 < choice.n_cpu_moe < BIG_N_LAYER
        with pytest.raises(DoesNotFit):
            plan_of(big, mib, **WISHES | {"n_cpu_moe": choice.n_cpu_moe - 1})


def test_experts_cross_the_bus_more_often_only_when_nothing_else_helps(big: ModelFile) -> None:
    """Tiles and the ring shrink first; then so does the batch, and the notes say all of it."""
    tight = needed_mib(big, n_ubatch=512, prefetch_slots=2)
    plan = plan_of(big, tight)
    assert (plan.choice.n_ubatch, plan.choice.n_slots, plan.choice.n_batch) == (512, 2, 4096)
    assert plan.notes == ["-ub lowered to 512 to fit", "the ring has 2 slots instead of 4: there is no room for more"]
    tighter = plan_of(big, tight - 20)
    assert (tighter.choice.n_ubatch, tighter.choice.n_slots, tighter.choice.n_batch) == (512, 2, 2048)
    assert tighter.notes == ["-b lowered to 2048: experts cross the bus once for each so many tokens", *plan.notes]
    tightest = plan_of(big, needed_mib(big, n_ubatch=32, n_batch=32, prefetch_slots=2))
    assert (tightest.choice.n_ubatch, tightest.choice.n_slots, tightest.choice.n_batch) == (32, 2, 32)


def test_a_prompt_of_a_whole_context_is_cut_where_that_costs_nothing(big: ModelFile) -> None:
    """65,536 tokens: buffers for all of them at once are given up before tiles or slots are."""
    flags = {"n_ctx": 65_536, "n_cpu_moe": BIG_N_LAYER}
    most = needed_mib(big, **flags, n_batch=65_536)
    assert plan_of(big, most, **flags).choice.n_batch == 65_536
    choice = plan_of(big, most - 500, **flags).choice
    assert (choice.n_batch, choice.n_ubatch, choice.n_slots) == (16_384, 2048, 4)


@pytest.mark.parametrize(
    "fixed",
    [{"n_batch": 1024}, {"n_ubatch": 1024}, {"n_batch": 256, "n_ubatch": 64}, {"n_cpu_moe": 3}, {"prefetch_slots": 5}],
    ids=str,
)
def test_auto_works_around_what_is_fixed(big: ModelFile, fixed: dict[str, Any]) -> None:
    """However little is left."""
    flags = {"keep_slots": "prefetch_slots" in fixed, **fixed}
    least = refusal(big, 500, flags).shortfall / MIB + 500
    for mib in (8000, least + 200, least + 50, least):
        choice = plan_of(big, mib, **flags).choice
        for key, value in fixed.items():
            assert getattr(choice, key.removeprefix("prefetch_").replace("slots", "n_slots")) == value


def test_small_models_get_everything(file: ModelFile) -> None:
    choice = plan_of(file).choice
    assert (choice.n_cpu_moe, choice.n_ctx, choice.n_batch, choice.n_ubatch) == (0, 2048, 2048, 2048)
    assert plan_of(file, n_prompt=100).choice.n_batch == 100
    assert plan_of(file, n_batch=64, n_ubatch=512).choice.n_ubatch == 64, "-ub beyond -b means -b"
    assert plan_of(file, n_ctx=50, n_batch=64).choice.n_batch == 50, "nor can -b be beyond -c"
    assert plan_of(file, n_cpu_moe=99).choice.n_cpu_moe == N_LAYER


def test_auto_works_around_ot(big: ModelFile) -> None:
    plan = plan_of(big, 5000, override_tensors=((r"blk\.[0-5]\.", "GPU"),))
    assert plan.shortfall <= 0
    assert not plan.stages[0].offloaded & set(range(6))
    assert 0 < plan.choice.n_cpu_moe < 6
    error = refusal(big, 5000, {"override_tensors": (("exps", "GPU"),)})
    assert "ncmoe" not in error.remedy, "it has no layer left to offload"


# --- does not fit ----------------------------------------------------------------------------------------------------

FLAGS = {"-c": "n_ctx", "-b": "n_batch", "-ub": "n_ubatch", "-ncmoe": "n_cpu_moe", "--prefetch-slots": "prefetch_slots"}


def refusal(file: ModelFile, memory_mib: float, flags: dict[str, Any]) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        plan_of(file, memory_mib, **flags)
    return caught.value


def applied(remedy: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with the change that the remedy names."""
    words = re.fullmatch(r"The smallest single change that fits: (.+)\.", remedy)
    assert words is not None, remedy
    if words[1] == "-ctk q8_0 -ctv q8_0":
        return flags | {"type_k": "Q8_0", "type_v": "Q8_0"}
    flag, value = words[1].split()
    return flags | {FLAGS[flag]: int(value)}


LONG = {"n_ctx": 131_072, "n_batch": 512, "n_ubatch": 512}
SHORT = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512}
TINY = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 64, "prefetch_slots": 2, "type_k": "Q8_0", "type_v": "Q8_0"}


@pytest.mark.parametrize(
    ("flags", "missing_mib", "flag", "step"),
    [
        ({"n_cpu_moe": 3}, 1000, "-ncmoe", 1),
        ({"n_cpu_moe": 11}, 50, "-ncmoe", 1),  # a twelfth of the layers, not a third of the context
        (LONG, 400, "-c", -256),
        (SHORT, 5, "-c", -32),
        ({}, 3, "-b", -256),
        (SHORT, 205, "--prefetch-slots", -1),
        (LONG, 800, "-ctk", 0),  # rather than a quarter of the context
        (TINY, 0.25, "-ub", -32),  # half of -ub, of -b or of -c would do: the first is taken
    ],
    ids=str,
)
def test_the_remedy_fits_and_no_smaller_change_of_that_flag_does(
    big: ModelFile, flags: dict[str, Any], missing_mib: float, flag: str, step: int
) -> None:
    """Of several that would do, the one that changes its value least. Large numbers are multiples of 256 or 32."""
    wishes = WISHES | {"prefetch_slots": 4} | flags
    memory_mib = needed_mib(big, **wishes) - missing_mib
    error = refusal(big, memory_mib, wishes)
    assert error.shortfall == pytest.approx(missing_mib * MIB, abs=1)
    assert f": {flag} " in error.remedy
    changed = applied(error.remedy, wishes)
    assert plan_of(big, memory_mib, **changed).shortfall <= 0
    if step:
        with pytest.raises(DoesNotFit):
            plan_of(big, memory_mib, **changed | {FLAGS[flag]: changed[FLAGS[flag]] - step})


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    memory_mib=st.integers(700, 4000),
    n_cpu_moe=st.sampled_from(["auto", 0, 4, 8, 11]),
    n_ctx=st.sampled_from([512, 4096, 40_000]),
    n_ubatch=st.sampled_from(["auto", 512]),
)
def test_the_shortfall_is_what_is_missing_and_remedies_hold_with_auto(
    big: ModelFile, memory_mib: int, n_cpu_moe: Any, n_ctx: int, n_ubatch: Any
) -> None:
    flags = {"n_cpu_moe": n_cpu_moe, "n_ctx": n_ctx, "n_ubatch": n_ubatch}
    try:
        plan_of(big, memory_mib, **flags)
        return
    except DoesNotFit as caught:
        error = caught
    assert f"sim0: the plan is {error.shortfall / MIB:.1f} MiB over." in str(error)
    needed = memory_mib * MIB + error.shortfall
    assert plan_of(big, needed / MIB, **flags).shortfall == 0
    assert refusal(big, (needed - 1) / MIB, flags).shortfall == 1
    if error.remedy.startswith("No single change"):
        for change in ({"n_ctx": 32}, {"n_cpu_moe": BIG_N_LAYER}, {"type_k": "Q8_0", "type_v": "Q8_0"}):
            refusal(big, memory_mib, flags | change)
    else:
        plan_of(big, memory_mib, **applied(error.remedy, flags))


def test_the_device_that_is_over_is_named(big: ModelFile) -> None:
    """The second has room for its one layer's experts or for the output, not for both."""
    large = SimBackend().open(1, {name: spec.default for name, spec in OPTIONS.items()})
    small = open_sim(memory_nbytes=700 * MIB)
    with pytest.raises(DoesNotFit, match=r"sim0: the plan is \d+\.\d MiB over") as caught:
        plan_memory(big, build(big), [large, small], lambda: small, EngineConfig(n_cpu_moe=0))
    assert caught.value.device == small.info.id == "sim0"


# --- what is said ----------------------------------------------------------------------------------------------------


def test_without_a_copy_queue_there_is_one_slot_and_no_ring(file: ModelFile) -> None:
    options = {name: spec.default for name, spec in REFERENCE_OPTIONS.items()}
    with ReferenceBackend().open(0, options | {"copy_queues": 0}) as device:
        plan = plan_memory(file, build(file), [device], lambda: device, EngineConfig(n_cpu_moe=2))
    assert plan.choice.n_slots == 1
    assert any("prefetch is off" in note for note in plan.notes)


def test_what_fits_without_a_ring_gets_none(file: ModelFile) -> None:
    """Offloading half of the layers takes more than it gives where the ring is large."""
    with open_sim() as device:
        args = (file, build(file), [device], lambda: device)
        flags: dict[str, Any] = {"prefetch_slots": 64, "keep_slots": True, "n_ctx": 64}
        resident = plan_memory(*args, EngineConfig(n_cpu_moe=0, **flags))
        nbytes = resident.stages[0].nbytes
        assert plan_memory(*args, EngineConfig(n_cpu_moe=N_LAYER // 2, **flags)).stages[0].nbytes > nbytes
        plan = plan_memory(*args, EngineConfig(memory_nbytes=nbytes, **flags))
    assert plan.choice.n_cpu_moe == 0


def test_an_override_that_matches_nothing_is_said(file: ModelFile) -> None:
    plan = plan_of(file, override_tensors=(("attn", "CPU"), ("exps", "GPU")))
    assert [note for note in plan.notes if note.startswith("-ot")] == [
        "-ot attn=CPU does nothing: it matches no expert tensor, and only those can move"
    ]


def test_the_largest_numbers_do_not_fit(file: ModelFile) -> None:
    most = 2**31 - 1
    for flags in ({"n_ctx": most}, {"n_ctx": most, "n_batch": most, "n_ubatch": most}):
        assert refusal(file, 4000, flags).remedy.startswith("The smallest single change that fits: -c ")


def test_support_is_asked_for_the_type_of_up(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "blk.0.ffn_up_exps.weight"
    monkeypatch.setitem(file.tensors, name, replace(file.tensors[name], type="IQ2_S"))
    plan = plan_of(file)
    assert any(query.op is Op.EXPERT_FFN and query.type == "IQ2_S" for query in plan.stages[0].dry.queries)
