// Angles of rotary position embedding.
#pragma once
#include "common.cuh"

// The base of the angles as its logarithm, in two floats (high and low part) whose sum is exact to 48 bits.
struct Base {
    float log2, log2_low;
};

// (cos, sin) of each of n_dims / 2 pairs, by all threads of a block, which must meet before `turns` is read.
//
// Angles are kept as turns in f64 until less than one is left: in f32 a position of 30,000 would be off by 1e-3 rad.
DEVICE void make_turns(float2* turns, double position, Base base, const float* freq_factors, int n_dims) {
    for (int i = threadIdx.x; i < n_dims / 2; i += blockDim.x) {
        const double exponent = -2.0 * i / n_dims * ((double)base.log2 + base.log2_low);
        double turn = position * exp2(exponent) * 0.15915494309189535;  // 1 / 2 pi
        if (freq_factors) turn /= freq_factors[i];
        float sine, cosine;
        sincospif(2.f * (float)(turn - rint(turn)), &sine, &cosine);
        turns[i] = make_float2(cosine, sine);
    }
}

DEVICE void turn(float& a, float& b, float2 by) {
    const float p = a, q = b;
    a = p * by.x - q * by.y;
    b = p * by.y + q * by.x;
}
