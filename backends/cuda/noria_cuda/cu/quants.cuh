// Dequantizers: one a type, used by every kernel. In f32 they give the bits of gguf.quants.dequantize.
//
// A type `Q` has
//     Q::block, Q::nbytes    values a block, and its bytes
//     Q::scaled, Q::has_min  whether values are q * d or q * d - m, and otherwise q
//     Q::scale(b, at)        d and m of the 8 values from `at` on (a multiple of 8) in the block at `b`
//     Q::quants(b, at, q)    their q; whole numbers, exact in f32 (in f16 too: |q| <= 128)
// and dequant8<Q>(row, i, y) puts the 8 values from i on (a multiple of 8) of a row into y.
//
// Rows begin on 16 bytes where their size allows it. Products and differences are rounded one by one (no FMA), as
// NumPy rounds them.
// Source: ggml-common.h, the block_* structs; gguf-py, gguf/quants.py.
#pragma once
#include "common.cuh"
#include "iq_tables.cuh"

struct Scale {
    float d, m;
};

// --- reading blocks ---------------------------------------------------------------------------------------------------

// ALIGN: what the address is known to be a multiple of; that of blocks follows from their size.
template <int ALIGN>
DEVICE u32 load4(const u8* p) {
    if constexpr (ALIGN >= 4)
        return *(const u32*)p;
    else if constexpr (ALIGN == 2)
        return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
    else
        return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}

// 8 bytes as 2 words.
template <int ALIGN>
DEVICE uint2 load_pair(const u8* p) {
    if constexpr (ALIGN >= 8)
        return *(const uint2*)p;
    else
        return make_uint2(load4<ALIGN>(p), load4<ALIGN>(p + 4));
}

DEVICE float half_at(const u8* p) { return to_f32(*(const f16*)p); }

// The 4 bytes of a word as floats less `bias`. A byte is put under the exponent of 2^23: cheaper than a conversion.
DEVICE void unpack4(u32 word, float bias, float* q) {
    constexpr u32 exponent = 0x4b000000u;
#pragma unroll
    for (int k = 0; k < 4; k++) q[k] = __uint_as_float(__byte_perm(word, exponent, 0x7440 + k)) - (8388608.f + bias);
}

DEVICE void unpack8(uint2 words, float bias, float (&q)[8]) {
    unpack4(words.x, bias, q);
    unpack4(words.y, bias, q + 4);
}

// `bits` (8 numbers of n bits at shift `at`) of each byte.
DEVICE uint2 fields(uint2 words, int shift, u32 mask) {
    return make_uint2(words.x >> shift & mask, words.y >> shift & mask);
}

// 4 bits to the lowest bits of 4 bytes.
DEVICE u32 spread4(u32 bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }

// One bit a value of 8, of weight 16, on top of 4-bit numbers.
DEVICE uint2 with_bit4(uint2 low, u32 bits) {
    return make_uint2(low.x | spread4(bits) << 4, low.y | spread4(bits >> 4) << 4);
}

// 4 numbers of 4 bits in 4 bytes, each looked up in a table of 16 bytes.
DEVICE u32 lookup4(u32 nibbles, const u32 (&table)[4]) {
    u32 x = (nibbles | nibbles >> 4) & 0x00ff00ffu;
    x = x | x >> 8;
    const u32 low = __byte_perm(table[0], table[1], x & 0x7777u), high = __byte_perm(table[2], table[3], x & 0x7777u);
    return __byte_perm(low, high, 0x3210u | (x & 0x8888u) >> 1);
}

// Signs of 8 values, 1 = negative.
DEVICE void negate8(u32 signs, float (&q)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) q[k] = __uint_as_float(__float_as_uint(q[k]) ^ (signs >> k & 1u) << 31);
}

// --- numbers that stand alone: "blocks" of 8 --------------------------------------------------------------------------

template <class T>
struct Plain {
    using type = T;
    static constexpr int block = 8, nbytes = 8 * sizeof(T);
    static constexpr bool scaled = false, has_min = false;

    DEVICE Scale scale(const u8*, int) { return {1.f, 0.f}; }
    DEVICE void quants(const u8* b, int, float (&q)[8]) { load8((const T*)b, q); }
};

using F32 = Plain<float>;
using F16 = Plain<f16>;
using BF16 = Plain<bf16>;

// --- blocks of 32 -----------------------------------------------------------------------------------------------------

struct Q8_0 {
    static constexpr int block = 32, nbytes = 34;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), 0.f}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 w = load_pair<2>(b + 2 + at);
        unpack8(make_uint2(w.x ^ 0x80808080u, w.y ^ 0x80808080u), 128.f, q);
    }
};

struct Q4_0 {
    static constexpr int block = 32, nbytes = 18;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), 0.f}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        unpack8(fields(load_pair<2>(b + 2 + at % 16), at / 16 * 4, 0x0f0f0f0fu), 8.f, q);
    }
};

struct Q4_1 {
    static constexpr int block = 32, nbytes = 20;
    static constexpr bool scaled = true, has_min = true;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), -half_at(b + 2)}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        unpack8(fields(load_pair<4>(b + 4 + at % 16), at / 16 * 4, 0x0f0f0f0fu), 0.f, q);
    }
};

