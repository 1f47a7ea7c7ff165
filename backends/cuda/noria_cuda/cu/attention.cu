// Attention over the KV cache. Compiled for activations ACT, types K_TYPE and V_TYPE of the cache, head widths D_K and
// D_V.
//
// Keys are taken in blocks that begin at multiples of KEYS, in ascending order, so a row's result depends neither on
// the host's bound nor on how rows are cut into calls.
// Source: Dao 2023, arXiv 2307.08691 (online softmax, split keys).
#include "matrix.cuh"
#include "quants.cuh"

constexpr int KEYS = 64;
constexpr float LOG2E = 1.4426950408889634f;

// Heads in shared memory: rows of whole 128-byte groups, each swizzled like an operand tile.
template <int D>
struct Rows {
    static constexpr int n_piece = (D + 63) / 64 * 8, nbytes = n_piece * 16;
    static __device__ __forceinline__ int at(int row, int piece) { return row * nbytes + ((piece ^ (row & 7)) << 4); }
};

struct Cells {  // of one KV head
    const u8* first;
    int row_nbytes;
    __device__ __forceinline__ const u8* operator[](int cell) const { return first + (u64)cell * row_nbytes; }
};

template <class Q>
constexpr bool is_f16 = false;
template <>
constexpr bool is_f16<F16> = true;

// Starts to bring cells [first, end) as f16 to rows of `shared`, zeros where a cell is not in [low, high).
template <class Q, int D>
DEVICE void load_cells(u8* shared, const Cells& cells, int first, int n, int low, int high) {
    constexpr int n_piece = Rows<D>::n_piece;
    for (int i = threadIdx.x; i < n * n_piece; i += blockDim.x) {
        const int row = i / n_piece, piece = i % n_piece, cell = first + row;
        const bool valid = piece * 8 < D && cell >= low && cell < high;
        u8* dst = shared + Rows<D>::at(row, piece);
        const u8* src = cells[valid ? cell : low];
        if constexpr (is_f16<Q>) {
            copy16(dst, valid ? src + piece * 16 : src, valid);
        } else {
            float y[8] = {};
            if (valid) dequant8<Q>(src, piece * 8, y);
            store8((f16*)dst, y);
        }
    }
}

template <class Q, int D>
constexpr int head_nbytes = D / Q::block * Q::nbytes;

// --- a few rows: keys are split over blocks --------------------------------------------------------------------------

constexpr int PART = D_V + 2;  // sum, greatest score, weighted values

