// Products of quantized rows with one input row, by warps: pieces of weights and the input lie in shared memory.
#pragma once
#include "matrix.cuh"
#include "quants.cuh"

// --- the input -------------------------------------------------------------------------------------------------------

// An input row as f32, 4 numbers of padding after every 32 (so that lanes that read 32 numbers each hit different
// banks), then the sum of every 8 numbers.
struct Input {
    float* values;
    float* sums;

    DEVICE Input at(float* shared, int n) { return {shared, shared + (n + 31) / 32 * 36}; }
    static __device__ __forceinline__ constexpr int place(int i) { return i + i / 32 * 4; }

    template <class T>
    __device__ __forceinline__ void fill(const T* x, int n, int thread, int n_thread) const {
        for (int i = thread * 8; i < n; i += n_thread * 8) {
            float v[8];
            load8(x + i, v);
            store8(values + place(i), v);
            sums[i / 8] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    }
};

// --- products --------------------------------------------------------------------------------------------------------

// How many weights of a row share a scale: 32, or 16.
template <class Q>
constexpr int SCALE_WIDTH = 32;
template <>
constexpr int SCALE_WIDTH<Q2_K> = 16;
template <>
constexpr int SCALE_WIDTH<Q3_K> = 16;
template <>
constexpr int SCALE_WIDTH<Q6_K> = 16;
template <>
constexpr int SCALE_WIDTH<IQ2_XS> = 16;
template <>
constexpr int SCALE_WIDTH<IQ2_S> = 16;

// part += the products of 8 weights and 8 numbers of the input.
template <class Q>
DEVICE void add_eight(float& part, const u8* block, int at, const float* x) {
    float q[8], v[8];
    Q::quants(block, at, q);
    load8(x, v);
#pragma unroll
    for (int k = 0; k < 8; k++) part = fmaf(q[k], v[k], part);
}

// sum += the products of 32 weights from 32 g on (of the last ones, 8 n) and the numbers at x, of which the sums of
// each 8 are at `sums`. Scales are applied to sums of products, not to weights.
template <class Q>
DEVICE void add_group(float& sum, const u8* row, u32 g, int n, const float* x, const float* sums) {
    if constexpr (Q::scaled) {
        constexpr u32 per_block = Q::block / 32;
        const u8* block = row + g / per_block * Q::nbytes;
        const int at0 = g % per_block * 32;
#pragma unroll
        for (int first = 0; first < 32; first += SCALE_WIDTH<Q>) {
            const Scale scale = Q::scale(block, at0 + first);
            float part = 0, x_sum = 0;
#pragma unroll
            for (int i = first; i < first + SCALE_WIDTH<Q>; i += 8) {
                add_eight<Q>(part, block, at0 + i, x + i);
                if constexpr (Q::has_min) x_sum += sums[i / 8];
            }
            sum = fmaf(scale.d, part, sum);
            if constexpr (Q::has_min) sum = fmaf(-scale.m, x_sum, sum);
        }
    } else {
#pragma unroll 4
        for (int j = 0; j < n; j++) add_eight<Q>(sum, row + (g * 4 + j) * Q::nbytes, 0, x + j * 8);
    }
}

// f(g, n, x, sums) for the numbers [begin, end) of the input, 32 in a row for each lane: as `add_group` takes them.
template <class F>
DEVICE void for_lane(const Input& input, u32 begin, u32 end, F f) {
    for (u32 g = begin / 32 + threadIdx.x % WARP; g * 32 < end; g += WARP)
        f(g, (int)min(end - g * 32, 32u) / 8, input.values + g * 36, input.sums + g * 4);
}

// sum += the part [begin, end) of a row, times the input.
template <class Q>
DEVICE void add_dot(float& sum, const u8* part, const Input& input, u32 begin, u32 end) {
    for_lane(input, begin, end, [&](u32 g, int n, const float* x, const float* sums) {
        add_group<Q>(sum, part, g - begin / 32, n, x, sums);
    });
}
