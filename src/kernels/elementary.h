/* elementary.h - exp, log, tanh, sigmoid, erf, sin, cos, pow in float32, at most 2 ulp from the true value everywhere:
 * subnormal results, infinities, NaN and huge arguments included.
 *
 * One source for C and CUDA C. Only additions, multiplications, divisions, explicit fused multiply-adds and moves of
 * bits, each rounded once, so the bits are the same on every device as long as the compiler contracts nothing
 * (-ffp-contract=off, -fmad=false) and keeps subnormal numbers. No branches: alternatives are computed and selected, so
 * a loop over an array vectorizes. The exception are angles beyond TE_ANGLE_LIMIT, see te_sin.
 *
 * The usual scheme: reduce the argument to a short interval, evaluate a minimax polynomial there (coefficients by the
 * Remez algorithm, then rounded), put the result together so that the last operation carries the leading part. Terms
 * are taken in pairs, so that fewer operations wait for each other, and the last two one by one, which is more exact.
 * Rounding to an integer adds and subtracts 1.5 * 2^23 (or 2^52); the sum's low bits then are the integer, without a
 * conversion that would be undefined for NaN.
 */
#ifndef TE_KERNELS_ELEMENTARY_H
#define TE_KERNELS_ELEMENTARY_H

#include "dtype.h"

#ifdef __CUDA_ARCH__
#define TE_FMA(a, b, c)   __fmaf_rn(a, b, c)
#define TE_FMA64(a, b, c) __fma_rn(a, b, c)
#define TE_SQRT(a)        __fsqrt_rn(a)
#else
#define TE_FMA(a, b, c)   __builtin_fmaf(a, b, c)
#define TE_FMA64(a, b, c) __builtin_fma(a, b, c)
#define TE_SQRT(a)        __builtin_sqrtf(a)
#endif

#define TE_ROUND_MAGIC   12582912.0f /* 1.5 * 2^23 */
#define TE_ROUND_MAGIC64 0x1.8p52
#define TE_INFINITY      te_f32_from_bits(0x7f800000u)
#define TE_NAN           te_f32_from_bits(0x7fc00000u)

/* |x| with x's NaN kept. */
TE_HD static inline float te_abs(float x) { return te_f32_from_bits(te_f32_bits(x) & 0x7fffffffu); }

/* `magnitude` (>= 0) with the sign of `sign`. */
TE_HD static inline float te_with_sign(float magnitude, float sign)
{
    return te_f32_from_bits(te_f32_bits(magnitude) | (te_f32_bits(sign) & 0x80000000u));
}

/* --- exponential ------------------------------------------------------------------------------------------------ */

/* x = n ln 2 + r with |r| <= ln 2 / 2; expm1 is e^r - 1. Wants |x| < 2^21. */
typedef struct te_exp_parts {
    float   n, expm1;
    int32_t exponent; /* n as an integer */
} te_exp_parts;

TE_HD static inline te_exp_parts te_exp_reduce(float x)
{
    float shifted = TE_FMA(x, 1.44269504f, TE_ROUND_MAGIC);
    float n = shifted - TE_ROUND_MAGIC;
    float r = TE_FMA(n, -0.693145751953125f, x); /* exact: the factor has 16 bits */
    r = TE_FMA(n, -1.42860682e-6f, r);
    float rr = r * r;
    float q = TE_FMA(TE_FMA(1.38823967e-3f, r, 8.36718082e-3f), rr, TE_FMA(4.1667223e-2f, r, 0.16666539f));
    q = TE_FMA(q, r, 0.49999997f);
    te_exp_parts parts = {n, TE_FMA(rr, q, r), (int32_t)(te_f32_bits(shifted) - te_f32_bits(TE_ROUND_MAGIC))};
    return parts;
}

/* The scaling goes in two steps, of which the last rounds, so that results may be subnormal or overflow. */
TE_HD static inline float te_exp(float x)
{
    float v = x > 89.0f ? 89.0f : x;
    v = v < -105.0f ? -105.0f : v;
    te_exp_parts parts = te_exp_reduce(v);
    uint32_t     exponent = (uint32_t)parts.exponent, half = (uint32_t)(parts.exponent >> 1);
    float        low = te_f32_from_bits((half + 127u) << 23), high = te_f32_from_bits((exponent - half + 127u) << 23);
    return (1.0f + parts.expm1) * low * high;
}

