/* quantize_both.h - codes of 64 elements for both directions from one rounding, for quantize_blocks.c.
 *
 * Under a power of two the exponent moves and the mantissa stays: where the element is not 0 and its code a normal number both
 * times, it is rounded to the format's mantissa as it stands, and either code is that less an offset. Only seven bits of it are a
 * code, so what is subtracted is bytes, and eight bits of an offset are enough. A 64 in which anything is too small for one of the
 * factors, is infinite or is no number goes each way by itself.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_BOTH_H
#define TE_KERNELS_CPU_QUANTIZE_BOTH_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_encode.h"

#if defined(TE_ISA_avx512)

/* 64 elements rounded: signs and the low seven bits, which are not 0, and the smallest that is not 0 and the largest in the upper
 * half of a float32, the smallest less 1. */
typedef struct te_rounded_64 {
    __m512i bytes;
    __mmask64 some;
    __m512i least, most;
} te_rounded_64;

TE_INLINE te_rounded_64 te_round_64_bf16(const uint16_t *x, int mantissa)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), one = _mm512_set1_epi16(1);
    const unsigned dropped = 7 - (unsigned)mantissa;
    __m512i given[2], size[2], r[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        given[k] = _mm512_loadu_si512(x + 32 * k);
        size[k] = _mm512_and_si512(given[k], _mm512_set1_epi16(0x7fff));
        __m512i odd = _mm512_and_si512(_mm512_srli_epi16(size[k], dropped), one);
        __m512i raised = _mm512_add_epi16(size[k], _mm512_set1_epi16((short)((1 << (dropped - 1)) - 1)));
        r[k] = _mm512_srli_epi16(_mm512_add_epi16(raised, odd), dropped);
    }
    __mmask64 some = _mm512_kunpackd(_mm512_test_epi16_mask(r[1], r[1]), _mm512_test_epi16_mask(r[0], r[0]));
    __m512i low = _mm512_set1_epi16(0x7f), signs = _mm512_packs_epi16(given[0], given[1]);
    __m512i all = _mm512_packus_epi16(_mm512_and_si512(r[0], low), _mm512_and_si512(r[1], low));
    all = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi8((char)0x80), all, 0xea); /* a & b | c */
    return (te_rounded_64){.bytes = _mm512_permutexvar_epi64(order, all),
                           .some = some,
                           .least = _mm512_min_epu16(_mm512_sub_epi16(size[0], one), _mm512_sub_epi16(size[1], one)),
                           .most = _mm512_max_epu16(size[0], size[1])};
}

/* Whether all of them are finite, and none but zeros is `least` or below. */
TE_INLINE bool te_is_easy_bf16(te_rounded_64 r, uint32_t least)
{
    __mmask32 small = _mm512_cmplt_epu16_mask(r.least, _mm512_set1_epi16((short)least));
    return (small | _mm512_cmpge_epu16_mask(r.most, _mm512_set1_epi16(0x7f80))) == 0;
}

TE_INLINE te_rounded_64 te_round_64_f32(const float *x, int mantissa)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), one = _mm512_set1_epi32(1);
    const unsigned dropped = 23 - (unsigned)mantissa;
    __m512i given[4], r[4], least = _mm512_set1_epi32(-1), most = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        given[k] = _mm512_loadu_si512(x + 16 * k);
        __m512i size = _mm512_and_si512(given[k], _mm512_set1_epi32(0x7fffffff));
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, dropped), one);
        __m512i raised = _mm512_add_epi32(size, _mm512_set1_epi32((1 << (dropped - 1)) - 1));
        r[k] = _mm512_srli_epi32(_mm512_add_epi32(raised, odd), dropped);
        least = _mm512_min_epu32(least, _mm512_sub_epi32(size, one));
        most = _mm512_max_epu32(most, size);
    }
    __m512i first = _mm512_packus_epi32(r[0], r[1]), second = _mm512_packus_epi32(r[2], r[3]), low = _mm512_set1_epi16(0x7f);
    __m512i any = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)); /* saturates, so 0 where all is 0 */
    __m512i signs = _mm512_packs_epi16(_mm512_packs_epi32(given[0], given[1]), _mm512_packs_epi32(given[2], given[3]));
    __m512i all = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
    all = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi8((char)0x80), all, 0xea);
    return (te_rounded_64){.bytes = _mm512_permutexvar_epi32(order, all),
                           .some = _mm512_test_epi8_mask(any, any),
                           .least = least,
                           .most = most};
}

