/* quantize_both.h - codes of 64 elements for both directions from one rounding, for quantize_blocks.c.
 *
 * Where a code is a normal number both times, either is what quantize_rounded.h makes less an offset. A 64 in which
 * anything is too small for one of the factors, is infinite or is no number goes each way by itself. Offsets are
 * bytes, four times over for rows, since a word is broadcast from memory for nothing.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_BOTH_H
#define TE_KERNELS_CPU_QUANTIZE_BOTH_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_encode.h"
#include "quantize_rounded.h"

#if defined(TE_ISA_avx512)

enum { TE_MOST_BLOCKS = TE_MOST_COLUMNS / 32 }; /* of a row */

/* Offsets under all factors, and what makes elements too small, by blocks of a row and by 64 columns. */
typedef struct te_offsets {
    uint32_t along[TE_MOST_BLOCKS + 16], least[TE_MOST_BLOCKS + 32];
    uint8_t down[TE_MOST_COLUMNS];
    __m512i columns[TE_MOST_COLUMNS / 64];
} te_offsets;

/* Of up to 16 factors, what each takes from the exponent of an element. */
TE_INLINE __m512i te_offsets_under(const float *factors, int64_t n, te_wide_form f)
{
    __m512i first = _mm512_set1_epi32((int)(f.smallest >> 23) + 126), one = _mm512_set1_epi32(0x3f800000);
    __m512i m = n < 16 ? _mm512_mask_loadu_epi32(one, (__mmask16)((1u << n) - 1), factors)
        : _mm512_loadu_si512(factors);
    return _mm512_sub_epi32(first, _mm512_srli_epi32(m, 23));
}

/* For a row of blocks. */
TE_INLINE void te_offsets_along(te_offsets *o, const float *factors, int64_t n, int64_t block, te_wide_form f)
{
    const __m512i splat = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    for (int64_t i = 0; i < n; i += 16) {
        __m512i offset = te_offsets_under(factors + i, n - i, f);
        __m512i moved = _mm512_slli_epi32(offset, (unsigned)f.mantissa);
        _mm512_storeu_si512(o->along + i, _mm512_shuffle_epi8(moved, splat));
        _mm512_storeu_si512(o->least + i, te_least_under(offset));
    }
    _mm512_storeu_si512(o->least + n, _mm512_setzero_si512());
    for (int64_t i = 0; i < n && block == 32; i += 16) /* of a block and the next */
        _mm512_storeu_si512(o->least + i,
                            te_larger(_mm512_loadu_si512(o->least + i), _mm512_loadu_si512(o->least + i + 1)));
}

/* For whole 64s of columns. */
TE_INLINE void te_offsets_down(te_offsets *o, const float *factors, int64_t n, te_wide_form f)
{
    for (int64_t j = 0; j + 64 <= n; j += 64) {
        __m512i top = _mm512_set1_epi32(INT32_MIN);
        for (int k = 0; k < 64; k += 16) {
            __m512i offset = te_offsets_under(factors + j + k, 16, f);
            top = _mm512_max_epi32(top, offset);
            _mm_storeu_si128((__m128i *)(o->down + j + k),
                             _mm512_cvtepi32_epi8(_mm512_slli_epi32(offset, (unsigned)f.mantissa)));
        }
        o->columns[j / 64] = te_least_under(_mm512_set1_epi32(_mm512_reduce_max_epi32(top)));
    }
}

/* The bits of the largest of n factors more than one; 0 where one is no normal power of two. */
TE_INLINE uint32_t te_powers_most(const float *factors, int64_t n, uint32_t most)
{
    for (int64_t i = 0; i < n; i++) most = te_f32_bits(factors[i]) > most ? te_f32_bits(factors[i]) : most;
    return te_powers_from(0x800000u, factors, n) ? most : 0;
}

/* Row i, as far as there are 64s, whose factors are powers of two. A compiler makes loops of its own for blocks of
 * 32 and for codes that go past the caches. */
