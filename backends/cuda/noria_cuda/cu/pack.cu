// Quantized weights as 16-bit or f32 numbers: plain rows for library GEMMs, tiles for the grouped GEMM.
// Compiled for a weight type QUANT and a type ACT of the numbers.
#include "matrix.cuh"
#include "quants.cuh"

// --- plain rows ------------------------------------------------------------------------------------------------------

// dst [n_row, n_in] = W. With `rest`, that gets what rounding to ACT left, so that the two together hold f32 weights to
// 16 bits. grid.x: any; a warp takes 256 values at a time.
extern "C" __global__ void __launch_bounds__(256) unpack_rows(ACT* dst, ACT* rest, const u8* w, int n_row, int n_in) {
    const int lane = threadIdx.x % WARP, row_nbytes = n_in / QUANT::block * QUANT::nbytes, per_row = (n_in + 255) / 256;
    const u64 n_piece = (u64)n_row * per_row;
    for (u64 piece = (u64)blockIdx.x * 8 + threadIdx.x / WARP; piece < n_piece; piece += (u64)gridDim.x * 8) {
        const u64 row = piece / per_row;
        const int i = (int)(piece % per_row) * 256 + lane * 8;
        if (i >= n_in) continue;
        float y[8];
        dequant8<QUANT>(w + row * row_nbytes, i, y);
        store8(dst + row * n_in + i, y);
        if (rest) {
#pragma unroll
            for (int k = 0; k < 8; k++) y[k] -= to_f32(from_f32<ACT>(y[k]));
            store8(rest + row * n_in + i, y);
        }
    }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// Packs experts [first, first + gridDim.y) of a table that have rows; a block 8 output rows. Output row r comes to row
// `at + r % span` of tile r / span: span is PACK_ROWS, or half of it where gate and up share tiles. Behind n_in the
// tiles are filled up with zeros; rows behind n_out stay as they are. Each byte of a slab is read once: it may be host
// memory. Shared memory: 8 rows and 16 bytes, or 0 if that is too much.
extern "C" __global__ void __launch_bounds__(256) pack_experts(u8* dst, Table table, const int* offsets, int first,
                                                               int n_out, int n_in, int at, int span, int is_staged) {
    extern __shared__ __align__(16) u8 shared[];
    const int expert = first + blockIdx.y, row0 = blockIdx.x * 8;
    if (offsets[expert] == offsets[expert + 1] || !table.has(expert)) return;
    const int row_nbytes = n_in / QUANT::block * QUANT::nbytes, n_k = (n_in + TILE_K - 1) / TILE_K;
    const int n_row = min(8, n_out - row0), n_tile = (n_out + span - 1) / span;
    const u8* rows = table.slab(expert) + (u64)row0 * row_nbytes;
    if (is_staged) {
        const Pieces pieces = Pieces::of(rows, n_row * row_nbytes);
        for (int at = 0; at < pieces.count(); at += BATCH * 256) {
            Flight<> flight;
            flight.load(pieces, at);
            flight.store(shared, pieces, at);
        }
        __syncthreads();
        rows = staged(shared, rows);
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (warp >= n_row) return;
    const int row = at + (row0 + warp) % span;
    u8* tile = dst + ((u64)blockIdx.y * n_tile + (row0 + warp) / span) * n_k * PACK_TILE;
    for (int i = lane * 8; i < n_k * TILE_K; i += 256) {
        float y[8] = {};
        if (i < n_in) dequant8<QUANT>(rows + warp * row_nbytes, i, y);
        store8((ACT*)(tile + (u64)(i / TILE_K) * PACK_TILE + swizzled(row, i % TILE_K / 8)), y);
    }
}
