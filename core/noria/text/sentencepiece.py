"""SentencePiece BPE (Llama 2, Mixtral, Phi 3, Ernie 4.5): characters, joined by the score of what they become.

Source: T. Kudo and J. Richardson, SentencePiece (2018), arXiv:1808.06226; which pair goes first where scores tie, and
what happens to text without a token, follow llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

from noria.text.vocabulary import Vocabulary

_WORD = re.compile("▁*[^▁]+|▁+")
_CROSSES_WORDS = re.compile("[^▁]▁")
_LONGEST_CACHED = 64  # characters; longer words hardly ever come twice


class SentencePiece:
    """Joins the two neighbours whose union has the highest score, until no union is a token."""

    def __init__(self, vocabulary: Vocabulary, *, space_prefix: bool) -> None:
        """`space_prefix`: a text begins with a space that was not there, so that its first word is like any other."""
        self.space_prefix = space_prefix
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids
        self._scores: list[float] = vocabulary.scores.tolist()
        # Where no token reaches over the start of a word, none is joined over it, and words can be looked up.
        self._has_words = not any(_CROSSES_WORDS.search(text) for text in vocabulary.tokens)
        self._join_known = lru_cache(1 << 16)(self._join)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        text = ((" " if self.space_prefix else "") + text).replace(" ", "▁")
        words = _WORD.findall(text) if self._has_words else [text]
        ids: list[int] = []
        for word in words:
            ids += self._join_known(word) if len(word) <= _LONGEST_CACHED else self._join(word)
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for."""
        return self._vocabulary.spaced_bytes(id)

    def _join(self, word: str) -> list[int]:
        """The token ids of a word, from the best pair to the worst.

        A symbol is named by where it begins: `ends[i]` is where it ends, or 0 if it has been joined to the one before
        it, and `before[i]` is where the symbol before it begins.
        """
        n = len(word)
        ends = list(range(1, n + 1))
        before = list(range(-1, n - 1))
        pairs: list[tuple[float, int, int, int]] = []  # score (negative: a heap gives the least), and the three borders

        def find_pair(left: int, middle: int) -> tuple[float, int, int, int] | None:
            id = self._ids.get(word[left : ends[middle]])
            return None if id is None else (-self._scores[id], left, middle, ends[middle])

        pairs = [pair for left in range(n - 1) if (pair := find_pair(left, left + 1))]
        heapify(pairs)
        while pairs:
            _, left, middle, end = heappop(pairs)
            if ends[left] != middle or ends[middle] != end:
                continue  # one of the two has been joined to something else since
            ends[left], ends[middle] = end, 0
            if end < n:
                before[end] = left
                if pair := find_pair(left, end):
                    heappush(pairs, pair)
            if before[left] >= 0 and (pair := find_pair(before[left], left)):
                heappush(pairs, pair)

        ids: list[int] = []
        start = 0
        while start < n:
            ids += self._find(word[start : ends[start]])
            start = ends[start]
        return ids

    def _find(self, symbol: str) -> list[int]:
        """The token of a symbol; only a single character can have none, and is spelled in bytes then."""
        id = self._ids.get(symbol)
        if id is not None:
            return [id]
        byte_ids, unk_id = self._vocabulary.byte_ids, self._vocabulary.unk_id
        found = [byte_ids.get(byte, unk_id) for byte in symbol.encode()]
        return [id for id in found if id is not None]
