/* quantize.c - stored copies as operands. */
#include "quantize.h"

te_view te_quantized_view(const te_quantizer *q, const te_quantized_side *s, bool transposed, te_quant *quant)
{
    static const te_dtype bytes[] = {TE_F8E4M3, TE_F8E5M2, TE_U8};
    int down = transposed, along = !transposed; /* dimensions of the view that the side's rows and columns are */
    te_view v = {.data = s->data, .dtype = bytes[q->element], .ndim = 2, .quant = quant};
    v.shape[down] = s->rows;
    v.shape[along] = s->cols;
    v.stride[down] = q->element == TE_E2M1 ? 2 * s->row_stride : s->row_stride;
    v.stride[along] = s->col_stride;
    *quant = (te_quant){.element = q->element,
                        .scale = q->scale,
                        .scale_inv = s->scale_inv,
                        .power_of_two = q->power_of_two,
                        .amax = q->scale == TE_SCALE_E4M3 ? s->amax : NULL,
                        .scale_max = q->scale_max};
    quant->block[down] = q->replicated && q->block_rows ? 1 : q->block_rows;
    quant->block[along] = q->block_cols;
    quant->scale_stride[down] = s->scale_row_stride;
    quant->scale_stride[along] = s->scale_col_stride;
    quant->amax_stride[down] = s->amax_stride;
    return v;
}
