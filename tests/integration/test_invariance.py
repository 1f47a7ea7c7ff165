"""Moving experts never changes a result: the same bits for every way to cut tokens and to move experts.

A set that covers every pair of values runs always; the full product is a script: `pytest -m slow tests/integration`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.builtin.reference.queue import ReferenceQueue

N_PROMPT = 80
FACTORS: dict[str, tuple[Any, ...]] = {
    "n_ubatch": (1, 7, 32, 512),
    "n_batch": (16, 64, 512),
    "prefetch_slots": (2, 3, 4, 5, 6),
    "prefetch": ("off", "whole", "selective", "auto"),
    "n_cpu_moe": (0, 1, 2, 3, 4),
    "load_mode": ("auto", "mmap", "none"),
    "device_wait": (True, False),
}
Case = dict[str, Any]
RESIDENT: dict[Path, np.ndarray] = {}


def all_cases() -> Iterator[Case]:
    for values in product(*FACTORS.values()):
        yield dict(zip(FACTORS, values, strict=True))


def covering_cases() -> list[Case]:
    """Few cases in which every pair of values of two factors occurs: greedily, the case with most new pairs next."""

    def pairs(case: Case) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in combinations(FACTORS, 2)}

    cases = list(all_cases())[::7]  # every seventh still holds all pairs, and is quick to search
    missing = set().union(*(pairs(case) for case in cases))
    assert len(missing) == sum(len(FACTORS[a]) * len(FACTORS[b]) for a, b in combinations(FACTORS, 2))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def run(path: Path, open_session, **case: Any) -> np.ndarray:
    """Logits of a prompt and of three tokens after it."""
    device = {"device_wait": case.pop("device_wait", True)}
    session = open_session(path, device=device, n_ctx=128, logits_all=True, **case)
    tokens = np.random.default_rng(5).integers(0, session.model.hparams.n_vocab, N_PROMPT).astype(np.int32)
    logits = [session.forward(tokens, logits_all=True)[0]]
    for token in (1, 2, 3):
        logits.append(session.forward([token])[0])
    session.close()
    return np.concatenate(logits)


@pytest.fixture
def resident(demo_path: Path, open_session) -> np.ndarray:
    """The bits of one batch in one tile with every expert on the device."""
    if demo_path not in RESIDENT:
        RESIDENT[demo_path] = run(demo_path, open_session, n_cpu_moe=0)
    return RESIDENT[demo_path]


def describe(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", covering_cases(), ids=describe)
def test_the_same_bits_for_every_pair_of_settings(case: Case, demo_path: Path, open_session, resident) -> None:
    assert np.array_equal(run(demo_path, open_session, **case), resident)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_same_bits_for_all_settings(demo_path: Path, open_session, resident) -> None:
    """Every combination: some thousands of runs, an hour or two."""
    cases = list(all_cases())
    wrong = [case for case in cases if not np.array_equal(run(demo_path, open_session, **case), resident)]
    assert not wrong, f"{len(wrong)} of {len(cases)} combinations give other bits, the first: {wrong[0]}"


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, 4, 5])
def test_the_same_bits_with_layers_on_the_host(n_gpu_layers: int, demo_path: Path, open_session, resident) -> None:
    logits = run(demo_path, open_session, n_gpu_layers=n_gpu_layers, n_cpu_moe=1, n_ubatch=32)
    assert np.array_equal(logits, resident)


@pytest.mark.parametrize("prefetch", ["off", "whole", "selective"])
@pytest.mark.parametrize("device_wait", [True, False])
def test_the_same_bits_from_poisoned_slots_on_dawdling_queues(
    prefetch: str, device_wait: bool, demo_path: Path, open_session, resident
) -> None:
    logits = run(
        demo_path,
        open_session,
        prefetch=prefetch,
        device_wait=device_wait,
        n_cpu_moe=99,
        prefetch_slots=2,
        n_ubatch=32,
        chaos_seed=7,
    )
    assert np.array_equal(logits, resident)


@pytest.mark.parametrize("missing", ["ready", "free"])
def test_a_missing_wait_is_noticed(missing: str, demo_path: Path, open_session, resident, monkeypatch) -> None:
    """Without one of the ring's two waits the poison gets through: the test above can fail."""
    wait = ReferenceQueue._wait
    monkeypatch.setattr(
        ReferenceQueue, "_wait", lambda self, event: None if event.label == missing else wait(self, event)
    )
    flags = {"prefetch": "whole", "n_cpu_moe": 99, "prefetch_slots": 2, "n_ubatch": 32}
    # One run may be lucky; that all of them are is out of the question.
    runs = (run(demo_path, open_session, chaos_seed=seed, **flags) for seed in range(16))
    assert any(not np.array_equal(logits, resident) for logits in runs)
