/* quantize_along.h - factors and codes of a row in one visit, where factors are powers of two, for quantize_vbmi.c.
 *
 * A chunk of one or two kilobytes is measured, its factors are made, and it is encoded: so short that the processor,
 * which works on some three hundred instructions at once, measures the next one meanwhile. Memory is read from one end
 * to the other. Zen 4 foresees that best by itself: going back by four kilobytes or more, or asking for lines oneself,
 * costs up to twice the time that memory takes. Zen 5 does not foresee it, and takes half the time where lines are
 * asked for.
 *
 * What is encoded is no larger than what its factor was made from. So no code saturates, and a 64 takes the easy way
 * unless something in it is too small (quantize_powers.h).
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ALONG_H
#define TE_KERNELS_CPU_QUANTIZE_ALONG_H

#include "quantize_factors.h"
#include "quantize_folds.h"
#include "quantize_powers.h"

#include <string.h>

#if defined(TE_ISA_avx512vbmi)

enum {
    TE_CHUNK = 512,   /* elements whose halves sixteen vectors hold */
    TE_LONG = 128,    /* blocks are so long or as short */
    TE_SHORT = 32,
    TE_LANES = 16     /* factors made at once; a long block has four of them */
};

/* What sixteen lanes are encoded by: bytes to subtract and limits of te_bounds four times over, since words are
 * broadcast from memory for nothing. */
typedef struct te_lanes {
    uint32_t under[TE_LANES], least[TE_LANES];
    float multipliers[TE_LANES];
    bool easy; /* no block has a factor under which these are of no use */
} te_lanes;

TE_INLINE void te_ask_ahead(const void *x, int bytes, int64_t ahead)
{
    for (int i = 0; ahead && i < bytes; i += 64) __builtin_prefetch((const char *)x + ahead + i, 0, 3);
}

/* --- maxima ------------------------------------------------------------------------------------------------------- */

/* Amaxes of four long blocks, a quarter each, from four vectors of words. */
TE_INLINE __m512i te_largest_of_four(const __m512i v[4])
{
    __m512i all = te_fold_words(v);
    all = _mm512_max_epu32(all, _mm512_shuffle_epi32(all, 0x4e));
    return _mm512_max_epu32(all, _mm512_shuffle_epi32(all, 0xb1));
}

/* Of a chunk, amaxes as bits of float32, of sixteen short blocks or of four long ones, and what it is encoded from:
 * halves of float32 stay in registers, where maxima leave as many as they can; bfloat16 is as well read again. */

TE_INLINE __m512i te_take_f32(__m512i *halves, const float *x)
{
    __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 16), size = _mm512_set1_epi32(0x7fffffff);
    *halves = te_odd_halves(a, b);
    return _mm512_max_epu32(_mm512_and_si512(a, size), _mm512_and_si512(b, size));
}

TE_INLINE __m512i te_take_short_f32(__m512i halves[16], const float *x)
{
    __m512i y[4];
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += 4) {
        __m512i v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) v[i] = te_take_f32(&halves[k + i], x + 32 * (k + i));
        y[k / 4] = te_fold_words(v);
    }
    return te_fold_quarters(y);
}

TE_INLINE __m512i te_take_long_f32(__m512i halves[16], const float *x)
{
    __m512i v[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        v[k] = te_take_f32(&halves[4 * k], x + TE_LONG * k);
#pragma GCC unroll 3
        for (int i = 4 * k + 1; i < 4 * k + 4; i++) v[k] = _mm512_max_epu32(v[k], te_take_f32(&halves[i], x + 32 * i));
    }
    return te_largest_of_four(v);
}

TE_INLINE __m512i te_take_short_bf16(__m512i halves[16], const uint16_t *x)
{
    __m512i v[16];
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) v[k] = te_size_bf16(x + 32 * k);
    return (void)halves, te_largest_bf16(v);
}

TE_INLINE __m512i te_take_long_bf16(__m512i halves[16], const uint16_t *x)
{
    __m512i v[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        v[k] = te_size_bf16(x + TE_LONG * k);
#pragma GCC unroll 3
        for (int i = 4 * k + 1; i < 4 * k + 4; i++) v[k] = _mm512_max_epu16(v[k], te_size_bf16(x + 32 * i));
        v[k] = te_larger_halves(v[k]);
    }
    return (void)halves, te_largest_of_four(v);
}

