// What every kernel shares: short names of types, 16-bit floats, warp and block sums, expert tables.
// Includes nothing, so that NVRTC needs no headers.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#ifndef INFINITY  // NVRTC has no math.h
#define INFINITY __int_as_float(0x7f800000)
#endif

// Kernels that call this may be launched before the one before them in a program is done (launch.py): what comes first
// overlaps with that one, and must neither write to memory nor read what another kernel writes. Every thread calls it.
DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// --- 16-bit floats: bits in memory, f32 in registers -----------------------------------------------------------------

struct f16 {
    u16 bits;
};

struct bf16 {
    u16 bits;
};

DEVICE float to_f32(float x) { return x; }

DEVICE float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounded to nearest even; NaN stays NaN.
template <class T>
DEVICE T from_f32(float x);

template <>
__device__ __forceinline__ float from_f32<float>(float x) {
    return x;
}

template <>
__device__ __forceinline__ f16 from_f32<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <>
__device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((x != x ? bits | 0x400000u : rounded) >> 16)};
}

// Orders floats as unsigned numbers above 0, which is free to mean "none". NaN is below all others; -0 equals 0.
DEVICE u32 order_key(float x) {
    if (x != x) return 1u;
    const u32 bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The float that a key stands for.
DEVICE float order_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// 8 values from memory that is aligned to 16 bytes.
DEVICE void load8(const float* p, float (&y)[8]) {
    const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w;
    y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
}

template <class T>
DEVICE void load8(const T* p, float (&y)[8]) {
    const uint4 w = *(const uint4*)p;
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = to_f32(T{(u16)words[i]});
        y[2 * i + 1] = to_f32(T{(u16)(words[i] >> 16)});
    }
}

DEVICE void store8(float* p, const float (&y)[8]) {
    ((float4*)p)[0] = make_float4(y[0], y[1], y[2], y[3]);
    ((float4*)p)[1] = make_float4(y[4], y[5], y[6], y[7]);
}

template <class T>
DEVICE void store8(T* p, const float (&y)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = from_f32<T>(y[2 * i]).bits | (u32)from_f32<T>(y[2 * i + 1]).bits << 16;
    *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
}

// --- sums: every lane or thread gets the total, always added in the same order ----------------------------------------

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

// `shared`: 32 floats.
DEVICE float block_sum(float x, float* shared) {
    x = warp_sum(x);
    const int warp = threadIdx.x / WARP, n_warp = blockDim.x / WARP;
    if (threadIdx.x % WARP == 0) shared[warp] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % WARP < n_warp ? shared[threadIdx.x % WARP] : 0.f);
}

// --- expert tables: noria.api.ExpertTable -----------------------------------------------------------------------------

constexpr int TABLE_UNIT = 16;  // DeviceCaps.table_unit

struct Table {
    const u8* spans[4];
    const int* where;

    __device__ __forceinline__ bool has(int expert) const { return where[expert] >= 0; }

    // The slab of an expert that is here. No run-time index into `spans`, which would move it to local memory.
    __device__ __forceinline__ const u8* slab(int expert) const {
        const u32 entry = where[expert];
        const u32 i = entry >> 29;
        const u8* span = i & 2 ? (i & 1 ? spans[3] : spans[2]) : (i & 1 ? spans[1] : spans[0]);
        return span + (u64)(entry & 0x1fffffffu) * TABLE_UNIT;
    }
};
