/* program_exec.c - walking the rows of a chunk, tile by tile. */
#include "program_walker.h"

#include <string.h>

/* --- tiles ------------------------------------------------------------------------------------------------------ */

/* Whether a chain of one operation can do what a block function cannot. */
static bool wants_chain(const te_walker *w, const te_step *step)
{
    uint8_t form = step->dst >= 0 ? w->form[step->dst] : 0;
    for (int k = 0; k < 3; k++) form |= step->arg[k] >= 0 ? w->form[step->arg[k]] : 0;
    return form & TE_FORM_CHAINED;
}

bool te_walker_takes_chain(const te_walker *w, int first)
{
    const te_step *step = &w->plan->steps[first];
    return te_walker_chains(w) && step->chain_end &&
           (step->chain_end > first + 1 || w->fetches || w->job->band || wants_chain(w, step));
}

static void run_steps(te_walker *w, int first, int last)
{
    for (int s = first; s < last;) {
        const te_step *step = &w->plan->steps[s];
        if (te_walker_takes_chain(w, s)) {
            te_walker_chain(w, s);
            s = step->chain_end;
        } else {
            te_walker_step(w, step);
            s++;
        }
    }
}

bool te_walker_point_output(te_walker *w, int output)
{
    int                     index = w->job->program->n_inputs + output;
    int32_t                 slot = w->direct[output];
    const te_bound_operand *out = &w->operands[index];
    bool                    chains = te_walker_chains(w), there = out->in_place || chains;
    if (slot < 0) return false;
    w->form[slot] = (there ? TE_FORM_TENSOR : 0) |
                    (!chains ? 0 : (out->in_place ? 0 : TE_FORM_HALF) | (out->streamed ? TE_FORM_STREAM : 0));
    w->slot[slot] = there ? te_walker_tile(w, out, index) : te_walker_register(w, slot);
    if (w->job->band) w->step[slot] = te_walker_row_stride(w, out);
    return there;
}

/* Slots whose memory moves with the tile, except those of loads. */
static void point_slots(te_walker *w)
{
    for (int o = 0; o < w->job->program->n_outputs; o++) te_walker_point_output(w, o);
    for (int i = 0; w->plan->n_kept && i < w->plan->n_slots; i++)
        if (w->plan->slots[i].kind == TE_SLOT_KEPT)
            w->slot[i] =
                w->kept + (size_t)w->plan->slots[i].index * w->kept_bytes + (size_t)w->column * w->blocks->size;
}

/* The columns [first, last) of the rows at hand, tile by tile; one empty tile when there are none. */
static void run_tiles(te_walker *w, int first_step, int last_step, int64_t first, int64_t last)
{
    w->column = first;
    do {
        size_t left = (size_t)(last - w->column), most = (size_t)w->job->tile_columns, strip = w->blocks->strip;
        if (w->window && left >= strip) most = left / strip * strip;
        w->tile_columns = left < most ? left : most;
        point_slots(w);
        run_steps(w, first_step, last_step);
        w->column += (int64_t)w->tile_columns;
    } while (w->column < last && !te_cpu_stopping(w->job->exec)); /* a row may be very long */
}

static void run_passes(te_walker *w)
{
    const te_plan *plan = w->plan;
    for (int p = 0; p < plan->n_passes; p++) {
        const te_pass *pass = &plan->passes[p];
        w->column = 0;
        run_steps(w, pass->head, pass->body);
        if (pass->body == pass->end) continue;
        for (int s = pass->body; s < pass->end; s++)
            if (plan->steps[s].kind == TE_STEP_FOLD)
                w->blocks->fold_start(&w->folds[plan->steps[s].number], (te_fold_kind)plan->steps[s].op);
        run_tiles(w, pass->body, pass->end, 0, w->job->columns);
        for (int s = pass->body; s < pass->end; s++)
            if (plan->steps[s].kind == TE_STEP_FOLD)
                w->blocks->fold_finish(&w->folds[plan->steps[s].number], (te_fold_kind)plan->steps[s].op,
                                       w->slot[plan->steps[s].dst]);
    }
}

/* --- rows ------------------------------------------------------------------------------------------------------- */

static void point_rows(te_walker *w)
{
    const te_job *job = w->job;
    int           n = job->program->n_inputs + job->program->n_outputs;
    for (int i = 0; i < n; i++) {
        char *row = w->operands[i].base;
        for (int d = 0; d < job->n_outer; d++) row += w->at[d] * w->operands[i].outer[d];
        w->row[i] = row;
    }
}

