"""Block facts and the reference dequantizers of every ggml tensor type, as the `gguf` package has them."""

from __future__ import annotations

from math import prod
from typing import Any

import gguf
import gguf.quants
import numpy as np
from numpy.typing import NDArray

# The weight types noria computes with. A file may hold others: it opens, but no model can be built from it.
SUPPORTED_TYPES: tuple[str, ...] = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    "MXFP4",
)


def type_name(type_id: int) -> str | None:
    """The ggml name of a type number of a GGUF file, or None for a number nobody knows."""
    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return None


def block_facts(type_name: str) -> tuple[int, int]:
    """`(block_size, type_nbytes)`: numbers a block of this type holds, and its bytes."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


def row_nbytes(type_name: str, n: int) -> int:
    """Bytes of a row of `n` numbers.

    Raises:
        ValueError: `n` is not a whole number of blocks.
    """
    block_size, type_nbytes = block_facts(type_name)
    n_blocks, rest = divmod(n, block_size)
    if rest:
        raise ValueError(f"a row of {n} numbers is not a whole number of {type_name} blocks of {block_size}")
    return n_blocks * type_nbytes


def dequantize(type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The numbers of a tensor as F32 `shape` (NumPy order).

    Args:
        type_name: one of `SUPPORTED_TYPES`.
        data: the tensor's bytes, contiguous, in any shape. For F32 the result is a view of it.
    """
    rows = data.reshape(prod(shape[:-1]), row_nbytes(type_name, shape[-1]))
    values: NDArray[Any] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return values.reshape(shape)
