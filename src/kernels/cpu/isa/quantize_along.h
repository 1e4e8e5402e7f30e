/* quantize_along.h - factors and codes of a row in one visit, where factors are powers of two, for quantize_vbmi.c.
 *
 * Sixteen blocks at a time are measured and encoded, nothing but bytes of bounds being stored between: what comes from
 * memory is asked for by halves at either occasion, and nothing waits for codes that are on their way. Maxima, factors
 * and codes of a turn are those of three sixteens, so that none of them waits for another.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ALONG_H
#define TE_KERNELS_CPU_QUANTIZE_ALONG_H

#include "quantize_factors.h"
#include "quantize_folds.h"
#include "quantize_powers.h"

#if defined(TE_ISA_avx512vbmi)

/* Whether one of sixteen amaxes is no number. */
TE_INLINE bool te_any_nan(__m512i sizes) { return _mm512_cmpgt_epu32_mask(sizes, _mm512_set1_epi32(0x7f800000)) != 0; }

TE_INLINE void te_put_few(uint8_t *to, __m128i bytes, int n)
{
    if (n == 16)
        _mm_storeu_si128((__m128i *)(void *)to, bytes);
    else
        _mm_mask_storeu_epi8(to, (__mmask16)((1u << n) - 1), bytes);
}

/* What sixteen blocks are encoded by. */
typedef struct te_sixteen {
    te_bounds_along bounds;
    float multipliers[16];
} te_sixteen;

/* 64 the general way, in one block or in two. */
#define TE_DEFINE_ROW_AT_ONCE(dtype, type)                                                                             \
    static __attribute__((noinline)) void te_one_way_##dtype(uint8_t *codes, const type *x, const float *multipliers,  \
                                                             bool two, te_wide_form f)                                 \
    {                                                                                                                  \
        __m512 m[4];                                                                                                   \
        m[0] = m[1] = _mm512_set1_ps(multipliers[0]);                                                                  \
        m[2] = m[3] = _mm512_set1_ps(multipliers[two]);                                                                \
        te_codes_64_##dtype(codes, x, m, f, false);                                                                    \
    }                                                                                                                  \
    TE_INLINE void te_bounded_blocks_##dtype(uint8_t *codes, const type *x, const te_sixteen *of, const int64_t block, \
                                             int blocks, te_wide_form f, const te_rounding *c, bool past)              \
    {                                                                                                                  \
        const bool two = block == 32;                                                                                  \
        const type *half = x + TE_FAR / sizeof(type) + blocks * block / 2;                                             \
        for (int64_t b = 0, i = 0; b < blocks; b += two ? 2 : 1) {                                                     \
            te_bounds bounds = te_bounds_at(&of->bounds, (int)b, two);                                                 \
            for (int64_t end = i + (two ? 64 : block); i < end; i += 64) {                                             \
                te_fetch_half(half + i / 2, 0, 64 * sizeof(type), false);                                              \
                if (__builtin_expect(!te_codes_bounded_##dtype(codes + i, x + i, bounds, c, past), 0))                 \
                    te_one_way_##dtype(codes + i, x + i, of->multipliers + b, two, f);                                 \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Whole 64s in whole blocks of n, of 32 or 128 elements, but for what begins with sixteen that have a NaN. */     \
    TE_INLINE int64_t te_at_once_##dtype(uint8_t *codes, void *factors, const type *x, int64_t n,                      \
                                         const te_factor_rule *rule, const int64_t block, te_wide_form f, bool past)   \
    {                                                                                                                  \
        const bool wide = rule->scale == TE_SCALE_F32;                                                                 \
        const te_rounding c = te_rounding_of(f);                                                                       \
        const float inverse = 1.0f / rule->max;                                                                        \
        int64_t whole = n - n % (block < 64 ? 64 : block), measured = 0, made = 0, done = 0;                           \
        __m512i sizes = _mm512_setzero_si512();                                                                        \
        te_sixteen both[2];                                                                                            \
        for (int turn = 0; done < whole; turn ^= 1) {                                                                  \
            const int64_t at = made, from = measured;                                                                  \
            const __m512i found = sizes;                                                                               \
            if (from < whole) {                                                                                        \
                int blocks = (int)((whole - from) / block < 16 ? (whole - from) / block : 16);                         \
                __m512i v[16];                                                                                         \
                te_most_##dtype(v, x + from, (int)(block * (int)sizeof(type) / 64), blocks,                            \
                                x + from + TE_FAR / sizeof(type));                                                     \
                sizes = te_largest_##dtype(v);                                                                         \
                measured += blocks * block;                                                                            \
            }                                                                                                          \
            if (at < from) {                                                                                           \
                __m512 amax = _mm512_castsi512_ps(found);                                                              \
                te_factors_16 f16 = wide ? te_wide_16(amax, rule) : te_exponents_16(amax, inverse);                    \
                if (wide)                                                                                              \
                    _mm512_storeu_si512((float *)factors + at / block, f16.stored);                                    \
                else                                                                                                   \
                    te_put_few((uint8_t *)factors + at / block, _mm512_cvtepi32_epi8(f16.stored),                      \
                               (int)((from - at) / block));                                                            \
                _mm512_storeu_ps(both[turn].multipliers, f16.multipliers);                                             \
                te_bounds_for(&both[turn].bounds, _mm512_castps_si512(f16.multipliers), f);                            \
                made = from;                                                                                           \
                if (te_any_nan(found)) whole = made = at;                                                              \
            }                                                                                                          \
            te_bounded_blocks_##dtype(codes + done, x + done, &both[turn ^ 1], block, (int)((at - done) / block), f,   \
                                      &c, past);                                                                       \
            done = at;                                                                                                 \
        }                                                                                                              \
        return whole;                                                                                                  \
    }

TE_DEFINE_ROW_AT_ONCE(f32, float)
TE_DEFINE_ROW_AT_ONCE(bf16, uint16_t)

#define TE_DEFINE_AT_ONCE(dtype, format, ...)                                                                          \
    static int64_t at_once_##dtype##_##format(uint8_t *codes, void *factors, const void *x, int64_t n,                 \
                                              const te_factor_rule *rule, int64_t block, bool past)                    \
    {                                                                                                                  \
        te_wide_form f = te_wide_form_of(__VA_ARGS__);                                                                 \
        if (block == 32) return te_at_once_##dtype(codes, factors, x, n, rule, 32, f, past);                           \
        return block == 128 ? te_at_once_##dtype(codes, factors, x, n, rule, 128, f, past) : 0;                        \
    }

TE_DEFINE_AT_ONCE(f32, e4m3, TE_E4M3_CODE)
TE_DEFINE_AT_ONCE(f32, e5m2, TE_E5M2_CODE)
TE_DEFINE_AT_ONCE(bf16, e4m3, TE_E4M3_CODE)
TE_DEFINE_AT_ONCE(bf16, e5m2, TE_E5M2_CODE)
#endif

#endif
