// What every kernel shares: short names of types, 16-bit floats, sums of a work group, expert tables.
// Macros of every program: GROUP = work items of a group. 1 on a CPU: an item does the work of a group, with vectors.
//
// Products and sums are rounded as they are written; where one rounding is meant, it says fma.
#pragma OPENCL FP_CONTRACT OFF

// Intel's compiler for CPUs joins work items into vectors. There is but one in a group, and to find no use for the code
// that it makes costs half a minute a program.
#if GROUP == 1 && defined(__has_attribute)
#if __has_attribute(intel_reqd_sub_group_size)
#define __kernel __kernel __attribute__((intel_reqd_sub_group_size(1)))
#endif
#endif

typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef ulong u64;

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

// A tensor is two parameters: a buffer, and the bytes in it before the tensor.
#define AT(type, name) ((__global type *)((__global u8 *)name + name##_at))
#define OPTIONAL(type, name) (name ? AT(type, name) : (__global type *)0)

// Vectors in memory that is aligned for their elements only. Some CPU compilers take vload and vstore apart into loads of
// single elements, and do not put them together again.
#if GROUP == 1
typedef float8 float8_any __attribute__((aligned(4)));
typedef short16 short16_any __attribute__((aligned(2)));
typedef ushort8 ushort8_any __attribute__((aligned(2)));
typedef uchar16 uchar16_any __attribute__((aligned(1)));
#define LOAD8_GLOBAL(p) (*(__global const float8_any *)(p))
#define LOAD8_LOCAL(p) (*(__local const float8_any *)(p))
#define STORE8_GLOBAL(p, v) (*(__global float8_any *)(p) = (v))
#define STORE8_LOCAL(p, v) (*(__local float8_any *)(p) = (v))
#define USHORT8_AT(p) (*(__global const ushort8_any *)(p))
#else
#define LOAD8_GLOBAL(p) vload8(0, (__global const float *)(p))
#define LOAD8_LOCAL(p) vload8(0, p)
#define STORE8_GLOBAL(p, v) vstore8(v, 0, p)
#define STORE8_LOCAL(p, v) vstore8(v, 0, p)
#define USHORT8_AT(p) vload8(0, (__global const u16 *)(p))
#endif

// --- 16-bit floats: bits in memory, f32 in registers -----------------------------------------------------------------

// A finite one. Its exponent is put in the place of f32's, and moved by a product that rounds nothing.
inline float half_at(__global const void *p) {
    const u32 h = *(__global const u16 *)p;
    return as_float(as_uint(as_float((h & 0x7fffu) << 13) * 0x1p112f) | (h & 0x8000u) << 16);
}

#if defined(__F16C__) && defined(__has_builtin)
#if __has_builtin(__builtin_ia32_vcvtph2ps256)
#define HAS_F16C
typedef short short8_x86 __attribute__((vector_size(16)));
#endif
#endif
inline float8 half8_at(__global const void *p) {
#ifdef HAS_F16C
    return __builtin_astype(__builtin_ia32_vcvtph2ps256(__builtin_astype(USHORT8_AT(p), short8_x86)), float8);
#else
    return vload_half8(0, (__global const half *)p);
#endif
}

// --- order -----------------------------------------------------------------------------------------------------------

// Orders floats as unsigned numbers above 0, which is free to mean "none". NaN is below all others; -0 equals 0.
inline u32 order_key(float x) {
    const u32 bits = as_uint(x + 0.f);
    return x != x ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The float that a key stands for.
inline float order_value(u32 key) { return as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// --- sums ------------------------------------------------------------------------------------------------------------

inline float sum4(float4 x) { return (x.s0 + x.s1) + (x.s2 + x.s3); }
inline float sum8(float8 x) { return sum4(x.lo + x.hi); }
inline float max8(float8 x) {
    const float4 y = fmax(x.lo, x.hi);
    return fmax(fmax(y.s0, y.s1), fmax(y.s2, y.s3));
}

#define LANE ((int)get_local_id(0))

// Every item of a group meets here. An item alone has nobody to wait for.
#if GROUP == 1
#define MEET()
#else
#define MEET() barrier(CLK_LOCAL_MEM_FENCE)
#endif

// The total of all items of a group, for each of them, added in an order that depends on GROUP alone. `shared`: GROUP.
inline float group_sum(float x, __local float *shared) {
#if GROUP == 1
    return x;
#else
    MEET();
    shared[LANE] = x;
    for (int width = GROUP / 2; width; width /= 2) {
        MEET();
        if (LANE < width) shared[LANE] += shared[LANE + width];
    }
    MEET();
    return shared[0];
#endif
}

inline float group_max(float x, __local float *shared) {
#if GROUP == 1
    return x;
#else
    MEET();
    shared[LANE] = x;
    for (int width = GROUP / 2; width; width /= 2) {
        MEET();
        if (LANE < width) shared[LANE] = fmax(shared[LANE], shared[LANE + width]);
    }
    MEET();
    return shared[0];
#endif
}

// For each i of n numbers, one at a time: a range of its own for an item that has no neighbours, otherwise in turn.
#if GROUP == 1
#define EACH_OF_MINE(i, n)                                                              \
    for (u64 share_ = ((n) + get_global_size(0) - 1) / get_global_size(0),              \
             i = get_global_id(0) * share_, end_ = min(i + share_, (u64)(n)); i < end_; i++)
#else
#define EACH_OF_MINE(i, n) for (u64 i = get_global_id(0); i < (n); i += get_global_size(0))
#endif

// --- expert tables: noria.api.ExpertTable -----------------------------------------------------------------------------

#define TABLE_UNIT 16  // DeviceCaps.table_unit

// Parameters of a table: four buffers with the bytes before their spans, and where experts are.
#define TABLE_PARAMETERS(t)                                                                                       \
    __global const u8 *t##0, u64 t##0_at, __global const u8 *t##1, u64 t##1_at, __global const u8 *t##2, u64 t##2_at, \
        __global const u8 *t##3, u64 t##3_at, __global const u8 *t##_where, u64 t##_where_at

#define HAS_EXPERT(t, expert) (AT(const int, t##_where)[expert] >= 0)

// The slab of an expert that is here.
#define SLAB(t, expert) \
    table_slab(AT(const u8, t##0), AT(const u8, t##1), AT(const u8, t##2), AT(const u8, t##3), AT(const int, t##_where)[expert])

inline __global const u8 *table_slab(__global const u8 *s0, __global const u8 *s1, __global const u8 *s2,
                                     __global const u8 *s3, u32 entry) {
    const u32 i = entry >> 29;
    return (i & 2 ? (i & 1 ? s3 : s2) : (i & 1 ? s1 : s0)) + (u64)(entry & 0x1fffffffu) * TABLE_UNIT;
}
