/* gemm_few.c - products of few rows by a kernel of our own (kernels/product_few.cu): in generation reading the weights
 * is all the work. Of 16 million of them in bfloat16 it takes 15 us on an H100, 80% of the bandwidth, and cuBLASLt 20
 * to 23; of 100 million and more cuBLASLt is a few percent faster and keeps them. It has no products of FP8 with fewer
 * than 16 rows, which would be copied, padded and copied back. */
#include "gemm.h"

#include "kernels/args.h"

enum { MOST_WEIGHTS = 1 << 26 };

static bool aligned(int64_t bytes) { return bytes % 16 == 0; }

static bool by_rows(const te_cuda_product *p)
{
    int64_t size = (int64_t)te_dtype_size((te_dtype)p->input_a);
    bool lines = p->transposed_a && p->align_a >= 16 && aligned(p->ld_a * size) && aligned(p->inner * size);
    return lines && !p->transposed_b && p->align_b >= 16 && (p->columns == 1 || aligned(p->ld_b * size));
}

bool te_cuda_few_takes(te_exec *exec, const te_cuda_product *p)
{
    bool narrow_elements = p->input_a == p->input_b && (p->input_a == TE_BF16 || p->input_a == TE_F16);
    bool result = p->output == p->input_a || p->output == TE_F32;
    bool size = p->batch == 1 && p->columns <= TE_FEW_ROWS && p->inner > 0 && p->inner <= MOST_WEIGHTS / p->rows;
    return te_cuda(exec)->capability >= 80 && narrow_elements && result && size && !p->accumulate &&
           !p->device_scales && !p->narrow && by_rows(p);
}

te_status te_cuda_few_run(te_exec *exec, const te_cuda_product *p, const te_cuda_product_data *data)
{
    const te_few_args args = {.w = data->a, .x = data->b, .bias = data->bias, .y = data->d,
                              .m = p->columns, .n = p->rows, .k = p->inner,
                              .w_line = p->ld_a, .x_line = p->ld_b, .y_line = p->ld_d, .alpha = data->alpha};
    return te_cuda_product_few(exec, &args, (te_dtype[3]){p->input_a, p->input_b, p->output});
}

/* --- FP8 ---------------------------------------------------------------------------------------------------------- */

static te_dtype dtype_of(const te_quant *q) { return q->element == TE_E4M3 ? TE_F8E4M3 : TE_F8E5M2; }

/* A factor of the whole tensor alone. */
static bool is_fp8(const te_quant *q)
{
    return q && q->element != TE_E2M1 && q->scale == TE_SCALE_F32 && !q->block[0] && !q->block[1] && !q->amax;
}

/* Whether lines, `stride` bytes apart, are read by units of 16 bytes. */
static bool in_units(const te_view *v, int sum, int64_t stride, int64_t lines)
{
    return v->stride[sum] == 1 && aligned(v->shape[sum]) && (lines == 1 || aligned(stride)) &&
           (uintptr_t)v->data % 16 == 0;
}

bool te_cuda_few_takes_fp8(te_exec *exec, const te_gemm *g)
{
    int m = g->c.ndim - 2, n = m + 1;
    for (int i = 0; i < m; i++)
        if (g->c.shape[i] != 1) return false;
    int64_t rows = g->c.shape[m], columns = g->c.shape[n];
    bool bias = !te_view_present(&g->bias) ||
                (g->bias.dtype == g->c.dtype && (g->bias.stride[0] == 1 || columns == 1));
    bool result = g->c.dtype == TE_BF16 || g->c.dtype == TE_F16 || g->c.dtype == TE_F32;
    return te_cuda(exec)->capability >= 89 && is_fp8(g->a.quant) && is_fp8(g->b.quant) && rows > 0 &&
           rows <= TE_FEW_ROWS && columns > 0 && g->a.shape[n] > 0 && g->a.shape[n] <= TE_FEW_LONGEST &&
           g->beta == 0 && bias && result && (g->c.stride[n] == 1 || columns == 1) &&
           in_units(&g->a, n, g->a.stride[m], rows) && in_units(&g->b, m, g->b.stride[n], columns);
}

te_status te_cuda_few_run_fp8(te_exec *exec, const te_gemm *g)
{
    int m = g->c.ndim - 2, n = m + 1;
    const te_quant *x = g->a.quant, *w = g->b.quant;
    const te_few_args args = {.w = g->b.data, .x = g->a.data, .bias = g->bias.data, .y = g->c.data,
                              .m = g->c.shape[m], .n = g->c.shape[n], .k = g->a.shape[n],
                              .w_line = g->b.stride[n], .x_line = g->a.stride[m], .y_line = g->c.stride[m],
                              .alpha = g->alpha, .factor = {w->scale_inv, x->scale_inv}};
    return te_cuda_product_few(exec, &args, (te_dtype[3]){dtype_of(w), dtype_of(x), g->c.dtype});
}
