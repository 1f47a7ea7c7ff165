"""Byte-level BPE, as GPT-2 introduced it, from the metadata of a GGUF file.

The merging itself is done by the `tokenizers` library. What is ours is what a GGUF adds to it: which regex cuts the
text into words, which tokens are special, where BOS and EOS go, and which tokens end a generation.

Source: the rules for special and end-of-generation tokens follow llama.cpp (src/llama-vocab.cpp), so that the ids
equal its ids; the file format is ggml's docs/gguf.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from noria.api.errors import ConfigError, ModelError
from noria.text.pretokenizer import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger(__name__)

_NO_TOKENIZER = {"none", "no_vocab", "test"}
_OTHER_FAMILIES = {
    "llama": "SentencePiece BPE",
    "gemma4": "SentencePiece-style BPE",
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
}

# Files rarely mark more than one token as the end, so llama.cpp also goes by these texts. The last two lines are for
# filling in code: padding, the next repository and the next file end the filled part.
_EOG_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
_EOG_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible character: itself where it is one, else U+0100 onwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_id: the token that starts a text, or None.
        eos_id: the token the file names as the end of a text, or None.
        eog_ids: the tokens that end a generation; `eos_id` is one of them.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str],
        token_types: Sequence[int],
        merges: Sequence[str],
        pre: PreTokenizer,
        bos_id: int | None,
        eos_id: int | None,
        eog_ids: frozenset[int],
        add_bos: bool,
        add_eos: bool,
    ) -> None:
        self.bos_id, self.eos_id, self.eog_ids = bos_id, eos_id, eog_ids
        self._tokens = tokens
        self._prefix = [bos_id] if add_bos and bos_id is not None else []
        self._suffix = [eos_id] if add_eos and eos_id is not None else []
        self._bpe = _build_bpe(tokens, merges, pre)

        types = np.asarray(token_types)  # [n_vocab]
        self._control = eog_ids.union(np.flatnonzero(np.isin(types, (TokenType.UNKNOWN, TokenType.CONTROL))).tolist())
        # Their texts stand in the vocabulary as they are; all others are spelled in byte characters.
        self._literal = self._control.union(np.flatnonzero(types == TokenType.USER_DEFINED).tolist())
        # The longest first: where two could match the same place, the longer one is meant.
        self._special = sorted(self._literal, key=lambda id: -len(tokens[id].encode()))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's key-value pairs (`tokenizer.ggml.*`).

        Raises:
            ModelError: the file has no tokenizer, one of another family, or one that contradicts itself.
        """
        model = str(metadata.get("tokenizer.ggml.model", "none"))
        if model in _NO_TOKENIZER:
            raise ModelError(f"this file has no tokenizer (tokenizer.ggml.model is '{model}').")
        if model != "gpt2":
            family = _OTHER_FAMILIES.get(model, "an unknown family")
            raise ModelError(
                f"tokenizer.ggml.model is '{model}' ({family}); only byte-level BPE ('gpt2') is supported."
            )
        name = str(metadata.get("tokenizer.ggml.pre", ""))
        if name not in PRE_TOKENIZERS:
            found = f"'{name}', which is not known" if name else "missing"
            raise ModelError(f"tokenizer.ggml.pre is {found}; known are: {', '.join(sorted(PRE_TOKENIZERS))}.")
        pre = PRE_TOKENIZERS[name]

        # Padding of the vocabulary may have no text.
        tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(_array(metadata, "tokens", str))]
        n_vocab = len(tokens)
        token_types = _array(metadata, "token_type", Integral, default=[TokenType.NORMAL] * n_vocab)
        if len(token_types) != n_vocab:
            raise ModelError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {n_vocab} tokens.")

        bos_id, eos_id = _token_id(metadata, "bos", n_vocab), _token_id(metadata, "eos", n_vocab)
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos))
        add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
        for key, wanted, id in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
            if wanted and id is None:
                raise ModelError(f"text needs its {key.upper()} token, but tokenizer.ggml.{key}_token_id is missing.")
        return cls(
            tokens=tokens,
            token_types=token_types,
            merges=_array(metadata, "merges", str),
            pre=pre,
            bos_id=bos_id,
            eos_id=eos_id,
            eog_ids=_find_eog_ids(metadata, tokens, token_types),
            add_bos=add_bos,
            add_eos=add_eos,
        )

    @property
    def n_vocab(self) -> int:
        """Count of tokens."""
        return len(self._tokens)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; nothing is added to it or normalized.
            add_special: put BOS in front and EOS behind where the file asks for it.
            parse_special: take control tokens written in the text (`<|im_end|>`) for what they mean. False for text
                from outside, which must not be able to end a turn; user-defined tokens are found in either case.

        Raises:
            ConfigError: the text holds a lone surrogate, so it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}. Give UTF-8."
            ) from None
        ids: list[int] = []
        for piece in self._split_special(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._bpe.encode(piece, add_special_tokens=False).ids)
        if not add_special:
            return ids
        if self._prefix and ids[:1] == self._prefix:
            _log.warning("the text starts with %s already: it now has two", self._tokens[ids[0]])
        return self._prefix + ids + self._suffix

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: False leaves control tokens (`<|im_end|>`) out.
        """
        return b"".join(self.token_bytes(id, special=special) for id in ids).decode("utf-8", "replace")

    def token_text(self, id: int) -> str:
        """The token as the vocabulary spells it: ` the` is `Ġthe`.

        Raises:
            ConfigError: there is no such token.
        """
        if not 0 <= id < self.n_vocab:
            raise ConfigError(f"token id {id} is outside the vocabulary (0 to {self.n_vocab - 1}).")
        return self._tokens[id]

    def token_bytes(self, id: int, *, special: bool = True) -> bytes:
        """The UTF-8 bytes a token stands for: often a part of a character. `special` is that of `decode`."""
        text = self.token_text(id)
        if id in self._control and not special:
            return b""
        if id in self._literal:
            return text.encode()
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # an unused row of the vocabulary, such as a placeholder with a space in it
            return text.encode()

    def _split_special(self, text: str, parse_special: bool) -> list[str | int]:
        """The text cut at special tokens: ids where one stood, the text between as it is."""
        pieces: list[str | int] = [text]
        for id in self._special:
            token = self._tokens[id]
            if token not in text or (id in self._control and not parse_special):
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                first, *others = piece.split(token)
                cut.append(first)
                for other in others:
                    cut += (id, other)
            pieces = cut
        return [piece for piece in pieces if piece != ""]


def _array(metadata: Mapping[str, Any], name: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{key} is missing, so this file's text cannot be tokenized.")
    # The elements of a GGUF array have one type, so the first one speaks for all.
    if isinstance(value, str) or not hasattr(value, "__len__") or (len(value) and not isinstance(value[0], kind)):
        raise ModelError(f"{key} should be an array of {'strings' if kind is str else 'integers'}.")
    return cast(Sequence[Any], value)


def _token_id(metadata: Mapping[str, Any], name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    id = metadata.get(key)
    if id is None:
        return None
    if not isinstance(id, Integral) or not 0 <= int(id) < n_vocab:
        _log.warning("%s is %s, which is none of the %d tokens: ignored", key, id, n_vocab)
        return None
    return int(id)


def _find_eog_ids(metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]) -> frozenset[int]:
    texts = {*_EOG_TEXTS}
    eog = {text: id for id, text in enumerate(tokens) if text in texts}
    # Unless the file marks it, </s> is the HTML tag: in Qwen's vocabulary it is a word like any other.
    if "</s>" in eog and token_types[eog["</s>"]] == TokenType.NORMAL:
        del eog["</s>"]
    # gpt-oss and Solar close every message with <|end|> and the answer with another one.
    calls = "<|call|>" in eog or "<|calls|>" in eog
    if calls and ("<|return|>" in eog or "<|flush|>" in eog):
        eog.pop("<|end|>", None)
    named = (_token_id(metadata, name, len(tokens)) for name in _EOG_KEYS)
    return frozenset(eog.values()).union(id for id in named if id is not None)


def _build_bpe(tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    # Imported here because the library is large and most commands never touch text.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab = {text: id for id, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice.")
    pairs = []
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise ModelError(f"tokenizer.ggml.merges[{rank}] is '{merge}', which does not join two tokens to a third.")
        pairs.append((left, right))
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe
