/* gemm.c - matrix products on cuBLASLt.
 *
 * cuBLASLt is column-major, so a row-major c is its transpose there: c^T = b^T a^T, and the bias runs along its rows as
 * the epilogues want it. A c whose unit stride is in the other dimension is taken as it is. Operands with a unit stride
 * in either dimension are only described; others are copied. What no epilogue does (a bias of float64 or of a
 * column-major c, any other c) goes through a dense product and one pass over it, and so does what is measured to be
 * faster that way (gemm_end.c).
 */
#include "gemm.h"

#include "../check.h"
#include "../dtype.h"
#include "../environment.h"

#include <stdio.h>
#include <stdlib.h>

/* Kernels of the library count batches in a dimension of the grid that ends at 65535. */
enum { CANDIDATES = 8, MOST_CANDIDATES = 10000, MOST_BATCHES = 1 << 15 };

/* --- dense copies ------------------------------------------------------------------------------------------------- */

te_view te_cuda_gemm_room(te_exec *exec, const te_view *v, te_dtype dtype)
{
    te_view d = *v;
    int64_t step = 1;
    d.dtype = dtype;
    for (int i = v->ndim - 1; i >= 0; i--) {
        bool repeats = i < v->ndim - 2 && v->stride[i] == 0;
        d.stride[i] = repeats ? 0 : step;
        if (!repeats) step *= v->shape[i];
    }
    d.data = exec->scratch(exec, (size_t)step * te_dtype_size(dtype));
    return d;
}

static te_status copy_once(te_exec *exec, const te_view *dst, const te_view *src)
{
    te_view d = *dst, s = *src;
    for (int i = 0; i < d.ndim; i++)
        if (d.stride[i] == 0 && i < d.ndim - 2) d.shape[i] = s.shape[i] = 1;
    return te_cuda_copy(exec, &d, &s);
}

te_view te_cuda_gemm_dense(te_exec *exec, const te_view *v, te_dtype dtype)
{
    te_view dense = te_cuda_gemm_room(exec, v, dtype);
    if (dense.data && copy_once(exec, &dense, v) != TE_OK) {
        exec->scratch_free(exec, dense.data);
        dense.data = NULL;
    }
    return dense;
}

/* Whether the matrix in the last two dimensions can be described: a unit stride and room between its lines. */
static bool describable(const te_view *v)
{
    int64_t rows = v->shape[v->ndim - 2], columns = v->shape[v->ndim - 1], rs = v->stride[v->ndim - 2],
            cs = v->stride[v->ndim - 1];
    bool by_rows = (cs == 1 || columns == 1) && (rs >= columns || rows == 1);
    bool by_columns = (rs == 1 || rows == 1) && (cs >= rows || columns == 1);
    return by_rows || by_columns;
}

/* The operand itself, or a dense copy whose memory is returned in *lent. */
static te_status describable_operand(te_exec *exec, te_view *v, void **lent)
{
    *lent = NULL;
    if (describable(v)) return TE_OK;
    *v = te_cuda_gemm_dense(exec, v, v->dtype);
    *lent = v->data;
    return v->data ? TE_OK : TE_ERROR_MEMORY;
}

/* --- the column-major form ---------------------------------------------------------------------------------------- */

/* As a column-major matrix of rows x columns: the distance of its lines, and whether they are its rows. */
static int64_t line_distance(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                             int32_t *transposed)
{
    bool by_columns = (row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1);
    *transposed = !by_columns;
    int64_t length = by_columns ? rows : columns, distance = by_columns ? column_stride : row_stride;
    int64_t lines = by_columns ? columns : rows;
    return lines == 1 || distance < length ? (length > 0 ? length : 1) : distance;
}

static int32_t alignment(const void *ptr)
{
    uintptr_t low = (uintptr_t)ptr & (~(uintptr_t)ptr + 1);
    return low == 0 || low > 256 ? 256 : (int32_t)low;
}

/* Whether c^T (true) or c itself is cuBLASLt's result. */
static bool row_major(const te_view *c)
{
    int64_t columns = c->shape[c->ndim - 1];
    return (c->stride[c->ndim - 1] == 1 || columns == 1) &&
           (c->stride[c->ndim - 2] >= columns || c->shape[c->ndim - 2] == 1);
}

