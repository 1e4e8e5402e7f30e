/* elementary64.h - exp, log, tanh, sigmoid, erf, sin, cos in float64, at most 2 ulp from the true value everywhere:
 * subnormal results, infinities and NaN included.
 *
 * The scheme of elementary.h, and its rules: additions, multiplications, divisions, explicit fused multiply-adds and
 * moves of bits, no branches, hence vectors in loops and the same bits on every processor. Conversions between float64
 * and int64 are in the low bits of sums too, as not every instruction set has them for vectors. Angles from
 * TE_ANGLE_LIMIT64 on are the C library's.
 */
#ifndef TE_KERNELS_ELEMENTARY64_H
#define TE_KERNELS_ELEMENTARY64_H

#include "elementary.h"

#include <math.h>

#define TE_INLINE64 static inline __attribute__((always_inline))

#define TE_LOG2_E64   1.4426950408889634
#define TE_LN2_HIGH64 0x1.62e42fefa3p-1 /* 42 bits: exact times an exponent */
#define TE_LN2_LOW64  0x1.3de6af278ece6p-42

TE_INLINE64 double te_f64_from_bits(uint64_t bits)
{
    union { uint64_t u; double f; } v;
    v.u = bits;
    return v.f;
}

TE_INLINE64 double te_abs64(double x) { return te_f64_from_bits(te_f64_bits(x) & 0x7fffffffffffffffu); }

/* `magnitude` (>= 0) with the sign of `sign`. */
TE_INLINE64 double te_with_sign64(double magnitude, double sign)
{
    return te_f64_from_bits(te_f64_bits(magnitude) | (te_f64_bits(sign) & 0x8000000000000000u));
}

/* --- exponential ------------------------------------------------------------------------------------------------ */

/* x = n ln 2 + r with |r| <= ln 2 / 2; e^r is 1 + r + rest. Wants |x| < 2^20. */
typedef struct te_exp_parts64 {
    double   n, r, rest;
    uint64_t exponent; /* n + `more` in its low bits */
} te_exp_parts64;

/* `more` is even. */
TE_INLINE64 te_exp_parts64 te_exp_reduce64(double x, double more)
{
    double shifted = TE_FMA64(x, TE_LOG2_E64, TE_ROUND_MAGIC64 + more);
    double n = shifted - (TE_ROUND_MAGIC64 + more);
    double r = TE_FMA64(n, -TE_LN2_HIGH64, x);
    r = TE_FMA64(n, -TE_LN2_LOW64, r);
    double q = TE_FMA64(0x1.1e3d0e2d05425p-29, r, 0x1.af6c1de65eb49p-26);
    q = TE_FMA64(TE_FMA64(q, r, 0x1.27e5b48f3ce0cp-22), r, 0x1.71ddf0026c9cap-19);
    q = TE_FMA64(TE_FMA64(q, r, 0x1.a01a01364f6fdp-16), r, 0x1.a01a01b38a1c4p-13);
    q = TE_FMA64(TE_FMA64(q, r, 0x1.6c16c16c305dbp-10), r, 0x1.111111110ec3fp-7);
    q = TE_FMA64(TE_FMA64(q, r, 0x1.5555555555503p-5), r, 0x1.555555555555bp-3);
    q = TE_FMA64(q, r, 0.5);
    te_exp_parts64 parts = {n, r, r * r * q, te_f64_bits(shifted)};
    return parts;
}

/* The scaling goes in two steps as in te_exp. */
TE_INLINE64 double te_exp64(double x)
{
    double v = x > 710.0 ? 710.0 : x;
    v = v < -746.0 ? -746.0 : v;
    te_exp_parts64 parts = te_exp_reduce64(v, 2046.0);
    uint64_t       half = te_f64_bits(TE_FMA64(parts.n, 0.5, TE_ROUND_MAGIC64 + 1023.0)) << 52;
    double         low = te_f64_from_bits(half), high = te_f64_from_bits((parts.exponent << 52) - half);
    return (1.0 + (parts.r + parts.rest)) * low * high;
}

