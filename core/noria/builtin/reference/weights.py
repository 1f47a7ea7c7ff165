"""Weights as f32: dequantizers, and a cache of what they made."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from noria.api import ELEMENT_TYPES, Buffer, BufferUsage, Span
from noria.builtin.reference.memory import ReferenceDeviceBuffer, span_bytes
from noria.builtin.reference.tensors import F32Array, to_f32
from noria.experts.host_memory import available_memory_nbytes
from noria.gguf import block_facts, dequantize

Bytes = npt.NDArray[np.uint8]

# Buffers whose content stays; what lies in slots and caches of experts is gone before it would be used again.
_LASTING = (BufferUsage.WEIGHTS, BufferUsage.EXPERTS)


class Weights:
    """Dequantizes weights, and keeps those of buffers that last.

    What is kept is never evicted for something else: a model's weights are used in turn, so evicting the oldest would
    evict each one just before its use. It goes when its buffer is freed, and counts no more once that is written to.

    Args:
        budget_nbytes: how much f32 may be kept; by default an eighth of the RAM that is available.
    """

    def __init__(self, budget_nbytes: int | None = None) -> None:
        self.budget_nbytes = available_memory_nbytes() // 8 if budget_nbytes is None else budget_nbytes
        self.kept_nbytes = 0
        self._kept: dict[Buffer, dict[tuple[int, str, tuple[int, ...]], tuple[int, F32Array]]] = {}
        self._lock = threading.Lock()  # queues may ask at the same time

    def get(self, span: Span, type: str, shape: tuple[int, ...]) -> F32Array:
        """The weights at `span`, `shape` of `type`. Not to be written to."""
        buffer = span.buffer
        if type == "F32" or not (isinstance(buffer, ReferenceDeviceBuffer) and buffer.usage in _LASTING):
            return to_shape(span_bytes(span), type, shape)
        key, version = (span.offset, type, shape), buffer.version
        kept = self._kept.get(buffer, {}).get(key)
        if kept is not None and kept[0] == version:
            return kept[1]
        values = to_shape(span_bytes(span), type, shape)
        with self._lock:
            nbytes = 0 if kept is not None else values.nbytes
            if self.kept_nbytes + nbytes <= self.budget_nbytes:
                self.kept_nbytes += nbytes
                self._kept.setdefault(buffer, {})[key] = (version, values)
        return values

    def forget(self, buffer: Buffer) -> None:
        """`buffer` has been freed."""
        with self._lock:
            self.kept_nbytes -= sum(values.nbytes for _, values in self._kept.pop(buffer, {}).values())


def to_shape(data: Bytes, type: str, shape: tuple[int, ...]) -> F32Array:
    """The bytes of a tensor as f32 `shape`: a view where they are f32, otherwise a copy."""
    if type in ELEMENT_TYPES:
        return to_f32(data.view(ELEMENT_TYPES[type]), type).reshape(shape)
    if type in _DEQUANTIZERS:
        blocks = data.reshape(-1, block_facts(type)[1])
        return _DEQUANTIZERS[type](blocks).reshape(shape)
    return dequantize(type, data, shape)


# --- dequantizers of the most used types: the bits of the `gguf` package's, in a fraction of the time -----------------
# blocks: uint8 [n_block, bytes of a block]. Source: ggml-common.h, block_q8_0, block_q4_K, block_q6_K.


def _f16(data: Bytes) -> F32Array:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _q8_0(blocks: Bytes) -> F32Array:
    return np.multiply(blocks[:, 2:].view(np.int8), _f16(blocks[:, :2]))


def _q4_k(blocks: Bytes) -> F32Array:
    """f16 d, f16 dmin, 8 scales and 8 mins of 6 bits in 12 bytes, 256 numbers of 4 bits."""
    n = len(blocks)
    packed = blocks[:, 4:16]
    low, high = packed[:, :8].reshape(n, 2, 4), packed[:, 8:]  # scales and mins 0-3 and upper bits; lower bits of 4-7
    scales = np.empty((n, 2, 8), np.uint8)  # scales, then mins
    scales[:, :, :4] = low & 0x3F
    scales[:, :, 4:] = low >> 2 & 0x30
    scales[:, 0, 4:] |= high & 0x0F
    scales[:, 1, 4:] |= high >> 4
    factors = scales * _f16(blocks[:, :4])[:, :, None]
    q = blocks[:, 16:].reshape(n, 4, 32)
    values = np.empty((n, 8, 32), np.float32)
    values[:, 0::2] = q & 0x0F
    values[:, 1::2] = q >> 4
    values *= factors[:, 0, :, None]
    values -= factors[:, 1, :, None]
    return values


def _q6_k(blocks: Bytes) -> F32Array:
    """256 numbers as 4 lower bits and 2 upper bits, 16 scales of 8 bits, f16 d."""
    n = len(blocks)
    low, high = blocks[:, :128].reshape(n, 2, 2, 32), blocks[:, 128:192].reshape(n, 2, 32)
    q = np.empty((n, 2, 4, 32), np.uint8)
    q[:, :, :2] = low & 0x0F
    q[:, :, 2:] = low >> 4
    for i in range(4):
        q[:, :, i] |= (high >> 2 * i & 3) << 4
    q -= np.uint8(32)  # wraps around, to be read as signed
    values = q.view(np.int8).astype(np.float32).reshape(n, 16, 16)
    values *= (blocks[:, 192:208].view(np.int8) * _f16(blocks[:, 208:]))[:, :, None]
    return values


_DEQUANTIZERS: dict[str, Callable[[Bytes], F32Array]] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
