// Asynchronous copies into shared memory, matrix units, and the layout of operand tiles.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- copies of 16 bytes, in groups (without cp.async, before sm_80, each is done at once) ----------------------------

// `valid` false: 16 zero bytes, and nothing is read.
DEVICE void copy16(void* dst, const void* src, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    const int nbytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(nbytes)
                 : "memory");
#else
    *(uint4*)dst = valid ? *(const uint4*)src : make_uint4(0, 0, 0, 0);
#endif
}

DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N of this thread's groups are on their way.
template <int N>
DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Where the byte at `src` comes to when the bytes around it are copied to `dst` in 16-byte pieces.
DEVICE const u8* staged(const u8* dst, const u8* src) { return dst + ((u64)src & 15); }

// Starts to copy `nbytes` from `src` on, each byte read once: to `staged(dst, src)`. `dst` is aligned to 16 bytes and
// has room for 15 more. All of `n_thread` threads take part; before the copy group is done they must not use it.
DEVICE void stage(u8* dst, const u8* src, int nbytes, int thread, int n_thread) {
    const u8* first = src - ((u64)src & 15);
    const int n = nbytes + (int)(src - first), n16 = n / 16;
    for (int i = thread; i < n16; i += n_thread) copy16(dst + 16 * i, first + 16 * i);
    for (int i = 16 * n16 + thread; i < n; i += n_thread) dst[i] = first[i];
}

// --- copies through registers, of bytes that may lie in host memory --------------------------------------------------

// Bytes in pieces of 16 that begin on 16 bytes, wherever the first byte is.
struct Pieces {
    const u8* first;
    int nbytes;  // from `first` on

    DEVICE Pieces of(const u8* src, int nbytes) {
        const int skipped = (u64)src & 15;
        return {src - skipped, nbytes + skipped};
    }
    __device__ __forceinline__ int count() const { return (nbytes + 15) / 16; }

    // Piece i, for a stream of bytes that nobody reads again. Nothing behind the last byte is touched.
    __device__ __forceinline__ uint4 load(int i) const {
        const u8* p = first + 16 * i;
        if (16 * i + 16 <= nbytes) return __ldcs((const uint4*)p);
        u32 words[4] = {};
#pragma unroll
        for (int k = 0; k < 16; k++)
            if (16 * i + k < nbytes) words[k / 4] |= (u32)p[k] << k % 4 * 8;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

constexpr int BATCH = 4;  // pieces of a thread that are on their way together

// N pieces a thread, held in registers between load and store.
template <int N = BATCH>
struct Flight {
    uint4 piece[N];

    __device__ __forceinline__ void load(const Pieces& pieces, int at) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (const int place = at + i * blockDim.x + threadIdx.x; place < pieces.count())
                piece[i] = pieces.load(place);
    }
    __device__ __forceinline__ void store(u8* dst, const Pieces& pieces, int at) const {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (const int place = at + i * blockDim.x + threadIdx.x; place < pieces.count())
                ((uint4*)dst)[place] = piece[i];
    }
};

// --- matrix units: D[16, 8] += A[16, 16] B[16, 8], f32 accumulation --------------------------------------------------

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void mma(f16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
DEVICE void mma(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Two numbers as the 16-bit pair of a matrix fragment.
template <class T>
DEVICE u32 pack2(float low, float high) {
    return from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif
template <>
__device__ __forceinline__ u32 pack2<f16>(float low, float high) {
    u32 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    y = from_f32<f16>(low).bits | (u32)from_f32<f16>(high).bits << 16;
#endif
    return y;
}

// A fragment holds columns 2q and 2q + 1 of 8 in lane q of each four. Given the pairs of 4 such groups of columns, lane
// q gets all 8 columns of group q, so that it can store 16 bytes.
DEVICE uint4 transpose_quad(u32 p0, u32 p1, u32 p2, u32 p3) {
    const int q = threadIdx.x & 3;
    auto pick = [](u32 a, u32 b, u32 c, u32 d, int i) { return i & 2 ? (i & 1 ? d : c) : (i & 1 ? b : a); };
    const u32 r0 = pick(p0, p1, p2, p3, q);
    const u32 r1 = __shfl_xor_sync(ALL_LANES, pick(p0, p1, p2, p3, q ^ 1), 1);
    const u32 r2 = __shfl_xor_sync(ALL_LANES, pick(p0, p1, p2, p3, q ^ 2), 2);
    const u32 r3 = __shfl_xor_sync(ALL_LANES, pick(p0, p1, p2, p3, q ^ 3), 3);
    return make_uint4(pick(r0, r1, r2, r3, q), pick(r0, r1, r2, r3, q ^ 1), pick(r0, r1, r2, r3, q ^ 2),
                      pick(r0, r1, r2, r3, q ^ 3));
}

// --- operand tiles ---------------------------------------------------------------------------------------------------

// Tiles hold rows of 64 16-bit values, 128 bytes: 8 pieces of 16. Piece c of row r lies at place c ^ (r % 8), so that
// the same piece of 8 rows lies in 8 different banks (the 128-byte swizzle that matrix units of sm_90 read, too).
constexpr int TILE_K = 64;
constexpr int TILE_ROW = TILE_K * 2;  // bytes

DEVICE int swizzled(int row, int piece) { return row * TILE_ROW + ((piece ^ (row & 7)) << 4); }

// Weights of an expert are packed as [n_tile][k_tile][PACK_ROWS rows of TILE_K]: a tile is one contiguous copy.
constexpr int PACK_ROWS = 256;
constexpr int PACK_TILE = PACK_ROWS * TILE_ROW;  // bytes
