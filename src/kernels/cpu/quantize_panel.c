/* quantize_panel.c - going over panels, and what both sides share. */
#include "quantize_panel.h"
#include "workers.h"

#include <string.h>

te_status te_quantize_open(te_exec *exec, te_cpu_device *device)
{
#ifdef TE_ISA_HAS_AVX512VBMI
    if (!device->has_vbmi) return TE_OK;
    device->quantize = te_mem_alloc(exec->mem, sizeof *device->quantize);
    if (!device->quantize) return TE_ERROR_MEMORY;
    *device->quantize = te_quantize_blocks_avx512;
    te_quantize_take_vbmi(device->quantize);
#endif
    (void)exec, (void)device;
    return TE_OK;
}

void te_quantize_close(te_exec *exec, te_cpu_device *device)
{
    te_mem_free(exec->mem, device->quantize, sizeof *device->quantize);
}

const te_quantize_blocks *te_quantize_blocks_of(te_exec *exec)
{
#ifdef TE_ISA_HAS_AVX512VBMI
    if (te_cpu(exec)->has_vbmi) return te_cpu(exec)->quantize;
#endif
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) return &te_quantize_blocks_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) return &te_quantize_blocks_avx2;
#endif
    (void)exec;
    return &te_quantize_blocks_portable;
}

void te_panel_job_open(te_exec *exec, const te_quantize_job *job, te_panel_job *p)
{
    *p = (te_panel_job){.job = *job, .blocks = te_quantize_blocks_of(exec)};
    p->past = p->blocks->turn[1] && job->side[1].rows * job->side[1].cols >= TE_PAST_FROM;
    p->transpose = p->blocks->turn[p->past] ? p->blocks->turn[p->past] : te_copy_blocks_of(exec)->transpose[0];
    p->turn = te_copy_blocks_of(exec)->transpose[2];
    p->loops = te_quantize_loops_of(p->blocks, job->dtype);
    const te_quantized_side *side = job->side;
    uintptr_t places = (uintptr_t)side[0].data | (uintptr_t)side[0].row_stride;
    if (!job->quantizer->transposed) places |= (uintptr_t)side[1].data | (uintptr_t)side[1].col_stride;
    int64_t bytes = job->rows * job->cols * ((int64_t)te_dtype_size(job->dtype) + 1);
    /* those that are little work are in a cache when they are read, up to more bytes */
    bool alone = !te_panel_shares_codes(p) || (!side[1].data && bytes >= te_cpu(exec)->quantize_keeps_from);
    p->stream = te_copy_blocks_of(exec)->stream;
    p->rows_past = alone && job->quantizer->element != TE_E2M1 && job->rows * job->cols >= TE_PAST_FROM &&
                   ((uintptr_t)side[0].data | (uintptr_t)side[0].row_stride) % 64 == 0;
    p->ahead = job->rows * job->cols >= TE_PAST_FROM ? te_cpu(exec)->quantize_ahead : 0;
    p->streams = te_panel_rounds_once(p) && job->rows * job->cols >= TE_PAST_FROM && places % 64 == 0;
}

typedef struct panels_job {
    te_exec            *exec;
    const te_panel_job *p;
    int                 rows, cols; /* of a panel */
    te_panel_visit     *visit;
    te_panel_lane      *lanes; /* one per thread */
} panels_job;

static void visit_panels(void *context, int64_t first, int64_t end, int thread)
{
    const panels_job      *all = context;
    const te_quantize_job *job = &all->p->job;
    int64_t                across = (job->cols + all->cols - 1) / all->cols;
    for (int64_t t = first; t < end && !te_cpu_stopping(all->exec); t++) {
        te_panel x = {.row = t / across * all->rows, .col = t % across * all->cols, .next = all->cols};
        x.rows = (int)(job->rows - x.row < all->rows ? job->rows - x.row : all->rows);
        x.cols = (int)(job->cols - x.col < all->cols ? job->cols - x.col : all->cols);
        all->visit(all->p, &all->lanes[thread], x);
    }
    if (all->p->streams || all->p->past || all->p->rows_past || all->p->kept) te_copy_blocks_of(all->exec)->settle();
}

/* Bytes of codes that a thread has on their way to columns, where panels are too wide for its own. */
static size_t band_bytes(const te_panel_job *p, int rows, int cols)
{
    if (p->kept) return (size_t)(rows * p->kept);
    if (!te_panel_in_bands(p) || cols <= TE_PANEL_COLS) return 0;
    if (te_panel_goes_by_groups(p))
        return (size_t)(rows / 2 * te_panel_band_stride(p)) +
               (size_t)(p->job.cols / TE_DOWN_COLUMNS + 1) * (size_t)(rows / TE_GROUP) * TE_DOWN_COLUMNS;
    return te_panel_rounds_once(p) ? (size_t)(rows * te_panel_band_stride(p)) : 0;
}