/* Below 0.5 an odd polynomial; beyond, t / (t + 2) with t = e^2|x| - 1; from 19.1 on the result is 1. */
TE_INLINE64 double te_tanh64(double x)
{
    double size = te_abs64(x), s = size * size;
    double p = TE_FMA64(0x1.dcdd6535880c8p-15, s, -0x1.c8f24c65ec34cp-13);
    p = TE_FMA64(TE_FMA64(p, s, 0x1.31d5707627c69p-11), s, -0x1.7d49b6ae7f756p-10);
    p = TE_FMA64(TE_FMA64(p, s, 0x1.d6ce061e3d29dp-9), s, -0x1.226e16954b6dbp-7);
    p = TE_FMA64(TE_FMA64(p, s, 0x1.664f47b7a9488p-6), s, -0x1.ba1ba1b718413p-5);
    p = TE_FMA64(TE_FMA64(p, s, 0x1.111111110e3aep-3), s, -0x1.5555555555538p-2);
    double near = TE_FMA64(size * s, p, size);

    double v = size > 20.0 ? 20.0 : size;
    te_exp_parts64 parts = te_exp_reduce64(v + v, 0.0);
    double         scale = te_f64_from_bits((parts.exponent << 52) + 0x3ff0000000000000u);
    double         t = TE_FMA64(scale, parts.rest, TE_FMA64(scale, parts.r, scale - 1.0));
    return te_with_sign64(size < 0.5 ? near : t / (t + 2.0), x);
}

/* As te_sigmoid. */
TE_INLINE64 double te_sigmoid64(double x)
{
    double e = te_exp64(-te_abs64(x)), q = e / (1.0 + e);
    return x < 0.0 ? TE_FMA64(-e, q, e) : 1.0 - q;
}

/* --- logarithm -------------------------------------------------------------------------------------------------- */

/* x = 2^e (1 + f) with 1 + f from sqrt(1/2) to sqrt(2); s = f / (2 + f). ln (1 + f) is the series of 2 artanh s, put
 * together as f - (f^2 / 2 - s (f^2 / 2 + s^2 p)), whose leading part is exact. */
TE_INLINE64 double te_log64(double x)
{
    double   scaled = x < 0x1p-1022 ? x * 0x1p54 : x;
    uint64_t bits = te_f64_bits(scaled);
    uint64_t biased = (bits - 0x3fe6a09e667f3bcdu + ((uint64_t)1024 << 52)) >> 52; /* e + 1024 */
    double   f = te_f64_from_bits(bits - (biased << 52) + ((uint64_t)1024 << 52)) - 1.0;
    double   e = te_f64_from_bits(biased | 0x4330000000000000u) - (0x1p52 + 1024.0);
    e = x < 0x1p-1022 ? e - 54.0 : e;
    double s = f / (2.0 + f), t = s * s, half = 0.5 * f * f;
    double p = TE_FMA64(0x1.2f15bb54434d9p-3, t, 0x1.39a02ef69e940p-3);
    p = TE_FMA64(TE_FMA64(p, t, 0x1.74664d7592582p-3), t, 0x1.c71c51c6736dbp-3);
    p = TE_FMA64(TE_FMA64(p, t, 0x1.249249423e485p-2), t, 0x1.999999997f8a8p-2);
    p = TE_FMA64(p, t, 0x1.5555555555593p-1);
    double low = TE_FMA64(s, TE_FMA64(t, p, half), e * TE_LN2_LOW64);
    double r = TE_FMA64(e, TE_LN2_HIGH64, f - (half - low));
    r = x == 0.0 ? -(double)TE_INFINITY : r;
    r = x < 0.0 ? (double)TE_NAN : r;
    return x < (double)TE_INFINITY ? r : x; /* infinity and NaN are their own */
}

/* --- error function --------------------------------------------------------------------------------------------- */

