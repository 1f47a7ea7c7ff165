// Adding up what a token's experts say.
#include "common.h"

// acc[token] += weight * y[row], row after row in ascending order, for the rows of the window whose experts are here.
// Product and sum are rounded one by one, so that the bits do not depend on how rows are cut into windows.
// acc: [n_tokens, n_embd]; y: [n_rows, n_embd]. A group takes a token at a time.
__kernel void combine(__global float *acc, u64 acc_at, __global const float *y, u64 y_at, __global const int *where,
                      u64 where_at, __global const int *where1, u64 where1_at, __global const int *where2, u64 where2_at,
                      __global const float *weights, u64 weights_at, __global const int *positions, u64 positions_at,
                      __global const int *ids, u64 ids_at, __global const int *pairs, u64 pairs_at,
                      __global const int *offsets, u64 offsets_at, int n_used, int first_expert, int end_expert,
                      int first_row, int n_rows, int n_tokens, int n_embd) {
    const int base = AT(const int, offsets)[first_expert] + first_row;
    const int stop = min(base + n_rows, AT(const int, offsets)[end_expert]);
    if (base >= stop) return;
    for (int token = get_group_id(0); token < n_tokens; token += get_num_groups(0)) {
        __global float *to = AT(float, acc) + (u64)token * n_embd;
        for (int c = 0; c < n_used; c++) {
            const int row = AT(const int, positions)[token * n_used + c];
            if (row < base || row >= stop) continue;
            const int pair = AT(const int, pairs)[row], expert = AT(const int, ids)[pair];
            if (AT(const int, where)[expert] < 0 || AT(const int, where1)[expert] < 0 || AT(const int, where2)[expert] < 0)
                continue;
            const float weight = AT(const float, weights)[pair];
            __global const float *from = AT(const float, y) + (u64)(row - base) * n_embd;
            for (int i = LANE; i < n_embd; i += GROUP) to[i] += weight * from[i];
        }
    }
}