// parts [n, n_head, n_split, PART]. grid: (n_split, n_head_kv, n), 256 threads; all heads that share K and V in one
// block. Shared memory: KEYS rows of K and of V, f32 q [n_group, D_K] and p [n_group, KEYS].
extern "C" __global__ void __launch_bounds__(256)
    attend_split(float* parts, const ACT* q, const u8* kv, int row_nbytes, int v_offset, const int* positions,
                 int n_group, float scale, int window) {
    await_previous();
    extern __shared__ __align__(128) u8 shared[];
    const int split = blockIdx.x, head_kv = blockIdx.y, row = blockIdx.z, n_split = gridDim.x;
    const int n_head = gridDim.y * n_group, position = positions[row];
    const int first = split * KEYS, low = max(first, window ? position - window + 1 : 0);
    const int high = min(first + KEYS, position + 1);
    if (high <= low) return;
    u8 *k = shared, *v = k + KEYS * Rows<D_K>::nbytes;
    float* queries = (float*)(v + KEYS * Rows<D_V>::nbytes);
    float* p = queries + n_group * D_K;
    load_cells<K_TYPE, D_K>(k, {kv + head_kv * head_nbytes<K_TYPE, D_K>, row_nbytes}, first, KEYS, low, high);
    copy_commit();
    load_cells<V_TYPE, D_V>(v, {kv + v_offset + head_kv * head_nbytes<V_TYPE, D_V>, row_nbytes}, first, KEYS, low,
                            high);
    copy_commit();
    const ACT* heads = q + ((u64)row * n_head + head_kv * n_group) * D_K;
    for (int i = threadIdx.x * 8; i < n_group * D_K; i += 256 * 8) {
        float y[8];
        load8(heads + i, y);
        store8(queries + i, y);
    }
    copy_wait<1>();
    __syncthreads();
    const int key = threadIdx.x % KEYS;
    for (int h = threadIdx.x / KEYS; h < n_group; h += 256 / KEYS) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < D_K; i += 8) {
            float a[8], b[8];
            load8((const f16*)(k + Rows<D_K>::at(key, i / 8)), a);
            load8(queries + h * D_K + i, b);
#pragma unroll
            for (int c = 0; c < 8; c++) score = fmaf(a[c], b[c], score);
        }
        const bool sees = first + key >= low && first + key < high;
        p[h * KEYS + key] = sees ? score * scale : -INFINITY;
    }
    copy_wait<0>();
    __syncthreads();
    float* part = parts + (((u64)row * n_head + head_kv * n_group) * n_split + split) * PART;
    for (int h = threadIdx.x / WARP; h < n_group; h += 8) {
        float *a = p + h * KEYS + threadIdx.x % WARP, *b = a + WARP;
        const float top = warp_max(fmaxf(*a, *b));
        *a = exp2f((*a - top) * LOG2E), *b = exp2f((*b - top) * LOG2E);
        const float sum = warp_sum(*a + *b);
        if (threadIdx.x % WARP == 0) {
            part[(u64)h * n_split * PART] = sum;
            part[(u64)h * n_split * PART + 1] = top;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_group * (D_V / 2); i += 256) {
        const int h = i / (D_V / 2), d = i % (D_V / 2) * 2;
        float sum0 = 0, sum1 = 0;
        for (int key = 0; key < KEYS; key++) {
            const u32 pair = *(const u32*)(v + Rows<D_V>::at(key, d / 8) + d % 8 * 2);
            const float weight = p[h * KEYS + key];
            sum0 = fmaf(weight, to_f32(f16{(u16)pair}), sum0);
            sum1 = fmaf(weight, to_f32(f16{(u16)(pair >> 16)}), sum1);
        }
        float* to = part + (u64)h * n_split * PART + 2 + d;
        to[0] = sum0, to[1] = sum1;
    }
}

// out [n, n_head, D_V] from the parts. grid: (n_head, n), D_V threads rounded up to warps.
extern "C" __global__ void attend_merge(ACT* out, const float* parts, const int* positions, const float* sinks,
                                        int n_split, int window) {
    await_previous();
    const int head = blockIdx.x, row = blockIdx.y, position = positions[row], d = threadIdx.x;
    const int begin = window ? max(0, position - window + 1) / KEYS : 0, end = position / KEYS + 1;
    const float* part = parts + ((u64)row * gridDim.x + head) * n_split * PART;
    float top = sinks ? sinks[head] : -INFINITY;
    for (int s = begin + threadIdx.x % WARP; s < end; s += WARP) top = fmaxf(top, part[(u64)s * PART + 1]);
    top = warp_max(top);
    float sum = sinks ? exp2f((sinks[head] - top) * LOG2E) : 0.f, value = 0;
#pragma unroll 4
    for (int s = begin; s < end; s++) {
        const float factor = exp2f((part[(u64)s * PART + 1] - top) * LOG2E);
        sum = fmaf(part[(u64)s * PART], factor, sum);
        if (d < D_V) value = fmaf(part[(u64)s * PART + 2 + d], factor, value);
    }
    if (d < D_V) out[((u64)row * gridDim.x + head) * D_V + d] = from_f32<ACT>(value / sum);
}

// --- many rows: matrix units -----------------------------------------------------------------------------------------

#ifndef STAGES
#define STAGES 2
#endif
constexpr int QUERIES = 128;

// Columns 2q and 2q + 1 of 4 groups of 8 (lane q of four) to a row of which `n` columns are left.
template <class T>
DEVICE void store_groups(T* to, const float (&v)[8], int n) {
    const int q = threadIdx.x % 4;
    if constexpr (sizeof(T) == 2) {
        const uint4 eight =
            transpose_quad(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
        if (q * 8 < n) *(uint4*)(to + q * 8) = eight;
    } else {
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (c * 8 < n) *(float2*)(to + c * 8 + q * 2) = make_float2(v[2 * c], v[2 * c + 1]);
    }
}

// Cells [0, n) as f16, K heads and then V heads of each, one behind the other. grid.x: any.
extern "C" __global__ void __launch_bounds__(256)
    unpack_cells(f16* dst, const u8* kv, int row_nbytes, int v_offset, int n_head_kv, int n) {
    const int per_k = n_head_kv * D_K / 8, per_cell = n_head_kv * (D_K + D_V) / 8;
    const u64 total = (u64)n * per_cell;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < total; i += (u64)gridDim.x * 256) {
        const u8* cell = kv + i / per_cell * row_nbytes;
        const int piece = (int)(i % per_cell);
        float y[8];
        if (piece < per_k)
            dequant8<K_TYPE>(cell, piece * 8, y);
        else
            dequant8<V_TYPE>(cell + v_offset, (piece - per_k) * 8, y);
        store8(dst + i * 8, y);
    }
}

