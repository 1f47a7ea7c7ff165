"""Expert tables whose content is known before the run: ranges of experts, each `stride` bytes from the last.

They say where experts are relative to the start of a span, so one table serves every slot, every layer of the same
shapes, resident experts and host memory alike. All are uploaded once, when the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.api import HostBuffer, Queue, Span, Tensor, align_up, where_entry


@dataclass(frozen=True, slots=True)
class TableKey:
    """Experts [first, end) of `n_expert`, `stride` bytes apart; the others are not here."""

    n_expert: int
    first: int
    end: int
    stride: int


def range_table(key: TableKey, table_unit: int) -> npt.NDArray[np.int32]:
    """The `where` values of a range: I32 [n_expert]."""
    where = np.full(key.n_expert, -1, np.int32)
    where_entry(0, (key.end - key.first - 1) * key.stride, table_unit)  # raises unless all of them fit
    where[key.first : key.end] = np.arange(key.end - key.first) * (key.stride // table_unit)
    return where


def packed_table(experts: tuple[int, ...], n_expert: int, stride: int, table_unit: int) -> npt.NDArray[np.int32]:
    """The `where` values of chosen experts packed one after another: I32 [n_expert]."""
    where = np.full(n_expert, -1, np.int32)
    for i, expert in enumerate(experts):
        where[expert] = where_entry(0, i * stride, table_unit)
    return where


class RangeTables:
    """The range tables of one device, in one buffer.

    `add` every key, ask `nbytes`, then `upload` into memory of that size; afterwards `[key]` is a device tensor.
    """

    def __init__(self, table_unit: int, alignment: int) -> None:
        self.table_unit = table_unit
        self.alignment = alignment
        self.nbytes = 0
        self._offsets: dict[TableKey, int] = {}
        self._span: Span | None = None

    def add(self, key: TableKey) -> None:
        if key not in self._offsets:
            self._offsets[key] = self.nbytes
            self.nbytes += align_up(key.n_expert * 4, self.alignment)

    def upload(self, queue: Queue, span: Span, staging: HostBuffer) -> None:
        """Write all tables to `span` by way of `staging` (at least `nbytes`), and wait until they are there."""
        self._span = span
        host = staging.array()
        for key, offset in self._offsets.items():
            host[offset : offset + key.n_expert * 4] = range_table(key, self.table_unit).view(np.uint8)
        queue.copy_h2d(span.sub(0, self.nbytes), staging.span(0, self.nbytes))
        queue.synchronize()

    def __getitem__(self, key: TableKey) -> Tensor:
        assert self._span is not None, "the tables have not been uploaded"
        return Tensor(self._span.sub(self._offsets[key], key.n_expert * 4), "I32", (key.n_expert,))
