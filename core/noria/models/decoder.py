"""The decoder that most architectures are variants of: pre-norm, grouped-query attention, gated feed-forward.

Source: Touvron et al. 2023, arXiv 2302.13971 (the block); Ainslie et al. 2023, arXiv 2305.13245 (grouped heads);
Jiang et al. 2024, arXiv 2401.04088 (top-k experts in place of the feed-forward block).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.api import Glu, KVView, RopeParams, RouterParams, Tensor
from noria.gguf import ModelFile
from noria.models.base import Model, MoeSpec, WeightSpec
from noria.models.graph import Graph
from noria.models.hparams import HParams

ROPE_FACTORS = "rope_freqs.weight"


class Decoder(Model):
    """Subclasses say what differs. Optional tensors (biases, rope factors) are applied when the file has them."""

    rope_neox: bool
    qk_norm = False  # RMS norm of each head of Q and K before RoPE
    normalize_weights = True  # those of the chosen experts add up to 1

    def __init__(self, file: ModelFile, hparams: HParams) -> None:
        super().__init__(file, hparams)
        p = hparams
        self.rope_params = RopeParams(
            n_dims=p.rope_dims, base=p.rope_base, neox=self.rope_neox, scale=p.rope_scaling.scale
        )
        # All numbers of Q and K are that much larger, so their products are by its square.
        self.attention_scale = p.attention_scale * p.rope_scaling.magnitude**2
        self.router_params = RouterParams(normalize=self.normalize_weights, scale=p.expert_weights_scale)
        self.output_name = "output" if "output.weight" in file.tensors else "token_embd"  # tied

    # --- forward -------------------------------------------------------------------------------------------------

    def embed(self, g: Graph, h: Tensor, ids: Tensor) -> None:
        g.embed(h, "token_embd.weight", ids)  # [n, n_embd]

    def attention(self, g: Graph, layer: int, h: Tensor, positions: Tensor, kv: KVView, n_kv: int) -> None:
        p, blk, n = self.hparams, f"blk.{layer}", h.shape[0]
        x = g.rms_norm(h, f"{blk}.attn_norm", p.rms_eps)  # [n, n_embd]
        q, k, v = self.project(g, layer, x)
        q, k = q.reshape(n, p.n_head, p.head_dim), k.reshape(n, p.n_head_kv, p.head_dim)
        v = v.reshape(n, p.n_head_kv, p.head_dim_v)
        g.rope_store(
            *(q, k, v, kv, positions, self.rope_params),
            q_norm=f"{blk}.attn_q_norm.weight" if self.qk_norm else None,
            k_norm=f"{blk}.attn_k_norm.weight" if self.qk_norm else None,
            freq_factors=ROPE_FACTORS,
            eps=p.rms_eps,
        )
        o = g.attend(q, kv, positions, n_kv=n_kv, scale=self.attention_scale)  # [n, n_head * head_dim_v]
        g.linear_add(h, o, f"{blk}.attn_output")

    def project(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q [n, n_head * head_dim], K [n, n_head_kv * head_dim], V [n, n_head_kv * head_dim_v]."""
        blk = f"blk.{layer}"
        q, k, v = g.linears(x, f"{blk}.attn_q", f"{blk}.attn_k", f"{blk}.attn_v")
        return q, k, v

    def moe(self, layer: int) -> MoeSpec | None:
        if not self.hparams.n_expert:
            return None
        gate, up, down = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        return MoeSpec(gate=gate, up=up, down=down, router=self.router_params, kind=Glu.SWIGLU)

    def route(self, g: Graph, layer: int, h: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *, forced: bool) -> None:
        g.rms_norm(h, f"blk.{layer}.ffn_norm", self.hparams.rms_eps, out=x)  # [n, n_embd]
        scores = g.linear(x, f"blk.{layer}.ffn_gate_inp", type="F32")  # [n, n_expert]
        g.kernels.route_topk(g.queue, ids, weights, scores, self.router_params, forced=forced)

    def ffn(self, g: Graph, layer: int, h: Tensor) -> None:
        blk = f"blk.{layer}"
        x = g.rms_norm(h, f"{blk}.ffn_norm", self.hparams.rms_eps)  # [n, n_embd]
        gate, up = g.linear(x, f"{blk}.ffn_gate"), g.linear(x, f"{blk}.ffn_up")  # [n, n_ff]
        g.linear_add(h, g.glu(gate, up, Glu.SWIGLU), f"{blk}.ffn_down")

    def output(self, g: Graph, h: Tensor) -> Tensor:
        x = g.rms_norm(h, "output_norm", self.hparams.rms_eps)  # [n, n_embd]
        return g.linear(x, self.output_name, type="F32")  # [n, n_vocab]

    def constants(self) -> dict[str, npt.NDArray[np.float32]]:
        p, name = self.hparams, ROPE_FACTORS
        if not p.rope_scaling.extrapolation:
            return {}
        factors = p.rope_scaling.frequency_factors(p.rope_dims, p.rope_base)
        return {name: factors * self.file.data(name).view(np.float32) if name in self.file.tensors else factors}

    # --- tensors -------------------------------------------------------------------------------------------------

    def weights(self) -> list[WeightSpec]:
        p = self.hparams
        specs = [
            WeightSpec(name="token_embd.weight", shape=(p.n_vocab, p.n_embd), layer=None),
            WeightSpec(name="output_norm.weight", shape=(p.n_embd,), layer=p.n_layer),
            WeightSpec(name=f"{self.output_name}.weight", shape=(p.n_vocab, p.n_embd), layer=p.n_layer),
            WeightSpec(name=f"{self.output_name}.bias", shape=(p.n_vocab,), layer=p.n_layer, optional=True),
        ]
        for layer in range(p.n_layer):
            specs += self._attention_weights(layer)
            specs += self._moe_weights(layer) if self.moe(layer) else self._ffn_weights(layer)
        return specs

    def _attention_weights(self, layer: int) -> list[WeightSpec]:
        p = self.hparams
        specs = [norm_weight(layer, "attn_norm", p.n_embd)]
        specs += linear_weights(layer, "attn_q", p.n_head * p.head_dim, p.n_embd)
        specs += linear_weights(layer, "attn_k", p.n_head_kv * p.head_dim, p.n_embd)
        specs += linear_weights(layer, "attn_v", p.n_head_kv * p.head_dim_v, p.n_embd)
        specs += linear_weights(layer, "attn_output", p.n_embd, p.n_head * p.head_dim_v)
        if self.qk_norm:
            specs += [norm_weight(layer, "attn_q_norm", p.head_dim), norm_weight(layer, "attn_k_norm", p.head_dim)]
        # One tensor for the whole model, wanted by the attention of every layer.
        specs.append(WeightSpec(name=ROPE_FACTORS, shape=(p.rope_dims // 2,), layer=layer, optional=True))
        return specs

    def _moe_weights(self, layer: int) -> list[WeightSpec]:
        p = self.hparams
        specs = [norm_weight(layer, "ffn_norm", p.n_embd), *linear_weights(layer, "ffn_gate_inp", p.n_expert, p.n_embd)]
        for part, n_out, n_in in (
            ("gate", p.n_ff_exp, p.n_embd),
            ("up", p.n_ff_exp, p.n_embd),
            ("down", p.n_embd, p.n_ff_exp),
        ):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            specs.append(WeightSpec(name=name, shape=(p.n_expert, n_out, n_in), layer=layer, experts=True))
        return specs

    def _ffn_weights(self, layer: int) -> list[WeightSpec]:
        p = self.hparams
        specs = [norm_weight(layer, "ffn_norm", p.n_embd)]
        specs += linear_weights(layer, "ffn_gate", p.n_ff, p.n_embd)
        specs += linear_weights(layer, "ffn_up", p.n_ff, p.n_embd)
        specs += linear_weights(layer, "ffn_down", p.n_embd, p.n_ff)
        return specs


def norm_weight(layer: int, name: str, width: int) -> WeightSpec:
    return WeightSpec(name=f"blk.{layer}.{name}.weight", shape=(width,), layer=layer)


def linear_weights(layer: int, name: str, n_out: int, n_in: int) -> list[WeightSpec]:
    return [
        WeightSpec(name=f"blk.{layer}.{name}.weight", shape=(n_out, n_in), layer=layer),
        WeightSpec(name=f"blk.{layer}.{name}.bias", shape=(n_out,), layer=layer, optional=True),
    ]
