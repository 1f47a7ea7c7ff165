"""Random tensor data of any weight type with a wanted standard deviation and mean zero.

Blocks are filled with random bits and then only their scale fields are set, so a block costs little more than its
random bits. With uniformly random payload the numbers before scaling are uniform over the type's levels, whose root
mean square is known (n levels one apart: sqrt((n*n - 1) / 12) around their mean), and the scale follows:

    std = d * rms(levels) * rms(sub-block scales)          type by type, from the dequantizer's formula
    Q4_0, Q5_0, Q8_0, IQ4_NL        d * level
    Q3_K, Q6_K, IQ4_XS              d * sub * level
    Q5_1                            d * level + m                     m = -d * mean(level)
    Q4_K, Q5_K                      d * sub * level - dmin * sub      dmin = d * mean(level)
    MXFP4                           2**e * level                      e one of two neighbours, in the right shares

Two things matter besides the deviation. Levels such as -8..7 have a mean of -0.5: over a whole matrix that is a rank-1
component stronger than all the rest (2048 wide, Q4_0: singular value 221 against 91), so the sign of the scale, or of
each sub-scale, is random. And F16 scales must be normal numbers (>= 2**-14) for a deviation of 0.004, since subnormal
ones lose precision and are slow on some hardware: that is why Q8_0 uses half of its range, IQ4 the middle half of its
table, and sub-scales are 1 or 2. Scales differ from block to block, so that reading a wrong one shows.

Source: block layouts from ggml-common.h (block_q4_0 ... block_mxfp4); IQ4 and MXFP4 levels from the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import ArrayLike, NDArray

from noria.gguf.quants import block_facts

_F16 = "<f2"
_LAYOUTS: dict[str, np.dtype[Any]] = {
    "Q4_0": np.dtype([("d", _F16), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", _F16), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", _F16), ("m", _F16), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", _F16), ("qs", "i1", 32)]),
    "Q3_K": np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", _F16)]),
    "Q4_K": np.dtype([("d", _F16), ("dmin", _F16), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", _F16), ("dmin", _F16), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", _F16)]),
    "IQ4_NL": np.dtype([("d", _F16), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", _F16), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)]),
    "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
}


def random_blocks(type_name: str, n_blocks: int, std: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """`n_blocks` blocks of mean 0 and deviation `std`, as uint8 [n_blocks * type_nbytes]."""
    if type_name in ("F32", "F16"):
        values = rng.standard_normal(n_blocks, np.float32) * np.float32(std)
        return values.astype(np.float32 if type_name == "F32" else np.float16).view(np.uint8)
    nbytes = n_blocks * block_facts(type_name)[1]
    words = rng.integers(0, 2**64 - 1, size=-(-nbytes // 8), dtype=np.uint64, endpoint=True)
    data = words.view(np.uint8)[:nbytes]
    _FILLS[type_name](data.view(_LAYOUTS[type_name]), std, rng)
    return data


def _rms(values: ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


# Sub-scales are made from the random bytes that already stand in their field.
_SUB = np.resize(np.array([1, 2], np.int8), 256)
_SIGNED_SUB = np.where(np.arange(256) < 128, _SUB, -_SUB)
_SUB_RMS = _rms(_SUB)
_IQ4_MIDDLE = gguf.quants.IQ4_NL.kvalues[4:12]


def _scales(n: int, rms: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Positive scales within a third of each other, of this root mean square."""
    spread = np.float32(0.85) + np.float32(0.3) * rng.random(n, np.float32)
    spread *= np.float32(rms / np.sqrt(1 + 0.15**2 / 3))
    return spread


def _signed_scales(n: int, rms: float, rng: np.random.Generator) -> NDArray[np.float32]:
    return np.where(rng.random(n, np.float32) < 0.5, 1, -1).astype(np.float32) * _scales(n, rms, rng)


