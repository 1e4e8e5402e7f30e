/* quantize_panel.h - panels of a matrix on their way to the quantized sides, and what a thread works in.
 *
 * A panel is small enough to stay in the second-level cache while both sides are made from it, and wide enough that
 * memory is read in long runs; where both sides have the same codes only those must stay there, and it is wider.
 * Blocks of 128 go by bands as wide as the source: short runs from memory cost more than a second visit to what is
 * in the last cache. So does E2M1, sixteen rows at a time, which stay in the second one. Panels have nothing in
 * common but maxima, so no result depends on the order or on the number of threads in which they are visited.
 */
#ifndef TE_KERNELS_QUANTIZE_PANEL_H
#define TE_KERNELS_QUANTIZE_PANEL_H

#include "copy.h"
#include "quantize_blocks.h"

enum {
    TE_PANEL_ROWS = 128,
    TE_PANEL_COLS = 1024, /* of halves; of what is wider, or has more on the way, half as many */
    TE_STRIP_COLS = 128,
    TE_LINE_COLS = 512, /* of a group of rows on their way to columns: they stay in the first cache */
    TE_FLAT_ROWS = 4, /* follow memory, where no column is looked at */
    TE_FLAT_COLS = 1 << 16,
    TE_WIDE_COLS = 4096, /* of a panel that is low */
    TE_APART = 64,
    TE_BAND_BYTES = 1 << 19, /* of a group of rows as wide as the source, which stays in the second cache */
    TE_PAST_FROM = 1 << 20, /* codes that leave the second cache before they are read are written past it */
};

/* Arrays of TE_PANEL_COLS hold something per column; codes and random bytes of TE_WIDE_COLS take several rows of
 * theirs. Others are TE_APART longer than what they hold, a column or a block each, so that they do not throw each
 * other out of the first cache. */
typedef struct te_panel_lane {
    /* Codes of a panel that is as wide as the source, te_panel_band_stride apart, and after pairs of rows their
     * factors, or those that are kept, te_panel_job.kept apart; NULL: there is none. */
    uint8_t *band;
    float   amax[2];
    float   amaxes[TE_MOST_COLUMNS + TE_APART], blocks[TE_MOST_COLUMNS + TE_APART];
    float   multipliers[TE_MOST_COLUMNS + TE_APART], factors[TE_MOST_COLUMNS + TE_APART]; /* or bytes */
    uint8_t codes[TE_PANEL_ROWS][TE_PANEL_COLS], pairs[TE_PANEL_ROWS / 2][TE_PANEL_COLS];
    uint8_t random[TE_GROUP][TE_PANEL_COLS];
    float   values[TE_PANEL_ROWS][TE_STRIP_COLS]; /* a strip of the panel; transformed: in its dtype */
    float   turned[TE_STRIP_COLS][TE_PANEL_ROWS];
    uint8_t down[TE_PANEL_ROWS / TE_GROUP][TE_DOWN_COLUMNS]; /* factors on their way to columns */
    float   squares[TE_PANEL_ROWS / TE_GROUP][TE_MOST_COLUMNS / TE_GROUP]; /* amaxes of square blocks, for both sides */
    int8_t  chosen[TE_PANEL_ROWS / TE_GROUP][TE_MOST_COLUMNS / TE_GROUP];  /* candidates of squares (quantize_four.c) */
} te_panel_lane;

/* What every panel of a job has in common. */
typedef struct te_panel_job {
    te_quantize_job           job; /* with the factor of the whole tensor, where there is one */
    const te_quantize_blocks *blocks;
    const te_quantize_loops  *loops; /* of the source's dtype */
    te_transpose_fn           transpose, turn; /* of bytes, of float32 */
    void (*stream)(void *dst, const void *src, size_t lines);
    bool                      past;            /* transposed bytes are written past the caches */
    /* so are those that te_panel_both writes where they lie as the source does */
    bool                      streams;
    bool                      rows_past;       /* and those of rows, which nothing else is made from */
    int64_t                   ahead;           /* bytes by which rows are asked for that are read once; 0: not at all */
    /* Where codes under the factor of the whole tensor serve both sides and leave the caches before anybody reads them:
     * kept in the lane, rows so far apart, until they are turned, and copied to side 0 past the caches, so that its
     * lines are not read first. 0: not so. */
    int64_t                   kept;
    float                     encode[2]; /* TE_SCALE_E4M3 with one amax per side … */
    bool                      tied[2]; /* … which makes many products of bfloat16 lie between two codes of E2M1 */
} te_panel_job;

