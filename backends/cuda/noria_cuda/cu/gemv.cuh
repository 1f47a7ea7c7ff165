// One input row times quantized weights, by blocks of 4 warps. A warp makes one column of output at a time; the order
// of its sum depends on the sizes of W alone. Compiled for activations ACT and output OUT.
#pragma once
#include "dot.cuh"

template <class Q>
constexpr int STEP_NBYTES = WARP * 32 / Q::block * Q::nbytes;  // what a warp takes at a time
template <class Q>  // values of a row in shared memory
constexpr int PIECE = (STEP_NBYTES<Q> < 4096 ? 4096 / STEP_NBYTES<Q> : 1) * WARP * 32;

DEVICE void store(OUT* out, float total, const float* bias, int column, int accumulate) {
    if (bias) total += bias[column];
    if (accumulate) total += to_f32(*out);
    *out = from_f32<OUT>(total);
}

template <class Q>
DEVICE int weights_nbytes(int n) {
    return n / Q::block * Q::nbytes;
}

// out [n_out] = x @ W.T + bias, or += that, by block `block` of `n_block`. The next piece of W is on its way while one
// is used, and the first two before the kernel before this one is done, unless the caller has awaited that.
// Shared memory: x (`Input`, `input_nbytes`), then `n_room` rooms of `room_nbytes` for each of 4 warps: two, or one if
// a warp has no more than one piece.
template <class Q>
DEVICE void multiply_row(u8* shared, OUT* out, const u8* w, const ACT* x, const float* bias, int n_out, int n_in,
                         int input_nbytes, int room_nbytes, int n_room, int accumulate, int block, int n_block) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warp = n_block * 4;
    const int n_piece = (n_in + PIECE<Q> - 1) / PIECE<Q>, row_nbytes = weights_nbytes<Q>(n_in);
    const int column0 = block * 4 + warp, n = column0 < n_out ? ((n_out - 1 - column0) / n_warp + 1) * n_piece : 0;
    u8* rooms = shared + input_nbytes + warp * n_room * room_nbytes;
    auto source = [&](int i) {
        const int column = column0 + i / n_piece * n_warp;
        return w + (u64)column * row_nbytes + weights_nbytes<Q>(i % n_piece * PIECE<Q>);
    };
    auto load = [&](int i) {
        if (i < n) {
            const int values = min(PIECE<Q>, n_in - i % n_piece * PIECE<Q>);
            stage(rooms + i % 2 * room_nbytes, source(i), weights_nbytes<Q>(values), lane, WARP);
        }
        copy_commit();
    };
    load(0);
    load(1);
    await_previous();
    const Input input = Input::at((float*)shared, n_in);
    input.fill(x, n_in, threadIdx.x, 128);
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < n; i++) {
        copy_wait<1>();
        __syncwarp();
        const int begin = i % n_piece * PIECE<Q>, end = min(n_in, begin + PIECE<Q>);
        const u8* piece = staged(rooms + i % 2 * room_nbytes, source(i));
        add_dot<Q>(sum, piece, input, begin, end);
        __syncwarp();
        load(i + 2);
        if (end == n_in) {
            const float total = warp_sum(sum);
            const int column = column0 + i / n_piece * n_warp;
            if (lane == 0) store(out + column, total, bias, column, accumulate);
            sum = 0;
        }
    }
}
