"""Token ids equal llama.cpp's, and text survives the way there and back, also piece by piece."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from noria.api.errors import ConfigError, ModelError
from noria.gguf import open_model
from noria.text import PRE_TOKENIZERS, Detokenizer, Tokenizer

SHARED = Path(__file__).parents[3] / "shared"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def read_metadata(path: Path) -> dict[str, Any]:
    with open_model(str(path)) as model:
        return dict(model.metadata)


DEMO = read_metadata(Path(str(files("noria"))) / "data" / "demo-q4_k_m.gguf")


def byte_tokens() -> list[str]:
    """The 256 characters of a byte-level vocabulary, by byte."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def metadata(extra: dict[str, int] | None = None, merges: list[str] | None = None, **keys: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, the results of `merges`, and `extra` tokens by text and type."""
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges or []), *(extra or {})]
    types = [NORMAL] * (256 + len(merges or [])) + list((extra or {}).values())
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges or [], **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def tiny(extra: dict[str, int] | None = None, merges: list[str] | None = None, **keys: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(extra, merges, **keys))


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_metadata(DEMO)


# --- ids -------------------------------------------------------------------------------------------------------------


def test_demo_model_gives_the_ids_of_its_reference(demo: Tokenizer) -> None:
    path = SHARED / "models" / "demo-q4_k_m.npz"
    if not path.exists():
        pytest.skip("needs the reference of ../shared/models")
    reference = np.load(path)
    assert demo.encode(str(reference["text"])) == reference["tokens"].tolist()


def test_demo_model_gives_the_ids_of_llama_cpp(demo: Tokenizer) -> None:
    text = "I pray thee, let me go over, and see the good land that is beyond Jordan,"
    assert demo.encode(text) == [
        40,
        878,
        398,
        11,
        603,
        375,
        408,
        585,
        11,
        267,
        651,
        258,
        680,
        512,
        297,
        332,
        2896,
        1543,
        11,
    ]
    assert (demo.n_vocab, demo.bos_id, demo.eos_id, demo.eog_ids) == (4096, None, 4093, frozenset({4093}))


def test_merges_apply_by_rank_and_not_across_words() -> None:
    tokenizer = tiny(merges=["c Ġ", "b c", "a b"])
    assert [tokenizer.token_text(id) for id in tokenizer.encode("abc ab")] == ["a", "bc", "Ġ", "ab"]


