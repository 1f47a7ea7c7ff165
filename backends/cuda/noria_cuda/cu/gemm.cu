// Grouped GEMM over the rows of experts, on matrix units. Compiled for a type ACT of activations and packed weights.
//
// Rows come sorted by expert. Blocks stay and take tiles of output in turn from a list that each of them makes from the
// offsets of the rows, so nothing depends on the host and empty windows cost one short kernel. A number of the output
// is always the sum of the same products in the same order, wherever its row lies.
#include "glu.cuh"
#include "matrix.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "warpgroup.cuh"
#endif

constexpr int TILE_M = 128;
constexpr int MAX_EXPERTS = 256;  // of one launch

// --- the list of tiles -----------------------------------------------------------------------------------------------

struct Tile {
    int expert;      // of the launch
    int row, n_row;  // sorted rows
    int n_tile;      // tile of output columns
};

// The rows of experts [expert0, expert0 + n) in a noria.api.RowWindow, cut into tiles.
struct Tiles {
    int base, total;
    int begin[MAX_EXPERTS + 1];  // first row tile of each expert
    int low[MAX_EXPERTS], high[MAX_EXPERTS];

    // By all threads. An expert must be in all three tables.
    __device__ __forceinline__ void make(const int* offsets, const int* here0, const int* here1, const int* here2,
                                         int expert0, int n, int first_expert, int end_expert, int first_row,
                                         int n_rows) {
        const int start = offsets[first_expert] + first_row, end = min(start + n_rows, offsets[end_expert]);
        const int lane = threadIdx.x % WARP;
        if (threadIdx.x < WARP) {
            int before = 0;
            for (int e0 = 0; e0 < n; e0 += WARP) {
                const int e = e0 + lane;
                int n_tile = 0;
                if (e < n) {
                    const int expert = expert0 + e;
                    low[e] = max(offsets[expert], start), high[e] = min(offsets[expert + 1], end);
                    const bool here = here0[expert] >= 0 && here1[expert] >= 0 && here2[expert] >= 0;
                    if (here && high[e] > low[e]) n_tile = (high[e] - low[e] + TILE_M - 1) / TILE_M;
                }
                int sum = n_tile;
#pragma unroll
                for (int step = 1; step < WARP; step *= 2) {
                    const int other = __shfl_up_sync(ALL_LANES, sum, step);
                    if (lane >= step) sum += other;
                }
                if (e < n) begin[e] = before + sum - n_tile;
                before += __shfl_sync(ALL_LANES, sum, WARP - 1);
            }
            if (lane == 0) base = start, total = before, begin[n] = before;
        }
        __syncthreads();
    }

    // Tile i; tiles that share weights follow each other.
    __device__ __forceinline__ Tile get(int i, int n, int n_n) const {
        int a = 0, b = n;
        while (b - a > 1) {
            const int mid = (a + b) / 2;
            if (begin[mid] * n_n <= i)
                a = mid;
            else
                b = mid;
        }
        const int n_m = begin[a + 1] - begin[a], at = i - begin[a] * n_n;
        const int row = low[a] + at % n_m * TILE_M;
        return {a, row, min(TILE_M, high[a] - row), at / n_m};
    }
};

// Where the input of sorted row `row` is.
DEVICE u64 input_row(const int* pairs, int n_expert_used, int row, int base) {
    return pairs ? pairs[row] / n_expert_used : row - base;
}

DEVICE void store_columns(ACT* row, int column, int n_out, uint4 values) {
    if (column < n_out) *(uint4*)(row + column) = values;
}

// --- any matrix unit -------------------------------------------------------------------------------------------------

#ifndef STAGES
#define STAGES 3
#endif
constexpr int TILE_N = 128;
constexpr int STAGE_NBYTES = (TILE_M + TILE_N) * TILE_ROW;