#define TE_DEFINE_BOTH(dtype, type)                                                                                    \
    TE_INLINE void te_both_row_##dtype(const te_two_ways *w, int i, te_wide_form f, const te_offsets *o, bool two,     \
                                       bool past, bool past_down)                                                      \
    {                                                                                                                  \
        const type *x = (const type *)w->x + i * w->stride;                                                            \
        const type *next = w->next ? (const type *)w->next + i * w->stride : x;                                        \
        uint8_t *to_along = w->codes[0] + i * w->codes_stride[0], *to_down = w->codes[1] + i * w->codes_stride[1];     \
        const int64_t n = w->n, wide = w->block;                                                                       \
        const te_rounding c = te_rounding_of(f);                                                                       \
        for (int64_t j = 0; j + 64 <= n; j += 64) {                                                                    \
            int64_t block = two ? j / 32 : wide == 128 ? j / 128 : j / wide;                                           \
            const bool half = two && sizeof(type) == 4;                                                                \
            if (half) te_fetch_half(next + n / 2 + j / 2, 0, 64 * sizeof(type), true);                                 \
            for (int k = 0; k < 64 && !half; k += 64 / (int)sizeof(type)) __builtin_prefetch(next + j + k, 0, 2);      \
            te_rounded_64 r = te_round_64_##dtype(x + j, &c);                                                          \
            __m512i least = te_larger(_mm512_set1_epi32((int)o->least[block]), o->columns[j / 64]);                    \
            if (__builtin_expect(te_is_easy(r, least, te_most()), 1)) {                                                \
                __m512i under = _mm512_set1_epi32((int)o->along[block]);                                               \
                if (two) under = _mm512_mask_set1_epi32(under, 0xff00, (int)o->along[block + 1]);                      \
                te_put_codes(to_along + j, te_codes_of(r, under, &c), past);                                           \
                te_put_codes(to_down + j, te_codes_of(r, _mm512_loadu_si512(o->down + j), &c), past_down);             \
            } else {                                                                                                   \
                te_each_way_##dtype(to_along + j, to_down + j, x + j, w->along + i * w->step + block, two,             \
                                    w->down + j, f);                                                                   \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    TE_INLINE int64_t te_both_##dtype(const te_two_ways *w, int mantissa, uint32_t smallest, uint32_t largest,         \
                                      int nan, int sign)                                                               \
    {                                                                                                                  \
        te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);                                      \
        te_offsets o;                                                                                                  \
        int64_t blocks = (w->n + w->block - 1) / w->block;                                                             \
        if ((w->block != 32 && w->block % 64 != 0) || w->n > TE_MOST_COLUMNS) return 0;                                \
        uint32_t most = te_powers_most(w->down, w->n, 1);                                                              \
        for (int i = 0; i < w->rows && most; i++) most = te_powers_most(w->along + i * w->step, blocks, most);         \
        if (!most || (most >> 23 > te_most_power(smallest) && te_any_tiny_##dtype(w))) return 0;                       \
        te_offsets_down(&o, w->down, w->n, f);                                                                         \
        for (int i = 0; i < w->rows; i++) {                                                                            \
            te_offsets_along(&o, w->along + i * w->step, blocks, w->block, f);                                         \
            if (w->block == 32 && w->past[1])                                                                          \
                te_both_row_##dtype(w, i, f, &o, true, true, true);                                                    \
            else if (w->block == 32)                                                                                   \
                te_both_row_##dtype(w, i, f, &o, true, w->past[0], false);                                             \
            else                                                                                                       \
                te_both_row_##dtype(w, i, f, &o, false, w->past[0], w->past[1]);                                       \
        }                                                                                                              \
        return w->n - w->n % 64;                                                                                       \
    }

/* Whether an element is not 0 and below 2^-125. */
TE_INLINE bool te_any_tiny_bf16(const te_two_ways *w)
{
    uint32_t any = 0;
    for (int i = 0; i < w->rows; i++)
        for (int64_t j = 0; j < w->n; j++)
            any |= (((const uint16_t *)w->x)[i * w->stride + j] & 0x7fffu) - 1u < 0xffu;
    return any;
}

TE_INLINE bool te_any_tiny_f32(const te_two_ways *w)
{
    uint32_t any = 0;
    for (int i = 0; i < w->rows; i++)
        for (int64_t j = 0; j < w->n; j++)
            any |= (te_f32_bits(((const float *)w->x)[i * w->stride + j]) & 0x7fffffffu) - 1u < 0xffffffu;
    return any;
}

static void te_each_way_bf16(uint8_t *to_along, uint8_t *to_down, const uint16_t *x, const float *along, bool two,
                             const float *down, te_wide_form f)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    __m512 m[4];
    m[0] = m[1] = _mm512_set1_ps(along[0]);
    m[2] = m[3] = _mm512_set1_ps(along[two]);
    te_codes_64_bf16(to_along, x, m, f, false);
    for (int k = 0; k < 2; k++) {
        __m512 low = _mm512_loadu_ps(down + 32 * k), high = _mm512_loadu_ps(down + 32 * k + 16);
        m[2 * k] = _mm512_permutex2var_ps(low, evens, high);
        m[2 * k + 1] = _mm512_permutex2var_ps(low, odds, high);
    }
    te_codes_64_bf16(to_down, x, m, f, false);
}

static void te_each_way_f32(uint8_t *to_along, uint8_t *to_down, const float *x, const float *along, bool two,
                            const float *down, te_wide_form f)
{
    __m512 m[4];
    m[0] = m[1] = _mm512_set1_ps(along[0]);
    m[2] = m[3] = _mm512_set1_ps(along[two]);
    te_codes_64_f32(to_along, x, m, f, false);
    for (int k = 0; k < 4; k++) m[k] = _mm512_loadu_ps(down + 16 * k);
    te_codes_64_f32(to_down, x, m, f, false);
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
