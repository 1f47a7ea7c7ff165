// Choosing experts. Source: Shazeer et al. 2017, arXiv 1701.06538 (top-k gating).
#include "common.h"

#define MAX_EXPERT 512
#define MAX_USED 32
enum { SOFTMAX, SIGMOID, TOPK_SOFTMAX };

// A group takes a token at a time. The scores grow with the logits, so these decide.
// logits: [n, n_expert]; ids, weights: [n, n_used].
__kernel void route_topk(__global int *ids, u64 ids_at, __global float *weights, u64 weights_at,
                         __global const float *logits, u64 logits_at, int n, int n_expert, int n_used, int gating,
                         int normalize, float scale, int forced) {
    __local u32 keys[MAX_EXPERT];
    __local float shared[GROUP];
    __local u64 best[GROUP];
    __local float chosen[MAX_USED];
    for (int token = get_group_id(0); token < n; token += get_num_groups(0)) {
        __global const float *row = AT(const float, logits) + (u64)token * n_expert;
        __global int *id = AT(int, ids) + (u64)token * n_used;
        __global float *weight = AT(float, weights) + (u64)token * n_used;
        MEET();
        float top = -INFINITY;
        for (int e = LANE; e < n_expert; e += GROUP) {
            keys[e] = order_key(row[e]);
            top = fmax(top, row[e]);
        }
        top = group_max(top, shared);
        for (int i = 0; i < n_used; i++) {
            if (forced) {
                if (LANE == 0) chosen[i] = row[id[i]];
                continue;
            }
            u64 mine = 0;  // the lowest of the best: its key, then its number from the other end
            for (int e = LANE; e < n_expert; e += GROUP) mine = max(mine, (u64)keys[e] << 32 | (u32)~e);
            best[LANE] = mine;
            for (int width = GROUP / 2; width; width /= 2) {
                MEET();
                if (LANE < width) best[LANE] = max(best[LANE], best[LANE + width]);
            }
            MEET();
            if (LANE == 0) {
                const int e = ~(u32)best[0];
                id[i] = e;
                chosen[i] = order_value(best[0] >> 32);
                keys[e] = 0;
            }
            MEET();
        }
        float sum = 0.f;
        if (gating == SOFTMAX)
            for (int e = LANE; e < n_expert; e += GROUP) sum += exp(row[e] - top);
        sum = group_sum(sum, shared);
        if (LANE == 0) {
            float most = -INFINITY, total = 0.f;
            for (int i = 0; i < n_used; i++) most = fmax(most, chosen[i]);
            for (int i = 0; i < n_used; i++) {
                chosen[i] = gating == SIGMOID ? 1.f / (1.f + exp(-chosen[i]))
                                              : exp(chosen[i] - (gating == SOFTMAX ? top : most));
                total += chosen[i];
            }
            if (!normalize) total = gating == SOFTMAX ? sum : gating == SIGMOID ? 1.f : total;
            for (int i = 0; i < n_used; i++) weight[i] = chosen[i] / total * scale;
        }
    }
}
