/* elementary.h - exp, log, tanh, sigmoid, erf, sin, cos, pow in float32, at most 2 ulp from the true value everywhere:
 * subnormal results, infinities, NaN and huge arguments included.
 *
 * One source for C and CUDA C. Only additions, multiplications, divisions, explicit fused multiply-adds and moves of
 * bits, each rounded once, so the bits are the same on every device as long as the compiler contracts nothing
 * (-ffp-contract=off, -fmad=false) and keeps subnormal numbers. No branches: alternatives are computed and selected, so
 * a loop over an array vectorizes. GPUs have limits, magnitudes and divisions of a narrow range in fewer instructions
 * of their own, with the same results but for the bits of a NaN. The exception are angles beyond TE_ANGLE_LIMIT, see
 * te_sin.
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

/* The smaller or larger of two numbers, a NaN where x is one. */
TE_HD static inline float te_at_most(float x, float limit)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
#else
    return x > limit ? limit : x;
#endif
}

TE_HD static inline float te_at_least(float x, float limit)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
#else
    return x < limit ? limit : x;
#endif
}

/* te_abs for arithmetic: GPUs have it in the instruction that reads it, but change the bits of a NaN. */
TE_HD static inline float te_size(float x)
{
#ifdef __CUDA_ARCH__
    return fabsf(x);
#else
    return te_abs(x);
#endif
}

/* 1 / d, rounded once, for d from 1 to 2^100. On GPUs this is what a division does where it needs no care for other
 * numbers, without asking whether it does. */
TE_HD static inline float te_inverse(float d)
{
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return TE_FMA(TE_FMA(-d, r, 1.0f), r, r);
#else
    return 1.0f / d;
#endif
}

/* `magnitude` (>= 0) with the sign of `sign`. */
TE_HD static inline float te_with_sign(float magnitude, float sign)
{
    return te_f32_from_bits(te_f32_bits(magnitude) | (te_f32_bits(sign) & 0x80000000u));
}

/* --- exponential ------------------------------------------------------------------------------------------------ */

/* x = n ln 2 + r with |r| <= ln 2 / 2; expm1 is e^r - 1. Wants |x| < 2^21. */
typedef struct te_exp_parts {
    float    n, expm1;
    uint32_t exponent; /* n + `more` in its low bits */
} te_exp_parts;

/* `more` is even. */
TE_HD static inline te_exp_parts te_exp_reduce(float x, float more)
{
    float shifted = TE_FMA(x, 1.44269504f, TE_ROUND_MAGIC + more);
    float n = shifted - (TE_ROUND_MAGIC + more);
    float r = TE_FMA(n, -0.693145751953125f, x); /* exact: the factor has 16 bits */
    r = TE_FMA(n, -1.42860682e-6f, r);
    float rr = r * r;
    float q = TE_FMA(TE_FMA(1.38823967e-3f, r, 8.36718082e-3f), rr, TE_FMA(4.1667223e-2f, r, 0.16666539f));
    q = TE_FMA(q, r, 0.49999997f);
    te_exp_parts parts = {n, TE_FMA(rr, q, r), te_f32_bits(shifted)};
    return parts;
}

/* The scaling goes in two steps, of which the last rounds, so that results may be subnormal or overflow. The exponents
 * of the two powers, with their bias of 127 each, add up to n + 254. */
TE_HD static inline float te_exp(float x)
{
    te_exp_parts parts = te_exp_reduce(te_at_least(te_at_most(x, 89.0f), -105.0f), 254.0f);
    uint32_t     half = te_f32_bits(TE_FMA(parts.n, 0.5f, TE_ROUND_MAGIC + 127.0f)) << 23;
    float        low = te_f32_from_bits(half), high = te_f32_from_bits((parts.exponent << 23) - half);
    return (1.0f + parts.expm1) * low * high;
}

/* The same for x <= 0: powers down to 2^-151 are normal numbers when multiplied by 2^64. */
TE_HD static inline float te_exp_negative(float x)
{
    te_exp_parts parts = te_exp_reduce(te_at_least(x, -105.0f), 64.0f);
    float        power = te_f32_from_bits((parts.exponent << 23) + 0x3f800000u);
    return (1.0f + parts.expm1) * power * 0x1p-64f;
}

