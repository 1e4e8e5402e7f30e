/* program_join.c - the parts of sums that chunks leave behind: where they lie, and how they are joined, in the order of
 * the chunks. */
#include "program_walker.h"
#include "workers.h"

#include <string.h>

/* The parts of column sums come first, per output, per row chunk; then those of sums and amaxes, per chunk. */
char *te_job_column_part(const te_job *job, char *parts, int output, int64_t row_chunk)
{
    size_t bytes = te_align64((size_t)(job->columns * job->lanes) * job->blocks->size), before = 0;
    for (int o = 0; o < output; o++) before += job->program->outputs[o].kind == TE_OUT_COLSUM;
    return parts + (before * (size_t)(job->row_chunks ? job->row_chunks : 1) + (size_t)row_chunk) * bytes;
}

double *te_job_sum_parts(const te_job *job, char *parts)
{
    return (double *)(void *)(te_job_column_part(job, parts, job->program->n_outputs, 0));
}

size_t te_job_parts(const te_job *job)
{
    size_t columns = 0, row_chunks = (size_t)(job->row_chunks ? job->row_chunks : 1); /* no rows give zeros */
    for (int o = 0; o < job->program->n_outputs; o++) columns += job->program->outputs[o].kind == TE_OUT_COLSUM;
    return columns * row_chunks * te_align64((size_t)(job->columns * job->lanes) * job->blocks->size) +
           te_align64((size_t)(job->compiled->n_sums * te_job_chunks(job)) * sizeof(double));
}

/* --- joining ---------------------------------------------------------------------------------------------------- */

static void join_sum(const te_job *job, const te_operand *out, te_output_kind kind, const double *parts)
{
    double  total = 0;
    int64_t n = te_job_chunks(job);
    double  value[1], old[1];
    for (int64_t i = 0; i < n; i++) total = kind == TE_OUT_SUM ? total + parts[i] : parts[i] > total ? parts[i] : total;
    job->blocks->set(value, total);
    if (out->accumulate) {
        job->blocks->load[out->dtype](old, out->data, 1, 1);
        if (kind == TE_OUT_SUM) job->blocks->op[TE_PW_ADD][0](value, old, value, NULL, 1);
        else if (job->blocks->get(old) > total) memcpy(value, old, sizeof value);
    }
    job->blocks->store[out->dtype](out->data, 1, value, 1);
}

/* Columns [first, first + n) of an output that lie next to each other get their sums. */
static void put_columns(const te_job *job, const te_operand *out, int64_t first, int64_t n, char *sums)
{
    enum { SPAN = 64 };
    size_t  size = job->blocks->size;
    int64_t step = job->columns == 1 ? 1 : out->stride[job->run->ndim - 1];
    int64_t bytes = step * (int64_t)te_dtype_size(out->dtype);
    char   *dst = (char *)out->data + te_operand_place(out->block, first) * bytes;
    for (int64_t i = 0; out->accumulate && i < n; i += SPAN) {
        double  old[SPAN];
        size_t  span = (size_t)(n - i < SPAN ? n - i : SPAN);
        job->blocks->load[out->dtype](old, dst + i * bytes, step, span);
        job->blocks->op[TE_PW_ADD][0](sums + (size_t)i * size, old, sums + (size_t)i * size, NULL, span);
    }
    job->blocks->store[out->dtype](dst, step, sums, (size_t)n);
}

static void add_row(const te_job *job, char *sums, const char *row, size_t n)
{
    job->blocks->fold_columns(&(te_fold_columns){.sums = sums, .rows = 1, .src = row, .columns = n}, (te_ahead){0});
}

/* Columns [first, first + n), all of them where there are lanes: the parts are added up in pairs, then the pairs, and
 * so on, so that many lose no more digits than few. So are the lanes then. */
static void join_columns(const te_job *job, const te_operand *out, char *parts, int64_t first, int64_t n)
{
    size_t  size = job->blocks->size, stride = te_align64((size_t)(job->columns * job->lanes) * size);
    size_t  wide = (size_t)(n * job->lanes), skip = (size_t)first * size;
    char   *sums = parts + skip;
    for (int64_t apart = 1; apart < job->row_chunks; apart *= 2)
        for (int64_t r = 0; r + apart < job->row_chunks; r += 2 * apart)
            add_row(job, sums + (size_t)r * stride, sums + (size_t)(r + apart) * stride, wide);
    for (size_t half = wide / 2; half >= (size_t)n && job->lanes > 1; half /= 2)
        add_row(job, sums, sums + half * size, half);
    if (job->row_chunks == 0) memset(sums, 0, (size_t)n * size);
    for (int64_t i = 0, piece; i < n; i += piece) {
        piece = out->block ? out->block - (first + i) % out->block : n;
        if (piece > n - i) piece = n - i;
        put_columns(job, out, first + i, piece, sums + (size_t)i * size);
    }
}

enum { SLICE = 1024 };

typedef struct columns_job {
    const te_job     *job;
    const te_operand *out;
    char             *parts;
} columns_job;

static void join_slices(void *context, int64_t first, int64_t end, int thread)
{
    const columns_job *all = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) {
        int64_t left = all->job->columns - i * SLICE;
        join_columns(all->job, all->out, all->parts, i * SLICE, left < SLICE ? left : SLICE);
    }
}

void te_job_join(const te_job *job, void *parts, int threads)
{
    enum { WORTHWHILE = 1 << 17 };
    const te_program *p = job->program;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        const te_operand *out = &job->run->outputs[o];
        te_output_kind    kind = (te_output_kind)p->outputs[o].kind;
        if (kind == TE_OUT_SUM || kind == TE_OUT_AMAX) {
            const double *mine = te_job_sum_parts(job, parts) + (int64_t)s++ * te_job_chunks(job);
            if (out->data) join_sum(job, out, kind, mine);
        }
        if (kind != TE_OUT_COLSUM || !out->data) continue;
        char   *mine = te_job_column_part(job, parts, o, 0);
        int64_t slices = (job->columns + SLICE - 1) / SLICE;
        bool    share = threads > 1 && job->columns * job->row_chunks > WORTHWHILE;
        columns_job all = {job, out, mine};
        te_cpu_loop(job->exec, share ? threads : 1, slices, te_cpu_even_grain(slices, threads), join_slices, &all);
    }
}
