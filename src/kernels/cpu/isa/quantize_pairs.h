/* quantize_pairs.h - E2M1 of 64 elements at once, two to a byte, for quantize_blocks.c.
 *
 * Products are cut off to 4096ths, which fit into 16 bits: sixteenths of the largest number whose upper bits,
 * quarters, are looked up. Codes change at quarters alone, some above one and some at it, so what is cut off does not
 * matter but where nothing else is left: a product may then be such a quarter or a little more. Each of these 64s
 * leaves a bit, and goes the general way later, those of several rows together: one in fifty is like that, and branches
 * that nobody foresees would cost more than they do. The same way go those with a NaN or a huge product, which have
 * only the top bit.
 *
 * By chance, a random byte is so many 256ths of the step, which is that of 1, of 2 or of 4. Here the sum is cut off,
 * and may be wrong only where its last bits below a quarter are all ones and nothing but what was cut off before is
 * missing to the next one.
 *
 * Narrowing leaves codes in an order of its own. Of bfloat16, four of even elements and the four of odd ones that go
 * with them take turns; of float32, four of each vector.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_PAIRS_H
#define TE_KERNELS_CPU_QUANTIZE_PAIRS_H

#include "quantize_encode.h"
#include "quantize_random.h"

#if defined(TE_ISA_avx512vbmi)

/* Codes of 64 in the order of their dtype; unsure: one may be wrong. */
typedef struct te_fours {
    __m512i codes;
    bool    unsure;
} te_fours;

/* Constants of the loops. By chance there are so many that compilers would make them anew in every turn. */
typedef struct te_four_constants {
    __m512i size, upper, sign, by_half, three, one, last;
} te_four_constants;

TE_INLINE te_four_constants te_constants_of_fours(bool halves, bool chance)
{
    const __m512i by_half = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7));
    return (te_four_constants){
        .size = te_kept(halves ? _mm512_set1_epi16(0x7fff) : _mm512_set1_epi32(0x7fffffff), chance),
        .upper = te_kept(_mm512_set1_epi32((int)0xffff0000u), chance),
        .sign = te_kept(_mm512_set1_epi8(8), chance),
        .by_half = te_kept(by_half, chance),
        .three = te_kept(_mm512_set1_epi16(3), chance),
        .one = te_kept(_mm512_set1_epi16(1), chance),
        .last = te_kept(_mm512_set1_epi16((short)0x87ff), chance)};
}

/* Whether one of either is there: in the registers of masks, which are slow to leave. */
TE_INLINE bool te_any_of(__mmask32 a, __mmask32 b) { return !_kortestz_mask32_u8(a, b); }

/* Which of 4096ths are a quarter above which the next code begins, .25, 1.25, 2.5 or 5, or are not numbers. */
TE_INLINE __mmask32 te_on_edges(__m512i parts, __m512i quarters)
{
    static const uint16_t edges[32] = {0x8000, 1024, 1, 1, 1, 5120, 1, 1, 1, 1, 10240, 1, 1, 1, 1, 1, 1, 1, 1, 1, 20480,
                                       1,      1,    1, 1, 1, 1,    1, 1, 1, 1, 1};
    return _mm512_cmpeq_epi16_mask(parts, _mm512_permutexvar_epi16(quarters, _mm512_loadu_si512(edges)));
}