te_status te_panels_visit(te_exec *exec, const te_panel_job *p, int rows, int cols, te_panel_visit *visit,
                          float amax[2])
{
    const te_quantize_job *job = &p->job;
    amax[0] = amax[1] = 0;
    if (job->rows == 0 || job->cols == 0) return TE_OK; /* and no columns make no panel */
    int64_t across = (job->cols + cols - 1) / cols,
            panels = (job->rows + rows - 1) / rows * across;
    int threads = panels < exec->threads ? (int)panels : exec->threads;
    size_t band = band_bytes(p, rows, cols);
    if (threads < 1) threads = 1;
    size_t own = ((size_t)threads * sizeof(te_panel_lane) + 63) / 64 * 64;
    te_panel_lane *lanes = exec->scratch(exec, own + (size_t)threads * band);
    if (!lanes) return TE_ERROR_MEMORY;
    for (int i = 0; i < threads; i++) {
        lanes[i].amax[0] = lanes[i].amax[1] = 0;
        lanes[i].band = band ? (uint8_t *)lanes + own + (size_t)i * band : NULL;
    }
    panels_job all = {exec, p, rows, cols, visit, lanes};
    if (visit) te_cpu_loop(exec, threads, panels, te_cpu_even_grain(panels, threads), visit_panels, &all);
    for (int i = 0; i < threads; i++)
        for (int s = 0; s < 2; s++) amax[s] = te_amax(amax[s], lanes[i].amax[s]);
    exec->scratch_free(exec, lanes);
    return te_cpu_finish(exec, TE_OK);
}

bool te_panel_next(const te_panel_job *p, te_panel x, int i, int64_t *row, int64_t *col)
{
    bool same_rows = x.col + x.next < p->job.cols;
    *row = x.row + i + (same_rows ? 0 : x.rows);
    *col = same_rows ? x.col + x.next : 0;
    return *row < p->job.rows;
}

bool te_panel_foresee(const te_panel_job *p, te_panel x, int i, int64_t *row, int64_t *col)
{
    if (!te_panel_next(p, x, i, row, col)) return false;
    const char *from = te_panel_source(p, *row, *col);
    int64_t bytes = x.cols * (int64_t)te_dtype_size(p->job.dtype);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
    return true;
}

int te_panel_transform(const te_panel_job *p, te_panel_lane *l, te_panel strip)
{
    size_t size = te_dtype_size(p->job.dtype);
    for (int i = 0; i < strip.rows; i += TE_GROUP) {
        int rows = strip.rows - i < TE_GROUP ? strip.rows - i : TE_GROUP;
        p->loops->transform((char *)l->values + (size_t)(i * te_panel_strip(strip)) * size, te_panel_strip(strip),
                            te_panel_source(p, strip.row + i, strip.col), p->job.source_stride, rows, strip.cols);
    }
    return (strip.rows + TE_GROUP - 1) / TE_GROUP * TE_GROUP;
}

/* Largest finite value of the source's dtype. */
static float dtype_max(te_dtype dtype)
{
    return dtype == TE_BF16 ? te_bf16_to_f32(0x7f7f) : dtype == TE_F16 ? 65504.0f : TE_FLT_MAX;
}

te_factor_rule te_panel_rule(const te_panel_job *p, int side, int64_t row)
{
    const te_quantizer *q = p->job.quantizer;
    te_factor_rule rule = {.scale = q->scale,
                           .max = te_element_max(q->element),
                           .epsilon = q->epsilon,
                           .overflow = dtype_max(p->job.dtype),
                           .power_of_two = q->power_of_two};
    if (q->scale == TE_SCALE_E4M3)
        rule.encode = side == 0 && q->row_scaled ? te_two_level_encode(p->job.side[0].amax[row], q->scale_max)
                                                 : p->encode[side];
    return rule;
}

void te_panel_put_factors(const te_panel_job *p, const te_quantized_side *side, const void *factors, int n, int64_t at,
                          int64_t step, int copies, int64_t copy_step)
{
    bool wide = p->job.quantizer->scale == TE_SCALE_F32;
    /* often: a call for each would cost more than the byte */
    for (int c = 0; n == 1 && c < copies; c++, at += copy_step) {
        if (wide)
            ((float *)side->scale_inv)[at] = *(const float *)factors;
        else
            ((uint8_t *)side->scale_inv)[at] = *(const uint8_t *)factors;
    }
    if (n == 1) return;
    for (int c = 0; c < copies; c++, at += copy_step) {
        if (step == 1) {
            size_t size = wide ? sizeof(float) : 1;
            memcpy((char *)side->scale_inv + (size_t)at * size, factors, (size_t)n * size);
        } else if (wide) {
            for (int i = 0; i < n; i++) ((float *)side->scale_inv)[at + i * step] = ((const float *)factors)[i];
        } else {
            for (int i = 0; i < n; i++) ((uint8_t *)side->scale_inv)[at + i * step] = ((const uint8_t *)factors)[i];
        }
    }
}