/* Below 0.55 an odd polynomial; beyond, 1 - 2 / (e^2|x| + 1); from 9.1 on the result is 1. */
TE_HD static inline float te_tanh(float x)
{
    float size = te_abs(x), t = size * size;
    float p = TE_FMA(TE_FMA(-6.19872659e-3f, t, 2.10205559e-2f), t * t, TE_FMA(-5.3840518e-2f, t, 0.133324802f));
    p = TE_FMA(p, t, -0.333333135f);
    float near = TE_FMA(size * t, p, size);

    float v = size > 10.0f ? 10.0f : size;
    te_exp_parts parts = te_exp_reduce(v + v);
    float        scale = te_f32_from_bits(((uint32_t)parts.exponent + 127u) << 23);
    float        far = 1.0f - 2.0f / TE_FMA(scale, parts.expm1, scale + 1.0f);
    return te_with_sign(size < 0.55f ? near : far, x);
}

/* With e = e^-|x| and q = e / (1 + e): q below 0, where e - e q has q's value and a smaller error, and 1 - q above. */
TE_HD static inline float te_sigmoid(float x)
{
    float e = te_exp(-te_abs(x));
    float q = e / (1.0f + e);
    return x < 0.0f ? TE_FMA(-e, q, e) : 1.0f - q;
}

/* --- logarithm -------------------------------------------------------------------------------------------------- */

/* x = 2^e (1 + f) with f in [-1/3, 1/3]. */
TE_HD static inline float te_log(float x)
{
    float    scaled = x < 0x1p-126f ? x * 0x1p23f : x;
    uint32_t bits = te_f32_bits(scaled);
    int32_t  exponent = (int32_t)(bits - 0x3f2aaaabu) >> 23;
    float    f = te_f32_from_bits(bits - ((uint32_t)exponent << 23)) - 1.0f;
    float    e = (float)exponent - (x < 0x1p-126f ? 23.0f : 0.0f);
    float    ff = f * f;
    float    p = TE_FMA(TE_FMA(-0.128916875f, f, 0.139844358f), ff, TE_FMA(-0.121842608f, f, 0.140058696f));
    p = TE_FMA(p, ff, TE_FMA(-0.16680488f, f, 0.200104058f));
    p = TE_FMA(p, ff, TE_FMA(-0.249997973f, f, 0.333332151f));
    p = TE_FMA(p, f, -0.5f);
    p = TE_FMA(ff, p, e * 1.42860682e-6f);
    float r = TE_FMA(e, 0.693145751953125f, f + p);
    r = x == 0.0f ? -TE_INFINITY : r;
    r = x < 0.0f ? TE_NAN : r;
    return x < TE_INFINITY ? r : x; /* infinity and NaN are their own */
}

/* --- error function --------------------------------------------------------------------------------------------- */

/* ln erfc v for 0 <= v <= 4: v times a polynomial. */
TE_HD static inline float te_log_erfc(float v)
{
    float vv = v * v;
    float high = TE_FMA(TE_FMA(9.38729318e-6f, v, -1.18856384e-4f), vv, TE_FMA(6.37349789e-4f, v, -1.67565921e-3f));
    float low = TE_FMA(TE_FMA(1.6949464e-4f, v, 1.91478245e-2f), vv, TE_FMA(-0.102776304f, v, -0.636619568f));
    float p = TE_FMA(TE_FMA(high, vv * vv, low), v, -0.128379166f); /* 1 - 2 / sqrt(pi) */
    return TE_FMA(v, p, -v);
}

/* 1 - e^g with g = ln erfc |x|: near 0, where e^g is 1, the difference is e^g - 1 itself and keeps its relative
 * accuracy. From 4 on the result is 1. */
TE_HD static inline float te_erf(float x)
{
    float        size = te_abs(x);
    te_exp_parts parts = te_exp_reduce(te_log_erfc(size > 4.0f ? 4.0f : size));
    float        scale = te_f32_from_bits(((uint32_t)parts.exponent + 127u) << 23);
    return te_with_sign(TE_FMA(-scale, parts.expm1, 1.0f - scale), x);
}

/* --- sine and cosine -------------------------------------------------------------------------------------------- */

/* For |r| <= pi / 4 and a little more. The selection keeps the sign of -0. */
TE_HD static inline float te_sin_quarter(float r)
{
    float t = r * r;
    float p = TE_FMA(-1.95087414e-4f, t, 8.3321128e-3f);
    p = TE_FMA(p, t, -0.166666538f);
    return r == 0.0f ? r : TE_FMA(r * t, p, r);
}