TE_INLINE bool te_is_easy_f32(te_rounded_64 r, uint32_t least)
{
    __mmask16 small = _mm512_cmplt_epu32_mask(r.least, _mm512_set1_epi32((int)((least + 1) << 16) - 1));
    return (small | _mm512_cmpge_epu32_mask(r.most, _mm512_set1_epi32(0x7f800000))) == 0;
}

/* Bytes less their offsets, but for zeros; signs stay. */
TE_INLINE void te_put_codes(uint8_t *to, te_rounded_64 r, __m512i offsets, bool past)
{
    __m512i moved = _mm512_mask_sub_epi8(r.bytes, r.some, r.bytes, offsets);
    moved = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), r.bytes, moved, 0xca); /* a ? b : c */
    if (past)
        _mm512_stream_si512((__m512i *)(void *)to, moved);
    else
        _mm512_storeu_si512(to, moved);
}

/* What a factor's exponent takes from that of an element; the size that an element must be above then, as bfloat16. */
TE_INLINE int te_offset_under(float power, uint32_t smallest)
{
    return (int)(smallest >> 23) + 126 - (int)(te_f32_bits(power) >> 23);
}

TE_INLINE uint32_t te_least_under(int offset) { return offset > 0 ? ((uint32_t)offset << 7) + 127 : 127; }

/* 64 columns of all rows, whose factors are powers of two. A compiler makes loops of its own for blocks of 32 and for codes that go
 * past the caches. */
#define TE_DEFINE_BOTH(dtype, type)                                                                                    \
    TE_INLINE void te_both_columns_##dtype(const te_two_ways *w, int64_t j, te_wide_form f, bool two, bool past,       \
                                           bool past_down)                                                             \
    {                                                                                                                  \
        uint8_t under[64];                                                                                             \
        int top = INT32_MIN;                                                                                           \
        for (int k = 0; k < 64; k++) {                                                                                 \
            int offset = te_offset_under(w->down[j + k], f.smallest);                                                  \
            under[k] = (uint8_t)(offset * (1 << f.mantissa));                                                          \
            top = offset > top ? offset : top;                                                                         \
        }                                                                                                              \
        const __m512i down = _mm512_loadu_si512(under);                                                                \
        const type *x = (const type *)w->x + j, *next = (const type *)(w->next ? w->next : w->x) + j;                  \
        const float *along = w->along + j / w->block;                                                                  \
        uint8_t *to_along = w->codes[0] + j, *to_down = w->codes[1] + j;                                               \
        for (int i = 0; i < w->rows; i++, x += w->stride, next += w->stride, along += w->step) {                       \
            for (int k = 0; k < 64; k += 64 / (int)sizeof(type)) __builtin_prefetch(next + k, 0, 2);                   \
            int first = te_offset_under(along[0], f.smallest), second = te_offset_under(along[two], f.smallest);       \
            int most = first > second ? first : second;                                                                \
            te_rounded_64 r = te_round_64_##dtype(x, f.mantissa);                                                      \
            if (__builtin_expect(te_is_easy_##dtype(r, te_least_under(most > top ? most : top)), 1)) {                 \
                __m512i offsets = _mm512_set1_epi8((char)(first * (1 << f.mantissa)));                                 \
                const char under_second = (char)(second * (1 << f.mantissa));                                          \
                if (two) offsets = _mm512_mask_set1_epi8(offsets, 0xffffffff00000000u, under_second);                  \
                te_put_codes(to_along, r, offsets, past);                                                              \
                te_put_codes(to_down, r, down, past_down);                                                             \
            } else {                                                                                                   \
                te_each_way_##dtype(to_along, to_down, x, along, two, w->down + j, f);                                 \
            }                                                                                                          \
            to_along += w->codes_stride[0], to_down += w->codes_stride[1];                                             \
        }                                                                                                              \
    }                                                                                                                  \
    TE_INLINE int64_t te_both_##dtype(const te_two_ways *w, int mantissa, uint32_t smallest, uint32_t largest, int nan,\
                                      int sign)                                                                        \
    {                                                                                                                  \
        te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);                                      \
        int64_t blocks = (w->n + w->block - 1) / w->block, done = 0;                                                   \
        bool powers = te_powers_from(0x800000u, w->down, w->n) && (w->block == 32 || w->block % 64 == 0);              \
        for (int i = 0; i < w->rows && powers; i++) powers = te_powers_from(0x800000u, w->along + i * w->step, blocks);\
        for (; powers && done + 64 <= w->n; done += 64)                                                                \
            if (w->block == 32 && w->past[1])                                                                          \
                te_both_columns_##dtype(w, done, f, true, true, true);                                                 \
            else if (w->block == 32)                                                                                   \
                te_both_columns_##dtype(w, done, f, true, w->past[0], false);                                          \
            else                                                                                                       \
                te_both_columns_##dtype(w, done, f, false, w->past[0], w->past[1]);                                    \
        if (w->past[0]) _mm_sfence();                                                                                  \
        return done;                                                                                                   \
    }

