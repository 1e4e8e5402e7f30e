/* dtype.h - element types: names, sizes, and conversion between float32 and the narrower formats.
 *
 * One source for C and CUDA C: static inline, no branches (loops over them vectorize), bits moved through unions.
 * Rounding is to nearest, ties to even, and each conversion rounds once. bfloat16, float16 follow IEEE: overflow gives
 * infinity, a NaN keeps its sign and upper payload and becomes quiet. The FP8 formats saturate: everything beyond the
 * largest finite value, infinity included, becomes that value; every NaN becomes 0x7f.
 *
 *                 exponent mantissa  bias     largest   smallest normal   smallest
 *      bfloat16       8        7      127     3.39e38         2^-126       2^-133
 *      float16        5       10       15       65504         2^-14        2^-24
 *      f8e4m3         4        3        7         448         2^-6         2^-9       no infinity, NaN 0x7f 0xff
 *      f8e5m2         5        2       15       57344         2^-14        2^-16
 */
#ifndef TE_KERNELS_DTYPE_H
#define TE_KERNELS_DTYPE_H

#include "tetrain/types.h"

/* Always inlined: a loop with a call in it does not vectorize. */
#ifdef __CUDACC__
#define TE_HD __host__ __device__ __attribute__((always_inline))
#elif defined(__GNUC__)
#define TE_HD __attribute__((always_inline))
#else
#define TE_HD
#endif

/* --- bits ------------------------------------------------------------------------------------------------------- */

TE_HD static inline uint32_t te_f32_bits(float x)
{
    union { float f; uint32_t u; } v;
    v.f = x;
    return v.u;
}

TE_HD static inline float te_f32_from_bits(uint32_t bits)
{
    union { uint32_t u; float f; } v;
    v.u = bits;
    return v.f;
}

TE_HD static inline uint64_t te_f64_bits(double x)
{
    union { double f; uint64_t u; } v;
    v.f = x;
    return v.u;
}

/* --- to float32 (exact) ----------------------------------------------------------------------------------------- */

TE_HD static inline float te_bf16_to_f32(uint16_t h) { return te_f32_from_bits((uint32_t)h << 16); }

/* The exponent is moved by a multiplication, which also normalizes subnormal numbers. */
TE_HD static inline float te_f16_to_f32(uint16_t h)
{
    uint32_t magnitude = h & 0x7fffu;
    uint32_t bits = te_f32_bits(te_f32_from_bits(magnitude << 13) * 0x1p112f);
    bits = magnitude >= 0x7c00u ? (magnitude << 13 | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0)) : bits;
    return te_f32_from_bits(bits | (uint32_t)(h & 0x8000u) << 16);
}

TE_HD static inline float te_f8e4m3_to_f32(uint8_t q)
{
    uint32_t magnitude = q & 0x7fu;
    uint32_t bits = te_f32_bits(te_f32_from_bits(magnitude << 20) * 0x1p120f);
    bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
    return te_f32_from_bits(bits | (uint32_t)(q & 0x80u) << 24);
}

TE_HD static inline float te_f8e5m2_to_f32(uint8_t q) { return te_f16_to_f32((uint16_t)(q << 8)); }

/* --- from float32 ----------------------------------------------------------------------------------------------- */

TE_HD static inline uint16_t te_f32_to_bf16(float x)
{
    uint32_t u = te_f32_bits(x);
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded);
}

/* The same as a float32; without a detour by 16 bits, which vectors would take as they stand in the source. */
TE_HD static inline float te_f32_round_bf16(float x)
{
    uint32_t u = te_f32_bits(x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t rounded;
    asm("{\n.reg .b16 code, none;\ncvt.rn.bf16.f32 code, %1;\nmov.b16 none, 0;\nmov.b32 %0, {none, code};\n}"
        : "=r"(rounded) : "f"(x));
    return te_f32_from_bits(x != x ? (u & 0xffff0000u) | 0x400000u : rounded);
#else
    uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u);
    return te_f32_from_bits(((u & 0x7fffffffu) > 0x7f800000u ? (u | 0x400000u) : rounded) & 0xffff0000u);
#endif
}

