/* quantize_rows.c - the row-wise side of a panel: blocks run along the rows of the source. */
#include "quantize_panel.h"
#include "quantize_four.h"

#include <string.h>

/* Panels come by their address: copied from parts that have just been stored they would wait for all codes on their
 * way. */

/* Where columns i, i + rows … of the panel go on the transposed side: lines that are written whole, far from each
 * other. */
static void foresee_columns(const te_panel_job *p, const te_panel *x, int i)
{
    const te_quantized_side *side = &p->job.side[1];
    int shift = p->job.quantizer->element == TE_E2M1;
    for (int j = i; j < x->cols; j += x->rows)
        te_ask_to_write(side->data + (x->col + j) * side->row_stride + (x->row >> shift), x->rows >> shift);
}

/* What row i of this panel and of the next one need. */
static void foresee(const te_panel_job *p, const te_panel *x, int i)
{
    const te_quantized_side *side = p->job.side;
    bool turned = p->job.quantizer->transposed;
    int shift = p->job.quantizer->element == TE_E2M1;
    int64_t row, col;
    if (side[1].data && turned && !p->past && !te_panel_goes_by_groups(p)) foresee_columns(p, x, i);
    if (x->next > TE_PANEL_COLS) return; /* rows follow memory */
    if (!te_panel_foresee(p, *x, i, &row, &col)) return;
    bool near = !p->rows_past && !p->kept;
    if (near) te_ask_to_write(side[0].data + row * side[0].row_stride + (col >> shift), x->cols >> shift);
    if (side[1].data && !turned)
        te_ask_to_write(side[1].data + row * side[1].col_stride + col * side[1].row_stride, x->cols);
}

/* Codes of row i of the panel, by multipliers that change every `block` elements, to where they are stored. */
static void encode_row(const te_panel_job *p, const te_panel *x, int i, const float *multipliers, int64_t block)
{
    const te_quantized_side *side = &p->job.side[0];
    const void *source = te_panel_source(p, x->row + i, x->col);
    uint8_t *to = side->data + (x->row + i) * side->row_stride + x->col;
    foresee(p, x, i);
    p->loops->encode_along[p->job.quantizer->element](to, source, multipliers, x->cols, block, p->rows_past);
}

/* Row k of `w`, whose first is row i of the panel, from element `first` on: byte by byte, then two to a byte. */
static void encode_pairs_of_row(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i,
                                const te_pair_rows *w, int k, int64_t first, int64_t block)
{
    const te_quantized_side *side = &p->job.side[0];
    const void *source = te_panel_source(p, x->row + i + k, x->col + first);
    const float *multipliers = w->multipliers + k * w->step + first / block;
    int64_t n = x->cols - first;
    uint8_t *codes = l->codes[0];
    if (w->random)
        p->loops->stochastic(codes, source, multipliers, block, w->random + k * w->random_stride + first, n);
    else
        p->loops->encode_along[TE_E2M1](codes, source, multipliers, n, block, false);
    if (n % 2) codes[n] = 0;
    p->blocks->pack_along(side->data + (x->row + i + k) * side->row_stride + (x->col + first) / 2, codes, n + n % 2);
}

/* At most TE_GROUP rows of E2M1; multipliers of a row come `step` after those of the one before. */
static void encode_pairs(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int rows,
                         const float *multipliers, int64_t step, int64_t block)
{
    const te_quantized_side *side = &p->job.side[0];
    int64_t groups = (x->cols + TE_GROUP - 1) / TE_GROUP, across = (side->cols + TE_GROUP - 1) / TE_GROUP, done = 0;
    te_pair_rows w = {.x = te_panel_source(p, x->row + i, x->col), .stride = p->job.source_stride, .rows = rows,
                      .multipliers = multipliers, .step = step, .random_stride = groups * TE_GROUP,
                      .tied = p->tied[0]};
    uint8_t *random = p->job.quantizer->stochastic ? (uint8_t *)l->random : NULL;
    w.random = random;
    for (int k = 0; k < rows; k++) {
        foresee(p, x, i + k);
        if (random)
            p->blocks->random_along(random + k * w.random_stride, side->rng,
                                    (uint64_t)((x->row + i + k) * across + x->col / TE_GROUP), groups);
    }
    uint8_t *to = side->data + (x->row + i) * side->row_stride + x->col / 2;
    if (block == TE_GROUP && p->loops->pairs_along) done = p->loops->pairs_along(to, side->row_stride, &w, x->cols);
    for (int k = 0; k < rows && done < x->cols; k++) encode_pairs_of_row(p, l, x, i, &w, k, done, block);
}

/* Where the codes of row i of the panel are made. */
static uint8_t *codes_of_row(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i)
{
    const te_quantized_side *side = &p->job.side[0];
    return p->kept ? l->band + i * p->kept : side->data + (x->row + i) * side->row_stride + x->col;
}

/* Where pieces of a row end: codes that are kept are copied every now and then, since memory takes no long row of lines
 * at once. */