TE_INLINE te_rounded_64 te_round_taken_f32(const __m512i halves[2], const float *x, const te_rounding *c)
{
    return (void)x, te_round_halves(halves[0], halves[1], c);
}

TE_INLINE te_rounded_64 te_round_taken_bf16(const __m512i halves[2], const uint16_t *x, const te_rounding *c)
{
    return (void)halves, te_round_64_bf16(x, c);
}

/* Whether an amax is no number. */
TE_INLINE bool te_any_nan(__m512i sizes) { return _mm512_cmpgt_epu32_mask(sizes, _mm512_set1_epi32(0x7f800000)) != 0; }

/* --- factors ------------------------------------------------------------------------------------------------------ */

/* Bounds are of use where a factor has an easy exponent and takes its amax to `largest` at most, or all are 0. */
TE_INLINE void te_bound_lanes(te_lanes *to, __m512 amax, __m512 multipliers, float largest, te_wide_form f)
{
    const __m512i splat = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    te_bounds b = te_bounds_of(_mm512_castps_si512(multipliers), f);
    __mmask16 good = _mm512_test_epi32_mask(b.most, b.most);
    __mmask16 some = _mm512_cmp_ps_mask(amax, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    good = _mm512_mask_cmp_ps_mask(good, _mm512_mul_ps(amax, multipliers), _mm512_set1_ps(largest), _CMP_LE_OQ);
    to->easy = (some & ~good) == 0;
    _mm512_storeu_si512(to->under, _mm512_shuffle_epi8(b.under, splat));
    _mm512_storeu_si512(to->least, b.least);
    _mm512_storeu_ps(to->multipliers, multipliers);
}

/* Factors of a chunk as they are stored. */
TE_INLINE void te_put_lanes(void *to, __m512i stored, bool wide, int64_t block)
{
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    if (block == TE_LONG) stored = _mm512_permutexvar_epi32(quarters, stored);
    if (wide && block == TE_LONG)
        _mm_storeu_si128(to, _mm512_castsi512_si128(stored));
    else if (wide)
        _mm512_storeu_si512(to, stored);
    else if (block == TE_LONG)
        _mm_storeu_si32(to, _mm512_cvtepi32_epi8(stored));
    else
        _mm_storeu_si128(to, _mm512_cvtepi32_epi8(stored));
}

TE_INLINE void te_settle_lanes(te_lanes *to, void *factors, __m512i sizes, const te_factor_rule *rule, float inverse,
                               int64_t block, te_wide_form f)
{
    const bool wide = rule->scale == TE_SCALE_F32;
    const __m512 amax = _mm512_castsi512_ps(sizes);
    te_factors_16 made = wide ? te_wide_powers_16(amax, rule) : te_exponents_16(amax, inverse);
    te_put_lanes(factors, made.stored, wide, block);
    te_bound_lanes(to, amax, made.multipliers, rule->max * 1.001f, f); /* which is rounded to the largest one */
}

/* Bytes of a factor as it is stored. */
TE_INLINE int te_factor_size(const te_factor_rule *rule)
{
    return rule->scale == TE_SCALE_F32 ? (int)sizeof(float) : 1;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

#define TE_DEFINE_ROW_AT_ONCE(dtype, type)                                                                             \
    /* 64 the general way, in one block or in two. */                                                                  \
    static __attribute__((noinline)) void te_one_way_##dtype(uint8_t *codes, const type *x, const float *multipliers,  \
                                                             bool two, te_wide_form f)                                 \
    {                                                                                                                  \
        __m512 m[4];                                                                                                   \
        m[0] = m[1] = _mm512_set1_ps(multipliers[0]);                                                                  \
        m[2] = m[3] = _mm512_set1_ps(multipliers[two]);                                                                \
        te_codes_64_##dtype(codes, x, m, f, false);                                                                    \
    }                                                                                                                  \
    static __attribute__((noinline)) void te_chunk_one_way_##dtype(uint8_t *codes, const type *x,                      \
                                                                   const float *multipliers, bool two, te_wide_form f) \
    {                                                                                                                  \
        for (int k = 0; k < 8; k++)                                                                                    \
            te_one_way_##dtype(codes + 64 * k, x + 64 * k, multipliers + (two ? 2 * k : k / 2 * 4), two, f);           \
    }                                                                                                                  \
    TE_INLINE void te_encode_taken_##dtype(uint8_t *codes, const type *x, const __m512i halves[16],                    \
                                           const te_lanes *of, int64_t block, te_wide_form f, const te_rounding *c,    \
                                           bool past)                                                                  \
    {                                                                                                                  \
        const bool two = block == TE_SHORT;                                                                            \
        const __mmask16 half = 0xff00;                                                                                 \
        if (__builtin_expect(!of->easy, 0)) {                                                                          \
            te_chunk_one_way_##dtype(codes, x, of->multipliers, two, f);                                               \
            return;                                                                                                    \
        }                                                                                                              \
        _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)                                                            \
        {                                                                                                              \
            const int lane = two ? 2 * k : k / 2 * 4;                                                                  \
            __m512i under = _mm512_set1_epi32((int)of->under[lane]), least = _mm512_set1_epi32((int)of->least[lane]);  \
            if (two) under = _mm512_mask_set1_epi32(under, half, (int)of->under[lane + 1]);                            \
            if (two) least = _mm512_mask_set1_epi32(least, half, (int)of->least[lane + 1]);                            \
            te_rounded_64 r = te_round_taken_##dtype(halves + 2 * k, x + 64 * k, c);                                   \
            if (__builtin_expect(!_mm512_cmplt_epu8_mask(r.least, least), 1))                                          \
                te_put_codes(codes + 64 * k, te_codes_of(r, under, c), past);                                          \
            else                                                                                                       \
                te_one_way_##dtype(codes + 64 * k, x + 64 * k, of->multipliers + lane, two, f);                        \
        }                                                                                                              \
    }                                                                                                                  \
    /* One chunk or two; false, and nothing is written, where there is a NaN. */                                       \
    TE_INLINE bool te_chunks_at_once_##dtype(uint8_t *codes, char *factors, const type *x, const int chunks,           \
                                             const te_factor_rule *rule, float inverse, const int64_t block,           \
                                             te_wide_form f, const te_rounding *c, bool past, int64_t ahead)           \
    {                                                                                                                  \
        const int64_t step = TE_CHUNK / block * te_factor_size(rule);                                                  \
        te_lanes of[2];                                                                                                \
        __m512i halves[2][16], amax[2];                                                                                \
        te_ask_ahead(x, chunks * TE_CHUNK * (int)sizeof(type), ahead);                                                 \
        _Pragma("GCC unroll 2") for (int i = 0; i < chunks; i++) amax[i] =                                             \
            block == TE_SHORT ? te_take_short_##dtype(halves[i], x + i * TE_CHUNK)                                     \
                              : te_take_long_##dtype(halves[i], x + i * TE_CHUNK);                                     \
        if (__builtin_expect(te_any_nan(chunks > 1 ? _mm512_max_epu32(amax[0], amax[1]) : amax[0]), 0)) return false;  \
        _Pragma("GCC unroll 2") for (int i = 0; i < chunks; i++)                                                       \
            te_settle_lanes(&of[i], factors + i * step, amax[i], rule, inverse, block, f);                             \
        _Pragma("GCC unroll 2") for (int i = 0; i < chunks; i++)                                                       \
            te_encode_taken_##dtype(codes + i * TE_CHUNK, x + i * TE_CHUNK, halves[i], &of[i], block, f, c, past);     \
        return true;                                                                                                   \
    }                                                                                                                  \
    /* One chunk after the other; the last one is made whole by zeros. */                                              \
    static __attribute__((noinline)) int64_t te_rest_at_once_##dtype(uint8_t *codes, char *factors, const type *x,     \
                                                                     int64_t n, const te_factor_rule *rule,            \
                                                                     int64_t block, te_wide_form f, bool past,         \
                                                                     int64_t ahead)                                    \
    {                                                                                                                  \
        const te_rounding c = te_rounding_of(f);                                                                       \
        const float inverse = 1.0f / rule->max;                                                                        \
        const int size = te_factor_size(rule);                                                                         \
        type last[TE_CHUNK];                                                                                           \
        uint8_t last_codes[TE_CHUNK];                                                                                  \
        float last_factors[TE_LANES];                                                                                  \
        for (int64_t i = 0; i < n; i += TE_CHUNK) {                                                                    \
            const bool whole = i + TE_CHUNK <= n;                                                                      \
            const int64_t there = whole ? TE_CHUNK : n - i;                                                            \
            char *to = factors + i / block * size;                                                                     \
            for (int64_t k = 0; k < TE_CHUNK && !whole; k += 64 / (int)sizeof(type))                                   \
                _mm512_storeu_si512(last + k, k < there ? _mm512_loadu_si512(x + i + k) : _mm512_setzero_si512());     \
            if (!te_chunks_at_once_##dtype(whole ? codes + i : last_codes, whole ? to : (char *)last_factors,          \
                                           whole ? x + i : last, 1, rule, inverse, block, f, &c, past && whole,        \
                                           whole ? ahead : 0))                                                         \
                return i;                                                                                              \
            for (int64_t k = 0; k < there && !whole; k += 64)                                                          \
                te_put_codes(codes + i + k, _mm512_loadu_si512(last_codes + k), past);                                 \
            if (!whole) memcpy(to, last_factors, (size_t)(there / block * size));                                      \
        }                                                                                                              \
        return n;                                                                                                      \
    }                                                                                                                  \
    /* Whole 64s in whole blocks of n, but for what begins with a chunk or two that have a NaN. */                     \
    TE_INLINE int64_t te_at_once_##dtype(uint8_t *codes, char *factors, const type *x, int64_t n,                      \
                                         const te_factor_rule *rule, const int64_t block, te_wide_form f, bool past,   \
                                         int64_t ahead)                                                                \
    {                                                                                                                  \
        enum { CHUNKS = sizeof(type) == 2 ? 2 : 1, TURN = CHUNKS * TE_CHUNK };                                         \
        const int64_t whole = n - n % (block < 64 ? 64 : block);                                                       \
        const te_rounding c = te_rounding_of(f);                                                                       \
        const float inverse = 1.0f / rule->max;                                                                        \
        const int size = te_factor_size(rule);                                                                         \
        int64_t i = 0;                                                                                                 \
        for (; CHUNKS > 1 && i + TURN <= whole; i += TURN)                                                             \
            if (!te_chunks_at_once_##dtype(codes + i, factors + i / block * size, x + i, CHUNKS, rule, inverse, block, \
                                           f, &c, past, ahead))                                                        \
                return i;                                                                                              \
        if (i == whole) return i;                                                                                      \
        return i + te_rest_at_once_##dtype(codes + i, factors + i / block * size, x + i, whole - i, rule, block, f,    \
                                           past, ahead);                                                               \
    }

TE_DEFINE_ROW_AT_ONCE(f32, float)
TE_DEFINE_ROW_AT_ONCE(bf16, uint16_t)

#define TE_DEFINE_AT_ONCE(dtype, format, ...)                                                                          \
    static int64_t at_once_##dtype##_##format(uint8_t *codes, void *factors, const void *x, int64_t n,                 \
                                              const te_factor_rule *rule, int64_t block, bool past, int64_t ahead)     \
    {                                                                                                                  \
        te_wide_form f = te_wide_form_of(__VA_ARGS__);                                                                 \
        if (block == TE_SHORT) return te_at_once_##dtype(codes, factors, x, n, rule, TE_SHORT, f, past, ahead);        \
        return block == TE_LONG ? te_at_once_##dtype(codes, factors, x, n, rule, TE_LONG, f, past, ahead) : 0;         \
    }

TE_DEFINE_AT_ONCE(f32, e4m3, TE_E4M3_CODE)
TE_DEFINE_AT_ONCE(f32, e5m2, TE_E5M2_CODE)
TE_DEFINE_AT_ONCE(bf16, e4m3, TE_E4M3_CODE)
TE_DEFINE_AT_ONCE(bf16, e5m2, TE_E5M2_CODE)
#endif

#endif
