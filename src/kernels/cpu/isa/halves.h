/* halves.h - float16 and float32. The instructions give the bits of te_f16_to_f32 and te_f32_to_f16, NaN and subnormal
 * numbers included.
 *
 * Functions of lines take whole vectors alone and say how many elements that were: none without such instructions.
 */
#ifndef TE_KERNELS_CPU_ISA_HALVES_H
#define TE_KERNELS_CPU_ISA_HALVES_H

#include "kernels/dtype.h"

#include <stddef.h>

#if defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
#include <immintrin.h>

static inline float te_widen_half(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t te_narrow_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline size_t te_widen_halves(float *to, const uint16_t *from, size_t n)
{
    size_t i = 0;
#if defined(TE_ISA_avx512)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(from + i))));
#else
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + i))));
#endif
    return i;
}

static inline size_t te_narrow_to_halves(uint16_t *to, const float *from, size_t n)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    size_t i = 0;
#if defined(TE_ISA_avx512)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), NEAREST));
#else
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), NEAREST));
#endif
    return i;
}

#elif defined(TE_ISA_neon)
#include <arm_neon.h>

static inline float te_widen_half(uint16_t x)
{
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}

static inline uint16_t te_narrow_half(float x)
{
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}

static inline size_t te_widen_halves(float *to, const uint16_t *from, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
    return i;
}

static inline size_t te_narrow_to_halves(uint16_t *to, const float *from, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
    return i;
}

#else

static inline float te_widen_half(uint16_t x) { return te_f16_to_f32(x); }
static inline uint16_t te_narrow_half(float x) { return te_f32_to_f16(x); }

static inline size_t te_widen_halves(float *to, const uint16_t *from, size_t n)
{
    return (void)to, (void)from, (void)n, 0;
}

static inline size_t te_narrow_to_halves(uint16_t *to, const float *from, size_t n)
{
    return (void)to, (void)from, (void)n, 0;
}

#endif

#endif
