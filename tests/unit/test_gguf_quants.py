"""Block facts and dequantizers."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import pytest

from noria.gguf import SUPPORTED_TYPES, block_facts, dequantize, row_nbytes


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_dequantize_keeps_rows_apart(type_name: str) -> None:
    """A tensor gives the numbers its rows give alone, whatever the shape of the bytes."""
    rng = np.random.default_rng(3)
    shape = (2, 3, 2 * max(block_facts(type_name)[0], 32))
    data = rng.integers(0, 60, (6, row_nbytes(type_name, shape[-1])), np.uint8)  # below 60: finite in every type
    values = dequantize(type_name, data.ravel(), shape)
    assert (values.dtype, values.shape) == (np.float32, shape)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 8
    for i, row in enumerate(data):
        assert np.array_equal(dequantize(type_name, row, shape[-1:]), values.reshape(6, -1)[i])


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
def test_dequantize_undoes_quantize(type_name: str) -> None:
    weights = np.random.default_rng(3).standard_normal((4, 64), np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name]).view(np.uint8)
    error = dequantize(type_name, data, weights.shape) - weights
    assert np.sqrt(np.mean(error**2)) < {"F32": 1e-9, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01}.get(type_name, 0.2)


def test_f32_is_a_view() -> None:
    data = np.arange(8, dtype=np.float32).view(np.uint8)
    assert np.shares_memory(dequantize("F32", data, (2, 4)), data)


def test_row_nbytes() -> None:
    assert [row_nbytes(name, 256) for name in ("F32", "F16", "Q8_0", "Q4_K", "I32")] == [1024, 512, 272, 144, 1024]
    with pytest.raises(ValueError, match="not a whole number of Q6_K blocks of 256"):
        row_nbytes("Q6_K", 300)
