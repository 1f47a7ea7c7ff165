"""Hyperparameters of a decoder, read from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile
from noria.models.rope import RopeScaling, read_rope_scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """Attributes:
    n_expert: 0 in a dense model.
    n_ff: width of a dense feed-forward block; n_ff_exp: that of one expert.
    head_dim: numbers a head has in Q and K; head_dim_v: in V.
    attention_scale: factor on Q K^T, less what RoPE scaling adds to it.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    n_ff: int
    n_ff_exp: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    attention_scale: float
    rope_dims: int
    rope_base: float
    rope_scaling: RopeScaling
    expert_weights_scale: float


def read_hparams(file: ModelFile) -> HParams:
    """Read and check the numbers that every decoder has.

    Raises:
        GGUFError: one is missing or makes no sense.
        ModelError: the file asks for something that is not supported yet.
    """

    def positive(key: str, default: int | None = None) -> int:
        value = file.metadata.arch_int(key, default)
        if value <= 0:
            raise GGUFError(file.path, f"{file.architecture}.{key}", f"is {value}, must be positive")
        return value

    if "token_embd.weight" not in file.tensors:
        raise GGUFError(file.path, "token_embd.weight", "this tensor is missing: the file holds no model")
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    n_embd = positive("embedding_length")
    n_head = positive("attention.head_count")
    n_head_kv = positive("attention.head_count_kv", n_head)
    head_dim = positive("attention.key_length", n_embd // n_head)
    n_expert = file.metadata.arch_int("expert_count", 0)
    n_expert_used = file.metadata.arch_int("expert_used_count", 0)
    if n_head % n_head_kv:
        raise GGUFError(
            file.path, "attention.head_count_kv", f"{n_head} heads cannot share {n_head_kv} KV heads evenly"
        )
    if n_expert and not 0 < n_expert_used <= n_expert:
        raise GGUFError(file.path, "expert_used_count", f"is {n_expert_used} of {n_expert} experts")
    rope_dims = file.metadata.arch_int("rope.dimension_count", 0) or head_dim
    if rope_dims % 2 or not 0 < rope_dims <= head_dim:
        raise GGUFError(
            file.path, "rope.dimension_count", f"is {rope_dims}; pairs of the {head_dim} numbers of a head turn"
        )
    n_ctx_train = positive("context_length")
    rope_scaling = read_rope_scaling(file, n_ctx_train)
    if rope_scaling.magnitude != 1.0 and rope_dims != head_dim:
        raise ModelError(f"{file.path}: YaRN on {rope_dims} of the {head_dim} numbers of a head is not supported yet.")
    n_ff = file.metadata.arch_int("feed_forward_length", 0)
    return HParams(
        architecture=file.architecture,
        n_layer=positive("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=positive("attention.value_length", head_dim),
        n_ff=n_ff,
        n_ff_exp=file.metadata.arch_int("expert_feed_forward_length", 0) or n_ff,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        rms_eps=file.metadata.arch_float("attention.layer_norm_rms_epsilon"),
        attention_scale=file.metadata.arch_float("attention.scale", 0.0) or 1.0 / sqrt(head_dim),
        rope_dims=rope_dims,
        rope_base=file.metadata.arch_float("rope.freq_base", 10000.0),
        rope_scaling=rope_scaling,
        expert_weights_scale=file.metadata.arch_float("expert_weights_scale", 0.0) or 1.0,
    )
