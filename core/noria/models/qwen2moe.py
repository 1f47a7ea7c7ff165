"""Qwen2 MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): many small experts beside a shared one, biases on Q, K and V.

The shared expert is a mixture of one: always chosen, its weight the sigmoid of its own score.

Source: Qwen Team 2024, arXiv 2407.10671, section 2.2.2.
"""

from __future__ import annotations

from dataclasses import replace

from noria.api import Gating, Glu, RouterParams, Tensor
from noria.api.errors import GGUFError
from noria.gguf import ModelFile
from noria.models.base import WeightSpec
from noria.models.decoder import Decoder, linear_weights
from noria.models.graph import Graph
from noria.models.hparams import HParams, read_hparams

SHARED_ROUTER = RouterParams(gating=Gating.SIGMOID, normalize=False)


class Qwen2Moe(Decoder):
    rope_neox = True
    normalize_weights = False

    def __init__(self, file: ModelFile, hparams: HParams) -> None:
        super().__init__(file, hparams)
        self.n_ff_shared = file.metadata.arch_int("expert_shared_feed_forward_length", 0) or hparams.n_ff

    def route(self, g: Graph, layer: int, h: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *, forced: bool) -> None:
        super().route(g, layer, h, x, ids, weights, forced=forced)
        blk = f"blk.{layer}"
        gate, up = g.linears(x, f"{blk}.ffn_gate_shexp", f"{blk}.ffn_up_shexp")  # [n, n_ff_shared]
        y = g.linear(g.glu(gate, up, Glu.SWIGLU), f"{blk}.ffn_down_shexp")  # [n, n_embd]
        scores = g.linear(x, f"{blk}.ffn_gate_inp_shexp", type="F32")  # [n, 1]
        g.add_weighed(h, y, scores, SHARED_ROUTER)

    def _moe_weights(self, layer: int) -> list[WeightSpec]:
        n_embd, n_ff = self.hparams.n_embd, self.n_ff_shared
        return [
            *super()._moe_weights(layer),
            *linear_weights(layer, "ffn_gate_shexp", n_ff, n_embd),
            *linear_weights(layer, "ffn_up_shexp", n_ff, n_embd),
            *linear_weights(layer, "ffn_down_shexp", n_embd, n_ff),
            WeightSpec(name=f"blk.{layer}.ffn_gate_inp_shexp.weight", shape=(n_embd,), layer=layer),
        ]


def build(file: ModelFile) -> Qwen2Moe:
    hparams = read_hparams(file)
    if not hparams.n_expert:
        raise GGUFError(file.path, "qwen2moe.expert_count", "is 0, but this architecture has experts everywhere")
    if not file.metadata.arch_int("expert_feed_forward_length", 0):  # older files share n_ff out
        hparams = replace(hparams, n_ff_exp=hparams.n_ff // hparams.n_expert_used)
    return Qwen2Moe(file, hparams)
