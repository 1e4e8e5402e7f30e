/* quantize_blocks.h - the loops of quantizing over short runs of a row, compiled once per instruction set.
 *
 * Two shapes of block meet two directions. `along`: the factors of a row change every `block` elements. `down`: each
 * column has its own, and the loop goes from column to column, so that blocks which run down a matrix are quantized in
 * the order in which it lies in memory. Codes take a byte each, float4 as well, until they are packed.
 */
#ifndef TE_KERNELS_QUANTIZE_BLOCKS_H
#define TE_KERNELS_QUANTIZE_BLOCKS_H

#include "../quantize.h"
#include "copy.h"
#include "cpu.h"

enum {
    TE_GROUP = 16,          /* elements of a group */
    TE_SOURCES = 3,         /* dtypes of a source */
    TE_MOST_COLUMNS = 1 << 14, /* of rows on their way to both directions, or read one after the other */
    TE_DOWN_COLUMNS = 1024, /* of factors on their way to columns */
};

/* Rows of n elements on their way to both directions: under along[i * step + j / block], and under down[j]. */
typedef struct te_two_ways {
    const void  *x, *next; /* rows that are asked for on the way, as far apart; NULL: none */
    int64_t      stride; /* elements from row to row */
    int          rows;
    int64_t      n, block;
    const float *along, *down;
    int64_t      step;
    uint8_t     *codes[2];
    int64_t      codes_stride[2];
    bool         past[2]; /* codes are not read soon; their lines of 64 are whole */
} te_two_ways;

/* At most TE_GROUP rows that become pairs of codes. */
typedef struct te_pair_rows {
    const void    *x;
    int64_t        stride; /* elements */
    int            rows;
    const float   *multipliers; /* of columns, or of blocks of a row, those of the next one `step` further on */
    int64_t        step;
    const uint8_t *random; /* per element, or NULL */
    int64_t        random_stride;
    bool           tied; /* many products lie where two codes are equally near */
} te_pair_rows;

/* The error of a value x in line i, whose block has factor factors[i]: |q * factor * amax / most - x|, or its square,
 * where q is E2M1 of x * multipliers[i]. */
typedef struct te_error_rule {
    const float *multipliers, *factors;
    float        amax, most;
    bool         squared;
} te_error_rule;

/* How the amax of a block gives its factor. */
typedef struct te_factor_rule {
    te_scale_kind scale;
    float         max;                /* of the element */
    float         epsilon, overflow;  /* float32; see te_scale_from_amax */
    bool          power_of_two;
    float         encode; /* TE_SCALE_E4M3: the tensor's */
} te_factor_rule;

/* For one dtype of source. A NaN is passed over by maxima. */
typedef struct te_quantize_loops {
    /* amax[i] = the largest magnitude of elements i * block … of n. */
    void (*amax_along)(float *amax, const void *x, int64_t n, int64_t block);
    /* amax[j] = the largest magnitude of column j over rows that are `stride` elements apart. */
    void (*amax_down)(float *amax, const void *x, int64_t stride, int rows, int n);
    /* Both in one visit, along[i * step + j / block] and down[j]. False, and neither is of use, where that is not
     * easy. NULL: never. */
    bool (*amax_both)(float *along, float *down, const te_two_ways *ways);
    /* amax[b] = the largest magnitude of columns b * block … over all rows, row after row; the number of columns done,
     * from the first on. NULL: none ever. */
    int64_t (*amax_squares)(float *amax, const void *x, int64_t stride, int rows, int64_t n, int64_t block);
    /* past: lines of 64 codes are whole, and are not read soon. */
    void (*encode_along[TE_ELEMENT_COUNT])(uint8_t *codes, const void *x, const float *multipliers, int64_t n,
                                           int64_t block, bool past);
    /* Factors of the blocks of a row as they are stored, powers of two or those of E2M1, and codes, of E2M1 two to a
     * byte. ahead: memory is asked for so many bytes before it is read; 0: it is not. The number of elements done,
     * from the first on. NULL: none ever. */
    int64_t (*at_once[TE_ELEMENT_COUNT])(uint8_t *codes, void *factors, const void *x, int64_t n,
                                         const te_factor_rule *rule, int64_t block, bool past, int64_t ahead);
    /* `rows` rows of n; strides from row to row, in elements. */
    void (*encode_down[TE_ELEMENT_COUNT])(uint8_t *codes, int64_t codes_stride, const void *x, int64_t stride, int rows,
                                          const float *multipliers, int64_t n);
    /* E2M1 two to a byte: of neighbours, in blocks of 16, and of rows 2 i and 2 i + 1, of which the last may be
     * missing. By chance, where there are random bytes. The number of elements of a row done, from the first on. NULL:
     * none ever. */
    int64_t (*pairs_along)(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *rows, int64_t n);
    int64_t (*pairs_down)(uint8_t *pairs, int64_t pairs_stride, const te_pair_rows *rows, int64_t n);
    /* Both at once, where no code saturates unless the element is infinite; the number of columns done, from the
     * first on. NULL: none ever. */
    int64_t (*encode_both[TE_ELEMENT_COUNT])(const te_two_ways *ways);
    /* n elements under one factor, and their largest magnitude. */
    float (*encode_whole[TE_ELEMENT_COUNT])(uint8_t *codes, const void *x, float multiplier, int64_t n, bool past);
    /* A row of E2M1 by random bytes, one per element. */
    void (*stochastic)(uint8_t *codes, const void *x, const float *multipliers, int64_t block, const uint8_t *random,
                       int64_t n);
    void (*load)(float *values, const void *x, int64_t n);
    /* `rows` rows of n elements and zeros up to 16 rows, transformed down each column: rounded to the dtype, 16 rows
     * `width` elements apart with whole vectors of 16, of which n count; and the largest magnitude among those. */
    void (*transform)(void *to, int64_t width, const void *x, int64_t stride, int rows, int n);
    float (*transform_amax)(const void *x, int64_t stride, int rows, int n);
    /* sums[k][b] = about the errors under rules[k] of block b of 16 x 16 elements, whose factor is that of line b.
     * Blocks lie side by side, their number is even; products are below 8. NULL: never. */
    void (*errors_about)(float *const sums[2], const te_error_rule rules[2], const void *x, int64_t stride, int blocks);
} te_quantize_loops;

