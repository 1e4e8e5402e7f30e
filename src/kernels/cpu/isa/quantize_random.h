/* quantize_random.h - stochastic rounding of many elements at once, and its random bytes, for quantize_blocks.c.
 *
 * Philox goes on four times eight counters side by side: a word stands in the low half of 64 bits, where multiplying
 * low halves wants it, and what is in the high half is in nobody's way. te_philox and te_f32_to_e2m1_stochastic
 * give the same bytes.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_RANDOM_H
#define TE_KERNELS_CPU_QUANTIZE_RANDOM_H

#include "kernels/philox.h"
#include "quantize_vectors.h"

#include <string.h>

#if defined(TE_ISA_avx512)

typedef struct te_words8 {
    __m512i word[4]; /* low halves */
} te_words8;

/* Keys of the rounds, which are the same for all counters. */
typedef struct te_philox_keys {
    __m512i first[10], second[10];
} te_philox_keys;

TE_INLINE void te_philox_keys_of(te_philox_keys *keys, uint64_t seed)
{
    __m512i first = _mm512_set1_epi32((int)(uint32_t)seed), second = _mm512_set1_epi32((int)(uint32_t)(seed >> 32));
    for (int round = 0; round < 10; round++) {
        keys->first[round] = first;
        keys->second[round] = second;
        first = _mm512_add_epi32(first, _mm512_set1_epi32((int)0x9e3779b9));
        second = _mm512_add_epi32(second, _mm512_set1_epi32((int)0xbb67ae85));
    }
}

/* Of four times eight counters, relative to rng.offset: each round waits for the one before, and there is time for so
 * many. */
TE_INLINE void te_philox32(te_words8 w[4], te_rng rng, const te_philox_keys *keys, const __m512i counters[4])
{
    const __m512i a = _mm512_set1_epi64(0xd2511f53), b = _mm512_set1_epi64(0xcd9e8d57);
    __m512i c[4][4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        c[k][0] = _mm512_add_epi64(counters[k], _mm512_set1_epi64((int64_t)rng.offset));
        c[k][1] = _mm512_srli_epi64(c[k][0], 32);
        c[k][2] = _mm512_set1_epi64((int64_t)rng.stream);
        c[k][3] = _mm512_srli_epi64(c[k][2], 32);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m512i high = _mm512_mul_epu32(a, c[k][0]), low = _mm512_mul_epu32(b, c[k][2]);
            /* xor */
            c[k][0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(low, 32), c[k][1], keys->first[round], 0x96);
            c[k][2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(high, 32), c[k][3], keys->second[round], 0x96);
            c[k][1] = low;
            c[k][3] = high;
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) w[k] = (te_words8){{c[k][0], c[k][1], c[k][2], c[k][3]}};
}

/* The two words of every counter side by side. */
TE_INLINE __m512i te_join(__m512i first, __m512i second)
{
    return _mm512_mask_blend_epi32(0xaaaa, first, _mm512_slli_epi64(second, 32));
}

/* Sixteen bytes of each of n counters; the number of counters done. */
TE_INLINE int64_t te_random_along(uint8_t *bytes, te_rng rng, uint64_t first, int64_t n)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* interleaving puts them right */
    int64_t i = 0;
    te_philox_keys keys;
    te_philox_keys_of(&keys, rng.seed);
    uint8_t last[32 * 16];
    for (; i < n; i += 32, bytes += sizeof last) {
        te_words8 w[4];
        uint8_t *to = i + 32 <= n ? bytes : last;
        __m512i from[4] = {_mm512_add_epi64(order, _mm512_set1_epi64((int64_t)first + i))};
#pragma GCC unroll 3
        for (int k = 1; k < 4; k++) from[k] = _mm512_add_epi64(from[k - 1], _mm512_set1_epi64(8));
        te_philox32(w, rng, &keys, from);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m512i low = te_join(w[k].word[0], w[k].word[1]), high = te_join(w[k].word[2], w[k].word[3]);
            _mm512_storeu_si512(to + 128 * k, _mm512_unpacklo_epi64(low, high));
            _mm512_storeu_si512(to + 128 * k + 64, _mm512_unpackhi_epi64(low, high));
        }
        if (to == last) memcpy(bytes, last, (size_t)(n - i) * 16);
    }
    return n;
}

/* The four bytes of each of 32 words, those at the same place to one row. */
TE_INLINE void te_put_bytes_down(uint8_t *to, int64_t width, __m512i low, __m512i high)
{
    const __m512i pick = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    low = _mm512_shuffle_epi8(low, pick);
    high = _mm512_shuffle_epi8(high, pick);
    __m512i first = _mm512_permutex2var_epi32(low, order, high);
    __m512i second = _mm512_permutex2var_epi32(low, _mm512_add_epi32(order, _mm512_set1_epi32(2)), high);
    _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(first));
    _mm256_storeu_si256((__m256i *)(to + width), _mm512_extracti64x4_epi64(first, 1));
    _mm256_storeu_si256((__m256i *)(to + 2 * width), _mm512_castsi512_si256(second));
    _mm256_storeu_si256((__m256i *)(to + 3 * width), _mm512_extracti64x4_epi64(second, 1));
}

