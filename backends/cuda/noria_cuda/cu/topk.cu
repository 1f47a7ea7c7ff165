// The k largest of each row, for sampling: those of its parts first.
#include "common.cuh"

constexpr int BLOCK = 1024;
constexpr int MAX_K = 1024;
constexpr int PART = 8192;

// Orders (value, id) pairs as unsigned numbers, all different: larger values first, then lower ids.
DEVICE u64 sort_key(float x, int id) { return (u64)order_key(x) << 32 | (u32)~id; }

// The k-th largest of n different keys, by 8 rounds of 8 bits; 0 if there are fewer than k.
DEVICE u64 kth_largest(const u64* keys, int n, int k) {
    __shared__ int counts[256];
    __shared__ int chosen[2];
    if (n < k) return 0;
    u64 prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += BLOCK) counts[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += BLOCK)
            if (shift == 56 || keys[i] >> (shift + 8) == prefix) atomicAdd(&counts[keys[i] >> shift & 255], 1);
        __syncthreads();
        if (threadIdx.x < WARP) {  // lane l has digits 255 - 8 l and the 7 below
            int mine = 0;
            for (int j = 0; j < 8; j++) mine += counts[255 - 8 * threadIdx.x - j];
            int above = mine;
            for (int step = 1; step < WARP; step *= 2) {
                const int before = __shfl_up_sync(ALL_LANES, above, step);
                if (threadIdx.x >= step) above += before;
            }
            above -= mine;
            if (above < k && k <= above + mine) {
                int digit = 255 - 8 * threadIdx.x;
                while (above + counts[digit] < k) above += counts[digit--];
                chosen[0] = digit, chosen[1] = above;
            }
        }
        __syncthreads();
        prefix = prefix << 8 | chosen[0];
        k -= chosen[1];
    }
    return prefix;
}

// Descending, in shared memory; n is a power of two.
DEVICE void sort_descending(u64* keys, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += BLOCK) {
                const int j = i ^ step;
                if (j > i && (keys[i] < keys[j]) == ((i & size) == 0)) {
                    const u64 key = keys[i];
                    keys[i] = keys[j], keys[j] = key;
                }
            }
        }
    __syncthreads();
}

// The k largest of each part of PART numbers of a row. Grid: (part, row).
// candidates: room for PART keys a part; kept: for the k keys (or all, of a shorter part) that are left of each.
//
// The k-th largest of what each thread has as its largest is no larger than the k-th largest of all, so only what
// reaches it is looked at again.
extern "C" __global__ void __launch_bounds__(1024)
    top_k_parts(const float* logits, u64* candidates, u64* kept, int n, int k) {
    __shared__ u64 largest[BLOCK];
    __shared__ int n_candidate, n_kept;
    const int first = blockIdx.x * PART, n_part = min(n - first, PART);
    const int n_row_kept = (gridDim.x - 1) * min(k, PART) + min(k, n - ((int)gridDim.x - 1) * PART);
    logits += (u64)blockIdx.y * n;
    candidates += ((u64)blockIdx.y * gridDim.x + blockIdx.x) * PART;
    kept += (u64)blockIdx.y * n_row_kept + blockIdx.x * min(k, PART);

    u64 keys[PART / BLOCK], mine = 0;
#pragma unroll
    for (int j = 0; j < PART / BLOCK; j++) {
        const int i = j * BLOCK + threadIdx.x;
        keys[j] = i < n_part ? sort_key(logits[first + i], first + i) : 0;
        mine = max(mine, keys[j]);
    }
    largest[threadIdx.x] = mine;
    if (threadIdx.x == 0) n_candidate = n_kept = 0;
    __syncthreads();
    const u64 floor = max(kth_largest(largest, min(n_part, BLOCK), k), (u64)1);
#pragma unroll
    for (int j = 0; j < PART / BLOCK; j++)
        if (keys[j] >= floor) candidates[atomicAdd(&n_candidate, 1)] = keys[j];
    __syncthreads();
    const u64 least = max(kth_largest(candidates, n_candidate, k), floor);
#pragma unroll
    for (int j = 0; j < PART / BLOCK; j++)
        if (keys[j] >= least) kept[atomicAdd(&n_kept, 1)] = keys[j];
}

// The k largest of the n_kept keys of each row, in order. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    top_k_merge(float* values, int* ids, const float* logits, const u64* kept, int n, int n_kept, int k) {
    __shared__ u64 best[MAX_K];
    __shared__ int n_best;
    logits += (u64)blockIdx.x * n, kept += (u64)blockIdx.x * n_kept;
    values += (u64)blockIdx.x * k, ids += (u64)blockIdx.x * k;
    const u64 least = kth_largest(kept, n_kept, k);
    if (threadIdx.x == 0) n_best = 0;
    best[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n_kept; i += BLOCK)
        if (kept[i] >= least) best[atomicAdd(&n_best, 1)] = kept[i];
    int width = 1;
    while (width < k) width *= 2;
    sort_descending(best, width);
    for (int i = threadIdx.x; i < k; i += BLOCK) {
        const int id = (int)~(u32)best[i];
        ids[i] = id;
        values[i] = logits[id];
    }
}
