/* quantize_products.h - codes of bfloat16 under one factor of any kind, for quantize_encode.h.
 *
 * A bfloat16 has 128 mantissas. What each times the factor has beyond it, rounded to the format, is a byte of a
 * table, and the code of an element whose code is a normal number is that byte more than the element's own exponent
 * and first places. Sizes are compared as they stand: with the first one that gives a normal code, and with the last
 * one that gives the largest. Any 64 with something smaller that is not 0 goes the general way, and where that is
 * often so all the rest of the row does.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_PRODUCTS_H
#define TE_KERNELS_CPU_QUANTIZE_PRODUCTS_H

#include "quantize_vectors.h"

#if defined(TE_ISA_avx512vbmi)

typedef struct te_products {
    __m512i table[2];
    __m512i least, most; /* sizes */
} te_products;

/* False where the format's range does not lie among normal bfloat16. */
TE_INLINE bool te_products_of(te_products *to, float factor, te_wide_form f)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                  one = _mm512_set1_epi32(1);
    const unsigned places = (unsigned)f.mantissa, dropped = 23 - places;
    const int first = (int)(f.smallest >> 23), top = (int)((f.largest - (f.smallest - (1u << 23))) >> dropped);
    __m512i least = _mm512_set1_epi32(INT32_MAX), most = _mm512_setzero_si512();
    /* in registers: to load what was stored in pieces would wait for all codes on their way */
    __m512i table[2] = {least, least};
#pragma GCC unroll 8
    for (int k = 0; k < 128; k += 16) {
        __m512i mantissa = _mm512_add_epi32(lanes, _mm512_set1_epi32(k));
        __m512i value = _mm512_or_si512(_mm512_set1_epi32(0x3f800000), _mm512_slli_epi32(mantissa, 16));
        __m512i product = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(value), _mm512_set1_ps(factor)));
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(product, dropped), one);
        __m512i raised = _mm512_add_epi32(_mm512_add_epi32(product, odd), _mm512_set1_epi32((1 << (dropped - 1)) - 1));
        __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(raised, dropped), _mm512_set1_epi32((first - 1) << places));
        __m512i own = _mm512_add_epi32(_mm512_set1_epi32(127 << places), _mm512_srli_epi32(mantissa, 7 - places));
        __m512i bytes = _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(_mm512_sub_epi32(code, own)));
        table[k / 64] = _mm512_mask_mov_epi32(table[k / 64], (__mmask16)(0xf << k / 16 % 4 * 4), bytes);
        __m512i lowest = _mm512_sub_epi32(_mm512_set1_epi32(first + 127), _mm512_srli_epi32(product, 23));
        __m512i room = _mm512_sub_epi32(_mm512_set1_epi32(top), code);
        __m512i highest = _mm512_add_epi32(_mm512_set1_epi32(127), _mm512_srai_epi32(room, places));
        least = _mm512_min_epi32(least, _mm512_add_epi32(_mm512_slli_epi32(lowest, 7), mantissa));
        most = _mm512_max_epi32(most, _mm512_add_epi32(_mm512_slli_epi32(highest, 7), mantissa));
    }
    int from = _mm512_reduce_min_epi32(least), last = _mm512_reduce_max_epi32(most);
    *to = (te_products){{table[0], table[1]}, _mm512_set1_epi16((short)from), _mm512_set1_epi16((short)last)};
    return factor >= 0x1p-120f && factor <= 0x1p120f && from >= 0x80 && last < 0x7f80;
}

/* Codes of 64; false, and nothing is of use but the larger *most, where they go the general way. */
TE_INLINE bool te_product_codes(__m512i *codes, const uint16_t *x, const te_products *p, te_wide_form f, __m512i *most)
{
    static const uint8_t evens[64] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
                                      64, 66, 68, 70, 72, 74, 76, 78, 80, 82, 84, 86, 88, 90, 92, 94,
                                      96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};
    const __m512i even = _mm512_loadu_si512(evens), odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    const unsigned dropped = 7 - (unsigned)f.mantissa;
    __m512i given[2], size[2], kept[2];
    __mmask32 less[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        te_fetch_ahead(x + 32 * k);
        given[k] = _mm512_loadu_si512(x + 32 * k);
        size[k] = _mm512_and_si512(given[k], _mm512_set1_epi16(0x7fff));
        *most = _mm512_max_epu16(*most, size[k]);
        less[k] = _mm512_cmplt_epu16_mask(size[k], p->least);
        size[k] = _mm512_min_epu16(size[k], p->most);
        kept[k] = _mm512_srli_epi16(size[k], dropped);
    }
    __m512i low = _mm512_permutex2var_epi8(size[0], even, size[1]),
            top = _mm512_permutex2var_epi8(given[0], odd, given[1]);
    __m512i own = _mm512_permutex2var_epi8(kept[0], even, kept[1]);
    __m512i code = _mm512_add_epi8(own, _mm512_permutex2var_epi8(p->table[0], low, p->table[1]));
    if (less[0] | less[1]) {
        if (_mm512_mask_test_epi16_mask(less[0], size[0], size[0]) |
            _mm512_mask_test_epi16_mask(less[1], size[1], size[1]))
            return false;
        code = _mm512_maskz_mov_epi8(~_mm512_kunpackd(less[1], less[0]), code);
    }
    *codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), top, code, 0xca); /* a ? b : c */
    return true;
}

/* The elements done, whole 64s from the first on, and *most raised to their magnitudes. */
TE_INLINE int64_t te_product_row(uint8_t *codes, const uint16_t *x, float factor, int64_t n, bool past,
                                 te_wide_form f, __m512i *most)
{
    enum { SHORT = 512, FEW = 8 };
    const __m512 m = _mm512_set1_ps(factor), all[4] = {m, m, m, m};
    te_products p;
    int64_t i = 0, missed = 0;
    if (n < SHORT || f.sign == 8 || !te_products_of(&p, factor, f)) return 0;
    for (; i + 64 <= n && missed <= FEW + i / SHORT; i += 64) {
        __m512i made;
        if (__builtin_expect(!te_product_codes(&made, x + i, &p, f, most), 0)) {
            made = te_numbers_64_bf16(x + i, all, f, most);
            missed++;
        }
        te_put_codes(codes + i, made, past);
    }
    return i;
}

#define te_product_row_bf16 te_product_row
#else
#define te_product_row_bf16(codes, x, factor, n, past, f, most) 0
#endif

#define te_product_row_f32(codes, x, factor, n, past, f, most) 0

#endif
