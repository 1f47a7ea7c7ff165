"""The CUDA dequantizers, compiled for the host: the bits of gguf's for every type and every scale a block can have."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from noria.gguf import SUPPORTED_TYPES
from noria.testing.accuracy import assert_same_bits
from noria.testing.blocks import wild_weights
from noria_cuda.compile import SOURCES

# What the headers take from CUDA, in C++. Half floats are converted by two instructions, in inline assembler.
HOST = r"""
#include <cstring>
#include <initializer_list>
#define __device__
#define __forceinline__ inline
#define INFINITY __builtin_inff()
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x; };
static Index threadIdx, blockDim;
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float fmaxf(float a, float b) { return a > b ? a : b; }
static inline float __shfl_xor_sync(unsigned, float x, int) { return x; }
static inline void __syncthreads() {}
static inline float half_to_float(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return h; }
static inline unsigned short float_to_half(float f) { _Float16 h = f; unsigned short u; memcpy(&u, &h, 2); return u; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
"""
EXPORT = """
extern "C" void dequantize_{type}(const u8* row, float* out, int n) {{
    for (int i = 0; i < n; i += 8) {{
        float y[8];
        dequant8<{type}>(row, i, y);
        memcpy(out + i, y, sizeof y);
    }}
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    folder: Path = tmp_path_factory.mktemp("quants")
    for name in ("common.cuh", "quants.cuh", "iq_tables.cuh"):
        text = (SOURCES / name).read_text(encoding="utf-8")
        text = text.replace('asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));', "y = half_to_float(x.bits);")
        text = text.replace('asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));', "y.bits = float_to_half(x);")
        (folder / name).write_text(text, encoding="utf-8")
    source = HOST + '#include "quants.cuh"\n' + "".join(EXPORT.format(type=type) for type in SUPPORTED_TYPES)
    (folder / "quants.cpp").write_text(source, encoding="utf-8")
    # As CUDA compiles it: no contraction of what is written as two roundings, and integers that wrap.
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC"]
    run = subprocess.run(
        [compiler, *flags, "quants.cpp", "-o", "quants.so"], cwd=folder, capture_output=True, text=True
    )
    if "_Float16" in run.stderr:
        pytest.skip("this g++ has no 16-bit floats")
    assert run.returncode == 0, run.stderr
    return ctypes.CDLL(str(folder / "quants.so"))


@pytest.mark.parametrize("type", SUPPORTED_TYPES)
def test_dequantizers_have_the_bits_of_ggufs(library: ctypes.CDLL, type: str) -> None:
    weights = wild_weights(np.random.default_rng(7), type, (60, 768))
    data = np.ascontiguousarray(weights.data)
    out = np.empty(weights.values.size, np.float32)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (data, out))
    getattr(library, f"dequantize_{type}")(*pointers, ctypes.c_int(out.size))
    assert_same_bits(out.reshape(weights.shape), weights.values)