static void seek_row(te_walker *w, int64_t row)
{
    w->row_number = row;
    for (int d = w->job->n_outer - 1; d >= 0; d--) {
        w->at[d] = row % w->job->outer[d];
        row /= w->job->outer[d];
    }
    point_rows(w);
}

/* To the row after the tile. Tiles end where the innermost outer dimension ends. */
static void next_rows(te_walker *w)
{
    const te_job *job = w->job;
    int           last = job->n_outer - 1, n = job->program->n_inputs + job->program->n_outputs;
    w->row_number += (int64_t)w->tile_rows;
    if (last < 0) return;
    w->at[last] += (int64_t)w->tile_rows;
    if (w->at[last] < job->outer[last]) {
        for (int i = 0; i < n; i++) w->row[i] += (int64_t)w->tile_rows * w->operands[i].outer[last];
        return;
    }
    for (int d = last; d > 0 && w->at[d] >= job->outer[d]; d--) {
        w->at[d] = 0;
        w->at[d - 1]++;
    }
    point_rows(w);
}

static void start_sums(te_walker *w, int64_t first_column, int64_t last_column)
{
    const te_job     *job = w->job;
    const te_program *p = job->program;
    size_t            size = w->blocks->size;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        int kind = p->outputs[o].kind;
        if (kind == TE_OUT_COLSUM)
            memset(te_job_column_part(job, w->parts, o, w->row_chunk) + (size_t)first_column * size, 0,
                   (size_t)((last_column - first_column) * job->lanes) * size);
        if (kind == TE_OUT_SUM) w->blocks->fold_start(&w->sums[s++], TE_FOLD_SUM);
        if (kind == TE_OUT_AMAX) w->blocks->fold_start(&w->sums[s++], TE_FOLD_AMAX);
    }
}

static void finish_sums(te_walker *w, int64_t chunk)
{
    const te_program *p = w->job->program;
    double           *parts = w->job->compiled->n_sums ? te_job_sum_parts(w->job, w->parts) : NULL;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        int kind = p->outputs[o].kind;
        if (kind != TE_OUT_SUM && kind != TE_OUT_AMAX) continue;
        double value[1];
        w->blocks->fold_finish(&w->sums[s], kind == TE_OUT_SUM ? TE_FOLD_SUM : TE_FOLD_AMAX, value);
        parts[(int64_t)s * te_job_chunks(w->job) + chunk] = w->blocks->get(value);
        s++;
    }
}

void te_walker_chunk(te_walker *w, int64_t chunk)
{
    const te_job *job = w->job;
    int64_t       row = chunk / job->column_chunks * job->chunk_rows, last_row = row + job->chunk_rows;
    int64_t       column = chunk % job->column_chunks * job->chunk_columns, last_column = column + job->chunk_columns;
    if (last_row > job->rows) last_row = job->rows;
    if (last_column > job->columns) last_column = job->columns;
    w->row_chunk = chunk / job->column_chunks;
    start_sums(w, column, last_column);
    seek_row(w, row);
    while (w->row_number < last_row) {
        int64_t rows = last_row - w->row_number;
        if (rows > job->tile_rows) rows = job->tile_rows;
        if (job->n_outer) {
            int64_t left = job->outer[job->n_outer - 1] - w->at[job->n_outer - 1];
            if (rows > left) rows = left;
        }
        w->tile_rows = (size_t)rows;
        if (job->kind <= TE_PLAN_ROWS) run_tiles(w, 0, w->plan->n_steps, column, last_column);
        else run_passes(w);
        next_rows(w);
    }
    finish_sums(w, chunk);
}

void te_walker_start(te_walker *w, const te_job *job, char *workspace, char *parts)
{
    w->job = job;
    w->plan = job->plan;
    w->blocks = job->blocks;
    w->parts = parts;
    te_walker_lay_out(job, w, workspace);
    te_walker_bind(w);
}

void te_job_run(const te_job *job, int64_t first, int64_t last, void *workspace, void *parts)
{
    te_walker w;
    te_walker_start(&w, job, workspace, parts);
    te_walker_uniform(&w);
    for (int64_t chunk = first; chunk < last && !te_cpu_stopping(job->exec) && !te_run_exceeded(job->run); chunk++)
        te_walker_chunk(&w, chunk);
}