TE_HD static inline float te_cos_quarter(float r)
{
    float t = r * r;
    float p = TE_FMA(2.44256807e-5f, t, -1.38872513e-3f);
    p = TE_FMA(p, t, 4.16666456e-2f);
    return TE_FMA(t * t, p, TE_FMA(t, -0.5f, 1.0f));
}

/* sin(r + quarter * pi / 2) from sine and cosine of r. */
TE_HD static inline float te_sin_select(float sine, float cosine, uint32_t quarter)
{
    float v = quarter & 1u ? cosine : sine;
    return te_f32_from_bits(te_f32_bits(v) ^ (quarter & 2u) << 30);
}

/* Up to here the angle is reduced in float64 with pi / 2 in two parts; nearer than 2^-31 relatively no float32 comes to
 * a multiple of pi / 2, so the 2^-66 left over does not matter. */
#define TE_ANGLE_LIMIT 0x1p40f

typedef struct te_angle {
    float    r; /* within pi / 4 of 0 */
    uint32_t quarter;
} te_angle;

TE_HD static inline te_angle te_angle_reduce(float x)
{
    double shifted = TE_FMA64((double)x, 0.63661977236758134, TE_ROUND_MAGIC64);
    double n = shifted - TE_ROUND_MAGIC64;
    double r = TE_FMA64(n, -1.5707963267948966, (double)x);
    r = TE_FMA64(n, -6.123233995736766e-17, r);
    te_angle angle = {(float)r, (uint32_t)te_f64_bits(shifted)};
    return angle;
}

/* Payne and Hanek: of x = m 2^e times 2 / pi only the bits below 4 matter, so 2 / pi enters from bit e - 1 on. The
 * product of m with 96 of its bits, modulo 2^96, is a quarter in 2 bits and the position in it. Finite x of at least
 * 2^26. */
TE_HD static inline te_angle te_angle_reduce_huge(float x)
{
    const uint32_t two_over_pi[7] = {0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
                                     0xdb629599u, 0x3c439041u, 0xfe5163abu};
    uint32_t bits = te_f32_bits(x), m = (bits & 0x7fffffu) | 0x800000u;
    uint32_t skip = (bits >> 23 & 0xffu) - 150u - 2u, at = skip / 32u, shift = skip % 32u, w[3];
    for (int i = 0; i < 3; i++) {
        uint64_t pair = (uint64_t)two_over_pi[at + (uint32_t)i] << 32 | two_over_pi[at + (uint32_t)i + 1u];
        w[i] = (uint32_t)(pair << shift >> 32);
    }
    uint64_t low = (uint64_t)m * w[2], middle = (uint64_t)m * w[1] + (low >> 32);
    uint64_t product = ((uint64_t)m * w[0] << 32) + middle;
    uint64_t place = product << 2; /* in units of 2^-64 quarters; from one half on counted from the next quarter */
    uint32_t quarter = (uint32_t)(product >> 62) + (uint32_t)(place >> 63);
    double   r = (double)(int64_t)place * (1.5707963267948966 * 0x1p-64);
    te_angle angle = {(float)(x < 0.0f ? -r : r), x < 0.0f ? 0u - quarter : quarter};
    return angle;
}

/* sin(x + turn * pi / 2) for |x| < TE_ANGLE_LIMIT, infinite or NaN: without branches. */
TE_HD static inline float te_sin_bounded(float x, uint32_t turn)
{
    te_angle angle = te_angle_reduce(x);
    return te_sin_select(te_sin_quarter(angle.r), te_cos_quarter(angle.r), angle.quarter + turn);
}

TE_HD static inline bool te_angle_is_huge(float x)
{
    float size = te_abs(x);
    return size >= TE_ANGLE_LIMIT && size < TE_INFINITY;
}

TE_HD static inline float te_sin_turned(float x, uint32_t turn)
{
    if (!te_angle_is_huge(x)) return te_sin_bounded(x, turn);
    te_angle angle = te_angle_reduce_huge(x);
    return te_sin_select(te_sin_quarter(angle.r), te_cos_quarter(angle.r), angle.quarter + turn);
}