typedef struct te_quantize_blocks {
    te_quantize_loops of[TE_SOURCES];
    /* n factors as they are stored, and what elements are multiplied by. */
    void (*factors)(const te_factor_rule *rule, const float *amax, int n, void *factors, float *multipliers);
    /* Factors that bring n amaxes to 6 / stretch, as they are stored and as numbers, and what elements are multiplied
     * by. */
    void (*candidates)(float encode, float stretch, const float *amax, int n, uint8_t *codes, float *multipliers,
                       float *values);
    /* sums[i] = the errors of the n <= 128 values of line i, added from left to right. */
    void (*errors)(float *sums, const te_error_rule *rule, const float *x, int64_t stride, int lines, int n);
    /* The same under two rules for 16 lines side by side, value j of line i at x[j * stride + i], that have one
     * factor. */
    void (*errors_across)(float sums[2][TE_GROUP], const te_error_rule rules[2], const float *x, int64_t stride, int n);
    /* Sixteen random bytes of each of n counters, `step` apart: byte k of counter j to bytes[k * width + j]. */
    void (*random_down)(uint8_t *bytes, int64_t width, te_rng rng, uint64_t first, uint64_t step, int n);
    /* The same, counters one apart, those of a counter side by side. */
    void (*random_along)(uint8_t *bytes, te_rng rng, uint64_t first, int64_t n);
    /* Of bytes, [1] to memory that is not read soon; NULL: that of copy.h is as good. */
    te_transpose_fn turn[2];
    /* Byte j of row i, of rows TE_DOWN_COLUMNS apart, to to[j * stride + i]. */
    void (*turn_factors)(uint8_t *to, int64_t stride, const uint8_t *factors, int rows, int n);
    void (*pack_along)(uint8_t *pairs, const uint8_t *codes, int64_t n);                       /* n codes, n even */
    void (*pack_down)(uint8_t *pairs, const uint8_t *even, const uint8_t *odd, int64_t n);     /* n of either row */
    /* What pack_down makes of two rows that lie as pack_along leaves them: n columns. */
    void (*pairs_across)(uint8_t *pairs, const uint8_t *even, const uint8_t *odd, int64_t n);

    /* The way back. Codes take a byte each. */
    void (*unpack_along)(uint8_t *codes, const uint8_t *pairs, int64_t n);                     /* n codes, n even */
    void (*decode_along[TE_ELEMENT_COUNT])(float *values, const uint8_t *codes, const float *factors, int64_t n,
                                           int64_t block);
    void (*decode_down[TE_ELEMENT_COUNT])(float *values, const uint8_t *codes, const float *factors, int64_t n);
    /* n elements as they are stored to float32 or bfloat16, all multiplied by `times` once more; past: `to` is not
     * read soon. Returns false, and nothing is written, where that is not easy. NULL: never. */
    bool (*decode_to[TE_ELEMENT_COUNT])(void *to, te_dtype dtype, const uint8_t *stored,
                                        const float *factors, int64_t n, int64_t block, float times, bool past);
    void (*factor_values)(float *factors, const uint8_t *stored, te_scale_kind scale, int n);  /* E8M0 or E4M3 */
    void (*multiply)(float *values, float factor, int64_t n);
    void (*transform_back)(float *values, int width, int n); /* 16 rows of n values, `width` apart */
    /* n values that bfloat16 holds; false where it does not hold one as a normal number, 0, infinity or NaN. */
    bool (*narrow)(uint16_t *to, const float *values, int64_t n);
    /* decode_along and narrow at once, where that is easy; else false, and what was written is of no use. NULL:
     * never. */
    bool (*narrow_along[TE_ELEMENT_COUNT])(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n,
                                           int64_t block);
} te_quantize_blocks;

extern const te_quantize_blocks te_quantize_blocks_portable, te_quantize_blocks_avx2, te_quantize_blocks_avx512;

/* Puts those that permute bytes into the table of AVX-512's. */
void te_quantize_take_vbmi(te_quantize_blocks *to);

const te_quantize_blocks *te_quantize_blocks_of(te_exec *exec); /* quantize_panel.c */

static inline const te_quantize_loops *te_quantize_loops_of(const te_quantize_blocks *blocks, te_dtype dtype)
{
    return &blocks->of[dtype == TE_F32 ? 0 : dtype == TE_BF16 ? 1 : 2];
}

#endif
