// Products with weights on a CPU, where one item is a work group. Macros: QUANT, and QUANT1 and QUANT2 for more of them.
#include "dot.h"
#include "panel.h"

// Numbers [first, end) of each row of out = x @ W.T + bias, or += that.
#define DEFINE_FEW(name, Q)                                                                                      \
    inline void name(__global float *out, __global const u8 *w, __global const float *x, __global const float *bias, \
                     int n, int n_out, int n_in, int accumulate, int first, int end, __local u8 *memory) {       \
        Input input = input_at(memory, n_in);                                                                    \
        const u64 row_nbytes = (u64)(n_in / JOIN(Q, _BLOCK)) * JOIN(Q, _NBYTES);                                 \
        for (int r = 0; r < n && first < end; r++) {                                                             \
            fill(&input, x + (u64)r * n_in, n_in);                                                               \
            for (int c = first; c < end; c++) {                                                                  \
                float y = JOIN(Q, _dot)(w + c * row_nbytes, &input, n_in) + (bias ? bias[c] : 0.f);              \
                __global float *to = out + (u64)r * n_out + c;                                                   \
                *to = accumulate ? *to + y : y;                                                                  \
            }                                                                                                    \
        }                                                                                                        \
    }
DEFINE_FEW(few, QUANT)

#define TENSORS(i)                                                                                              \
    __global float *out##i, u64 out##i##_at, __global const u8 *w##i, u64 w##i##_at, __global const float *bias##i, \
        u64 bias##i##_at, int n_out##i

// A few rows.
__kernel void multiply_few(TENSORS(0), __global const float *x, u64 x_at, int n, int n_in, int accumulate,
                           __local u8 *memory) {
    const int g = get_global_id(0), n_group = get_global_size(0);
    few(AT(float, out0), AT(const u8, w0), AT(const float, x), OPTIONAL(const float, bias0), n, n_out0, n_in, accumulate,
        (u64)g * n_out0 / n_group, (u64)(g + 1) * n_out0 / n_group, memory);
}

#ifdef QUANT1
DEFINE_FEW(few1, QUANT1)
DEFINE_FEW(few2, QUANT2)

// The same with three weights.
__kernel void multiply_few_3(TENSORS(0), TENSORS(1), TENSORS(2), __global const float *x, u64 x_at, int n, int n_in,
                             __local u8 *memory) {
    const int g = get_global_id(0), n_group = get_global_size(0), n_all = n_out0 + n_out1 + n_out2;
    int first = (u64)g * n_all / n_group, end = (u64)(g + 1) * n_all / n_group;
    few(AT(float, out0), AT(const u8, w0), AT(const float, x), OPTIONAL(const float, bias0), n, n_out0, n_in, 0,
        min(first, n_out0), min(end, n_out0), memory);
    first -= n_out0, end -= n_out0;
    few1(AT(float, out1), AT(const u8, w1), AT(const float, x), OPTIONAL(const float, bias1), n, n_out1, n_in, 0,
         clamp(first, 0, n_out1), clamp(end, 0, n_out1), memory);
    first -= n_out1, end -= n_out1;
    few2(AT(float, out2), AT(const u8, w2), AT(const float, x), OPTIONAL(const float, bias2), n, n_out2, n_in, 0,
         max(first, 0), max(end, 0), memory);
}
#endif

DEFINE_UNPACK(unpack, QUANT)
DEFINE_MULTIPLY(multiply, unpack)

// Many rows. Items: (panels, blocks of `block` rows).
__kernel void multiply_many(TENSORS(0), __global const float *x, u64 x_at, int n, int n_in, int accumulate, int block,
                            __local float *panel) {
    const int column = get_global_id(0) * COLUMNS, first = get_global_id(1) * block, end = min(first + block, n);
    const Rows rows = {AT(const float, x), AT(float, out0), 0, 1, n_in, n_out0};
    const u64 row_nbytes = (u64)(n_in / JOIN(QUANT, _BLOCK)) * JOIN(QUANT, _NBYTES);
    multiply(&rows, first, end, AT(const u8, w0), row_nbytes, column, accumulate, panel);
    __global const float *bias = OPTIONAL(const float, bias0);
    if (bias)
        for (int r = first; r < end; r++)
            for (int c = column; c < min(column + COLUMNS, n_out0); c++) rows.out[(u64)r * n_out0 + c] += bias[c];
}
