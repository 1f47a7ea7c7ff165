// What lies between the projections and attention: heads are normalized and turned, K and V go to an F16 cache.
// Macros: X = type of the activations, LANES = lanes a head, each with 8 of its numbers.
#include "turns.cuh"

constexpr int BLOCK = 256;

// Heads of q, then of k, then of v: of widths d_k, d_k and d_v, each a multiple of 8 up to 8 LANES. n_dims, how many
// numbers of a head turn, is a multiple of 16. Rounded where rms_norm, rope and kv_store round. q is changed in place.
// Grid: (token, BLOCK / LANES heads). Shared: 2 floats a pair.
extern "C" __global__ void __launch_bounds__(256)
    rope_store(X* q, const X* k, const X* v, u8* cells, const int* positions, const float* q_norm, const float* k_norm,
               const float* freq_factors, float eps, float log2_base, float log2_base_low, float scale, u64 cell_nbytes,
               u64 v_offset, int n_head, int n_head_kv, int d_k, int d_v, int n_dims, int neox) {
    await_previous();
    extern __shared__ float2 turns[];
    const int token = blockIdx.x, lane = threadIdx.x % LANES, at = lane * 8;
    const int head = blockIdx.y * (BLOCK / LANES) + threadIdx.x / LANES;
    const bool is_q = head < n_head, is_v = head >= n_head + n_head_kv;
    const int kv_head = head - n_head - (is_v ? n_head_kv : 0), width = is_v ? d_v : d_k;
    const bool inside = kv_head < n_head_kv && at < width;
    const u64 place = (is_q ? (u64)token * n_head + head : (u64)token * n_head_kv + kv_head) * width + at;
    const int position = positions[token];
    float y[8] = {};
    if (inside) load8((is_q ? q : is_v ? v : k) + place, y);
    make_turns(turns, (double)position * scale, {log2_base, log2_base_low}, freq_factors, n_dims);

    const float* weight = is_q ? q_norm : is_v ? nullptr : k_norm;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += y[i] * y[i];
#pragma unroll
    for (int mask = LANES / 2; mask; mask >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (weight && inside) {
        const float factor = 1.f / sqrtf(sum / width + eps);
        float w[8];
        load8(weight + at, w);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = to_f32(from_f32<X>(y[i] * factor * w[i]));
    }

    const int half = n_dims / 2, partner = at < half ? lane + half / 8 : lane - half / 8;
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; i++) other[i] = __shfl_sync(ALL_LANES, y[i], partner, LANES);
    __syncthreads();
    if (!is_v && at < n_dims) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!neox) {
                if (i % 2 == 0) turn(y[i], y[i + 1], turns[at / 2 + i / 2]);
            } else if (at < half) {
                turn(y[i], other[i], turns[at + i]);
            } else {
                turn(other[i], y[i], turns[at - half + i]);
            }
        }
    }
    if (!inside) return;
    if (is_q) {
        store8(q + place, y);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = to_f32(from_f32<X>(y[i]));
    u8* cell = cells + position * cell_nbytes + (is_v ? v_offset : 0) + (u64)kv_head * width * 2;
    store8((f16*)cell + at, y);
}
