"""Logits of a CUDA device against llama.cpp's, with the experts chosen that the F32 reference chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Device
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.gguf import open_model
from noria.models import Model, llama, qwen3moe
from noria.runtime import EngineConfig, Session
from noria_cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
BAR = 1e-3  # NMSE with 16-bit activations
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
MODELS = {"qwen3moe": qwen3moe.build, "llama": llama.build}

FILES = sorted((ROOT / "tests" / "data").glob("*.npz"))
for pattern in ("parity/qwen3moe-*.npz", "parity/llama-*.npz", "models/*.npz"):
    FILES += [path for path in sorted(SHARED.glob(pattern)) if path.name not in {file.name for file in FILES}]


@pytest.fixture(scope="module")
def cuda() -> Iterator[Device]:
    backend = CudaBackend()
    probe = backend.probe({})
    if not probe.available:
        pytest.skip(f"cuda: {probe.reason}. {probe.hint}")
    with backend.open(0, {}) as device:
        yield device


def nmse(a: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    error = a.astype(np.float64) - reference
    return float((error**2).sum() / (reference.astype(np.float64) ** 2).sum())


def run(path: Path, device: Device, routing: NDArray[np.int32], **config: object) -> NDArray[np.float32]:
    """The logits of all tokens of a parity file, and of 8 that follow one at a time; no op runs elsewhere."""
    archive = np.load(path)
    tokens, greedy = archive["tokens"], archive["greedy"][:8]
    settings = EngineConfig(n_ctx=len(tokens) + len(greedy), logits_all=True, fallback=False, **config)  # type: ignore[arg-type]

    with ExitStack() as stack:
        file = stack.enter_context(open_model(path.with_suffix(".gguf")))
        model: Model = MODELS[file.architecture](file)
        host = lambda: stack.enter_context(ReferenceBackend().open(0, DEFAULTS))  # noqa: E731
        session = stack.enter_context(Session(file, model, [device], host, settings))
        logits = [session.forward(tokens, logits_all=True, forced=routing[:, : len(tokens)])[0]]
        for i in range(len(greedy)):
            at = len(tokens) + i
            logits.append(session.forward(greedy[i : i + 1], forced=routing[:, at : at + 1])[0])
    return np.concatenate(logits)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_are_those_of_llama_cpp(path: Path, cuda: Device, open_session) -> None:  # type: ignore[no-untyped-def]
    """Prefill and decode, near the reference; and the same bits wherever the experts are and however they come."""
    archive = np.load(path)
    n = len(archive["tokens"])
    tokens = np.concatenate((archive["tokens"], archive["greedy"][:8]))
    reference = open_session(path.with_suffix(".gguf"), n_ctx=n + 8, logits_all=True, type_k="F32", type_v="F32")
    want, routing = reference.forward(tokens, logits_all=True, capture=True)
    resident = run(path, cuda, routing, n_cpu_moe=0)
    assert nmse(resident[:n], archive["logits"]) <= BAR
    assert nmse(resident, want) <= BAR
    for settings in (
        {"n_cpu_moe": 99},
        {"n_cpu_moe": 1, "prefetch_slots": 2},
        {"n_cpu_moe": 99, "prefetch": "off"},
        {"n_cpu_moe": 99, "load_mode": "none", "chaos_seed": 1},
    ):
        moved = run(path, cuda, routing, **settings)
        assert moved.tobytes() == resident.tobytes(), f"{settings} changes bits"
