"""Models of odd shapes, made here, against a forward pass in float64 that shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

Weights = dict[str, npt.NDArray[np.float64]]

N_TOKEN = 37


@dataclass(frozen=True, kw_only=True)
class Made:
    """Shapes of a model. `types`: ggml types by the part of a name that says what a tensor is; F16 for the others."""

    arch: str = "qwen3moe"
    n_layer: int = 2
    n_embd: int = 96
    n_head: int = 3
    n_head_kv: int = 3
    head_dim: int = 32
    head_dim_v: int = 32
    rope_dims: int = 32
    rope_factors: bool = False
    rope_scaling: str = "none"  # by 4, from a context of 16
    n_expert: int = 4
    n_expert_used: int = 2
    n_ff: int = 96
    n_vocab: int = 200
    tied: bool = False
    biased: bool = False
    types: tuple[tuple[str, str], ...] = ()
    seed: int = 0

    @property
    def moe(self) -> bool:
        return self.n_expert > 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n_q, n_k, n_v = self.n_head * self.head_dim, self.n_head_kv * self.head_dim, self.n_head_kv * self.head_dim_v
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, self.n_embd),
            "output_norm.weight": (self.n_embd,),
        }
        linear: dict[str, tuple[int, int]] = {} if self.tied else {"output": (self.n_vocab, self.n_embd)}
        if self.rope_factors:
            shapes["rope_freqs.weight"] = (self.rope_dims // 2,)
        for layer in range(self.n_layer):
            blk = f"blk.{layer}."
            shapes |= {blk + "attn_norm.weight": (self.n_embd,), blk + "ffn_norm.weight": (self.n_embd,)}
            linear |= {blk + "attn_q": (n_q, self.n_embd), blk + "attn_k": (n_k, self.n_embd)}
            linear |= {blk + "attn_v": (n_v, self.n_embd)}
            linear |= {blk + "attn_output": (self.n_embd, self.n_head * self.head_dim_v)}
            if self.arch in ("qwen3", "qwen3moe"):
                shapes |= {blk + f"attn_{part}_norm.weight": (self.head_dim,) for part in "qk"}
            into, out_of = (self.n_ff, self.n_embd), (self.n_embd, self.n_ff)
            parts = {"gate": into, "up": into, "down": out_of}
            if self.arch == "olmoe":
                shapes |= {blk + "attn_q_norm.weight": (n_q,), blk + "attn_k_norm.weight": (n_k,)}
            if self.arch == "qwen2moe":
                linear |= {blk + f"ffn_{part}_shexp": shape for part, shape in parts.items()}
                shapes[blk + "ffn_gate_inp_shexp.weight"] = (self.n_embd,)
            if self.moe:
                linear[blk + "ffn_gate_inp"] = (self.n_expert, self.n_embd)
                shapes |= {blk + f"ffn_{part}_exps.weight": (self.n_expert, *shape) for part, shape in parts.items()}
            else:
                linear |= {blk + f"ffn_{part}": shape for part, shape in parts.items()}
        shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
        if self.biased:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
        return shapes

    def type_of(self, name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return "F32"
        return next((type for part, type in self.types if part in name), "F16")

    def write(self, path: Path) -> Weights:
        """Write the file; returns the weights it holds."""
        rng = np.random.default_rng(self.seed)
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        writer.add_context_length(512)
        writer.add_block_count(self.n_layer)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim_v)
        writer.add_rope_dimension_count(self.rope_dims)
        writer.add_layer_norm_rms_eps(1e-6)
        if self.rope_scaling != "none":
            writer.add_rope_scaling_type(gguf.RopeScalingType(self.rope_scaling))
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(16)
            writer.add_rope_scaling_yarn_beta_fast(1.5)
            writer.add_rope_scaling_yarn_beta_slow(0.1)
        if self.moe:
            writer.add_expert_feed_forward_length(self.n_ff)
            writer.add_expert_count(self.n_expert)
            writer.add_expert_used_count(self.n_expert_used)
        weights: Weights = {}
        for name, shape in self.shapes().items():
            norm = "norm" in name or "freqs" in name
            std = (
                0.1 if norm else 1.0 if name.startswith("token_embd") else 0.3 if len(shape) == 1 else shape[-1] ** -0.5
            )
            values = (rng.standard_normal(shape) * std + norm).astype(np.float32)
            type = gguf.GGMLQuantizationType[self.type_of(name, shape)]
            data = gguf.quants.quantize(values, type)
            writer.add_tensor(name, data, raw_dtype=type)
            weights[name] = gguf.quants.dequantize(data, type).astype(np.float64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return weights


def forward(m: Made, w: Weights, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Logits of every token, the plain way."""
    n = len(tokens)
    hidden = np.triu(np.ones((n, n), bool), 1)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def softmax(x: Any) -> Any:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def swiglu(gate: Any, up: Any) -> Any:
        return gate / (1 + np.exp(-gate)) * up

    def rope(x: Any) -> Any:
        half = m.rope_dims // 2
        per_token = 10000.0 ** (-np.arange(half) / half) / w.get("rope_freqs.weight", 1.0)
        size = 1.0
        if m.rope_scaling == "linear":
            per_token = per_token / 4
        elif m.rope_scaling == "yarn":
            size = 1 + np.log(4) / 10
            # The (fractional) pair that turns once, in the original context, is half * log(16 / 2 pi) / log(10000).
            low, high = (half * np.log(16 / (2 * np.pi * n_turn)) / np.log(10000.0) for n_turn in (1.5, 0.1))
            low, high = max(np.floor(low), 0.0), np.ceil(high)
            slow = np.array([min(max((i - low) / (high - low), 0.0), 1.0) for i in range(half)])
            per_token = per_token * (1 - slow) + per_token / 4 * slow
        turn = size * np.exp(1j * np.arange(n)[:, None] * per_token)[:, None]
        neox = m.arch != "llama"
        a = np.arange(half) if neox else 2 * np.arange(half)
        b = a + (half if neox else 1)
        turned = (x[..., a] + 1j * x[..., b]) * turn
        y = x.copy()
        y[..., a], y[..., b] = turned.real, turned.imag
        return y

    def attention(x: Any, blk: str) -> Any:
        q, k = linear(x, f"{blk}.attn_q"), linear(x, f"{blk}.attn_k")
        if m.arch == "olmoe":
            q, k = norm(q, f"{blk}.attn_q_norm"), norm(k, f"{blk}.attn_k_norm")
        q, k = q.reshape(n, m.n_head, m.head_dim), k.reshape(n, m.n_head_kv, m.head_dim)
        v = linear(x, f"{blk}.attn_v").reshape(n, m.n_head_kv, m.head_dim_v)
        if m.arch in ("qwen3", "qwen3moe"):
            q, k = norm(q, f"{blk}.attn_q_norm"), norm(k, f"{blk}.attn_k_norm")
        q, k = rope(q), rope(k)
        out = []
        for head in range(m.n_head):
            of = head * m.n_head_kv // m.n_head
            scores = q[:, head] @ k[:, of].T / np.sqrt(m.head_dim)
            out.append(softmax(np.where(hidden, -np.inf, scores)) @ v[:, of])
        return linear(np.concatenate(out, axis=1), f"{blk}.attn_output")

    def experts(x: Any, blk: str) -> Any:
        p = softmax(linear(x, f"{blk}.ffn_gate_inp"))
        gate, up, down = (w[f"{blk}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        y = np.zeros_like(x)
        for token, scores in enumerate(p):
            chosen = np.argsort(-scores)[: m.n_expert_used]
            share = 1.0 if m.arch in ("qwen2moe", "olmoe") else scores[chosen].sum()
            for e in chosen:
                y[token] += scores[e] / share * (down[e] @ swiglu(gate[e] @ x[token], up[e] @ x[token]))
        if m.arch == "qwen2moe":
            score = x @ w[f"{blk}.ffn_gate_inp_shexp.weight"]
            shared = swiglu(linear(x, f"{blk}.ffn_gate_shexp"), linear(x, f"{blk}.ffn_up_shexp"))
            y += linear(shared, f"{blk}.ffn_down_shexp") / (1 + np.exp(-score[:, None]))
        return y

    h = w["token_embd.weight"][tokens]
    for layer in range(m.n_layer):
        blk = f"blk.{layer}"
        h = h + attention(norm(h, f"{blk}.attn_norm"), blk)
        x = norm(h, f"{blk}.ffn_norm")
        if m.moe:
            h = h + experts(x, blk)
        else:
            h = h + linear(swiglu(linear(x, f"{blk}.ffn_gate"), linear(x, f"{blk}.ffn_up")), f"{blk}.ffn_down")
    return np.asarray(linear(norm(h, "output_norm"), "token_embd" if m.tied else "output"))


MODELS = {
    "f16": Made(),
    "one expert": Made(n_expert=1, n_expert_used=1, types=(("exps", "Q8_0"),)),
    "two experts": Made(n_expert=2, n_expert_used=1, types=(("exps", "Q8_0"),)),
    "all experts used": Made(arch="llama", n_expert=3, n_expert_used=3, rope_dims=16),
    "slabs of 102 bytes": Made(n_ff=1, n_embd=96, types=(("gate_exps", "Q8_0"), ("up_exps", "Q8_0"))),
    "odd everywhere": Made(n_embd=33, n_head=1, n_head_kv=1, head_dim=6, head_dim_v=6, rope_dims=6, n_ff=7, n_vocab=77),
    "wide values": Made(n_head=2, n_head_kv=1, head_dim_v=48),
    "narrow heads": Made(n_head=4, n_head_kv=2, head_dim=16, head_dim_v=16, rope_dims=16),
    "types by layer": Made(
        types=(("blk.0.ffn_gate_e", "Q8_0"), ("blk.0.ffn_up_e", "Q5_1"), ("blk.1.ffn_down_e", "F32"))
    ),
    "biased and tied": Made(biased=True, tied=True),
    "dense": Made(arch="llama", n_expert=0, biased=True, rope_factors=True),
    "qwen3": Made(arch="qwen3", n_expert=0, tied=True),
    "qwen2moe": Made(arch="qwen2moe", biased=True),
    "olmoe": Made(arch="olmoe"),
    "linear scaling": Made(rope_scaling="linear"),
    "yarn": Made(rope_scaling="yarn"),
    "yarn with factors": Made(arch="llama", n_expert=0, rope_factors=True, rope_scaling="yarn"),
    "mixtral": Made(arch="llama", n_expert=5, n_head=6, n_head_kv=2, head_dim=16, head_dim_v=16, rope_dims=16),
}
RUNS: dict[str, dict[str, Any]] = {
    "resident": {"n_cpu_moe": 0},
    "single tokens": {"n_cpu_moe": 0, "n_batch": 1},
    "ring": {"n_cpu_moe": 99, "prefetch": "whole", "n_batch": 16, "n_ubatch": 5, "prefetch_slots": 2},
    "selective": {"n_cpu_moe": 1, "prefetch": "selective", "n_ubatch": 7},
    "some layers on the host": {"n_gpu_layers": 2, "n_cpu_moe": 99, "prefetch": "off"},
}


def logits(open_session: Callable[..., Any], path: Path, tokens: npt.NDArray[np.int32], **run: Any) -> Any:
    """Of a prompt in one piece and of two tokens after it, [len(tokens), n_vocab]."""
    device = {"host_gather": False}
    session = open_session(path, device=device, n_ctx=N_TOKEN, type_k="F32", type_v="F32", logits_all=True, **run)
    return np.concatenate(
        [session.forward(tokens[:-2], logits_all=True)[0], *(session.forward([token])[0] for token in tokens[-2:])]
    )


@pytest.mark.parametrize("name", MODELS)
def test_made_models(name: str, tmp_path: Path, open_session: Callable[..., Any]) -> None:
    made = replace(MODELS[name], seed=len(name))
    path = tmp_path / "made.gguf"
    weights = made.write(path)
    tokens = np.random.default_rng(made.seed).integers(0, made.n_vocab, N_TOKEN).astype(np.int32)
    expected = forward(made, weights, tokens)
    resident = logits(open_session, path, tokens, **RUNS["resident"])
    assert np.square(resident - expected).sum() / np.square(expected).sum() <= 1e-10
    for run, flags in RUNS.items():
        assert np.array_equal(logits(open_session, path, tokens, **flags), resident), run


def test_routing_of_a_dense_model_can_be_read_back(tmp_path: Path, open_session: Callable[..., Any]) -> None:
    MODELS["dense"].write(tmp_path / "dense.gguf")
    session = open_session(tmp_path / "dense.gguf", n_ctx=N_TOKEN)
    first, routing = session.forward([1, 2, 3], capture=True)
    session.reset()
    assert np.array_equal(session.forward([1, 2, 3], forced=routing)[0], first)
