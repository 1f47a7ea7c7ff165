"""Routing, and the ops of routed experts, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from noria.api import ExpertRows, ExpertTable, Gating, Glu, RouterParams, RowWindow, align_up
from noria.builtin.reference.matmul import ROW_BLOCK, matmul_rows
from noria.builtin.reference.tensors import F32Array, elements
from noria.builtin.reference.threads import run_all
from noria.builtin.reference.weights import Weights

Ints = npt.NDArray[np.int32]


def softmax(x: F32Array) -> F32Array:
    """Along the last axis."""
    y: F32Array = np.exp(x - x.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y


def scores(logits: F32Array, gating: Gating) -> F32Array:
    """What experts are chosen by, [n, n_expert]."""
    match gating:
        case Gating.SOFTMAX:
            return softmax(logits)
        case Gating.SIGMOID:
            return np.asarray(1 / (1 + np.exp(-logits)))
        case Gating.TOPK_SOFTMAX:
            return logits


def choose(scores: F32Array, n_expert_used: int) -> Ints:
    """The best experts of each token, best first, the lower one where two are equal: [n, n_expert_used]."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :n_expert_used].astype(np.int32)


def choice_weights(scores: F32Array, ids: Ints, params: RouterParams) -> F32Array:
    """What each choice counts, [n, n_expert_used]."""
    weights = np.take_along_axis(scores, ids, axis=-1)
    if params.gating is Gating.TOPK_SOFTMAX:
        weights = softmax(weights)
    if params.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights * np.float32(params.scale)


def sort_rows(rows: ExpertRows) -> None:
    """Fill pairs, offsets and positions from ids."""
    ids = elements(rows.ids)
    pairs = np.argsort(ids.reshape(-1), kind="stable").astype(np.int32)
    row_of_pair = np.empty_like(pairs)
    row_of_pair[pairs] = np.arange(pairs.size, dtype=np.int32)
    elements(rows.pairs)[:] = pairs
    elements(rows.offsets)[:] = np.searchsorted(ids.reshape(-1)[pairs], np.arange(rows.n_expert + 1))
    elements(rows.positions)[:] = np.sort(row_of_pair.reshape(ids.shape), axis=-1)


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows of a window that belong to experts that are here.

    Attributes:
        first, end: sorted rows of the window.
        experts: (expert, first row, end row) of those here that have rows in it; rows count from `first`.
    """

    first: int
    end: int
    experts: list[tuple[int, int, int]]

    @classmethod
    def of(cls, rows: ExpertRows, window: RowWindow, here: npt.NDArray[np.bool_]) -> WindowRows:
        offsets = elements(rows.offsets)
        first = int(offsets[window.first_expert]) + window.first_row
        end = max(first, min(first + window.n_rows, int(offsets[window.end_expert])))
        begins, ends = np.maximum(offsets[:-1], first) - first, np.minimum(offsets[1:], end) - first
        experts = np.flatnonzero(here & (begins < ends))
        parts = zip(experts.tolist(), begins[experts].tolist(), ends[experts].tolist(), strict=True)
        return cls(first, end, list(parts))

    def tokens(self, rows: ExpertRows) -> Ints:
        """The token of each row of the window."""
        return np.asarray(elements(rows.pairs)[self.first : self.end] // np.int32(rows.n_expert_used))


class TableWeights:
    """The experts of a table, as f32."""

    def __init__(self, table: ExpertTable, weights: Weights) -> None:
        self.table = table
        self.weights = weights
        self.where: Ints = elements(table.where)
        self.here = self.where >= 0

    def __getitem__(self, expert: int) -> F32Array:
        """[n_out, n_in]."""
        table = self.table
        return self.weights.get(table.slab(int(self.where[expert])), table.type, (table.n_out, table.n_in))


def combine(acc: F32Array, y: F32Array, here: npt.NDArray[np.bool_], rows: ExpertRows, first: int) -> None:
    """acc[token] += weight * y[row], in ascending order of each token's rows.

    acc: [n_tokens, n_embd]; y: [n, n_embd], the sorted rows from `first` on; here: [n_expert].
    """
    experts, weights = elements(rows.ids).reshape(-1), elements(rows.weights).reshape(-1)
    pairs = elements(rows.pairs)
    for column in elements(rows.positions).T:  # a token's rows, one after another
        inside = (column >= first) & (column < first + len(y))
        inside &= here[experts[pairs[column]]]
        tokens = np.flatnonzero(inside)
        if tokens.size:
            row = column[tokens]
            acc[tokens] += weights[pairs[row], None] * y[row - first]


def glu(gate: F32Array, up: F32Array, kind: Glu) -> F32Array:
    """f(gate) * up."""
    match kind:
        case Glu.SWIGLU:
            f = gate / (1 + np.exp(-gate))
        case Glu.GEGLU:
            cube = np.float32(0.044715) * gate * gate * gate
            f = np.float32(0.5) * gate * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (gate + cube)))
    return np.asarray(f * up)


class Ffn(NamedTuple):
    """The three tables of a layer."""

    gate: TableWeights
    up: TableWeights
    down: TableWeights


def expert_ffn(
    acc: F32Array,
    x: F32Array,
    ffn: Ffn,
    rows: ExpertRows,
    window: RowWindow,
    kind: Glu,
) -> None:
    """acc[token] += weight * down(f(gate(x)) * up(x)) for the rows of a window. acc, x: [n_tokens, n_embd]."""
    here = ffn.gate.here & ffn.up.here & ffn.down.here
    part = WindowRows.of(rows, window, here)
    tokens = part.tokens(rows)
    y = np.empty((part.end - part.first, acc.shape[1]), np.float32)

    def compute(expert: int, first: int, end: int) -> None:
        x_rows = x[tokens[first:end]]
        hidden = glu(matmul_rows(x_rows, ffn.gate[expert]), matmul_rows(x_rows, ffn.up[expert]), kind)
        y[first:end] = matmul_rows(hidden, ffn.down[expert])

    n_row = sum(align_up(end - first, ROW_BLOCK) for _, first, end in part.experts)
    n_madd = n_row * (2 * ffn.gate.table.n_out * ffn.gate.table.n_in + ffn.down.table.n_out * ffn.down.table.n_in)
    run_all([partial(compute, *rows_of_one) for rows_of_one in part.experts], n_madd)
    combine(acc, y, here, rows, part.first)


def windows(rows: ExpertRows, experts: tuple[int, int], chunk_rows: int) -> Iterator[RowWindow]:
    """All rows of a range of experts, `chunk_rows` at a time."""
    offsets = elements(rows.offsets)
    for first_row in range(0, int(offsets[experts[1]] - offsets[experts[0]]), chunk_rows):
        yield RowWindow(first_expert=experts[0], end_expert=experts[1], first_row=first_row, n_rows=chunk_rows)
