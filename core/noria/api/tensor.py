"""Typed, shaped memory as ops see it: tensors, the KV cache of a layer, tables of experts and rows routed to them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from noria.api.errors import KernelLaunchError
from noria.api.memory import Span

# Types whose elements stand alone in memory, and their NumPy form (BF16 has none: its bits as uint16).
ELEMENT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor: `span` holds `shape` (NumPy order, outer to inner) of `type` (a ggml type name), row after row.

    Quantized types keep GGUF's layout: each row of the last axis is a whole number of blocks.
    """

    span: Span
    type: str
    shape: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Rows of the last axis."""
        return prod(self.shape[:-1])

    @property
    def row_nbytes(self) -> int:
        return self.span.nbytes // max(self.n_rows, 1)

    def rows(self, first: int, end: int) -> Tensor:
        """`[first:end]` along the first axis, without a copy."""
        step = self.span.nbytes // self.shape[0]
        return Tensor(self.span.sub(first * step, (end - first) * step), self.type, (end - first, *self.shape[1:]))

    def reshape(self, *shape: int) -> Tensor:
        """The same memory under another shape."""
        if prod(shape) != prod(self.shape):
            raise KernelLaunchError(self.span.buffer.device.info.id, f"cannot view {self.shape} as {shape}")
        return Tensor(self.span, self.type, shape)


def tensor_nbytes(type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of one of `ELEMENT_TYPES`."""
    return ELEMENT_TYPES[type].itemsize * prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """The KV cache of one layer.

    A cell holds one position. The K row of cell c is at `c * row_nbytes`, its V row `v_offset` bytes further, each
    head after head. V may be a part of K (`v_offset` inside the K row), as in multi-head latent attention.

    Attributes:
        span: all cells.
        n_cell: how many there are (the context length).
        d_k, d_v: numbers a head has in K and in V.
        row_nbytes: bytes from one cell to the next.
        v_offset: bytes from a cell's K row to its V row.
    """

    span: Span
    k_type: str
    v_type: str
    n_cell: int
    n_head_kv: int
    d_k: int
    d_v: int
    row_nbytes: int
    v_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTable:
    """Where the experts of one tensor of one layer are, whatever brought them there.

    `where` is a *device* tensor I32 [n_expert]: bits 29-30 choose one of `spans`, bits 0-28 are the offset from its
    start in units of `caps.table_unit` bytes. A negative value says "not here": rows of that expert are neither read
    nor written. A ring slot, a selective copy, a cache and host memory (where `caps.host_gather`) all look like this,
    in any mixture, and calls with tables that share no expert give together the bits of one call.

    Bytes between and behind slabs may hold anything (NaNs too): no kernel lets them matter.

    Attributes:
        spans: at most 4; device spans, or host spans where `caps.host_gather`.
        type: ggml type of the weights, each expert [n_out, n_in] and `slab_nbytes` long.
    """

    spans: tuple[Span, ...]
    where: Tensor
    type: str
    n_out: int
    n_in: int
    slab_nbytes: int

    def slab(self, entry: int) -> Span:
        """The bytes of the expert whose `where` value is `entry` (not negative)."""
        unit = self.where.span.buffer.device.caps.table_unit
        return self.spans[entry >> WHERE_BUFFER_SHIFT].sub((entry & WHERE_OFFSET_MASK) * unit, self.slab_nbytes)


WHERE_BUFFER_SHIFT = 29
WHERE_OFFSET_MASK = (1 << WHERE_BUFFER_SHIFT) - 1


def where_entry(span_index: int, offset: int, table_unit: int) -> int:
    """The `ExpertTable.where` value of an expert at `offset` bytes from the start of span `span_index`."""
    units, rest = divmod(offset, table_unit)
    if rest or not 0 <= units <= WHERE_OFFSET_MASK or not 0 <= span_index < 4:
        raise ValueError(f"offset {offset} of span {span_index} does not fit a table with a unit of {table_unit} bytes")
    return span_index << WHERE_BUFFER_SHIFT | units


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """The (token, choice) pairs of a batch, and their order by expert. All on the device.

    Pair `p = token * n_expert_used + choice`. Sorting is stable: by expert, then by pair.

    Attributes:
        ids: I32 [n_tokens, n_expert_used], the chosen experts, best first.
        weights: F32 [n_tokens, n_expert_used], what each choice counts.
        pairs: I32 [n_tokens * n_expert_used], the pair at each sorted row.
        offsets: I32 [n_expert + 1], the first sorted row of each expert.
        positions: I32 [n_tokens, n_expert_used], the sorted rows of each token, ascending.
    """

    ids: Tensor
    weights: Tensor
    pairs: Tensor
    offsets: Tensor
    positions: Tensor

    @property
    def n_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def n_expert_used(self) -> int:
        return self.ids.shape[1]

    @property
    def n_expert(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWindow:
    """A part of the sorted rows, known to the host only by its bounds.

    It holds rows `[offsets[first_expert] + first_row, min(that + n_rows, offsets[end_expert]))`: at most `n_rows` rows
    of the experts `[first_expert, end_expert)`, possibly none. Outputs are indexed from the window's first row.
    """

    first_expert: int
    end_expert: int
    first_row: int
    n_rows: int
