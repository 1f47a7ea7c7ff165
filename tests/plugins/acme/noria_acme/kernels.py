"""The ops this device has. Whatever `supports` does not answer for runs on the reference, through the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.api import ExpertRows, ExpertTable, Kernels, Op, OpQuery, Queue, RowWindow, Span, Support, Tensor
from noria.api.tensor import WHERE_BUFFER_SHIFT, WHERE_OFFSET_MASK
from noria_acme.memory import device_bytes, elements

WEIGHT_TYPES = ("F32", "Q8_0")
Q8_0_BLOCK = 2 + 32  # bytes: an F16 scale and 32 signed numbers


def dequantize(data: npt.NDArray[np.uint8], type: str, n_out: int, n_in: int) -> npt.NDArray[np.float32]:
    """Weights as F32 [n_out, n_in]."""
    if type == "F32":
        return data.view(np.float32).reshape(n_out, n_in)
    blocks = data.reshape(-1, Q8_0_BLOCK)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scales * blocks[:, 2:].view(np.int8)).reshape(n_out, n_in)


class AcmeKernels(Kernels):
    def supports(self, query: OpQuery) -> Support:
        if query.activation != "F32":
            return Support.MISSING
        if query.op in (Op.MATMUL, Op.MUL_MAT_ID) and query.type in WEIGHT_TYPES:
            return Support.NATIVE
        if query.op is Op.RMS_NORM and query.type == "F32":
            return Support.NATIVE
        return Support.MISSING

    def _rms_norm(self, queue: Queue, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        a = elements(x)
        y = a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + np.float32(eps))
        elements(out)[...] = y if weight is None else y * elements(weight)

    def _matmul(
        self,
        queue: Queue,
        out: Tensor,
        w: Tensor,
        x: Tensor,
        bias: Tensor | None,
        accumulate: bool,
        scratch: Span | None,
    ) -> None:
        y = elements(x) @ dequantize(device_bytes(w.span), w.type, *w.shape).T
        if bias is not None:
            y += elements(bias)
        elements(out)[...] = elements(out) + y if accumulate else y

    def _mul_mat_id(
        self,
        queue: Queue,
        out: Tensor,
        w: ExpertTable,
        x: Tensor,
        rows: ExpertRows,
        window: RowWindow,
        by_token: bool,
        scratch: Span | None,
    ) -> None:
        where, offsets, pairs = elements(w.where), elements(rows.offsets), elements(rows.pairs)
        start = offsets[window.first_expert] + window.first_row
        end = start + window.n_rows
        for expert in range(window.first_expert, window.end_expert):
            first, last = max(start, offsets[expert]), min(end, offsets[expert + 1])
            if first >= last or where[expert] < 0:  # no rows in the window, or the expert is not here
                continue
            span = w.spans[where[expert] >> WHERE_BUFFER_SHIFT]
            offset = int(where[expert] & WHERE_OFFSET_MASK) * self.device.caps.table_unit
            weights = dequantize(device_bytes(span.sub(offset, w.slab_nbytes)), w.type, w.n_out, w.n_in)
            source = pairs[first:last] // rows.n_expert_used if by_token else slice(first - start, last - start)
            elements(out)[first - start : last - start] = elements(x)[source] @ weights.T
