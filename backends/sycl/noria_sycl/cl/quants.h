// Dequantizers: one a type, used by every kernel. In f32 they give the bits of gguf.quants.dequantize.
//
// A type `Q` has
//     Q_BLOCK, Q_NBYTES   values a block, and its bytes
//     Q_HALVES            whether each 16 values have a scale of their own, not each 32
//     Q_quants(b, at)     the 32 values from `at` on (a multiple of 32) in the block at `b`, as whole numbers q
//     Q_scales(b, at)     (d, d', m, m') of their two halves: a value is q * d - m
//     Q_values(row, i, y) the 32 values from `i` on of a row, as floats
// Types whose numbers stand alone (F32, F16, BF16) have Q_values only, and "blocks" of 32.
//
// Rows begin on 16 bytes where their size allows it. Products and differences are rounded one by one, as NumPy does.
// Source: ggml-common.h, the block_* structs; gguf-py, gguf/quants.py.
#include "common.h"
#include "iq_tables.h"

typedef struct {
    char16 lo, hi;
} Quants;

// --- reading blocks ---------------------------------------------------------------------------------------------------

// 16 or 8 bytes as words, from an address that is a multiple of 1, 2, 4 or 8; that of blocks follows from their size.
#if GROUP == 1
#define WORDS4(p) as_uint4(*(__global const uchar16_any *)(p))
#define LOAD16_1(p) WORDS4(p)
#define LOAD16_2(p) WORDS4(p)
#define LOAD16_4(p) WORDS4(p)
#define LOAD16_8(p) WORDS4(p)
#define HALF_AT(p) half_at(p)
#else
#define LOAD16_1(p) as_uint4(vload16(0, p))
#define LOAD16_2(p) as_uint4(vload8(0, (__global const u16 *)(p)))
#define LOAD16_4(p) vload4(0, (__global const u32 *)(p))
#define LOAD16_8(p) as_uint4(vload2(0, (__global const u64 *)(p)))
#define HALF_AT(p) vload_half(0, (__global const half *)(p))
#endif
#define LOAD4_2(p) as_uint(vload2(0, (__global const u16 *)(p)))
#define LOAD4_4(p) (*(__global const u32 *)(p))

#define LOW4 0x0f0f0f0fu

// One bit of each of 4 bytes from the lowest 4 bits, in the place of bit 0.
inline u32 spread4(u32 bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }

// 16 bits as bit 4 of 16 bytes.
inline uint4 bit4_of(u32 bits) {
    return (uint4)(spread4(bits), spread4(bits >> 4), spread4(bits >> 8), spread4(bits >> 12)) << 4;
}

// A table of 16 signed bytes, looked up by 16 numbers of 4 bits.
#if defined(__SSSE3__) && defined(__has_builtin)
#if __has_builtin(__builtin_ia32_pshufb128)
#define HAS_PSHUFB
typedef char char16_x86 __attribute__((vector_size(16)));
#endif
#endif
inline char16 look_up(__constant const char *table, uint4 nibbles) {
    const uchar16 i = as_uchar16(nibbles);
#ifdef HAS_PSHUFB
    return __builtin_astype(__builtin_ia32_pshufb128(__builtin_astype(vload16(0, table), char16_x86),
                                                     __builtin_astype(i, char16_x86)), char16);
#elif GROUP == 1
    return shuffle(vload16(0, table), i);
#else
    return (char16)(table[i.s0], table[i.s1], table[i.s2], table[i.s3], table[i.s4], table[i.s5], table[i.s6],
                    table[i.s7], table[i.s8], table[i.s9], table[i.sa], table[i.sb], table[i.sc], table[i.sd],
                    table[i.se], table[i.sf]);
#endif
}

// The lower and the upper 4 bits of 16 bytes, as 32 values in this order.
#define NIBBLES(words) as_char16((words) & LOW4), as_char16((words) >> 4 & LOW4)

// --- blocks of 32 -----------------------------------------------------------------------------------------------------

#define SAME_SCALE(d) (float4)(d, d, 0.f, 0.f)
#define SAME_SCALES(d, m) (float4)(d, d, m, m)

#define Q8_0_BLOCK 32
#define Q8_0_NBYTES 34
#define Q8_0_HALVES 0
inline float4 Q8_0_scales(__global const u8 *b, int at) { return SAME_SCALE(HALF_AT(b)); }
inline Quants Q8_0_quants(__global const u8 *b, int at) {
    const Quants q = {as_char16(LOAD16_2(b + 2)), as_char16(LOAD16_2(b + 18))};
    return q;
}