/* Below 0.55 an odd polynomial; beyond, 1 - 2 / (e^2|x| + 1); from 9.1 on the result is 1. */
TE_HD static inline float te_tanh(float x)
{
    float size = te_abs(x), t = size * size;
    float p = TE_FMA(TE_FMA(-6.19872659e-3f, t, 2.10205559e-2f), t * t, TE_FMA(-5.3840518e-2f, t, 0.133324802f));
    p = TE_FMA(p, t, -0.333333135f);
    float near = TE_FMA(size * t, p, size);

    float v = te_at_most(te_size(x), 10.0f);
    te_exp_parts parts = te_exp_reduce(v + v, 0.0f);
    float        scale = te_f32_from_bits((parts.exponent << 23) + 0x3f800000u);
    float        far = 1.0f - 2.0f * te_inverse(TE_FMA(scale, parts.expm1, scale + 1.0f));
    return te_with_sign(size < 0.55f ? near : far, x);
}

/* With e = e^-|x| and q = e / (1 + e): q below 0, where e - e q has q's value and a smaller error, and 1 - q above. */
TE_HD static inline float te_sigmoid(float x)
{
    float e = te_exp_negative(-te_size(x)), d = 1.0f + e;
#ifdef __CUDA_ARCH__
    float inverse = te_inverse(d), near = e * inverse, q = TE_FMA(TE_FMA(-d, near, e), inverse, near);
#else
    float q = e / d;
#endif
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
    te_exp_parts parts = te_exp_reduce(te_log_erfc(te_at_most(te_size(x), 4.0f)), 0.0f);
    float        scale = te_f32_from_bits((parts.exponent << 23) + 0x3f800000u);
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

/* An unevaluated sum; |low| < |high| / 4000. */
typedef struct te_float_pair {
    float high, low;
} te_float_pair;

/* log2 of x >= 0 with 35 good bits; high is -inf for 0, infinity and NaN as they are. x = 2^e m with m from sqrt(1/2)
 * on; with s = (m - 1) / (m + 1) and t = s^2, log2 m is s times a polynomial in t, whose first two terms keep what
 * rounding takes from them. */
TE_HD static inline te_float_pair te_log2_pair(float x)
{
    float    scaled = x < 0x1p-126f ? x * 0x1p23f : x;
    uint32_t bits = te_f32_bits(scaled);
    int32_t  exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
    float    m = te_f32_from_bits(bits - ((uint32_t)exponent << 23));
    float    e = (float)exponent - (x < 0x1p-126f ? 23.0f : 0.0f);

    float f = m - 1.0f, d = m + 1.0f, d_low = m - (d - 1.0f);
    float inverse = 1.0f / d, s = f * inverse;
    float s_low = TE_FMA(-s, d_low, TE_FMA(-s, d, f)) * inverse;
    float t = s * s, t_low = TE_FMA(s + s, s_low, TE_FMA(s, s, -t));

    float p = TE_FMA(TE_FMA(0.336494714f, t, 0.411927164f), t, 0.577078819f);
    float v = t * 0.961796701f, u = 2.88539f + v;
    float v_low = TE_FMA(t, t * p, TE_FMA(t_low, 0.961796701f, 3.851926e-08f)) + TE_FMA(t, 0.961796701f, -v);
    float u_low = (2.88539f - u + v) + v_low;

    float l = s * u, l_low = TE_FMA(s_low, u, TE_FMA(s, u_low, TE_FMA(s, u, -l)));
    float r = e + l;
    te_float_pair pair = {x == 0.0f ? -TE_INFINITY : r, (e - r + l) + l_low};
    pair.high = x < TE_INFINITY ? pair.high : x;
    return pair;
}

/* 2^(x + low). */
TE_HD static inline float te_exp2_pair(float x, float low)
{
    float v = x > 160.0f ? 160.0f : x;
    v = v < -160.0f ? -160.0f : v;
    float rest = v == x ? low : 0.0f;
    float shifted = (v + rest) + TE_ROUND_MAGIC;
    float r = (v - (shifted - TE_ROUND_MAGIC)) + rest;
    float p = TE_FMA(TE_FMA(1.53129135e-4f, r, 1.33977376e-3f), r * r, TE_FMA(9.61862504e-3f, r, 5.55034727e-2f));
    p = TE_FMA(p, r, 0.240226462f);
    p = TE_FMA(p, r, 0.693147182f);
    uint32_t n = te_f32_bits(shifted) - te_f32_bits(TE_ROUND_MAGIC), half = (uint32_t)((int32_t)n >> 1);
    float    first = te_f32_from_bits((half + 127u) << 23), second = te_f32_from_bits((n - half + 127u) << 23);
    return TE_FMA(p, r, 1.0f) * first * second;
}

/* What an exponent b means: `factor` is b, or so large that it makes 0 or infinity of all but 1; `sign` has the bit of
 * the sign where b is odd, `none` is a NaN where b is no whole number, else 0. */
typedef struct te_exponent {
    float    factor;
    uint32_t sign, none;
} te_exponent;

TE_HD static inline te_exponent te_exponent_of(float b)
{
    bool    even = te_abs(b) >= 0x1p24f; /* infinity too */
    int32_t whole = (int32_t)(te_abs(b) < 0x1p24f ? b : 0.0f);
    bool    is_whole = even | ((float)whole == b) | (b != b);
    float   factor = b > 0x1p40f ? 0x1p40f : b;
    te_exponent e = {factor < -0x1p40f ? -0x1p40f : factor, is_whole ? (uint32_t)whole << 31 : 0u,
                     is_whole ? 0u : 0x7fc00000u};
    return e;
}

/* a^b but for plain exponents: 2^(b log2 |a|), in pairs since the product magnifies errors. No error of 1 ulp was seen,
 * so what float32 can hold exactly comes out exact. */
TE_HD static inline float te_pow_by_log(float a, te_exponent e)
{
    te_float_pair l = te_log2_pair(te_abs(a));
    float    x = e.factor * l.high;
    float    power = te_exp2_pair(x, TE_FMA(e.factor, l.low, TE_FMA(e.factor, l.high, -x)));
    uint32_t none = ((a < 0.0f) & (a > -TE_INFINITY)) ? e.none : 0u;
    power = te_f32_from_bits((te_f32_bits(power) ^ (te_f32_bits(a) & e.sign)) | none);
    return a == 1.0f ? 1.0f : power;
}

/* Plain exponents: whole ones up to 15 in size and one half. */
TE_HD static inline bool te_pow_is_plain(float b)
{
    float size = te_abs(b);
    return (size == 0.5f) | ((size <= 15.0f) & ((size + TE_ROUND_MAGIC) - TE_ROUND_MAGIC == size));
}

/* x^n by squaring in float64; n is in the lowest four bits. */
TE_HD static inline double te_pow_small(double x, uint32_t n)
{
    double x2 = x * x, x4 = x2 * x2;
    double a = (n & 1u ? x : 1.0) * (n & 2u ? x2 : 1.0);
    return a * ((n & 4u ? x4 : 1.0) * (n & 8u ? x4 * x4 : 1.0));
}

/* x^0.5, which is no square root of -0 and -inf. */
TE_HD static inline float te_pow_half(float x) { return x == -TE_INFINITY ? TE_INFINITY : TE_SQRT(x) + 0.0f; }

/* C's pow with all its special cases. Whole b up to 15 in size are products in float64, so x^2 is x * x to the bit. A
 * loop that should be fast looks for plain exponents first. */
TE_HD static inline float te_pow(float a, float b)
{
    float  size = te_abs(b), root = te_pow_half(a);
    double product = te_pow_small((double)a, te_f32_bits(size + TE_ROUND_MAGIC));
    product = b < 0.0f ? 1.0 / product : product;
    root = b < 0.0f ? 1.0f / root : root;
    float plain = size == 0.5f ? root : (float)product;
    return te_pow_is_plain(b) ? plain : te_pow_by_log(a, te_exponent_of(b));
}

#endif
