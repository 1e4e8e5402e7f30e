/* program_exec.c - walking the tiles of a chunk and running the steps of a plan over each.
 *
 * Everything a thread needs lies in one workspace, laid out anew for each job: operands, slots, folds, scalars, registers
 * and kept rows. Nothing is allocated here.
 */
#include "program_exec.h"

#include "../dtype.h"

#include <string.h>

typedef struct walker {
    const te_job     *job;
    const te_plan    *plan;
    const te_blocks  *blocks;
    te_bound_operand *operands; /* inputs, then outputs */
    char            **row;      /* per operand: its first element in the row at hand */
    char            **slot;     /* per slot: where its values are */
    te_fold          *folds, *sums;
    char             *spare;    /* one more register, for what accumulates */
    char             *kept;
    size_t            register_bytes, kept_bytes;
    int64_t           at[TE_MAX_DIMS]; /* position in the outer dimensions */
    int64_t           row_number, column;
    size_t            tile_rows, tile_columns;
    int64_t           row_chunk;
    char             *parts;
} walker;

/* --- layout ----------------------------------------------------------------------------------------------------- */

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static size_t take(size_t *at, size_t bytes)
{
    size_t start = *at;
    *at += align64(bytes);
    return start;
}

static size_t lay_out(const te_job *job, walker *w, char *base)
{
    const te_program *p = job->program;
    const te_plan    *plan = job->plan;
    size_t            at = 0, n_operands = (size_t)(p->n_inputs + p->n_outputs), size = job->blocks->size;
    w->register_bytes = align64((size_t)(job->tile_rows * job->tile_columns) * size);
    w->kept_bytes = align64((size_t)job->columns * size);
    w->operands = (te_bound_operand *)(void *)(base + take(&at, n_operands * sizeof *w->operands));
    w->row = (char **)(void *)(base + take(&at, n_operands * sizeof *w->row));
    w->slot = (char **)(void *)(base + take(&at, (size_t)plan->n_slots * sizeof *w->slot));
    w->folds = (te_fold *)(void *)(base + take(&at, (size_t)plan->n_row_folds * sizeof *w->folds));
    w->sums = (te_fold *)(void *)(base + take(&at, (size_t)job->compiled->n_sums * sizeof *w->sums));
    char *scalars = base + take(&at, (size_t)p->n_insns * sizeof(double));
    char *registers = base + take(&at, (size_t)plan->n_registers * w->register_bytes);
    w->spare = base + take(&at, w->register_bytes);
    w->kept = base + take(&at, (size_t)plan->n_kept * w->kept_bytes);
    if (!base) return at;
    for (int i = 0; i < plan->n_slots; i++) {
        size_t index = (size_t)plan->slots[i].index;
        switch (plan->slots[i].kind) {
        case TE_SLOT_SCALAR: w->slot[i] = scalars + index * sizeof(double); break;
        case TE_SLOT_REGISTER: w->slot[i] = registers + index * w->register_bytes; break;
        default: w->slot[i] = w->kept + index * w->kept_bytes;
        }
    }
    return at;
}

size_t te_job_workspace(const te_job *job)
{
    walker w;
    return lay_out(job, &w, NULL);
}

/* The parts of column sums come first, per output, per row chunk; then those of sums and amaxes, per chunk. */
static char *column_part(const te_job *job, char *parts, int output, int64_t row_chunk)
{
    size_t bytes = align64((size_t)job->columns * job->blocks->size), before = 0;
    for (int o = 0; o < output; o++) before += job->program->outputs[o].kind == TE_OUT_COLSUM;
    return parts + (before * (size_t)job->row_chunks + (size_t)row_chunk) * bytes;
}

static double *sum_parts(const te_job *job, char *parts)
{
    return (double *)(void *)(column_part(job, parts, job->program->n_outputs, 0));
}

