"""The tokens of a model: their texts, types and scores, and which of them mean something.

Source: the rules for control and end-of-generation tokens follow llama.cpp (src/llama-vocab.cpp), so that the ids equal
its ids; the metadata keys are those of ggml's docs/gguf.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from noria.api.errors import ModelError

_log = logging.getLogger(__name__)

# Files rarely mark more than one token as the end, so llama.cpp also goes by these texts.
_EOG_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# The tokens for filling in code, by the end of their key. Padding, the next repository and the next file end the
# filled part.
_FIM_TEXTS = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FIM_EOG = ("fim_pad", "fim_rep", "fim_sep")
# The headers of gpt-oss's messages: who reads the text wants to see where one begins.
_HARMONY_TEXTS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: the text of each, as its family of tokenizers spells it (` the` is `Ġthe` or `▁the`).
        ids: the id of each text.
        types: uint8 [n_vocab], of `TokenType`.
        scores: float32 [n_vocab]; higher is better. Zeros where the family has none.
        bos_id: the token that starts a text, or None.
        eos_id: the token the file names as the end of a text, or None.
        unk_id: what text without a token becomes, or None.
        eog_ids: the tokens that end a generation; `eos_id` is one of them.
    """

    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: NDArray[np.uint8]
    scores: NDArray[np.float32]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        unk_id: int | None = None,
    ) -> Vocabulary:
        """Read the vocabulary of a GGUF file.

        Args:
            metadata: the file's key-value pairs (`tokenizer.ggml.*`).
            bos_id: where a file of this family that does not say has it. Likewise `eos_id`, `unk_id`.

        Raises:
            ModelError: an array is missing, of the wrong kind or of the wrong length, or a text is there twice.
        """
        # Padding of the vocabulary may have no text.
        tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(read_array(metadata, "tokens", str))]
        n_vocab = len(tokens)
        types = _numbers(metadata, "token_type", Integral, n_vocab, TokenType.NORMAL).astype(np.uint8)
        scores = _numbers(metadata, "scores", Real, n_vocab, 0).astype(np.float32)
        ids = {text: id for id, text in enumerate(tokens)}
        if len(ids) != n_vocab:
            raise ModelError(f"tokenizer.ggml.tokens holds {n_vocab - len(ids)} tokens twice.")

        named = {
            name: _token_id(metadata, name, n_vocab) for name in ("bos", "eos", "unknown", "eot", "eom", *_FIM_TEXTS)
        }
        defaults = {"bos": bos_id, "eos": eos_id, "unknown": unk_id}
        for name, id in defaults.items():
            if named[name] is None and id is not None and id < n_vocab:
                named[name] = id
        eog = _find_eog(ids, types, named)
        return cls(
            tokens=tokens,
            ids=ids,
            types=types,
            scores=scores,
            bos_id=named["bos"],
            eos_id=named["eos"],
            unk_id=named["unknown"],
            eog_ids=eog,
        )

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The id of each byte that has a token of its own, written `<0x0A>`."""
        found = ((_BYTE.fullmatch(text), id) for text, id in self.ids.items())
        return {int(match[1], 16): id for match, id in found if match}

    def spaced_bytes(self, id: int) -> bytes:
        """The bytes of a token that writes a space as `▁` and a byte as `<0x0A>`."""
        text = self.tokens[id]
        match = _BYTE.fullmatch(text) if self.types[id] == TokenType.BYTE else None
        return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()

    def ids_of(self, *types: TokenType) -> frozenset[int]:
        """The tokens of these types."""
        return frozenset(np.flatnonzero(np.isin(self.types, types)).tolist())


def read_array(
    metadata: Mapping[str, Any], name: str, kind: type, default: Sequence[Any] | None = None
) -> Sequence[Any]:
    """The array `tokenizer.ggml.NAME`.

    Raises:
        ModelError: it is missing and there is no default, or it holds something else than `kind`.
    """
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{key} is missing, so this file's text cannot be tokenized.")
    # The elements of a GGUF array have one type, so the first one speaks for all.
    if isinstance(value, str) or not hasattr(value, "__len__") or (len(value) and not isinstance(value[0], kind)):
        what = "strings" if kind is str else "integers" if kind is Integral else "numbers"
        raise ModelError(f"{key} should be an array of {what}.")
    return cast(Sequence[Any], value)


def _numbers(metadata: Mapping[str, Any], name: str, kind: type, n_vocab: int, default: float) -> NDArray[Any]:
    values = np.asarray(read_array(metadata, name, kind, default=[default] * n_vocab))
    if len(values) != n_vocab:
        raise ModelError(f"tokenizer.ggml.{name} has {len(values)} entries for {n_vocab} tokens.")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    id = metadata.get(key)
    if id is None:
        return None
    if not isinstance(id, Integral) or not 0 <= int(id) < n_vocab:
        _log.warning("%s is %s, which is none of the %d tokens: ignored", key, id, n_vocab)
        return None
    return int(id)


def _find_eog(ids: Mapping[str, int], types: NDArray[np.uint8], named: Mapping[str, int | None]) -> frozenset[int]:
    """The tokens that end a generation. Corrects the types of tokens whose texts say what they are."""
    eog = {text: ids[text] for text in _EOG_TEXTS if text in ids}
    # Unless the file marks it, </s> is the HTML tag: in Qwen's vocabulary it is a word like any other.
    if "</s>" in eog and types[eog["</s>"]] == TokenType.NORMAL:
        del eog["</s>"]
    fim = dict(named)
    for name, texts in _FIM_TEXTS.items():
        if fim[name] is None and (found := next((ids[text] for text in texts if text in ids), None)) is not None:
            fim[name] = found
            types[found] = TokenType.CONTROL
    types[[*eog.values()]] = TokenType.CONTROL
    types[[ids[text] for text in _HARMONY_TEXTS if text in ids]] = TokenType.USER_DEFINED
    # gpt-oss and Solar close every message with <|end|> and the answer with another one.
    calls = "<|call|>" in eog or "<|calls|>" in eog
    if calls and ("<|return|>" in eog or "<|flush|>" in eog) and "<|end|>" in eog:
        types[eog.pop("<|end|>")] = TokenType.USER_DEFINED
    ends = (fim[name] for name in ("eos", "eot", "eom", *_FIM_EOG))
    return frozenset(eog.values()).union(id for id in ends if id is not None)
