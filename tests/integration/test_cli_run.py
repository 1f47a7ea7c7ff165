"""`noria run`: prompts, ends, figures, and what is refused before anything is printed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from noria.cli.engine import demo_model
from noria.gguf import open_model
from noria.gguf.synth import synthesize
from noria.runtime import Session
from noria.text import Sampler, Tokenizer

Noria = Callable[..., Any]
GREEDY = ("--temp", 0)
DATA = Path(__file__).parents[1] / "data"


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "shown"), [(b"\xef\xbb\xbfAnd\n", "And"), (b"And\n\n", "And\n"), (b"And", "And"), (b"\nAnd", "\nAnd")]
)
def test_a_prompt_file_loses_its_mark_and_one_newline(
    noria: Noria, tmp_path: Path, content: bytes, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_bytes(content)
    as_argument = noria("run", "-p", shown, "-n", 2, *GREEDY)
    assert as_argument.code == 0
    assert noria("run", "-f", "prompt.txt", "-n", 2, *GREEDY).out == as_argument.out
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert noria("run", "-f", "-", "-n", 2, *GREEDY).out == as_argument.out


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, "-f p.txt: cannot read the prompt: No such file or directory."), (b"ab\xff", "not UTF-8: see byte 2.")],
)
def test_a_prompt_that_cannot_be_read(noria: Noria, tmp_path: Path, content: bytes | None, error: str) -> None:
    if content is not None:
        (tmp_path / "p.txt").write_bytes(content)
    result = noria("run", "-f", "p.txt")
    assert result.code == 2
    assert error in result.err
    assert "Errno" not in result.err


@pytest.mark.parametrize(
    ("flags", "n_ctx"), [((), 2048), (("-c", 100), 100)], ids=["longer than the training", "longer than -c"]
)
def test_a_prompt_that_is_too_long(
    noria: Noria, monkeypatch: pytest.MonkeyPatch, flags: tuple[object, ...], n_ctx: int
) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *args, **kwargs: pytest.fail("loaded"))
    result = noria("run", "-p", "the " * 3000, *flags)
    assert (result.code, result.out) == (2, "")
    text = rf"the prompt has \d+ tokens, the context is {n_ctx} \(-c\); the model was trained for 2048\.\n"
    assert re.fullmatch(f"noria: error: {text}", result.err)


def test_a_model_without_a_tokenizer(noria: Noria) -> None:
    path = DATA / "llama-q4_k_m.gguf"
    err = noria("run", "-m", path, "-p", "x").err
    assert err.startswith(f"noria: error: {path}: this file has no tokenizer")
    assert err.endswith("use noria logits --tokens or noria bench.\n")


# --- ends and figures -------------------------------------------------------------------------------------------------


def test_minus_one_goes_on_until_the_context_is_full(noria: Noria) -> None:
    result = noria("run", "-p", "In the beginning", "-n", -1, "-c", 20, "--ignore-eos", *GREEDY)
    assert result.code == 0
    assert "decode 17 tokens" in result.err
    assert "| the context of 20 tokens is full |" in result.err
    for n in (0, -2):
        assert f"-n is {n}; it must be at least 1, or -1" in noria("run", "-p", "x", "-n", n).err


def test_the_end_of_the_text_is_said(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(demo_model()) as file:
        (end, *_) = Tokenizer.from_metadata(file.metadata).eog_ids
    monkeypatch.setattr(Sampler, "sample", lambda self, logits: end)
    result = noria("run", "-p", "In the beginning", *GREEDY)
    assert result.out == "In the beginning\n"
    assert " | end of text | " in result.err
    assert "decode" not in result.err


def test_a_drawn_seed_is_shown_and_repeats_the_text(noria: Noria) -> None:
    flags = ("-p", "And the LORD said", "-n", 8, "--temp", 1.5)
    first = noria("run", *flags)
    (seed,) = re.findall(r" \| seed (\d+) \| ", first.err)
    assert noria("run", *flags, "-s", seed).out == first.out
    assert "seed" not in noria("run", *flags[:4], *GREEDY).err


@pytest.mark.parametrize(("name", "hint"), [("t.json", True), ("t.json.gz", True), ("t.csv", False)])
def test_only_traces_for_perfetto_are_sent_there(noria: Noria, tmp_path: Path, name: str, hint: bool) -> None:
    result = noria("run", "-p", "And", "-n", 1, "--timeline", name)
    assert (tmp_path / name).stat().st_size > 0
    assert f"timeline written to {name}" in result.err
    assert ("perfetto" in result.err) == hint


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_simulated_device_computes_no_text(noria: Noria) -> None:
    for words in (("run", "-p", "x"), ("logits", "--tokens", 1, "-o", "o.npz")):
        result = noria(*words, "--backend", "sim")
        assert (result.code, result.out) == (2, "")
        assert "sim0 is simulated and computes no numbers; use noria bench, noria plan" in result.err


def test_a_sparse_model_is_noticed_where_numbers_are_computed(noria: Noria) -> None:
    synthesize("tiny", "s.gguf", n_layer=1, sparse=True)
    synthesize("tiny", "t.gguf", n_layer=1)
    flags = ("-p", 2, "-n", 0, "-r", 1)
    assert "s.gguf is mostly a hole" in noria("bench", "-m", "s.gguf", *flags, "--backend", "reference").err
    assert "s.gguf is mostly a hole" in noria("logits", "-m", "s.gguf", "--tokens", 1, "-o", "o.npz").err
    assert "hole" not in noria("bench", "-m", "s.gguf", *flags, "--backend", "sim").err
    assert "hole" not in noria("bench", "-m", "t.gguf", *flags, "--backend", "reference").err


@pytest.mark.parametrize(
    ("words", "n"),
    [
        (("run", "-p", "In the beginning", "-n", 4), 6),
        (("run", "-p", "In the beginning", "-n", 400, "-c", 9), 9),
        (("run", "-p", "In the beginning", "-n", -1, "-c", 30), 30),
        (("logits", "--tokens", "1,2,3", "--greedy", 4, "-o", "o.npz"), 6),
        (("bench", "-p", 2, "-n", 7, "-r", 1), 7),
    ],
)
def test_routing_must_reach_to_the_end(noria: Noria, words: tuple[object, ...], n: int) -> None:
    """In every command: the last token that may be computed needs its experts, and no more are asked for."""
    for n_tokens in (n - 1, n):
        np.savez("r.npz", ids=np.broadcast_to(np.arange(4, dtype=np.int32), (4, n_tokens, 4)))
        result = noria(*words, "--backend", "reference", "--routing", "r.npz")
        short = f"--routing r.npz has the experts of {n_tokens} tokens; this run may compute {n}."
        assert (result.code, short in result.err) == ((0, False) if n_tokens == n else (2, True)), result.err
        assert result.out or n_tokens < n or words[0] == "logits"
