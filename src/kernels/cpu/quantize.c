/* quantize.c - quantizing panel by panel.
 *
 * One pass makes both sides. Where a factor of the whole tensor is wanted, an earlier pass takes the amaxes, or the
 * job has them.
 */
#include "quantize_panel.h"
#include "workers.h"

#include <string.h>

/* Amaxes of the source and of what side 1 sees. */
static void measure(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    int64_t row, col;
    for (int i = 0; i < x.rows; i++) {
        if (x.rows > TE_FLAT_ROWS) te_panel_foresee(p, x, i, &row, &col);
        p->loops->amax_along(l->amaxes, te_panel_source(p, x.row + i, x.col), x.cols, x.cols);
        l->amax[0] = te_amax(l->amax[0], l->amaxes[0]);
    }
    for (int i = 0; i < x.rows && p->job.side[1].data && p->job.quantizer->hadamard; i += TE_GROUP) {
        int rows = x.rows - i < TE_GROUP ? x.rows - i : TE_GROUP;
        const void *source = te_panel_source(p, x.row + i, x.col);
        l->amax[1] = te_amax(l->amax[1], p->loops->transform_amax(source, p->job.source_stride, rows, x.cols));
    }
}

static void convert(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    bool along = p->job.side[0].data && q->element != TE_E2M1; /* the amax is taken along with the codes */
    for (int i = 0; i < x.rows && q->needs_history && !along; i++) {
        p->loops->amax_along(l->amaxes, te_panel_source(p, x.row + i, x.col), x.cols, x.cols);
        l->amax[0] = te_amax(l->amax[0], l->amaxes[0]);
    }
    if (te_panel_rounds_once(p)) {
        te_panel_both(p, l, x);
        return;
    }
    if (te_panel_goes_by_groups(p)) {
        te_panel_by_groups(p, l, x);
        return;
    }
    if (p->job.side[0].data) te_panel_rowwise(p, l, x);
    if (p->job.side[1].data) te_panel_columnwise(p, l, x);
}

typedef struct rows_job {
    te_exec            *exec;
    const te_panel_job *p;
} rows_job;

static void measure_some_rows(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job     *all = context;
    const te_panel_job *p = all->p;
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(all->exec); i++) {
        float *amax = &p->job.side[0].amax[i];
        *amax = 0; /* of no elements */
        p->loops->amax_along(amax, te_panel_source(p, i, 0), p->job.cols, p->job.cols);
    }
}

/* Row by row: an amax of its own for each. */
static void measure_rows(te_exec *exec, const te_panel_job *p)
{
    int threads = exec->threads > 1 && p->job.rows * p->job.cols > TE_PANEL_ROWS * TE_PANEL_COLS / 2
        ? exec->threads : 1;
    rows_job all = {exec, p};
    te_cpu_loop(exec, threads, p->job.rows, te_cpu_even_grain(p->job.rows, threads), measure_some_rows, &all);
}

/* Whether a number has so few bits that many of bfloat16 are its product with a factor in E4M3 and 1, 5, 3 or 7, which
 * codes of E2M1 meet at. Of the amaxes that bfloat16 has, one in 21 makes such a one. */
static bool is_short(float x) { return (te_f32_bits(x) & 0xfffffu) == 0; }

static void put_amaxes(te_exec *exec, te_panel_job *p, const float amax[2])
{
    const te_quantizer *q = p->job.quantizer;
    for (int s = 0; s < 2; s++) {
        const te_quantized_side *side = &p->job.side[s];
        float own = amax[s && q->hadamard];
        if (!side->amax) continue;
        if (s == 0 && q->row_scaled) {
            measure_rows(exec, p);
        } else {
            *side->amax = own;
            p->encode[s] = te_two_level_encode(own, q->scale_max);
            p->tied[s] = is_short(own / (q->scale_max * 6.0f));
        }
    }
}

static te_status visit_to_measure(te_exec *exec, te_panel_job *p, te_panel_visit *visit, float amax[2])
{
    bool groups = p->job.side[1].data && p->job.quantizer->hadamard;
    return te_panels_visit(exec, p, groups ? TE_GROUP : TE_FLAT_ROWS, TE_FLAT_COLS, visit, amax);
}

/* What the source is multiplied by follows from it: its amaxes, taken here or given. */
static te_status look(te_exec *exec, te_panel_job *p, float amax[2])
{
    const te_quantize_job *job = &p->job;
    if (job->step == TE_QUANTIZE_CONVERT) {
        memcpy(amax, job->amaxes, 2 * sizeof *amax);
        return TE_OK;
    }
    te_status status = visit_to_measure(exec, p, measure, amax);
    for (int i = 0; i < 2 && job->step == TE_QUANTIZE_MEASURE; i++) job->amaxes[i] = te_amax(job->amaxes[i], amax[i]);
    return status;
}

/* Of panels a block high with so many bytes at most, all about as wide: each asks for as much of the next one as it has
 * itself, and both stay in the second-level cache. */
static int columns_of_bytes(const te_panel_job *p, int64_t bytes)
{
    enum { WHOLE = TE_PANEL_ROWS }; /* blocks */
    int64_t most = bytes / p->job.quantizer->block_cols / (int64_t)te_dtype_size(p->job.dtype);
    int64_t pieces = (p->job.cols - 1) / most + 1, wide = (p->job.cols + pieces - 1) / pieces;
    return (int)((wide + WHOLE - 1) / WHOLE * WHOLE);
}

