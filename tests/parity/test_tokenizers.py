"""Token ids equal llama.cpp's: on its cases for real vocabularies, and on random text against the library itself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.gguf import open_model
from noria.text import Tokenizer

VOCAB = Path(__file__).parents[3] / "shared" / "vocab"
KINDS = ("qwen2", "gpt-2", "deepseek-llm", "llama-spm")
N_TEXTS = 10_000
WIDE_SPACES = re.compile(
    "[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
)  # llama.cpp turns them into U+000B first


def vocab_path(kind: str) -> Path:
    path = VOCAB / f"ggml-vocab-{kind}.gguf"
    if not path.exists():
        pytest.skip("needs the real vocabularies of ../shared/vocab")
    return path


def load(path: Path) -> Tokenizer:
    with open_model(str(path)) as model:
        return Tokenizer.from_metadata(model.metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_of_a_real_vocabulary(kind: str) -> None:
    path = vocab_path(kind)
    tokenizer = load(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert ids == [int(id) for id in line.split()], text
        assert tokenizer.decode(ids) == text


# --- random text -----------------------------------------------------------------------------------------------------

WORDS = """
    the of and to Hello World I'm you'LL WE'RE it's don't O'Neil HTTPServer camelCase snake_case x1 v2.0 3.14
    2024-12-04 1234567 int main() { return 0; } <div class="a"> </s> <s> <unk> <|im_start|> <|im_end|> <|endoftext|>
    naïve façade Straße Ångström Привет мир Ελληνικά שלום مرحبا नमस्ते สวัสดี 你好世界 東京 こんにちは カタカナ
    안녕하세요 🦙 👩\u200d👩\u200d👧 🇫🇷 ½ ² Ⅷ ﬁ ｆｕｌｌ ∑ → € ﷽ e\u0301 \u200b \ufeff ¿ « » … — ‘ ’ “ ”
""".split()  # noqa: SIM905 - a list would be a page
GAPS = (*[" "] * 12, *["  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u3000", "\u00a0", "\u2028", "\v", "\x85"], "")
BLOCKS = (
    *[(0x20, 0x7E)] * 6,
    *[(0x00, 0x1F), (0x80, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF)],
    *[(0x900, 0x97F), (0xE00, 0xE7F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x13A0, 0x13FF), (0x1D00, 0x1DBF)],
    *[(0x1E00, 0x1EFF), (0x2000, 0x206F), (0x2070, 0x20CF), (0x2100, 0x218F), (0x2190, 0x22FF), (0x2460, 0x24FF)],
    *[(0x2C00, 0x2C5F), (0x3000, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA640, 0xA7FF), (0xAC00, 0xD7A3)],
    *[(0xE000, 0xF8FF), (0xF900, 0xFAFF), (0xFB00, 0xFFFD), (0x10000, 0x104FF), (0x1D400, 0x1D7FF)],
    *[(0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)],
)


def random_text(rng: random.Random) -> str:
    """Words, white space, and runs of characters from all over Unicode."""
    pieces = []
    for _ in range(rng.randrange(1, 12)):
        match rng.randrange(8):
            case 0:
                first, last = rng.choice(BLOCKS)
                pieces += [chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 8))]
            case 1:
                pieces.append(rng.choice(" \n\t0'.!") * rng.randrange(1, 12))
            case 2:
                pieces.append(str(rng.randrange(10 ** rng.randrange(1, 9))))
            case _:
                pieces.append(rng.choice(WORDS))
        pieces.append(rng.choice(GAPS))
    return "".join(pieces)


def open_llama_cpp(path: Path) -> Callable[[str, bool, bool], list[int]]:
    """The tokenizer of llama.cpp: text, add_special, parse_special."""
    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return lambda text, add, parse: llama.tokenize(text.encode(), add_bos=add, special=parse)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_text(kind: str) -> None:
    path = vocab_path(kind)
    theirs, ours = open_llama_cpp(path), load(path)
    rng = random.Random(kind)
    different = []
    for _ in range(N_TEXTS):
        text, add, parse = random_text(rng), rng.random() < 0.5, rng.random() < 0.5
        if (
            kind == "qwen2"
        ):  # llama.cpp ends an answer at </s>, which is HTML to this model and a word of its vocabulary
            parse = parse and "</s>" not in text
        if kind == "deepseek-llm":  # the model's own regex takes these spaces for East Asian characters too
            text = WIDE_SPACES.sub("\u3001", text)
        if ours.encode(text, add_special=add, parse_special=parse) != theirs(text, add, parse):
            different.append(text)
    assert not different, f"{len(different)} of {N_TEXTS} differ, such as {different[:3]}"
