"""Llama and its relatives, dense (Llama 2 and 3, Mistral) or with experts (Mixtral).

The file holds Q and K rows permuted so that RoPE turns neighbouring numbers; `rope_freqs.weight` (Llama 3.1 and later)
divides the frequencies. Source: arXiv 2302.13971, arXiv 2401.04088.
"""

from __future__ import annotations

from noria.gguf import ModelFile
from noria.models.decoder import Decoder
from noria.models.hparams import read_hparams


class Llama(Decoder):
    rope_neox = False


def build(file: ModelFile) -> Llama:
    return Llama(file, read_hparams(file))