size_t te_job_parts(const te_job *job)
{
    size_t columns = 0;
    for (int o = 0; o < job->program->n_outputs; o++) columns += job->program->outputs[o].kind == TE_OUT_COLSUM;
    size_t bytes = columns * (size_t)job->row_chunks * align64((size_t)job->columns * job->blocks->size);
    return bytes + align64((size_t)(job->compiled->n_sums * te_job_chunks(job)) * sizeof(double));
}

/* --- binding ---------------------------------------------------------------------------------------------------- */

static void bind_operand(const te_job *job, te_bound_operand *bound, const te_operand *operand, te_rate rate)
{
    bound->base = operand->data;
    bound->dtype = operand->dtype;
    bound->present = operand->data != NULL;
    bound->accumulate = operand->accumulate;
    bound->size = (int64_t)te_dtype_size(operand->dtype);
    for (int d = 0; d < job->n_outer; d++) bound->outer[d] = operand->stride[job->axis[d]] * bound->size;
    bound->column = job->columns == 1 || job->column_axis < 0 ? 1 : operand->stride[job->column_axis];
    int64_t row = job->n_outer ? operand->stride[job->axis[job->n_outer - 1]] : 0;
    bound->flat = rate == TE_RATE_ELEM && bound->column == 1 && (job->tile_rows == 1 || row == job->columns);
    bound->in_place = bound->flat && job->columns > 0 && bound->dtype == (job->run->compute_f64 ? TE_F64 : TE_F32);
}

static void bind_operands(const te_job *job, walker *w)
{
    const te_program *p = job->program;
    for (int i = 0; i < p->n_inputs; i++)
        bind_operand(job, &w->operands[i], &job->run->inputs[i], (te_rate)p->input_rates[i]);
    for (int o = 0; o < p->n_outputs; o++) {
        te_rate rate = p->outputs[o].kind == TE_OUT_ELEM ? TE_RATE_ELEM : TE_RATE_ROW;
        bind_operand(job, &w->operands[p->n_inputs + o], &job->run->outputs[o], rate);
    }
}

/* An output may be written by the step that makes its value unless the same memory, read in place, is needed later. */
static bool direct_allowed(const walker *w, int output)
{
    const te_plan          *plan = w->plan;
    const te_bound_operand *out = &w->operands[w->job->program->n_inputs + output];
    if (plan->direct[output].step < 0 || !out->present || !out->in_place || out->accumulate) return false;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *step = &plan->steps[s];
        if (step->kind == TE_STEP_LOAD && w->operands[step->operand].base == out->base &&
            w->operands[step->operand].in_place && step->last_use > plan->direct[output].step)
            return false;
    }
    return true;
}

static void evaluate_uniform(const te_job *job, walker *w)
{
    const te_program *p = job->program;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->rate != TE_RATE_UNIFORM) continue;
        if (insn->op == TE_PW_CONST) {
            w->blocks->set(w->slot[v], insn->imm);
        } else if (insn->op == TE_PW_PARAM) {
            w->blocks->set(w->slot[v], job->run->params[insn->slot]);
        } else if (insn->op == TE_PW_LOAD) {
            const te_operand *in = &job->run->inputs[insn->slot];
            w->blocks->load[in->dtype](w->slot[v], in->data, 1, in->data ? 1 : 0);
        } else {
            const char *arg[3] = {NULL, NULL, NULL};
            for (int k = 0; k < te_opcode_args(insn->op); k++) arg[k] = w->slot[insn->arg[k]];
            w->blocks->op[insn->op][0](w->slot[v], arg[0], arg[1], arg[2], 1);
        }
    }
}

/* --- steps ------------------------------------------------------------------------------------------------------ */

static char *tile_start(const walker *w, const te_bound_operand *operand, int index)
{
    return w->row[index] + w->column * operand->column * operand->size;
}

static int64_t row_stride(const walker *w, const te_bound_operand *operand)
{
    return w->job->n_outer ? operand->outer[w->job->n_outer - 1] : 0;
}

