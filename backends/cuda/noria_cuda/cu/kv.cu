// Writing to the KV cache. Macros: X = type of the activations, STORE = type of the cells (F16, Q8_0, Q4_0).
// Quantized numbers have the bits of gguf.quants.quantize.
#include "common.cuh"

constexpr int BLOCK = 256;

struct F16 {
    static constexpr int block = 1;
    DEVICE void store(u8* cell, int i, float x) { ((f16*)cell)[i] = from_f32<f16>(x); }
};

// A warp holds the 32 numbers of a block, lane by lane.
struct Q8_0 {
    static constexpr int block = 32;
    DEVICE void store(u8* cell, int i, float x) {
        u8* b = cell + i / 32 * 34;
        const float d = warp_max(fabsf(x)) / 127.f;
        ((i8*)b)[2 + i % 32] = (i8)roundf(x * (d == 0.f ? 0.f : 1.f / d));
        if (i % 32 == 0) *(f16*)b = from_f32<f16>(d);
    }
};

struct Q4_0 {
    static constexpr int block = 32;
    DEVICE void store(u8* cell, int i, float x) {
        u8* b = cell + i / 32 * 18;
        const float greatest = warp_max(fabsf(x));
        const u32 where = __ballot_sync(ALL_LANES, fabsf(x) == greatest);
        const float d = __shfl_sync(ALL_LANES, x, __ffs(where) - 1) / -8.f;  // of the first of the greatest
        const float scaled = __fadd_rn(__fmul_rn(x, d == 0.f ? 0.f : 1.f / d), 8.5f);
        const u32 q = min((u32)(int)scaled, 15u);
        const u32 upper = __shfl_down_sync(ALL_LANES, q, 16);
        if (i % 32 < 16) b[2 + i % 32] = (u8)(q | upper << 4);
        if (i % 32 == 0) *(f16*)b = from_f32<f16>(d);
    }
};

// rows: [n, width], to the cells `positions` of a cache whose cells begin at `cells`. Grid: (row, 256 numbers).
// `width` is a multiple of STORE::block, so a warp that does any part of a block does all of it.
extern "C" __global__ void __launch_bounds__(256)
    kv_store(u8* cells, const X* rows, const int* positions, int width, u64 cell_nbytes) {
    await_previous();
    const int i = blockIdx.y * BLOCK + threadIdx.x;
    if (i >= width) return;
    STORE::store(cells + positions[blockIdx.x] * cell_nbytes, i, to_f32(rows[(u64)blockIdx.x * width + i]));
}