#define Q4_0_BLOCK 32
#define Q4_0_NBYTES 18
#define Q4_0_HALVES 0
inline float4 Q4_0_scales(__global const u8 *b, int at) { return SAME_SCALE(HALF_AT(b)); }
inline Quants Q4_0_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_2(b + 2);
    Quants q = {NIBBLES(w)};
    q.lo -= (char)8, q.hi -= (char)8;
    return q;
}

#define Q4_1_BLOCK 32
#define Q4_1_NBYTES 20
#define Q4_1_HALVES 0
inline float4 Q4_1_scales(__global const u8 *b, int at) { return SAME_SCALES(HALF_AT(b), -HALF_AT(b + 2)); }
inline Quants Q4_1_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_4(b + 4);
    const Quants q = {NIBBLES(w)};
    return q;
}

#define Q5_0_BLOCK 32
#define Q5_0_NBYTES 22
#define Q5_0_HALVES 0
inline float4 Q5_0_scales(__global const u8 *b, int at) { return SAME_SCALE(HALF_AT(b)); }
inline Quants Q5_0_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_2(b + 6);
    const u32 high = LOAD4_2(b + 2);
    Quants q = {as_char16((w & LOW4) | bit4_of(high)), as_char16((w >> 4 & LOW4) | bit4_of(high >> 16))};
    q.lo -= (char)16, q.hi -= (char)16;
    return q;
}

#define Q5_1_BLOCK 32
#define Q5_1_NBYTES 24
#define Q5_1_HALVES 0
inline float4 Q5_1_scales(__global const u8 *b, int at) { return SAME_SCALES(HALF_AT(b), -HALF_AT(b + 2)); }
inline Quants Q5_1_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_8(b + 8);
    const u32 high = LOAD4_4(b + 4);
    const Quants q = {as_char16((w & LOW4) | bit4_of(high)), as_char16((w >> 4 & LOW4) | bit4_of(high >> 16))};
    return q;
}

#define IQ4_NL_BLOCK 32
#define IQ4_NL_NBYTES 18
#define IQ4_NL_HALVES 0
inline float4 IQ4_NL_scales(__global const u8 *b, int at) { return SAME_SCALE(HALF_AT(b)); }
inline Quants IQ4_NL_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_2(b + 2);
    const Quants q = {look_up(IQ4_LEVELS, w & LOW4), look_up(IQ4_LEVELS, w >> 4 & LOW4)};
    return q;
}

#define MXFP4_BLOCK 32
#define MXFP4_NBYTES 17
#define MXFP4_HALVES 0
// 2^(e - 128): half of the scale, for levels that are stored twice as large.
inline float4 MXFP4_scales(__global const u8 *b, int at) {
    const u32 e = b[0];
    return SAME_SCALE(as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23));
}
inline Quants MXFP4_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_1(b + 1);
    const Quants q = {look_up(MXFP4_LEVELS, w & LOW4), look_up(MXFP4_LEVELS, w >> 4 & LOW4)};
    return q;
}

// --- blocks of 256 ----------------------------------------------------------------------------------------------------

#define Q2_K_BLOCK 256
#define Q2_K_NBYTES 84
#define Q2_K_HALVES 1
inline float4 Q2_K_scales(__global const u8 *b, int at) {
    const int s0 = b[at / 16], s1 = b[at / 16 + 1];
    const float d = HALF_AT(b + 80), m = HALF_AT(b + 82);
    return (float4)(d * (s0 & 15), d * (s1 & 15), m * (s0 >> 4), m * (s1 >> 4));
}
inline Quants Q2_K_quants(__global const u8 *b, int at) {
    __global const u8 *p = b + 16 + at / 128 * 32;
    const u32 shift = at / 32 % 4 * 2;
    const Quants q = {as_char16(LOAD16_4(p) >> shift & 0x03030303u), as_char16(LOAD16_4(p + 16) >> shift & 0x03030303u)};
    return q;
}