struct Q5_0 {
    static constexpr int block = 32, nbytes = 22;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), 0.f}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 low = fields(load_pair<2>(b + 6 + at % 16), at / 16 * 4, 0x0f0f0f0fu);
        unpack8(with_bit4(low, load4<2>(b + 2) >> at), 16.f, q);
    }
};

struct Q5_1 {
    static constexpr int block = 32, nbytes = 24;
    static constexpr bool scaled = true, has_min = true;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), -half_at(b + 2)}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 low = fields(load_pair<8>(b + 8 + at % 16), at / 16 * 4, 0x0f0f0f0fu);
        unpack8(with_bit4(low, load4<4>(b + 4) >> at), 0.f, q);
    }
};

struct IQ4_NL {
    static constexpr int block = 32, nbytes = 18;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int) { return {half_at(b), 0.f}; }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        look_up(fields(load_pair<2>(b + 2 + at % 16), at / 16 * 4, 0x0f0f0f0fu), q);
    }
    // Numbers of 4 bits as this type's 16 levels.
    DEVICE void look_up(uint2 nibbles, float (&q)[8]) {
        constexpr u32 levels[4] = IQ4_LEVELS_PLUS_128;
        unpack8(make_uint2(lookup4(nibbles.x, levels), lookup4(nibbles.y, levels)), 128.f, q);
    }
};

struct MXFP4 {
    static constexpr int block = 32, nbytes = 17;
    static constexpr bool scaled = true, has_min = false;

    // 2^(e - 128): half of the scale, for levels that are stored twice as large.
    DEVICE Scale scale(const u8* b, int) {
        const u32 e = b[0];
        return {__uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0.f};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        constexpr u32 levels[4] = MXFP4_LEVELS_PLUS_128;
        const uint2 nibbles = fields(load_pair<1>(b + 1 + at % 16), at / 16 * 4, 0x0f0f0f0fu);
        unpack8(make_uint2(lookup4(nibbles.x, levels), lookup4(nibbles.y, levels)), 128.f, q);
    }
};

// --- blocks of 256 ----------------------------------------------------------------------------------------------------

struct Q2_K {
    static constexpr int block = 256, nbytes = 84;
    static constexpr bool scaled = true, has_min = true;

    DEVICE Scale scale(const u8* b, int at) {
        const int s = b[at / 16];
        return {__fmul_rn(half_at(b + 80), (float)(s & 15)), __fmul_rn(half_at(b + 82), (float)(s >> 4))};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        unpack8(fields(load_pair<4>(b + 16 + at / 128 * 32 + at % 32), at / 32 % 4 * 2, 0x03030303u), 0.f, q);
    }
};

struct Q3_K {
    static constexpr int block = 256, nbytes = 110;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) {
        const int j = at / 16;
        const int low = b[96 + j % 8] >> j / 8 * 4 & 15, high = b[104 + j % 4] >> j / 4 * 2 & 3;
        return {__fmul_rn(half_at(b + 108), (float)((low | high << 4) - 32)), 0.f};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 low = fields(load_pair<2>(b + 32 + at / 128 * 32 + at % 32), at / 32 % 4 * 2, 0x03030303u);
        const uint2 high = fields(load_pair<2>(b + at % 32), at / 32, 0x01010101u);
        unpack8(make_uint2(low.x | high.x << 2, low.y | high.y << 2), 4.f, q);
    }
};

// Scale and minimum j of 8, 6 bits each in 12 bytes. By words, without branches: this is in the innermost loops.
DEVICE Scale k_scale(const u8* b, int j) {
    const u32* words = (const u32*)(b + 4);
    const u32 w0 = words[0] >> j % 4 * 8, w1 = words[1] >> j % 4 * 8, w2 = words[2] >> j % 4 * 8;
    const u32 scale = j < 4 ? w0 & 63u : (w2 & 15u) | (w0 >> 2 & 0x30u);
    const u32 min = j < 4 ? w1 & 63u : (w2 >> 4 & 15u) | (w1 >> 2 & 0x30u);
    return {__fmul_rn(half_at(b), (float)scale), __fmul_rn(half_at(b + 2), (float)min)};
}

struct Q4_K {
    static constexpr int block = 256, nbytes = 144;
    static constexpr bool scaled = true, has_min = true;

    DEVICE Scale scale(const u8* b, int at) { return k_scale(b, at / 32); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        unpack8(fields(load_pair<8>(b + 16 + at / 64 * 32 + at % 32), at / 32 % 2 * 4, 0x0f0f0f0fu), 0.f, q);
    }
};

struct Q5_K {
    static constexpr int block = 256, nbytes = 176;
    static constexpr bool scaled = true, has_min = true;

    DEVICE Scale scale(const u8* b, int at) { return k_scale(b, at / 32); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 low = fields(load_pair<8>(b + 48 + at / 64 * 32 + at % 32), at / 32 % 2 * 4, 0x0f0f0f0fu);
        const uint2 high = fields(load_pair<8>(b + 16 + at % 32), at / 32, 0x01010101u);
        unpack8(make_uint2(low.x | high.x << 4, low.y | high.y << 4), 0.f, q);
    }
};

