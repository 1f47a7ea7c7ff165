"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from noria.api import Device
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.gguf import open_model
from noria.models import Model
from noria.models.plugin import noria_architectures
from noria.runtime import EngineConfig, Session

ROOT = Path(__file__).parents[1]

OpenSession = Callable[..., Session]


def open_reference(**options: object) -> Device:
    """The reference device, with options."""
    return ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()} | options)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The model that is shipped in the package."""
    return ROOT / "core" / "noria" / "data" / "demo-q4_k_m.gguf"


@pytest.fixture
def open_session() -> Iterator[OpenSession]:
    """Load a model on the reference device: `open_session(path, device=its options, **those of EngineConfig)`."""
    with ExitStack() as stack:

        def open_one(path: Path, *, device: dict[str, object] | None = None, **config: object) -> Session:
            file = stack.enter_context(open_model(path))
            builders = {spec.name: spec.build for spec in noria_architectures()}
            model: Model = builders[file.architecture](file)
            main = stack.enter_context(open_reference(**(device or {})))
            host = lambda: stack.enter_context(open_reference())  # noqa: E731
            return stack.enter_context(Session(file, model, [main], host, EngineConfig(**config)))

        yield open_one
