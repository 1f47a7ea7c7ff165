"""Architectures: what each wants of a file, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from noria.api.errors import GGUFError
from noria.gguf import open_model
from noria.gguf.presets import PRESETS
from noria.gguf.synth import synthesize
from noria.models.plugin import noria_architectures
from noria.runtime.placement import check_tensors

BUILDERS = {spec.name: spec.build for spec in noria_architectures()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_tensors_of_its_architecture(preset: str, tmp_path: Path) -> None:
    synthesize(preset, tmp_path / "model.gguf", sparse=True)
    with open_model(tmp_path / "model.gguf") as file:
        assert check_tensors(file, BUILDERS[file.architecture](file)) == []


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "olmoe"])
def test_no_experts_where_there_should_be_some(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = replace(PRESETS["tiny"], architecture=architecture)
    metadata = shapes.metadata() | {"expert_count": 0, "expert_used_count": 0}
    monkeypatch.setattr(type(shapes), "metadata", lambda self: metadata)
    monkeypatch.setitem(PRESETS, "made", shapes)
    synthesize("made", tmp_path / "model.gguf", sparse=True)
    with (
        open_model(tmp_path / "model.gguf") as file,
        pytest.raises(GGUFError, match=rf"{architecture}\.expert_count.*is 0"),
    ):
        BUILDERS[architecture](file)


def test_an_older_qwen2moe_shares_its_width_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen1.5-MoE files name one width, 5632: that of the shared expert, and of its 4 experts together."""
    shapes = replace(PRESETS["tiny"], architecture="qwen2moe", n_ff_exp=256, n_expert_used=4, n_ff_shared=1024)
    metadata = {k: v for k, v in shapes.metadata().items() if not k.startswith("expert_") or k.endswith("count")}
    monkeypatch.setitem(PRESETS, "made", shapes)
    monkeypatch.setattr(type(shapes), "metadata", lambda self: metadata)
    synthesize("made", tmp_path / "model.gguf", sparse=True)
    with open_model(tmp_path / "model.gguf") as file:
        assert check_tensors(file, BUILDERS["qwen2moe"](file)) == []
