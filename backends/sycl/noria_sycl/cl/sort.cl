// Sorting routed pairs by expert, stably. Pair p = token * n_used + choice.
#include "common.h"

#define MAX_EXPERT 512

// The place of pair p's row among the rows of its token, which are in ascending order.
inline int choice_rank(__global const int *ids, int p, int n_used) {
    const int token = p / n_used * n_used, choice = p % n_used, expert = ids[p];
    int rank = 0;
    for (int c = 0; c < n_used; c++) rank += ids[token + c] < expert || (ids[token + c] == expert && c < choice);
    return rank;
}

#define PLACE(p, row)                                                                 \
    {                                                                                 \
        AT(int, pairs)[row] = p;                                                      \
        AT(int, positions)[p / n_used * n_used + choice_rank(id, p, n_used)] = row;   \
    }
#define SORT_PARAMETERS                                                                                          \
    __global int *pairs, u64 pairs_at, __global int *offsets, u64 offsets_at, __global int *positions, u64 positions_at, \
        __global const int *ids, u64 ids_at, int n, int n_used, int n_expert

#if GROUP == 1
// All of it by one item.
__kernel void sort_all(SORT_PARAMETERS) {
    __global const int *id = AT(const int, ids);
    int next[MAX_EXPERT];
    for (int e = 0; e < n_expert; e++) next[e] = 0;
    for (int p = 0; p < n; p++) next[id[p]]++;
    int row = 0;
    for (int e = 0; e < n_expert; e++) {
        const int count = next[e];
        AT(int, offsets)[e] = next[e] = row;
        row += count;
    }
    AT(int, offsets)[n_expert] = row;
    for (int p = 0; p < n; p++) {
        const int to = next[id[p]]++;
        PLACE(p, to)
    }
}
#else
// counts[g][e] = pairs of expert e among the GROUP pairs of group g.
__kernel void sort_count(__global int *counts, u64 counts_at, __global const int *ids, u64 ids_at, int n, int n_expert) {
    __local int mine[MAX_EXPERT];
    const int p = get_global_id(0);
    for (int e = LANE; e < n_expert; e += GROUP) mine[e] = 0;
    MEET();
    if (p < n) atomic_inc(&mine[AT(const int, ids)[p]]);
    MEET();
    for (int e = LANE; e < n_expert; e += GROUP) AT(int, counts)[get_group_id(0) * n_expert + e] = mine[e];
}

// Turns counts into the first row of each expert of each group, and fills offsets. One group.
__kernel void sort_add(__global int *counts, u64 counts_at, __global int *offsets, u64 offsets_at, int n_part,
                       int n_expert) {
    __local int totals[MAX_EXPERT];
    __global int *count = AT(int, counts), *start = AT(int, offsets);
    for (int e = LANE; e < n_expert; e += GROUP) {
        totals[e] = 0;
        for (int g = 0; g < n_part; g++) totals[e] += count[g * n_expert + e];
    }
    MEET();
    if (LANE == 0) {
        int row = 0;
        for (int e = 0; e < n_expert; e++) {
            const int total = totals[e];
            start[e] = totals[e] = row;
            row += total;
        }
        start[n_expert] = row;
    }
    MEET();
    for (int e = LANE; e < n_expert; e += GROUP) {
        int row = totals[e];
        for (int g = 0; g < n_part; g++) {
            const int part = count[g * n_expert + e];
            count[g * n_expert + e] = row;
            row += part;
        }
    }
}

// An item places a pair: behind those of its expert that come before it in its group.
__kernel void sort_place(SORT_PARAMETERS, __global const int *first_rows, u64 first_rows_at) {
    __local int experts[GROUP];
    __global const int *id = AT(const int, ids);
    const int p = get_global_id(0);
    experts[LANE] = p < n ? id[p] : -1;
    MEET();
    if (p >= n) return;
    int row = AT(const int, first_rows)[get_group_id(0) * n_expert + experts[LANE]];
    for (int q = 0; q < LANE; q++) row += experts[q] == experts[LANE];
    PLACE(p, row)
}

// All of it for at most GROUP pairs, by one group.
__kernel void sort_few(SORT_PARAMETERS) {
    __local int experts[GROUP];
    __global const int *id = AT(const int, ids);
    const int p = LANE;
    experts[p] = p < n ? id[p] : -1;
    MEET();
    for (int e = LANE; e <= n_expert; e += GROUP) {
        int before = 0;
        for (int q = 0; q < n; q++) before += experts[q] < e;
        AT(int, offsets)[e] = before;
    }
    if (p >= n) return;
    int row = 0;
    for (int q = 0; q < n; q++) row += experts[q] < experts[p] || (experts[q] == experts[p] && q < p);
    PLACE(p, row)
}
#endif