/* Columns of panels: long runs of memory are read faster than short ones of many rows, but wide panels may be too
 * few for the threads, and leave the caches too soon. Rows of blocks are read twice: for factors, then for codes. */
static int columns_of_panels(const te_exec *exec, const te_panel_job *p)
{
    enum { RUN_BYTES = 1 << 18, LINES_BYTES = 3 << 16 };
    const te_quantizer *q = p->job.quantizer;
    int64_t panels = (p->job.rows + TE_PANEL_ROWS - 1) / TE_PANEL_ROWS;
    int size = (int)te_dtype_size(p->job.dtype);
    bool both = p->job.side[1].data != NULL, lines = both && q->block_rows == 1 && q->block_cols == TE_PANEL_ROWS;
    int few = size == 2 && q->element != TE_E2M1 ? TE_PANEL_COLS : TE_PANEL_COLS / 2;
    bool rows = q->block_rows == 1 && q->block_cols >= 8;
    bool squares = q->element == TE_E2M1 && q->block_rows == TE_GROUP && q->block_cols == TE_GROUP && !q->stochastic;
    if ((rows || squares) && !both) return TE_MOST_COLUMNS;
    if (te_panel_follows_rows(p)) return columns_of_bytes(p, RUN_BYTES);
    bool enough = exec->threads <= 1 || panels >= 4 * exec->threads || panels % exec->threads == 0;
    if (enough && te_panel_in_bands(p)) return lines ? columns_of_bytes(p, LINES_BYTES) : TE_MOST_COLUMNS;
    if (q->block_rows || q->element == TE_E2M1) return few;
    if (!both) return TE_FLAT_COLS;
    return enough && te_panel_shares_codes(p) ? TE_MOST_COLUMNS : few;
}

static int rows_of_panels(const te_panel_job *p)
{
    if (te_panel_follows_rows(p)) return p->job.quantizer->block_cols;
    if (p->job.side[1].data || p->job.quantizer->block_rows > 1) return TE_PANEL_ROWS;
    int64_t few = TE_WIDE_COLS / (p->job.cols + 1); /* short rows are many */
    return few < TE_FLAT_ROWS ? TE_FLAT_ROWS : few < TE_PANEL_ROWS ? (int)few : TE_PANEL_ROWS;
}

/* The geometry of panels, and with it whether codes are kept. */
static void settle_panels(te_exec *exec, te_panel_job *p, int *rows, int *cols)
{
    enum { HIGH = 2 * TE_PANEL_ROWS, KEPT_BYTES = 3 << 18 }; /* of a panel, which stay in the second-level cache */
    const te_quantized_side *side = p->job.side;
    uintptr_t places = (uintptr_t)side[0].data | (uintptr_t)side[0].row_stride;
    int64_t bytes = p->job.rows * p->job.cols * ((int64_t)te_dtype_size(p->job.dtype) + 2);
    *rows = rows_of_panels(p);
    *cols = columns_of_panels(exec, p);
    if (bytes < te_cpu(exec)->quantize_keeps_from || places % 64 != 0) return;
    if (p->job.quantizer->block_rows || !side[1].data || !te_panel_shares_codes(p)) return;
    if (*cols > TE_WIDE_COLS) *cols = TE_WIDE_COLS;
    int64_t wide = p->job.cols < *cols ? p->job.cols : *cols;
    p->kept = (wide + 63) / 64 * 64 + TE_APART;
    /* higher ones are turned into longer runs of memory */
    if (HIGH * wide <= KEPT_BYTES && p->job.rows >= 4 * HIGH * exec->threads) *rows = HIGH;
}

/* Visits nothing: what both passes would have is there. */
static te_status prepare(te_exec *exec, te_panel_job *p)
{
    float amax[2];
    int rows, cols;
    te_status status = te_quantizer_measures(p->job.quantizer) ? visit_to_measure(exec, p, NULL, amax) : TE_OK;
    settle_panels(exec, p, &rows, &cols);
    return status == TE_OK ? te_panels_visit(exec, p, rows, cols, NULL, amax) : status;
}

te_status te_cpu_quantize(te_exec *exec, const te_quantize_job *job)
{
    const te_quantizer *q = job->quantizer;
    te_panel_job p;
    float amax[2] = {0, 0};
    bool whole = !q->block_rows;
    te_panel_job_open(exec, job, &p);
    if (job->step == TE_QUANTIZE_PREPARE) return prepare(exec, &p);
    if (te_quantizer_measures(q)) {
        te_status status = look(exec, &p, amax);
        if (status != TE_OK || job->step == TE_QUANTIZE_MEASURE) return status;
        put_amaxes(exec, &p, amax);
    }
    if (whole && !q->needs_history)
        p.job.scale = te_scale_from_amax(amax[0], te_element_max(q->element), q->power_of_two, q->epsilon, TE_FLT_MAX);
    int rows, cols;
    settle_panels(exec, &p, &rows, &cols);
    te_status status = te_panels_visit(exec, &p, rows, cols, convert, amax);
    if (status != TE_OK || !whole) return status;
    for (int s = 0; s < 2; s++)
        if (p.job.side[s].scale_inv) *(float *)p.job.side[s].scale_inv = 1.0f / p.job.scale;
    if (q->needs_history) put_amaxes(exec, &p, amax);
    return TE_OK;
}
