// The experts of a few tokens, straight from their quantized slabs, wherever those lie. Compiled for weight types QUANT
// (gate, or down) and UP, and activations ACT. A block takes some output rows of an expert: one piece of its slab, read
// once in 16-byte loads, however many tokens chose it. All loads are on their way before the first is needed, which is
// what keeps a link busy when the slabs are in host memory. (cp.async reads host memory at 30 GB/s where these loads
// reach 48, seen on an H200.)
#include "dot.cuh"
#include "glu.cuh"

constexpr int MAX_ROWS = 256;  // of a window
constexpr int FLIGHT = 5;      // pieces a thread and matrix: 16 rows of 2048 4-bit weights are on their way together

DEVICE bool is_here(const int* where0, const int* where1, const int* where2, int expert) {
    return where0[expert] >= 0 && where1[expert] >= 0 && where2[expert] >= 0;
}

// The sorted row that a block of gate_up or mul_rows begins with, and where it ends: all rows of one expert in the
// window, for the block of the first of them; nothing for the others.
struct ExpertSpan {
    int base, row, end, expert;

    DEVICE ExpertSpan of(const int* ids, const int* pairs, const int* offsets, int first, int last, int first_row,
                         int n_rows) {
        const int base = offsets[first] + first_row, stop = min(base + n_rows, offsets[last]);
        const int row = base + blockIdx.y;
        if (row >= stop) return {base, row, row, 0};
        const int expert = ids[pairs[row]];
        if (row > base && ids[pairs[row - 1]] == expert) return {base, row, row, expert};
        return {base, row, min(stop, offsets[expert + 1]), expert};
    }
};

// hidden [n_rows, n_ff] = f(gate(x)) * up(x) for the sorted rows [first_row, first_row + n_rows) of experts [first,
// end). grid: (n_ff / n_column, n_rows). Shared memory: n_column rows of gate, from `up_at` the same of up, from
// `input_at` an `Input`.
extern "C" __global__ void __launch_bounds__(256)
    gate_up(float* hidden, const ACT* x, Table gate, Table up, const int* down_where, const int* ids, const int* pairs,
            const int* offsets, int n_expert_used, int first, int end, int first_row, int n_rows, int n_ff, int n_in,
            int n_column, int up_at, int input_at) {
    await_previous();
    extern __shared__ __align__(16) u8 shared[];
    const ExpertSpan span = ExpertSpan::of(ids, pairs, offsets, first, end, first_row, n_rows);
    if (span.row == span.end || !is_here(gate.where, up.where, down_where, span.expert)) return;
    const int column0 = blockIdx.x * n_column, n = min(n_column, n_ff - column0);
    const int gate_nbytes = n_in / QUANT::block * QUANT::nbytes, up_nbytes = n_in / UP::block * UP::nbytes;
    const u8* g = gate.slab(span.expert) + (u64)column0 * gate_nbytes;
    const u8* u = up.slab(span.expert) + (u64)column0 * up_nbytes;
    const Pieces gates = Pieces::of(g, n * gate_nbytes), ups = Pieces::of(u, n * up_nbytes);
    const Input input = Input::at((float*)(shared + input_at), n_in);
    for (int at = 0; at < max(gates.count(), ups.count()); at += FLIGHT * blockDim.x) {
        Flight<FLIGHT> a, b;
        a.load(gates, at);
        b.load(ups, at);
        if (at == 0) input.fill(x + (u64)(pairs[span.row] / n_expert_used) * n_in, n_in, threadIdx.x, blockDim.x);
        a.store(shared, gates, at);
        b.store(shared + up_at, ups, at);
    }
    __syncthreads();
    g = staged(shared, g);
    u = staged(shared + up_at, u);
    for (int r = span.row; r < span.end; r++) {
        if (r > span.row) {
            __syncthreads();
            input.fill(x + (u64)(pairs[r] / n_expert_used) * n_in, n_in, threadIdx.x, blockDim.x);
            __syncthreads();
        }
        for (int c = threadIdx.x / WARP; c < n; c += blockDim.x / WARP) {
            float a = 0, b = 0;
            for_lane(input, 0, n_in, [&](u32 group, int n, const float* v, const float* sums) {
                add_group<QUANT>(a, g + c * gate_nbytes, group, n, v, sums);
                add_group<UP>(b, u + c * up_nbytes, group, n, v, sums);
            });
            a = warp_sum(a), b = warp_sum(b);
            if (threadIdx.x % WARP == 0) hidden[(u64)(r - span.base) * n_ff + column0 + c] = activate(a) * b;
        }
    }
}