#define Q3_K_BLOCK 256
#define Q3_K_NBYTES 110
#define Q3_K_HALVES 1
inline float Q3_K_scale(__global const u8 *b, int j) {
    const int low = b[96 + j % 8] >> j / 8 * 4 & 15, high = b[104 + j % 4] >> j / 4 * 2 & 3;
    return HALF_AT(b + 108) * (float)((low | high << 4) - 32);
}
inline float4 Q3_K_scales(__global const u8 *b, int at) {
    return (float4)(Q3_K_scale(b, at / 16), Q3_K_scale(b, at / 16 + 1), 0.f, 0.f);
}
inline char16 Q3_K_half(__global const u8 *low, __global const u8 *high, u32 shift, u32 bit) {
    return as_char16((LOAD16_2(low) >> shift & 0x03030303u) | (LOAD16_2(high) >> bit & 0x01010101u) << 2) - (char)4;
}
inline Quants Q3_K_quants(__global const u8 *b, int at) {
    __global const u8 *low = b + 32 + at / 128 * 32;
    const u32 shift = at / 32 % 4 * 2, bit = at / 32;
    const Quants q = {Q3_K_half(low, b, shift, bit), Q3_K_half(low + 16, b + 16, shift, bit)};
    return q;
}

// The 8 scales and the 8 minimums of a block, 6 bits each in 12 bytes, as bytes.
typedef struct {
    u32 scales[2], mins[2];
} KScales;

inline KScales k_scales(__global const u8 *b) {
    const u32 w0 = LOAD4_4(b + 4), w1 = LOAD4_4(b + 8), w2 = LOAD4_4(b + 12);
    const KScales s = {{w0 & 0x3f3f3f3fu, (w2 & LOW4) | (w0 >> 2 & 0x30303030u)},
                       {w1 & 0x3f3f3f3fu, (w2 >> 4 & LOW4) | (w1 >> 2 & 0x30303030u)}};
    return s;
}
inline float4 k_scale(__global const u8 *b, int j) {
    const KScales s = k_scales(b);
    const u32 shift = j % 4 * 8;
    const float d = HALF_AT(b) * (float)((j < 4 ? s.scales[0] : s.scales[1]) >> shift & 63u);
    const float m = HALF_AT(b + 2) * (float)((j < 4 ? s.mins[0] : s.mins[1]) >> shift & 63u);
    return SAME_SCALES(d, m);
}

#define Q4_K_BLOCK 256
#define Q4_K_NBYTES 144
#define Q4_K_HALVES 0
inline float4 Q4_K_scales(__global const u8 *b, int at) { return k_scale(b, at / 32); }
inline Quants Q4_K_quants(__global const u8 *b, int at) {
    __global const u8 *p = b + 16 + at / 64 * 32;
    const u32 shift = at / 32 % 2 * 4;
    const Quants q = {as_char16(LOAD16_8(p) >> shift & LOW4), as_char16(LOAD16_8(p + 16) >> shift & LOW4)};
    return q;
}

#define Q5_K_BLOCK 256
#define Q5_K_NBYTES 176
#define Q5_K_HALVES 0
inline float4 Q5_K_scales(__global const u8 *b, int at) { return k_scale(b, at / 32); }
inline char16 Q5_K_half(__global const u8 *low, __global const u8 *high, u32 shift, u32 bit) {
    return as_char16((LOAD16_8(low) >> shift & LOW4) | (LOAD16_8(high) >> bit & 0x01010101u) << 4);
}
inline Quants Q5_K_quants(__global const u8 *b, int at) {
    __global const u8 *low = b + 48 + at / 64 * 32;
    const u32 shift = at / 32 % 2 * 4, bit = at / 32;
    const Quants q = {Q5_K_half(low, b + 16, shift, bit), Q5_K_half(low + 16, b + 32, shift, bit)};
    return q;
}

#define Q6_K_BLOCK 256
#define Q6_K_NBYTES 210
#define Q6_K_HALVES 1
inline float4 Q6_K_scales(__global const u8 *b, int at) {
    const float d = HALF_AT(b + 208);
    __global const char *s = (__global const char *)b + 192 + at / 16;
    return (float4)(d * s[0], d * s[1], 0.f, 0.f);
}
inline char16 Q6_K_half(__global const u8 *low, __global const u8 *high, u32 shift, u32 bits) {
    return as_char16((LOAD16_2(low) >> shift & LOW4) | (LOAD16_2(high) >> bits & 0x03030303u) << 4) - (char)32;
}
inline Quants Q6_K_quants(__global const u8 *b, int at) {
    __global const u8 *low = b + at / 128 * 64 + at / 32 % 2 * 32, *high = b + 128 + at / 128 * 32;
    const u32 shift = at / 64 % 2 * 4, bits = at / 32 % 4 * 2;
    const Quants q = {Q6_K_half(low, high, shift, bits), Q6_K_half(low + 16, high + 16, shift, bits)};
    return q;
}

