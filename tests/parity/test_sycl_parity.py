"""Logits through OpenCL and SYCL against llama.cpp's, with the experts chosen that the F32 reference chooses.

Experts come through the ring, where kernels could read them in place too, with slots that are poisoned before each copy
and queues that are delayed at random. By default the files of this repository, the others as slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Device, DeviceKind
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.gguf import open_model
from noria.models import Model
from noria.models.plugin import noria_architectures
from noria.runtime import EngineConfig, Session
from noria.testing.fixtures import find_backend

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
BAR = 1e-5  # NMSE with F32 activations
N_GREEDY = 8
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
MODELS = {spec.name: spec.build for spec in noria_architectures()}

FILES: list[Any] = sorted((ROOT / "tests" / "data").glob("*.npz"))
for pattern in ("parity/qwen[23]moe-*.npz", "parity/olmoe-*.npz", "parity/llama-*.npz", "models/*.npz"):
    for other in sorted(SHARED.glob(pattern)):
        if other.name not in {path.name for path in FILES if isinstance(path, Path)}:
            FILES.append(pytest.param(other, marks=pytest.mark.slow))

MOVES: dict[str, dict[str, Any]] = {
    "whole": {"prefetch": "whole", "prefetch_slots": 2, "chaos_seed": 1},
    "selective": {"prefetch": "selective", "prefetch_slots": 3, "chaos_seed": 2},
}


@dataclass(frozen=True)
class Place:
    """A device by the words its driver begins with, and how it is reached."""

    driver: str
    runtime: str = "opencl"
    kind: DeviceKind = DeviceKind.CPU

    def open(self) -> Device:
        backend, options = find_backend("sycl", {"runtime": self.runtime, "in_place": False})
        probe = backend.probe(options)
        for info in probe.devices:
            if info.kind is self.kind and info.driver.startswith(self.driver):
                return backend.open(info.index, options)
        pytest.skip(f"no {self.kind} of {self.driver or 'anyone'} here: {probe.reason or probe.devices}")


PLACES = {
    "PoCL": Place("Portable Computing Language"),
    "Intel": Place("Intel"),
    "Intel through SYCL": Place("Intel", "sycl"),
    "GPU": Place("", kind=DeviceKind.GPU),
}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.gpu] * (n == "GPU")) for n in PLACES], ids=str
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with PLACES[request.param].open() as device:
        yield device


@dataclass(frozen=True)
class Expected:
    """Of a prompt and the tokens after it: tokens, logits, routing, how many are the prompt's; llama.cpp's logits."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    routing: NDArray[np.int32]
    n_prompt: int
    published: NDArray[np.float32]


def open_session(stack: ExitStack, path: Path, device: Device, **config: Any) -> Session:
    file = stack.enter_context(open_model(path.with_suffix(".gguf")))
    model: Model = MODELS[file.architecture](file)
    host = lambda: stack.enter_context(ReferenceBackend().open(0, DEFAULTS))  # noqa: E731
    settings = EngineConfig(logits_all=True, fallback=False, type_k="F32", type_v="F32", **config)
    return stack.enter_context(Session(file, model, [device], host, settings))


@pytest.fixture(scope="module")
def expected() -> Any:
    """`expected(path)`, computed once a file."""
    known: dict[Path, Expected] = {}

    def of(path: Path) -> Expected:
        if path not in known:
            archive = np.load(path)
            tokens = np.concatenate((archive["tokens"], archive["greedy"][:N_GREEDY]))
            with ExitStack() as stack:
                reference = stack.enter_context(ReferenceBackend().open(0, DEFAULTS))
                session = open_session(stack, path, reference, n_ctx=len(tokens))
                logits, routing = session.forward(tokens, logits_all=True, capture=True)
            assert routing is not None
            known[path] = Expected(tokens, logits, routing, len(archive["tokens"]), archive["logits"])
        return known[path]

    return of


def run(path: Path, device: Device, want: Expected, **config: Any) -> NDArray[np.float32]:
    """Logits of the prompt at once and of the tokens after it one at a time; no op runs elsewhere."""
    n, tokens, routing = want.n_prompt, want.tokens, want.routing
    with ExitStack() as stack:
        session = open_session(stack, path, device, n_ctx=len(tokens), **config)
        logits = [session.forward(tokens[:n], logits_all=True, forced=routing[:, :n])[0]]
        for i in range(n, len(tokens)):
            logits.append(session.forward(tokens[i : i + 1], forced=routing[:, i : i + 1])[0])
    return np.concatenate(logits)


def nmse(a: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    error = a.astype(np.float64) - reference
    return float((error**2).sum() / (reference.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_are_those_of_llama_cpp(path: Path, device: Device, expected: Any) -> None:
    """Near the reference; the best token is the same but where the best two are nearer than the rounding; and the same
    bits wherever the experts are and however they come."""
    want = expected(path)
    resident = run(path, device, want, n_cpu_moe=0)
    assert nmse(resident[: want.n_prompt], want.published) <= BAR
    assert nmse(resident, want.logits) <= BAR
    best = resident.argmax(1)
    behind = want.logits.max(1) - want.logits[np.arange(len(best)), best]  # 0 where both agree
    assert (behind <= 2 * np.abs(resident - want.logits).max(1)).all()
    for name, settings in MOVES.items():
        moved = run(path, device, want, n_cpu_moe=99, **settings)
        assert moved.tobytes() == resident.tobytes(), f"{name} changes bits"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_greedy_tokens_are_those_of_llama_cpp(path: Path, device: Device) -> None:
    """Without anything forced, until the first tie: where the best two are nearer than the rounding, runs part."""
    archive = np.load(path)
    tokens, greedy = archive["tokens"], archive["greedy"].tolist()
    with ExitStack() as stack:
        session = open_session(stack, path, device, n_ctx=len(tokens) + len(greedy), n_cpu_moe=99)
        logits, _ = session.forward(tokens)
        for i, token in enumerate(greedy):
            if int(logits[-1].argmax()) != token:
                second, first = np.sort(logits[-1])[-2:]
                assert first - second <= 1e-3 * np.abs(logits[-1]).max(), f"token {i} is another, and no tie"
                break
            logits, _ = session.forward([token])
