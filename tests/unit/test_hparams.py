"""Hyperparameters: what a file says about RoPE, and what makes no sense."""

from __future__ import annotations

from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile, open_model
from noria.gguf.metadata import Metadata
from noria.models import HParams, read_hparams
from noria.models.rope import RopeScaling


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


def scaling(file: ModelFile, **changes: Any) -> RopeScaling:
    """That of the demo model with other `rope.scaling` keys."""
    return read(file, **{f"rope__scaling__{key}": value for key, value in changes.items()}).rope_scaling


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"factor": 4.0}, 0.25),
        ({"factor": 4.0, "type": "linear"}, 0.25),
        ({"factor": 4.0, "type": "yarn"}, 0.25),
        ({"factor": 4.0, "type": "none"}, 1.0),
        ({"factor": 0.0, "type": "longrope"}, 1.0),
    ],
)
def test_scale_of_positions(file: ModelFile, changes: dict[str, Any], scale: float) -> None:
    assert scaling(file, **changes).scale == scale


def test_scale_by_the_key_of_old_files(file: ModelFile) -> None:
    assert read(file, rope__scale_linear=8.0).rope_scaling.scale == 1 / 8


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({"type": "linear"}, 1.0),
        ({"type": "linear", "attn_factor": 1.5, "yarn_attn_factor": 2.0}, 3.0),
        ({"type": "yarn"}, 0.1 * log(4) + 1),
        ({"type": "yarn", "attn_factor": 1.5}, 1.5 * (0.1 * log(4) + 1)),
        ({"type": "yarn", "yarn_log_multiplier": 1.0}, 1.0),
        ({"type": "yarn", "yarn_ext_factor": 0.0}, 1.0),
        ({"type": "linear", "yarn_ext_factor": 0.5}, 0.1 * log(4) + 1),
    ],
)
def test_magnitude(file: ModelFile, changes: dict[str, Any], magnitude: float) -> None:
    assert scaling(file, factor=4.0, **changes).magnitude == pytest.approx(magnitude)


def test_yarn_slows_down_only_pairs_that_turn_slowly(file: ModelFile) -> None:
    """With what Qwen publishes for four times its context: of 64 pairs the first 23 keep their speed, the last 24 do
    not, as in `_compute_yarn_parameters` of transformers."""
    factors = scaling(file, type="yarn", factor=4.0, original_context_length=32768).frequency_factors(128, 1e6)
    assert factors.shape == (64,)
    assert (factors[:24] == 0.25).all()  # divides by the scale what the scale multiplies
    assert (factors[40:] == 1).all()
    assert (np.diff(factors[23:41]) > 0).all()
    assert factors[30] == pytest.approx(1 / (4 - 3 * (30 - 23) / (40 - 23)))


def test_yarn_in_part(file: ModelFile) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    half = scaling(file, **keys, yarn_ext_factor=0.5).frequency_factors(128, 1e6)
    assert half[0] == pytest.approx(1 / (0.5 + 0.5 * 4))
    assert half[-1] == 1


def test_an_unknown_rope_scaling_is_an_error(file: ModelFile) -> None:
    with pytest.raises(ModelError, match="RoPE scaling 'longrope' is not supported; none, linear, yarn are"):
        scaling(file, type="longrope", factor=4.0)


@pytest.mark.parametrize("key", ["factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"])
def test_rope_scaling_is_positive(file: ModelFile, key: str) -> None:
    value = -1 if key == "original_context_length" else -1.0
    with pytest.raises(GGUFError, match=rf"rope\.scaling\.{key}.*must be positive"):
        scaling(file, type="yarn", **{key: value})


def test_yarn_on_a_part_of_a_head_is_refused(file: ModelFile) -> None:
    with pytest.raises(ModelError, match="YaRN on 16 of the 64 numbers of a head is not supported yet"):
        read(file, rope__dimension_count=16, rope__scaling__type="yarn", rope__scaling__factor=4.0)


@pytest.mark.parametrize("n", [7, 4096, -2])
def test_rope_turns_pairs_of_a_head(file: ModelFile, n: int) -> None:
    with pytest.raises(GGUFError, match=r"rope\.dimension_count"):
        read(file, rope__dimension_count=n)