/* From 4096ths of 64 sizes, and signs on top of bytes in the order that packing leaves. */
TE_INLINE te_fours te_fours_of(__m512i first, __m512i second, __m512i signs, const te_four_constants *t)
{
    static const uint8_t by_quarter[64] = {
        0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
        7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
    __m512i quarters[2] = {_mm512_srli_epi16(first, 10), _mm512_srli_epi16(second, 10)};
    __m512i which = _mm512_packus_epi16(quarters[0], quarters[1]);
    __m512i codes = _mm512_permutexvar_epi8(which, _mm512_loadu_si512(by_quarter));
    codes = _mm512_ternarylogic_epi32(_mm512_srli_epi16(signs, 4), t->sign, codes, 0xea); /* a & b | c */
    return (te_fours){codes, te_any_of(te_on_edges(first, quarters[0]), te_on_edges(second, quarters[1]))};
}

/* The same by chance, random bytes as they come. `order` brings those of the first half into words. 256ths are shifted
 * by 3, 4 or 5, and by more where the code is the largest one without them. What is no number stays none. */
TE_INLINE __m512i te_raised(__m512i parts, __m512i random, const te_four_constants *t)
{
    __m512i shift = _mm512_add_epi16(_mm512_srli_epi16(parts, 13), t->three);
    return _mm512_adds_epi16(parts, _mm512_sllv_epi16(random, shift));
}

/* The largest sum, at which additions stop, has no next one. */
TE_INLINE __mmask32 te_below_halves(__m512i sums, const te_four_constants *t)
{
    return _mm512_testn_epi16_mask(_mm512_add_epi16(sums, t->one), t->last);
}

TE_INLINE te_fours te_fours_by_chance(__m512i first, __m512i second, __m512i signs, __m512i random, __m512i order,
                                      const te_four_constants *t)
{
    const __mmask64 low = 0x5555555555555555;
    first = te_raised(first, _mm512_maskz_permutexvar_epi8(low, order, random), t);
    order = _mm512_add_epi8(order, _mm512_set1_epi8(32));
    second = te_raised(second, _mm512_maskz_permutexvar_epi8(low, order, random), t);
    __m512i halves = _mm512_packus_epi16(_mm512_srli_epi16(first, 11), _mm512_srli_epi16(second, 11));
    __m512i codes = _mm512_shuffle_epi8(t->by_half, halves);
    codes = _mm512_ternarylogic_epi32(_mm512_srli_epi16(signs, 4), t->sign, codes, 0xea);
    __mmask32 none = _mm512_movepi16_mask(_mm512_or_si512(first, second));
    return (te_fours){codes, te_any_of(_kor_mask32(none, te_below_halves(first, t)), te_below_halves(second, t))};
}

/* Multipliers of 4096ths; false where one is so large that they do not exist. */
TE_INLINE bool te_scale_multipliers(__m512 *m)
{
    bool good = !_mm512_cmp_ps_mask(*m, _mm512_set1_ps(0x1p100f), _CMP_NLT_UQ);
    *m = _mm512_mul_ps(*m, _mm512_set1_ps(4096));
    return good;
}

/* --- bfloat16: multipliers as for te_codes_64_bf16 ---------------------------------------------------------------- */

TE_INLINE __m512i te_parts_bf16(__m512i given, __m512 even, __m512 odd, const te_four_constants *t)
{
    __m512i size = _mm512_and_si512(given, t->size);
    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(size, 16));
    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(size, t->upper));
    low = _mm512_mul_ps(low, even);
    high = _mm512_mul_ps(high, odd);
    return _mm512_packs_epi32(_mm512_cvttps_epi32(low), _mm512_cvttps_epi32(high));
}

TE_INLINE te_fours te_fours_bf16(const uint16_t *x, const __m512 m[4], const uint8_t *random,
                                const te_four_constants *t)
{
    static const uint8_t tops[64] = {
        1, 5, 9, 13, 3, 7, 11, 15, 65, 69, 73, 77, 67, 71, 75, 79,
        17, 21, 25, 29, 19, 23, 27, 31, 81, 85, 89, 93, 83, 87, 91, 95,
        33, 37, 41, 45, 35, 39, 43, 47, 97, 101, 105, 109, 99, 103, 107, 111,
        49, 53, 57, 61, 51, 55, 59, 63, 113, 117, 121, 125, 115, 119, 123, 127};
    __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32);
    __m512i signs = _mm512_permutex2var_epi8(a, _mm512_loadu_si512(tops), b);
    static const uint8_t words[64] = {
        0, 0, 2, 0, 4, 0, 6, 0, 1, 0, 3, 0, 5, 0, 7, 0,
        8, 0, 10, 0, 12, 0, 14, 0, 9, 0, 11, 0, 13, 0, 15, 0,
        16, 0, 18, 0, 20, 0, 22, 0, 17, 0, 19, 0, 21, 0, 23, 0,
        24, 0, 26, 0, 28, 0, 30, 0, 25, 0, 27, 0, 29, 0, 31, 0};
    __m512i first = te_parts_bf16(a, m[0], m[1], t), second = te_parts_bf16(b, m[2], m[3], t);
    if (!random) return te_fours_of(first, second, signs, t);
    return te_fours_by_chance(first, second, signs, _mm512_loadu_si512(random), _mm512_loadu_si512(words), t);
}

