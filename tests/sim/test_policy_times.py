"""What policies cost on the clock of the simulated RTX 3060: `auto` is never slower than what it did not choose."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from noria.builtin.sim import open_sim
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize
from noria.models.qwen3moe import build
from noria.runtime import Counters, EngineConfig, Session

N_LAYER = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = tmp_path_factory.mktemp("policy") / "qwen3-8x256.gguf"
    synthesize("qwen3-40x256", path, n_layer=N_LAYER, sparse=True)
    with open_model(path) as file:
        yield file


def run(file: ModelFile, prefetch: str, n_tokens: int, **options: str | float) -> tuple[Counters, int]:
    """Counters of a prompt with all experts in RAM, and the ns that kernels took for it."""
    config = EngineConfig(n_cpu_moe=N_LAYER, n_ctx=2048, prefetch=prefetch)
    with open_sim(**options) as device, Session(file, build(file), [device], lambda: device, config) as session:
        loaded_ns = device.compute.busy_ns
        session.forward(np.arange(n_tokens, dtype=np.int32))
        return session.take_counters(), device.compute.busy_ns - loaded_ns


def wall_ms(file: ModelFile, prefetch: str, n_tokens: int, **options: str | float) -> float:
    return run(file, prefetch, n_tokens, **options)[0].wall_ns / 1e6


@pytest.mark.parametrize("n_tokens", [1, 4, 16, 48, 96, 128, 512, 2048])
@pytest.mark.parametrize("options", [{}, {"host_gather": "no"}, {"link_gbps": 6.0}, {"device_wait": "no"}], ids=str)
def test_auto_is_as_fast_as_the_best_way(file: ModelFile, options: dict[str, str | float], n_tokens: int) -> None:
    """A short prompt above all must not wait for experts that it does not use, as it does where all are streamed."""
    ms = {name: wall_ms(file, name, n_tokens, **options) for name in ("auto", "whole", "selective")}
    assert ms["auto"] <= 1.03 * min(ms.values()), ms


def test_whole_streams_make_short_prompts_several_times_slower(file: ModelFile) -> None:
    """Why the choice matters."""
    assert wall_ms(file, "whole", 1) > 10 * wall_ms(file, "selective", 1)
    assert wall_ms(file, "selective", 2048) > 1.2 * wall_ms(file, "whole", 2048)


def test_a_token_reads_its_experts_in_place_where_kernels_can(file: ModelFile) -> None:
    (gather, _), (copies, _) = run(file, "auto", 1), run(file, "auto", 1, host_gather="no")
    assert (gather.h2d_nbytes, copies.gather_nbytes) == (0, 0)
    assert gather.gather_nbytes == copies.h2d_nbytes > 0
    assert gather.wall_ns < copies.wall_ns


@pytest.mark.parametrize("prefetch", ["off", "whole", "selective"])
@pytest.mark.parametrize("options", [{}, {"device_wait": "no"}, {"link_gbps": 6.0}], ids=str)
def test_the_idle_share_is_the_time_without_a_kernel(
    file: ModelFile, options: dict[str, str | float], prefetch: str
) -> None:
    for n_tokens in (1, 16, 128, 2048):
        counters, busy_ns = run(file, prefetch, n_tokens, **options)
        assert counters.compute_idle_pct == pytest.approx(100 * (1 - busy_ns / counters.wall_ns), abs=4), n_tokens