/* Below the smallest normal number, adding a power of two whose last place is the format's smallest number rounds and
 * leaves the code in the low bits. */
TE_HD static inline uint16_t te_f32_to_f16(float x)
{
    uint32_t u = te_f32_bits(x), magnitude = u & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    uint32_t small = te_f32_bits(te_f32_from_bits(magnitude) + 0x1p-1f) - 0x3f000000u;
    uint32_t code = magnitude < 0x38800000u ? small : normal;
    code = magnitude >= 0x477ff000u ? 0x7c00u : code;
    code = magnitude > 0x7f800000u ? (0x7e00u | (magnitude >> 13 & 0x3ffu)) : code;
    return (uint16_t)(code | (u >> 16 & 0x8000u));
}

TE_HD static inline uint8_t te_f32_to_f8e4m3(float x)
{
    uint32_t u = te_f32_bits(x), magnitude = u & 0x7fffffffu;
    uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
    uint32_t small = te_f32_bits(te_f32_from_bits(magnitude) + 0x1p14f) - 0x46800000u;
    uint32_t code = magnitude < 0x3c800000u ? small : normal;
    code = magnitude > 0x43e00000u ? 0x7eu : code;
    code |= u >> 24 & 0x80u;
    return (uint8_t)(magnitude > 0x7f800000u ? 0x7fu : code);
}

TE_HD static inline uint8_t te_f32_to_f8e5m2(float x)
{
    uint32_t u = te_f32_bits(x), magnitude = u & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffffu + (magnitude >> 21 & 1u) - (112u << 23)) >> 21;
    uint32_t small = te_f32_bits(te_f32_from_bits(magnitude) + 0x1p7f) - 0x43000000u;
    uint32_t code = magnitude < 0x38800000u ? small : normal;
    code = magnitude > 0x47600000u ? 0x7bu : code;
    code |= u >> 24 & 0x80u;
    return (uint8_t)(magnitude > 0x7f800000u ? 0x7fu : code);
}

/* --- from float64 ----------------------------------------------------------------------------------------------- */

/* float32 rounded to odd: the neighbour with an odd last bit unless exact. Rounding that once more to any of the
 * formats above gives what a direct rounding would give. */
TE_HD static inline float te_f64_to_f32_odd(double x)
{
    float    near = (float)x;
    uint32_t u = te_f32_bits(near);
    double   back = (double)near, size = x < 0 ? -x : x, back_size = back < 0 ? -back : back;
    if (!(size < back_size || size > back_size)) return near; /* exact, or NaN */
    uint32_t toward_zero = back_size > size ? u - 1 : u;
    return te_f32_from_bits(toward_zero | 1u);
}

TE_HD static inline uint16_t te_f64_to_bf16(double x) { return te_f32_to_bf16(te_f64_to_f32_odd(x)); }
TE_HD static inline uint16_t te_f64_to_f16(double x) { return te_f32_to_f16(te_f64_to_f32_odd(x)); }
TE_HD static inline uint8_t  te_f64_to_f8e4m3(double x) { return te_f32_to_f8e4m3(te_f64_to_f32_odd(x)); }
TE_HD static inline uint8_t  te_f64_to_f8e5m2(double x) { return te_f32_to_f8e5m2(te_f64_to_f32_odd(x)); }

/* --- to integers: toward zero, saturating, NaN gives 0 ------------------------------------------------------------ */

/* The limits are compared in the source's type; INT_MAX itself is no float, so >= 2^31 stands for it. */
TE_HD static inline int32_t te_f64_to_i32(double x)
{
    double v = x >= -2147483648.0 ? x : -2147483648.0;
    v = v <= 2147483647.0 ? v : 2147483647.0;
    return (int32_t)(x == x ? v : 0.0);
}

TE_HD static inline int64_t te_f64_to_i64(double x)
{
    double  inside = x >= -9223372036854775808.0 && x < 9223372036854775808.0 ? x : 0.0;
    int64_t v = (int64_t)inside;
    v = x >= 9223372036854775808.0 ? INT64_MAX : v;
    return x < -9223372036854775808.0 ? INT64_MIN : v;
}