static int piece_from(const te_panel_job *p, const te_panel *x, int j)
{
    enum { PIECE = 1024 };
    return p->kept && x->cols - j > PIECE ? j + PIECE : x->cols;
}

/* Columns [j, end) of what is kept of row i, to where they belong. */
static void copy_kept(const te_panel_job *p, const te_panel *x, int i, const uint8_t *codes, int j, int end)
{
    enum { LINE = 64 };
    uint8_t *to = p->job.side[0].data + (x->row + i) * p->job.side[0].row_stride + x->col;
    int      whole = (end - j) / LINE * LINE;
    if (!p->kept) return;
    p->stream(to + j, codes + j, (size_t)(whole / LINE));
    memcpy(to + j + whole, codes + j + whole, (size_t)(end - j - whole));
}

/* Codes of row i under the factor of the whole tensor, whose amax this may be the occasion to take. */
static void encode_whole_row(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i)
{
    uint8_t *to = codes_of_row(p, l, x, i);
    float amax = 0;
    foresee(p, x, i);
    for (int j = 0, end; j < x->cols; j = end) {
        end = piece_from(p, x, j);
        const void *from = te_panel_source(p, x->row + i, x->col + j);
        amax = te_amax(amax, p->loops->encode_whole[p->job.quantizer->element](to + j, from, p->job.scale, end - j,
                                                                               p->rows_past));
        copy_kept(p, x, i, to, j, end);
    }
    if (p->job.quantizer->needs_history) l->amax[0] = te_amax(l->amax[0], amax);
}

void te_panel_put_row_factors(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int n, int count)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[0];
    size_t size = q->scale == TE_SCALE_F32 ? sizeof(float) : 1;
    for (int b = 0; b < count; b++) {
        int64_t first = x->row + i + b * q->block_rows, row = q->replicated ? first : first / q->block_rows;
        int64_t left = x->row + x->rows - first, copies = q->replicated && left < q->block_rows ? left : q->block_rows;
        te_panel_put_factors(p, side, (char *)l->factors + (size_t)(b * n) * size, n,
                             row * side->scale_row_stride + x->col / q->block_cols * side->scale_col_stride,
                             side->scale_col_stride, q->replicated ? (int)copies : 1, side->scale_row_stride);
    }
}

/* Amaxes of blocks as high as x. */
static void measure_squares(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    const void *source = te_panel_source(p, x.row, x.col);
    int64_t stride = p->job.source_stride;
    int j = 0;
    if (p->loops->amax_squares)
        j = (int)p->loops->amax_squares(l->amaxes, source, stride, x.rows, x.cols, q->block_cols);
    while (j < x.cols) {
        int n = x.cols - j < TE_WIDE_COLS ? x.cols - j : TE_WIDE_COLS;
        p->loops->amax_down(l->multipliers, te_panel_source(p, x.row, x.col + j), stride, x.rows, n);
        p->blocks->of[0].amax_along(l->amaxes + j / q->block_cols, l->multipliers, n, q->block_cols);
        j += n;
    }
}

/* Where the factors of row i of bytes that lie side by side go; NULL: they are none. */
static uint8_t *factors_of_row(const te_panel_job *p, const te_panel *x, int i)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[0];
    if (q->scale == TE_SCALE_F32 || q->block_rows != 1 || side->scale_col_stride != 1) return NULL;
    return (uint8_t *)side->scale_inv + (x->row + i) * side->scale_row_stride + x->col / q->block_cols;
}

int te_panel_row_factors(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int count)
{
    const te_quantizer *q = p->job.quantizer;
    int n = (x->cols + q->block_cols - 1) / q->block_cols, left = x->rows - i;
    int rows = q->block_rows == 1 ? count : left < q->block_rows ? left : q->block_rows;
    if (q->block_rows == 1) {
        for (int k = 0; k < count; k++)
            p->loops->amax_along(l->amaxes + k * n, te_panel_source(p, x->row + i + k, x->col), x->cols, q->block_cols);
    } else {
        te_panel part = {x->row + i, x->col, rows, x->cols, x->next};
        measure_squares(p, l, part);
        if (te_panel_shares_amaxes(p)) memcpy(te_panel_squares(p, l, part), l->amaxes, (size_t)n * sizeof *l->amaxes);
    }
    te_factor_rule rule = te_panel_rule(p, 0, x->row + i);
    te_panel part = {x->row + i, x->col, rows, x->cols, x->next};
    if (q->four_over_six != TE_46_NONE)
        te_four_over_six_factors(p, l, part, 0, &rule, l->blocks);
    else if (factors_of_row(p, x, i)) /* at once: to copy what was stored in pieces would wait for codes on their way */
        for (int k = 0; k < count; k++)
            p->blocks->factors(&rule, l->amaxes + k * n, n, factors_of_row(p, x, i + k), l->blocks + k * n);
    else
        p->blocks->factors(&rule, l->amaxes, n * count, l->factors, l->blocks);
    if (q->four_over_six != TE_46_NONE || !factors_of_row(p, x, i)) te_panel_put_row_factors(p, l, x, i, n, count);
    return n;
}

