"""Unigram (T5, XLM-R): of all ways to cut a text into tokens, the one with the highest sum of scores.

Source: T. Kudo, Subword Regularization (2018), arXiv:1804.10959; the form of the character map is that of SentencePiece
(src/normalizer.cc); what happens to spaces and unknown text follows llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

import math

import numpy as np

from noria.api.errors import ModelError
from noria.text.vocabulary import TokenType, Vocabulary

_UNKNOWN_PENALTY = 10.0  # below the score of the worst token


class Unigram:
    """Finds the best way by Viterbi's algorithm."""

    def __init__(self, vocabulary: Vocabulary, char_map: CharMap, *, space_prefix: bool, merge_spaces: bool) -> None:
        """
        Args:
            vocabulary: with scores: logarithms of probabilities.
            char_map: how characters are normalized first.
            space_prefix: a text begins with a space that was not there.
            merge_spaces: several spaces count as one.
        """
        self.space_prefix, self._merge_spaces = space_prefix, merge_spaces
        self._vocabulary, self._char_map = vocabulary, char_map
        normal = vocabulary.types == TokenType.NORMAL
        self._unknown_score = float(vocabulary.scores[normal].min(initial=0)) - _UNKNOWN_PENALTY
        # User-defined tokens are always worth it.
        scores = np.where(vocabulary.types == TokenType.USER_DEFINED, 0, vocabulary.scores).tolist()
        usable = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        self._tokens = {vocabulary.tokens[id]: (id, scores[id]) for id in usable}
        self._longest = max(map(len, self._tokens), default=0)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        text = self._space(self._char_map.normalize(text))
        n = len(text)
        unk_id = self._vocabulary.unk_id
        # The best way to each place: the sum of its scores, its last token, and where that begins.
        sums, last, begin = [0.0] + [-math.inf] * n, [unk_id] * (n + 1), [0] * (n + 1)
        for start in range(n):
            for end in range(start + 1, min(n, start + self._longest) + 1):
                id, score = self._tokens.get(text[start:end], (unk_id, None))
                if score is None:
                    if end > start + 1:
                        continue
                    score = self._unknown_score
                if sums[start] + score > sums[end]:
                    sums[end], last[end], begin[end] = sums[start] + score, id, start
        ids: list[int] = []
        end = n
        while end > 0:
            id = last[end]
            # A stretch of unknown text is one unknown token.
            if id is not None and not (id == unk_id and ids[-1:] == [unk_id]):
                ids.append(id)
            end = begin[end]
        return ids[::-1]

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for."""
        return self._vocabulary.spaced_bytes(id)

    def _space(self, text: str) -> str:
        """`▁` for spaces, as the file asks: one for several, and one before the first word."""
        if self._merge_spaces:
            return "".join(f"▁{word}" for word in text.split(" ") if word)
        first_word = text.lstrip(" ")
        if self.space_prefix and first_word:
            text = text[: -len(first_word)] + " " + first_word
        return text.replace(" ", "▁")


class CharMap:
    """Replaces characters by others, the longest match first: full-width letters by plain ones, tabs by spaces.

    The map is a trie in a double array: in each 32-bit unit a label (bits 0-7, and bit 31 if it holds a value), the
    offset to its children (bits 10-30, times 256 if bit 9 is set), and whether one of them is a value (bit 8): the
    place of the replacement in a block of NUL-terminated texts.
    """

    def __init__(self, precompiled: bytes = b"") -> None:
        """
        Args:
            precompiled: `tokenizer.ggml.precompiled_charsmap`; nothing changes nothing.

        Raises:
            ModelError: it is cut.
        """
        size = int.from_bytes(precompiled[:4], "little")
        if precompiled and (size % 4 or len(precompiled) <= 4 + size):
            raise ModelError("tokenizer.ggml.precompiled_charsmap is cut or damaged.")
        self._units: list[int] = np.frombuffer(precompiled[4 : 4 + size], "<u4").tolist()
        self._texts = precompiled[4 + size :]

    def normalize(self, text: str) -> str:
        """The text with all replacements made."""
        if not self._units:
            return text
        given, made = text.encode(), bytearray()
        start = 0
        while start < len(given):
            end, replacement = self._match(given, start)
            made += given[start:end] if replacement is None else replacement
            start = end
        return made.decode("utf-8", "replace")

    def _match(self, text: bytes, start: int) -> tuple[int, bytes | None]:
        """Where the longest match ends and what replaces it, or where the character ends."""
        units = self._units
        place = _offset(units[0])
        found, value = start, 0
        for i in range(start, len(text)):
            place ^= text[i]
            if place >= len(units) or units[place] & 0x8000_00FF != text[i] or text[i] == 0:
                break
            has_value = units[place] >> 8 & 1
            place ^= _offset(units[place])
            if has_value and place < len(units):
                found, value = i + 1, units[place] & 0x7FFF_FFFF
        if found == start:
            end = start + 1
            while end < len(text) and text[end] & 0xC0 == 0x80:
                end += 1
            return end, None
        return found, self._texts[value : self._texts.find(b"\0", value)]


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