#define IQ4_XS_BLOCK 256
#define IQ4_XS_NBYTES 136
#define IQ4_XS_HALVES 0
inline float4 IQ4_XS_scales(__global const u8 *b, int at) {
    const int j = at / 32;
    const int low = b[4 + j / 2] >> j % 2 * 4 & 15, high = *(__global const u16 *)(b + 2) >> j * 2 & 3;
    return SAME_SCALE(HALF_AT(b) * (float)((low | high << 4) - 32));
}
inline Quants IQ4_XS_quants(__global const u8 *b, int at) {
    const uint4 w = LOAD16_8(b + 8 + at / 2);
    const Quants q = {look_up(IQ4_LEVELS, w & LOW4), look_up(IQ4_LEVELS, w >> 4 & LOW4)};
    return q;
}

// --- 8 (or 4 and 4) values at a time from a grid, with signs apart -----------------------------------------------------

// d * (0.5 + s) * factor, rounded twice.
inline float grid_scale(__global const u8 *b, u32 s, float factor) { return HALF_AT(b) * (0.5f + (float)s) * factor; }

// 8 bytes of a grid, negative where a bit of `signs` is set.
inline char8 with_signs(u64 grid, u32 signs) {
    const char8 mask = as_char8((uint2)(spread4(signs), spread4(signs >> 4)) * 255u);  // 0 or -1
    return (as_char8(grid) ^ mask) - mask;
}
#define FOUR_OF(eight)                                                                        \
    {(char16)(eight(b, at), eight(b, at + 8)), (char16)(eight(b, at + 16), eight(b, at + 24))}

#define IQ2_XXS_BLOCK 256
#define IQ2_XXS_NBYTES 66
#define IQ2_XXS_HALVES 0
inline float4 IQ2_XXS_scales(__global const u8 *b, int at) {
    return SAME_SCALE(grid_scale(b, LOAD4_2(b + 6 + at / 32 * 8) >> 28, 0.25f));
}
inline char8 IQ2_XXS_eight(__global const u8 *b, int at) {
    const u32 signs = IQ_SIGNS[LOAD4_2(b + 6 + at / 32 * 8) >> at / 8 % 4 * 7 & 127u];
    return with_signs(IQ2_XXS_GRID[b[2 + at / 32 * 8 + at / 8 % 4]], signs);
}
inline Quants IQ2_XXS_quants(__global const u8 *b, int at) {
    const Quants q = FOUR_OF(IQ2_XXS_eight);
    return q;
}

#define IQ2_XS_BLOCK 256
#define IQ2_XS_NBYTES 74
#define IQ2_XS_HALVES 1
inline float4 IQ2_XS_scales(__global const u8 *b, int at) {
    const u32 s = b[66 + at / 32];
    return (float4)(grid_scale(b, s & 15u, 0.25f), grid_scale(b, s >> 4, 0.25f), 0.f, 0.f);
}
inline char8 IQ2_XS_eight(__global const u8 *b, int at) {
    const u32 entry = *(__global const u16 *)(b + 2 + at / 8 * 2);
    return with_signs(IQ2_XS_GRID[entry & 511u], IQ_SIGNS[entry >> 9]);
}
inline Quants IQ2_XS_quants(__global const u8 *b, int at) {
    const Quants q = FOUR_OF(IQ2_XS_eight);
    return q;
}

#define IQ2_S_BLOCK 256
#define IQ2_S_NBYTES 82
#define IQ2_S_HALVES 1
inline float4 IQ2_S_scales(__global const u8 *b, int at) {
    const u32 s = b[74 + at / 32];
    return (float4)(grid_scale(b, s & 15u, 0.25f), grid_scale(b, s >> 4, 0.25f), 0.f, 0.f);
}
inline char8 IQ2_S_eight(__global const u8 *b, int at) {
    const int e = at / 8;
    return with_signs(IQ2_S_GRID[b[2 + e] | (b[66 + e / 4] >> e % 4 * 2 & 3) << 8], b[34 + e]);
}
inline Quants IQ2_S_quants(__global const u8 *b, int at) {
    const Quants q = FOUR_OF(IQ2_S_eight);
    return q;
}

