/* rotate.c - rows of pairs turned by angles (te_rotation). Threads share all dimensions but the last two: rows of the
 * last but one, the heads of a token, usually share their angles. */
#include "rotate.h"

#include "copy.h"
#include "workers.h"

enum { PARALLEL_FROM = 1 << 13 /* pairs */ };

static te_rotate_function *function_for(te_exec *exec, te_dtype dtype)
{
    const te_rotate_rows *rows = &te_rotate_rows_portable;
    (void)exec;
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) rows = &te_rotate_rows_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) rows = &te_rotate_rows_avx2;
#endif
    return dtype == TE_F32 ? rows->f32 : dtype == TE_BF16 ? rows->bf16 : dtype == TE_F16 ? rows->f16 : NULL;
}

typedef struct rotating {
    te_exec            *exec;
    const te_rotation  *rotation;
    te_rotate_function *function;
    int64_t             rows; /* of the last dimension but one that are done together */
} rotating;

static void rotate_units(void *context, int64_t first, int64_t end, int thread)
{
    const rotating *job = context;
    const te_rotation *t = job->rotation;
    const te_view *views[6] = {&t->a, &t->b, &t->y, &t->z, &t->cos, &t->sin};
    int            last = t->a.ndim - 1, outer = job->rows > 1 ? last - 1 : last;
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        char   *at[6];
        int64_t step[6];
        for (int i = 0; i < 6; i++) {
            int64_t size = (int64_t)te_dtype_size(views[i]->dtype);
            at[i] = (char *)views[i]->data + te_offset_of(views[i], outer, unit) * size;
            step[i] = outer < last ? views[i]->stride[outer] * size : 0;
        }
        te_rotate_row row = {.n = t->a.shape[last], .in = t->a.stride[last], .out = t->y.stride[last],
                             .sign = t->back ? -1.0f : 1.0f};
        for (int64_t i = 0; i < job->rows; i++) {
            row.a = at[0] + i * step[0];
            row.b = at[1] + i * step[1];
            row.y = at[2] + i * step[2];
            row.z = at[3] + i * step[3];
            row.cos = (const float *)(const void *)(at[4] + i * step[4]);
            row.sin = (const float *)(const void *)(at[5] + i * step[5]);
            job->function(&row);
        }
    }
}

te_status te_cpu_rotate(te_exec *exec, const te_rotation *t)
{
    rotating job = {exec, t, function_for(exec, t->a.dtype), 1};
    int64_t pairs = te_view_numel(&t->a), units = 1;
    int     last = t->a.ndim - 1;
    if (!job.function)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "rotate: rows of %s", te_dtype_name(t->a.dtype));
    if (pairs == 0) return TE_OK;
    if (last >= 2) job.rows = t->a.shape[last - 1];
    units = pairs / t->a.shape[last] / job.rows;
    int threads = pairs < PARALLEL_FROM ? 1 : exec->threads;
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), rotate_units, &job);
    return te_cpu_finish(exec, TE_OK);
}
