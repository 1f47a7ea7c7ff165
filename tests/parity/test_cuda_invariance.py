"""What changes a result on a CUDA device: not where experts are or how they come, and the batch only by rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Device
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.gguf import open_model
from noria.gguf.synth import synthesize
from noria.models import qwen3moe
from noria.runtime import EngineConfig, LoadMode, Session
from noria_cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu

DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
N_LAYER, N_PROMPT = 3, 300
BATCH_NMSE = 1e-5  # between batches, the same experts chosen

CASES: dict[str, dict[str, object]] = {
    f"{prefetch}-{slots} slots": {"n_cpu_moe": N_LAYER, "prefetch": prefetch, "prefetch_slots": slots}
    for prefetch, slots in [("off", 4), ("whole", 2), ("whole", 3), ("whole", 6), ("selective", 4), ("auto", 4)]
}
CASES |= {
    "one layer in RAM": {"n_cpu_moe": 1},
    "read into RAM": {"n_cpu_moe": N_LAYER, "prefetch": "whole", "load_mode": LoadMode.NONE},
    "read into RAM, gathered": {"n_cpu_moe": N_LAYER, "load_mode": LoadMode.NONE},
    "poisoned whole": {"n_cpu_moe": N_LAYER, "prefetch": "whole", "prefetch_slots": 2, "chaos_seed": 1},
    "poisoned whole, 4 slots": {"n_cpu_moe": N_LAYER, "prefetch": "whole", "chaos_seed": 2},
    "poisoned selective": {"n_cpu_moe": N_LAYER, "prefetch": "selective", "prefetch_slots": 3, "chaos_seed": 3},
}


@pytest.fixture(scope="module")
def cuda() -> Iterator[Device]:
    backend = CudaBackend()
    probe = backend.probe({})
    if not probe.available:
        pytest.skip(f"cuda: {probe.reason}. {probe.hint}")
    with backend.open(0, {}) as device:
        yield device


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of full size: the kernels are those of a real model."""
    path = tmp_path_factory.mktemp("cuda") / "model.gguf"
    synthesize("qwen3-30b-a3b", path, n_layer=N_LAYER)
    return path


@contextmanager
def load(path: Path, device: Device, n_batch: int = 512, n_ubatch: int = 256, **config: object) -> Iterator[Session]:
    settings = EngineConfig(
        n_ctx=512,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        logits_all=True,
        fallback=False,
        **config,  # type: ignore[arg-type]
    )
    with ExitStack() as stack:
        file = stack.enter_context(open_model(path))
        host = lambda: stack.enter_context(ReferenceBackend().open(0, DEFAULTS))  # noqa: E731
        yield stack.enter_context(Session(file, qwen3moe.build(file), [device], host, settings))


def prompt() -> NDArray[np.int32]:
    return np.random.default_rng(1).integers(0, 1000, N_PROMPT).astype(np.int32)


def run(path: Path, device: Device, **config: object) -> NDArray[np.float32]:
    """Logits of a prompt of two tiles and of three tokens after it."""
    with load(path, device, **config) as session:  # type: ignore[arg-type]
        logits = [session.forward(prompt(), logits_all=True)[0]]
        logits += [session.forward([token])[0] for token in (5, 6, 7)]
        return np.concatenate(logits)


@pytest.fixture(scope="module")
def resident(cuda: Device, model_path: Path) -> NDArray[np.float32]:
    logits = run(model_path, cuda, n_cpu_moe=0)
    assert np.isfinite(logits).all()
    return logits


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_however_experts_are_moved(
    case: str, cuda: Device, model_path: Path, resident: NDArray[np.float32]
) -> None:
    assert np.array_equal(run(model_path, cuda, **CASES[case]), resident)


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(512, 512), (300, 100), (128, 128), (64, 32), (16, 16)])
def test_another_batch_changes_the_rounding_only(cuda: Device, model_path: Path, n_batch: int, n_ubatch: int) -> None:
    """The best token is the same too, but where the best two are nearer than the rounding."""
    with load(model_path, cuda, n_cpu_moe=N_LAYER) as session:
        want, routing = session.forward(prompt(), logits_all=True, capture=True)
    with load(model_path, cuda, n_batch, n_ubatch, n_cpu_moe=N_LAYER) as session:
        got, _ = session.forward(prompt(), logits_all=True, forced=routing)
    error = got.astype(np.float64) - want
    assert (error**2).sum() / (want.astype(np.float64) ** 2).sum() <= BATCH_NMSE
    best = got.argmax(1)
    behind = want.max(1) - want[np.arange(N_PROMPT), best]  # 0 where both agree
    assert (behind <= 2 * np.abs(error).max(1)).all()