/* Two neighbours to a byte. */
TE_INLINE __m256i te_neighbours_bf16(__m512i codes)
{
    const __m512i lower = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    codes = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(lower, codes));
}

TE_INLINE __m512i te_in_order_bf16(__m512i bytes)
{
    static const uint8_t order[64] = {
        0, 4, 1, 5, 2, 6, 3, 7, 16, 20, 17, 21, 18, 22, 19, 23,
        32, 36, 33, 37, 34, 38, 35, 39, 48, 52, 49, 53, 50, 54, 51, 55,
        8, 12, 9, 13, 10, 14, 11, 15, 24, 28, 25, 29, 26, 30, 27, 31,
        40, 44, 41, 45, 42, 46, 43, 47, 56, 60, 57, 61, 58, 62, 59, 63};
    return _mm512_permutexvar_epi8(_mm512_loadu_si512(order), bytes);
}

/* --- float32 ------------------------------------------------------------------------------------------------------ */

TE_INLINE __m512i te_parts_f32(__m512i first, __m512i second, __m512 m, __m512 n)
{
    __m512 a = _mm512_abs_ps(_mm512_castsi512_ps(first)), b = _mm512_abs_ps(_mm512_castsi512_ps(second));
    return _mm512_packs_epi32(_mm512_cvttps_epi32(_mm512_mul_ps(a, m)), _mm512_cvttps_epi32(_mm512_mul_ps(b, n)));
}

TE_INLINE te_fours te_fours_f32(const float *x, const __m512 m[4], const uint8_t *random,
                                const te_four_constants *t)
{
    __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 16), c = _mm512_loadu_si512(x + 32),
            d = _mm512_loadu_si512(x + 48);
    __m512i signs = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    static const uint8_t words[64] = {
        0, 0, 1, 0, 2, 0, 3, 0, 16, 0, 17, 0, 18, 0, 19, 0,
        4, 0, 5, 0, 6, 0, 7, 0, 20, 0, 21, 0, 22, 0, 23, 0,
        8, 0, 9, 0, 10, 0, 11, 0, 24, 0, 25, 0, 26, 0, 27, 0,
        12, 0, 13, 0, 14, 0, 15, 0, 28, 0, 29, 0, 30, 0, 31, 0};
    __m512i first = te_parts_f32(a, b, m[0], m[1]), second = te_parts_f32(c, d, m[2], m[3]);
    if (!random) return te_fours_of(first, second, signs, t);
    return te_fours_by_chance(first, second, signs, _mm512_loadu_si512(random), _mm512_loadu_si512(words), t);
}

TE_INLINE __m256i te_neighbours_f32(__m512i codes)
{
    static const uint8_t order[64] = {
        0, 2, 16, 18, 32, 34, 48, 50, 4, 6, 20, 22, 36, 38, 52, 54,
        8, 10, 24, 26, 40, 42, 56, 58, 12, 14, 28, 30, 44, 46, 60, 62};
    __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_loadu_si512(order), pairs));
}

