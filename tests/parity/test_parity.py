"""Logits and greedy tokens against llama.cpp's, on every parity file of a known architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
BAR = 1e-8  # NMSE of the reference backend with an F32 KV cache

FILES = sorted((ROOT / "tests" / "data").glob("*.npz"))
NAMES = {path.name for path in FILES}
for pattern in ("parity/qwen[23]moe-*.npz", "parity/olmoe-*.npz", "parity/llama-*.npz", "models/*.npz"):
    FILES += [path for path in sorted(SHARED.glob(pattern)) if path.name not in NAMES]


def nmse(a: np.ndarray, reference: np.ndarray) -> float:
    a, reference = a.astype(np.float64), reference.astype(np.float64)
    return float(((a - reference) ** 2).sum() / (reference**2).sum())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_and_greedy_tokens_are_those_of_llama_cpp(path: Path, open_session) -> None:
    reference = np.load(path)
    n_greedy = len(reference["greedy"])
    n_ctx = len(reference["tokens"]) + n_greedy
    session = open_session(
        path.with_suffix(".gguf"), n_ctx=n_ctx, n_cpu_moe=99, logits_all=True, type_k="F32", type_v="F32"
    )
    logits, _ = session.forward(reference["tokens"], logits_all=True)
    assert nmse(logits, reference["logits"]) <= BAR
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < n_greedy:
        logits, _ = session.forward(greedy[-1:])
        greedy.append(int(logits[-1].argmax()))
    assert greedy == reference["greedy"].tolist()
    assert not session.unused, "the file holds tensors that the model ignores"


def test_a_layer_less_is_noticed(open_session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is not so wide that a mistake fits through it: without the experts of one layer it is missed by far."""
    reference = np.load(FILES[0])
    session = open_session(FILES[0].with_suffix(".gguf"), logits_all=True, type_k="F32", type_v="F32")
    del session.stages[0].moes[1]
    monkeypatch.setattr(session.model, "ffn", lambda g, layer, h: None)
    logits, _ = session.forward(reference["tokens"], logits_all=True)
    assert nmse(logits, reference["logits"]) > 1e4 * BAR
