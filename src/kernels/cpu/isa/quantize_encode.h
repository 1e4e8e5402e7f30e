/* quantize_encode.h - codes of rows and of columns by vector instructions, for quantize_blocks.c.
 *
 * Functions take the five constants of a format last (TE_E4M3_CODE …) and say how many elements they have done; the
 * plain loops do the others, and all where there is no vector code.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ENCODE_H
#define TE_KERNELS_CPU_QUANTIZE_ENCODE_H

#include "quantize_powers.h"
#include "quantize_products.h"
#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

/* --- one factor for all: the largest magnitude along with the codes ----------------------------------------------- */

/* Codes of a multiple of 64 elements of n, which is returned, and *amax; 0 where there is a NaN. */
#define TE_DEFINE_WHOLE(dtype, type, LARGEST, INFINITE, AMAX)                                                          \
    TE_INLINE int64_t te_codes_whole_##dtype(uint8_t *codes, const type *x, float multiplier, int64_t n, float *amax,  \
                                             bool past, int mantissa, uint32_t smallest, uint32_t largest, int nan,    \
                                             int sign)                                                                 \
    {                                                                                                                  \
        te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);                                      \
        __m512 one = _mm512_set1_ps(multiplier), m[4] = {one, one, one, one};                                          \
        __m512i most = _mm512_setzero_si512();                                                                         \
        int64_t i = te_product_row_##dtype(codes, x, multiplier, n, past, f, &most);                                   \
        for (; i + 64 <= n; i += 64) te_put_codes(codes + i, te_numbers_64_##dtype(x + i, m, f, &most), past);         \
        uint32_t top = LARGEST(most);                                                                                  \
        *amax = AMAX(top);                                                                                             \
        return top > INFINITE ? 0 : i;                                                                                 \
    }

/* The largest of 32 halves. */
TE_INLINE uint32_t te_largest_half(__m512i sizes)
{
    __m512i odd = _mm512_srli_epi32(sizes, 16), even = _mm512_and_si512(sizes, _mm512_set1_epi32(0xffff));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(odd, even));
}

#define TE_AMAX_BF16(top) te_bf16_to_f32((uint16_t)(top))
TE_DEFINE_WHOLE(f32, float, _mm512_reduce_max_epu32, 0x7f800000, te_f32_from_bits)
TE_DEFINE_WHOLE(bf16, uint16_t, te_largest_half, 0x7f80, TE_AMAX_BF16)

/* --- factors along the row ---------------------------------------------------------------------------------------- */

/* Multipliers of 64 elements from blocks of 16 or 32 on. */
TE_INLINE void te_short_blocks_f32(__m512 m[4], const float *multipliers, int64_t block)
{
    for (int k = 0; k < 4; k++) m[k] = _mm512_set1_ps(multipliers[16 * k / block]);
}

TE_INLINE void te_short_blocks_bf16(__m512 m[4], const float *multipliers, int64_t block)
{
    for (int k = 0; k < 2; k++) {
        __m512 first = _mm512_set1_ps(multipliers[32 * k / block]);
        if (block == 16) first = _mm512_mask_blend_ps(0xff00, first, _mm512_set1_ps(multipliers[2 * k + 1]));
        m[2 * k] = m[2 * k + 1] = first;
    }
}

/* Blocks of 16 or 32, of multiples of 64, or one of n. */
#define TE_DEFINE_ALONG(dtype, type)                                                                                   \
    TE_INLINE int64_t te_general_along_##dtype(uint8_t *codes, const type *x, const float *multipliers, int64_t n,     \
                                               int64_t block, te_wide_form f, bool past)                               \
    {                                                                                                                  \
        int64_t whole = n - n % 64, i = 0;                                                                             \
        __m512 m[4];                                                                                                   \
        if (block == 16 || block == 32) {                                                                              \
            for (; i < whole; i += 64, multipliers += 64 / block) {                                                    \
                te_short_blocks_##dtype(m, multipliers, block);                                                        \
                te_codes_64_##dtype(codes + i, x + i, m, f, past);                                                     \
            }                                                                                                          \
            return whole;                                                                                              \
        }                                                                                                              \
        if (block % 64 != 0 && block < n) return 0;                                                                    \
        for (; i < whole; multipliers++) {                                                                             \
            m[0] = m[1] = m[2] = m[3] = _mm512_set1_ps(*multipliers);                                                  \
            for (int64_t end = whole - i < block ? whole : i + block; i < end; i += 64)                                \
                te_codes_64_##dtype(codes + i, x + i, m, f, past);                                                     \
        }                                                                                                              \
        return whole;                                                                                                  \
    }

