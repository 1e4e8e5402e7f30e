/* philox_vectors.h - Philox of many counters at once.
 *
 * It goes on four vectors of counters side by side, eight in each or four: a word stands in the low half of 64 bits,
 * where multiplying low halves wants it, and what is in the high half is in nobody's way. te_philox gives the same
 * bytes.
 */
#ifndef TE_KERNELS_CPU_PHILOX_VECTORS_H
#define TE_KERNELS_CPU_PHILOX_VECTORS_H

#include "kernels/philox.h"

#include <string.h>

#if defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
#include <immintrin.h>

#define TE_VECTORS static inline __attribute__((always_inline))

#if defined(TE_ISA_avx512)
typedef __m512i te_counters;
#define TE_V(name)        _mm512_##name
#define TE_XOR3(a, b, c)  _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define TE_PUT(to, value) _mm512_storeu_si512(to, value)
#define TE_JOIN(a, b)     _mm512_mask_blend_epi32(0xaaaa, a, b)
#define TE_SPREAD(x)      _mm512_set1_epi64((int64_t)(x))
#else
typedef __m256i te_counters;
#define TE_V(name)        _mm256_##name
#define TE_XOR3(a, b, c)  _mm256_xor_si256(_mm256_xor_si256(a, b), c)
#define TE_PUT(to, value) _mm256_storeu_si256((__m256i *)(void *)(to), value)
#define TE_JOIN(a, b)     _mm256_blend_epi32(a, b, 0xaa)
#define TE_SPREAD(x)      _mm256_set1_epi64x((int64_t)(x))
#endif

enum { TE_COUNTERS = sizeof(te_counters) / 8, TE_COUNTERS_ONCE = 4 * TE_COUNTERS };

typedef struct te_words {
    te_counters word[4]; /* low halves */
} te_words;

/* Keys of the rounds, which are the same for all counters. */
typedef struct te_philox_keys {
    te_counters first[10], second[10];
} te_philox_keys;

TE_VECTORS void te_philox_keys_of(te_philox_keys *keys, uint64_t seed)
{
    te_counters first = TE_V(set1_epi32)((int)(uint32_t)seed), second = TE_V(set1_epi32)((int)(uint32_t)(seed >> 32));
    for (int round = 0; round < 10; round++) {
        keys->first[round] = first;
        keys->second[round] = second;
        first = TE_V(add_epi32)(first, TE_V(set1_epi32)((int)0x9e3779b9));
        second = TE_V(add_epi32)(second, TE_V(set1_epi32)((int)0xbb67ae85));
    }
}

/* Of four vectors of counters, relative to rng.offset: each round waits for the one before, and there is time for so
 * many. */
TE_VECTORS void te_philox_all(te_words w[4], te_rng rng, const te_philox_keys *keys, const te_counters counters[4])
{
    const te_counters a = TE_SPREAD(0xd2511f53), b = TE_SPREAD(0xcd9e8d57);
    te_counters c[4][4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        c[k][0] = TE_V(add_epi64)(counters[k], TE_SPREAD(rng.offset));
        c[k][1] = TE_V(srli_epi64)(c[k][0], 32);
        c[k][2] = TE_SPREAD(rng.stream);
        c[k][3] = TE_V(srli_epi64)(c[k][2], 32);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            te_counters high = TE_V(mul_epu32)(a, c[k][0]), low = TE_V(mul_epu32)(b, c[k][2]);
            c[k][0] = TE_XOR3(TE_V(srli_epi64)(low, 32), c[k][1], keys->first[round]);
            c[k][2] = TE_XOR3(TE_V(srli_epi64)(high, 32), c[k][3], keys->second[round]);
            c[k][1] = low;
            c[k][3] = high;
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) w[k] = (te_words){{c[k][0], c[k][1], c[k][2], c[k][3]}};
}

/* The two words of every counter side by side. */
TE_VECTORS te_counters te_join(te_counters first, te_counters second)
{
    return TE_JOIN(first, TE_V(slli_epi64)(second, 32));
}

