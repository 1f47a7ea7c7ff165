"""Text to token ids and back, for every family of tokenizers that a GGUF file may hold.

How ordinary text is cut is the family's (`bpe`, `sentencepiece`, `unigram`); what is here is what they share: special
tokens, BOS and EOS, and whole texts.

Source: the rules for special tokens follow llama.cpp (src/llama-vocab.cpp), so that the ids equal its ids.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from noria.api.errors import ConfigError, ModelError
from noria.text.bpe import BPE
from noria.text.pretokenizer import PRE_TOKENIZERS
from noria.text.sentencepiece import SentencePiece
from noria.text.unigram import CharMap, Unigram
from noria.text.vocabulary import TokenType, Vocabulary, read_array

_log = logging.getLogger(__name__)

_NO_TOKENIZER = {"none", "no_vocab", "test"}
_UNSUPPORTED = {
    "bert": "WordPiece",
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "DNA",
    "whitespace": "whitespace",
}


class Family(Protocol):
    """How one family cuts text into tokens."""

    space_prefix: bool
    """Whether a text begins with a space that was not there."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text without special tokens."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """The bytes an ordinary token stands for."""
        ...


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_id: the token that starts a text, or None.
        eos_id: the token the file names as the end of a text, or None.
        eog_ids: the tokens that end a generation; `eos_id` is one of them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        family: Family,
        *,
        add_bos: bool,
        add_eos: bool,
        strips_right: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            vocabulary: of all tokens.
            family: how ordinary text is cut.
            add_bos: whether a text starts with BOS.
            add_eos: whether a text ends with EOS.
            strips_right: special tokens that swallow the white space behind them.

        Raises:
            ModelError: BOS or EOS is wanted and there is none.
        """
        for key, wanted, id in (("bos", add_bos, vocabulary.bos_id), ("eos", add_eos, vocabulary.eos_id)):
            if wanted and id is None:
                raise ModelError(f"text needs its {key.upper()} token, but tokenizer.ggml.{key}_token_id is missing.")
        self.bos_id, self.eos_id, self.eog_ids = vocabulary.bos_id, vocabulary.eos_id, vocabulary.eog_ids
        self._tokens, self._family, self._strips_right = vocabulary.tokens, family, strips_right
        self._prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        self._suffix = [self.eos_id] if add_eos and self.eos_id is not None else []
        self._control = self.eog_ids | vocabulary.ids_of(TokenType.UNKNOWN, TokenType.CONTROL)
        # Their texts stand in the vocabulary as they are; all others are spelled as the family does.
        self._literal = self._control | vocabulary.ids_of(TokenType.USER_DEFINED)
        # The longest first: where two could match the same place, the longer one is meant.
        self._special = sorted(self._literal, key=lambda id: -len(self._tokens[id].encode()))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's key-value pairs (`tokenizer.ggml.*`).

        Raises:
            ModelError: the file has no tokenizer, one of another family, or one that contradicts itself.
        """
        model = str(metadata.get("tokenizer.ggml.model", "none"))
        match model:
            case "gpt2" | "gemma4":
                name = "gemma4" if model == "gemma4" else _pre_tokenizer_name(metadata)
                pre = PRE_TOKENIZERS[name]
                vocabulary = Vocabulary.from_metadata(metadata)
                family: Family = BPE(vocabulary, read_array(metadata, "merges", str), pre)
                add_bos, add_eos = pre.add_bos, False
            case "llama":
                vocabulary = Vocabulary.from_metadata(metadata, bos_id=1, eos_id=2, unk_id=0)
                family = SentencePiece(vocabulary, space_prefix=_flag(metadata, "add_space_prefix", True))
                add_bos, add_eos = True, False
            case "t5":
                vocabulary = Vocabulary.from_metadata(metadata, eos_id=1, unk_id=2)
                family = Unigram(
                    vocabulary,
                    CharMap(bytes(bytearray(metadata.get("tokenizer.ggml.precompiled_charsmap", b"")))),
                    space_prefix=_flag(metadata, "add_space_prefix", False),
                    merge_spaces=_flag(metadata, "remove_extra_whitespaces", False),
                )
                add_bos, add_eos = False, True
            case _ if model in _NO_TOKENIZER:
                raise ModelError(f"this file has no tokenizer (tokenizer.ggml.model is '{model}').")
            case _:
                family_name = _UNSUPPORTED.get(model, "an unknown family")
                raise ModelError(
                    f"tokenizer.ggml.model is '{model}' ({family_name}); supported are 'gpt2' and 'gemma4' (BPE), "
                    f"'llama' (SentencePiece) and 't5' (unigram)."
                )
        return cls(
            vocabulary,
            family,
            add_bos=_flag(metadata, "add_bos_token", add_bos),
            add_eos=_flag(metadata, "add_eos_token", add_eos),
            strips_right=_strips_right(metadata, vocabulary),
        )

    @property
    def n_vocab(self) -> int:
        """Count of tokens."""
        return len(self._tokens)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
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
                ids.extend(self._family.encode(piece))
        if not add_special:
            return ids
        if self._prefix and ids[:1] == self._prefix:
            _log.warning("the text starts with %s already: it now has two", self._tokens[ids[0]])
        return self._prefix + ids + self._suffix

    def decode(self, ids: Iterable[int], *, special: bool = True, after: int | None = None) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: False leaves control tokens (`<|im_end|>`) out.
            after: the token before the first, if the ids go on from others.
        """
        pieces = []
        for id in ids:
            pieces.append(self.token_bytes(id, special=special, after=after))
            after = id
        return b"".join(pieces).decode("utf-8", "replace")

    def token_text(self, id: int) -> str:
        """The token as the vocabulary spells it: ` the` is `Ġthe`.

        Raises:
            ConfigError: there is no such token.
        """
        if not 0 <= id < self.n_vocab:
            raise ConfigError(f"token id {id} is outside the vocabulary (0 to {self.n_vocab - 1}).")
        return self._tokens[id]

    def token_bytes(self, id: int, *, special: bool = True, after: int | None = None) -> bytes:
        """The UTF-8 bytes a token stands for: often a part of a character.

        Args:
            id: the token.
            special: False gives nothing for a control token.
            after: the token before it; None: it starts a text. Where the tokenizer puts a space that was not there
                before a text, and before what follows a special token, this space is taken away again.

        Raises:
            ConfigError: there is no such token.
        """
        text = self.token_text(id)
        if id in self._literal:
            return b"" if id in self._control and not special else text.encode()
        piece = self._family.token_bytes(id)
        starts = self._family.space_prefix and (after is None or after in self._literal)
        return piece.removeprefix(b" ") if starts else piece

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
                    cut += (id, other.lstrip(string.whitespace) if id in self._strips_right else other)
            pieces = cut
        return [piece for piece in pieces if piece != ""]


def _pre_tokenizer_name(metadata: Mapping[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    if not name:
        _log.warning(
            "tokenizer.ggml.pre is missing, as in files made before 2024-05: text is cut as 'default', which is not "
            "how most models were trained, so answers may be worse. A newer conversion of this model mends it."
        )
        return "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre is '{name}', which is not known; known are: {known}.")
    return name


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))


def _strips_right(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> frozenset[int]:
    """The special tokens of Phi 3 and Phi 3.5 MoE that swallow white space, which files do not say."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = vocabulary.ids_of(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    keeps = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
    return special - keeps