// acc[token] += weight * down(hidden[row]) for the same rows. Products come first, in any order; then they are added
// one expert after another, like `combine` does, product and sum rounded apart. grid: n_embd / n_column. Shared memory:
// `n_batch` rooms of `room_nbytes` for n_column rows of down, `n_input` `Input`s of `input_nbytes`, n_rows * n_column
// sums.
extern "C" __global__ void __launch_bounds__(512)
    down_add(float* acc, const float* hidden, Table down, const int* gate_where, const int* up_where, const int* ids,
             const float* weights, const int* pairs, const int* offsets, int n_expert_used, int first, int end,
             int first_row, int n_rows, int n_tokens, int n_embd, int n_ff, int n_column, int n_batch, int room_nbytes,
             int n_input, int input_nbytes) {
    await_previous();
    extern __shared__ __align__(16) u8 shared[];
    __shared__ int expert[MAX_ROWS], token[MAX_ROWS], place[MAX_ROWS], begin[MAX_ROWS + 1];
    __shared__ float weight[MAX_ROWS];
    __shared__ const u8* slab[MAX_ROWS];
    __shared__ int n_expert;
    const int base = offsets[first] + first_row, n = min(n_rows, offsets[end] - base);
    if (n <= 0) return;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int pair = pairs[base + i];
        expert[i] = ids[pair];
        token[i] = pair / n_expert_used;
        weight[i] = weights[pair];
    }
    const int n_warp = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column0 = blockIdx.x * n_column, n_here = min(n_column, n_embd - column0);
    const int row_nbytes = n_ff / QUANT::block * QUANT::nbytes;
    u8* inputs = shared + n_batch * room_nbytes;
    float* sums = (float*)(inputs + n_input * input_nbytes);
    __syncthreads();
    if (warp == 0) {  // where each expert's rows begin, and the place of each row's expert among those here, or -1
        int count = 0;
        for (int i0 = 0; i0 < n; i0 += WARP) {
            const int i = i0 + lane;
            const bool here = i < n && is_here(gate_where, up_where, down.where, expert[i]);
            const bool is_first = here && (i == 0 || expert[i - 1] != expert[i]);
            const u32 mask = __ballot_sync(ALL_LANES, is_first);
            const int at = count + __popc(mask & (2u << lane) - 1) - 1;
            if (i < n) place[i] = here ? at : -1;
            if (is_first) {
                begin[at] = i;
                slab[at] = down.slab(expert[i]) + (u64)column0 * row_nbytes;
            }
            count += __popc(mask);
        }
        if (lane == 0) n_expert = count, begin[count] = n;
    }
    __syncthreads();
    const int room_pieces = room_nbytes / 16;
    for (int e0 = 0; e0 < n_expert; e0 += n_batch) {
        const int e1 = min(e0 + n_batch, n_expert), n_room = (e1 - e0) * room_pieces;
        for (int at = threadIdx.x; at < n_room; at += BATCH * blockDim.x) {
            uint4 piece[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = at + k * blockDim.x;
                if (i >= n_room) break;
                const Pieces pieces = Pieces::of(slab[e0 + i / room_pieces], n_here * row_nbytes);
                if (i % room_pieces < pieces.count()) piece[k] = pieces.load(i % room_pieces);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (at + k * blockDim.x < n_room) ((uint4*)shared)[at + k * blockDim.x] = piece[k];
        }
        for (int row0 = begin[e0]; row0 < begin[e1]; row0 += n_input) {
            const int row1 = min(row0 + n_input, begin[e1]);
            for (int i = row0 + warp; i < row1; i += n_warp)
                Input::at((float*)(inputs + (i - row0) * input_nbytes), n_ff)
                    .fill(hidden + (u64)i * n_ff, n_ff, lane, WARP);
            __syncthreads();
            for (int task = warp; task < (row1 - row0) * n_here; task += n_warp) {
                const int i = row0 + task / n_here, c = task % n_here, e = place[i];
                if (e < 0) continue;
                float y = 0;
                add_dot<QUANT>(y, staged(shared + (e - e0) * room_nbytes, slab[e]) + c * row_nbytes,
                               Input::at((float*)(inputs + (i - row0) * input_nbytes), n_ff), 0, n_ff);
                y = warp_sum(y);
                if (lane == 0) sums[i * n_column + c] = y;
            }
            __syncthreads();
        }
    }
    for (int task = threadIdx.x; task < n_tokens * n_here; task += blockDim.x) {
        const int t = task / n_here, c = task % n_here;
        float* to = acc + (u64)t * n_embd + column0 + c;
        float sum = *to;
        for (int i = 0; i < n; i++)
            if (token[i] == t && place[i] >= 0) sum = __fadd_rn(sum, __fmul_rn(weight[i], sums[i * n_column + c]));
        *to = sum;
    }
}

// out [n_rows, n_out] = x @ W.T for the sorted rows of a window whose experts are here; row r reads its token's x, or
// with `by_row` row r of x. Grid and shared memory as gate_up's, for one table.
extern "C" __global__ void __launch_bounds__(256)
    mul_rows(ACT* out, const ACT* x, Table table, const int* ids, const int* pairs, const int* offsets,
             int n_expert_used, int first, int end, int first_row, int n_rows, int n_out, int n_in, int by_row,
             int input_at) {
    extern __shared__ __align__(16) u8 shared[];
    const ExpertSpan span = ExpertSpan::of(ids, pairs, offsets, first, end, first_row, n_rows);
    if (span.row == span.end || !table.has(span.expert)) return;
    const int n_warp = blockDim.x / WARP, warp = threadIdx.x / WARP, column0 = blockIdx.x * n_warp;
    const int row_nbytes = n_in / QUANT::block * QUANT::nbytes, n = min(n_warp, n_out - column0);
    const u8* w = table.slab(span.expert) + (u64)column0 * row_nbytes;
    const Pieces pieces = Pieces::of(w, n * row_nbytes);
    for (int at = 0; at < pieces.count(); at += BATCH * blockDim.x) {
        Flight<> flight;
        flight.load(pieces, at);
        flight.store(shared, pieces, at);
    }
    w = staged(shared, w) + warp * row_nbytes;
    const Input input = Input::at((float*)(shared + input_at), n_in);
    for (int r = span.row; r < span.end; r++) {
        __syncthreads();
        const int from = by_row ? r - span.base : pairs[r] / n_expert_used;
        input.fill(x + (u64)from * n_in, n_in, threadIdx.x, blockDim.x);
        __syncthreads();
        if (warp >= n) continue;
        float y = 0;
        add_dot<QUANT>(y, w, input, 0, n_in);
        y = warp_sum(y);
        if (threadIdx.x % WARP == 0) out[(u64)(r - span.base) * n_out + column0 + warp] = from_f32<ACT>(y);
    }
}
