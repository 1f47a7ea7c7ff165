"""Split models run as whole ones do: the same bits, however the experts of several files come to be in RAM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.cli.engine import demo_model
from noria.gguf import open_model
from noria.gguf.synth import synthesize
from noria.runtime import LoadMode, Session

TOKENS = [1, 40, 7, 200, 12, 9]

Noria = Callable[..., Any]
OpenSession = Callable[..., Session]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    for n_shards in (1, 5):
        synthesize("tiny", folder / "m.gguf", n_layer=2, vocab=demo_model(), n_shards=n_shards)
    with open_model(folder / "m-00002-of-00005.gguf") as model:
        shards = {t.shard for t in model.tensors.values() if t.name.startswith("blk.0.ffn") and "exps" in t.name}
    assert len(shards) > 1, "the experts of a layer should lie in several files"
    return folder


@pytest.mark.parametrize("n_cpu_moe", [0, 99])
@pytest.mark.parametrize("load_mode", [LoadMode.MMAP, LoadMode.NONE])
@pytest.mark.parametrize("host_gather", [False, True])
def test_the_same_logits(
    folder: Path, open_session: OpenSession, load_mode: LoadMode, host_gather: bool, n_cpu_moe: int
) -> None:
    config = {"n_ctx": 64, "n_cpu_moe": n_cpu_moe, "load_mode": load_mode, "logits_all": True}
    whole, split = (
        open_session(folder / name, device={"host_gather": host_gather}, **config)
        for name in ("m.gguf", "m-00002-of-00005.gguf")
    )
    expected = whole.forward(TOKENS, logits_all=True)[0]
    assert np.array_equal(split.forward(TOKENS, logits_all=True)[0], expected)


def test_the_same_text(noria: Noria, folder: Path) -> None:
    words = ("-p", "In the beginning", "-n", 8, "--temp", 0, "--ignore-eos", "-cmoe", "--backend", "reference")
    texts = [noria("run", "-m", folder / name, *words) for name in ("m.gguf", "m-00003-of-00005.gguf")]
    assert [result.code for result in texts] == [0, 0], texts[1].err
    assert texts[0].out == texts[1].out


def test_a_missing_shard_is_an_error_of_one_line(noria: Noria, tmp_path: Path) -> None:
    assert noria("synth", "tiny", "m.gguf", "--layers", 1, "--split", 3).code == 0
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    result = noria("plan", "-m", "m-00001-of-00003.gguf")
    assert result.code == 1
    assert result.err == (
        "noria: error: m-00001-of-00003.gguf: split.count: is 3, but shard 3 is not in this folder: "
        "fetch m-00003-of-00003.gguf and put it beside the others.\n"
    )
