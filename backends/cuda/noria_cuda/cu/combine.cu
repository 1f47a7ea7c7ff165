// Adding up what a token's experts say. Macro: X = type of their outputs.
#include "common.cuh"

constexpr int BLOCK = 256;

// acc[token] += weight * y[row], row after row in ascending order, for the rows of the window whose experts are here.
// Product and sum are rounded one by one, so that the bits do not depend on how rows are cut into windows.
// The window begins at row offsets[first_expert] + first_row and has at most n_rows rows of experts before end_expert.
// acc: [n_tokens, n_embd]; y: [n_rows, n_embd]. Grid: (token, 8 * 256 numbers).
extern "C" __global__ void __launch_bounds__(256)
    combine(float* acc, const X* y, const int* where, const int* ids, const float* weights, const int* pairs,
            const int* offsets, const int* positions, int n_used, int first_expert, int end_expert, int first_row,
            int n_rows, int n_embd) {
    const int first = offsets[first_expert] + first_row, end = min(first + n_rows, offsets[end_expert]);
    if (first >= end) return;
    // Which rows of `y`, and how much of each: thread c finds out about choice c, of at most BLOCK.
    __shared__ int rows[BLOCK];
    __shared__ float amounts[BLOCK];
    if (threadIdx.x < n_used) {
        const int row = positions[blockIdx.x * n_used + threadIdx.x];
        const bool inside = first <= row && row < end;
        const int pair = inside ? pairs[row] : 0;
        rows[threadIdx.x] = inside && where[ids[pair]] >= 0 ? row - first : -1;
        amounts[threadIdx.x] = weights[pair];
    }
    __syncthreads();
    const int i = (blockIdx.y * BLOCK + threadIdx.x) * 8;
    if (i >= n_embd) return;
    acc += (u64)blockIdx.x * n_embd;
    float sum[8];
    bool any = false;
    for (int c = 0; c < n_used; c++) {
        if (rows[c] < 0) continue;
        if (!any) load8(acc + i, sum);
        any = true;
        float value[8];
        load8(y + (u64)rows[c] * n_embd + i, value);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] = __fadd_rn(sum[k], __fmul_rn(amounts[c], value[k]));
    }
    if (any) store8(acc + i, sum);
}
