// Choosing experts. Macro: PER_LANE = ceil(n_expert / 32).
// Source: Shazeer et al. 2017, arXiv 1701.06538 (top-k gating).
#include "common.cuh"

constexpr int BLOCK = 128;
enum Gating { SOFTMAX, SIGMOID, TOPK_SOFTMAX };

DEVICE u32 warp_max(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, x);
#else
    for (int mask = WARP / 2; mask; mask >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
#endif
}

// One warp a token; lane l holds experts l, l + 32, ... The scores grow with the logits, so these decide.
// logits: [n, n_expert]; ids, weights: [n, n_used].
extern "C" __global__ void __launch_bounds__(128)
    route_topk(int* ids, float* weights, const float* logits, int n, int n_expert, int n_used, int gating,
               int normalize, float scale, int forced) {
    await_previous();
    const int token = blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= n) return;
    logits += (u64)token * n_expert, ids += token * n_used, weights += token * n_used;

    float mine[PER_LANE];
    u32 keys[PER_LANE];
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        const int expert = j * WARP + lane;
        mine[j] = expert < n_expert ? logits[expert] : -INFINITY;
        keys[j] = expert < n_expert ? order_key(mine[j]) : 0u;
        top = fmaxf(top, mine[j]);
    }
    top = warp_max(top);

    // Lane i has choice i (n_used is at most 32).
    float logit = -INFINITY;
    if (forced) {
        if (lane < n_used) logit = logits[ids[lane]];
    } else {
        for (int i = 0; i < n_used; i++) {
            u32 best = 0u;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) best = max(best, keys[j]);
            best = warp_max(best);
            u32 expert = ~0u;
#pragma unroll
            for (int j = PER_LANE - 1; j >= 0; j--)
                if (keys[j] == best) expert = j * WARP + lane;
            expert = ~warp_max(~expert);  // the lowest
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (j * WARP + lane == expert) keys[j] = 0u;
            if (lane == i) logit = order_value(best), ids[i] = expert;
        }
    }

    float weight = 0.f;
    if (gating == SIGMOID) {
        weight = 1.f / (1.f + expf(-logit));
    } else if (gating == SOFTMAX) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) sum += expf(mine[j] - top);
        weight = expf(logit - top) / warp_sum(sum);
    } else {
        weight = expf(logit - warp_max(logit));
        weight /= warp_sum(lane < n_used ? weight : 0.f);
    }
    if (normalize) weight /= warp_sum(lane < n_used ? weight : 0.f);
    if (lane < n_used) weights[lane] = weight * scale;
}
