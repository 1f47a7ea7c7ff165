"""Between text and token ids: the tokenizer and the chat template of a GGUF file, streamed
detokenizing, and the choice of the next token."""

from __future__ import annotations

from noria.text.chat_template import ChatTemplate
from noria.text.detokenizer import Detokenizer
from noria.text.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from noria.text.sampler import Sampler, SamplerParams
from noria.text.tokenizer import Tokenizer

__all__ = ["PRE_TOKENIZERS", "ChatTemplate", "Detokenizer", "PreTokenizer", "Sampler", "SamplerParams", "Tokenizer"]