def _fill_signed(levels: ArrayLike) -> Callable[[NDArray[Any], float, np.random.Generator], None]:
    unit = _rms(levels)

    def fill(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
        blocks["d"] = _signed_scales(len(blocks), std / unit, rng)

    return fill


def _fill_q8_0(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    blocks["qs"] >>= 1
    blocks["d"] = _signed_scales(len(blocks), std / _rms(np.arange(-64, 64)), rng)


def _fill_q5_1(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    blocks["d"] = _scales(len(blocks), std / _rms(np.arange(32) - 15.5), rng)
    blocks["m"] = blocks["d"] * np.float16(-15.5)


def _fill_q4_k_like(n_levels: int) -> Callable[[NDArray[Any], float, np.random.Generator], None]:
    """Q4_K and Q5_K. Packed 6-bit scales and minima: those below 16 use four bits of bytes 0-3, 4-7 and 8-11."""
    mean = (n_levels - 1) / 2
    unit = _rms(np.arange(n_levels) - mean) * _SUB_RMS

    def fill(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
        blocks["d"] = _scales(len(blocks), std / unit, rng)
        blocks["dmin"] = blocks["d"] * np.float16(mean)
        sub = _SUB[blocks["scales"][:, :8]].view(np.uint8)  # [n_blocks, 8]; the same for scale and minimum
        blocks["scales"][:, 0:4] = sub[:, :4]
        blocks["scales"][:, 4:8] = sub[:, :4]
        blocks["scales"][:, 8:12] = sub[:, 4:] | sub[:, 4:] << 4

    return fill


def _fill_q3_k(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    """Sixteen 6-bit scales, 32 standing for 0: low four bits in bytes 0-7, high two in bytes 8-11."""
    blocks["d"] = _scales(len(blocks), std / (_rms(np.arange(-4, 4)) * _SUB_RMS), rng)
    packed = blocks["scales"]
    sub = _SIGNED_SUB[rng.integers(0, 256, (len(blocks), 16), np.uint8)].view(np.uint8) + np.uint8(32)
    packed[:, :8] = sub[:, :8] & 15 | sub[:, 8:] << 4
    high = sub >> 4
    packed[:, 8:] = high[:, 0:4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:16] << 6


def _fill_q6_k(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    blocks["d"] = _scales(len(blocks), std / (_rms(np.arange(-32, 32)) * _SUB_RMS), rng)
    blocks["scales"] = _SIGNED_SUB[blocks["scales"].view(np.uint8)]


def _keep_iq4_middle(blocks: NDArray[Any]) -> None:
    blocks["qs"] &= 0x77
    blocks["qs"] += 0x44


def _fill_iq4_nl(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    _keep_iq4_middle(blocks)
    blocks["d"] = _signed_scales(len(blocks), std / _rms(_IQ4_MIDDLE), rng)


def _fill_iq4_xs(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    """Eight 6-bit scales, 32 standing for 0: low four bits two a byte, high two bits in one 16-bit word."""
    _keep_iq4_middle(blocks)
    blocks["d"] = _scales(len(blocks), std / (_rms(_IQ4_MIDDLE) * _SUB_RMS), rng)
    sub = _SIGNED_SUB[rng.integers(0, 256, (len(blocks), 8), np.uint8)].view(np.uint8) + np.uint8(32)
    blocks["scales_l"] = sub[:, 0::2] & 15 | sub[:, 1::2] << 4
    blocks["scales_h"] = np.sum((sub >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)


def _fill_mxfp4(blocks: NDArray[Any], std: float, rng: np.random.Generator) -> None:
    """Scales are powers of two: a share p of 2**e and 1-p of 2**(e+1) has the variance p * 4**e + (1-p) * 4**(e+1)."""
    wanted = std / _rms(gguf.quants.MXFP4.kvalues)
    e = int(np.floor(np.log2(wanted)))
    share_of_larger = (wanted**2 / 4.0**e - 1) / 3
    blocks["e"] = 128 + e + (rng.random(len(blocks), np.float32) < share_of_larger)


_FILLS: dict[str, Callable[[NDArray[Any], float, np.random.Generator], None]] = {
    "Q4_0": _fill_signed(np.arange(-8, 8)),
    "Q5_0": _fill_signed(np.arange(-16, 16)),
    "Q5_1": _fill_q5_1,
    "Q8_0": _fill_q8_0,
    "Q3_K": _fill_q3_k,
    "Q4_K": _fill_q4_k_like(16),
    "Q5_K": _fill_q4_k_like(32),
    "Q6_K": _fill_q6_k,
    "IQ4_NL": _fill_iq4_nl,
    "IQ4_XS": _fill_iq4_xs,
    "MXFP4": _fill_mxfp4,
}
