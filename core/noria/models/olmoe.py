"""OLMoE (1B-7B): Q and K normalized over all heads at once, weights of experts as the softmax gives them.

Source: Muennighoff et al. 2024, arXiv 2409.02060.
"""

from __future__ import annotations

from noria.api import Tensor
from noria.api.errors import GGUFError
from noria.gguf import ModelFile
from noria.models.base import WeightSpec
from noria.models.decoder import Decoder, norm_weight
from noria.models.graph import Graph
from noria.models.hparams import read_hparams


class Olmoe(Decoder):
    rope_neox = True
    normalize_weights = False

    def project(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(g, layer, x)
        for part, name in ((q, "attn_q_norm"), (k, "attn_k_norm")):
            g.rms_norm(part, f"blk.{layer}.{name}", self.hparams.rms_eps, out=part)
        return q, k, v

    def _attention_weights(self, layer: int) -> list[WeightSpec]:
        p = self.hparams
        norms = [("attn_q_norm", p.n_head * p.head_dim), ("attn_k_norm", p.n_head_kv * p.head_dim)]
        return [*super()._attention_weights(layer), *(norm_weight(layer, *norm) for norm in norms)]


def build(file: ModelFile) -> Olmoe:
    hparams = read_hparams(file)
    if not hparams.n_expert:
        raise GGUFError(file.path, "olmoe.expert_count", "is 0, but this architecture has experts everywhere")
    return Olmoe(file, hparams)