// out [n, n_head, D_V]; the cache in f16. grid: (n_head, tiles of QUERIES rows), 256 threads: a warp has 16 rows.
// Shared memory: STAGES times KEYS rows of K and of V, and at least QUERIES rows of q.
extern "C" __global__ void __launch_bounds__(256, 1)
    attend_tile(ACT* out, const ACT* q, const u8* kv, int row_nbytes, int v_offset, const int* positions,
                const float* sinks, int n, int n_head, int n_group, float scale, int window) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr int K_NBYTES = KEYS * Rows<D_K>::nbytes, STAGE_NBYTES = K_NBYTES + KEYS * Rows<D_V>::nbytes;
    constexpr int K_STEPS = Rows<D_K>::n_piece / 2, V_GROUPS = Rows<D_V>::n_piece;
    const int head = blockIdx.x, row0 = (gridDim.y - 1 - blockIdx.y) * QUERIES;  // those with most keys begin first
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_row = min(QUERIES, n - row0);
    const int position0 = positions[row0], end = position0 + n_row;
    const Cells k_cells{kv + head / n_group * D_K * 2, row_nbytes};
    const Cells v_cells{kv + v_offset + head / n_group * D_V * 2, row_nbytes};

    for (int i = threadIdx.x; i < QUERIES * Rows<D_K>::n_piece; i += 256) {
        const int row = i / Rows<D_K>::n_piece, piece = i % Rows<D_K>::n_piece;
        float y[8] = {};
        if (row < n_row && piece * 8 < D_K) load8(q + ((u64)(row0 + row) * n_head + head) * D_K + piece * 8, y);
        store8((f16*)(shared + Rows<D_K>::at(row, piece)), y);
    }
    __syncthreads();
    u32 queries[K_STEPS][4];
#pragma unroll
    for (int s = 0; s < K_STEPS; s++)
        load_matrices(queries[s], shared + Rows<D_K>::at(warp * 16 + lane % 16, s * 2 + lane / 16));
    __syncthreads();

    const int low = window ? max(0, position0 - window + 1) : 0, begin = low / KEYS, n_block = (end + KEYS - 1) / KEYS;
    auto load = [&](int block) {
        if (block < n_block) {
            u8* stage = shared + block % STAGES * STAGE_NBYTES;
            load_cells<F16, D_K>(stage, k_cells, block * KEYS, KEYS, low, end);
            load_cells<F16, D_V>(stage + K_NBYTES, v_cells, block * KEYS, KEYS, low, end);
        }
        copy_commit();
    };
    const int position = position0 + warp * 16 + lane / 4;  // of this lane's first row; the second is 8 further
    const float factor = scale * LOG2E;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, value[V_GROUPS][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(begin + s);
    for (int block = begin; block < n_block; block++) {
        if constexpr (STAGES == 1) load(block);
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        if constexpr (STAGES > 1) load(block + STAGES - 1);
        const u8* k = shared + block % STAGES * STAGE_NBYTES;
        const u8* v = k + K_NBYTES;

        float p[KEYS / 8][4] = {};
#pragma unroll
        for (int s = 0; s < K_STEPS; s++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 2) {
                u32 b[4];
                load_matrices(b, k + Rows<D_K>::at(j * 8 + lane / 16 * 8 + lane % 8, s * 2 + lane / 8 % 2));
                mma(f16{}, p[j], queries[s], b[0], b[1]);
                mma(f16{}, p[j + 1], queries[s], b[2], b[3]);
            }
        const int key0 = block * KEYS;
        const bool is_masked = key0 + KEYS > position0 + 1 || (window && key0 + window <= end);
        float new_top[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (is_masked) {
                    const int key = key0 + j * 8 + lane % 4 * 2 + c % 2, at = position + c / 2 * 8;
                    if (key > at || (window && key <= at - window)) p[j][c] = -INFINITY;
                }
                new_top[c / 2] = fmaxf(new_top[c / 2], p[j][c]);
            }
        float shift[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(ALL_LANES, new_top[r], 1));
            new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(ALL_LANES, new_top[r], 2));
            shift[r] = new_top[r] == -INFINITY ? 0.f : new_top[r] * factor;
            const float shrink = exp2f(top[r] * factor - shift[r]);
            top[r] = new_top[r];
            sum[r] *= shrink;
#pragma unroll
            for (int g = 0; g < V_GROUPS; g++) value[g][2 * r] *= shrink, value[g][2 * r + 1] *= shrink;
        }
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                p[j][c] = exp2f(fmaf(p[j][c], factor, -shift[c / 2]));
                sum[c / 2] += p[j][c];
            }