static void load_tile(const walker *w, char *dst, const te_bound_operand *in, const char *src)
{
    te_block_load load = w->blocks->load[in->dtype];
    size_t        rows = w->tile_rows, columns = w->tile_columns, size = w->blocks->size;
    int64_t       stride = row_stride(w, in);
    if (in->flat) {
        load(dst, src, 1, rows * columns);
    } else if (columns == 1) {
        load(dst, src, stride / in->size, rows);
    } else if (rows == 1 || stride != 0) {
        for (size_t r = 0; r < rows; r++) load(dst + r * columns * size, src + (int64_t)r * stride, in->column, columns);
    } else { /* the same row over and over */
        size_t row = columns * size, done = row, all = rows * row;
        load(dst, src, in->column, columns);
        for (; done < all; done += done < all - done ? done : all - done)
            memcpy(dst + done, dst, done < all - done ? done : all - done);
    }
}

static void store_tile(const walker *w, char *dst, const te_bound_operand *out, const char *src)
{
    te_block_store store = w->blocks->store[out->dtype];
    size_t         rows = w->tile_rows, columns = w->tile_columns, size = w->blocks->size;
    int64_t        stride = row_stride(w, out);
    if (out->flat) {
        store(dst, 1, src, rows * columns);
    } else if (columns == 1) {
        store(dst, rows == 1 ? 1 : stride / out->size, src, rows);
    } else {
        for (size_t r = 0; r < rows; r++) store(dst + (int64_t)r * stride, out->column, src + r * columns * size, columns);
    }
}

static void step_store(walker *w, const te_step *step)
{
    const te_bound_operand *out = &w->operands[step->operand];
    if (!out->present) return;
    char       *dst = tile_start(w, out, step->operand);
    const char *value = w->slot[step->arg[0]];
    if (dst == value) return; /* made in place */
    size_t n = w->tile_rows * w->tile_columns;
    if (out->accumulate && out->in_place) {
        w->blocks->op[TE_PW_ADD][0](dst, dst, value, NULL, n);
        return;
    }
    if (out->accumulate) {
        load_tile(w, w->spare, out, dst);
        w->blocks->op[TE_PW_ADD][0](w->spare, w->spare, value, NULL, n);
        value = w->spare;
    }
    store_tile(w, dst, out, value);
}

static void step_store_row(walker *w, const te_step *step)
{
    const te_bound_operand *out = &w->operands[step->operand];
    if (!out->present) return;
    char   *dst = w->row[step->operand], *value = w->slot[step->arg[0]];
    int64_t stride = row_stride(w, out);
    for (size_t r = 0; r < w->tile_rows; r++, dst += stride) {
        char *one = step->scalars ? value : value + r * w->blocks->size;
        if (out->accumulate) {
            double sum[1];
            w->blocks->load[out->dtype](sum, dst, 1, 1);
            w->blocks->op[TE_PW_ADD][0](sum, sum, one, NULL, 1);
            w->blocks->store[out->dtype](dst, 1, sum, 1);
        } else {
            w->blocks->store[out->dtype](dst, 1, one, 1);
        }
    }
}

static void step_random(walker *w, const te_step *step)
{
    const te_program *p = w->job->program;
    te_block_random   random = {.op = (te_opcode)step->op, .rng = w->job->run->rngs[step->operand]};
    random.first = (uint64_t)(w->row_number * w->job->columns + w->column);
    if (step->op == TE_PW_KEEP && step->scalars) {
        int32_t        a = step->arg[0]; /* a scalar's slot has the number of its instruction */
        const te_insn *insn = &p->insns[a];
        double         p_drop = insn->op == TE_PW_PARAM   ? w->job->run->params[insn->slot]
                                : insn->op == TE_PW_CONST ? insn->imm
                                                          : w->blocks->get(w->slot[a]);
        random.threshold = te_rng_threshold(p_drop);
    } else if (step->op == TE_PW_KEEP) {
        random.p = w->slot[step->arg[0]];
    }
    w->blocks->random(w->slot[step->dst], &random, w->tile_rows * w->tile_columns);
}