def test_ignore_merges_takes_a_word_that_is_a_token_whole() -> None:
    extra = {"abc": NORMAL}
    assert len(tiny(extra, merges=["b c"], pre="gpt-2").encode("abc")) == 2
    assert tiny(extra, merges=["b c"], pre="glm4").encode("abc") == [257]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gpt-2", "I'll WE'LL 2024  x", ["I", "'ll", " WE", "'", "LL", " 2024", " ", " x"]),
        ("starcoder", "v 2024", ["v", " ", "2", "0", "2", "4"]),
        ("qwen2", "WE'LL (go) 2024\n\nx", ["WE", "'LL", " (", "go", ")", " ", "2", "0", "2", "4", "\n\n", "x"]),
        ("qwen2", "I'LLgo he'Sso", ["I", "'LL", "go", " he", "'S", "so"]),
        ("qwen2", "ne\u0301e", ["ne", "\u0301e"]),
        ("qwen35", "ne\u0301e", ["ne\u0301e"]),
        ("llama-bpe", "WE'LL 12345", ["WE", "'LL", " ", "123", "45"]),
        ("gpt-4o", "HelloWorld's 12345 //\nx", ["Hello", "World's", " ", "123", "45", " //\n", "x"]),
        ("tekken", "ÉcoleÉté's 12", ["École", "Été", "'s", " ", "1", "2"]),
        ("deepseek-llm", "Été 12345 我想go\r\n", ["É", "t", "é", " ", "12345", " ", "我想", "go", "\r", "\n"]),
        ("deepseek-llm", "Ĥä, ĥ  \n我ὥ", ["Ĥä", ",", " ĥ", "  ", "\n", "我", "ὥ"]),
        ("deepseek-coder", "x1, 我想\n", ["x", "1", ",", " ", "我想", "\n"]),
        ("deepseek-v3", "1234我想 _ab.cd +=\n", ["123", "4", "我想", " _", "ab", ".cd", " +=\n"]),
    ],
)
def test_words_of_a_pre_tokenizer(kind: str, text: str, words: list[str]) -> None:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[kind].regexes]
    assert [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == words


# --- tokens spelled in characters ------------------------------------------------------------------------------------


def spaced(model: str, scores: dict[str, float], **keys: Any) -> Tokenizer:
    """<unk>, <s>, </s>, the 256 bytes, a user-defined token, and `scores`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<u>", *scores]
    types = [UNKNOWN, CONTROL, CONTROL, *[6] * 256, USER_DEFINED, *[NORMAL] * len(scores)]
    values = {"tokens": tokens, "token_type": types, "scores": [0.0] * 260 + list(scores.values()), **keys}
    return Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in {"model": model, **values}.items()}
    )


SPM = {"▁": -9.0, "a": -9.0, "b": -9.0, "ab": -2.0, "▁a": -1.0, "▁ab": -3.0, "bb": -2.5, "abb": -5.0}


def texts(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.token_text(id) for id in tokenizer.encode(text, **how)]


def test_sentencepiece_joins_the_best_score_first() -> None:
    tokenizer = spaced("llama", SPM)
    assert texts(tokenizer, "ab") == ["<s>", "▁ab"]
    assert texts(tokenizer, "abb", add_special=False) == ["▁a", "bb"]  # where ▁ab would have come third
    assert texts(tokenizer, "é", add_special=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert texts(tokenizer, "") == ["<s>"]


def test_the_space_before_a_text_comes_and_goes() -> None:
    tokenizer = spaced("llama", SPM)
    for text in ("a", " a", "  a b", "a<u>a <u> b", "<s>a", "é <u>é"):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) == text
    assert texts(tokenizer, "a<u>a", add_special=False) == ["▁a", "<u>", "▁a"]
    first, *rest = tokenizer.encode("a a", add_special=False)
    assert tokenizer.decode(rest, after=first) == " a"
    assert Detokenizer(tokenizer, after=first).push(rest[0]) == " a"
    assert texts(spaced("llama", SPM, add_space_prefix=False), "a a", add_special=False) == ["a", "▁a"]


def test_special_tokens_of_phi_swallow_white_space() -> None:
    values = {"tokens": ["<unk>", "<s>", "</s>", "<|user|>", "▁", "a"], "token_type": [2, 3, 3, 3, 1, 1]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in ({"model": "llama"} | values).items()}
    plain, phi = Tokenizer.from_metadata(keys), Tokenizer.from_metadata(keys | {"general.name": "Phi-3.5 MoE"})
    assert texts(plain, "<|user|> \na", add_special=False)[:3] == ["<|user|>", "▁", "▁"]
    assert texts(phi, "<|user|> \na", add_special=False) == ["<|user|>", "▁", "a"]
    assert texts(phi, "<s> a", add_special=False) == ["<s>", "▁", "▁", "a"]


def test_unigram_finds_the_best_sum() -> None:
    tokenizer = spaced("t5", {"▁": -5.0, "a": -5.0, "b": -5.0, "ab": -2.0, "ba": -2.5, "▁a": -3.0}, unknown_token_id=0)
    assert texts(tokenizer, "aba", add_special=False) == ["ab", "a"]
    assert texts(tokenizer, "ba zz", add_special=False) == ["ba", "▁", "<unk>"]
    keys = {"add_space_prefix": True, "remove_extra_whitespaces": True, "unknown_token_id": 0, "eos_token_id": 2}
    merged = spaced("t5", {"▁": -5.0, "a": -5.0, "▁a": -3.0}, **keys)
    assert texts(merged, "  a   a ") == ["▁a", "▁a", "</s>"]
    assert merged.decode(merged.encode("a a"), special=False) == "a a"


def test_gemma_spells_in_characters_and_falls_back_to_bytes() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "\n", "\n\n"]
    keys = {"model": "gemma4", "tokens": tokens, "merges": ["▁ a", "\n \n"], "bos_token_id": 2, "eos_token_id": 1}
    keys["token_type"] = [CONTROL] * 3 + [6] * 256 + [NORMAL] * 5
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert texts(tokenizer, "a a\n\né") == ["<bos>", "a", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" a\né"), special=False) == " a\né"


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({pre: kind for kind, pre in PRE_TOKENIZERS.items() if pre.byte_level}.values()))
def test_any_text_survives_every_kind(kind: str) -> None:
    tokenizer = Tokenizer.from_metadata(DEMO | {"tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": False})

    @given(st.text() | st.text("aL'1 \n\r\té_/我\u0301"))
    @settings(max_examples=60, deadline=None, derandomize=True)
    def survives(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) == text
        assert detokenizer.flush() == ""

    survives()


@given(st.lists(st.integers(0, 4095)))
@settings(deadline=None, derandomize=True)
def test_streamed_text_equals_decoded_text_for_any_ids(demo: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(demo)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == demo.decode(ids)


def test_a_character_comes_when_its_last_byte_does() -> None:
    tokenizer = tiny()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(id) for id in "é🦙".encode()] == ["", "é", "", "", "", "🦙"]
    assert detokenizer.push(0xC3) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(ord("a")) == "a"
    assert tokenizer.decode([0xC3, ord("a")]) == "\ufffda"


def test_a_long_text_of_one_kind_of_character(demo: Tokenizer) -> None:
    for text in (" " * 200_000 + "a", "a" * 200_000, "\n" * 200_000, "!" * 200_000):
        assert demo.decode(demo.encode(text)) == text


def test_a_placeholder_that_is_not_in_byte_characters_is_shown_as_it_is() -> None:
    assert tiny({"<a b>": 5}).decode([256]) == "<a b>"


def test_lone_surrogates_are_refused(demo: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"lone surrogate U\+D800 at character 2"):
        demo.encode("ab\ud800c")


@pytest.mark.parametrize("id", [-1, 4096])
def test_ids_outside_the_vocabulary_are_refused(demo: Tokenizer, id: int) -> None:
    with pytest.raises(ConfigError, match=rf"token id {id} is outside the vocabulary \(0 to 4095\)"):
        demo.decode([id])


# --- special tokens --------------------------------------------------------------------------------------------------


def test_special_tokens_are_split_out_before_bpe() -> None:
    tokenizer = tiny({"<|x|>": CONTROL, "<tool>": USER_DEFINED, "<unk>": UNKNOWN}, merges=["< |"])
    control, user, unknown = 257, 258, 259
    assert tokenizer.encode("a<|x|><tool>b<unk>") == [ord("a"), control, user, ord("b"), unknown]
    outside = tokenizer.encode("a<|x|><tool>b", parse_special=False)
    assert outside == [ord("a"), 256, ord("x"), ord("|"), ord(">"), user, ord("b")]
    assert tokenizer.decode([ord("a"), control, user, unknown]) == "a<|x|><tool><unk>"
    assert tokenizer.decode([ord("a"), control, user, unknown], special=False) == "a<tool>"
    assert Detokenizer(tokenizer, special=False).push(control) == ""


def test_of_two_special_tokens_at_one_place_the_longer_is_meant() -> None:
    tokenizer = tiny({"  ": USER_DEFINED, "    ": USER_DEFINED, "我": USER_DEFINED})
    assert tokenizer.encode("       我") == [257, 256, ord(" "), 258]


def test_bos_and_eos_as_the_file_asks() -> None:
    keys: dict[str, Any] = {"bos_token_id": 256, "eos_token_id": 257, "add_bos_token": True, "add_eos_token": True}
    tokenizer = tiny({"<s>": CONTROL, "<e>": CONTROL}, **keys)
    assert tokenizer.encode("a") == [256, ord("a"), 257]
    assert tokenizer.encode("") == [256, 257]
    assert tokenizer.encode("a", add_special=False) == [ord("a")]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)


def test_bos_by_kind_where_the_file_says_nothing() -> None:
    for kind, ids in {"llama-bpe": [256, ord("a")], "glm4": [ord("a")], "qwen2": [ord("a")]}.items():
        assert tiny({"<s>": CONTROL}, pre=kind, bos_token_id=256).encode("a") == ids
    assert tiny({"<s>": CONTROL}, pre="llama-bpe", bos_token_id=256, add_bos_token=False).encode("a") == [ord("a")]


def test_a_second_bos_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny({"<s>": CONTROL}, bos_token_id=256, add_bos_token=True)
    tokenizer.encode("a<s>")
    assert not caplog.records
    assert tokenizer.encode("<s>a") == [256, 256, ord("a")]
    assert "starts with <s> already" in caplog.text


def test_what_ends_a_generation() -> None:
    by_text = tiny({"<|im_end|>": CONTROL, "<|endoftext|>": NORMAL, "<|im_start|>": CONTROL, "<|file_sep|>": CONTROL})
    assert by_text.eog_ids == {256, 257, 259}
    by_key = tiny(
        {"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL}, eos_token_id=256, eot_token_id=257, eom_token_id=258
    )
    assert by_key.eog_ids == {256, 257, 258}
    assert tiny().eog_ids == frozenset()


def test_end_of_a_message_is_not_the_end_in_gpt_oss() -> None:
    assert tiny({"<|end|>": CONTROL}).eog_ids == {256}
    assert tiny({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}).eog_ids == {257, 258}


def test_an_html_tag_does_not_end_a_generation() -> None:
    assert tiny({"</s>": NORMAL}).eog_ids == frozenset()
    assert tiny({"</s>": CONTROL}).eog_ids == {256}


def test_text_that_ends_a_generation_is_a_control_token_whatever_its_type() -> None:
    tokenizer = tiny({"<|im_end|>": NORMAL})
    assert tokenizer.encode("<|im_end|>") == [256]
    assert tokenizer.encode("<|im_end|>", parse_special=False) == list(b"<|im_end|>")


def test_an_id_outside_the_vocabulary_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert tiny(eos_token_id=256).eos_id is None
    assert "tokenizer.ggml.eos_token_id is 256, which is none of the 256 tokens" in caplog.text


# --- files without a usable tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "test"}, r"no tokenizer \(tokenizer.ggml.model is 'test'\)\."),
        ({"model": "no_vocab"}, "no tokenizer"),
        ({"model": None}, "no tokenizer"),
        ({"model": "bert"}, r"'bert' \(WordPiece\); supported are 'gpt2' and 'gemma4' \(BPE\), 'llama'"),
        ({"model": "klingon"}, "an unknown family"),
        ({"model": "t5", "precompiled_charsmap": [9, 0, 0, 0, 0]}, "precompiled_charsmap is cut or damaged"),
        ({"pre": "klingon"}, "'klingon', which is not known; known are: .*qwen2"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokens": [1, 2]}, "tokens should be an array of strings"),
        ({"merges": "a b"}, "merges should be an array of strings"),
        ({"token_type": [1.5]}, "token_type should be an array of integers"),
        ({"token_type": [1]}, "token_type has 1 entries for 256 tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "1 tokens twice"),
        ({"merges": ["a b"], "tokens": ["a", "b"], "token_type": None}, r"merges\[0\] is 'a b', which does not join"),
        ({"add_bos_token": True}, "needs its BOS token, but tokenizer.ggml.bos_token_id is missing"),
        ({"add_eos_token": True}, "needs its EOS token, but tokenizer.ggml.eos_token_id"),
    ],
)
def test_what_is_wrong_is_named(keys: dict[str, Any], message: str) -> None:
    values = metadata() | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_metadata({key: value for key, value in values.items() if value is not None})


def test_a_missing_kind_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert tiny(pre=None).encode("a1") == [ord("a"), ord("1")]
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_padding_without_text_is_not_a_duplicate() -> None:
    values = metadata({"x1": NORMAL, "x2": NORMAL})
    values["tokenizer.ggml.tokens"][256:] = ["", ""]
    assert Tokenizer.from_metadata(values).token_text(257) == "[EMPTY_257]"


def test_importing_the_room_does_not_import_the_library() -> None:
    code = "import sys, noria.text; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