#pragma unroll
        for (int s = 0; s < KEYS / 16; s++) {
            const u32 a[4] = {pack2<f16>(p[2 * s][0], p[2 * s][1]), pack2<f16>(p[2 * s][2], p[2 * s][3]),
                              pack2<f16>(p[2 * s + 1][0], p[2 * s + 1][1]),
                              pack2<f16>(p[2 * s + 1][2], p[2 * s + 1][3])};
#pragma unroll
            for (int g = 0; g < V_GROUPS; g += 2) {
                u32 b[4];
                load_matrices_transposed(b, v + Rows<D_V>::at(s * 16 + lane % 16, g + lane / 16));
                mma(f16{}, value[g], a, b[0], b[1]);
                mma(f16{}, value[g + 1], a, b[2], b[3]);
            }
        }
        if constexpr (STAGES == 1) __syncthreads();
    }
    copy_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
        sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
        float last = 1.f;
        if (sinks) {  // one more score, whose value is zero
            const float sink = sinks[head] * LOG2E, high = fmaxf(top[r] * factor, sink);
            last = exp2f(top[r] * factor - high);
            sum[r] = sum[r] * last + exp2f(sink - high);
        }
        const float inverse = last / sum[r];
        const int row = warp * 16 + r * 8 + lane / 4;
        ACT* to = out + ((u64)(row0 + row) * n_head + head) * D_V;
#pragma unroll
        for (int g = 0; g < V_GROUPS; g += 4) {
            float values[8];
#pragma unroll
            for (int c = 0; c < 8; c++) values[c] = value[g + c / 2][2 * r + c % 2] * inverse;
            store_groups(to + g * 8, values, row < n_row ? D_V - g * 8 : 0);
        }
    }
}

// --- many rows: a library's kernels ----------------------------------------------------------------------------------

// dst = q in f16, 8 numbers a thread.
extern "C" __global__ void __launch_bounds__(256) queries_to_f16(f16* dst, const ACT* q, u64 n) {
    const u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= n) return;
    float y[8];
    load8(q + i, y);
    store8(dst + i, y);
}

// out [n, n_head, D_V] from attention over the square of the newest keys and, with `past`, over all keys before them,
// by the logarithms of their sums [n_head, n]. NaN where the rows do not begin at position `n_past`. grid: (n_head / 2,
// n).
extern "C" __global__ void __launch_bounds__(D_V / 4)
    merge_past(ACT* out, const f16* square, const float* square_log, const f16* past, const float* past_log,
               const int* positions, int n_past, int n) {
    const int head = blockIdx.x * 2 + threadIdx.x / (D_V / 8), row = blockIdx.y, d = threadIdx.x % (D_V / 8) * 8;
    const u64 at = ((u64)row * gridDim.x * 2 + head) * D_V + d;
    float y[8];
    load8(square + at, y);
    if (past) {
        float p[8];
        load8(past + at, p);
        const float a = square_log[head * n + row], b = past_log[head * n + row];
        const float share = 1.f / (1.f + exp2f((a - b) * LOG2E));  // of the past
#pragma unroll
        for (int c = 0; c < 8; c++) y[c] = fmaf(share, p[c] - y[c], y[c]);
    }
    if (positions[0] != n_past)
#pragma unroll
        for (int c = 0; c < 8; c++) y[c] = __int_as_float(0x7fffffff);  // NaN
    store8(out + at, y);
}
