// Products of many rows with quantized weights, on a CPU: a panel of weights is unpacked once to local memory, then tiles
// of ROWS x 4 numbers stay in registers while the numbers of both sides go through. A number is the same sum in the
// same order whatever rows it is computed with.
#include "quants.h"

#define COLUMNS 16   // rows of W, of a panel
#define DEPTH 1024   // numbers of each of them
#define ROWS 3       // of x, of a tile: 12 sums, and what they need, fill the registers of AVX2
#define PANEL_NBYTES (COLUMNS * DEPTH * 4)

// Columns behind the last one repeat it.
#define DEFINE_UNPACK(name, Q)                                                                              \
    inline void name(__local float *panel, __global const u8 *w, u64 row_nbytes, int column, int n_out, int from, \
                     int depth) {                                                                           \
        for (int c = 0; c < COLUMNS; c++) {                                                                 \
            __global const u8 *row = w + min(column + c, n_out - 1) * row_nbytes;                           \
            for (int i = 0; i < depth; i += 32) {                                                           \
                float8 y[4];                                                                                \
                JOIN(Q, _values)(row, from + i, y);                                                         \
                for (int k = 0; k < 4; k++) STORE8_LOCAL(panel + c * DEPTH + i + 8 * k, y[k]);              \
            }                                                                                               \
        }                                                                                                   \
    }

// The sums of four vectors.
inline float4 sums_of(float8 a, float8 b, float8 c, float8 d) {
    const float4 e = a.lo + a.hi, f = b.lo + b.hi, g = c.lo + c.hi, h = d.lo + d.hi;
    const float4 p = (float4)(e.even, f.even) + (float4)(e.odd, f.odd);
    const float4 q = (float4)(g.even, h.even) + (float4)(g.odd, h.odd);
    return (float4)(p.even, q.even) + (float4)(p.odd, q.odd);
}

// y[r] = products of rows x[r] with 4 rows of a panel, which are `stride` numbers apart.
inline void multiply_tile(float4 *y, __local const float *panel, int stride, __global const float *x0,
                          __global const float *x1, __global const float *x2, int depth) {
    float8 s00 = 0.f, s01 = 0.f, s02 = 0.f, s03 = 0.f;
    float8 s10 = 0.f, s11 = 0.f, s12 = 0.f, s13 = 0.f;
    float8 s20 = 0.f, s21 = 0.f, s22 = 0.f, s23 = 0.f;
    for (int i = 0; i < depth; i += 8) {
        const float8 a = LOAD8_GLOBAL(x0 + i), b = LOAD8_GLOBAL(x1 + i), c = LOAD8_GLOBAL(x2 + i);
        float8 w = LOAD8_LOCAL(panel + i);
        s00 = fma(a, w, s00), s10 = fma(b, w, s10), s20 = fma(c, w, s20);
        w = LOAD8_LOCAL(panel + stride + i);
        s01 = fma(a, w, s01), s11 = fma(b, w, s11), s21 = fma(c, w, s21);
        w = LOAD8_LOCAL(panel + 2 * stride + i);
        s02 = fma(a, w, s02), s12 = fma(b, w, s12), s22 = fma(c, w, s22);
        w = LOAD8_LOCAL(panel + 3 * stride + i);
        s03 = fma(a, w, s03), s13 = fma(b, w, s13), s23 = fma(c, w, s23);
    }
    y[0] = sums_of(s00, s01, s02, s03);
    y[1] = sums_of(s10, s11, s12, s13);
    y[2] = sums_of(s20, s21, s22, s23);
}

// to[column ...] = (or +=) 4 numbers, as far as there are columns.
inline void put4(__global float *to, float4 y, int column, int n_out, int add) {
    if (column + 4 <= n_out) {
        vstore4(add ? vload4(0, to + column) + y : y, 0, to + column);
    } else {
        const float v[4] = {y.s0, y.s1, y.s2, y.s3};
        for (int k = 0; column + k < n_out; k++) to[column + k] = add ? to[column + k] + v[k] : v[k];
    }
}

// What row r of a product reads and writes: rows of x in order, or those of the tokens behind pairs.
typedef struct {
    __global const float *x;
    __global float *out;
    __global const int *pairs;  // of row 0; or 0
    int n_used, n_in, n_out;
} Rows;

inline __global const float *row_of(const Rows *rows, int r) {
    return rows->x + (u64)(rows->pairs ? rows->pairs[r] / rows->n_used : r) * rows->n_in;
}

// Rows [first, end) of out = x @ W.T in the columns of one panel. `add`: += from the first part on.
#define DEFINE_MULTIPLY(name, unpack)                                                                          \
    inline void name(const Rows *rows, int first, int end, __global const u8 *w, u64 row_nbytes, int column, int add, \
                     __local float *panel) {                                                                   \
        for (int from = 0; from < rows->n_in; from += DEPTH, add = 1) {                                        \
            const int depth = min(rows->n_in - from, DEPTH);                                                   \
            unpack(panel, w, row_nbytes, column, rows->n_out, from, depth);                                    \
            for (int r = first; r < end; r += ROWS) {                                                          \
                const int r1 = min(r + 1, end - 1), r2 = min(r + 2, end - 1);                                  \
                __global const float *x0 = row_of(rows, r) + from, *x1 = row_of(rows, r1) + from,              \
                                     *x2 = row_of(rows, r2) + from;                                            \
                for (int c = 0; c < COLUMNS && column + c < rows->n_out; c += 4) {                             \
                    float4 y[ROWS];                                                                            \
                    multiply_tile(y, panel + c * DEPTH, DEPTH, x0, x1, x2, depth);                                    \
                    for (int k = 0; k < ROWS && r + k < end; k++)                                              \
                        put4(rows->out + (u64)(r + k) * rows->n_out, y[k], column + c, rows->n_out, add);      \
                }                                                                                              \
            }                                                                                                  \
        }                                                                                                      \
    }