/* A part of the source. */
typedef struct te_panel {
    int64_t row, col;
    int     rows, cols;
    int     next; /* columns further on the panel beside it begins */
} te_panel;

typedef void te_panel_visit(const te_panel_job *p, te_panel_lane *l, te_panel x);

void te_panel_job_open(te_exec *exec, const te_quantize_job *job, te_panel_job *p);

/* Visits every panel of so many rows and columns of the source: TE_PANEL_ROWS, or where no column is looked at
 * TE_FLAT_ROWS, which follows memory. Maxima over the lanes come back in amax. */
te_status te_panels_visit(te_exec *exec, const te_panel_job *p, int rows, int cols, te_panel_visit *visit,
                          float amax[2]);

/* Element (row, col) of the source. */
static inline void *te_panel_source(const te_panel_job *p, int64_t row, int64_t col)
{
    return (char *)p->job.source + (row * p->job.source_stride + col) * (int64_t)te_dtype_size(p->job.dtype);
}

/* Asks for memory that will be written. */
static inline void te_ask_to_write(const void *to, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)to + at, 1, 2);
}

/* Where row i of the panel that comes after x begins; false where there is none. */
bool te_panel_next(const te_panel_job *p, te_panel x, int i, int64_t *row, int64_t *col);

/* The same, and asks for it. Rows of a panel are far apart, so that no machine foresees them. */
bool te_panel_foresee(const te_panel_job *p, te_panel x, int i, int64_t *row, int64_t *col);

/* Whether the codes of side 0 are those of side 1 too, and lie as bytes. */
bool te_panel_shares_codes(const te_panel_job *p);

/* Whether panels are as high as a block and as wide as the source where that is possible: both visits follow memory. */
bool te_panel_in_bands(const te_panel_job *p);

static inline int64_t te_panel_band_stride(const te_panel_job *p) { return (p->job.cols + 63) / 64 * 64 + TE_APART; }

/* Whether blocks of both sides are the same squares, and side 0 has had their amaxes; where these are kept. */
bool te_panel_shares_amaxes(const te_panel_job *p);

static inline float *te_panel_squares(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    return l->squares[x.row % TE_PANEL_ROWS / q->block_rows] + x.col % TE_MOST_COLUMNS / q->block_cols;
}

/* Quantizes what a panel gives to the row-wise side, and to the column-wise one. */
void te_panel_rowwise(const te_panel_job *p, te_panel_lane *l, te_panel x);
void te_panel_columnwise(const te_panel_job *p, te_panel_lane *l, te_panel x);

/* Both sides of a panel, or the column-wise one, sixteen rows after the other: blocks of E2M1 that are no higher. */
bool te_panel_goes_by_groups(const te_panel_job *p);
void te_panel_by_groups(const te_panel_job *p, te_panel_lane *l, te_panel x);

/* Both sides of a panel whose codes may come from one rounding (te_panel_rounds_once). */
bool te_panel_rounds_once(const te_panel_job *p);
void te_panel_both(const te_panel_job *p, te_panel_lane *l, te_panel x);

/* Whether the same codes lie as the source does, so that panels one block high and as wide as the source follow
 * memory. */
bool te_panel_follows_rows(const te_panel_job *p);

/* Factors of `count` rows of blocks, of which the first begins in row i: one, or several of blocks that are one row
 * high and have one rule, since short loops are dear. They are stored, multipliers come in l->blocks; returns how
 * many to a row. */
int te_panel_row_factors(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int count);

/* Stores `n` factors in each of `count` rows of blocks, of which the first begins in row i and the last may be
 * short. */
void te_panel_put_row_factors(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int n, int count);

/* A strip transformed in groups of 16 rows, into l->values, rows of te_panel_strip elements of the source's dtype,
 * which is as wide as a strip may be; what is missing of the last group counts as 0. Returns the number of rows. */
int te_panel_transform(const te_panel_job *p, te_panel_lane *l, te_panel strip);

static inline int te_panel_strip(te_panel x) { return x.rows > TE_GROUP ? TE_STRIP_COLS : TE_LINE_COLS; }

/* Factors of n amaxes: as stored to l->factors, multipliers to l->blocks. */
te_factor_rule te_panel_rule(const te_panel_job *p, int side, int64_t row);

/* Writes factors of n blocks, `step` apart, of which each stands `copies` times, `copy_step` apart. */
void te_panel_put_factors(const te_panel_job *p, const te_quantized_side *side, const void *factors, int n, int64_t at,
                          int64_t step, int copies, int64_t copy_step);

#endif
