/* philox.h - Philox4x32-10, the counter-based generator behind every random number.
 *
 * A word is a pure function of (seed, stream, offset, element), so any part of a sequence can be made at any time, on
 * any device, in any order; te_rng in kernels.h fixes which word belongs to which element. Salmon et al., "Parallel
 * random numbers: as easy as 1, 2, 3", SC 2011.
 */
#ifndef TE_KERNELS_PHILOX_H
#define TE_KERNELS_PHILOX_H

#include "elementary.h"
#include "kernels.h"

/* The four words of one counter. */
typedef struct te_philox_words {
    uint32_t word[4];
} te_philox_words;

/* One of ten rounds, and the keys of the next. */
TE_HD static inline te_philox_words te_philox_round(te_philox_words c, uint32_t k0, uint32_t k1)
{
    uint64_t        a = (uint64_t)0xd2511f53u * c.word[0], b = (uint64_t)0xcd9e8d57u * c.word[2];
    te_philox_words next = {
        {(uint32_t)(b >> 32) ^ c.word[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c.word[3] ^ k1, (uint32_t)a}};
    return next;
}

TE_HD static inline void te_philox_next(uint32_t *k0, uint32_t *k1)
{
    *k0 += 0x9e3779b9u;
    *k1 += 0xbb67ae85u;
}

TE_HD static inline te_philox_words te_philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                              uint32_t k1)
{
    te_philox_words c = {{c0, c1, c2, c3}};
    for (int round = 0; round < 10; round++) {
        c = te_philox_round(c, k0, k1);
        te_philox_next(&k0, &k1);
    }
    return c;
}

/* The four words of elements 4 * group … 4 * group + 3. */
TE_HD static inline te_philox_words te_rng_group(te_rng rng, uint64_t group)
{
    uint64_t counter = rng.offset + group;
#ifdef TE_RNG_BASE /* device code of backends with graphs */
    if (rng.base) {
        counter += rng.base[1];
        rng.seed = rng.base[0];
    }
#endif
    return te_philox((uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)rng.stream, (uint32_t)(rng.stream >> 32),
                     (uint32_t)rng.seed, (uint32_t)(rng.seed >> 32));
}

/* The word of one element. */
TE_HD static inline uint32_t te_rng_word(te_rng rng, uint64_t element)
{
    return te_rng_group(rng, element / 4).word[element % 4];
}

/* Uniform in [0, 1), a multiple of 2^-24. */
TE_HD static inline float te_rng_uniform(uint32_t word) { return (float)(int32_t)(word >> 8) * 0x1p-24f; }

/* An element is kept when its word is at least this: drop probability p, exact to 2^-32. Above 2^32 - 1 nothing is
 * kept; a NaN keeps nothing. */
TE_HD static inline uint64_t te_rng_threshold(double p)
{
    double scaled = p * 4294967296.0;
    if (!(scaled < 4294967296.0)) return (uint64_t)1 << 32;
    if (scaled <= 0) return 0;
    double whole = (scaled + 0x1p52) - 0x1p52; /* nearest, ties to even */
    return (uint64_t)whole;
}

/* Standard normal by Box-Muller. Elements 2j and 2j+1 share their two words: the first gives the radius, the second the
 * angle; the even element takes the cosine, the odd one the sine. Both lie within +-6.7. */
TE_HD static inline float te_rng_normal(uint32_t radius_word, uint32_t angle_word, bool odd)
{
    float    u = TE_FMA((float)(int32_t)(radius_word >> 1), 0x1p-31f, 0x1p-32f);
    float    radius = TE_SQRT(-2.0f * te_log(u));
    uint32_t quarter = angle_word >> 30;
    float    angle = (float)(int32_t)((angle_word & 0x3fffffffu) >> 6) * (0x1p-24f * 1.57079632679f) - 0.785398163397f;
    float    s = te_sin_quarter(angle), c = te_cos_quarter(angle);
    return radius * te_sin_select(s, c, quarter + (odd ? 0u : 1u));
}

#endif
