// Three products with one row, such as its q, k and v, in one launch. Compiled for weight types QUANT, QUANT1 and
// QUANT2, activations ACT and outputs OUT. Each number is the same sum in the same order as gemv_1's.
#include "gemv.cuh"

// out<i> [n_out<i>] = x @ W<i>.T + bias<i>, by the first n_block0 blocks, the next n_block1, and the others.
// `constant`: no kernel writes the weights, so they may be read at once.
extern "C" __global__ void __launch_bounds__(128)
    gemv_3(OUT* out0, OUT* out1, OUT* out2, const u8* w0, const u8* w1, const u8* w2, const ACT* x, const float* bias0,
           const float* bias1, const float* bias2, int n_out0, int n_out1, int n_out2, int n_block0, int n_block1,
           int n_in, int input_nbytes, int room_nbytes, int n_room, int constant) {
    if (!constant) await_previous();
    extern __shared__ __align__(16) u8 shared[];
    int block = blockIdx.x;
    if (block < n_block0) {
        multiply_row<QUANT>(shared, out0, w0, x, bias0, n_out0, n_in, input_nbytes, room_nbytes, n_room, 0, block,
                            n_block0);
        return;
    }
    block -= n_block0;
    if (block < n_block1) {
        multiply_row<QUANT1>(shared, out1, w1, x, bias1, n_out1, n_in, input_nbytes, room_nbytes, n_room, 0, block,
                             n_block1);
        return;
    }
    block -= n_block1;
    multiply_row<QUANT2>(shared, out2, w2, x, bias2, n_out2, n_in, input_nbytes, room_nbytes, n_room, 0, block,
                         gridDim.x - n_block0 - n_block1);
}