/* The same for counters `step` apart, byte k of counter j to bytes[k * width + j]. */
TE_INLINE int64_t te_random_down(uint8_t *bytes, int64_t width, te_rng rng, uint64_t first, uint64_t step, int64_t n)
{
    const __m512i evens = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), steps = _mm512_set1_epi64((int64_t)step);
    const __m512i lanes = _mm512_mullo_epi64(evens, steps);
    int64_t i = 0;
    te_philox_keys keys;
    te_philox_keys_of(&keys, rng.seed);
    uint8_t last[16][32];
    for (; i < n; i += 32) {
        te_words8 w[4];
        bool whole = i + 32 <= n;
        uint8_t *to = whole ? bytes + i : last[0];
        int64_t apart = whole ? width : (int64_t)sizeof *last;
        __m512i from[4] = {_mm512_add_epi64(_mm512_set1_epi64((int64_t)(first + step * (uint64_t)i)), lanes)};
        from[1] = _mm512_add_epi64(from[0], steps);
        from[2] = _mm512_add_epi64(from[0], _mm512_slli_epi64(steps, 4));
        from[3] = _mm512_add_epi64(from[2], steps);
        te_philox32(w, rng, &keys, from);
#pragma GCC unroll 4
        for (int word = 0; word < 4; word++) {
            __m512i low = te_join(w[0].word[word], w[1].word[word]), high = te_join(w[2].word[word], w[3].word[word]);
            te_put_bytes_down(to + 4 * word * apart, apart, low, high);
        }
        for (int k = 0; k < 16 && !whole; k++) memcpy(bytes + k * width + i, last[k], (size_t)(n - i));
    }
    return n;
}

/* Codes of 16 products. The unit is a 256th of the step at the size, which is that of 1, of 2 or of 4; sizes plus
 * random units count steps when cut off. What is too large for an integer becomes one that is larger than all. */
TE_INLINE __m512i te_stochastic_16(__m512 x, const uint8_t *random)
{
    __m512i bits = _mm512_castps_si512(x), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i least = _mm512_set1_epi32(0x3f800000);
    __m512i exponent = _mm512_and_si512(size, _mm512_set1_epi32(0x7f800000));
    exponent = _mm512_min_epi32(_mm512_max_epi32(exponent, least), _mm512_set1_epi32(0x40800000));
    __m512 unit = _mm512_castsi512_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(9 << 23)));
    __m512 steps = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0x7f800000), exponent)); /* 2 / power */
    __m512 units = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)random)));
    __m512 raised = _mm512_add_ps(_mm512_castsi512_ps(size), _mm512_mul_ps(units, unit)); /* an exact product */
    __m512i code = _mm512_cvttps_epi32(_mm512_mul_ps(raised, steps));
    code = _mm512_add_epi32(code, _mm512_srli_epi32(_mm512_sub_epi32(exponent, least), 22));
    code = _mm512_min_epu32(code, _mm512_set1_epi32(7));
    __mmask16 numbers = _mm512_cmple_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    __m512i sign = _mm512_maskz_srli_epi32(numbers, bits, 28);
    return _mm512_ternarylogic_epi32(sign, _mm512_set1_epi32(8), code, 0xea); /* a & b | c */
}

/* n elements but for the last of fewer than 16. Blocks of one element, of multiples of 16, or one of n. */
#define TE_DEFINE_STOCHASTIC(dtype, type, LOAD)                                                                        \
    TE_INLINE int64_t te_stochastic_##dtype(uint8_t *codes, const type *x, const float *multipliers, int64_t block,    \
                                            const uint8_t *random, int64_t n)                                          \
    {                                                                                                                  \
        if (block % 16 != 0 && block != 1 && block < n) return 0;                                                      \
        for (int64_t i = 0, end = block; i + 16 <= n; i += 16) {                                                       \
            if (block > 1 && i == end) end += block, multipliers++;                                                    \
            __m512 m = block == 1 ? _mm512_loadu_ps(multipliers + i) : _mm512_set1_ps(*multipliers);                   \
            __m512i code = te_stochastic_16(_mm512_mul_ps(LOAD(x + i), m), random + i);                                \
            _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(code));                                      \
        }                                                                                                              \
        return n - n % 16;                                                                                             \
    }

TE_INLINE __m512 te_load_bf16(const uint16_t *x)
{
    __m256i halves = _mm256_loadu_si256((const __m256i *)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

TE_DEFINE_STOCHASTIC(f32, float, _mm512_loadu_ps)
TE_DEFINE_STOCHASTIC(bf16, uint16_t, te_load_bf16)
#else
#define te_random_along(bytes, rng, first, n)             0
#define te_random_down(bytes, width, rng, first, step, n) 0
#define te_stochastic_f32(codes, x, m, block, random, n)  0
#define te_stochastic_bf16(codes, x, m, block, random, n) 0
#endif

#define te_stochastic_f16(codes, x, m, block, random, n) 0

#endif
