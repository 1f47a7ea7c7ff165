// Sorting routed pairs by expert, stably: a counting sort in three steps (count, add up, place), or in one block.
// Pair p = token * n_used + choice; chunk c holds pairs [c * CHUNK, (c + 1) * CHUNK).
#include "common.cuh"

constexpr int CHUNK = 4096;
constexpr int N_WARP = 8;
constexpr int MAX_EXPERT = 512;
constexpr int MAX_FEW = 64;

// counts[c][e] = pairs of expert e in chunk c. One block a chunk.
extern "C" __global__ void __launch_bounds__(256) sort_count(int* counts, const int* ids, int n, int n_expert) {
    __shared__ int mine[MAX_EXPERT];
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) mine[e] = 0;
    __syncthreads();
    const int first = blockIdx.x * CHUNK, end = min(n, first + CHUNK);
    for (int p = first + threadIdx.x; p < end; p += blockDim.x) atomicAdd(&mine[ids[p]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) counts[blockIdx.x * n_expert + e] = mine[e];
}

// Turns counts into the first row of each expert of each chunk, and fills offsets. One block of MAX_EXPERT threads.
extern "C" __global__ void __launch_bounds__(512) sort_add(int* counts, int* offsets, int n_chunk, int n_expert) {
    __shared__ int sums[MAX_EXPERT];
    const int e = threadIdx.x;
    int total = 0;
    if (e < n_expert)
        for (int c = 0; c < n_chunk; c++) total += counts[c * n_expert + e];
    sums[e] = total;
    __syncthreads();
    for (int step = 1; step < MAX_EXPERT; step *= 2) {
        const int before = e >= step ? sums[e - step] : 0;
        __syncthreads();
        sums[e] += before;
        __syncthreads();
    }
    if (e >= n_expert) return;
    offsets[e + 1] = sums[e];
    if (e == 0) offsets[0] = 0;
    int row = sums[e] - total;
    for (int c = 0; c < n_chunk; c++) {
        const int count = counts[c * n_expert + e];
        counts[c * n_expert + e] = row;
        row += count;
    }
}

// The place of pair p's row among the rows of its token, which are in ascending order.
DEVICE int choice_rank(const int* ids, int p, int n_used) {
    const int token = p / n_used * n_used, choice = p % n_used, expert = ids[p];
    int rank = 0;
    for (int c = 0; c < n_used; c++) rank += ids[token + c] < expert || (ids[token + c] == expert && c < choice);
    return rank;
}

// All of it for so few pairs that each can look at all others: a decode step. One block.
extern "C" __global__ void __launch_bounds__(256)
    sort_few(int* pairs, int* offsets, int* positions, const int* ids, int n, int n_used, int n_expert) {
    await_previous();
    __shared__ int experts[MAX_FEW];
    if (threadIdx.x < n) experts[threadIdx.x] = ids[threadIdx.x];
    __syncthreads();
    for (int e = threadIdx.x; e <= n_expert; e += blockDim.x) {
        int before = 0;
        for (int p = 0; p < n; p++) before += experts[p] < e;
        offsets[e] = before;
    }
    const int p = threadIdx.x;
    if (p >= n) return;
    int row = 0;
    for (int q = 0; q < n; q++) row += experts[q] < experts[p] || (experts[q] == experts[p] && q < p);
    pairs[row] = p;
    positions[p / n_used * n_used + choice_rank(experts, p, n_used)] = row;
}

// Rows of the pairs [first, end), in order, by a block of N_WARP warps, each with a part of them.
// next[w][e]: how many pairs warp w has of expert e, then the row of the next one. first_row: row of each expert's first.
DEVICE void place(int* pairs, int* positions, const int* ids, int (*next)[MAX_EXPERT], const int* first_row, int first,
                  int end, int n_used, int n_expert) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int part = (end - first + N_WARP * WARP - 1) / (N_WARP * WARP) * WARP;  // pairs a warp
    const int begin = first + warp * part, stop = min(end, begin + part);
    for (int p = begin + lane; p < stop; p += WARP) atomicAdd(&next[warp][ids[p]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) {
        int row = first_row[e];
        for (int w = 0; w < N_WARP; w++) {
            const int count = next[w][e];
            next[w][e] = row;
            row += count;
        }
    }
    __syncthreads();
    for (int p = begin + lane; p - lane < stop; p += WARP) {
        const bool inside = p < stop;
        const int expert = inside ? ids[p] : -1;
        const u32 same = __match_any_sync(ALL_LANES, expert);
        const int before = __popc(same & (1u << lane) - 1u);
        const int row = inside ? next[warp][expert] + before : 0;
        __syncwarp();
        if (inside) {
            if (before == 0) next[warp][expert] += __popc(same);
            pairs[row] = p;
            positions[p / n_used * n_used + choice_rank(ids, p, n_used)] = row;
        }
        __syncwarp();
    }
}

// One block a chunk, after sort_add.
extern "C" __global__ void __launch_bounds__(256)
    sort_place(int* pairs, int* positions, const int* ids, const int* first_rows, int n, int n_used, int n_expert) {
    __shared__ int next[N_WARP][MAX_EXPERT];
    for (int i = threadIdx.x; i < N_WARP * MAX_EXPERT; i += blockDim.x) next[0][i] = 0;
    __syncthreads();
    const int first = blockIdx.x * CHUNK;
    place(pairs, positions, ids, next, first_rows + blockIdx.x * n_expert, first, min(n, first + CHUNK), n_used,
          n_expert);
}

// All of it for at most one chunk, by one block.
extern "C" __global__ void __launch_bounds__(256)
    sort_small(int* pairs, int* offsets, int* positions, const int* ids, int n, int n_used, int n_expert) {
    __shared__ int next[N_WARP][MAX_EXPERT];
    __shared__ int first_row[MAX_EXPERT + 1];
    for (int i = threadIdx.x; i < N_WARP * MAX_EXPERT; i += blockDim.x) next[0][i] = 0;
    for (int e = threadIdx.x; e <= n_expert; e += blockDim.x) first_row[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < n; p += blockDim.x) atomicAdd(&first_row[ids[p] + 1], 1);
    __syncthreads();
    if (threadIdx.x < WARP) {  // sums up to each expert, 32 experts at a time
        int carry = 0;
        for (int at = 0; at <= n_expert; at += WARP) {
            const int e = at + threadIdx.x;
            int sum = e <= n_expert ? first_row[e] : 0;
            for (int step = 1; step < WARP; step *= 2) {
                const int before = __shfl_up_sync(ALL_LANES, sum, step);
                if (threadIdx.x >= step) sum += before;
            }
            if (e <= n_expert) first_row[e] = carry + sum;
            carry += __shfl_sync(ALL_LANES, sum, WARP - 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e <= n_expert; e += blockDim.x) offsets[e] = first_row[e];
    place(pairs, positions, ids, next, first_row, 0, n, n_used, n_expert);
}
