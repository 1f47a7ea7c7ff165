"""Weights of every type made of random bytes, with the numbers they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import gguf
import gguf.quants
import numpy as np
from numpy.typing import NDArray

from noria.gguf import block_facts, dequantize, row_nbytes

# Where a block keeps its scales (and minimums) as f16; all its other bytes may be anything.
# Source: llama.cpp ggml-common.h, the block_* structs.
F16_FIELDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}
E8M0_BIAS = 128  # of MXFP4's scale byte, whose numbers are stored twice as large


@dataclass(frozen=True, slots=True)
class Weights:
    """A tensor as a file has it.

    Attributes:
        shape: NumPy order.
        data: its bytes, [nbytes].
        values: the numbers they stand for, F32 of `shape`.
    """

    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    values: NDArray[np.float32]

    def __getitem__(self, i: int) -> Weights:
        """Entry `i` of the first axis, as one expert of a stack."""
        step = self.data.size // self.shape[0]
        return Weights(self.type, self.shape[1:], self.data[i * step : (i + 1) * step], self.values[i])


def encode(values: NDArray[Any], type: str) -> NDArray[np.uint8]:
    """The bytes of `values` in a type that gguf can write, rounded to nearest."""
    if type == "I32":
        return np.ascontiguousarray(values, np.int32).reshape(-1).view(np.uint8)
    rows = np.ascontiguousarray(values, np.float32)
    packed: NDArray[Any] = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type])
    return packed.reshape(-1).view(np.uint8)


def decode(data: NDArray[np.uint8], type: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The numbers of `data` as I32 or F32 of `shape`."""
    return data.view(np.int32).reshape(shape) if type == "I32" else dequantize(type, data, shape)


def rounded(values: NDArray[Any], type: str) -> NDArray[np.float32]:
    """`values` as they are once stored in `type`."""
    return np.array(decode(encode(values, type), type, values.shape), np.float32)


def random_weights(rng: np.random.Generator, type: str, shape: tuple[int, ...], std: float = 0.1) -> Weights:
    """Random weights of about this standard deviation; every bit of a quantized block is used."""
    if type in F16_FIELDS or type == "MXFP4":
        blocks = _random_blocks(rng, type, shape)
        scales = rng.uniform(0.5, 2, (len(blocks), 2)) * rng.choice((-1, 1), (len(blocks), 2))
        _set_scales(blocks, type, scales)
        measured = float(np.std(dequantize(type, blocks, shape)))
        _set_scales(blocks, type, scales * (std / measured))
        data = blocks.reshape(-1)
    else:
        data = encode(rng.normal(0, std, shape), type)
    return Weights(type, shape, data, dequantize(type, data, shape))


def wild_weights(rng: np.random.Generator, type: str, shape: tuple[int, ...]) -> Weights:
    """Random weights whose scales are any finite numbers: tiny, huge, negative, subnormal and zero."""
    if type in F16_FIELDS or type == "MXFP4":
        blocks = _random_blocks(rng, type, shape)
        if type == "MXFP4":
            blocks[:, 0] = rng.integers(3, 240, len(blocks))
        for at in F16_FIELDS.get(type, ()):
            blocks[:, at : at + 2] = _finite_halves(rng, len(blocks)).view(np.uint8).reshape(-1, 2)
        data = blocks.reshape(-1)
    elif type == "F16":
        data = _finite_halves(rng, prod(shape)).view(np.uint8)
    else:
        data = encode(rng.normal(0, 1, shape) * 10.0 ** rng.integers(-30, 30, shape), type)
    return Weights(type, shape, data, dequantize(type, data, shape))


def _random_blocks(rng: np.random.Generator, type: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    n_blocks = prod(shape[:-1]) * row_nbytes(type, shape[-1]) // block_facts(type)[1]
    return rng.integers(0, 256, (n_blocks, block_facts(type)[1]), dtype=np.uint8)


def _set_scales(blocks: NDArray[np.uint8], type: str, scales: NDArray[np.float64]) -> None:
    if type == "MXFP4":
        blocks[:, 0] = E8M0_BIAS + np.round(np.log2(np.abs(scales[:, 0])))
    for i, at in enumerate(F16_FIELDS.get(type, ())):
        blocks[:, at : at + 2] = scales[:, i].astype(np.float16).view(np.uint8).reshape(-1, 2)


def _finite_halves(rng: np.random.Generator, n: int) -> NDArray[np.float16]:
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] &= 0x83FF  # infinities and NaNs become subnormals
    return bits.view(np.float16)
