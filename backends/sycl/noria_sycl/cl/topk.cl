// The k largest of each row, for sampling.
#include "common.h"

#define MAX_K 1024
#define BLOCK 64  // numbers whose largest one is looked at first

// Orders (value, id) pairs as unsigned numbers, all different: larger values first, then lower ids.
inline u64 sort_key(float x, int id) { return (u64)order_key(x) << 32 | (u32)~id; }

// The k-th largest of n different keys, by 8 rounds of 8 bits; 0 if there are fewer than k.
inline u64 kth_largest(__global const u64 *keys, int n, int k, __local int *counts, __local int *chosen) {
    if (n < k) return 0;
    u64 prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = LANE; i < 256; i += GROUP) counts[i] = 0;
        MEET();
        for (int i = LANE; i < n; i += GROUP)
            if (shift == 56 || keys[i] >> (shift + 8) == prefix) {
#if GROUP == 1
                counts[keys[i] >> shift & 255]++;
#else
                atomic_inc(&counts[keys[i] >> shift & 255]);
#endif
            }
        MEET();
        if (LANE == 0) {
            int digit = 255, above = 0;
            while (above + counts[digit] < k) above += counts[digit--];
            chosen[0] = digit, chosen[1] = above;
        }
        MEET();
        prefix = prefix << 8 | chosen[0];
        k -= chosen[1];
        MEET();
    }
    return prefix;
}

// Descending; n is a power of two.
inline void sort_descending(__local u64 *keys, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step; step /= 2) {
            MEET();
            for (int i = LANE; i < n; i += GROUP) {
                const int j = i ^ step;
                if (j > i && (keys[i] < keys[j]) == ((i & size) == 0)) {
                    const u64 key = keys[i];
                    keys[i] = keys[j], keys[j] = key;
                }
            }
        }
    MEET();
}

// A group a row. The k-th largest of what blocks have as their largest is no larger than the k-th largest of all, so
// only what reaches it is looked at again. scratch: room for n / BLOCK + n keys a row.
__kernel void top_k(__global float *values, u64 values_at, __global int *ids, u64 ids_at, __global const float *logits,
                    u64 logits_at, __global u64 *scratch, u64 scratch_at, int n, int k) {
    __local u64 best[MAX_K];
    __local int counts[256], chosen[2], found;
    const int row = get_group_id(0), n_block = (n + BLOCK - 1) / BLOCK;
    __global const float *x = AT(const float, logits) + (u64)row * n;
    __global u64 *largest = AT(u64, scratch) + (u64)row * (n_block + n), *candidates = largest + n_block;

    for (int b = LANE; b < n_block; b += GROUP) {
        const int first = b * BLOCK, end = min(first + BLOCK, n);
        u32 key = 0;
        for (int i = first; i < end; i++) key = max(key, order_key(x[i]));
        largest[b] = (u64)key << 32 | (u32)~b;
    }
#if GROUP != 1
    barrier(CLK_GLOBAL_MEM_FENCE);
#endif
    const u32 least_key = kth_largest(largest, n_block, k, counts, chosen) >> 32;
    if (LANE == 0) found = 0;
    MEET();
    for (int b = LANE; b < n_block; b += GROUP) {
        if (largest[b] >> 32 < least_key) continue;
        for (int i = b * BLOCK; i < min((b + 1) * BLOCK, n); i++) {
            const u64 key = sort_key(x[i], i);
            if (key >> 32 < least_key) continue;
#if GROUP == 1
            candidates[found++] = key;
#else
            candidates[atomic_inc(&found)] = key;
#endif
        }
    }
#if GROUP != 1
    barrier(CLK_GLOBAL_MEM_FENCE | CLK_LOCAL_MEM_FENCE);
#endif
    const int n_candidate = found;
    const u64 least = kth_largest(candidates, n_candidate, k, counts, chosen);
    int width = 1;
    while (width < k) width *= 2;
    MEET();
    for (int i = LANE; i < width; i += GROUP) best[i] = 0;
    if (LANE == 0) found = 0;
    MEET();
    for (int i = LANE; i < n_candidate; i += GROUP)
        if (candidates[i] >= least) {
#if GROUP == 1
            best[found++] = candidates[i];
#else
            best[atomic_inc(&found)] = candidates[i];
#endif
        }
    sort_descending(best, width);
    for (int i = LANE; i < k; i += GROUP) {
        const int id = ~(u32)best[i];
        AT(int, ids)[(u64)row * k + i] = id;
        AT(float, values)[(u64)row * k + i] = x[id];
    }
}