// 8 warps, 4 x 2 of 32 x 64. With IS_GLU a tile has 64 columns of gate and the same 64 of up.
template <bool IS_GLU>
__device__ __forceinline__ void grouped(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs,
                                        const int* here0, const int* here1, const int* here2, int n_expert_used,
                                        int expert0, int n, int first_expert, int end_expert, int first_row, int n_rows,
                                        int n_out, int n_in) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Tiles tiles;
    tiles.make(offsets, here0, here1, here2, expert0, n, first_expert, end_expert, first_row, n_rows);
    constexpr int COLUMNS = IS_GLU ? TILE_N / 2 : TILE_N, PACKED = IS_GLU ? PACK_ROWS / 2 : PACK_ROWS;
    const int n_n = (n_out + COLUMNS - 1) / COLUMNS, n_packed = (n_out + PACKED - 1) / PACKED;
    const int n_k = (n_in + TILE_K - 1) / TILE_K;
    const int thread = threadIdx.x, lane = thread % WARP, warp_m = thread / WARP % 4, warp_n = thread / WARP / 4;
    const int piece = thread % 8;
    for (int i = blockIdx.x; i < tiles.total * n_n; i += gridDim.x) {
        const Tile tile = tiles.get(i, n, n_n);
        const u8* weights = w + ((u64)tile.expert * n_packed + tile.n_tile / 2) * n_k * PACK_TILE;
        const ACT* input[4];
        const u8* weight[4];
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int r = thread / 8 + 32 * h;
            const int row = tile.row + min(r, tile.n_row - 1);
            input[h] = x + input_row(pairs, n_expert_used, row, tiles.base) * n_in + piece * 8;
            const int packed = IS_GLU ? r % 64 + r / 64 * 128 + tile.n_tile % 2 * 64 : r + tile.n_tile % 2 * 128;
            weight[h] = weights + packed * TILE_ROW + piece * 16;
        }
        auto load = [&](int k) {
            if (k < n_k) {
                u8* stage = shared + k % STAGES * STAGE_NBYTES;
#pragma unroll
                for (int h = 0; h < 4; h++) {
                    const int r = thread / 8 + 32 * h;
                    const bool valid = r < tile.n_row && k * TILE_K + piece * 8 < n_in;
                    copy16(stage + swizzled(r, piece), valid ? input[h] + k * TILE_K : x, valid);
                    copy16(stage + (TILE_M + r) * TILE_ROW + piece * 16, weight[h] + (u64)k * PACK_TILE);
                }
            }
            copy_commit();
        };
        float acc[2][8][4] = {};
#pragma unroll
        for (int k = 0; k < STAGES - 1; k++) load(k);
        for (int k = 0; k < n_k; k++) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            load(k + STAGES - 1);
            const u8* a = shared + k % STAGES * STAGE_NBYTES;
            const u8* b = a + TILE_M * TILE_ROW;
#pragma unroll
            for (int step = 0; step < TILE_K / 16; step++) {
                u32 fa[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++)
                    load_matrices(fa[m], a + swizzled(warp_m * 32 + m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const int column =
                        IS_GLU ? (j < 4 ? warp_n * 32 + j * 8 : 64 + warp_n * 32 + (j - 4) * 8) : warp_n * 64 + j * 8;
                    u32 fb[4];
                    load_matrices(fb, b + swizzled(column + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(ACT{}, acc[m][j], fa[m], fb[0], fb[1]);
                        mma(ACT{}, acc[m][j + 1], fa[m], fb[2], fb[3]);
                    }
                }
            }
        }
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = warp_m * 32 + m * 16 + half * 8 + lane / 4;
                ACT* row = out + (u64)(tile.row - tiles.base + r) * n_out;
                const int column = tile.n_tile * COLUMNS + warp_n * COLUMNS / 2 + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < (IS_GLU ? 4 : 8); j += 4) {
                    u32 p[4];
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float v0 = acc[m][j + c][half * 2], v1 = acc[m][j + c][half * 2 + 1];
                        if constexpr (IS_GLU) {
                            v0 = activate(v0) * acc[m][c + 4][half * 2];
                            v1 = activate(v1) * acc[m][c + 4][half * 2 + 1];
                        }
                        p[c] = pack2<ACT>(v0, v1);
                    }
                    const uint4 values = transpose_quad(p[0], p[1], p[2], p[3]);
                    if (r < tile.n_row) store_columns(row, column + j * 8, n_out, values);
                }
            }
    }
}

