"""What each op means, in float64 NumPy and as plainly as it can be written. `noria.api.kernels` says it in words.

The kit compares every backend with these lines, the reference backend too, so nothing is compared with itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.api import Gating, Glu, RopeParams, RouterParams

Array = NDArray[Any]


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x: [..., n]; weight: [n]."""
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(y if weight is None else y * weight)


def matmul(x: Array, w: Array) -> Array:
    """x: [n, n_in]; w: [n_out, n_in]."""
    return x.astype(np.float64) @ w.astype(np.float64).T


def rope(x: Array, positions: Array, params: RopeParams, freq_factors: Array | None = None) -> Array:
    """x: [n, n_head, head_dim]; positions: [n]; freq_factors: [n_dims/2]."""
    half = params.n_dims // 2
    i = np.arange(half)
    theta = positions[:, None] * params.scale * params.base ** (-2.0 * i / params.n_dims)
    if freq_factors is not None:
        theta = theta / freq_factors
    cos, sin = np.cos(theta)[:, None], np.sin(theta)[:, None]
    first, second = (i, i + half) if params.neox else (2 * i, 2 * i + 1)
    y = x.astype(np.float64)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * cos - b * sin, a * sin + b * cos
    return y


def attention(
    q: Array, k: Array, v: Array, positions: Array, scale: float, window: int | None, sinks: Array | None
) -> Array:
    """q: [n, n_head, d_k]; k: [n_cell, n_head_kv, d_k]; v: [n_cell, n_head_kv, d_v]; sinks: [n_head]."""
    n, n_head, _ = q.shape
    out = np.zeros((n, n_head, v.shape[2]))
    for i, position in enumerate(int(p) for p in positions):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(n_head):
            kv_head = head * k.shape[1] // n_head
            cells = slice(first, position + 1)
            scores = k[cells, kv_head].astype(np.float64) @ q[i, head] * scale
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[i, head] = weights / total @ v[cells, kv_head].astype(np.float64)
    return out


def glu(gate: Array, up: Array, kind: Glu) -> Array:
    """[n, n_ff]."""
    x = gate.astype(np.float64)
    if kind is Glu.SWIGLU:
        return np.asarray(x / (1 + np.exp(-x)) * up)
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * up)


def route_topk(
    logits: Array, n_expert_used: int, params: RouterParams, ids: Array | None = None
) -> tuple[Array, Array]:
    """(ids, weights), both [n, n_expert_used]; `ids` forces the choice. logits: [n, n_expert]."""
    logits = logits.astype(np.float64)
    scores = logits
    if params.gating is Gating.SOFTMAX:
        scores = _softmax(logits)
    elif params.gating is Gating.SIGMOID:
        scores = 1 / (1 + np.exp(-logits))
    if ids is None:
        ids = np.argsort(-scores, axis=-1, kind="stable")[:, :n_expert_used].astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if params.gating is Gating.TOPK_SOFTMAX:
        weights = _softmax(weights)
    if params.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * params.scale


def sort_rows(ids: Array, n_expert: int) -> tuple[Array, Array, Array]:
    """(pairs, offsets, positions) of `ExpertRows`. ids: [n_tokens, n_expert_used]."""
    pairs = np.argsort(ids.reshape(-1), kind="stable").astype(np.int32)
    offsets = np.searchsorted(ids.reshape(-1)[pairs], np.arange(n_expert + 1)).astype(np.int32)
    row_of_pair = np.empty_like(pairs)
    row_of_pair[pairs] = np.arange(pairs.size, dtype=np.int32)
    return pairs, offsets, np.sort(row_of_pair.reshape(ids.shape), axis=-1)


def expert_ffn(
    x: Array, gate: Array, up: Array, down: Array, ids: Array, weights: Array, kind: Glu, experts: set[int]
) -> Array:
    """What the chosen ones of `experts` add to each token, [n_tokens, n_embd].

    gate, up: [n_expert, n_ff, n_embd]; down: [n_expert, n_embd, n_ff].
    """
    out = np.zeros(x.shape)
    for e in experts:
        tokens, choices = np.nonzero(ids == e)
        hidden = glu(matmul(x[tokens], gate[e]), matmul(x[tokens], up[e]), kind)
        out[tokens] += weights[tokens, choices, None] * matmul(hidden, down[e])
    return out


def top_k(logits: Array, k: int) -> tuple[Array, Array]:
    """(values, ids), both [n, k]. logits: [n, n_vocab]."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return np.take_along_axis(logits, ids, axis=-1), ids


def _softmax(x: Array) -> Array:
    y = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(y / y.sum(axis=-1, keepdims=True))
