/* quantize_four.c - the smaller error of two factors, block by block.
 *
 * A line is the part of a block that lies in one row of the stored side. Both candidates are tried on sixteen lines at a time: those
 * of one block that is sixteen rows high, or of sixteen blocks of one row.
 */
#include "quantize_four.h"

enum { LINES = TE_PANEL_ROWS };

/* Lines of values as the side sees them. */
typedef struct lines {
    const float *values;
    int64_t stride;
    int count, n;
} lines;

/* Candidates of the lines: [0] brings the block's largest value to 6, [1] to 4. */
typedef struct candidates {
    uint8_t codes[2][LINES];
    float multipliers[2][LINES], factors[2][LINES], sums[2][LINES];
} candidates;

static void propose(candidates *c, int line, float block_amax, float encode)
{
    for (int four = 0; four < 2; four++) {
        uint8_t code = te_two_level_candidate(block_amax, encode, four ? 1.5f : 1.0f);
        c->codes[four][line] = code;
        c->multipliers[four][line] = te_two_level_multiplier(code, encode);
        c->factors[four][line] = te_f8e4m3_to_f32(code);
    }
}

static void measure(const te_panel_job *p, candidates *c, const lines *x, float amax)
{
    const te_quantizer *q = p->job.quantizer;
    for (int four = 0; four < 2; four++) {
        te_error_rule rule = {.multipliers = c->multipliers[four],
                              .factors = c->factors[four],
                              .amax = amax,
                              .most = 6.0f * q->scale_max,
                              .squared = q->four_over_six == TE_46_MSE};
        p->blocks->errors(c->sums[four], &rule, x->values, x->stride, x->count, x->n);
    }
}

/* Of a line with two sums: whether 4 loses less. */
static bool four_is_better(const candidates *c, int line) { return c->sums[1][line] < c->sums[0][line]; }

/* One block of several lines, whose sums are added by halves. Returns which candidate. */
static int choose_for_block(const te_panel_job *p, candidates *c, const lines *x, float block_amax, float amax, float encode)
{
    propose(c, 0, block_amax, encode);
    for (int four = 0; four < 2; four++) {
        for (int i = 1; i < x->count; i++) {
            c->multipliers[four][i] = c->multipliers[four][0];
            c->factors[four][i] = c->factors[four][0];
        }
        for (int i = x->count; i < p->job.quantizer->block_rows; i++) c->sums[four][i] = 0;
    }
    measure(p, c, x, amax);
    for (int half = p->job.quantizer->block_rows / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            for (int four = 0; four < 2; four++) c->sums[four][i] += c->sums[four][i + half];
    return four_is_better(c, 0);
}

/* What choosing needs beside values, and where the choice goes. */
typedef struct choice {
    const te_panel_job *p;
    te_panel_lane *l;
    float *multipliers;
    float amax, encode;
    candidates c;
} choice;

static void put(choice *k, int at, int line, int four)
{
    ((uint8_t *)k->l->factors)[at] = k->c.codes[four][line];
    k->multipliers[at] = k->c.multipliers[four][line];
}

/* Blocks from number `at` on, of lines that follow one another: one of several lines each, or one of each line. */
static void choose(choice *k, const lines *x, int at)
{
    int high = k->p->job.quantizer->block_rows;
    if (high > 1) {
        for (int i = 0; i < x->count; i += high, at++) {
            lines block = {x->values + i * x->stride, x->stride, x->count - i < high ? x->count - i : high, x->n};
            put(k, at, 0, choose_for_block(k->p, &k->c, &block, k->l->amaxes[at], k->amax, k->encode));
        }
        return;
    }
    for (int i = 0; i < x->count; i += TE_GROUP) {
        int count = x->count - i < TE_GROUP ? x->count - i : TE_GROUP;
        lines some = {x->values + i * x->stride, x->stride, count, x->n};
        for (int j = 0; j < count; j++) propose(&k->c, j, k->l->amaxes[at + i + j], k->encode);
        measure(k->p, &k->c, &some, k->amax);
        for (int j = 0; j < count; j++) put(k, at + i + j, j, four_is_better(&k->c, j));
    }
}

/* A strip of the side that lies as the source does: `width` values to a line. */
static void choose_along(choice *k, int rows, int cols, int width, int at)
{
    const float *values = k->l->values[0];
    if (rows == 1 && k->p->job.quantizer->block_rows == 1) {
        choose(k, &(lines){values, width, cols / width, width}, at);
        if (cols % width) choose(k, &(lines){values + cols - cols % width, width, 1, cols % width}, at + cols / width);
        return;
    }
    for (int j = 0; j < cols; j += width, at++)
        choose(k, &(lines){values + j, TE_STRIP_COLS, rows, cols - j < width ? cols - j : width}, at);
}

void te_four_over_six_factors(const te_panel_job *p, te_panel_lane *l, te_panel part, int side,
                              const te_factor_rule *rule, float *multipliers)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *s = &p->job.side[side];
    int width = side ? q->block_rows : q->block_cols;
    choice k = {.p = p, .l = l, .multipliers = multipliers, .encode = rule->encode};
    k.amax = s->amax[side == 0 ? part.row * s->amax_stride : 0];
    for (int first = 0; first < part.cols; first += TE_STRIP_COLS) { /* widths divide it */
        int cols = part.cols - first < TE_STRIP_COLS ? part.cols - first : TE_STRIP_COLS;
        for (int i = 0; i < part.rows; i++)
            p->loops->load(l->values[i], te_panel_source(p, part.row + i, part.col + first), cols);
        if (side == 0) {
            choose_along(&k, part.rows, cols, width, first / width);
            continue;
        }
        p->turn(l->turned, TE_PANEL_ROWS, l->values, TE_STRIP_COLS, cols, part.rows);
        choose(&k, &(lines){l->turned[0], TE_PANEL_ROWS, cols, part.rows}, first / width);
    }
}
