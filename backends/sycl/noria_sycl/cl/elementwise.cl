// Ops on plain numbers, and RMS norm.
#include "common.h"
#include "glu.h"

// out = a + b; b has n_b numbers, which repeat.
__kernel void add(__global float *out, u64 out_at, __global const float *a, u64 a_at, __global const float *b, u64 b_at,
                  u64 n, u64 n_b) {
    EACH_OF_MINE(i, n) AT(float, out)[i] = AT(const float, a)[i] + AT(const float, b)[n_b == n ? i : i % n_b];
}

__kernel void scale(__global float *out, u64 out_at, __global const float *x, u64 x_at, float factor, u64 n) {
    EACH_OF_MINE(i, n) AT(float, out)[i] = AT(const float, x)[i] * factor;
}

// out = f(gate) * up.
__kernel void glu(__global float *out, u64 out_at, __global const float *gate, u64 gate_at, __global const float *up,
                  u64 up_at, u64 n) {
    EACH_OF_MINE(i, n) AT(float, out)[i] = activate(AT(const float, gate)[i]) * AT(const float, up)[i];
}

// out = x / sqrt(mean(x^2) + eps) * weight. Rows are shared out among the groups.
__kernel void rms_norm(__global float *out, u64 out_at, __global const float *x, u64 x_at, __global const float *weight,
                       u64 weight_at, int n_row, int n, float eps) {
    __local float shared[GROUP];
    __global const float *w = OPTIONAL(const float, weight);
    for (int r = get_group_id(0); r < n_row; r += get_num_groups(0)) {
        __global const float *row = AT(const float, x) + (u64)r * n;
        __global float *to = AT(float, out) + (u64)r * n;
        float8 squares = 0.f;
        int i = LANE * 8;
        for (; i + 8 <= n; i += GROUP * 8) {
            const float8 v = LOAD8_GLOBAL(row + i);
            squares = fma(v, v, squares);
        }
        float rest = 0.f;
        for (; i < n && i < (n / 8 + 1) * 8; i++) rest = fma(row[i], row[i], rest);
        const float sum = group_sum(sum8(squares) + rest, shared);
        const float factor = 1.f / sqrt(sum / n + eps);
        if (w)
            for (int j = LANE; j < n; j += GROUP) to[j] = row[j] * factor * w[j];
        else
            for (int j = LANE; j < n; j += GROUP) to[j] = row[j] * factor;
    }
}
