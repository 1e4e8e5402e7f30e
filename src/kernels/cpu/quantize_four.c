/* quantize_four.c - the smaller error of two factors, block by block.
 *
 * A line is the part of a block that lies in one row of the stored side; its errors are added from left to right. Both
 * candidates are tried on sixteen lines at a time: those of one block that is sixteen rows high, which lie side by
 * side on the way, or of sixteen blocks of one row.
 *
 * Of blocks of 16 x 16 errors are added in any order first, for both sides at once and as they are cheapest: distances
 * of products from the nearest number. Only where those sums are as close as rounding could bring them are the errors
 * added as they should be.
 */
#include "quantize_four.h"

#include <math.h>
#include <string.h>

enum { LINES = TE_PANEL_ROWS };

/* Lines of values as the side sees them. */
typedef struct lines {
    /* value j of line i: values[i * stride + j] or across[j * across_stride + i]; NULL: not there */
    const float *values, *across;
    int64_t stride, across_stride;
    int count, n;
} lines;

/* Whether a block of so many lines is tried on all of them side by side. */
static bool side_by_side(const te_panel_job *p, int count)
{
    return p->job.quantizer->block_rows == TE_GROUP && count == TE_GROUP;
}

/* Candidates of the lines: [0] brings the block's largest value to 6, [1] to 4. */
typedef struct candidates {
    uint8_t codes[2][LINES];
    float multipliers[2][LINES], factors[2][LINES], sums[2][LINES];
} candidates;

static void propose(const te_panel_job *p, candidates *c, const float *amax, int n, float encode)
{
    for (int four = 0; four < 2; four++)
        p->blocks->candidates(encode, four ? 1.5f : 1.0f, amax, n, c->codes[four], c->multipliers[four],
                              c->factors[four]);
}

static void make_rules(const te_panel_job *p, const candidates *c, float amax, te_error_rule rules[2])
{
    const te_quantizer *q = p->job.quantizer;
    for (int four = 0; four < 2; four++)
        rules[four] = (te_error_rule){.multipliers = c->multipliers[four],
                                      .factors = c->factors[four],
                                      .amax = amax,
                                      .most = 6.0f * q->scale_max,
                                      .squared = q->four_over_six == TE_46_MSE};
}

static void measure(const te_panel_job *p, candidates *c, const lines *x, float amax)
{
    te_error_rule rules[2];
    make_rules(p, c, amax, rules);
    if (side_by_side(p, x->count)) {
        float sums[2][TE_GROUP];
        p->blocks->errors_across(sums, rules, x->across, x->across_stride, x->n);
        for (int four = 0; four < 2; four++) memcpy(c->sums[four], sums[four], sizeof sums[four]);
        return;
    }
    for (int four = 0; four < 2; four++)
        p->blocks->errors(c->sums[four], &rules[four], x->values, x->stride, x->count, x->n);
}

/* Of a line with two sums: whether 4 loses less. */
static bool four_is_better(const candidates *c, int line) { return c->sums[1][line] < c->sums[0][line]; }

/* One block of several lines, whose sums are added by halves. Returns which candidate. */
static int choose_for_block(const te_panel_job *p, candidates *c, const lines *x, float block_amax,
                            float amax, float encode)
{
    propose(p, c, &block_amax, 1, encode);
    for (int four = 0; four < 2 && !side_by_side(p, x->count); four++) {
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
    int first; /* block of squares that are chosen together */
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
            lines block = *x;
            block.values = x->values + i * x->stride;
            block.across = x->across + i;
            block.count = x->count - i < high ? x->count - i : high;
            put(k, at, 0, choose_for_block(k->p, &k->c, &block, k->l->amaxes[at], k->amax, k->encode));
        }
        return;
    }
    for (int i = 0; i < x->count; i += TE_GROUP) {
        int count = x->count - i < TE_GROUP ? x->count - i : TE_GROUP;
        lines some = {.values = x->values + i * x->stride, .stride = x->stride, .count = count, .n = x->n};
        propose(k->p, &k->c, k->l->amaxes + at + i, count, k->encode);
        measure(k->p, &k->c, &some, k->amax);
        for (int j = 0; j < count; j++) put(k, at + i + j, j, four_is_better(&k->c, j));
    }
}

/* A strip of the side that lies as the source does: `width` values to a line. */
static void choose_along(choice *k, int rows, int cols, int width, int at)
{
    const te_panel_job *p = k->p;
    te_panel_lane *l = k->l;
    lines x = {.values = l->values[0], .across = l->turned[0], .stride = TE_STRIP_COLS, .across_stride = TE_PANEL_ROWS};
    if (rows == 1 && p->job.quantizer->block_rows == 1) {
        x = (lines){.values = l->values[0], .stride = width, .count = cols / width, .n = width};
        choose(k, &x, at);
        x = (lines){.values = l->values[0] + cols - cols % width, .stride = width, .count = 1, .n = cols % width};
        if (x.n) choose(k, &x, at + cols / width);
        return;
    }
    if (side_by_side(p, rows)) p->turn(l->turned, TE_PANEL_ROWS, l->values, TE_STRIP_COLS, cols, rows);
    x.count = rows;
    for (int j = 0; j < cols; j += width, at++, x.values += width, x.across += width * TE_PANEL_ROWS) {
        x.n = cols - j < width ? cols - j : width;
        choose(k, &x, at);
    }
}

