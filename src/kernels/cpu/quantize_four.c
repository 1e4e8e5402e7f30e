/* quantize_four.c - the smaller error of two factors, block by block. */
#include "quantize_four.h"

/* Values of a block as its side sees them: `down` from row to row, `along` within one. */
typedef struct block {
    const float *values;
    int64_t down, along;
    int rows, cols;
} block;

/* A candidate for the factor of a block. */
typedef struct candidate {
    uint8_t code;
    float multiplier;
} candidate;

/* Summed error, absolute or squared: rows from left to right, then halves of the rows. */
static float block_error(const te_panel_job *p, const block *b, candidate c, float amax)
{
    const te_quantizer *q = p->job.quantizer;
    float sums[TE_PANEL_ROWS] = {0}, row[TE_STRIP_COLS], errors[TE_STRIP_COLS];
    for (int i = 0; i < b->rows; i++) {
        const float *values = b->values + i * b->down;
        for (int j = 0; j < b->cols && b->along != 1; j++) row[j] = values[j * b->along];
        p->blocks->errors(errors, b->along == 1 ? values : row, b->cols, c.multiplier, te_f8e4m3_to_f32(c.code), amax,
                          6.0f * q->scale_max, q->four_over_six == TE_46_MSE);
        for (int j = 0; j < b->cols; j++) sums[i] += errors[j];
    }
    for (int half = q->block_rows / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static candidate choose(const te_panel_job *p, const block *b, float block_amax, float amax, float encode)
{
    candidate six = {.code = te_two_level_candidate(block_amax, encode, 1.0f)},
              four = {.code = te_two_level_candidate(block_amax, encode, 1.5f)};
    six.multiplier = te_two_level_multiplier(six.code, encode);
    four.multiplier = te_two_level_multiplier(four.code, encode);
    return block_error(p, b, four, amax) < block_error(p, b, six, amax) ? four : six;
}

void te_four_over_six_factors(const te_panel_job *p, te_panel_lane *l, te_panel part, int side,
                              const te_factor_rule *rule, float *multipliers)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *s = &p->job.side[side];
    float amax = s->amax[side == 0 ? part.row * s->amax_stride : 0];
    int width = side ? q->block_rows : q->block_cols;
    for (int first = 0; first < part.cols; first += TE_STRIP_COLS) { /* widths divide it */
        int cols = part.cols - first < TE_STRIP_COLS ? part.cols - first : TE_STRIP_COLS;
        for (int i = 0; i < part.rows; i++)
            p->loops->load(l->values[i], te_panel_source(p, part.row + i, part.col + first), cols);
        for (int j = 0; j < cols; j += width) {
            int n = cols - j < width ? cols - j : width, at = (first + j) / width;
            block b = {l->values[0] + j, TE_STRIP_COLS, 1, part.rows, n};
            if (side) b = (block){b.values, 1, TE_STRIP_COLS, n, part.rows};
            candidate c = choose(p, &b, l->amaxes[at], amax, rule->encode);
            ((uint8_t *)l->factors)[at] = c.code;
            multipliers[at] = c.multiplier;
        }
    }
}
