// Causal attention on a CPU, where one item is a work group: some queries, and the keys tile by tile.
// Macros: K_TYPE, V_TYPE, D_K, D_V (multiples of 32), KEYS = keys of a tile, QUERIES = queries of a group.
// Source: Dao 2023, arXiv 2307.08691 (tiling with an online softmax).
#include "panel.h"

#define LEAST -1e30f  // of no score

// Keys or values of a tile, zeros where a cell is not one of [lowest, end): what lies there may be NaN.
#define DEFINE_LOAD(name, T, D)                                                                              \
    inline void name(__local float *to, __global const u8 *cells, u64 row_nbytes, int head, int tile, int lowest, \
                     int end) {                                                                              \
        for (int j = 0; j < KEYS; j++)                                                                       \
            for (int i = 0; i < D; i += 32) {                                                                \
                float8 y[4] = {0.f, 0.f, 0.f, 0.f};                                                          \
                if (lowest <= tile + j && tile + j < end)                                                    \
                    JOIN(T, _values)(cells + (tile + j) * row_nbytes, head * D + i, y);                      \
                for (int k = 0; k < 4; k++) STORE8_LOCAL(to + j * D + i + 8 * k, y[k]);                      \
            }                                                                                                \
    }
DEFINE_LOAD(load_keys, K_TYPE, D_K)
DEFINE_LOAD(load_values, V_TYPE, D_V)

// Scores as weights, and the sums that go with them.
inline void weigh(__local float *scores, int n_visible_from, int n_visible_end, float scale, float *top, float *total,
                  float *factor) {
    float most = *top;
    for (int j = 0; j < KEYS; j++) {
        scores[j] = n_visible_from <= j && j < n_visible_end ? scores[j] * scale : -INFINITY;
        most = fmax(most, scores[j]);
    }
    *factor = exp(*top - most);
    float8 sum = 0.f;
    for (int j = 0; j < KEYS; j += 8) {
        const float8 p = exp(LOAD8_LOCAL(scores + j) - most);
        STORE8_LOCAL(scores + j, p);
        sum += p;
    }
    *total = *total * *factor + sum8(sum);
    *top = most;
}

// o = o * factors + weights @ values, for 3 rows of o and 32 numbers of each.
inline void add_values(__local float *o, __local const float *weights, __local const float *values, const float *factors) {
    float8 s[3][4];
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 4; c++) s[r][c] = LOAD8_LOCAL(o + r * D_V + 8 * c) * factors[r];
    for (int j = 0; j < KEYS; j++) {
        __local const float *v = values + j * D_V;
        const float8 v0 = LOAD8_LOCAL(v), v1 = LOAD8_LOCAL(v + 8), v2 = LOAD8_LOCAL(v + 16), v3 = LOAD8_LOCAL(v + 24);
        for (int r = 0; r < 3; r++) {
            const float8 p = weights[r * KEYS + j];
            s[r][0] = fma(p, v0, s[r][0]), s[r][1] = fma(p, v1, s[r][1]);
            s[r][2] = fma(p, v2, s[r][2]), s[r][3] = fma(p, v3, s[r][3]);
        }
    }
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 4; c++) STORE8_LOCAL(o + r * D_V + 8 * c, s[r][c]);
}

// out [n, n_head, D_V]; q [n, n_head, D_K]. The queries of a KV head are the rows (token, head of its group).
// Items: (blocks of QUERIES rows, KV heads). memory: see `attention.py`.
__kernel void attend(__global float *out, u64 out_at, __global const float *q, u64 q_at, __global const u8 *cells,
                     u64 cells_at, __global const int *positions, u64 positions_at, __global const float *sinks,
                     u64 sinks_at, u64 row_nbytes, u64 v_offset, int n, int n_head, int n_group, float scale, int window,
                     __local float *memory) {
    __local float *keys = memory, *values = keys + KEYS * D_K, *scores = values + KEYS * D_V, *o = scores + QUERIES * KEYS;
    const int kv_head = get_global_id(1), row0 = get_global_id(0) * QUERIES, n_row = min(QUERIES, n * n_group - row0);
    __global const int *position = AT(const int, positions);
    float top[QUERIES], total[QUERIES], factor[QUERIES];
    __global const float *x[QUERIES];
    for (int r = 0; r < QUERIES; r++) {
        const int row = row0 + min(r, n_row - 1), head = kv_head * n_group + row % n_group;
        x[r] = AT(const float, q) + ((u64)(row / n_group) * n_head + head) * D_K;
        top[r] = sinks ? AT(const float, sinks)[head] : LEAST;
        total[r] = sinks ? 1.f : 0.f;
        for (int i = 0; i < D_V; i += 8) STORE8_LOCAL(o + r * D_V + i, (float8)0.f);
    }
    const int lowest = window ? max(0, position[row0 / n_group] - window + 1) : 0;
    const int end = position[(row0 + n_row - 1) / n_group] + 1;
    for (int tile = lowest / KEYS * KEYS; tile < end; tile += KEYS) {
        load_keys(keys, AT(const u8, cells), row_nbytes, kv_head, tile, lowest, end);
        load_values(values, AT(const u8, cells) + v_offset, row_nbytes, kv_head, tile, lowest, end);
        for (int r = 0; r < n_row; r += ROWS) {
            for (int j = 0; j < KEYS; j += 4) {
                float4 y[ROWS];
                multiply_tile(y, keys + j * D_K, D_K, x[r], x[r + 1], x[r + 2], D_K);
                for (int k = 0; k < ROWS; k++) vstore4(y[k], 0, scores + (r + k) * KEYS + j);
            }
            for (int k = r; k < r + ROWS; k++) {
                const int mine = position[(row0 + min(k, n_row - 1)) / n_group];
                weigh(scores + k * KEYS, window ? mine - window + 1 - tile : 0, mine + 1 - tile, scale, &top[k], &total[k],
                      &factor[k]);
            }
            for (int i = 0; i < D_V; i += 32)
                add_values(o + r * D_V + i, scores + r * KEYS, values + i, factor + r);
        }
    }
    for (int r = 0; r < n_row; r++) {
        const int row = row0 + r, head = kv_head * n_group + row % n_group;
        __global float *to = AT(float, out) + ((u64)(row / n_group) * n_head + head) * D_V;
        for (int i = 0; i < D_V; i += 8) STORE8_GLOBAL(to + i, LOAD8_LOCAL(o + r * D_V + i) / total[r]);
    }
}