static void step_spread(walker *w, const te_step *step)
{
    size_t columns = w->tile_columns, rows = w->tile_rows;
    if (step->rate == TE_RATE_UNIFORM) columns *= rows, rows = 1;
    w->blocks->repeat(w->slot[step->dst], w->slot[step->arg[0]], rows, columns);
}

static void run_step(walker *w, const te_step *step)
{
    char  **slot = w->slot;
    size_t  n = w->tile_rows * w->tile_columns;
    switch ((te_step_kind)step->kind) {
    case TE_STEP_ROW_OP: n = w->tile_rows; /* fall through */
    case TE_STEP_OP: {
        const char *a = slot[step->arg[0]];
        const char *b = step->arg[1] >= 0 ? slot[step->arg[1]] : NULL, *c = step->arg[2] >= 0 ? slot[step->arg[2]] : NULL;
        w->blocks->op[step->op][step->scalars](slot[step->dst], a, b, c, n);
        break;
    }
    case TE_STEP_LOAD: {
        const te_bound_operand *in = &w->operands[step->operand];
        char                   *src = tile_start(w, in, step->operand);
        if (in->in_place) slot[step->dst] = src;
        else load_tile(w, slot[step->dst], in, src);
        break;
    }
    case TE_STEP_LOAD_ROW: {
        const te_bound_operand *in = &w->operands[step->operand];
        int64_t stride = w->tile_rows == 1 ? 1 : row_stride(w, in) / in->size;
        w->blocks->load[in->dtype](slot[step->dst], w->row[step->operand], stride, w->tile_rows);
        break;
    }
    case TE_STEP_COLUMN: w->blocks->column(slot[step->dst], w->column, w->job->columns, n); break;
    case TE_STEP_RANDOM: step_random(w, step); break;
    case TE_STEP_SPREAD: step_spread(w, step); break;
    case TE_STEP_FOLD:
        if (w->job->kind <= TE_PLAN_ROWS)
            w->blocks->fold_rows((te_fold_kind)step->op, slot[step->dst], slot[step->arg[0]], w->tile_rows, w->tile_columns);
        else w->blocks->fold_add(&w->folds[step->number], (te_fold_kind)step->op, slot[step->arg[0]], n);
        break;
    case TE_STEP_STORE: step_store(w, step); break;
    case TE_STEP_STORE_ROW: step_store_row(w, step); break;
    case TE_STEP_COLSUM: {
        int output = step->operand - w->job->program->n_inputs;
        if (!w->operands[step->operand].present) break;
        char *sums = column_part(w->job, w->parts, output, w->row_chunk);
        w->blocks->fold_columns(sums + (size_t)w->column * w->blocks->size, slot[step->arg[0]], w->tile_rows, w->tile_columns);
        break;
    }
    case TE_STEP_SUM: w->blocks->fold_add(&w->sums[step->number], (te_fold_kind)step->op, slot[step->arg[0]], n); break;
    }
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

static void point_slots(walker *w)
{
    const te_plan *plan = w->plan;
    for (int o = 0; o < w->job->program->n_outputs; o++) {
        int index = w->job->program->n_inputs + o;
        if (plan->direct[o].step >= 0) w->slot[plan->direct[o].slot] = tile_start(w, &w->operands[index], index);
    }
}

static void point_kept(walker *w)
{
    for (int i = 0; i < w->plan->n_slots; i++)
        if (w->plan->slots[i].kind == TE_SLOT_KEPT)
            w->slot[i] = w->kept + (size_t)w->plan->slots[i].index * w->kept_bytes + (size_t)w->column * w->blocks->size;
}
