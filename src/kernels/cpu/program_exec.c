/* program_exec.c - walking the tiles of a chunk and running the steps of a plan over each.
 *
 * Everything a thread needs lies in one workspace, laid out anew for each job: operands, slots, folds, scalars, registers
 * and kept rows. Nothing is allocated here.
 */
#include "program_exec.h"

#include "../philox.h"

#include <string.h>

enum { PREFETCH_FROM = 1 << 17 }; /* elements: beyond the second level cache */

typedef struct walker {
    const te_job     *job;
    const te_plan    *plan;
    const te_blocks  *blocks;
    te_bound_operand *operands; /* inputs, then outputs */
    char            **row;      /* per operand: its first element in the row at hand */
    char            **slot;     /* per slot: where its values are */
    int32_t          *direct;   /* per output: the slot that is the output itself, -1: none */
    te_fold          *folds, *sums;
    char             *spare;    /* one more register, for what accumulates */
    char             *kept, *constants;
    size_t            register_bytes, kept_bytes;
    int64_t           at[TE_MAX_DIMS]; /* position in the outer dimensions */
    int64_t           row_number, column;
    size_t            tile_rows, tile_columns;
    int64_t           row_chunk;
    bool              prefetches;
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

/* Whether tiles all load the same of an input: scales and biases of a row that fits a tile. */
static bool is_constant(const te_job *job, int input)
{
    const te_operand *in = &job->run->inputs[input];
    bool in_place = job->tile_rows == 1 && in->dtype == (job->run->compute_f64 ? TE_F64 : TE_F32);
    if (job->program->input_rates[input] != TE_RATE_ELEM || job->rows <= job->tile_rows || job->tile_columns < job->columns || in_place)
        return false;
    for (int d = 0; d < job->n_outer; d++)
        if (in->stride[job->axis[d]] != 0) return false;
    return true;
}

static size_t lay_out(const te_job *job, walker *w, char *base)
{
    const te_program *p = job->program;
    const te_plan    *plan = job->plan;
    size_t            at = 0, n_operands = (size_t)(p->n_inputs + p->n_outputs), size = job->blocks->size;
    w->register_bytes = align64((size_t)(job->tile_rows * (job->tile_columns ? job->tile_columns : 1)) * size);
    w->kept_bytes = align64((size_t)job->columns * size);
    w->operands = (te_bound_operand *)(void *)(base + take(&at, n_operands * sizeof *w->operands));
    w->row = (char **)(void *)(base + take(&at, n_operands * sizeof *w->row));
    w->slot = (char **)(void *)(base + take(&at, (size_t)plan->n_slots * sizeof *w->slot));
    w->direct = (int32_t *)(void *)(base + take(&at, (size_t)p->n_outputs * sizeof *w->direct));
    w->folds = (te_fold *)(void *)(base + take(&at, (size_t)plan->n_row_folds * sizeof *w->folds));
    w->sums = (te_fold *)(void *)(base + take(&at, (size_t)job->compiled->n_sums * sizeof *w->sums));
    char *scalars = base + take(&at, (size_t)p->n_insns * sizeof(double));
    char *registers = base + take(&at, (size_t)plan->n_registers * w->register_bytes);
    w->spare = base + take(&at, w->register_bytes);
    w->kept = base + take(&at, (size_t)plan->n_kept * w->kept_bytes);
    size_t constants = at;
    for (int i = 0; i < p->n_inputs; i++) at += is_constant(job, i) ? w->register_bytes : 0;
    if (!base) return at;
    w->constants = base + constants;
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
    return parts + (before * (size_t)(job->row_chunks ? job->row_chunks : 1) + (size_t)row_chunk) * bytes;
}

static double *sum_parts(const te_job *job, char *parts)
{
    return (double *)(void *)(column_part(job, parts, job->program->n_outputs, 0));
}

size_t te_job_parts(const te_job *job)
{
    size_t columns = 0, row_chunks = (size_t)(job->row_chunks ? job->row_chunks : 1); /* no rows give zeros */
    for (int o = 0; o < job->program->n_outputs; o++) columns += job->program->outputs[o].kind == TE_OUT_COLSUM;
    return columns * row_chunks * align64((size_t)job->columns * job->blocks->size) +
           align64((size_t)(job->compiled->n_sums * te_job_chunks(job)) * sizeof(double));
}

/* --- binding ---------------------------------------------------------------------------------------------------- */

static void bind_operand(const te_job *job, te_bound_operand *bound, const te_operand *operand, te_rate rate)
{
    bound->base = operand->data;
    bound->dtype = operand->dtype;
    bound->present = operand->data != NULL;
    bound->accumulate = operand->accumulate;
    bound->constant = false;
    bound->loaded = 0;
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

static void place_constants(walker *w)
{
    char *place = w->constants;
    for (int i = 0; i < w->job->program->n_inputs; i++) {
        if (!is_constant(w->job, i)) continue;
        w->operands[i].constant = true;
        for (int s = 0; s < w->plan->n_steps; s++)
            if (w->plan->steps[s].kind == TE_STEP_LOAD && w->plan->steps[s].operand == i) w->slot[w->plan->steps[s].dst] = place;
        place += w->register_bytes;
    }
}

/* An input that shares its memory with an output and is needed after that is stored cannot be read in place. */
static void settle_inputs(walker *w)
{
    const te_plan *plan = w->plan;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *store = &plan->steps[s];
        if (store->kind != TE_STEP_STORE || !w->operands[store->operand].present) continue;
        for (int l = 0; l < s; l++) {
            const te_step *load = &plan->steps[l];
            if (load->kind == TE_STEP_LOAD && load->last_use > s &&
                w->operands[load->operand].base == w->operands[store->operand].base)
                w->operands[load->operand].in_place = false;
        }
    }
}

/* An output may be written by the step that makes its value unless the same memory, read in place, is needed later. */
static bool direct_allowed(const walker *w, int output)
{
    const te_plan          *plan = w->plan;
    const te_bound_operand *out = &w->operands[w->job->program->n_inputs + output];
    int                     made = plan->direct[output].step;
    if (made < 0 || !out->present || !out->in_place || out->accumulate) return false;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *step = &plan->steps[s];
        if (step->kind == TE_STEP_LOAD && step->last_use > made && w->operands[step->operand].in_place &&
            w->operands[step->operand].base == out->base)
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
    if (w->direct[step->operand - w->job->program->n_inputs] == step->arg[0]) return; /* made in place */
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

/* Where rows are not reduced a row may take several tiles; the first one stores. */
static void step_store_row(walker *w, const te_step *step)
{
    const te_bound_operand *out = &w->operands[step->operand];
    if (!out->present || w->column > 0) return;
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

static void step_load(walker *w, const te_step *step)
{
    te_bound_operand *in = &w->operands[step->operand];
    char             *src = tile_start(w, in, step->operand);
    if (in->in_place) {
        w->slot[step->dst] = src;
    } else if (!in->constant || in->loaded < w->tile_rows) {
        load_tile(w, w->slot[step->dst], in, src);
        in->loaded = w->tile_rows;
    }
}

/* The second factor of a sum of products. */
static const char *factor(const walker *w, const te_step *step) { return step->arg[1] >= 0 ? w->slot[step->arg[1]] : NULL; }

static void step_fold(walker *w, const te_step *step, size_t n)
{
    const char *src = w->slot[step->arg[0]], *by = factor(w, step);
    if (w->job->kind <= TE_PLAN_ROWS)
        w->blocks->fold_rows((te_fold_kind)step->op, w->slot[step->dst], src, by, w->tile_rows, w->tile_columns);
    else w->blocks->fold_add(&w->folds[step->number], (te_fold_kind)step->op, src, by, n);
}

static void step_column_sum(walker *w, const te_step *step)
{
    if (!w->operands[step->operand].present) return;
    char *sums = column_part(w->job, w->parts, step->operand - w->job->program->n_inputs, w->row_chunk);
    w->blocks->fold_columns(sums + (size_t)w->column * w->blocks->size, w->slot[step->arg[0]], factor(w, step), w->tile_rows,
                            w->tile_columns);
}

static inline void run_op(walker *w, const te_step *step, size_t n)
{
    char *const *slot = w->slot;
    const char  *a = slot[step->arg[0]];
    const char  *b = step->arg[1] >= 0 ? slot[step->arg[1]] : NULL, *c = step->arg[2] >= 0 ? slot[step->arg[2]] : NULL;
    w->blocks->op[step->op][step->scalars](slot[step->dst], a, b, c, n);
}

static void run_step(walker *w, const te_step *step)
{
    char  **slot = w->slot;
    size_t  n = w->tile_rows * w->tile_columns;
    switch ((te_step_kind)step->kind) {
    case TE_STEP_OP: run_op(w, step, n); break;
    case TE_STEP_ROW_OP: run_op(w, step, w->tile_rows); break;
    case TE_STEP_LOAD: step_load(w, step); break;
    case TE_STEP_LOAD_ROW: {
        const te_bound_operand *in = &w->operands[step->operand];
        int64_t stride = w->tile_rows == 1 ? 1 : row_stride(w, in) / in->size;
        w->blocks->load[in->dtype](slot[step->dst], w->row[step->operand], stride, w->tile_rows);
        break;
    }
    case TE_STEP_COLUMN: w->blocks->column(slot[step->dst], w->column, w->job->columns, n); break;
    case TE_STEP_RANDOM: step_random(w, step); break;
    case TE_STEP_SPREAD: step_spread(w, step); break;
    case TE_STEP_FOLD: step_fold(w, step, n); break;
    case TE_STEP_STORE: step_store(w, step); break;
    case TE_STEP_STORE_ROW: step_store_row(w, step); break;
    case TE_STEP_COLSUM: step_column_sum(w, step); break;
    case TE_STEP_SUM: w->blocks->fold_add(&w->sums[step->number], (te_fold_kind)step->op, slot[step->arg[0]], factor(w, step), n); break;
    }
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

static void run_steps(walker *w, int first, int last)
{
    for (int s = first; s < last; s++) run_step(w, &w->plan->steps[s]);
}

/* Slots whose memory moves with the tile, except those of loads. */
static void point_slots(walker *w)
{
    const te_job *job = w->job;
    for (int o = 0; o < job->program->n_outputs; o++) {
        int index = job->program->n_inputs + o;
        if (w->direct[o] >= 0) w->slot[w->direct[o]] = tile_start(w, &w->operands[index], index);
    }
    for (int i = 0; w->plan->n_kept && i < w->plan->n_slots; i++)
        if (w->plan->slots[i].kind == TE_SLOT_KEPT)
            w->slot[i] = w->kept + (size_t)w->plan->slots[i].index * w->kept_bytes + (size_t)w->column * w->blocks->size;
}

/* Asks for the tile after this one. Its elements are used one operation after the other, in bursts that the hardware's
 * prefetching cannot see coming. */
static void prefetch_next(const walker *w)
{
    const te_program *p = w->job->program;
    size_t            n = w->tile_rows * w->tile_columns;
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        const te_bound_operand *operand = &w->operands[i];
        if (!operand->flat || !operand->present || operand->constant) continue;
        size_t      bytes = n * (size_t)operand->size;
        const char *next = tile_start(w, operand, i) + bytes;
        for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(next + b);
    }
}

/* The columns [first, last) of the rows at hand, tile by tile; one empty tile when there are none. */
static void run_tiles(walker *w, int first_step, int last_step, int64_t first, int64_t last)
{
    w->column = first;
    do {
        int64_t left = last - w->column;
        w->tile_columns = (size_t)(left < w->job->tile_columns ? left : w->job->tile_columns);
        point_slots(w);
        if (w->prefetches) prefetch_next(w);
        run_steps(w, first_step, last_step);
        w->column += (int64_t)w->tile_columns;
    } while (w->column < last);
}

static void run_passes(walker *w)
{
    const te_plan *plan = w->plan;
    for (int p = 0; p < plan->n_passes; p++) {
        const te_pass *pass = &plan->passes[p];
        w->column = 0;
        run_steps(w, pass->head, pass->body);
        if (pass->body == pass->end) continue;
        for (int s = pass->folds; s < pass->end; s++)
            w->blocks->fold_start(&w->folds[plan->steps[s].number], (te_fold_kind)plan->steps[s].op);
        run_tiles(w, pass->body, pass->end, 0, w->job->columns);
        for (int s = pass->folds; s < pass->end; s++)
            w->blocks->fold_finish(&w->folds[plan->steps[s].number], (te_fold_kind)plan->steps[s].op, w->slot[plan->steps[s].dst]);
    }
}

/* --- rows ------------------------------------------------------------------------------------------------------- */

static void point_rows(walker *w)
{
    const te_job *job = w->job;
    int           n = job->program->n_inputs + job->program->n_outputs;
    for (int i = 0; i < n; i++) {
        char *row = w->operands[i].base;
        for (int d = 0; d < job->n_outer; d++) row += w->at[d] * w->operands[i].outer[d];
        w->row[i] = row;
    }
}

static void seek_row(walker *w, int64_t row)
{
    w->row_number = row;
    for (int d = w->job->n_outer - 1; d >= 0; d--) {
        w->at[d] = row % w->job->outer[d];
        row /= w->job->outer[d];
    }
    point_rows(w);
}

/* To the row after the tile. Tiles end where the innermost outer dimension ends. */
static void next_rows(walker *w)
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

static void start_sums(walker *w, int64_t first_column, int64_t last_column)
{
    const te_program *p = w->job->program;
    size_t            size = w->blocks->size;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        int kind = p->outputs[o].kind;
        if (kind == TE_OUT_COLSUM)
            memset(column_part(w->job, w->parts, o, w->row_chunk) + (size_t)first_column * size, 0,
                   (size_t)(last_column - first_column) * size);
        if (kind == TE_OUT_SUM) w->blocks->fold_start(&w->sums[s++], TE_FOLD_SUM);
        if (kind == TE_OUT_AMAX) w->blocks->fold_start(&w->sums[s++], TE_FOLD_AMAX);
    }
}

static void finish_sums(walker *w, int64_t chunk)
{
    const te_program *p = w->job->program;
    double           *parts = w->job->compiled->n_sums ? sum_parts(w->job, w->parts) : NULL;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        int kind = p->outputs[o].kind;
        if (kind != TE_OUT_SUM && kind != TE_OUT_AMAX) continue;
        double value[1];
        w->blocks->fold_finish(&w->sums[s], kind == TE_OUT_SUM ? TE_FOLD_SUM : TE_FOLD_AMAX, value);
        parts[(int64_t)s * te_job_chunks(w->job) + chunk] = w->blocks->get(value);
        s++;
    }
}

static void run_chunk(walker *w, int64_t chunk)
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

void te_job_run(const te_job *job, int64_t first, int64_t last, void *workspace, void *parts)
{
    walker w;
    w.job = job;
    w.plan = job->plan;
    w.blocks = job->blocks;
    w.parts = parts;
    w.prefetches = job->rows * job->columns >= PREFETCH_FROM;
    lay_out(job, &w, workspace);
    bind_operands(job, &w);
    place_constants(&w);
    settle_inputs(&w);
    for (int o = 0; o < job->program->n_outputs; o++) w.direct[o] = direct_allowed(&w, o) ? job->plan->direct[o].slot : -1;
    evaluate_uniform(job, &w);
    for (int64_t chunk = first; chunk < last; chunk++) run_chunk(&w, chunk);
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

/* Columns [first, first + n): the parts are added to the first one in order. */
static void join_columns(const te_job *job, const te_operand *out, char *parts, int64_t first, int64_t n)
{
    size_t  size = job->blocks->size, stride = align64((size_t)job->columns * size), skip = (size_t)first * size;
    char   *sums = parts + skip;
    int64_t step = job->columns == 1 ? 1 : out->stride[job->run->ndim - 1];
    char   *dst = (char *)out->data + first * step * (int64_t)te_dtype_size(out->dtype);
    for (int64_t r = 1; r < job->row_chunks; r++)
        job->blocks->fold_columns(sums, parts + (size_t)r * stride + skip, NULL, 1, (size_t)n);
    if (job->row_chunks == 0) memset(sums, 0, (size_t)n * size);
    if (out->accumulate) {
        enum { SPAN = 64 };
        for (int64_t i = 0; i < n; i += SPAN) {
            double  old[SPAN];
            size_t  span = (size_t)(n - i < SPAN ? n - i : SPAN);
            job->blocks->load[out->dtype](old, dst + i * step * (int64_t)te_dtype_size(out->dtype), step, span);
            job->blocks->op[TE_PW_ADD][0](sums + (size_t)i * size, old, sums + (size_t)i * size, NULL, span);
        }
    }
    job->blocks->store[out->dtype](dst, step, sums, (size_t)n);
}

void te_job_join(const te_job *job, void *parts, int threads)
{
    enum { SLICE = 1024, WORTHWHILE = 1 << 17 };
    const te_program *p = job->program;
    for (int o = 0, s = 0; o < p->n_outputs; o++) {
        const te_operand *out = &job->run->outputs[o];
        te_output_kind    kind = (te_output_kind)p->outputs[o].kind;
        if (kind == TE_OUT_SUM || kind == TE_OUT_AMAX) {
            const double *mine = sum_parts(job, parts) + (int64_t)s++ * te_job_chunks(job);
            if (out->data) join_sum(job, out, kind, mine);
        }
        if (kind != TE_OUT_COLSUM || !out->data) continue;
        char   *mine = column_part(job, parts, o, 0);
        int64_t slices = (job->columns + SLICE - 1) / SLICE;
        bool    share = threads > 1 && job->columns * job->row_chunks > WORTHWHILE;
#pragma omp parallel for schedule(static) num_threads(threads) if (share)
        for (int64_t i = 0; i < slices; i++) {
            int64_t left = job->columns - i * SLICE;
            join_columns(job, out, mine, i * SLICE, left < SLICE ? left : SLICE);
        }
    }
}