/* How many rows of the panel from i on, in whole blocks, lie one behind the other as their codes do: they are one long
 * row. Those that leave nothing over are quicker by themselves. */
static int rows_in_line(const te_panel_job *p, const te_panel *x, int i)
{
    enum { TURN = 1024 };
    int block = p->job.quantizer->block_cols, most = TE_MOST_COLUMNS / x->cols, left = x->rows - i;
    int bytes = p->job.quantizer->element == TE_E2M1 ? x->cols / 2 : x->cols;
    if (x->cols % TURN == 0 || x->cols % (block < 64 ? 64 : block) != 0 || most < 2) return 1;
    if (p->job.source_stride != x->cols || p->job.side[0].row_stride != bytes) return 1;
    return most < left ? most : left;
}

/* Factors and codes of rows in line, of which the first is row i, in one visit, as far as that goes; returns the
 * elements done. */
static int encode_at_once(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int rows)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[0];
    int n = x->cols / q->block_cols;
    uint8_t *factors = factors_of_row(p, x, i);
    uint8_t *to = side->data + (x->row + i) * side->row_stride + (q->element == TE_E2M1 ? x->col / 2 : x->col);
    te_factor_rule rule = te_panel_rule(p, 0, x->row + i);
    if (rows > 1 && side->scale_row_stride != n) factors = NULL;
    for (int k = 0; k < rows; k++) foresee(p, x, i + k);
    int done = (int)p->loops->at_once[q->element](to, factors ? (void *)factors : l->factors,
                                                  te_panel_source(p, x->row + i, x->col), (int64_t)rows * x->cols,
                                                  &rule, q->block_cols, p->rows_past, p->ahead);
    if (!factors) te_panel_put_row_factors(p, l, x, i, rows > 1 ? n : done / q->block_cols, rows);
    return done;
}

/* Rows of blocks as te_panel_row_factors takes them. */
static void quantize_blocks(const te_panel_job *p, te_panel_lane *l, const te_panel *x, int i, int count)
{
    const te_quantizer *q = p->job.quantizer;
    int n = te_panel_row_factors(p, l, x, i, count), left = x->rows - i;
    int rows = q->block_rows == 1 ? count : left < q->block_rows ? left : q->block_rows;
    int step = q->block_rows == 1 ? n : 0;
    bool pairs = q->element == TE_E2M1;
    for (int k = 0; k < rows && !pairs; k++) encode_row(p, x, i + k, l->blocks + k * step, q->block_cols);
    for (int k = 0; k < rows && pairs; k += TE_GROUP)
        encode_pairs(p, l, x, i + k, rows - k < TE_GROUP ? rows - k : TE_GROUP, l->blocks + k * step,
                     step, q->block_cols);
}

/* Whether factors are powers of two, or E4M3 of E2M1, and follow from amaxes alone. */
static bool goes_at_once(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    bool powers = q->element != TE_E2M1 && (q->scale == TE_SCALE_E8M0 || (q->scale == TE_SCALE_F32 && q->power_of_two));
    bool fours = q->element == TE_E2M1 && q->scale == TE_SCALE_E4M3 && q->block_cols == TE_GROUP && !q->row_scaled &&
                 !q->stochastic && q->four_over_six == TE_46_NONE;
    return q->block_rows == 1 && (powers || fours) && p->loops->at_once[q->element];
}

void te_panel_rowwise(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    if (!q->block_rows) {
        for (int i = 0; i < x.rows; i++)
            if (q->element == TE_E2M1)
                encode_pairs(p, l, &x, i, 1, &p->job.scale, 0, x.cols);
            else
                encode_whole_row(p, l, &x, i);
        return;
    }
    bool at_once = goes_at_once(p);
    for (int i = 0, rows, alone = 0; i < x.rows && at_once; i += rows) {
        rows = i < alone ? 1 : rows_in_line(p, &x, i);
        int done = encode_at_once(p, l, &x, i, rows);
        if (done == rows * x.cols) continue;
        if (rows > 1) { /* once more, one by one */
            alone = i + rows, rows = 0;
            continue;
        }
        te_panel rest = {x.row + i, x.col + done, 1, x.cols - done, x.next};
        quantize_blocks(p, l, &rest, 0, 1);
    }
    if (at_once) return;
    bool together = q->block_rows == 1 && !q->row_scaled && q->four_over_six == TE_46_NONE;
    int rows = TE_WIDE_COLS / x.cols, most = TE_PANEL_COLS / ((x.cols + q->block_cols - 1) / q->block_cols);
    int few = rows < 1 ? 1 : rows < most ? rows : most; /* are in the first cache when they are read again */
    int step = together ? few : q->block_rows;
    for (int i = 0; i < x.rows; i += step) {
        int left = x.rows - i;
        quantize_blocks(p, l, &x, i, !together ? 1 : left < step ? left : step);
    }
}
