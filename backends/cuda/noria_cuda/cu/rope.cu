// Rotary position embedding. Macro: X = type of the activations.
#include "turns.cuh"

// x: [n, n_head, head_dim], turned in place; one block a token. Shared: 2 floats a pair.
extern "C" __global__ void __launch_bounds__(256)
    rope(X* x, const int* positions, const float* freq_factors, float log2_base, float log2_base_low, float scale,
         int n_head, int head_dim, int n_dims, int neox) {
    await_previous();
    extern __shared__ float2 turns[];  // (cos, sin) of each pair
    const int half = n_dims / 2;
    make_turns(turns, (double)positions[blockIdx.x] * scale, {log2_base, log2_base_low}, freq_factors, n_dims);
    __syncthreads();
    X* row = x + (u64)blockIdx.x * n_head * head_dim;
    if (half % 8 == 0 && head_dim % 8 == 0) {
        for (int j = threadIdx.x; j < n_head * (half / 8); j += blockDim.x) {
            const int i = j % (half / 8) * 8;  // of 8 pairs
            X* first = row + j / (half / 8) * head_dim + (neox ? i : 2 * i);
            X* second = first + (neox ? half : 8);
            float p[8], q[8];
            load8(first, p);
            load8(second, q);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (neox) {
                    turn(p[k], q[k], turns[i + k]);
                } else if (k % 2 == 0) {
                    turn(p[k], p[k + 1], turns[i + k / 2]);
                    turn(q[k], q[k + 1], turns[i + 4 + k / 2]);
                }
            }
            store8(first, p);
            store8(second, q);
        }
        return;
    }
    for (int j = threadIdx.x; j < n_head * half; j += blockDim.x) {
        const int i = j % half;
        X* a = row + j / half * head_dim + (neox ? i : 2 * i);
        X* b = a + (neox ? half : 1);
        float p = to_f32(*a), q = to_f32(*b);
        turn(p, q, turns[i]);
        *a = from_f32<X>(p), *b = from_f32<X>(q);
    }
}
