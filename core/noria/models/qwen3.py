"""Qwen3 (0.6B to 32B), dense: normalized Q and K heads.

Source: Qwen Team 2025, arXiv 2505.09388.
"""

from __future__ import annotations

from noria.gguf import ModelFile
from noria.models.decoder import Decoder
from noria.models.hparams import read_hparams


class Qwen3(Decoder):
    rope_neox = True
    qk_norm = True


def build(file: ModelFile) -> Qwen3:
    return Qwen3(file, read_hparams(file))
