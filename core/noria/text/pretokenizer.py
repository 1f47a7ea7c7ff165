r"""How each `tokenizer.ggml.pre` kind cuts text into the words that BPE merges inside of.

BPE never merges across a word border, so a wrong regex here gives ids the model was not trained on: text that looks
right and answers that are slightly worse. An unknown kind is therefore an error, never a default.

Where llama.cpp's regexes only approximate a model's own (its engine knows no classes of letters by case, so `gpt-4o`
and its relatives take `ÉcoleÉté` for one word there), these are the model's.

The regexes are Oniguruma's (the engine of the `tokenizers` library): `\s`, `\p{L}`, `\p{N}` are Unicode, `\x{..}` is a
code point. Letter case is spelled out (`[sS]`) where the published patterns say `(?i:s)`, because Unicode case folding
would also let U+017F match an `s`.

Source: the patterns are those of the models' own tokenizers; the names, and which names share a pattern, are those
llama.cpp writes into GGUF files (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One way of cutting text into words.

    Attributes:
        regexes: applied one after another, each to the pieces the one before left; a match is a word of its own and so
            is what lies between two matches.
        ignore_merges: a word that is a token as a whole becomes that token, whatever the merges say.
        add_bos: whether text starts with the BOS token when the file does not say.
        byte_level: tokens are spelled in bytes, each written as one visible character. Else they are spelled in
            characters, with `▁` for a space, and a character without a token becomes bytes `<0x0A>`.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_CONTRACTION = r"'(?:[sdmtSDMT]|[lL]{2}|[vV][eE]|[rR][eE])"
_SUFFIX = rf"(?:{_CONTRACTION})?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # one character a word may carry in front, most often its space
_GAPS = r"\s+(?!\S)|\s+"  # white space, less the last one if a word follows
_SPACES = rf"\s*[\r\n]+|{_GAPS}"  # the same, but up to the last line end first

_GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_GAPS}"


def _cl100k(digits: str, letters: str = r"\p{L}", *, contraction: str = _CONTRACTION, spaces: str = _SPACES) -> str:
    """The pattern of GPT-4, which most models of 2024 and later share but for how digits are grouped."""
    return rf"{contraction}|{_LEAD}[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{spaces}"


def _o200k(digits: str, *, suffix: str = _SUFFIX, without: str = "", after_signs: str = r"[\r\n/]*") -> str:
    """The pattern of GPT-4o, which also cuts before a capital that follows small letters."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    words = rf"{_LEAD}{upper}*{lower}+{suffix}|{_LEAD}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{_SPACES}"


def _deepseek3(after_signs: str = r"+[\r\n]*", spaces: str = _SPACES) -> str:
    """The pattern of DeepSeek V3, in which a sign may lead a word."""
    signs = rf" ?[\p{{P}}\p{{S}}]{after_signs}"
    return rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|{signs}|{spaces}"


def _ranges(text: str) -> str:
    """`"41-5A B5"` as the inside of a character class."""
    return "".join("-".join(rf"\x{{{code}}}" for code in item.split("-")) for item in text.split())


