/* quant.h - low-precision formats beyond dtype.h, and the arithmetic of one value or one block.
 *
 * One source for C and CUDA C, as dtype.h. Every float operation rounds once and nothing is contracted, so a quantizer
 * gives the same bytes wherever this is compiled.
 *
 *      e8m0    2^(code - 127), 255 is NaN; no sign, no zero: scales of blocks only
 *      e2m1    magnitudes 0 .5 1 1.5 2 3 4 6, sign in bit 3; neither infinity nor NaN: a NaN becomes +6
 */
#ifndef TE_KERNELS_QUANT_H
#define TE_KERNELS_QUANT_H

#include "dtype.h"

#define TE_FLT_MAX 3.402823466e+38f

/* What a value is stored as. */
typedef enum te_element_kind { TE_E4M3, TE_E5M2, TE_E2M1, TE_ELEMENT_COUNT } te_element_kind;

TE_HD static inline float te_element_max(te_element_kind e)
{
    return e == TE_E4M3 ? 448.0f : e == TE_E5M2 ? 57344.0f : 6.0f;
}

/* What the factors of blocks are. */
typedef enum te_scale_kind {
    TE_SCALE_F32,  /* float32 factors */
    TE_SCALE_E8M0, /* exponents */
    TE_SCALE_E4M3, /* e4m3 factors of blocks under a float32 factor that the amax gives */
    TE_SCALE_COUNT
} te_scale_kind;

/* The larger magnitude; a NaN is passed over. */
TE_HD static inline float te_amax(float amax, float x)
{
    float size = te_f32_from_bits(te_f32_bits(x) & 0x7fffffffu);
    return size > amax ? size : amax;
}

/* What delayed scaling keeps of one tensor, on the device where its amaxes arise, and the rule that changes it
 * (te_backend.delayed_update). history[0] is the amax of the step, the oldest of earlier ones follows.
 *
 *      history[0] 0              nothing happens: the tensor was not used
 *                 not finite     it is forgotten and counted, the scale stays
 *                 otherwise      the history rolls, scale = reach / amax where that is a factor
 */
typedef struct te_delayed {
    float  *scale, *history;
    int64_t length, most_recent; /* amax: the largest of the history, or the last one */
    double  reach;               /* the format's largest value, less the margin */
} te_delayed;

/* Whether values can be multiplied by it and come back: it and its inverse are positive and finite. */
TE_HD static inline bool te_is_factor(float scale)
{
    return scale > 0 && scale <= TE_FLT_MAX && 1.0f / scale <= TE_FLT_MAX;
}

/* The factor of an amax, `old` where none follows from it. */
TE_HD static inline float te_delayed_scale(double reach, float amax, float old)
{
    if (!(amax > 0 && amax <= TE_FLT_MAX)) return old;
    double scale = reach / (double)amax;
    float  next = (float)(scale > (double)TE_FLT_MAX ? (double)TE_FLT_MAX : scale);
    return te_is_factor(next) ? next : old;
}

/* --- e8m0 ------------------------------------------------------------------------------------------------------- */

/* The smallest power of two that is at least v >= 0: what a block is divided by must not be too small for it. */
TE_HD static inline uint8_t te_f32_to_e8m0(float v)
{
    uint32_t u = te_f32_bits(v) & 0x7fffffffu, exponent = u >> 23, fraction = u & 0x7fffffu;
    uint32_t up = fraction != 0 && exponent != 254 && !(exponent == 0 && fraction <= 0x400000u);
    if (exponent == 255) return fraction ? 255 : 254;
    return (uint8_t)(exponent + up);
}

TE_HD static inline float te_e8m0_to_f32(uint8_t code)
{
    if (code == 255) return te_f32_from_bits(0x7fc00000u);
    return te_f32_from_bits(code ? (uint32_t)code << 23 : 0x400000u);
}

/* 2^(127 - code): the factor that a block is multiplied by. */
TE_HD static inline float te_e8m0_inverse(uint8_t code)
{
    return code == 255 ? te_e8m0_to_f32(255) : te_e8m0_to_f32((uint8_t)(254 - code));
}

/* --- e2m1 ------------------------------------------------------------------------------------------------------- */

/* As those of dtype.h: a multiplication moves the exponent, and normalizes the one subnormal number. */
TE_HD static inline float te_e2m1_to_f32(uint8_t code)
{
    uint32_t bits = te_f32_bits(te_f32_from_bits((code & 7u) << 22) * 0x1p126f);
    return te_f32_from_bits(bits | (code & 8u) << 28);
}

