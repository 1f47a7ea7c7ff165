// What is done to heads between their projections and attention.
// Macros: K_TYPE, V_TYPE = types of the KV cache.
#include "cells.h"
#include "rope.h"

// x [n, n_head, head_dim], turned in place. A group takes a token at a time; `turns`: room for n_dims / 2.
__kernel void rope(__global float *x, u64 x_at, __global const int *positions, u64 positions_at,
                   __global const float *freq_factors, u64 freq_factors_at, int n, int n_head, int head_dim, int n_dims,
                   int neox, float step, float scale, __local float2 *turns) {
    const int half_dims = n_dims / 2;
    for (int t = get_group_id(0); t < n; t += get_num_groups(0)) {
        MEET();
        make_turns(turns, half_dims, AT(const int, positions)[t], step, scale, OPTIONAL(const float, freq_factors));
        for (int j = LANE; j < n_head * half_dims; j += GROUP) {
            const int i = j % half_dims;
            __global float *a = AT(float, x) + ((u64)t * n_head + j / half_dims) * head_dim + (neox ? i : 2 * i);
            __global float *b = a + (neox ? half_dims : 1);
            const float p = *a, q = *b;
            *a = p * turns[i].x - q * turns[i].y;
            *b = p * turns[i].y + q * turns[i].x;
        }
    }
}

// rows [n, width], to the cells `positions`, `offset` bytes from their beginning. Items: (blocks of 32 numbers, rows).
__kernel void kv_store(__global u8 *cells, u64 cells_at, __global const float *rows, u64 rows_at,
                       __global const int *positions, u64 positions_at, int width, u64 row_nbytes, u64 offset) {
    const int i = get_global_id(0) * 32, r = get_global_id(1);
    if (i >= width) return;
    __global u8 *cell = AT(u8, cells) + AT(const int, positions)[r] * row_nbytes + offset;
    JOIN(K_TYPE, _store)(cell, i, AT(const float, rows) + (u64)r * width + i, min(32, width - i));
}

// One head: normalized by `weight` if there is one, turned if `turns`. In place.
inline void finish_head(__global float *head, int d, __global const float *weight, float eps, __local const float2 *turns,
                        int n_dims, int neox, __local float *shared) {
    if (weight) {
        float squares = 0.f;
        for (int i = LANE; i < d; i += GROUP) squares = fma(head[i], head[i], squares);
        const float factor = 1.f / sqrt(group_sum(squares, shared) / d + eps);
        for (int i = LANE; i < d; i += GROUP) head[i] = head[i] * factor * weight[i];
#if GROUP != 1
        barrier(CLK_GLOBAL_MEM_FENCE);
#endif
    }
    const int half_dims = n_dims / 2;
    for (int i = LANE; i < half_dims; i += GROUP) {
        __global float *a = head + (neox ? i : 2 * i), *b = a + (neox ? half_dims : 1);
        const float p = *a, q = *b;
        *a = p * turns[i].x - q * turns[i].y;
        *b = p * turns[i].y + q * turns[i].x;
    }
}

// Heads of q and k normalized and turned, those of k and v stored. Groups: (heads of q, k and v, tokens).
// d_k and d_v are multiples of 32. `turns`: room for n_dims / 2.
__kernel void rope_store(__global float *q, u64 q_at, __global float *k, u64 k_at, __global const float *v, u64 v_at,
                         __global u8 *cells, u64 cells_at, __global const int *positions, u64 positions_at,
                         __global const float *q_norm, u64 q_norm_at, __global const float *k_norm, u64 k_norm_at,
                         __global const float *freq_factors, u64 freq_factors_at, float eps, float step, float scale,
                         int n, u64 row_nbytes, u64 v_offset, int n_head, int n_head_kv, int d_k, int d_v, int n_dims,
                         int neox, __local float2 *turns) {
    __local float shared[GROUP];
    const int n_slot = n_head + 2 * n_head_kv;
    for (int task = get_group_id(0), ready = -1; task < n * n_slot; task += get_num_groups(0)) {
        const int t = task / n_slot, slot = task % n_slot, position = AT(const int, positions)[t];
        __global u8 *cell = AT(u8, cells) + position * row_nbytes;
        if (slot < n_head + n_head_kv && ready != t) {
            MEET();
            make_turns(turns, n_dims / 2, position, step, scale, OPTIONAL(const float, freq_factors));
            ready = t;
        }
        if (slot < n_head) {
            finish_head(AT(float, q) + ((u64)t * n_head + slot) * d_k, d_k, OPTIONAL(const float, q_norm), eps, turns, n_dims,
                        neox, shared);
        } else if (slot < n_head + n_head_kv) {
            const int h = slot - n_head;
            __global float *head = AT(float, k) + ((u64)t * n_head_kv + h) * d_k;
            finish_head(head, d_k, OPTIONAL(const float, k_norm), eps, turns, n_dims, neox, shared);
#if GROUP != 1
            barrier(CLK_GLOBAL_MEM_FENCE);
#endif
            for (int i = LANE * 32; i < d_k; i += GROUP * 32) JOIN(K_TYPE, _store)(cell, h * d_k + i, head + i, 32);
        } else {
            const int h = slot - n_head - n_head_kv;
            __global const float *head = AT(const float, v) + ((u64)t * n_head_kv + h) * d_v;
            for (int i = LANE * 32; i < d_v; i += GROUP * 32)
                JOIN(V_TYPE, _store)(cell + v_offset, h * d_v + i, head + i, 32);
        }
    }
}