TE_INLINE __m512i te_in_order_f32(__m512i bytes)
{
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

/* --- rows and columns --------------------------------------------------------------------------------------------- */

enum { TE_PAIRS_PIECE = 4096 }; /* of 64 times 64: a bit for each */

/* Multipliers of 64 columns as te_fours_ takes them. */
TE_INLINE void te_each_column_f32(__m512 m[4], const float *multipliers)
{
    for (int k = 0; k < 4; k++) m[k] = _mm512_loadu_ps(multipliers + 16 * k);
}

TE_INLINE void te_each_column_bf16(__m512 m[4], const float *multipliers)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int k = 0; k < 2; k++) {
        __m512 low = _mm512_loadu_ps(multipliers + 32 * k), high = _mm512_loadu_ps(multipliers + 32 * k + 16);
        m[2 * k] = _mm512_permutex2var_ps(low, evens, high);
        m[2 * k + 1] = _mm512_permutex2var_ps(low, odds, high);
    }
}

/* Functions go by chance where there are random bytes, one per element. */
#define TE_DEFINE_PAIRS(dtype, type)                                                                                   \
    /* The general way, in blocks of 16 or of 1. */                                                                    \
    TE_INLINE __m512i te_slow_fours_##dtype(const type *x, const float *multipliers, int block, const uint8_t *random) \
    {                                                                                                                  \
        uint8_t codes[64];                                                                                             \
        __m512 m[4];                                                                                                   \
        if (random) {                                                                                                  \
            te_stochastic_##dtype(codes, x, multipliers, block, random, 64);                                           \
        } else {                                                                                                       \
            if (block == 1)                                                                                            \
                te_each_column_##dtype(m, multipliers);                                                                \
            else                                                                                                       \
                te_short_blocks_##dtype(m, multipliers, block);                                                        \
            te_codes_64_##dtype(codes, x, m, te_wide_form_of(TE_E2M1_CODE), false);                                    \
        }                                                                                                              \
        return _mm512_loadu_si512(codes);                                                                              \
    }                                                                                                                  \
    TE_INLINE void te_put_general_pairs_##dtype(uint8_t *pairs, const type *x, const float *multipliers,               \
                                                const uint8_t *random)                                                 \
    {                                                                                                                  \
        __m512i codes = te_slow_fours_##dtype(x, multipliers, 16, random);                                             \
        codes = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));                                                \
        _mm256_storeu_si256((__m256i *)(void *)pairs, _mm512_cvtepi16_epi8(codes));                                    \
    }                                                                                                                  \
    static __attribute__((noinline)) void te_put_slow_pairs_##dtype(uint8_t *pairs, const type *x,                     \
                                                                    const float *multipliers, const uint8_t *random)   \
    {                                                                                                                  \
        te_put_general_pairs_##dtype(pairs, x, multipliers, random);                                                   \
    }                                                                                                                  \
    /* Row r from element `first` on, whole 64s of at most TE_PAIRS_PIECE, in blocks of 16; a bit for each that is for \
     * later. */                                                                                                       \
    TE_INLINE uint64_t te_pairs_row_##dtype(uint8_t *pairs, const te_pair_rows *w, int r, int64_t first, int64_t n,    \
                                            bool chance, bool tied, const te_four_constants *t)                        \
    {                                                                                                                  \
        const type *x = (const type *)w->x + r * w->stride + first;                                                    \
        const float *multipliers = w->multipliers + r * w->step + first / 16;                                          \
        const uint8_t *random = chance ? w->random + r * w->random_stride + first : NULL;                              \
        const type *half = te_behind_##dtype(x, w->rows * w->stride) + n / 2;                                          \
        uint64_t later = 0;                                                                                            \
        float scaled[16];                                                                                              \
        for (int64_t i = 0; i < n; i += 256, multipliers += 16) {                                                      \
            int some = n - i < 256 ? (int)(n - i) / 64 : 4;                                                            \
            __m512 m[4] = {_mm512_maskz_loadu_ps((__mmask16)((1u << 4 * some) - 1), multipliers)};                     \
            bool bad = !te_scale_multipliers(&m[0]);                                                                   \
            uint64_t unsure = 0;                                                                                       \
            _mm512_storeu_ps(scaled, m[0]);                                                                            \
            for (int k = 0; k < some; k++, x += 64, half += 32, pairs += 32) {                                         \
                te_fetch_half(half, 0, 64 * sizeof(type), false);                                                      \
                if (tied) {                                                                                            \
                    te_put_general_pairs_##dtype(pairs, x, multipliers + 4 * k, NULL);                                 \
                    continue;                                                                                          \
                }                                                                                                      \
                te_short_blocks_##dtype(m, scaled + 4 * k, 16);                                                        \
                te_fours four = te_fours_##dtype(x, m, random, t);                                                     \
                if (chance) random += 64;                                                                              \
                _mm256_storeu_si256((__m256i *)(void *)pairs, te_neighbours_##dtype(four.codes));                      \
                unsure |= (uint64_t)(four.unsure | bad) << k;                                                          \
            }                                                                                                          \
            later |= unsure << i / 64;                                                                                 \
        }                                                                                                              \
        return later;                                                                                                  \
    }                                                                                                                  \
    TE_INLINE void te_pairs_piece_##dtype(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *w, int64_t first,  \
                                          int64_t n, bool chance, bool tied)                                           \
    {                                                                                                                  \
        const te_four_constants t = te_constants_of_fours(sizeof(type) == 2, chance);                                  \
        uint64_t later[TE_GROUP];                                                                                      \
        for (int r = 0; r < w->rows; r++)                                                                              \
            later[r] = te_pairs_row_##dtype(pairs + r * pairs_stride + first / 2, w, r, first, n, chance, tied, &t);   \
        for (int r = 0; r < w->rows; r++)                                                                              \
            for (; later[r]; later[r] &= later[r] - 1) {                                                               \
                int64_t j = first + 64 * __builtin_ctzll(later[r]);                                                    \
                const type *x = (const type *)w->x + r * w->stride + j;                                                \
                const float *multipliers = w->multipliers + r * w->step + j / 16;                                      \
                const uint8_t *random = chance ? w->random + r * w->random_stride + j : NULL;                          \
                te_put_slow_pairs_##dtype(pairs + r * pairs_stride + j / 2, x, multipliers, random);                   \
            }                                                                                                          \
    }                                                                                                                  \
    static int64_t pairs_along_##dtype(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *w, int64_t n)         \
    {                                                                                                                  \
        int64_t whole = n - n % 64;                                                                                    \
        for (int64_t i = 0; i < whole; i += TE_PAIRS_PIECE) {                                                          \
            int64_t piece = whole - i < TE_PAIRS_PIECE ? whole - i : TE_PAIRS_PIECE;                                   \
            if (w->random)                                                                                             \
                te_pairs_piece_##dtype(pairs, pairs_stride, w, i, piece, true, false);                                 \
            else if (sizeof(type) == 2 && w->tied)                                                                     \
                te_pairs_piece_##dtype(pairs, pairs_stride, w, i, piece, false, true);                                 \
            else                                                                                                       \
                te_pairs_piece_##dtype(pairs, pairs_stride, w, i, piece, false, false);                                \
        }                                                                                                              \
        return whole;                                                                                                  \
    }                                                                                                                  \
    /* Of rows r and r + 1, the second of which may be missing, 64 columns. */                                         \
    TE_INLINE __m512i te_two_rows_##dtype(const te_pair_rows *w, int r, int64_t j, const __m512 m[4], bool *unsure,    \
                                          bool chance, const te_four_constants *t)                                     \
    {                                                                                                                  \
        const type *x = (const type *)w->x + r * w->stride + j;                                                        \
        const uint8_t *random = chance ? w->random + r * w->random_stride + j : NULL;                                  \
        te_fours even = te_fours_##dtype(x, m, random, t), odd = {_mm512_setzero_si512(), false};                      \
        if (r + 1 < w->rows) odd = te_fours_##dtype(x + w->stride, m, chance ? random + w->random_stride : NULL, t);   \
        *unsure = even.unsure | odd.unsure;                                                                            \
        return te_in_order_##dtype(_mm512_or_si512(even.codes, _mm512_slli_epi16(odd.codes, 4)));                      \
    }                                                                                                                  \
    TE_INLINE __m512i te_slow_rows_##dtype(const te_pair_rows *w, int r, int64_t j, bool chance)                       \
    {                                                                                                                  \
        const type *x = (const type *)w->x + r * w->stride + j;                                                        \
        const uint8_t *random = chance ? w->random + r * w->random_stride + j : NULL;                                  \
        __m512i both = te_slow_fours_##dtype(x, w->multipliers + j, 1, random);                                        \
        if (r + 1 == w->rows) return both;                                                                             \
        if (chance) random += w->random_stride;                                                                        \
        __m512i odd = te_slow_fours_##dtype(x + w->stride, w->multipliers + j, 1, random);                             \
        return _mm512_or_si512(both, _mm512_slli_epi16(odd, 4));                                                       \
    }                                                                                                                  \
    TE_INLINE void te_pair_columns_##dtype(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *w, int64_t first, \
                                           int64_t n, bool chance, bool tied)                                          \
    {                                                                                                                  \
        const te_four_constants t = te_constants_of_fours(sizeof(type) == 2, chance);                                  \
        uint64_t later[TE_GROUP / 2] = {0};                                                                            \
        for (int64_t j = first; j < first + n; j += 64) {                                                              \
            for (int r = 0; tied && r < w->rows; r += 2)                                                               \
                _mm512_storeu_si512(pairs + r / 2 * pairs_stride + j, te_slow_rows_##dtype(w, r, j, false));           \
            if (tied) continue;                                                                                        \
            __m512 m[4];                                                                                               \
            bool good = true, unsure;                                                                                  \
            te_each_column_##dtype(m, w->multipliers + j);                                                             \
            for (int k = 0; k < 4; k++) good &= te_scale_multipliers(&m[k]);                                           \
            for (int r = 0; r < w->rows; r += 2) {                                                                     \
                __m512i two = te_two_rows_##dtype(w, r, j, m, &unsure, chance, &t);                                    \
                _mm512_storeu_si512(pairs + r / 2 * pairs_stride + j, two);                                            \
                later[r / 2] |= (uint64_t)(unsure | !good) << (j - first) / 64;                                        \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < w->rows; r += 2)                                                                           \
            for (; later[r / 2]; later[r / 2] &= later[r / 2] - 1) {                                                   \
                int64_t j = first + 64 * __builtin_ctzll(later[r / 2]);                                                \
                _mm512_storeu_si512(pairs + r / 2 * pairs_stride + j, te_slow_rows_##dtype(w, r, j, chance));          \
            }                                                                                                          \
    }                                                                                                                  \
    static int64_t pairs_down_##dtype(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *w, int64_t n)          \
    {                                                                                                                  \
        int64_t whole = n - n % 64;                                                                                    \
        for (int64_t i = 0; i < whole; i += TE_PAIRS_PIECE) {                                                          \
            int64_t piece = whole - i < TE_PAIRS_PIECE ? whole - i : TE_PAIRS_PIECE;                                   \
            if (w->random)                                                                                             \
                te_pair_columns_##dtype(pairs, pairs_stride, w, i, piece, true, false);                                \
            else if (sizeof(type) == 2 && w->tied)                                                                     \
                te_pair_columns_##dtype(pairs, pairs_stride, w, i, piece, false, true);                                \
            else                                                                                                       \
                te_pair_columns_##dtype(pairs, pairs_stride, w, i, piece, false, false);                               \
        }                                                                                                              \
        return whole;                                                                                                  \
    }

TE_DEFINE_PAIRS(f32, float)
TE_DEFINE_PAIRS(bf16, uint16_t)
#else
#define pairs_along_f32  NULL
#define pairs_along_bf16 NULL
#define pairs_down_f32   NULL
#define pairs_down_bf16  NULL
#endif

#define pairs_along_f16 NULL
#define pairs_down_f16  NULL

#endif
