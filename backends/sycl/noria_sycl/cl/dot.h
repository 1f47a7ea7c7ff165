// Products of quantized rows with one input row, on a CPU: whole numbers of 16 bits, multiplied in pairs.
//
// The input is rounded to 16 bits, each 32 numbers with a scale of their own. That error is 5e-10 of the input's power,
// a thousandth of what 16-bit floats would have, and one instruction then does the work of four.
#include "quants.h"

typedef struct {
    __local short *q;          // numbers
    __local float *d;          // scale of each 32
    __local float *sums;       // sum of each 16
    __global const float *x;   // as it was
} Input;

#define INPUT_NBYTES(n) ((n) * 2 + (n) / 32 * 4 + (n) / 16 * 4)

inline Input input_at(__local u8 *memory, int n) {
    const Input input = {(__local short *)memory, (__local float *)(memory + n * 2),
                         (__local float *)(memory + n * 2 + n / 32 * 4), 0};
    return input;
}

inline void fill(Input *input, __global const float *x, int n) {
    input->x = x;
    for (int i = 0; i < n; i += 32) {
        const float8 a = LOAD8_GLOBAL(x + i), b = LOAD8_GLOBAL(x + i + 8);
        const float8 c = LOAD8_GLOBAL(x + i + 16), e = LOAD8_GLOBAL(x + i + 24);
        const float most = max8(fmax(fmax(fabs(a), fabs(b)), fmax(fabs(c), fabs(e))));
        const float inverse = most > 0.f ? 32767.f / most : 0.f;
        *(__local short16_any *)(input->q + i) = convert_short16_rte((float16)(a, b) * inverse);
        *(__local short16_any *)(input->q + i + 16) = convert_short16_rte((float16)(c, e) * inverse);
        input->d[i / 32] = most / 32767.f;
        input->sums[i / 16] = sum8(a + b), input->sums[i / 16 + 1] = sum8(c + e);
    }
}

// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]: one instruction where the compiler sees it, or is told.
#if defined(__AVX2__) && defined(__has_builtin)
#if __has_builtin(__builtin_ia32_pmaddwd256)
#define HAS_PMADDWD
typedef short short16_x86 __attribute__((vector_size(32)));
#endif
#endif
inline int8 multiply_pairs(short16 a, short16 b) {
#ifdef HAS_PMADDWD
    return __builtin_astype(
        __builtin_ia32_pmaddwd256(__builtin_astype(a, short16_x86), __builtin_astype(b, short16_x86)), int8);
#else
    const int16 p = convert_int16(a) * convert_int16(b);
    return p.even + p.odd;
#endif
}
#define PAIRS(quants, x) multiply_pairs(convert_short16(quants), *(__local const short16_any *)(x))

// --- rows -------------------------------------------------------------------------------------------------------------

// Of any type whose blocks hold whole numbers: 32 at a time.
#define DEFINE_DOT(Q)                                                                                     \
    inline float Q##_dot(__global const u8 *row, const Input *input, int n) {                             \
        float8 sum = 0.f;                                                                                 \
        float less = 0.f;                                                                                 \
        for (int i = 0; i < n; i += Q##_BLOCK, row += Q##_NBYTES)                                         \
            for (int at = 0; at < Q##_BLOCK; at += 32) {                                                  \
                const int g = (i + at) / 32;                                                              \
                const float d = input->d[g];                                                              \
                __local const short *x = input->q + i + at;                                               \
                const Quants q = Q##_quants(row, at);                                                     \
                const float4 s = Q##_scales(row, at);                                                     \
                const int8 lo = PAIRS(q.lo, x), hi = PAIRS(q.hi, x + 16);                                 \
                if (Q##_HALVES) {                                                                         \
                    sum = fma(convert_float8(lo), (float8)(s.x * d), sum);                                \
                    sum = fma(convert_float8(hi), (float8)(s.y * d), sum);                                \
                } else {                                                                                  \
                    sum = fma(convert_float8(lo + hi), (float8)(s.x * d), sum);                           \
                }                                                                                         \
                less = fma(s.z, input->sums[2 * g], fma(s.w, input->sums[2 * g + 1], less));              \
            }                                                                                             \
        return sum8(sum) - less;                                                                          \
    }
DEFINE_DOT(Q8_0)
DEFINE_DOT(Q4_0)
DEFINE_DOT(Q4_1)
DEFINE_DOT(Q5_0)
DEFINE_DOT(Q5_1)
DEFINE_DOT(IQ4_NL)
DEFINE_DOT(MXFP4)
DEFINE_DOT(Q2_K)
DEFINE_DOT(Q3_K)
DEFINE_DOT(IQ4_XS)
DEFINE_DOT(IQ2_XXS)
DEFINE_DOT(IQ2_XS)
DEFINE_DOT(IQ2_S)
DEFINE_DOT(IQ3_XXS)
DEFINE_DOT(IQ3_S)

