// Warpgroup matrix units (sm_90a): D[64, 256] += A[64, 16] B[256, 16]^T from shared memory, and the barriers around
// them.
// Source: NVIDIA, "PTX ISA", asynchronous warpgroup level matrix instructions; mbarrier; cp.async.bulk.
#pragma once
#include "matrix.cuh"

// --- barriers in shared memory, with a phase that turns --------------------------------------------------------------

DEVICE void barrier_init(u64* barrier, u32 n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}

DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_arrive_expect(u64* barrier, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(nbytes)
                 : "memory");
}

DEVICE void barrier_wait(u64* barrier, u32 phase) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
            shared_address(barrier)),
        "r"(phase)
        : "memory");
}

// Starts to copy memory that lies in one piece; `barrier` counts its bytes.
DEVICE void copy_bulk(void* dst, const void* src, u32 nbytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(dst)),
                 "l"(src), "r"(nbytes), "r"(shared_address(barrier))
                 : "memory");
}

// Makes this thread's writes to shared memory visible to matrix units.
DEVICE void fence_matrix_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- products --------------------------------------------------------------------------------------------------------

// A matrix of rows of TILE_K values as in `swizzled`, 1024-byte aligned groups of 8 rows one behind the other.
DEVICE u64 matrix_descriptor(const void* tile) {
    return (shared_address(tile) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(TYPE)                                                                                                    \
    asm volatile(                                                                                                      \
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; "                                                                     \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                                   \
        " "                                                                                                            \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "             \
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "              \
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "              \
        "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "              \
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "              \
        "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "                \
        "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "                  \
        "%128, %129, p, 1, 1, 0, 0; }"                                                                                 \
        : R4(0), R4(4), R4(8), R4(12), R4(16), R4(20), R4(24), R4(28), R4(32), R4(36), R4(40), R4(44), R4(48), R4(52), \
          R4(56), R4(60), R4(64), R4(68), R4(72), R4(76), R4(80), R4(84), R4(88), R4(92), R4(96), R4(100), R4(104),    \
          R4(108), R4(112), R4(116), R4(120), R4(124)                                                                  \
        : "l"(a), "l"(b), "r"(add))

// d = A B^T, or d += A B^T if `add`. Lane l of warp w of the group holds rows 16 w + l / 4 (+ 8), columns 8 j + l % 4 *
// 2
// (+ 1) in d[4 j] to d[4 j + 3].
DEVICE void products(f16, float (&d)[128], u64 a, u64 b, int add) { WGMMA("f16"); }
DEVICE void products(bf16, float (&d)[128], u64 a, u64 b, int add) { WGMMA("bf16"); }

#undef WGMMA
#undef R4