/* A strip of the transposed side: every column is a line. */
static void choose_down(choice *k, int rows, int cols, int at)
{
    const te_panel_job *p = k->p;
    te_panel_lane *l = k->l;
    lines x = {.values = l->turned[0], .across = l->values[0], .stride = TE_PANEL_ROWS, .across_stride = TE_STRIP_COLS,
               .count = cols, .n = rows};
    bool turned = !side_by_side(p, TE_GROUP) || cols % TE_GROUP != 0;
    if (turned) p->turn(l->turned, TE_PANEL_ROWS, l->values, TE_STRIP_COLS, cols, rows);
    choose(k, &x, at);
}

/* A strip of `part` from column `first` on. */
static void choose_strip(choice *k, te_panel part, int side, int first, int cols)
{
    const te_panel_job *p = k->p;
    const te_quantizer *q = p->job.quantizer;
    int width = side ? q->block_rows : q->block_cols;
    for (int i = 0; i < part.rows; i++)
        p->loops->load(k->l->values[i], te_panel_source(p, part.row + i, part.col + first), cols);
    if (side == 0)
        choose_along(k, part.rows, cols, width, k->first + first / width);
    else
        choose_down(k, part.rows, cols, k->first + first / width);
}

/* Block b by sums that may be off by 2^-9 of its largest error under either factor, or 2^-8 if squared; -1: that is not
 * enough. Where a factor is not near what it should be, or numbers are very large or small, distances of products say
 * nothing about errors. */
static int decide(const choice *k, const float *sums[2], int b)
{
    const te_quantizer *q = k->p->job.quantizer;
    bool squared = q->four_over_six == TE_46_MSE;
    float amax = k->l->amaxes[k->first + b], difference = sums[1][b] - sums[0][b];
    float margin = squared ? amax * amax * 0x1p-8f : amax * 0x1p-9f;
    if (!(amax > 0x1p-40f && k->amax < 0x1p40f)) return -1;
    for (int four = 0; four < 2; four++) {
        float multiplier = k->c.multipliers[four][b], unit = k->c.factors[four][b] * k->amax / (6.0f * q->scale_max);
        if (!(fabsf(multiplier * unit - 1) < 0x1p-20f) || !(multiplier * amax < 7.5f)) return -1;
    }
    return difference > margin ? 0 : difference < -margin ? 1 : -1;
}

/* Choices for a row of blocks of 16 x 16, or -1, to chosen. */
static void choose_about(choice *k, te_panel part, int8_t *chosen)
{
    const te_panel_job *p = k->p;
    float sums[2][LINES];
    te_error_rule rules[2];
    int n = part.rows == TE_GROUP && p->loops->errors_about ? part.cols / (2 * TE_GROUP) * 2 : 0;
    make_rules(p, &k->c, k->amax, rules);
    if (n)
        p->loops->errors_about((float *[2]){sums[0], sums[1]}, rules, te_panel_source(p, part.row, part.col),
                               p->job.source_stride, n);
    for (int b = 0; b * TE_GROUP < part.cols; b++)
        chosen[b] = (int8_t)(b < n ? decide(k, (const float *[2]){sums[0], sums[1]}, b) : -1);
}

/* Blocks of 16 x 16. Where side 0 has been there the same sums are for side 1. */
static void choose_squares(choice *k, te_panel part, int side)
{
    const te_panel_job *p = k->p;
    int8_t *chosen = k->l->chosen[part.row % TE_PANEL_ROWS / TE_GROUP] + part.col % TE_MOST_COLUMNS / TE_GROUP;
    int blocks = (part.cols + TE_GROUP - 1) / TE_GROUP;
    propose(p, &k->c, k->l->amaxes + k->first, blocks, k->encode);
    if (side == 0 || !p->job.side[0].data || p->job.quantizer->row_scaled) choose_about(k, part, chosen);
    for (int b = 0; b < blocks; b++)
        if (chosen[b] >= 0) put(k, k->first + b, b, chosen[b]);
    for (int b = 0; b < blocks; b++) {
        int left = part.cols - b * TE_GROUP;
        if (chosen[b] < 0) choose_strip(k, part, side, b * TE_GROUP, left < TE_GROUP ? left : TE_GROUP);
    }
}

void te_four_over_six_factors(const te_panel_job *p, te_panel_lane *l, te_panel part, int side,
                              const te_factor_rule *rule, float *multipliers)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *s = &p->job.side[side];
    choice k = {.p = p, .l = l, .multipliers = multipliers, .encode = rule->encode};
    k.amax = s->amax[side == 0 ? part.row * s->amax_stride : 0];
    if (q->block_rows == TE_GROUP && q->block_cols == TE_GROUP) {
        te_panel piece = part;
        for (int at = 0; at < part.cols; at += LINES * TE_GROUP) {
            k.first = at / TE_GROUP;
            piece.col = part.col + at;
            piece.cols = part.cols - at < LINES * TE_GROUP ? part.cols - at : LINES * TE_GROUP;
            choose_squares(&k, piece, side);
        }
        return;
    }
    for (int first = 0; first < part.cols; first += TE_STRIP_COLS) /* widths divide it */
        choose_strip(&k, part, side, first, part.cols - first < TE_STRIP_COLS ? part.cols - first : TE_STRIP_COLS);
}
