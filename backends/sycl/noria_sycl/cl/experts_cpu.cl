// The experts of a layer on a CPU, where one item is a work group. Macros: QUANT = type of gate or down, UP = of up.
#include "dot.h"
#include "glu.h"
#include "panel.h"

#define ORDER_PARAMETERS                                                                                         \
    __global const int *ids, u64 ids_at, __global const int *pairs, u64 pairs_at, __global const int *offsets,   \
        u64 offsets_at, int n_used, int first_expert, int end_expert, int first_row, int n_rows

// The sorted rows [base, stop) of a window.
#define WINDOW                                                                                                    \
    __global const int *pair_of = AT(const int, pairs), *starts = AT(const int, offsets), *expert_of = AT(const int, ids); \
    const int base = starts[first_expert] + first_row, stop = min(base + n_rows, starts[end_expert])

#define ROW_NBYTES(Q, n_in) ((u64)((n_in) / JOIN(Q, _BLOCK)) * JOIN(Q, _NBYTES))

// --- few rows: straight from the quantized slabs -----------------------------------------------------------------------

// hidden [n_rows, n_ff] = f(gate(x)) * up(x). Columns are shared out among the items.
__kernel void gate_up_few(__global float *hidden, u64 hidden_at, __global const float *x, u64 x_at,
                          TABLE_PARAMETERS(gate), TABLE_PARAMETERS(up), __global const int *down_where,
                          u64 down_where_at, ORDER_PARAMETERS, int n_ff, int n_in, __local u8 *memory) {
    WINDOW;
    const int g = get_global_id(0), n_group = get_global_size(0), n_block = (n_ff + 7) / 8;
    const int first = (u64)g * n_block / n_group * 8, end = min((int)((u64)(g + 1) * n_block / n_group * 8), n_ff);
    Input input = input_at(memory, n_in);
    int token = -1;
    for (int row = base; row < stop && first < end; row++) {
        const int expert = expert_of[pair_of[row]];
        if (!HAS_EXPERT(gate, expert) || !HAS_EXPERT(up, expert) || AT(const int, down_where)[expert] < 0) continue;
        if (token != pair_of[row] / n_used) {
            token = pair_of[row] / n_used;
            fill(&input, AT(const float, x) + (u64)token * n_in, n_in);
        }
        __global const u8 *gates = SLAB(gate, expert), *ups = SLAB(up, expert);
        __global float *out = AT(float, hidden) + (u64)(row - base) * n_ff;
        for (int c = first; c < end; c += 8) {
            float a[8], b[8];
            for (int k = 0; k < 8; k++) {
                const int column = min(c + k, n_ff - 1);
                a[k] = JOIN(QUANT, _dot)(gates + column * ROW_NBYTES(QUANT, n_in), &input, n_in);
                b[k] = JOIN(UP, _dot)(ups + column * ROW_NBYTES(UP, n_in), &input, n_in);
            }
            const float8 h = activate8(vload8(0, a)) * vload8(0, b);
            vstore8(h, 0, a);
            for (int k = 0; k < 8 && c + k < n_ff; k++) out[c + k] = a[k];
        }
    }
}

// acc[token] += weight * down(hidden row), row after row.
__kernel void down_add_few(__global float *acc, u64 acc_at, __global const float *hidden, u64 hidden_at,
                           TABLE_PARAMETERS(down), __global const int *gate_where, u64 gate_where_at,
                           __global const int *up_where, u64 up_where_at, __global const float *weights, u64 weights_at,
                           ORDER_PARAMETERS, int n_embd, int n_ff, __local u8 *memory) {
    WINDOW;
    const int g = get_global_id(0), n_group = get_global_size(0);
    const int first = (u64)g * n_embd / n_group, end = (u64)(g + 1) * n_embd / n_group;
    Input input = input_at(memory, n_ff);
    for (int row = base; row < stop && first < end; row++) {
        const int pair = pair_of[row], expert = expert_of[pair];
        if (AT(const int, gate_where)[expert] < 0 || AT(const int, up_where)[expert] < 0 || !HAS_EXPERT(down, expert))
            continue;
        fill(&input, AT(const float, hidden) + (u64)(row - base) * n_ff, n_ff);
        const float weight = AT(const float, weights)[pair];
        __global const u8 *slab = SLAB(down, expert);
        __global float *to = AT(float, acc) + (u64)(pair / n_used) * n_embd;
        for (int c = first; c < end; c++)
            to[c] = fma(weight, JOIN(QUANT, _dot)(slab + c * ROW_NBYTES(QUANT, n_ff), &input, n_ff), to[c]);
    }
}