struct Q6_K {
    static constexpr int block = 256, nbytes = 210;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) {
        return {__fmul_rn(half_at(b + 208), (float)((const i8*)b)[192 + at / 16]), 0.f};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const uint2 low = fields(load_pair<2>(b + at / 128 * 64 + at % 64), at / 64 % 2 * 4, 0x0f0f0f0fu);
        const uint2 high = fields(load_pair<2>(b + 128 + at / 128 * 32 + at % 32), at / 32 % 4 * 2, 0x03030303u);
        unpack8(make_uint2(low.x | high.x << 4, low.y | high.y << 4), 32.f, q);
    }
};

struct IQ4_XS {
    static constexpr int block = 256, nbytes = 136;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) {
        const int j = at / 32;
        const int low = b[4 + j / 2] >> j % 2 * 4 & 15, high = *(const u16*)(b + 2) >> j * 2 & 3;
        return {__fmul_rn(half_at(b), (float)((low | high << 4) - 32)), 0.f};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        IQ4_NL::look_up(fields(load_pair<8>(b + 8 + at / 32 * 16 + at % 16), at / 16 % 2 * 4, 0x0f0f0f0fu), q);
    }
};

// --- 8 (or 4 and 4) values at a time from a grid, with signs apart -----------------------------------------------------

// d * (0.5 + s) * factor, rounded twice.
DEVICE Scale grid_scale(const u8* b, int s, float factor) {
    return {__fmul_rn(__fmul_rn(half_at(b), 0.5f + s), factor), 0.f};
}

struct IQ2_XXS {
    static constexpr int block = 256, nbytes = 66;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) { return grid_scale(b, load4<2>(b + 6 + at / 32 * 8) >> 28, 0.25f); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        unpack8(IQ2_XXS_GRID[b[2 + at / 32 * 8 + at / 8 % 4]], 0.f, q);
        negate8(IQ_SIGNS[load4<2>(b + 6 + at / 32 * 8) >> at / 8 % 4 * 7 & 127u], q);
    }
};

struct IQ2_XS {
    static constexpr int block = 256, nbytes = 74;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) { return grid_scale(b, b[66 + at / 32] >> at / 16 % 2 * 4 & 15, 0.25f); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const u32 entry = *(const u16*)(b + 2 + at / 8 * 2);
        unpack8(IQ2_XS_GRID[entry & 511u], 0.f, q);
        negate8(IQ_SIGNS[entry >> 9], q);
    }
};

struct IQ2_S {
    static constexpr int block = 256, nbytes = 82;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) { return grid_scale(b, b[74 + at / 32] >> at / 16 % 2 * 4 & 15, 0.25f); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const int e = at / 8;
        unpack8(IQ2_S_GRID[b[2 + e] | (b[66 + e / 4] >> e % 4 * 2 & 3) << 8], 0.f, q);
        negate8(b[34 + e], q);
    }
};

struct IQ3_XXS {
    static constexpr int block = 256, nbytes = 98;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) { return grid_scale(b, load4<2>(b + 66 + at / 32 * 4) >> 28, 0.5f); }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const u8* i = b + 2 + at / 4;
        unpack8(make_uint2(IQ3_XXS_GRID[i[0]], IQ3_XXS_GRID[i[1]]), 0.f, q);
        negate8(IQ_SIGNS[load4<2>(b + 66 + at / 32 * 4) >> at / 8 % 4 * 7 & 127u], q);
    }
};

struct IQ3_S {
    static constexpr int block = 256, nbytes = 110;
    static constexpr bool scaled = true, has_min = false;

    DEVICE Scale scale(const u8* b, int at) {
        const int s = b[106 + at / 64] >> at / 32 % 2 * 4 & 15;
        return {__fmul_rn(half_at(b), (float)(1 + 2 * s)), 0.f};
    }
    DEVICE void quants(const u8* b, int at, float (&q)[8]) {
        const u8* i = b + 2 + at / 4;
        const u32 high = b[66 + at / 32] >> at / 4 % 8;
        unpack8(make_uint2(IQ3_S_GRID[i[0] | (high & 1u) << 8], IQ3_S_GRID[i[1] | (high & 2u) << 7]), 0.f, q);
        negate8(b[74 + at / 8], q);
    }
};

// --- rows -------------------------------------------------------------------------------------------------------------

// The 8 values from `at` on (a multiple of 8) of one block.
template <class Q>
DEVICE void dequant8_block(const u8* b, int at, float (&y)[8]) {
    Q::quants(b, at, y);
    if constexpr (Q::scaled) {
        const Scale s = Q::scale(b, at);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            y[k] = __fmul_rn(y[k], s.d);
            if constexpr (Q::has_min) y[k] = __fsub_rn(y[k], s.m);
        }
    }
}

// The 8 values from i on (a multiple of 8) of a row.
template <class Q>
DEVICE void dequant8(const u8* row, int i, float (&y)[8]) {
    dequant8_block<Q>(row + (u64)(i / Q::block) * Q::nbytes, i % Q::block, y);
}