TE_DEFINE_ALONG(f32, float)
TE_DEFINE_ALONG(bf16, uint16_t)

TE_INLINE bool te_is_power(float x) { return (te_f32_bits(x) & 0x7fffffu) == 0 && te_f32_bits(x) >= 0x800000u; }

#if defined(TE_ISA_avx512vbmi)
/* Whether blocks are of a length that te_powers_along takes, and the first factor speaks for it. */
TE_INLINE bool te_goes_by_powers(const float *multipliers, int64_t n, int64_t block, int sign)
{
    return sign != 8 && (block % 64 == 0 || block >= n) && n >= 64 && te_is_power(*multipliers);
}
#endif

TE_INLINE int64_t te_codes_along_f32(uint8_t *codes, const float *x, const float *multipliers, int64_t n, int64_t block,
                                     bool past, int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);
#if defined(TE_ISA_avx512vbmi)
    if (te_goes_by_powers(multipliers, n, block, sign)) {
        te_powers_along_f32(codes, x, multipliers, n, block, f, past);
        return n - n % 64;
    }
#endif
    return te_general_along_f32(codes, x, multipliers, n, block, f, past);
}

/* Of a factor that is a power of two. */
TE_INLINE te_shift te_shift_by(float power, uint32_t smallest)
{
    return te_shift_of(_mm512_set1_epi16((short)(te_f32_bits(power) >> 16)), smallest);
}

/* Of sixteen factors: whether all are normal powers of two, and then their shifts. */
TE_INLINE bool te_shifts_of(const float *factors, uint16_t offsets[16], uint16_t smalls[16], uint32_t smallest)
{
    __m512i bits = _mm512_loadu_si512(factors);
    if (_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffff))) return false;
    if (_mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x800000))) return false;
    te_shift shift = te_shift_of(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16))), smallest);
    _mm256_storeu_si256((__m256i *)offsets, _mm512_castsi512_si256(shift.offset));
    _mm256_storeu_si256((__m256i *)smalls, _mm512_castsi512_si256(shift.small));
    return true;
}

/* Sixteen blocks of 32 at a time, as far as they are whole, whose factors are powers of two; the elements done. */
TE_INLINE int64_t te_short_powers(uint8_t *codes, const uint16_t *x, const float *multipliers,
                                  int64_t n, te_wide_form f, bool past)
{
    uint16_t offsets[16], smalls[16];
    int64_t j = 0;
    for (; j + 512 <= n && te_shifts_of(multipliers + j / 32, offsets, smalls, f.smallest); j += 512)
        for (int b = 0; b < 16; b += 2) {
            te_shift first = {_mm512_set1_epi16((short)offsets[b]), _mm512_set1_epi16((short)smalls[b])};
            te_shift second = {_mm512_set1_epi16((short)offsets[b + 1]), _mm512_set1_epi16((short)smalls[b + 1])};
            uint8_t *to = codes + j + 32 * b;
            const uint16_t *from = x + j + 32 * b;
            __m512 m[4];
            if (te_codes_shifted(to, from, first, second, f, past)) continue;
            te_short_blocks_bf16(m, multipliers + j / 32 + b, 32);
            te_codes_64_bf16(to, from, m, f, past);
        }
    return j;
}

#if !defined(TE_ISA_avx512vbmi)
/* Blocks of multiples of 64, as long as their factors are powers of two; the elements done, whole blocks or all. */
TE_INLINE int64_t te_long_powers(uint8_t *codes, const uint16_t *x, const float *multipliers, int64_t n, int64_t block,
                                 te_wide_form f, bool past)
{
    int64_t whole = n - n % 64, i = 0;
    for (; i < whole && te_is_power(*multipliers); multipliers++) {
        te_shift shift = te_shift_by(*multipliers, f.smallest);
        __m512 one = _mm512_set1_ps(*multipliers), m[4] = {one, one, one, one};
        for (int64_t end = whole - i < block ? whole : i + block; i < end; i += 64)
            if (!te_codes_shifted(codes + i, x + i, shift, shift, f, past))
                te_codes_64_bf16(codes + i, x + i, m, f, past);
    }
    return i;
}
#endif

TE_INLINE int64_t te_codes_along_bf16(uint8_t *codes, const uint16_t *x, const float *multipliers, int64_t n,
                                      int64_t block, bool past, int mantissa, uint32_t smallest, uint32_t largest,
                                      int nan, int sign)
{
    te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);
    int64_t done = 0;