/* Sixteen bytes of each of n counters; the number of counters done. */
TE_VECTORS int64_t te_random_along(uint8_t *bytes, te_rng rng, uint64_t first, int64_t n)
{
#if defined(TE_ISA_avx512)
    const te_counters order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* interleaving puts them right */
#else
    const te_counters order = _mm256_setr_epi64x(0, 2, 1, 3);
#endif
    enum { EACH = sizeof(te_counters) };
    te_philox_keys keys;
    te_philox_keys_of(&keys, rng.seed);
    uint8_t last[TE_COUNTERS_ONCE * 16];
    for (int64_t i = 0; i < n; i += TE_COUNTERS_ONCE, bytes += sizeof last) {
        te_words w[4];
        uint8_t *to = i + TE_COUNTERS_ONCE <= n ? bytes : last;
        te_counters from[4] = {TE_V(add_epi64)(order, TE_SPREAD(first + i))};
#pragma GCC unroll 3
        for (int k = 1; k < 4; k++) from[k] = TE_V(add_epi64)(from[k - 1], TE_SPREAD(TE_COUNTERS));
        te_philox_all(w, rng, &keys, from);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            te_counters low = te_join(w[k].word[0], w[k].word[1]), high = te_join(w[k].word[2], w[k].word[3]);
            TE_PUT(to + 2 * k * EACH, TE_V(unpacklo_epi64)(low, high));
            TE_PUT(to + (2 * k + 1) * EACH, TE_V(unpackhi_epi64)(low, high));
        }
        if (to == last) memcpy(bytes, last, (size_t)(n - i) * 16);
    }
    return n;
}

/* The four bytes of each word in two vectors, those at the same place to one row. */
TE_VECTORS void te_put_bytes_down(uint8_t *to, int64_t width, te_counters low, te_counters high)
{
#if defined(TE_ISA_avx512)
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
#else
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                          13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    low = _mm256_shuffle_epi8(low, pick);
    high = _mm256_shuffle_epi8(high, pick);
    __m256i first = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(low, high), order);
    __m256i second = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(low, high), order);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(first));
    _mm_storeu_si128((__m128i *)(to + width), _mm256_extracti128_si256(first, 1));
    _mm_storeu_si128((__m128i *)(to + 2 * width), _mm256_castsi256_si128(second));
    _mm_storeu_si128((__m128i *)(to + 3 * width), _mm256_extracti128_si256(second, 1));
#endif
}

/* The same for counters `step` apart, byte k of counter j to bytes[k * width + j]. */
static inline int64_t te_random_down(uint8_t *bytes, int64_t width, te_rng rng, uint64_t first, uint64_t step,
                                     int64_t n)
{
    int64_t evens[TE_COUNTERS];
    for (int k = 0; k < TE_COUNTERS; k++) evens[k] = (int64_t)(2 * step * (uint64_t)k);
    te_counters lanes;
    memcpy(&lanes, evens, sizeof lanes);
    const te_counters next = TE_SPREAD(step);
    const te_counters upper = TE_SPREAD(2 * TE_COUNTERS * step);
    te_philox_keys keys;
    te_philox_keys_of(&keys, rng.seed);
    uint8_t last[16][TE_COUNTERS_ONCE];
    for (int64_t i = 0; i < n; i += TE_COUNTERS_ONCE) {
        te_words w[4];
        bool whole = i + TE_COUNTERS_ONCE <= n;
        uint8_t *to = whole ? bytes + i : last[0];
        int64_t apart = whole ? width : (int64_t)sizeof *last;
        te_counters from[4] = {TE_V(add_epi64)(TE_SPREAD(first + step * (uint64_t)i), lanes)};
        from[1] = TE_V(add_epi64)(from[0], next);
        from[2] = TE_V(add_epi64)(from[0], upper);
        from[3] = TE_V(add_epi64)(from[2], next);
        te_philox_all(w, rng, &keys, from);
#pragma GCC unroll 4
        for (int word = 0; word < 4; word++) {
            te_counters low = te_join(w[0].word[word], w[1].word[word]);
            te_counters high = te_join(w[2].word[word], w[3].word[word]);
            te_put_bytes_down(to + 4 * word * apart, apart, low, high);
        }
        for (int k = 0; k < 16 && !whole; k++) memcpy(bytes + k * width + i, last[k], (size_t)(n - i));
    }
    return n;
}

#undef TE_VECTORS
#undef TE_V
#undef TE_XOR3
#undef TE_PUT
#undef TE_JOIN
#undef TE_SPREAD
#else
#define te_random_along(bytes, rng, first, n)             0
#define te_random_down(bytes, width, rng, first, step, n) 0
#endif

#endif