// Types of which most models are made: the scales of a block as one vector.

inline float8 scaled_sum(float8 sum, int8 products, float scale) {
    return fma(convert_float8(products), (float8)scale, sum);
}

// 64 values: two groups of 32 with scales of their own.
#define ADD_64(Q, at, d0, d1)                                                                            \
    {                                                                                                    \
        const Quants a = Q##_quants(row, at), b = Q##_quants(row, at + 32);                              \
        sum = scaled_sum(sum, PAIRS(a.lo, x + at) + PAIRS(a.hi, x + at + 16), d0);                       \
        sum = scaled_sum(sum, PAIRS(b.lo, x + at + 32) + PAIRS(b.hi, x + at + 48), d1);                  \
    }
#define DEFINE_K_DOT(Q)                                                                                  \
    inline float Q##_dot(__global const u8 *row, const Input *input, int n) {                            \
        float8 sum = 0.f, less = 0.f;                                                                    \
        for (int i = 0; i < n; i += 256, row += Q##_NBYTES) {                                            \
            __local const short *x = input->q + i;                                                       \
            const KScales k = k_scales(row);                                                             \
            const float8 d = convert_float8(as_uchar8((uint2)(k.scales[0], k.scales[1]))) *              \
                             (LOAD8_LOCAL(input->d + i / 32) * half_at(row));                            \
            const float8 m = convert_float8(as_uchar8((uint2)(k.mins[0], k.mins[1]))) * half_at(row + 2); \
            const float16 sums = (float16)(LOAD8_LOCAL(input->sums + i / 16), LOAD8_LOCAL(input->sums + i / 16 + 8)); \
            less = fma(m, sums.even + sums.odd, less);                                                   \
            ADD_64(Q, 0, d.s0, d.s1)                                                                     \
            ADD_64(Q, 64, d.s2, d.s3)                                                                    \
            ADD_64(Q, 128, d.s4, d.s5)                                                                   \
            ADD_64(Q, 192, d.s6, d.s7)                                                                   \
        }                                                                                                \
        return sum8(sum - less);                                                                         \
    }
DEFINE_K_DOT(Q4_K)
DEFINE_K_DOT(Q5_K)

inline float Q6_K_dot(__global const u8 *row, const Input *input, int n) {
    float8 sum = 0.f;
    for (int i = 0; i < n; i += 256, row += Q6_K_NBYTES) {
        __local const short *x = input->q + i;
        const char16 scales = as_char16(*(__global const uchar16_any *)(row + 192));
        const float8 d = LOAD8_LOCAL(input->d + i / 32) * half_at(row + 208);
        const float8 lo = convert_float8(scales.even) * d, hi = convert_float8(scales.odd) * d;
#define ADD_32(at, d0, d1)                                      \
    {                                                           \
        const Quants q = Q6_K_quants(row, at);                  \
        sum = scaled_sum(sum, PAIRS(q.lo, x + at), d0);         \
        sum = scaled_sum(sum, PAIRS(q.hi, x + at + 16), d1);    \
    }
        ADD_32(0, lo.s0, hi.s0)
        ADD_32(32, lo.s1, hi.s1)
        ADD_32(64, lo.s2, hi.s2)
        ADD_32(96, lo.s3, hi.s3)
        ADD_32(128, lo.s4, hi.s4)
        ADD_32(160, lo.s5, hi.s5)
        ADD_32(192, lo.s6, hi.s6)
        ADD_32(224, lo.s7, hi.s7)
    }
    return sum8(sum);
}

// Numbers that stand alone, with the input as it was.
#define DEFINE_PLAIN_DOT(Q)                                                                   \
    inline float Q##_dot(__global const u8 *row, const Input *input, int n) {                 \
        float8 sum[4] = {0.f, 0.f, 0.f, 0.f};                                                 \
        for (int i = 0; i < n; i += 32)                                                       \
            for (int k = 0; k < 4; k++)                                                       \
                sum[k] = fma(Q##_eight(row + (u64)(i / 8 + k) * (Q##_NBYTES / 4)),            \
                             LOAD8_GLOBAL(input->x + i + 8 * k), sum[k]);                     \
        return sum8((sum[0] + sum[1]) + (sum[2] + sum[3]));                                   \
    }
DEFINE_PLAIN_DOT(F32)
DEFINE_PLAIN_DOT(F16)
DEFINE_PLAIN_DOT(BF16)
