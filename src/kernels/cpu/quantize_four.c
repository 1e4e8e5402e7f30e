/* quantize_four.c - the smaller error of two factors, block by block. */
#include "quantize_four.h"

/* Values of a block as its side sees them: `down` from row to row, `along` within one. */
typedef struct block {
    const float *values;
    int64_t down, along;
    int rows, cols;
} block;

/* Summed error under a factor, absolute or squared: rows from left to right, then halves of the rows. */
static float block_error(const te_quantizer *q, const block *b, uint8_t code, float multiplier, float amax)
{
    float factor = te_f8e4m3_to_f32(code), sums[TE_PANEL_ROWS] = {0};
    for (int i = 0; i < b->rows; i++) {
        for (int j = 0; j < b->cols; j++) {
            float x = b->values[i * b->down + j * b->along];
            float error = te_e2m1_to_f32(te_f32_to_e2m1(x * multiplier)) * factor * amax / (6.0f * q->scale_max) - x;
            sums[i] +=
                q->four_over_six == TE_46_MSE ? error * error : te_f32_from_bits(te_f32_bits(error) & 0x7fffffffu);
        }
    }
    for (int half = q->block_rows / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static void choose(const te_quantizer *q, const block *b, float block_amax, float amax, float encode, uint8_t *code,
                   float *multiplier)
{
    uint8_t six = te_two_level_candidate(block_amax, encode, 1.0f),
            four = te_two_level_candidate(block_amax, encode, 1.5f);
    float by_six = te_two_level_multiplier(six, encode), by_four = te_two_level_multiplier(four, encode);
    bool smaller = block_error(q, b, four, by_four, amax) < block_error(q, b, six, by_six, amax);
    *code = smaller ? four : six;
    *multiplier = smaller ? by_four : by_six;
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
            choose(q, &b, l->amaxes[at], amax, rule->encode, (uint8_t *)l->factors + at, &multipliers[at]);
        }
    }
}