#define IQ3_XXS_BLOCK 256
#define IQ3_XXS_NBYTES 98
#define IQ3_XXS_HALVES 0
inline float4 IQ3_XXS_scales(__global const u8 *b, int at) {
    return SAME_SCALE(grid_scale(b, LOAD4_2(b + 66 + at / 32 * 4) >> 28, 0.5f));
}
inline char8 IQ3_XXS_eight(__global const u8 *b, int at) {
    __global const u8 *i = b + 2 + at / 4;
    const u32 signs = IQ_SIGNS[LOAD4_2(b + 66 + at / 32 * 4) >> at / 8 % 4 * 7 & 127u];
    return with_signs(IQ3_XXS_GRID[i[0]] | (u64)IQ3_XXS_GRID[i[1]] << 32, signs);
}
inline Quants IQ3_XXS_quants(__global const u8 *b, int at) {
    const Quants q = FOUR_OF(IQ3_XXS_eight);
    return q;
}

#define IQ3_S_BLOCK 256
#define IQ3_S_NBYTES 110
#define IQ3_S_HALVES 0
inline float4 IQ3_S_scales(__global const u8 *b, int at) {
    const int s = b[106 + at / 64] >> at / 32 % 2 * 4 & 15;
    return SAME_SCALE(HALF_AT(b) * (float)(1 + 2 * s));
}
inline char8 IQ3_S_eight(__global const u8 *b, int at) {
    __global const u8 *i = b + 2 + at / 4;
    const u32 high = b[66 + at / 32] >> at / 4 % 8;
    const u64 grid = IQ3_S_GRID[i[0] | (high & 1u) << 8] | (u64)IQ3_S_GRID[i[1] | (high & 2u) << 7] << 32;
    return with_signs(grid, b[74 + at / 8]);
}
inline Quants IQ3_S_quants(__global const u8 *b, int at) {
    const Quants q = FOUR_OF(IQ3_S_eight);
    return q;
}

// --- values -----------------------------------------------------------------------------------------------------------

#define DEFINE_VALUES(Q)                                                        \
    inline void Q##_values(__global const u8 *row, int i, float8 *y) {          \
        __global const u8 *b = row + (u64)(i / Q##_BLOCK) * Q##_NBYTES;         \
        const int at = i % Q##_BLOCK;                                           \
        const Quants q = Q##_quants(b, at);                                     \
        const float4 s = Q##_scales(b, at);                                     \
        y[0] = convert_float8(q.lo.lo) * s.x - s.z;                             \
        y[1] = convert_float8(q.lo.hi) * s.x - s.z;                             \
        y[2] = convert_float8(q.hi.lo) * s.y - s.w;                             \
        y[3] = convert_float8(q.hi.hi) * s.y - s.w;                             \
    }
DEFINE_VALUES(Q8_0)
DEFINE_VALUES(Q4_0)
DEFINE_VALUES(Q4_1)
DEFINE_VALUES(Q5_0)
DEFINE_VALUES(Q5_1)
DEFINE_VALUES(IQ4_NL)
DEFINE_VALUES(MXFP4)
DEFINE_VALUES(Q2_K)
DEFINE_VALUES(Q3_K)
DEFINE_VALUES(Q4_K)
DEFINE_VALUES(Q5_K)
DEFINE_VALUES(Q6_K)
DEFINE_VALUES(IQ4_XS)
DEFINE_VALUES(IQ2_XXS)
DEFINE_VALUES(IQ2_XS)
DEFINE_VALUES(IQ2_S)
DEFINE_VALUES(IQ3_XXS)
DEFINE_VALUES(IQ3_S)

#define F32_BLOCK 32
#define F32_NBYTES 128
inline float8 F32_eight(__global const u8 *p) { return LOAD8_GLOBAL(p); }

#define F16_BLOCK 32
#define F16_NBYTES 64
inline float8 F16_eight(__global const u8 *p) { return half8_at(p); }

#define BF16_BLOCK 32
#define BF16_NBYTES 64
inline float8 BF16_eight(__global const u8 *p) {
    return as_float8(convert_uint8(USHORT8_AT(p)) << 16);
}

#define DEFINE_PLAIN_VALUES(Q)                                                  \
    inline void Q##_values(__global const u8 *row, int i, float8 *y) {          \
        for (int k = 0; k < 4; k++) y[k] = Q##_eight(row + (u64)(i / 8 + k) * (Q##_NBYTES / 4)); \
    }
DEFINE_PLAIN_VALUES(F32)
DEFINE_PLAIN_VALUES(F16)
DEFINE_PLAIN_VALUES(BF16)