// out[row] = W[expert] @ x[token, or row].
__kernel void mul_rows_few(__global float *out, u64 out_at, __global const float *x, u64 x_at, TABLE_PARAMETERS(w),
                           ORDER_PARAMETERS, int n_out, int n_in, int by_token, __local u8 *memory) {
    WINDOW;
    const int g = get_global_id(0), n_group = get_global_size(0);
    const int first = (u64)g * n_out / n_group, end = (u64)(g + 1) * n_out / n_group;
    Input input = input_at(memory, n_in);
    for (int row = base; row < stop && first < end; row++) {
        const int expert = expert_of[pair_of[row]];
        if (!HAS_EXPERT(w, expert)) continue;
        fill(&input, AT(const float, x) + (u64)(by_token ? pair_of[row] / n_used : row - base) * n_in, n_in);
        __global const u8 *slab = SLAB(w, expert);
        __global float *to = AT(float, out) + (u64)(row - base) * n_out;
        for (int c = first; c < end; c++)
            to[c] = JOIN(QUANT, _dot)(slab + c * ROW_NBYTES(QUANT, n_in), &input, n_in);
    }
}

// --- many rows: panels of unpacked weights ------------------------------------------------------------------------------

DEFINE_UNPACK(unpack, QUANT)
DEFINE_MULTIPLY(multiply, unpack)
DEFINE_UNPACK(unpack_up, UP)
DEFINE_MULTIPLY(multiply_up, unpack_up)

// hidden [n_rows, n_ff] = f(gate(x)) * up(x); `ups` is room for as many. Items: (panels, experts).
__kernel void gate_up_many(__global float *hidden, u64 hidden_at, __global float *ups, u64 ups_at,
                           __global const float *x, u64 x_at, TABLE_PARAMETERS(gate), TABLE_PARAMETERS(up),
                           ORDER_PARAMETERS, int n_ff, int n_in, __local float *panel) {
    WINDOW;
    const int column = get_global_id(0) * COLUMNS, expert = first_expert + get_global_id(1);
    const int first = max(starts[expert], base) - base, end = min(starts[expert + 1], stop) - base;
    if (first >= end || !HAS_EXPERT(gate, expert) || !HAS_EXPERT(up, expert)) return;
    Rows rows = {AT(const float, x), AT(float, hidden), pair_of + base, n_used, n_in, n_ff};
    multiply(&rows, first, end, SLAB(gate, expert), ROW_NBYTES(QUANT, n_in), column, 0, panel);
    rows.out = AT(float, ups);
    multiply_up(&rows, first, end, SLAB(up, expert), ROW_NBYTES(UP, n_in), column, 0, panel);
    for (int r = first; r < end; r++)
        for (int c = column; c < min(column + COLUMNS, n_ff); c += 8) {
            __global float *g = AT(float, hidden) + (u64)r * n_ff + c;
            __global const float *u = AT(float, ups) + (u64)r * n_ff + c;
            STORE8_GLOBAL(g, activate8(LOAD8_GLOBAL(g)) * LOAD8_GLOBAL(u));
        }
}

// out[row] = W[expert] @ x[token, or row]. Items: (panels, experts).
__kernel void mul_rows_many(__global float *out, u64 out_at, __global const float *x, u64 x_at, TABLE_PARAMETERS(w),
                            ORDER_PARAMETERS, int n_out, int n_in, int by_token, __local float *panel) {
    WINDOW;
    const int column = get_global_id(0) * COLUMNS, expert = first_expert + get_global_id(1);
    const int first = max(starts[expert], base) - base, end = min(starts[expert + 1], stop) - base;
    if (first >= end || !HAS_EXPERT(w, expert)) return;
    const Rows rows = {AT(const float, x), AT(float, out), by_token ? pair_of + base : 0, n_used, n_in, n_out};
    multiply(&rows, first, end, SLAB(w, expert), ROW_NBYTES(QUANT, n_in), column, 0, panel);
}