static void describe_matrices(te_cuda_product *p, const te_gemm *g)
{
    int m = g->c.ndim - 2, n = m + 1;
    const te_view *a = &g->a, *b = &g->b, *c = &g->c;
    int32_t ignored;
    p->inner = a->shape[n];
    if (row_major(c)) {
        p->rows = c->shape[n];
        p->columns = c->shape[m];
        p->ld_a = line_distance(p->rows, p->inner, b->stride[n], b->stride[m], &p->transposed_a);
        p->ld_b = line_distance(p->inner, p->columns, a->stride[n], a->stride[m], &p->transposed_b);
        p->ld_d = line_distance(p->rows, p->columns, 1, c->stride[m], &ignored);
    } else {
        p->rows = c->shape[m];
        p->columns = c->shape[n];
        p->ld_a = line_distance(p->rows, p->inner, a->stride[m], a->stride[n], &p->transposed_a);
        p->ld_b = line_distance(p->inner, p->columns, b->stride[m], b->stride[n], &p->transposed_b);
        p->ld_d = line_distance(p->rows, p->columns, c->stride[m], c->stride[n], &ignored);
    }
}

/* --- results ------------------------------------------------------------------------------------------------------ */

/* Whether lines begin where products of bytes want them. */
static bool aligned_lines(const te_view *c)
{
    int64_t lines = row_major(c) ? c->stride[c->ndim - 2] : c->stride[c->ndim - 1];
    return lines * (int64_t)te_dtype_size(c->dtype) % 16 == 0 && (uintptr_t)c->data % 16 == 0;
}

/* Why cuBLASLt cannot write c as it is asked for; NULL when it can. */
static const char *decline_direct(const te_gemm *g, bool bytes)
{
    int m = g->c.ndim - 2;
    bool bias = te_view_present(&g->bias);
    if (g->a.shape[m + 1] == 0) return "the sum is empty";
    if (!bytes && g->c.dtype != g->a.dtype && g->c.dtype != TE_F32) return "the result is narrower than the operands";
    if (bytes && !aligned_lines(&g->c)) return "lines of the result do not begin at multiples of 16 bytes";
    if (bytes && bias && g->c.dtype == TE_F32) return "a float32 result of bytes has a bias";
    if (!describable(&g->c)) return "the result has no unit stride";
    if (bias && !row_major(&g->c)) return "the result is column-major and has a bias";
    if (bias && g->c.dtype == TE_F64) return "float64 with a bias";
    return NULL;
}

/* --- batches ------------------------------------------------------------------------------------------------------ */

/* Batch dimensions, joined where all operands step evenly from one into the next; outermost first. */
typedef struct batches {
    int n;
    int64_t extent[TE_MAX_DIMS], step[3][TE_MAX_DIMS]; /* of a, b, c */
} batches;

static batches batches_of(const te_gemm *g)
{
    batches r = {.n = 0};
    const te_view *views[3] = {&g->a, &g->b, &g->c};
    for (int i = 0; i < g->c.ndim - 2; i++) {
        if (g->c.shape[i] == 1) continue;
        bool joins = r.n > 0;
        for (int k = 0; k < 3 && joins; k++) joins = r.step[k][r.n - 1] == g->c.shape[i] * views[k]->stride[i];
        if (!joins) r.extent[r.n++] = 1;
        r.extent[r.n - 1] *= g->c.shape[i];
        for (int k = 0; k < 3; k++) r.step[k][r.n - 1] = views[k]->stride[i];
    }
    return r;
}

/* Products with one b whose rows follow one another are one tall product. */
static void join_rows(batches *r, te_gemm *g)
{
    int m = g->c.ndim - 2;
    while (r->n > 0) {
        int last = r->n - 1;
        if (r->step[1][last] != 0 || r->step[0][last] != g->c.shape[m] * g->a.stride[m] ||
            r->step[2][last] != g->c.shape[m] * g->c.stride[m])
            return;
        te_view a = g->a, c = g->c;
        a.shape[m] *= r->extent[last];
        c.shape[m] *= r->extent[last];
        if (!describable(&a) || !describable(&c) || row_major(&c) != row_major(&g->c))
            return; /* one row had more freedom */
        g->a = a;
        g->c = c;
        r->n--;
    }
}