/* A loop that should vectorize calls te_sin_bounded and mends the rare huge angle with these afterwards: same bits. */
TE_HD static inline float te_sin(float x) { return te_sin_turned(x, 0); }
TE_HD static inline float te_cos(float x) { return te_sin_turned(x, 1); }

/* --- power ------------------------------------------------------------------------------------------------------ */

/* log2 of a positive float32, -inf for 0, infinity and NaN as they are; float64 with 45 good bits. */
TE_HD static inline double te_log2_wide(float x)
{
    uint64_t bits = te_f64_bits((double)x);
    int32_t  exponent = (int32_t)((uint32_t)(bits >> 32) - 0x3fe6a09eu) >> 20; /* m from sqrt(1/2) on */
    double   m = te_f64_from_bits(bits - ((uint64_t)(uint32_t)exponent << 52));
    double   f = (m - 1.0) / (m + 1.0), t = f * f;
    double   p = TE_FMA64(0.2429812452594632, t, 0.2614388172399184);
    p = TE_FMA64(p, t, 0.3206165573255098);
    p = TE_FMA64(p, t, 0.4121983996295802);
    p = TE_FMA64(p, t, 0.5770780172618819);
    p = TE_FMA64(p, t, 0.9617966939242982);
    p = TE_FMA64(p, t, 2.885390081777927);
    double r = TE_FMA64(f, p, (double)exponent);
    r = x == 0.0f ? -(double)TE_INFINITY : r;
    return x < TE_INFINITY ? r : (double)x;
}

/* 2^x, 38 good bits; beyond the range of float32 any value that rounds to infinity or 0. */
TE_HD static inline double te_exp2_wide(double x)
{
    double v = x > 200.0 ? 200.0 : x;
    v = v < -200.0 ? -200.0 : v;
    double shifted = v + TE_ROUND_MAGIC64, r = v - (shifted - TE_ROUND_MAGIC64);
    double p = TE_FMA64(1.317569576431764e-06, r, 1.530996466733468e-05);
    p = TE_FMA64(p, r, 0.00015403854341785835);
    p = TE_FMA64(p, r, 0.001333345121654663);
    p = TE_FMA64(p, r, 0.009618128536044768);
    p = TE_FMA64(p, r, 0.05550410940212305);
    p = TE_FMA64(p, r, 0.24022650698928052);
    p = TE_FMA64(p, r, 0.6931471805463006);
    p = TE_FMA64(p, r, 0.9999999999997576);
    return p * te_f64_from_bits((te_f64_bits(shifted) + 1023u) << 52);
}

/* x^n for 0 <= n <= 15 by squaring in float64. */
TE_HD static inline double te_pow_small(double x, uint32_t n)
{
    double x2 = x * x, x4 = x2 * x2;
    double a = (n & 1u ? x : 1.0) * (n & 2u ? x2 : 1.0);
    return a * ((n & 4u ? x4 : 1.0) * (n & 8u ? x4 * x4 : 1.0));
}

/* C's pow with all its special cases. Whole b up to 15 in size are products in float64, so x^2 is x * x to the bit and
 * what float32 can hold exactly comes out exact; the rest is 2^(b log2 |a|), in float64 since the product magnifies
 * errors. */
TE_HD static inline float te_pow(float a, float b)
{
    float    b_size = te_abs(b);
    bool     even = b_size >= 0x1p24f; /* infinity too */
    int32_t  whole = (int32_t)(b_size < 0x1p24f ? b : 0.0f);
    bool     is_whole = even | ((float)whole == b);
    bool     is_small = b_size <= 15.0f;
    uint32_t n = (uint32_t)(whole < 0 ? -whole : whole);

    double   l = te_log2_wide(te_abs(a));
    double   t = ((b_size == TE_INFINITY) & (l == 0.0)) ? 0.0 : (double)b * l;
    uint32_t sign = is_whole ? te_f32_bits(a) & n << 31 : 0u; /* of a, when b is odd */
    float    power = te_f32_from_bits(te_f32_bits((float)te_exp2_wide(t)) ^ sign);
    power = ((a < 0.0f) & (a > -TE_INFINITY) & !is_whole & (b == b)) ? TE_NAN : power;

    double product = te_pow_small((double)a, n);
    product = b < 0.0f ? 1.0 / product : product;
    float r = (is_small & is_whole) ? (float)product : power;
    return ((a == 1.0f) | (b == 0.0f)) ? 1.0f : r;
}

#endif
