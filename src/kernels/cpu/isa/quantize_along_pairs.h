/* quantize_along_pairs.h - factors and codes of a row of E2M1 in one visit, for quantize_vbmi.c: of float32, chunk by
 * chunk as in quantize_along.h, with what quantize_pairs.h makes of 64 elements. Codes of bfloat16 take longer than
 * memory does, and go faster without the wait for factors that every chunk has.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ALONG_PAIRS_H
#define TE_KERNELS_CPU_QUANTIZE_ALONG_PAIRS_H

#include "quantize_along.h"
#include "quantize_pairs.h"

#if defined(TE_ISA_avx512vbmi)

enum { TE_CHUNK_BLOCKS = TE_CHUNK / 16 };

/* Amaxes of sixteen blocks, as bits. */
TE_INLINE __m512i te_take_blocks(const float *x)
{
    __m512i y[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) v[i] = te_size_f32(x + 64 * k + 16 * i);
        y[k] = te_fold_words(v);
    }
    return te_fold_quarters(y);
}

/* False, and nothing is written, where there is a NaN. */
TE_INLINE bool te_chunk_of_pairs(uint8_t *pairs, uint8_t *factors, const float *x, float encode, float times,
                                 const te_four_constants *t, int64_t ahead)
{
    float multipliers[TE_CHUNK_BLOCKS], scaled[TE_CHUNK_BLOCKS]; /* by 4096 */
    __m512i amax[2] = {te_take_blocks(x), te_take_blocks(x + TE_CHUNK / 2)};
    unsigned unsure = 0;
    te_ask_ahead(x, TE_CHUNK * (int)sizeof *x, ahead);
    if (__builtin_expect(te_any_nan(_mm512_max_epu32(amax[0], amax[1])), 0)) return false;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m512 wanted = _mm512_mul_ps(_mm512_castsi512_ps(amax[h]), _mm512_set1_ps(times));
        te_put_e4m3_factors(factors + 16 * h, multipliers + 16 * h, wanted, encode);
        __m512 m = _mm512_loadu_ps(multipliers + 16 * h);
        unsure |= te_scale_multipliers(&m) ? 0 : 0xff; /* all of them, which is rare */
        _mm512_storeu_ps(scaled + 16 * h, m);
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        __m512 m[4];
        te_short_blocks_f32(m, scaled + 4 * k, 16);
        te_fours four = te_fours_f32(x + 64 * k, m, NULL, t);
        _mm256_storeu_si256((__m256i *)(void *)(pairs + 32 * k), te_neighbours_f32(four.codes));
        unsure |= (unsigned)four.unsure << k;
    }
    for (; unsure; unsure &= unsure - 1) {
        int k = __builtin_ctz(unsure);
        te_put_slow_pairs_f32(pairs + 32 * k, x + 64 * k, multipliers + 4 * k, NULL);
    }
    return true;
}

/* The elements done: whole 64s of n, but for what begins with a chunk that has a NaN. The last chunk is made whole by
 * zeros. */
static int64_t at_once_f32_e2m1(uint8_t *pairs, void *stored, const void *data, int64_t n, const te_factor_rule *rule,
                                int64_t block, bool past, int64_t ahead)
{
    const te_four_constants t = te_constants_of_fours(false, false);
    const int64_t all = n - n % 64;
    const float *x = data;
    const float encode = rule->encode, times = encode / 6.0f;
    uint8_t *factors = stored, last_pairs[TE_CHUNK / 2], last_factors[TE_CHUNK_BLOCKS];
    float last[TE_CHUNK];
    int64_t i = 0;
    if (block != 16 || past) return 0;
    for (; i + TE_CHUNK <= all; i += TE_CHUNK)
        if (!te_chunk_of_pairs(pairs + i / 2, factors + i / 16, x + i, encode, times, &t, ahead)) return i;
    if (i == all) return all;
    for (int64_t k = 0; k < TE_CHUNK; k += 16)
        _mm512_storeu_si512(last + k, k < all - i ? _mm512_loadu_si512(x + i + k) : _mm512_setzero_si512());
    if (!te_chunk_of_pairs(last_pairs, last_factors, last, encode, times, &t, 0)) return i;
    memcpy(pairs + i / 2, last_pairs, (size_t)(all - i) / 2);
    memcpy(factors + i / 16, last_factors, (size_t)(all - i) / 16);
    return all;
}
#endif

#endif