# The letters with case that DeepSeek LLM's pattern lists one by one: it was made with an older Unicode than today's
# \p{Lu}\p{Ll}\p{Lt}, so a class by property would also take in Georgian, later Latin and mathematical letters.
_DEEPSEEK_CASED = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
# From ":" to "~" lie the ASCII letters too, so this cuts "Été" in three. It is what the model was trained with.
_DEEPSEEK_PUNCTUATION = _ranges("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_EAST_ASIAN = _ranges("4E00-9FA5 800-4E00 AC00-D7FF")
_HAN_AND_KANA = _ranges("4E00-9FA5 3040-309F 30A0-30FF")

# AFMoE's own list of scripts that have no spaces between words: Han, kana, Thai, Lao, Khmer, Myanmar, Hangul.
_AFMOE_UNSPACED = _ranges(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_YOUTU_EAST_ASIAN = "|".join(
    f"[{_ranges(ranges)}]+"
    for ranges in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FALCON_SIGNS = r"[\p{P}$+<=>^~|`]+"
_LINES = r"[^\n]+|\n+"

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "gpt-2 phi-2 olmo mpt jais exaone4 trillion granite-docling gigachat mellum a.x-4.0",
        PreTokenizer(regexes=(_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer(regexes=(r"\p{N}", _GPT2)),
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo",
        PreTokenizer(regexes=(_cl100k(r"\p{N}"),)),
    ),
    ("qwen35", PreTokenizer(regexes=(_cl100k(r"\p{N}", letters=r"\p{L}\p{M}"),))),
    ("ufakzeka", PreTokenizer(regexes=(_cl100k(r"\p{N}", contraction="(?!)"),))),
    ("laguna", PreTokenizer(regexes=(_LINES, _cl100k(r"\p{N}")))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(regexes=(_cl100k(r"\p{N}", spaces=rf"\s*[\r\n]|{_GAPS}"),)),
    ),
    (
        "seed-coder",
        PreTokenizer(
            regexes=(rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            regexes=(
                rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_GAPS}",
            )
        ),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(regexes=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("glm4 glm5", PreTokenizer(regexes=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer(regexes=(_cl100k(r"\p{N}{1,3}"),))),
    ("minicpm5", PreTokenizer(regexes=(r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True)),
    (
        "jais-2",
        PreTokenizer(
            regexes=(
                _cl100k(
                    r"\p{N}{1,3}",
                    spaces=r"\s*[\r\n]+|"
                    + "".join(rf"\s{{{n}}}(?!\S)|" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
                    + r"\s",
                ),
            )
        ),
    ),
    ("gpt-4o llama4 minimax-m2 kanana2 talkie", PreTokenizer(regexes=(_o200k(r"\p{N}{1,3}"),))),
    ("tekken", PreTokenizer(regexes=(_o200k(r"\p{N}", suffix=""),), ignore_merges=True, add_bos=True)),
    ("tiny_aya cohere2moe", PreTokenizer(regexes=(r"\d{1,3}(?=(?:\d{3})*\b)", _o200k(r"\p{N}{1,3}")))),
    ("youtu", PreTokenizer(regexes=(_YOUTU_EAST_ASIAN, _o200k(r"\p{N}")), ignore_merges=True)),
    (
        "kimi-k2",
        PreTokenizer(regexes=(r"\p{Han}+|" + _o200k(r"\p{N}{1,3}", without=r"&&[^\p{Han}]", after_signs=r"[\r\n]*"),)),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            regexes=(
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_CASED}]+",
                rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
                r"\s+$",
                rf"[{_DEEPSEEK_EAST_ASIAN}]+",
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(regexes=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_DEEPSEEK_EAST_ASIAN}]+", r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
        PreTokenizer(regexes=(r"\p{N}{1,3}", rf"[{_HAN_AND_KANA}]+", _deepseek3())),
    ),
    (
        "spark2_5",
        PreTokenizer(regexes=(r"\p{N}{1,3}", rf"[{_HAN_AND_KANA}]+", _deepseek3("+", rf"[\r\n]|{_GAPS}"), r"\p{N}")),
    ),
    (
        "afmoe",
        PreTokenizer(regexes=(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", rf"[{_AFMOE_UNSPACED}]+", _deepseek3())),
    ),
    ("superbpe", PreTokenizer(regexes=(r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("falcon", PreTokenizer(regexes=(_FALCON_SIGNS, _GPT2, r"[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer(regexes=(_BLOOM,))),
    ("viking", PreTokenizer(regexes=(_BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            regexes=(
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4", PreTokenizer(regexes=(_LINES,), add_bos=True, byte_level=False)),
    ("sarvam-moe", PreTokenizer(regexes=(_LINES,), byte_level=False)),
    # What files say, or should have said, that were made before 2024-05, when there was only this kind.
    ("default", PreTokenizer(regexes=(_FALCON_SIGNS.replace("`", ""), _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: pre for names, pre in _FAMILIES for name in names.split()}
)
"""Every `tokenizer.ggml.pre` this project knows, by its name in the file."""