/* Below 1 an odd polynomial. Beyond, 1 - e^g with g = ln erfc v, a polynomial in v - 1; from 6 on the result is 1. */
TE_INLINE64 double te_erf64(double x)
{
    double size = te_abs64(x), t = size * size;
    double p = TE_FMA64(-0x1.aaf40b14696bfp-31, t, 0x1.d6e27bcd9e0b3p-27);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.5bffe09fc2669p-23), t, 0x1.b97ecc8005807p-20);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.f4ca3735b474ap-17), t, 0x1.f9a2b9874de8ep-14);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.c02db03563e0ep-11), t, 0x1.565bccf90d568p-8);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.b82ce311fa8c4p-6), t, 0x1.ce2f21a040d51p-4);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.812746b0379bep-2), t, 0x1.06eba8214db68p-3);
    double near = TE_FMA64(size, p, size);

    double u = (size > 6.0 ? 6.0 : size) - 1.0;
    double g = TE_FMA64(-0x1.6c2089d7736bbp-43, u, 0x1.6be69eb6980c2p-38);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.51b06f94824e4p-34), u, 0x1.82b4645695322p-31);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.310d49bbbe368p-28), u, 0x1.5aad6b56c49c2p-26);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.17176195c05d7p-24), u, 0x1.048b22506edc8p-23);
    g = TE_FMA64(TE_FMA64(g, u, 0x1.d8334b00edde5p-24), u, -0x1.0fd62e012fbeep-19);
    g = TE_FMA64(TE_FMA64(g, u, 0x1.41838b5ef1042p-17), u, -0x1.c763ba27d9eabp-16);
    g = TE_FMA64(TE_FMA64(g, u, 0x1.b8c1bf029af62p-16), u, 0x1.f1b4a14fd8bp-13);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.033f6950ba9d9p-9), u, 0x1.48c9d40a50216p-7);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.5477f09ca2f28p-5), u, -0x1.afabc11a28f63p-1);
    g = TE_FMA64(TE_FMA64(g, u, -0x1.51c9b0006c23dp+1), u, -0x1.d97fbf27aa2a1p+0);
    te_exp_parts64 parts = te_exp_reduce64(g, 0.0);
    double         scale = te_f64_from_bits((parts.exponent << 52) + 0x3ff0000000000000u);
    double         far = TE_FMA64(-scale, parts.r + parts.rest, 1.0 - scale);
    return te_with_sign64(size < 1.0 ? near : far, x);
}

/* --- sine and cosine -------------------------------------------------------------------------------------------- */

/* Up to here pi / 2 in three parts is enough: what the first leaves of an angle is exact, and no float64 below comes
 * nearer than 2^-90 to a multiple of pi / 2, of which the parts leave 2^-130. */
#define TE_ANGLE_LIMIT64 0x1p30

TE_INLINE64 bool te_angle_is_huge64(double x)
{
    double size = te_abs64(x);
    return (size >= TE_ANGLE_LIMIT64) & (size < (double)TE_INFINITY);
}

/* sin(x + turn * pi / 2) for |x| < TE_ANGLE_LIMIT64, infinite or NaN. The angle within a quarter is r + low. The last
 * selection keeps the sign of -0. */
TE_INLINE64 double te_sin_bounded64(double x, uint32_t turn)
{
    double shifted = TE_FMA64(x, 0.63661977236758134, TE_ROUND_MAGIC64), n = shifted - TE_ROUND_MAGIC64;
    double first = TE_FMA64(n, -1.5707963267948966, x), second = n * 6.123233995736766e-17, r = first - second;
    double low = TE_FMA64(n, 6.123233995736766e-17, -second);
    low = (first - r - second) - TE_FMA64(n, -1.4973849048591698e-33, low);
    double t = r * r;

    double p = TE_FMA64(-0x1.aaa47cbe37a53p-41, t, 0x1.612091267cf93p-33);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.ae645295e1b3bp-26), t, 0x1.71de3a5337a62p-19);
    p = TE_FMA64(TE_FMA64(p, t, -0x1.a01a01a018acep-13), t, 0x1.111111111110bp-7);
    p = TE_FMA64(p, t, -0x1.5555555555555p-3);
    double sine = TE_FMA64(r * t, p, low) + r;

    double q = TE_FMA64(-0x1.8fadcfe8b3bd1p-37, t, 0x1.1ee9ea6c0ec77p-29);
    q = TE_FMA64(TE_FMA64(q, t, -0x1.27e4f807d5b66p-22), t, 0x1.a01a019caef3fp-16);
    q = TE_FMA64(TE_FMA64(q, t, -0x1.6c16c16c15162p-10), t, 0x1.555555555554cp-5);
    double most = TE_FMA64(t, -0.5, 1.0), rest = TE_FMA64(t, -0.5, 1.0 - most);
    double cosine = most + TE_FMA64(t * t, q, TE_FMA64(-r, low, rest));

    uint64_t quarter = te_f64_bits(shifted) + turn;
    uint64_t odd = (uint64_t)0 - (quarter & 1u);
    uint64_t bits = (te_f64_bits(cosine) & odd) | (te_f64_bits(sine) & ~odd);
    double   v = te_f64_from_bits(bits ^ (quarter & 2u) << 62);
    return ((x == 0.0) & (turn == 0)) ? x : v;
}

TE_INLINE64 double te_sin_turned64(double x, uint32_t turn)
{
    if (te_angle_is_huge64(x)) return turn ? cos(x) : sin(x);
    return te_sin_bounded64(x, turn);
}

#endif
