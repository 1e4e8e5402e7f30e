/* quantize_rows.c - the row-wise side of a panel: blocks run along the rows of the source. */
#include "quantize_panel.h"
#include "quantize_four.h"

#include <string.h>

/* Codes of row i of the panel, by multipliers that change every `block` elements, to where they are stored. */
static void encode_row(const te_panel_job *p, te_panel_lane *l, te_panel x, int i, int64_t block)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[0];
    const void *source = te_panel_source(p, x.row + i, x.col);
    uint8_t *row = side->data + (x.row + i) * side->row_stride, *codes = l->codes[i];
    if (q->element != TE_E2M1) {
        p->loops->encode_along[q->element](row + x.col, source, l->blocks, x.cols, block);
        return;
    }
    if (q->stochastic) {
        int64_t across = (side->cols + TE_GROUP - 1) / TE_GROUP;
        uint64_t first = (uint64_t)((x.row + i) * across + x.col / TE_GROUP);
        p->blocks->random_along(l->random[0], side->rng, first, (x.cols + TE_GROUP - 1) / TE_GROUP);
        for (int j = 0; j < x.cols; j += TE_GROUP)
            for (int k = 0; k < TE_GROUP; k++) l->multipliers[j + k] = l->blocks[j / block];
        p->loops->stochastic(codes, source, l->multipliers, l->random[0], x.cols);
    } else {
        p->loops->encode_along[TE_E2M1](codes, source, l->blocks, x.cols, block);
    }
    if (x.cols % 2) codes[x.cols] = 0;
    p->blocks->pack_along(row + x.col / 2, codes, x.cols + x.cols % 2);
}

/* Blocks that begin in row i: `rows` of them high. */
static void quantize_blocks(const te_panel_job *p, te_panel_lane *l, te_panel x, int i, int rows)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[0];
    int n = (x.cols + q->block_cols - 1) / q->block_cols;
    const void *first = te_panel_source(p, x.row + i, x.col);
    if (q->block_rows == 1) {
        p->loops->amax_along(l->amaxes, first, x.cols, q->block_cols);
    } else {
        p->loops->amax_down(l->multipliers, first, p->job.source_stride, rows, x.cols);
        p->blocks->of[0].amax_along(l->amaxes, l->multipliers, x.cols, q->block_cols);
    }
    te_factor_rule rule = te_panel_rule(p, 0, x.row + i);
    te_panel part = {x.row + i, x.col, rows, x.cols};
    if (q->four_over_six != TE_46_NONE)
        te_four_over_six_factors(p, l, part, 0, &rule, l->blocks);
    else
        p->blocks->factors(&rule, l->amaxes, n, l->factors, l->blocks);
    int64_t row = q->replicated ? x.row + i : (x.row + i) / q->block_rows;
    int64_t at = row * side->scale_row_stride + x.col / q->block_cols * side->scale_col_stride;
    te_panel_put_factors(p, side, l->factors, n, at, side->scale_col_stride, q->replicated ? rows : 1,
                         side->scale_row_stride);
    for (int k = i; k < i + rows; k++) encode_row(p, l, x, k, q->block_cols);
}

void te_panel_rowwise(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    int high = p->job.quantizer->block_rows;
    if (!high) {
        l->blocks[0] = p->job.scale;
        for (int i = 0; i < x.rows; i++) encode_row(p, l, x, i, x.cols);
        return;
    }
    for (int i = 0; i < x.rows; i += high) quantize_blocks(p, l, x, i, x.rows - i < high ? x.rows - i : high);
}
