/* quantizer.c - checks and shapes of quantizers. */
#include "quantizer.h"

const char *const te_element_names[] = {"float8_e4m3", "float8_e5m2", "float4_e2m1", NULL};
const char *const te_scale_names[] = {"float32", "e8m0", "float8_e4m3", NULL};
const char *const te_four_over_six_names[] = {"none", "mae", "mse", NULL};

static te_status check_blocks(te_context *ctx, const te_quantizer *q)
{
    int rows = q->block_rows, cols = q->block_cols;
    bool whole = rows == 0 && cols == 0;
    if (!whole && !(cols > 0 && 128 % cols == 0 && (rows == 1 || rows == cols)))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "block_rows, block_cols: %d x %d; blocks are 1 x n or n x n with n dividing 128, or 0 x 0 for "
                       "the whole tensor",
                       rows, cols);
    if (whole && q->scale != TE_SCALE_F32)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "scale: %s factors need blocks", te_scale_names[q->scale]);
    if (q->element == TE_E2M1 && cols % 2)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "block_cols: %d; two float4 elements share a byte", cols);
    if (q->needs_history && !whole)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "needs_history: a given factor is one for the whole tensor, and blocks are %d x %d", rows, cols);
    return TE_OK;
}

te_status te_quantizer_check(te_context *ctx, const te_quantizer *q)
{
    te_status status = check_blocks(ctx, q);
    if (status != TE_OK) return status;
    bool two_levels = q->scale == TE_SCALE_E4M3;
    if (two_levels && q->element != TE_E2M1)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "scale: float8_e4m3 factors are for float4_e2m1 elements, not %s",
                       te_element_names[q->element]);
    if (two_levels && !(q->scale_max == 448.0f || q->scale_max == 256.0f))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "scale_max: %g; use 448 or 256", (double)q->scale_max);
    if (!two_levels && q->scale_max != 448.0f && q->scale_max != 0.0f)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "scale_max: %g; %s factors have no such limit, float8_e4m3 factors have",
                       (double)q->scale_max, te_scale_names[q->scale]);
    if (q->replicated && !q->block_rows)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "replicated: a factor per block and row needs blocks");
    if (!(q->epsilon >= 0.0f && q->epsilon <= TE_FLT_MAX))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "epsilon: %g is no size", (double)q->epsilon);
    if ((q->power_of_two || q->epsilon > 0) && q->scale != TE_SCALE_F32)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "power_of_two, epsilon: these act on float32 factors, not on %s",
                       te_scale_names[q->scale]);
    if (q->row_scaled && (!two_levels || q->block_rows != 1))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "row_scaled: an amax per row goes with float8_e4m3 factors of 1 x n blocks");
    if (q->stochastic && (q->element != TE_E2M1 || q->block_cols % 16 || !q->block_cols))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "stochastic: for float4_e2m1 elements in blocks of a multiple of 16");
    if (q->hadamard && (!q->has_columnwise || !q->transposed))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "hadamard: acts on a column-wise copy that is stored transposed");
    if (q->hadamard && !q->block_rows)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "hadamard: needs blocks; one factor cannot fit both a tensor and what it is transformed to");
    if (q->four_over_six != TE_46_NONE && (!two_levels || q->hadamard || q->stochastic))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "four_over_six: goes with float8_e4m3 factors, without hadamard and stochastic");
    if (q->has_columnwise && !q->transposed && (q->element == TE_E2M1 || !q->block_rows))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "transposed: a column-wise copy of %s must be",
                       q->block_rows ? "float4_e2m1 elements" : "a tensor with one factor");
    return TE_OK;
}

/* Field by field, since structures have gaps. */
bool te_quantizer_same(const te_quantizer *a, const te_quantizer *b)
{
    return a->element == b->element && a->scale == b->scale && a->block_rows == b->block_rows &&
           a->block_cols == b->block_cols && a->needs_history == b->needs_history &&
           a->has_columnwise == b->has_columnwise && a->transposed == b->transposed && a->replicated == b->replicated &&
           a->power_of_two == b->power_of_two && a->epsilon == b->epsilon && a->row_scaled == b->row_scaled &&
           a->hadamard == b->hadamard && a->stochastic == b->stochastic && a->four_over_six == b->four_over_six &&
           a->scale_max == b->scale_max;
}

static void layout_scales(const te_quantizer *q, bool swapped, te_quantized_layout *l)
{
    if (!q->block_rows) {
        l->scale_ndim = 1;
        l->scale_shape[0] = 1;
        return;
    }
    int block_rows = q->replicated ? 1 : q->block_rows;
    int64_t down = (l->rows + block_rows - 1) / block_rows, along = (l->cols + q->block_cols - 1) / q->block_cols;
    l->scale_ndim = 2;
    l->scale_shape[swapped] = down;
    l->scale_shape[!swapped] = along;
    l->scale_row_stride = swapped ? 1 : along;
    l->scale_col_stride = swapped ? down : 1;
}

te_quantized_layout te_quantizer_layout(const te_quantizer *q, int side, int64_t rows, int64_t cols)
{
    static const te_dtype data[] = {TE_F8E4M3, TE_F8E5M2, TE_U8}, scales[] = {TE_F32, TE_U8, TE_F8E4M3};
    bool swapped = side == 1 && !q->transposed, pairs = q->element == TE_E2M1; /* swapped: stored as the source is */
    te_quantized_layout l = {.rows = side ? cols : rows,
                             .cols = side ? rows : cols,
                             .data_dtype = data[q->element],
                             .scale_dtype = scales[q->scale]};
    if (side == 1 && q->hadamard) l.cols = (l.cols + 15) / 16 * 16;
    l.data_rows = swapped ? rows : l.rows;
    l.data_bytes = swapped ? cols : pairs ? (l.cols + 1) / 2 : l.cols;
    l.row_stride = swapped ? 1 : l.data_bytes;
    l.col_stride = swapped ? l.data_bytes : 1;
    layout_scales(q, swapped, &l);
    bool has_amax = q->scale == TE_SCALE_E4M3 || !q->block_rows;
    l.amaxes = !has_amax ? -1 : side == 0 && q->row_scaled ? rows : 1;
    return l;
}
