"""Hyperparameters: what a file says about RoPE, and what makes no sense."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile, open_model
from noria.gguf.metadata import Metadata
from noria.models import HParams, read_hparams


@pytest.fixture
def file(demo_path: Path) -> Any:
    with open_model(demo_path) as file:
        yield file


def read(file: ModelFile, **changes: Any) -> HParams:
    """Hyperparameters of the demo model with other metadata: `rope__scaling__type="none"`."""
    entries = {f"{file.architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = Metadata(file.path, dict(file.metadata) | entries, {})
    changed: Any = SimpleNamespace(
        path=file.path, metadata=metadata, tensors=file.tensors, architecture=file.architecture
    )
    return read_hparams(changed)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"rope__scaling__factor": 4.0}, 0.25),
        ({"rope__scaling__factor": 4.0, "rope__scaling__type": "linear"}, 0.25),
        ({"rope__scaling__factor": 4.0, "rope__scaling__type": "none"}, 1.0),
    ],
)
def test_rope_scale(file: ModelFile, changes: dict[str, Any], scale: float) -> None:
    assert read(file, **changes).rope_scale == scale


def test_an_unknown_rope_scaling_is_an_error(file: ModelFile) -> None:
    with pytest.raises(ModelError, match="yarn"):
        read(file, rope__scaling__type="yarn", rope__scaling__factor=4.0)


@pytest.mark.parametrize("n", [7, 4096, -2])
def test_rope_turns_pairs_of_a_head(file: ModelFile, n: int) -> None:
    with pytest.raises(GGUFError, match=r"rope\.dimension_count"):
        read(file, rope__dimension_count=n)
