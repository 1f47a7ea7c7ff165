// Products of a few rows with quantized weights, read as they are. Compiled for a weight type QUANT, activations ACT
// and output OUT.
#include "gemv.cuh"

// One row: out [n_out] = x @ W.T + bias, or += that. `constant`: no kernel writes W, so it may be read at once.
extern "C" __global__ void __launch_bounds__(128)
    gemv_1(OUT* out, const u8* w, const ACT* x, const float* bias, int n_out, int n_in, int input_nbytes,
           int room_nbytes, int accumulate, int constant) {
    if (!constant) await_previous();
    extern __shared__ __align__(16) u8 shared[];
    multiply_row<QUANT>(shared, out, w, x, bias, n_out, n_in, input_nbytes, room_nbytes, 2, accumulate, blockIdx.x,
                        gridDim.x);
}

// N rows at a time, x where it is. grid: (n_out / 4, n / N); a room of shared memory for each of 4 warps.
template <int N>
__device__ __forceinline__ void gemv(u8* shared, OUT* out, const u8* w, const ACT* x, const float* bias, int n,
                                     int n_out, int n_in, int room_nbytes, int accumulate) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.x * 4 + warp, row0 = blockIdx.y * N;
    if (column >= n_out) return;
    u8* room = shared + warp * room_nbytes;
    float sum[N] = {};
    for (int begin = 0; begin < n_in; begin += PIECE<QUANT>) {
        const int end = min(n_in, begin + PIECE<QUANT>);
        const u8* src = w + (u64)column * weights_nbytes<QUANT>(n_in) + weights_nbytes<QUANT>(begin);
        __syncwarp();
        stage(room, src, weights_nbytes<QUANT>(end - begin), lane, WARP);
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        const u8* piece = staged(room, src);
        for (int i = begin + lane * 8; i < end; i += WARP * 8) {
            float y[8], v[8];
            dequant8<QUANT>(piece, i - begin, y);
#pragma unroll
            for (int r = 0; r < N; r++) {
                if (r && row0 + r >= n) break;
                load8(x + (u64)(row0 + r) * n_in + i, v);
#pragma unroll
                for (int c = 0; c < 8; c++) sum[r] = fmaf(y[c], v[c], sum[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < N; r++) {
        const float total = warp_sum(sum[r]);
        if (lane == 0 && row0 + r < n) store(out + (u64)(row0 + r) * n_out + column, total, bias, column, accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(128) gemv_4(OUT* out, const u8* w, const ACT* x, const float* bias, int n,
                                                         int n_out, int n_in, int room_nbytes, int accumulate) {
    extern __shared__ __align__(16) u8 shared[];
    gemv<4>(shared, out, w, x, bias, n, n_out, n_in, room_nbytes, accumulate);
}

extern "C" __global__ void __launch_bounds__(128) gemv_8(OUT* out, const u8* w, const ACT* x, const float* bias, int n,
                                                         int n_out, int n_in, int room_nbytes, int accumulate) {
    extern __shared__ __align__(16) u8 shared[];
    gemv<8>(shared, out, w, x, bias, n, n_out, n_in, room_nbytes, accumulate);
}
