"""Shapes of known models, from which synthetic ones are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A mixture-of-experts transformer. Numbers as in the GGUF metadata of the real model."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_vocab: int
    n_ctx: int
    rope_freq_base: float
    rms_eps: float
    n_ff_shared: int = 0

    def metadata(self) -> dict[str, int | float]:
        """Hyperparameters by key, without the architecture's prefix."""
        dense = self.architecture in ("llama", "olmoe")  # where feed_forward_length is that of an expert
        values: dict[str, int | float] = {
            "vocab_size": self.n_vocab,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "feed_forward_length": self.n_ff_exp if dense else self.n_ff_exp * self.n_expert_used,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_freq_base,
        }
        if not dense:
            values["expert_feed_forward_length"] = self.n_ff_exp
        if self.n_ff_shared:
            values["expert_shared_feed_forward_length"] = self.n_ff_shared
        return values

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes (NumPy order), in the order of a file."""
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        yield "output_norm.weight", (self.n_embd,)
        yield "output.weight", (self.n_vocab, self.n_embd)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.n_embd,)
            yield block + "attn_q.weight", (n_q, self.n_embd)
            yield block + "attn_k.weight", (n_kv, self.n_embd)
            yield block + "attn_v.weight", (n_kv, self.n_embd)
            yield block + "attn_output.weight", (self.n_embd, n_q)
            if self.architecture == "qwen3moe":
                yield block + "attn_q_norm.weight", (self.head_dim,)
                yield block + "attn_k_norm.weight", (self.head_dim,)
            elif self.architecture == "olmoe":
                yield block + "attn_q_norm.weight", (n_q,)
                yield block + "attn_k_norm.weight", (n_kv,)
            elif self.architecture == "qwen2moe":
                yield block + "attn_q.bias", (n_q,)
                yield block + "attn_k.bias", (n_kv,)
                yield block + "attn_v.bias", (n_kv,)
            yield block + "ffn_norm.weight", (self.n_embd,)
            yield block + "ffn_gate_inp.weight", (self.n_expert, self.n_embd)
            yield block + "ffn_gate_exps.weight", (self.n_expert, self.n_ff_exp, self.n_embd)
            yield block + "ffn_up_exps.weight", (self.n_expert, self.n_ff_exp, self.n_embd)
            yield block + "ffn_down_exps.weight", (self.n_expert, self.n_embd, self.n_ff_exp)
            if self.n_ff_shared:
                yield block + "ffn_gate_inp_shexp.weight", (self.n_embd,)
                yield block + "ffn_gate_shexp.weight", (self.n_ff_shared, self.n_embd)
                yield block + "ffn_up_shexp.weight", (self.n_ff_shared, self.n_embd)
                yield block + "ffn_down_shexp.weight", (self.n_embd, self.n_ff_shared)


_QWEN3_30B_A3B = Preset(
    architecture="qwen3moe",
    n_layer=48,
    n_embd=2048,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_expert=128,
    n_expert_used=8,
    n_ff_exp=768,
    n_vocab=151_936,
    n_ctx=40_960,
    rope_freq_base=1e6,
    rms_eps=1e-6,
)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        architecture="qwen3moe",
        n_layer=4,
        n_embd=256,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_expert=16,
        n_expert_used=4,
        n_ff_exp=256,
        n_vocab=512,
        n_ctx=2048,
        rope_freq_base=10_000.0,
        rms_eps=1e-6,
    ),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    # The expert shapes of Qwen3.6-35B-A3B under an architecture without recurrent layers.
    "qwen3-40x256": replace(_QWEN3_30B_A3B, n_layer=40, n_expert=256, n_ff_exp=512),
    "mixtral-8x7b": Preset(
        architecture="llama",
        n_layer=32,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=14_336,
        n_vocab=32_000,
        n_ctx=32_768,
        rope_freq_base=1e6,
        rms_eps=1e-5,
    ),
    "qwen2-57b-a14b": Preset(
        architecture="qwen2moe",
        n_layer=28,
        n_embd=3584,
        n_head=28,
        n_head_kv=4,
        head_dim=128,
        n_expert=64,
        n_expert_used=8,
        n_ff_exp=2560,
        n_ff_shared=20_480,
        n_vocab=151_936,
        n_ctx=32_768,
        rope_freq_base=1e6,
        rms_eps=1e-6,
    ),
    "olmoe-1b-7b": Preset(
        architecture="olmoe",
        n_layer=16,
        n_embd=2048,
        n_head=16,
        n_head_kv=16,
        head_dim=128,
        n_expert=64,
        n_expert_used=8,
        n_ff_exp=1024,
        n_vocab=50_304,
        n_ctx=4096,
        rope_freq_base=10_000.0,
        rms_eps=1e-5,
    ),
}