#if defined(TE_ISA_avx512vbmi)
    if (te_goes_by_powers(multipliers, n, block, sign)) {
        te_powers_along_bf16(codes, x, multipliers, n, block, f, past);
        return n - n % 64;
    }
#else
    if (block % 64 == 0 || block >= n) done = te_long_powers(codes, x, multipliers, n, block, f, past);
#endif
    if (block == 32) done = te_short_powers(codes, x, multipliers, n, f, past);
    return done + te_general_along_bf16(codes + done, x + done, multipliers + done / block, n - done, block, f, past);
}

/* --- a factor for each column: all rows of 64 columns before the next --------------------------------------------- */

TE_INLINE int64_t te_codes_down_bf16(uint8_t *codes, int64_t codes_stride, const uint16_t *x, int64_t stride, int rows,
                                     const float *multipliers, int64_t n, int mantissa, uint32_t smallest,
                                     uint32_t largest, int nan, int sign)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);
    const te_rounding c = te_rounding_of(f);
    for (int64_t j = 0; j + 64 <= n; j += 64) {
        __m512 m[4];
        te_shift shift[2];
        __m512i bits = _mm512_setzero_si512();
        for (int k = 0; k < 2; k++) {
            const float *of = multipliers + j + 32 * k;
            __m512 low = _mm512_loadu_ps(of), high = _mm512_loadu_ps(of + 16);
            m[2 * k] = _mm512_permutex2var_ps(low, evens, high);
            m[2 * k + 1] = _mm512_permutex2var_ps(low, odds, high);
            __m512i e = _mm512_castps_si512(m[2 * k]), o = _mm512_castps_si512(m[2 * k + 1]);
            shift[k] = te_shift_of(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(e, 16), o), smallest);
            bits = _mm512_or_si512(bits, _mm512_or_si512(e, o));
        }
        bool power = !_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffff)), bounded;
        const te_bounds bounds = te_bounds_down(&bounded, multipliers + j, f);
        for (int i = 0; i < rows; i++) {
            uint8_t *to = codes + i * codes_stride + j;
            const uint16_t *from = x + i * stride + j;
            if (bounded && te_codes_bounded_bf16(to, from, bounds, &c, false)) continue;
            if (!(power && te_codes_shifted(to, from, shift[0], shift[1], f, false)))
                te_codes_64_bf16(to, from, m, f, false);
        }
    }
    return n - n % 64;
}

TE_INLINE int64_t te_codes_down_f32(uint8_t *codes, int64_t codes_stride, const float *x, int64_t stride, int rows,
                                    const float *multipliers, int64_t n, int mantissa, uint32_t smallest,
                                    uint32_t largest, int nan, int sign)
{
    te_wide_form f = te_wide_form_of(mantissa, smallest, largest, nan, sign);
    const te_rounding c = te_rounding_of(f);
    for (int64_t j = 0; j + 64 <= n; j += 64) {
        __m512 m[4];
        for (int k = 0; k < 4; k++) m[k] = _mm512_loadu_ps(multipliers + j + 16 * k);
        bool bounded;
        const te_bounds bounds = te_bounds_down(&bounded, multipliers + j, f);
        for (int64_t i = 0; i < rows; i++) {
            uint8_t *to = codes + i * codes_stride + j;
            const float *from = x + i * stride + j;
            if (!(bounded && te_codes_bounded_f32(to, from, bounds, &c, false))) te_codes_64_f32(to, from, m, f, false);
        }
    }
    return n - n % 64;
}
#else
#define te_codes_whole_bf16(codes, x, multiplier, n, amax, past, ...)   0
#define te_codes_whole_f32(codes, x, multiplier, n, amax, past, ...)    0
#define te_codes_along_bf16(codes, x, multipliers, n, block, past, ...) 0
#define te_codes_along_f32(codes, x, multipliers, n, block, past, ...)  0
#define te_codes_down_bf16(codes, codes_stride, x, stride, rows, multipliers, n, ...) 0
#define te_codes_down_f32(codes, codes_stride, x, stride, rows, multipliers, n, ...)  0
#endif

/* A source without vector code of its own. */
#define te_codes_whole_f16(codes, x, multiplier, n, amax, past, ...)   0
#define te_codes_along_f16(codes, x, multipliers, n, block, past, ...) 0
#define te_codes_down_f16(codes, codes_stride, x, stride, rows, multipliers, n, ...) 0

#endif