// out[row] = f(gate) * up of the rows' experts. out: [n_rows, n_out].
extern "C" __global__ void __launch_bounds__(256, 1)
    grouped_glu(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs, const int* here0,
                const int* here1, const int* here2, int n_expert_used, int expert0, int n, int first_expert,
                int end_expert, int first_row, int n_rows, int n_out, int n_in) {
    grouped<true>(out, x, w, offsets, pairs, here0, here1, here2, n_expert_used, expert0, n, first_expert, end_expert,
                  first_row, n_rows, n_out, n_in);
}

// out[row] = x @ W.T of the rows' experts.
extern "C" __global__ void __launch_bounds__(256, 1)
    grouped_mm(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs, const int* here0,
               const int* here1, const int* here2, int n_expert_used, int expert0, int n, int first_expert,
               int end_expert, int first_row, int n_rows, int n_out, int n_in) {
    grouped<false>(out, x, w, offsets, pairs, here0, here1, here2, n_expert_used, expert0, n, first_expert, end_expert,
                   first_row, n_rows, n_out, n_in);
}

// --- warpgroup matrix units ------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int WG_STAGES = 4;
constexpr int WG_STAGE_NBYTES = (TILE_M + PACK_ROWS) * TILE_ROW;
constexpr int LAG = 1;  // stages whose copies a thread leaves on their way; with 3 both sides would wait

