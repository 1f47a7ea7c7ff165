"""Text from tokens as they come."""

from __future__ import annotations

import codecs

from noria.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text, whole characters at a time.

    A token may end in the middle of a character: its first bytes wait for the rest. All that `push` and `flush` give,
    put together, is `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = True, after: int | None = None) -> None:
        """`special` and `after` are those of `Tokenizer.decode`: an answer comes after the last token of its prompt."""
        self._tokenizer = tokenizer
        self._special = special
        self._after = after
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes; often one word, sometimes nothing."""
        piece = self._tokenizer.token_bytes(id, special=self._special, after=self._after)
        self._after = id
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end (U+FFFD for an unfinished character, else nothing); the next `push` starts anew."""
        return self._utf8.decode(b"", final=True)
