/* program_blocks_random.h - values that follow from the position: columns, random numbers; and spreading of row values.
 * A part of program_blocks_body.h. */
#include "../philox.h"
#if TE_REAL_IS_F32
#include "isa/philox_vectors.h"
#else
#define te_random_along(bytes, rng, first, n) 0
#endif

#include <string.h>

static void fill_columns(void *dst, int64_t first, int64_t columns, size_t n)
{
    te_real *d = dst;
    while (n) {
        size_t run = (size_t)(columns - first) < n ? (size_t)(columns - first) : n;
        if (first + (int64_t)run <= INT32_MAX) {
            int32_t start = (int32_t)first;
            _Pragma("omp simd") for (int32_t i = 0; i < (int32_t)run; i++) d[i] = (te_real)(start + i);
        } else {
            for (size_t i = 0; i < run; i++) d[i] = (te_real)(first + (int64_t)i);
        }
        d += run;
        n -= run;
        first = 0;
    }
}

static void repeat_rows(void *dst, const void *src, size_t rows, size_t columns)
{
    te_real       *d = dst;
    const te_real *s = src;
    for (size_t r = 0; r < rows; r++, d += columns) {
        te_real value = s[r];
        te_vec  values = value - (te_vec){0};
        size_t  j = 0;
        for (; j + WIDTH <= columns; j += WIDTH) *(te_vec *)(d + j) = values;
        if (columns >= WIDTH) *(te_vec *)(d + columns - WIDTH) = values;
        else for (; j < columns; j++) d[j] = value;
    }
}

enum { RANDOM_SPAN = 256 };

/* Words of 4 * groups elements from group `first` on. */
static void random_words(uint32_t *restrict out, te_rng rng, uint64_t first, size_t groups)
{
    uint32_t k0 = (uint32_t)rng.seed, k1 = (uint32_t)(rng.seed >> 32);
    uint32_t s0 = (uint32_t)rng.stream, s1 = (uint32_t)(rng.stream >> 32);
    uint64_t counter = rng.offset + first;
    size_t   done = (size_t)te_random_along((uint8_t *)out, rng, first, (int64_t)groups);
    _Pragma("omp simd") for (size_t g = done; g < groups; g++)
    {
        te_philox_words words = te_philox((uint32_t)(counter + g), (uint32_t)((counter + g) >> 32), s0, s1, k0, k1);
        out[4 * g] = words.word[0];
        out[4 * g + 1] = words.word[1];
        out[4 * g + 2] = words.word[2];
        out[4 * g + 3] = words.word[3];
    }
}

/* From the words of `pairs` pairs of elements. */
static void random_normals(te_real *restrict d, const uint32_t *restrict w, size_t pairs)
{
    _Pragma("omp simd") for (size_t i = 0; i < pairs; i++)
    {
        d[2 * i] = (te_real)te_rng_normal(w[2 * i], w[2 * i + 1], false);
        d[2 * i + 1] = (te_real)te_rng_normal(w[2 * i], w[2 * i + 1], true);
    }
}

/* `w` is the word of element 0 of this block. */
static void random_keep(te_real *d, const te_block_random *random, const uint32_t *w, const te_real *p, size_t n)
{
    if (p) {
        for (size_t i = 0; i < n; i++) d[i] = w[i] >= te_rng_threshold((double)p[i]) ? 1 : 0;
        return;
    }
    uint32_t least = (uint32_t)random->threshold;
    te_real  kept = random->threshold >> 32 ? 0 : 1;
    TE_EACH d[i] = w[i] >= least ? kept : (te_real)0;
}

static void fill_random(void *dst, const te_block_random *random, size_t n)
{
    te_real       *d = dst;
    const te_real *p = random->p;
    uint64_t       first = random->first;
    while (n) {
        uint32_t words[RANDOM_SPAN + 8];
        te_real  normals[RANDOM_SPAN + 8];
        size_t   skip = (size_t)(first % 4), span = n < RANDOM_SPAN ? n : RANDOM_SPAN, groups = (skip + span + 3) / 4;
        random_words(words, random->rng, first / 4, groups);
        if (random->op == TE_PW_NORMAL) {
            random_normals(normals, words, 2 * groups);
            memcpy(d, normals + skip, span * sizeof *d);
        } else if (random->op == TE_PW_KEEP) {
            random_keep(d, random, words + skip, p, span);
        } else {
            _Pragma("omp simd") for (size_t i = 0; i < span; i++) d[i] = (te_real)te_rng_uniform(words[skip + i]);
        }
        d += span;
        p = p ? p + span : NULL;
        first += span;
        n -= span;
    }
}

#if TE_REAL_IS_F32
__extension__ typedef unsigned __int128 te_product;

static void fill_integers(int64_t *d, const te_integers *drawn, uint64_t first, size_t n)
{
    int64_t  low = drawn->low;
    uint64_t range = drawn->range;
    uint32_t narrow = (uint32_t)range;
    for (size_t at = 0; at < n; at += RANDOM_SPAN / 2) {
        uint32_t w[RANDOM_SPAN];
        size_t   span = n - at < RANDOM_SPAN / 2 ? n - at : RANDOM_SPAN / 2;
        random_words(w, drawn->rng, (first + at) / 2, (span + 1) / 2);
        if (narrow == range) { /* halves are enough, which vectors can multiply */
            _Pragma("omp simd") for (size_t i = 0; i < span; i++)
            {
                uint64_t lower = (uint64_t)w[2 * i + 1] * narrow >> 32;
                d[at + i] = low + (int64_t)(((uint64_t)w[2 * i] * narrow + lower) >> 32);
            }
            continue;
        }
        for (size_t i = 0; i < span; i++) {
            uint64_t bits = (uint64_t)w[2 * i] << 32 | w[2 * i + 1];
            d[at + i] = low + (int64_t)((te_product)bits * range >> 64);
        }
    }
}
#endif