static void te_each_way_bf16(uint8_t *to_along, uint8_t *to_down, const uint16_t *x, const float *along, bool two,
                             const float *down, te_wide_form f)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    __m512 m[4];
    m[0] = m[1] = _mm512_set1_ps(along[0]);
    m[2] = m[3] = _mm512_set1_ps(along[two]);
    te_codes_64_bf16(to_along, x, m, f);
    for (int k = 0; k < 2; k++) {
        __m512 low = _mm512_loadu_ps(down + 32 * k), high = _mm512_loadu_ps(down + 32 * k + 16);
        m[2 * k] = _mm512_permutex2var_ps(low, evens, high);
        m[2 * k + 1] = _mm512_permutex2var_ps(low, odds, high);
    }
    te_codes_64_bf16(to_down, x, m, f);
}

static void te_each_way_f32(uint8_t *to_along, uint8_t *to_down, const float *x, const float *along, bool two,
                            const float *down, te_wide_form f)
{
    __m512 m[4];
    m[0] = m[1] = _mm512_set1_ps(along[0]);
    m[2] = m[3] = _mm512_set1_ps(along[two]);
    te_codes_64_f32(to_along, x, m, f);
    for (int k = 0; k < 4; k++) m[k] = _mm512_loadu_ps(down + 16 * k);
    te_codes_64_f32(to_down, x, m, f);
}

TE_DEFINE_BOTH(f32, float)
TE_DEFINE_BOTH(bf16, uint16_t)

#define TE_DEFINE_BOTH_OF(dtype, format, ...)                                                                          \
    static int64_t both_##dtype##_##format(const te_two_ways *w) { return te_both_##dtype(w, __VA_ARGS__); }

TE_DEFINE_BOTH_OF(f32, e4m3, TE_E4M3_CODE)
TE_DEFINE_BOTH_OF(f32, e5m2, TE_E5M2_CODE)
TE_DEFINE_BOTH_OF(bf16, e4m3, TE_E4M3_CODE)
TE_DEFINE_BOTH_OF(bf16, e5m2, TE_E5M2_CODE)
#else
#define both_f32_e4m3  NULL
#define both_f32_e5m2  NULL
#define both_bf16_e4m3 NULL
#define both_bf16_e5m2 NULL
#endif

#define both_f16_e4m3 NULL
#define both_f16_e5m2 NULL

#endif
