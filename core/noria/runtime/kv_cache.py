"""The KV cache: one buffer and one view a layer."""

from __future__ import annotations

from collections.abc import Sequence

from noria.api import KVView, Span, align_up
from noria.api.errors import ConfigError
from noria.gguf import row_nbytes
from noria.models import Model

ROW_ALIGNMENT = 16


def kv_row_nbytes(model: Model, layer: int, type_k: str, type_v: str) -> tuple[int, int]:
    """(bytes of a cell's K row, of its K and V rows together), each padded to `ROW_ALIGNMENT`.

    Raises:
        ConfigError: a head row is not a whole number of the type's blocks.
    """
    n_head_kv, d_k, d_v = model.kv_shape(layer)
    for flag, type, d in (("-ctk", type_k, d_k), ("-ctv", type_v, d_v)):
        try:
            row_nbytes(type, d)
        except ValueError as error:
            raise ConfigError(f"{flag} {type}: heads of {d} numbers cannot be stored in this type: {error}") from error
    k = align_up(row_nbytes(type_k, n_head_kv * d_k), ROW_ALIGNMENT)
    return k, k + align_up(row_nbytes(type_v, n_head_kv * d_v), ROW_ALIGNMENT)


def kv_layer_nbytes(model: Model, layer: int, n_ctx: int, type_k: str, type_v: str, alignment: int) -> int:
    return align_up(n_ctx * kv_row_nbytes(model, layer, type_k, type_v)[1], alignment)


def kv_views(
    model: Model, layers: Sequence[int], spans: Sequence[Span], n_ctx: int, type_k: str, type_v: str
) -> dict[int, KVView]:
    """The caches of `layers`, each in its span: in each cell the K heads, then the V heads."""
    views = {}
    for layer, span in zip(layers, spans, strict=True):
        n_head_kv, d_k, d_v = model.kv_shape(layer)
        v_offset, row = kv_row_nbytes(model, layer, type_k, type_v)
        views[layer] = KVView(
            span=span.sub(0, n_ctx * row),
            k_type=type_k,
            v_type=type_v,
            n_cell=n_ctx,
            n_head_kv=n_head_kv,
            d_k=d_k,
            d_v=d_v,
            row_nbytes=row,
            v_offset=v_offset,
        )
    return views