static void describe_narrow(te_cuda_product *p, const te_gemm *g, const te_cuda_narrow *narrow)
{
    int first = row_major(&g->c) ? 1 : 0;
    p->narrow = 1;
    p->mode_a = narrow->mode[first];
    p->mode_b = narrow->mode[1 - first];
    p->fast = g->fast_sums;
}

/* The product of the last batch dimension, which is cuBLASLt's; addresses are looked at later. */
static te_cuda_product describe(te_exec *exec, const te_gemm *g, const batches *r, bool scales,
                                const te_cuda_narrow *narrow)
{
    bool swap = row_major(&g->c);
    int last = r->n - 1, first = swap ? 1 : 0;
    te_cuda_product p;
    memset(&p, 0, sizeof p);
    describe_matrices(&p, g);
    p.batch = r->n ? r->extent[last] : 1;
    p.step_a = r->n ? r->step[first][last] : 0;
    p.step_b = r->n ? r->step[1 - first][last] : 0;
    p.step_d = r->n ? r->step[2][last] : 0;
    p.input_a = swap ? g->b.dtype : g->a.dtype;
    p.input_b = swap ? g->a.dtype : g->b.dtype;
    p.output = g->c.dtype;
    p.accumulate = g->beta != 0;
    p.tf32 = exec->tf32 && g->a.dtype == TE_F32;
    p.device_scales = scales;
    if (narrow) describe_narrow(&p, g, narrow);
    return p;
}

static void align(te_cuda_product *p, const te_cuda_product_data *data)
{
    p->align_a = alignment(data->a);
    p->align_b = alignment(data->b);
    p->align_d = alignment(data->d);
    p->align_bias = data->bias ? alignment(data->bias) : 0;
}

bool te_cuda_gemm_single(te_exec *exec, const te_gemm *gemm, const void *bias, bool scales,
                         const te_cuda_narrow *narrow, te_cuda_product *p)
{
    te_gemm g = *gemm;
    batches r = batches_of(&g);
    join_rows(&r, &g);
    *p = describe(exec, &g, &r, scales, narrow);
    bool swap = row_major(&g.c);
    align(p, &(te_cuda_product_data){.a = swap ? g.b.data : g.a.data, .b = swap ? g.a.data : g.b.data, .d = g.c.data,
                                     .bias = bias});
    return r.n <= 1;
}

/* The product of the last batch dimension, in pieces where that is long. */
static te_status run_batch(te_exec *exec, te_cuda_product p, const te_cuda_product_data *whole)
{
    int64_t in_a = (int64_t)te_dtype_size((te_dtype)p.input_a), in_b = (int64_t)te_dtype_size((te_dtype)p.input_b),
            out = (int64_t)te_dtype_size((te_dtype)p.output), batch = p.batch;
    te_status status = TE_OK;
    for (int64_t first = 0; first < batch && status == TE_OK; first += MOST_BATCHES) {
        te_cuda_product_data data = *whole;
        p.batch = batch - first < MOST_BATCHES ? batch - first : MOST_BATCHES;
        data.a = (const char *)whole->a + first * p.step_a * in_a;
        data.b = (const char *)whole->b + first * p.step_b * in_b;
        data.d = (char *)whole->d + first * p.step_d * out;
        align(&p, &data);
        status = te_cuda_product_run(exec, &p, &data);
    }
    return status;
}

/* Batch dimensions before the last one are walked here. */
te_status te_cuda_gemm_batches(te_exec *exec, const te_gemm *gemm, const void *bias, const float *scales,
                               const te_cuda_narrow *narrow)
{
    te_gemm g = *gemm;
    batches r = batches_of(&g);
    join_rows(&r, &g);
    bool swap = row_major(&g.c);
    int last = r.n - 1, first = swap ? 1 : 0;
    te_cuda_product p = describe(exec, &g, &r, scales != NULL, narrow);
    int64_t products = 1;
    for (int i = 0; i < last; i++) products *= r.extent[i];
    te_status status = TE_OK;
    for (int64_t k = 0; k < products && status == TE_OK; k++) {
        int64_t at[3] = {0}, rest = k;
        for (int i = last - 1; i >= 0; i--) {
            for (int o = 0; o < 3; o++) at[o] += rest % r.extent[i] * r.step[o][i];
            rest /= r.extent[i];
        }
        int64_t in = (int64_t)te_dtype_size(g.a.dtype), out = (int64_t)te_dtype_size(g.c.dtype);
        char *a = (char *)g.a.data + at[0] * in, *b = (char *)g.b.data + at[1] * in,
             *c = (char *)g.c.data + at[2] * out;
        te_cuda_product_data data = {
            .a = swap ? b : a, .b = swap ? a : b, .d = c, .bias = bias, .alpha = g.alpha,
            .device_alpha = scales, .device_beta = scales ? scales + (g.beta != 0 ? 1 : 2) : NULL};
        if (narrow) {
            data.factors_a = narrow->factors[first];
            data.factors_b = narrow->factors[1 - first];
        }
        status = run_batch(exec, p, &data);
    }
    return status;
}