TE_HD static inline uint8_t te_f64_to_u8(double x)
{
    double v = x >= 0.0 ? x : 0.0; /* NaN too */
    v = v <= 255.0 ? v : 255.0;
    return (uint8_t)(int32_t)v;
}

TE_HD static inline int32_t te_f32_to_i32(float x)
{
    float   inside = x >= -0x1p31f && x < 0x1p31f ? x : 0.0f;
    int32_t v = (int32_t)inside;
    v = x >= 0x1p31f ? INT32_MAX : v;
    return x < -0x1p31f ? INT32_MIN : v;
}

TE_HD static inline int64_t te_f32_to_i64(float x) { return te_f64_to_i64((double)x); }

TE_HD static inline uint8_t te_f32_to_u8(float x)
{
    float v = x >= 0.0f ? x : 0.0f; /* NaN too */
    v = v <= 255.0f ? v : 255.0f;
    return (uint8_t)(int32_t)v;
}

/* --- one element ------------------------------------------------------------------------------------------------ */

/* Element i of an array of any type, as float64 (exact but for large int64). */
TE_HD static inline double te_load_f64(const void *data, te_dtype dtype, int64_t i)
{
    switch (dtype) {
    case TE_F32: return (double)((const float *)data)[i];
    case TE_BF16: return (double)te_bf16_to_f32(((const uint16_t *)data)[i]);
    case TE_F16: return (double)te_f16_to_f32(((const uint16_t *)data)[i]);
    case TE_F64: return ((const double *)data)[i];
    case TE_I64: return (double)((const int64_t *)data)[i];
    case TE_I32: return (double)((const int32_t *)data)[i];
    case TE_U8: return (double)((const uint8_t *)data)[i];
    case TE_BOOL: return ((const uint8_t *)data)[i] ? 1.0 : 0.0;
    case TE_F8E4M3: return (double)te_f8e4m3_to_f32(((const uint8_t *)data)[i]);
    case TE_F8E5M2: return (double)te_f8e5m2_to_f32(((const uint8_t *)data)[i]);
    case TE_DTYPE_COUNT: break;
    }
    return 0.0;
}

/* Writes element i, rounding once. */
TE_HD static inline void te_store_f64(void *data, te_dtype dtype, int64_t i, double x)
{
    switch (dtype) {
    case TE_F32: ((float *)data)[i] = (float)x; break;
    case TE_BF16: ((uint16_t *)data)[i] = te_f64_to_bf16(x); break;
    case TE_F16: ((uint16_t *)data)[i] = te_f64_to_f16(x); break;
    case TE_F64: ((double *)data)[i] = x; break;
    case TE_I64: ((int64_t *)data)[i] = te_f64_to_i64(x); break;
    case TE_I32: ((int32_t *)data)[i] = te_f64_to_i32(x); break;
    case TE_U8: ((uint8_t *)data)[i] = te_f64_to_u8(x); break;
    case TE_BOOL: ((uint8_t *)data)[i] = x != 0.0; break;
    case TE_F8E4M3: ((uint8_t *)data)[i] = te_f64_to_f8e4m3(x); break;
    case TE_F8E5M2: ((uint8_t *)data)[i] = te_f64_to_f8e5m2(x); break;
    case TE_DTYPE_COUNT: break;
    }
}

/* --- properties ------------------------------------------------------------------------------------------------- */

TE_HD static inline bool te_dtype_is_float8(te_dtype dtype) { return dtype == TE_F8E4M3 || dtype == TE_F8E5M2; }

/* What modules compute in and gradients have: floating point, but for FP8, which only stores. */
TE_HD static inline bool te_dtype_has_gradient(te_dtype dtype)
{
    return dtype == TE_F32 || dtype == TE_BF16 || dtype == TE_F16 || dtype == TE_F64;
}

/* Floating point of any width, FP8 included. */
TE_HD static inline bool te_dtype_is_float(te_dtype dtype)
{
    return te_dtype_has_gradient(dtype) || te_dtype_is_float8(dtype);
}

/* Whole numbers; bool is not one of them. */
TE_HD static inline bool te_dtype_is_integer(te_dtype dtype)
{
    return dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8;
}

#endif
