// Writing numbers to the KV cache. Quantized ones have the bits of gguf.quants.quantize.
// T_store(cell, i, x, n): n numbers (32, or fewer of an element type) to the place of number i, a multiple of 32.
#include "common.h"

inline void F32_store(__global u8 *cell, int i, __global const float *x, int n) {
    for (int k = 0; k < n; k++) ((__global float *)cell)[i + k] = x[k];
}

inline void F16_store(__global u8 *cell, int i, __global const float *x, int n) {
    for (int k = 0; k < n; k++) vstore_half_rte(x[k], i + k, (__global half *)cell);
}

inline void Q8_0_store(__global u8 *cell, int i, __global const float *x, int n) {
    __global u8 *b = cell + i / 32 * 34;
    float most = 0.f;
    for (int k = 0; k < 32; k++) most = fmax(most, fabs(x[k]));
    const float d = most / 127.f, inverse = d == 0.f ? 0.f : 1.f / d;
    vstore_half_rte(d, 0, (__global half *)b);
    for (int k = 0; k < 32; k++) ((__global char *)b)[2 + k] = convert_char_sat(round(x[k] * inverse));
}

inline u8 q4_0_of(float x, float inverse) { return min((int)(x * inverse + 8.5f), 15); }

inline void Q4_0_store(__global u8 *cell, int i, __global const float *x, int n) {
    __global u8 *b = cell + i / 32 * 18;
    float most = 0.f;  // the first of the greatest
    for (int k = 0; k < 32; k++) most = fabs(x[k]) > fabs(most) ? x[k] : most;
    const float d = most / -8.f, inverse = d == 0.f ? 0.f : 1.f / d;
    vstore_half_rte(d, 0, (__global half *)b);
    for (int k = 0; k < 16; k++) b[2 + k] = q4_0_of(x[k], inverse) | q4_0_of(x[k + 16], inverse) << 4;
}