// Three warpgroups: one copies, two multiply 64 x 256 each. With IS_GLU a tile has 128 columns of gate and of up.
template <bool IS_GLU>
__device__ __forceinline__ void grouped_wg(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs,
                                           const int* here0, const int* here1, const int* here2, int n_expert_used,
                                           int expert0, int n, int first_expert, int end_expert, int first_row,
                                           int n_rows, int n_out, int n_in) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Tiles tiles;
    __shared__ __align__(8) u64 full[WG_STAGES], empty[WG_STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < WG_STAGES; s++) {
            barrier_init(full + s, 4 + 1);
            barrier_init(empty + s, 8);
        }
        fence_matrix_reads();
    }
    tiles.make(offsets, here0, here1, here2, expert0, n, first_expert, end_expert, first_row, n_rows);
    constexpr int COLUMNS = IS_GLU ? PACK_ROWS / 2 : PACK_ROWS;
    const int n_n = (n_out + COLUMNS - 1) / COLUMNS, n_k = (n_in + TILE_K - 1) / TILE_K;
    const int thread = threadIdx.x % 128;
    u32 at = 0;  // stages gone through
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        const int piece = thread % 8;
        auto hand_over = [&](u32 stage) {
            fence_matrix_reads();
            __syncwarp();
            if (thread % WARP == 0) barrier_arrive(full + stage % WG_STAGES);
        };
        for (int i = blockIdx.x; i < tiles.total * n_n; i += gridDim.x) {
            const Tile tile = tiles.get(i, n, n_n);
            const u8* weights = w + ((u64)tile.expert * n_n + tile.n_tile) * n_k * PACK_TILE;
            u32 input[8];  // in pieces of 8 values
#pragma unroll
            for (int h = 0; h < 8; h++) {
                const int row = tile.row + min(thread / 8 + 16 * h, tile.n_row - 1);
                input[h] = (u32)input_row(pairs, n_expert_used, row, tiles.base) * (n_in / 8) + piece;
            }
            for (int k = 0; k < n_k; k++, at++) {
                const int s = at % WG_STAGES;
                u8* stage = shared + s * WG_STAGE_NBYTES;
                barrier_wait(empty + s, at / WG_STAGES & 1 ^ 1);
                if (thread == 0) {
                    barrier_arrive_expect(full + s, PACK_TILE);
                    copy_bulk(stage + TILE_M * TILE_ROW, weights + (u64)k * PACK_TILE, PACK_TILE, full + s);
                }
                const bool inside = k * TILE_K + piece * 8 < n_in;
#pragma unroll
                for (int h = 0; h < 8; h++) {
                    const int r = thread / 8 + 16 * h;
                    const bool valid = inside && r < tile.n_row;
                    copy16(stage + swizzled(r, piece), valid ? x + ((u64)input[h] + k * (TILE_K / 8)) * 8 : x, valid);
                }
                copy_commit();
                if (at >= LAG) {
                    copy_wait<LAG>();
                    hand_over(at - LAG);
                }
            }
        }
        copy_wait<0>();
        for (u32 late = at < LAG ? 0 : at - LAG; late < at; late++) hand_over(late);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const int group = threadIdx.x / 128 - 1, lane = thread % WARP;
        for (int i = blockIdx.x; i < tiles.total * n_n; i += gridDim.x) {
            const Tile tile = tiles.get(i, n, n_n);
            const bool has_rows = tile.n_row > group * 64;
            float d[128];
            for (int k = 0; k < n_k; k++, at++) {
                const int s = at % WG_STAGES;
                const u8* stage = shared + s * WG_STAGE_NBYTES;
                barrier_wait(full + s, at / WG_STAGES & 1);
                if (has_rows) {
                    const u64 a = matrix_descriptor(stage + group * 64 * TILE_ROW);
                    const u64 b = matrix_descriptor(stage + TILE_M * TILE_ROW);
                    products_begin();
#pragma unroll
                    for (int step = 0; step < TILE_K / 16; step++)
                        products(ACT{}, d, a + step * 2, b + step * 2, k | step);
                    products_commit();
                    products_wait<1>();
                }
                if (k && lane == 0) barrier_arrive(empty + (at - 1) % WG_STAGES);
            }
            products_wait<0>();
            if (lane == 0) barrier_arrive(empty + (at - 1) % WG_STAGES);
            if (!has_rows) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = group * 64 + thread / WARP * 16 + half * 8 + lane / 4;
                ACT* row = out + (u64)(tile.row - tiles.base + r) * n_out;
                const int column = tile.n_tile * COLUMNS + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j += 4) {
                    u32 p[4];
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float v0 = d[4 * (j + c) + half * 2], v1 = d[4 * (j + c) + half * 2 + 1];
                        if constexpr (IS_GLU) {
                            v0 = activate(v0) * d[64 + 4 * (j + c) + half * 2];
                            v1 = activate(v1) * d[64 + 4 * (j + c) + half * 2 + 1];
                        }
                        p[c] = pack2<ACT>(v0, v1);
                    }
                    const uint4 values = transpose_quad(p[0], p[1], p[2], p[3]);
                    if (r < tile.n_row) store_columns(row, column + j * 8, n_out, values);
                }
            }
        }
    }
}

// The same as grouped_glu.
extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_glu_wg(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs, const int* here0,
                   const int* here1, const int* here2, int n_expert_used, int expert0, int n, int first_expert,
                   int end_expert, int first_row, int n_rows, int n_out, int n_in) {
    grouped_wg<true>(out, x, w, offsets, pairs, here0, here1, here2, n_expert_used, expert0, n, first_expert,
                     end_expert, first_row, n_rows, n_out, n_in);
}

// The same as grouped_mm.
extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_mm_wg(ACT* out, const ACT* x, const u8* w, const int* offsets, const int* pairs, const int* here0,
                  const int* here1, const int* here2, int n_expert_used, int expert0, int n, int first_expert,
                  int end_expert, int first_row, int n_rows, int n_out, int n_in) {
    grouped_wg<false>(out, x, w, offsets, pairs, here0, here1, here2, n_expert_used, expert0, n, first_expert,
                      end_expert, first_row, n_rows, n_out, n_in);
}
#endif
