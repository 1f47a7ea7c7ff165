"""What goes where: layers on devices, experts in RAM; and flags and files that make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.api.errors import ConfigError, GGUFError
from noria.builtin.sim import OPTIONS, SimBackend, open_sim
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models import Model
from noria.models.qwen3moe import build
from noria.runtime import EngineConfig, MemoryPlan, Session, plan_memory
from noria.runtime.placement import spread, stage_specs

MIB = 1024 * 1024
N_LAYER = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = tmp_path_factory.mktemp("placement") / "tiny.gguf"
    synthesize("tiny", path, n_layer=N_LAYER, sparse=True)
    with open_model(path) as file:
        yield file


@pytest.fixture(scope="module")
def model(file: ModelFile) -> Model:
    return build(file)


def layers_of(model: Model, memory_mib: list[int], n_gpu_layers: int | None) -> list[tuple[bool, range]]:
    """(on the host?, layers) of each stage."""
    backend, defaults = SimBackend(), {name: spec.default for name, spec in OPTIONS.items()}
    devices = [backend.open(0, defaults | {"memory_nbytes": mib * MIB}) for mib in memory_mib]
    host = backend.open(1, defaults)
    specs = stage_specs(model, [(d, d.kernels) for d in devices], (host, host.kernels), n_gpu_layers)
    assert [spec.embed for spec in specs] == [True] + [False] * (len(specs) - 1)
    assert [spec.output for spec in specs] == [False] * (len(specs) - 1) + [True]
    assert [spec.device for spec in specs if not spec.host] == (devices if n_gpu_layers != 0 else [])
    assert all((spec.device is host) == spec.host for spec in specs)
    assert [layer for spec in specs for layer in spec.layers] == list(range(N_LAYER))
    return [(spec.host, spec.layers) for spec in specs]


@pytest.mark.parametrize(
    ("n_gpu_layers", "expected"),
    [
        (None, [(False, range(8))]),
        (0, [(True, range(8))]),
        (1, [(True, range(8)), (False, range(8, 8))]),  # the output alone
        (2, [(True, range(7)), (False, range(7, 8))]),
        (8, [(True, range(1)), (False, range(1, 8))]),
        (9, [(False, range(8))]),
        (99, [(False, range(8))]),
    ],
)
def test_ngl_counts_layers_from_the_last_and_the_output_as_one_more(
    model: Model, n_gpu_layers: int | None, expected: list[tuple[bool, range]]
) -> None:
    assert layers_of(model, [12_288], n_gpu_layers) == expected


@pytest.mark.parametrize(
    ("memory_mib", "n_gpu_layers", "expected"),
    [
        ([8000, 8000], None, [(False, range(4)), (False, range(4, 8))]),
        ([4000, 12_000], None, [(False, range(2)), (False, range(2, 8))]),
        ([12_000, 4000], None, [(False, range(6)), (False, range(6, 8))]),
        ([100, 100_000], None, [(False, range(1)), (False, range(1, 8))]),  # each has at least one
        ([100_000, 100], None, [(False, range(7)), (False, range(7, 8))]),
        ([1, 1, 100_000], None, [(False, range(1)), (False, range(1, 2)), (False, range(2, 8))]),
        ([8000, 8000], 5, [(True, range(4)), (False, range(4, 6)), (False, range(6, 8))]),
        ([8000, 8000], 3, [(True, range(6)), (False, range(6, 7)), (False, range(7, 8))]),
        ([8000, 8000], 0, [(True, range(8))]),
    ],
    ids=str,
)
def test_devices_share_layers_by_their_memory(
    model: Model, memory_mib: list[int], n_gpu_layers: int | None, expected: list[tuple[bool, range]]
) -> None:
    assert layers_of(model, memory_mib, n_gpu_layers) == expected


@pytest.mark.parametrize("n_gpu_layers", [1, 2])
def test_more_devices_than_layers_are_an_error(model: Model, n_gpu_layers: int) -> None:
    with pytest.raises(ConfigError, match=f"names 2 devices for {n_gpu_layers - 1} layers"):
        layers_of(model, [8000, 8000], n_gpu_layers)


@settings(derandomize=True, deadline=None)
@given(n_layer=st.integers(1, 100), data=st.data())
def test_offloaded_layers_are_spread_evenly(n_layer: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, n_layer + 3))
    chosen = spread(range(n_layer), n)
    assert len(chosen) == len(set(chosen)) == min(n, n_layer)
    assert chosen == sorted(chosen)
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    if chosen:
        assert abs(chosen[0] - (n_layer - 1 - chosen[-1])) <= 1, "as many free layers before as after"


def plan_of(file: ModelFile, **flags: Any) -> MemoryPlan:
    with open_sim() as device:
        return plan_memory(file, build(file), [device], lambda: device, EngineConfig(**flags))


def offloaded(file: ModelFile, **flags: Any) -> list[int]:
    return sorted(plan_of(file, **flags).stages[0].offloaded)


def test_ot_names_layers_and_ncmoe_shares_the_rest(file: ModelFile) -> None:
    assert offloaded(file, override_tensors=((r"blk\.[13]\.", "CPU"),), n_cpu_moe=0) == [1, 3]
    assert offloaded(file, override_tensors=((r"blk\.[13]\.", "CPU"),), n_cpu_moe=3) == [1, 2, 3, 5, 7]
    assert offloaded(file, override_tensors=((r"blk\.[0-5]\.", "GPU"),), n_cpu_moe=99) == [6, 7]
    assert offloaded(file, override_tensors=((r"blk\.[2-6]\.", "GPU"), ("exps", "CPU")), n_cpu_moe=0) == [0, 1, 7]
    assert offloaded(file, override_tensors=(("ffn_down_exps", "CPU"),), n_cpu_moe=0) == list(range(8))
    assert offloaded(file, override_tensors=(("attn", "CPU"),), n_cpu_moe=2) == offloaded(file, n_cpu_moe=2) == [2, 6]


# --- flags and files that make no sense ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"n_gpu_layers": -1}, "-ngl is -1; it must be at least 0"),
        ({"n_cpu_moe": -2}, "-ncmoe is -2; it must be at least 0"),
        ({"n_ctx": 0}, "-c is 0; it must be at least 1"),
        ({"n_batch": 0}, "-b is 0"),
        ({"n_ubatch": -5}, "-ub is -5"),
        ({"n_ctx": 2**31}, "-c is 2147483648; it must be at most 2147483647"),
        ({"n_batch": 10**30}, "-b is 1(0{30}); it must be at most 2147483647"),
        ({"n_ubatch": 2**40}, "-ub is 1099511627776; it must be at most"),
        ({"prefetch_slots": 1}, "--prefetch-slots is 1; it must be 2 to 64 .use --prefetch off"),
        ({"prefetch_slots": 65}, "--prefetch-slots is 65"),
        ({"override_tensors": (("exps", "CUDA0"),)}, "-ot exps=CUDA0: the target must be CPU or GPU"),
        ({"override_tensors": (("[", "CPU"),)}, r"-ot \[=CPU: not a regular expression"),
    ],
    ids=str,
)
def test_senseless_flags_are_errors_that_name_them(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**flags)


def test_a_session_checks_what_it_is_given(file: ModelFile) -> None:
    with open_sim() as device:
        with pytest.raises(ConfigError, match="--prefetch fast: there is no such policy; there are off, whole"):
            Session(file, build(file), [device], lambda: device, EngineConfig(prefetch="fast"))
        with Session(file, build(file), [device], lambda: device, EngineConfig(n_ctx=16)) as session:
            for tokens, words in (
                ([], "no tokens"),
                ([512], "512 is outside"),
                ([0] * 17, "17 more do not fit"),
            ):
                with pytest.raises(ConfigError, match=words):
                    session.forward(tokens)
            with pytest.raises(ConfigError, match="not planned for them"):
                session.forward([1], logits_all=True)
            with pytest.raises(ConfigError, match=r"has shape \[1\]; this run needs \[8, 1, 4\]"):
                session.forward([1], forced=np.zeros(1, np.int32))


def test_kv_types_that_do_not_divide_a_head_are_errors(file: ModelFile) -> None:
    with pytest.raises(ConfigError, match="-ctv Q4_K: heads of 64 numbers"):
        plan_of(file, type_v="Q4_K")


def test_missing_and_misshapen_tensors_are_named(file: ModelFile) -> None:
    model = build(file)
    name = "blk.3.attn_q.weight"
    info = file.tensors[name]
    try:
        del file.tensors[name]
        with pytest.raises(GGUFError, match=f"{name}: this tensor is missing"), open_sim() as device:
            plan_memory(file, model, [device], lambda: device, EngineConfig())
        file.tensors[name] = replace(info, shape=(*info.shape, 1))
        with pytest.raises(GGUFError, match=rf"{name}: has shape .* expected \[256, 256\]"), open_sim() as device:
            plan_memory(file, model, [device], lambda: device, EngineConfig())
    finally:
        file.tensors[name] = info
