// Ops that treat every number, or every row, alike. Macros: X, W = types of what is read, Y = of what is written.
#include "common.cuh"

constexpr int BLOCK = 256;

// y[i] = f(a[i], b[i % period]) for n numbers, 8 a thread; all three on 16 bytes. `y` may be `a`.
template <class B, class F>
DEVICE void map2(Y* y, const X* a, const B* b, u64 n, u64 period, F f) {
    const u64 i = ((u64)blockIdx.x * BLOCK + threadIdx.x) * 8;
    if (i >= n) return;
    if (i + 8 <= n && period % 8 == 0) {
        float p[8], q[8];
        load8(a + i, p);
        load8(b + i % period, q);
#pragma unroll
        for (int k = 0; k < 8; k++) p[k] = f(p[k], q[k]);
        store8(y + i, p);
    } else {
        for (u64 j = i; j < n && j < i + 8; j++) y[j] = from_f32<Y>(f(to_f32(a[j]), to_f32(b[j % period])));
    }
}

// `b` is as long as `a`, or one row of `period` numbers.
extern "C" __global__ void __launch_bounds__(256) add(Y* y, const X* a, const W* b, u64 n, u64 period) {
    map2(y, a, b, n, period, [](float p, float q) { return p + q; });
}

// f(gate) * up. Source: Shazeer 2020, arXiv 2002.05202.
extern "C" __global__ void __launch_bounds__(256) swiglu(Y* y, const X* gate, const W* up, u64 n) {
    await_previous();
    map2(y, gate, up, n, n, [](float g, float u) { return g / (1.f + expf(-g)) * u; });
}

extern "C" __global__ void __launch_bounds__(256) geglu(Y* y, const X* gate, const W* up, u64 n) {
    map2(y, gate, up, n, n, [](float g, float u) {
        constexpr float root = 0.7978845608028654f;  // sqrt(2 / pi)
        return 0.5f * g * (1.f + tanhf(root * (g + 0.044715f * g * g * g))) * u;
    });
}

extern "C" __global__ void __launch_bounds__(256) scale(Y* y, const X* x, float factor, u64 n) {
    map2(y, x, x, n, n, [=](float p, float) { return p * factor; });
}

// --- rms_norm ---------------------------------------------------------------------------------------------------------

// One row by `n_thread` threads, of which this is the one numbered `thread`; sum_of adds up a number of each.
template <class F>
DEVICE void norm_row(Y* y, const X* x, const float* weight, int n, float eps, int thread, int n_thread, F sum_of) {
    float sum = 0.f;
    if (n % 8 == 0) {
        for (int i = thread * 8; i < n; i += n_thread * 8) {
            float v[8];
            load8(x + i, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[k] * v[k];
        }
    } else {
        for (int i = thread; i < n; i += n_thread) sum += to_f32(x[i]) * to_f32(x[i]);
    }
    const float factor = 1.f / sqrtf(sum_of(sum) / n + eps);
    if (n % 8 == 0) {
        for (int i = thread * 8; i < n; i += n_thread * 8) {
            float v[8], w[8];
            load8(x + i, v);
            if (weight) load8(weight + i, w);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] * factor * (weight ? w[k] : 1.f);
            store8(y + i, v);
        }
    } else {
        for (int i = thread; i < n; i += n_thread)
            y[i] = from_f32<Y>(to_f32(x[i]) * factor * (weight ? weight[i] : 1.f));
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight, a block a row. `y` may be `x`: a thread writes what it alone has read.
extern "C" __global__ void rms_norm(Y* y, const X* x, const float* weight, int n, float eps) {
    await_previous();
    __shared__ float sums[WARP];
    const u64 at = (u64)blockIdx.x * n;
    norm_row(y + at, x + at, weight, n, eps, threadIdx.x, blockDim.x, [&](float s) { return block_sum(s, sums); });
}

// The same for short rows, as heads are: LANES lanes a row.
template <int LANES>
DEVICE void norm_short(Y* y, const X* x, const float* weight, int n_row, int n, float eps) {
    const int row = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES;
    const u64 at = (u64)row * n;
    if (row >= n_row) n = 0;  // behind the last row there is nothing to do but to take part in the sums
    norm_row(y + at, x + at, weight, n, eps, threadIdx.x % LANES, LANES, [](float s) {
#pragma unroll
        for (int mask = LANES / 2; mask; mask >>= 1) s += __shfl_xor_sync(ALL_LANES, s, mask);
        return s;
    });
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_16(Y* y, const X* x, const float* weight, int n_row, int n, float eps) {
    await_previous();
    norm_short<16>(y, x, weight, n_row, n, eps);
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_32(Y* y, const X* x, const float* weight, int n_row, int n, float eps) {
    await_previous();
    norm_short<32>(y, x, weight, n_row, n, eps);
}
