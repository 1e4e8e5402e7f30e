/* quantize_codes.h - codes of many elements at once, for quantize_blocks.c.
 *
 * A code takes no branches. The power of two that is added to a magnitude has the format's last place as its own, so
 * the sum is rounded to it, ties to even, and counts the places in its low bits; those of the exponent go in front of
 * them. Below the smallest normal number the place stays where it is. Same codes as those of dtype.h and quant.h.
 *
 * Float32 and bfloat16 are encoded by vector instructions where the instruction set has code for that
 * (quantize_vectors.h); functions say how many elements they have done, and compilers vectorize the loops over the
 * others.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_CODES_H
#define TE_KERNELS_CPU_QUANTIZE_CODES_H

#include "kernels/quant.h"

#include <stdbool.h>

/* mantissa bits, smallest normal and largest number as float32, code of a NaN, sign */
#define TE_E4M3_CODE 3, 0x3c800000u, 0x43e00000u, 0x7f, 0x80
#define TE_E5M2_CODE 2, 0x38800000u, 0x47600000u, 0x7f, 0x80
#define TE_E2M1_CODE 1, 0x3f800000u, 0x40c00000u, 7, 8

#define TE_INLINE static inline __attribute__((always_inline))

TE_INLINE uint8_t te_code(float x, int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    uint32_t bits = te_f32_bits(x), size = bits & 0x7fffffffu, dropped = 23 - (uint32_t)mantissa;
    uint32_t most = size < largest ? size : largest, exponent = most & 0x7f800000u;
    exponent = exponent > smallest ? exponent : smallest;
    uint32_t places = te_f32_bits(te_f32_from_bits(most) + te_f32_from_bits(exponent + (dropped << 23)));
    uint32_t code = (places & 0xffu) + ((exponent - smallest) >> dropped);
    return (uint8_t)(size > 0x7f800000u ? (uint32_t)nan : code | (bits >> 31 ? (uint32_t)sign : 0u));
}

/* As te_f8e4m3_to_f32 and te_e2m1_to_f32; where those multiply a subnormal float32, which some machines are slow at,
 * these convert a small integer. */
TE_INLINE float te_value_e4m3(uint8_t code)
{
    uint32_t size = code & 0x7fu, normal = (size << 20) + (120u << 23);
    uint32_t small = te_f32_bits((float)(int32_t)size * 0x1p-9f), bits = size < 8 ? small : normal;
    bits = size == 0x7fu ? 0x7fc00000u : bits;
    return te_f32_from_bits(bits | (code & 0x80u) << 24);
}

TE_INLINE float te_value_e2m1(uint8_t code)
{
    uint32_t size = code & 7u, normal = (size << 22) + (126u << 23);
    uint32_t small = te_f32_bits((float)(int32_t)size * 0.5f), bits = size < 2 ? small : normal;
    return te_f32_from_bits(bits | (code & 8u) << 28);
}

#endif
