"""Qwen3 MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): normalized Q and K heads, experts in every layer.

Source: Qwen Team 2025, arXiv 2505.09388.
"""

from __future__ import annotations

from noria.api.errors import GGUFError
from noria.gguf import ModelFile
from noria.models.decoder import Decoder
from noria.models.hparams import read_hparams


class Qwen3Moe(Decoder):
    rope_neox = True
    qk_norm = True


def build(file: ModelFile) -> Qwen3Moe:
    hparams = read_hparams(file)
    if not hparams.n_expert:
        raise GGUFError(file.path, "qwen3moe.expert_count", "is 0, but this architecture has experts everywhere")
    return Qwen3Moe(file, hparams)
