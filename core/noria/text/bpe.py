"""BPE: characters, joined by a list of merges in the order of the list. The work is done by the `tokenizers` library.

Source: R. Sennrich et al., Neural Machine Translation of Rare Words with Subword Units (2016), arXiv:1508.07909; bytes
as characters are GPT-2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noria.api.errors import ModelError
from noria.text.pretokenizer import PreTokenizer
from noria.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible character: itself where it is one, else U+0100 onwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


class BPE:
    """Joins within the words that a pre-tokenizer cuts."""

    space_prefix = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> None:
        """
        Args:
            vocabulary: of all tokens.
            merges: `left right`, the first one first.
            pre: how text is cut into words, and whether these are spelled in bytes or in characters.

        Raises:
            ModelError: a merge does not join two tokens to a third.
        """
        # Imported here because the library is large and most commands never touch text.
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        self._vocabulary, self._byte_level = vocabulary, pre.byte_level
        pairs = _split_merges(vocabulary, merges)
        self._bpe: tokenizers.Tokenizer = Tokenizer(
            models.BPE(
                vocab=dict(vocabulary.ids),
                merges=pairs,
                ignore_merges=pre.ignore_merges,
                byte_fallback=not pre.byte_level,
            )
        )
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes
        ]
        if pre.byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        else:
            self._bpe.normalizer = normalizers.Replace(" ", "▁")
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for."""
        if not self._byte_level:
            return self._vocabulary.spaced_bytes(id)
        text = self._vocabulary.tokens[id]
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # an unused row of the vocabulary, such as a placeholder with a space in it
            return text.encode()


def _split_merges(vocabulary: Vocabulary, merges: Sequence[str]) -> list[tuple[str, str]]:
    ids, pairs = vocabulary.ids, []
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left + right not in ids or left not in ids or right not in ids:
            raise ModelError(f"tokenizer.ggml.merges[{rank}] is '{merge}', which does not join two tokens to a third.")
        pairs.append((left, right))
    return pairs