te_status te_cuda_gemm(te_exec *exec, const te_gemm *gemm)
{
    te_status status = te_cuda_enter(exec); /* once for all that a product consists of */
    if (status != TE_OK) return status;
    if (gemm->a.quant || gemm->b.quant) return te_cuda_gemm_quantized(exec, gemm);
    return te_cuda_gemm_scaled(exec, gemm, NULL, NULL);
}

te_status te_cuda_gemm_scaled(te_exec *exec, const te_gemm *gemm, const float *scales, const te_cuda_narrow *narrow)
{
    te_gemm g = *gemm;
    void *lent_a = NULL, *lent_b = NULL;
    te_status status = te_check_gemm(exec, gemm, narrow != NULL);
    if (status != TE_OK || te_view_numel(&g.c) == 0) return status;
    const char *reason = decline_direct(&g, narrow != NULL);
    if (reason) te_cuda_trace(exec, "dispatch: matrix product in two passes: %s\n", reason);
    if (g.a.shape[g.a.ndim - 1] > 0) {
        status = describable_operand(exec, &g.a, &lent_a);
        if (status == TE_OK) status = describable_operand(exec, &g.b, &lent_b);
    }
    if (status == TE_OK)
        status = reason ? te_cuda_gemm_apart(exec, &g, scales, narrow) : te_cuda_gemm_ended(exec, &g, scales, narrow);
    if (lent_a) exec->scratch_free(exec, lent_a);
    if (lent_b) exec->scratch_free(exec, lent_b);
    return status;
}

/* --- state -------------------------------------------------------------------------------------------------------- */

te_status te_cuda_blas_open(te_exec *exec, te_cuda_blas **out)
{
    te_cuda_device *d = te_cuda(exec);
    if ((*out = d->blas)) return TE_OK;
    te_cuda_blas *blas = te_mem_zalloc(exec->mem, sizeof *blas);
    if (!blas) return te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of host memory");
    const char *candidates = te_environment(TE_ENV_GEMM_CANDIDATES);
    long wanted = candidates ? strtol(candidates, NULL, 10) : 0;
    blas->candidates = wanted > 0 && wanted <= MOST_CANDIDATES ? (int)wanted : CANDIDATES;
    te_status status = te_cuda_load_blas(exec, d->driver_version, &blas->library);
    if (status == TE_OK) {
        cublasStatus_t r = blas->library.cublasLtCreate(&blas->handle);
        if (r != CUBLAS_STATUS_SUCCESS)
            status = te_exec_fail(exec, TE_ERROR_DEVICE, "cuBLASLt %zu: %s (the driver is for CUDA %d.%d)",
                                  blas->library.cublasLtGetVersion(), blas->library.cublasLtGetStatusName(r),
                                  d->driver_version / 1000, d->driver_version % 1000 / 10);
    }
    if (status == TE_OK)
        *out = d->blas = blas;
    else
        te_mem_free(exec->mem, blas, sizeof *blas);
    return status;
}

void te_cuda_gemm_close(te_exec *exec)
{
    te_cuda_blas *blas = te_cuda(exec)->blas;
    if (!blas) return;
    te_cuda_plans_close(exec, blas);
    te_cuda_finishes_close(exec, blas);
    te_cuda_ends_close(exec, blas);
    te_cuda_sizes_close(exec, blas);
    te_cuda_kept_close(exec, blas);
    blas->library.cublasLtDestroy(blas->handle);
    te_mem_free(exec->mem, blas, sizeof *blas);
    te_cuda(exec)->blas = NULL;
}
