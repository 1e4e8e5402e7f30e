/* gemm_problem.c - the normal form of a matrix product. */
#include "../check.h"
#include "../dtype.h"
#include "gemm.h"

static te_gemm_matrix matrix_of(const te_view *v, int ndim)
{
    if (!te_view_present(v)) return (te_gemm_matrix){0};
    return (te_gemm_matrix){v->data, v->dtype, (int32_t)te_dtype_size(v->dtype), v->stride[ndim - 2],
                            v->stride[ndim - 1]};
}

/* Adds a batch dimension inside the ones there are, joined to the last where one step of it is a whole run of the new
 * one. */
static void push_batch(te_gemm_problem *p, int64_t extent, const int64_t stride[3])
{
    if (extent == 1) return;
    int last = p->batch_dims - 1;
    bool joins = last >= 0;
    for (int i = 0; joins && i < 3; i++) joins = p->batch_stride[i][last] == extent * stride[i];
    if (joins) p->batch_shape[last] *= extent;
    else p->batch_shape[p->batch_dims++] = extent;
    for (int i = 0; i < 3; i++) p->batch_stride[i][p->batch_dims - 1] = stride[i];
}

/* A batch of products with one b whose rows follow each other is one tall product. */
static void merge_batch_into_rows(te_gemm_problem *p)
{
    te_gemm_matrix *rows[3] = {&p->a, NULL, &p->c};
    while (p->batch_dims > 0) {
        int last = p->batch_dims - 1;
        if (p->batch_stride[1][last] != 0) return;
        for (int i = 0; i < 3; i++)
            if (rows[i] && p->m > 1 && p->batch_stride[i][last] != p->m * rows[i]->rs) return;
        for (int i = 0; i < 3; i++)
            if (rows[i] && p->m == 1) rows[i]->rs = p->batch_stride[i][last];
        p->m *= p->batch_shape[last];
        p->batches /= p->batch_shape[last];
        p->batch_dims--;
    }
}

static void swap_matrices(te_gemm_matrix *x, te_gemm_matrix *y)
{
    te_gemm_matrix t = *x;
    *x = *y;
    *y = t;
}

static void transpose_matrix(te_gemm_matrix *x)
{
    int64_t t = x->rs;
    x->rs = x->cs;
    x->cs = t;
}

/* c^T = b^T a^T */
static void transpose_problem(te_gemm_problem *p)
{
    int64_t m = p->m, strides[TE_GEMM_BATCH_DIMS];
    uint64_t key = p->a_key;
    p->m = p->n;
    p->n = m;
    p->a_key = p->b_key;
    p->b_key = key;
    swap_matrices(&p->a, &p->b);
    transpose_matrix(&p->a);
    transpose_matrix(&p->b);
    transpose_matrix(&p->c);
    memcpy(strides, p->batch_stride[0], sizeof strides);
    memcpy(p->batch_stride[0], p->batch_stride[1], sizeof strides);
    memcpy(p->batch_stride[1], strides, sizeof strides);
    p->bias_by_row = !p->bias_by_row;
}

enum { FEW_COLUMNS = 8, MANY_ROWS = 32 };

/* Few columns become few rows where these are taken as they lie, unless sums are so short that rows of c take less. */
static void turn_few_columns(te_exec *exec, te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (p->n > FEW_COLUMNS || p->m < MANY_ROWS || !state || te_gemm_is_narrow(state, p)) return;
    transpose_problem(p);
    if (!te_gemm_rows_decline(exec, p) || !te_gemm_sweep_decline(exec, p)) return;
    transpose_problem(p);
}

te_status te_gemm_problem_make(te_exec *exec, const te_gemm *g, te_gemm_problem *p)
{
    te_status status = te_check_gemm(exec, g, false);
    if (status != TE_OK) return status;

    int d = g->c.ndim;
    *p = (te_gemm_problem){.m = g->c.shape[d - 2], .n = g->c.shape[d - 1], .k = g->a.shape[d - 1], .bias = g->bias,
                           .a = matrix_of(&g->a, d), .b = matrix_of(&g->b, d), .c = matrix_of(&g->c, d),
                           .alpha = g->alpha, .accumulate = g->beta == 1, .a_key = g->a_key, .b_key = g->b_key,
                           .batches = 1, .squares = g->squares};
    for (int i = 0; i < d - 2; i++) {
        push_batch(p, g->c.shape[i], (int64_t[3]){g->a.stride[i], g->b.stride[i], g->c.stride[i]});
        p->batches *= g->c.shape[i];
    }
    if (p->m == 0 || p->n == 0 || p->batches == 0) return TE_OK;
    merge_batch_into_rows(p);
    bool one_column = p->n == 1 && p->m > 1;
    if (p->c.rs == 1 && (p->c.cs != 1 || one_column) && p->m > 1) transpose_problem(p);
    else turn_few_columns(exec, p);
    return TE_OK;
}

void te_gemm_offsets_of(const te_gemm_problem *p, int64_t batch, int64_t offsets[3])
{
    int32_t sizes[3] = {p->a.size, p->b.size, p->c.size};
    for (int i = 0; i < 3; i++) offsets[i] = 0;
    for (int d = p->batch_dims - 1; d >= 0; d--) {
        int64_t index = d == 0 ? batch : batch % p->batch_shape[d];
        if (d > 0) batch /= p->batch_shape[d];
        for (int i = 0; i < 3; i++) offsets[i] += index * p->batch_stride[i][d] * sizes[i];
    }
}

te_gemm_product te_gemm_product_of(const te_gemm_problem *p, int64_t batch)
{
    te_gemm_product t = {p->a, p->b, p->c};
    int64_t offsets[3];
    te_gemm_offsets_of(p, batch, offsets);
    t.a.data += offsets[0];
    t.b.data += offsets[1];
    t.c.data += offsets[2];
    return t;
}

te_gemm_shares te_gemm_shares_of(const te_exec *exec, const te_gemm_problem *p, int64_t most, int64_t least, int each)
{
    enum { THREAD_BYTES = 128 << 10 }; /* of b that pay for waking a thread */
    double read = (double)p->n * (double)p->k * p->b.size * (double)p->batches, pay = 1 + read / THREAD_BYTES;
    te_gemm_shares s = {.threads = pay < exec->threads ? (int)pay : exec->threads, .columns = most};
    while (s.columns > least && p->n * p->batches < each * s.threads * s.columns) s.columns /= 2;
    s.pieces = (p->n + s.columns - 1) / s.columns;
    return s;
}
