"""`noria synth`: writes what it says, and nothing over what is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noria.cli.engine import demo_model
from noria.gguf import open_model
from noria.gguf.presets import PRESETS

Noria = Callable[..., Any]


def test_a_model_that_runs(noria: Noria, tmp_path: Path) -> None:
    result = noria("synth", "tiny", "t.gguf", "--layers", 2, "--quant", "q8_0", "--vocab", demo_model())
    assert result.code == 0
    nbytes = (tmp_path / "t.gguf").stat().st_size
    assert f"t.gguf: {nbytes / 2**20:.2f} MiB in " in result.err
    with open_model(tmp_path / "t.gguf") as file:
        assert file.metadata.arch_int("block_count") == 2
        assert file.tensors["blk.1.ffn_up_exps.weight"].type == "Q8_0"
    assert noria("run", "-m", "t.gguf", "-p", "In the beginning", "-n", 2, "--ignore-eos").code == 0


def test_the_seed_is_the_weights(noria: Noria, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert noria("synth", "tiny", f"{name}.gguf", "--layers", 1, "--seed", seed).code == 0
    a, b, c = ((tmp_path / f"{name}.gguf").read_bytes() for name in "abc")
    assert a == b != c


def test_it_does_not_overwrite(noria: Noria, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_text("precious")
    result = noria("synth", "tiny", path)
    assert (result.code, path.read_text()) == (2, "precious")
    assert "--force overwrites it" in result.err
    assert noria("synth", "tiny", path, "--layers", 1, "--force").code == 0
    assert path.stat().st_size > 1000


def test_split(noria: Noria, tmp_path: Path) -> None:
    result = noria("synth", "tiny", "t.gguf", "--layers", 1, "--split", 3)
    assert result.code == 0
    assert result.err.startswith("noria: t-00001-of-00003.gguf and so on: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"t-0000{no}-of-00003.gguf" for no in (1, 2, 3)]
    result = noria("synth", "tiny", "t.gguf", "--layers", 1, "--split", 3)
    assert (result.code, "t-00001-of-00003.gguf exists; --force" in result.err) == (2, True)


def test_sparse(noria: Noria, tmp_path: Path) -> None:
    assert noria("synth", "qwen3-30b-a3b", "s.gguf", "--sparse").code == 0
    stat = (tmp_path / "s.gguf").stat()
    assert stat.st_size > 17 * 2**30
    assert stat.st_blocks * 512 < 10e6


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("qwen3-30b", "x.gguf"), ["unknown preset 'qwen3-30b'", *PRESETS, "Did you mean 'qwen3-30b-a3b'?"]),
        (("tiny", "x.gguf", "--quant", "Q9_K"), ["unknown quant 'Q9_K'", "Q4_K_M", "Q8_0"]),
        (("tiny", "x.gguf", "--layers", 0), ["at least 1 layer"]),
        (("tiny", "x.gguf", "--layers", 1, "--split", 0), ["15 tensors cannot be split into 0 files"]),
        (("tiny", "x.gguf", "--layers", 1, "--split", 16), ["15 tensors cannot be split into 16 files"]),
        (("tiny", "x.gguf", "--layers", "two"), ["'two' is not a whole number"]),
        (("tiny", "no/folder/x.gguf"), ["cannot be written"]),
    ],
)
def test_wrong_arguments(noria: Noria, tmp_path: Path, words: tuple[object, ...], texts: list[str]) -> None:
    result = noria("synth", *words)
    assert result.code == 2
    assert all(text in result.err for text in texts), result.err
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_full_disk_is_noticed_before_writing(noria: Noria, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    result = noria("synth", "tiny", "x.gguf")
    assert result.code == 2
    assert "has 0.01 GB free" in result.err or "has 0.00 GB free" in result.err
    assert not list(tmp_path.iterdir())


def test_help_lists_the_presets(noria: Noria) -> None:
    text = noria("synth", "--help").out
    assert all(name in text for name in PRESETS)
    assert "128 experts of 768, 8 used" in text