/* To nearest, ties to the even code; saturates. */
TE_HD static inline uint8_t te_f32_to_e2m1(float x)
{
    float t = te_f32_from_bits(te_f32_bits(x) & 0x7fffffffu);
    uint32_t code =
        (uint32_t)(t > 0.25f) + (t >= 0.75f) + (t > 1.25f) + (t >= 1.75f) + (t > 2.5f) + (t >= 3.5f) + (t > 5.0f);
    return (uint8_t)(x != x ? 7u : code | (te_f32_bits(x) >> 28 & 8u));
}

/* Up with the probability that the distance from the value below says, to 1/256, as the byte `random` decides. */
TE_HD static inline uint8_t te_f32_to_e2m1_stochastic(float x, uint32_t random)
{
    float t = te_f32_from_bits(te_f32_bits(x) & 0x7fffffffu);
    float step = t < 2.0f ? 0.5f : t < 4.0f ? 1.0f : 2.0f;
    float raised = t + step * ((float)(int32_t)random * 0x1p-8f);
    uint32_t high = raised >= 6.0f ? 7u : 6u, code;
    if (x != x) return 7;
    code = t < 2.0f ? (uint32_t)(int32_t)(raised * 2.0f) : t < 4.0f ? (uint32_t)(int32_t)raised + 2u : high;
    return (uint8_t)(code | (te_f32_bits(x) >> 28 & 8u));
}

/* --- scales ----------------------------------------------------------------------------------------------------- */

/* The factor that brings amax to the format's largest value. Nothing to go by (0, inf): 1. `overflow` stands in for an
 * infinite factor; power_of_two rounds down. */
TE_HD static inline float te_scale_from_amax(float amax, float max, bool power_of_two, float epsilon, float overflow)
{
    if (amax < epsilon) amax = epsilon;
    if (!(amax > 0.0f && amax <= TE_FLT_MAX)) return 1.0f;
    float scale = max / amax;
    if (scale > TE_FLT_MAX) scale = overflow;
    return power_of_two ? te_f32_from_bits(te_f32_bits(scale) & 0xff800000u) : scale;
}

/* Two levels: blocks have e4m3 factors, and the tensor (or the row) one float32 factor that spreads them over e4m3 up
 * to scale_max. */
TE_HD static inline float te_two_level_encode(float amax, float scale_max)
{
    float encode = scale_max * 6.0f / amax;
    if (encode > TE_FLT_MAX) encode = TE_FLT_MAX;
    return amax == 0.0f || encode == 0.0f ? 1.0f : encode;
}

TE_HD static inline uint8_t te_two_level_block(float block_amax, float encode)
{
    return te_f32_to_f8e4m3(block_amax * (encode / 6.0f));
}

/* The candidates of a choice between two factors: `stretch` 1 makes the block's largest value 6, 1.5 makes it 4. */
TE_HD static inline uint8_t te_two_level_candidate(float block_amax, float encode, float stretch)
{
    return te_f32_to_f8e4m3(block_amax * (encode / 6.0f) * stretch);
}

/* What the elements of a block with factor `code` are multiplied by. */
TE_HD static inline float te_two_level_multiplier(uint8_t code, float encode)
{
    float multiplier = 1.0f / (te_f8e4m3_to_f32(code) * (1.0f / encode));
    return multiplier > TE_FLT_MAX ? TE_FLT_MAX : multiplier;
}

/* x = e2m1 * block factor * this. */
TE_HD static inline float te_two_level_decode(float amax, float scale_max) { return amax / (6.0f * scale_max); }

/* --- the 16-point Hadamard transform ---------------------------------------------------------------------------- */

/* v H / 4 in place, H in natural order; its own inverse. Sums are taken in butterflies over distances 1, 2, 4, 8, of
 * what is divided already: they overflow only where a result does. */
TE_HD static inline void te_hadamard16(float *v)
{
    for (int i = 0; i < 16; i++) v[i] *= 0.25f;
    for (int distance = 1; distance < 16; distance *= 2) {
        for (int i = 0; i < 16; i++) {
            if (i & distance) continue;
            float a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
    }
}

/* The fixed signs, + + + - + - - - - - - + - + - -, which keep a constant row from ending in one coefficient. */
TE_HD static inline void te_hadamard_signs(float *v)
{
    for (int i = 0; i < 16; i++) v[i] = 0xd7e8u >> i & 1u ? -v[i] : v[i];
}

#endif
