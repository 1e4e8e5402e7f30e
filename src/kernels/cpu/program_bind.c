/* program_bind.c - where a te_walker's values lie, and how a run's operands are reached.
 *
 * Everything a thread needs lies in one workspace, laid out anew for each job: operands, slots, folds, scalars,
 * registers, kept rows and constant rows. Nothing is allocated here.
 */
#include "program_walker.h"

#include "../dtype.h"

#include <string.h>

/* --- layout ----------------------------------------------------------------------------------------------------- */

/* The next so many bytes; NULL where there is no workspace yet, and sizes alone are wanted. */
static void *take(char *base, size_t *at, size_t bytes)
{
    void *start = base ? base + *at : NULL;
    *at += te_align64(bytes);
    return start;
}

/* Whether tiles all load the same of an input: scales and biases of a row that fits a tile. */
static bool is_constant(const te_job *job, int input)
{
    const te_operand *in = &job->run->inputs[input];
    bool in_place = (job->tile_rows == 1 || job->band) && in->dtype == (job->run->compute_f64 ? TE_F64 : TE_F32);
    if (job->program->input_rates[input] != TE_RATE_ELEM || job->rows <= job->tile_rows ||
        job->tile_columns < job->columns || in_place)
        return false;
    for (int d = 0; d < job->n_outer; d++)
        if (in->stride[job->axis[d]] != 0) return false;
    return true;
}

size_t te_walker_lay_out(const te_job *job, te_walker *w, char *base)
{
    const te_program *p = job->program;
    const te_plan    *plan = job->plan;
    size_t            at = 0, n_operands = (size_t)(p->n_inputs + p->n_outputs), size = job->blocks->size;
    w->register_bytes = te_align64((size_t)(job->tile_rows * (job->tile_columns ? job->tile_columns : 1)) * size);
    w->kept_bytes = te_align64((size_t)job->columns * size);
    w->operands = take(base, &at, n_operands * sizeof *w->operands);
    w->row = take(base, &at, n_operands * sizeof *w->row);
    w->slot = take(base, &at, (size_t)plan->n_slots * sizeof *w->slot);
    w->form = take(base, &at, (size_t)plan->n_slots * sizeof *w->form);
    w->step = take(base, &at, job->band ? (size_t)plan->n_slots * sizeof *w->step : 0);
    w->direct = take(base, &at, (size_t)p->n_outputs * sizeof *w->direct);
    w->shares = take(base, &at, (size_t)plan->n_turns * sizeof *w->shares);
    w->folds = take(base, &at, (size_t)plan->n_row_folds * sizeof *w->folds);
    w->sums = take(base, &at, (size_t)job->compiled->n_sums * sizeof *w->sums);
    size_t scalar_bytes = job->band ? (size_t)job->tile_rows * size : sizeof(double);
    char  *scalars = take(base, &at, (size_t)p->n_insns * scalar_bytes);
    w->registers = take(base, &at, (size_t)plan->n_registers * w->register_bytes);
    w->spare = take(base, &at, w->register_bytes);
    w->kept = take(base, &at, (size_t)plan->n_kept * w->kept_bytes);
    size_t constants = at;
    for (int i = 0; i < p->n_inputs; i++) at += is_constant(job, i) ? w->register_bytes : 0;
    if (!base) return at;
    w->constants = base + constants;
    for (int i = 0; i < plan->n_slots; i++) {
        w->form[i] = 0;
        size_t index = (size_t)plan->slots[i].index;
        switch (plan->slots[i].kind) {
        case TE_SLOT_SCALAR: w->slot[i] = scalars + index * scalar_bytes; break;
        case TE_SLOT_REGISTER: w->slot[i] = te_walker_register(w, i); break;
        case TE_SLOT_SUMS: w->slot[i] = NULL; break;
        case TE_SLOT_TABLE: w->slot[i] = (char *)(uintptr_t)job->run->tables[index]; break;
        default: w->slot[i] = w->kept + index * w->kept_bytes;
        }
    }
    return at;
}

size_t te_job_workspace(const te_job *job)
{
    te_walker w;
    return te_walker_lay_out(job, &w, NULL);
}

/* --- binding ---------------------------------------------------------------------------------------------------- */

static void bind_operand(const te_job *job, te_bound_operand *bound, const te_operand *operand, te_rate rate)
{
    bound->base = operand->data;
    bound->dtype = operand->dtype;
    bound->present = operand->data != NULL;
    bound->accumulate = operand->accumulate;
    bound->streamed = false;
    bound->constant = false;
    bound->loaded = 0;
    bound->size = (int64_t)te_dtype_size(operand->dtype);
    for (int d = 0; d < job->n_outer; d++) bound->outer[d] = operand->stride[job->axis[d]] * bound->size;
    bound->column = job->columns == 1 || job->column_axis < 0 ? 1 : operand->stride[job->column_axis];
    int64_t row = job->n_outer ? operand->stride[job->axis[job->n_outer - 1]] : 0;
    bound->block = job->column_axis == job->run->ndim - 1 ? operand->block : 0;
    bound->straight = rate == TE_RATE_ELEM && bound->column == 1 && !bound->block;
    bound->flat = bound->straight && (job->tile_rows == 1 || row == job->columns);
    if (!job->band) bound->straight = bound->flat;
    bound->in_place = bound->straight && job->columns > 0 && bound->dtype == (job->run->compute_f64 ? TE_F64 : TE_F32);
}

static void bind_operands(const te_job *job, te_walker *w)
{
    const te_program *p = job->program;
    for (int i = 0; i < p->n_inputs; i++)
        bind_operand(job, &w->operands[i], &job->run->inputs[i], (te_rate)p->input_rates[i]);
    for (int o = 0; o < p->n_outputs; o++) {
        te_rate rate = p->outputs[o].kind == TE_OUT_ELEM ? TE_RATE_ELEM : TE_RATE_ROW;
        bind_operand(job, &w->operands[p->n_inputs + o], &job->run->outputs[o], rate);
    }
}

static void place_constants(te_walker *w)
{
    char *place = w->constants;
    for (int i = 0; i < w->job->program->n_inputs; i++) {
        if (!is_constant(w->job, i)) continue;
        w->operands[i].constant = true;
        for (int s = 0; s < w->plan->n_steps; s++)
            if (w->plan->steps[s].kind == TE_STEP_LOAD && w->plan->steps[s].operand == i)
                w->slot[w->plan->steps[s].dst] = place;
        place += w->register_bytes;
    }
}

/* An input that shares its memory with an output and is needed after that is stored cannot be read in place. */
static void settle_inputs(te_walker *w)
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

/* Whether an output of the value besides `output` is wanted, one that wants other elements where `bf16`. */
static bool has_other(const te_walker *w, int output, bool bf16)
{
    const te_plan *plan = w->plan;
    int            operand = w->job->program->n_inputs + output;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *store = &plan->steps[s];
        if (store->kind != TE_STEP_STORE || store->arg[0] != plan->direct[output].slot || store->operand == operand)
            continue;
        const te_bound_operand *other = &w->operands[store->operand];
        if (other->present && !(bf16 && other->dtype == TE_BF16 && !other->accumulate)) return true;
    }
    return false;
}

/* An output may be written by the step that makes its value unless the same memory, read in place, is needed later. */
static bool direct_allowed(const te_walker *w, int output)
{
    const te_plan          *plan = w->plan;
    const te_bound_operand *out = &w->operands[w->job->program->n_inputs + output];
    int                     made = plan->direct[output].step;
    bool half = plan->direct[output].half_ok && !has_other(w, output, true) && out->straight && out->dtype == TE_BF16 &&
                w->blocks->strip > 0 && w->job->tile_rows * w->job->tile_columns >= (int64_t)w->blocks->strip;
    if (made < 0 || !out->present || out->accumulate || !(out->in_place || half)) return false;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *step = &plan->steps[s];
        if (step->kind == TE_STEP_LOAD && step->last_use > made && w->operands[step->operand].base == out->base &&
            (step->half_ok || w->operands[step->operand].in_place))
            return false;
    }
    return true;
}

/* Outputs that would leave the caches before anybody reads them, and whose lines are not there as an input's. */
static void settle_streams(te_walker *w, int output)
{
    te_bound_operand *out = &w->operands[w->job->program->n_inputs + output];
    if (!te_job_streams(w->job, out->size)) return;
    out->streamed = w->direct[output] >= 0 && w->plan->direct[output].unread && !has_other(w, output, false);
    for (int i = 0; i < w->job->program->n_inputs; i++) out->streamed &= w->operands[i].base != out->base;
}

/* Whether tensors and one chain are all there is: then registers are used only between its links. */
static bool is_chain_of_tensors(const te_walker *w)
{
    const te_plan *plan = w->plan;
    int            chains = 0;
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step          *step = &plan->steps[s];
        const te_bound_operand *operand = &w->operands[step->operand > 0 ? step->operand : 0];
        if (step->kind == TE_STEP_LOAD) {
            if (!operand->in_place && !te_walker_takes_half(step, operand)) return false;
        } else if (step->kind == TE_STEP_STORE) {
            if (operand->present && w->direct[step->operand - w->job->program->n_inputs] != step->arg[0]) return false;
        } else if (step->kind == TE_STEP_OP && step->chain_end && chains++ == 0) {
            s = step->chain_end - 1;
        } else {
            return false;
        }
    }
    return chains == 1;
}

/* Short windows keep their registers in L1 beside the tensors that pass through it. */
static void settle_window(te_walker *w)
{
    enum { WINDOW = 512 };
    const te_job *job = w->job;
    size_t        strip = w->blocks->strip, most = job->tile_columns < WINDOW ? (size_t)job->tile_columns : WINDOW;
    w->window = 0;
    if (strip && job->kind == TE_PLAN_ROW && !job->band && !job->compiled->reduces_rows && is_chain_of_tensors(w))
        w->window = most / strip * strip;
}

/* Whether the next rows of an operand are not those at hand, and nothing else brings them. */
static bool goes_on(const te_walker *w, int operand)
{
    enum { LEAST = 512 };
    const te_bound_operand *bound = &w->operands[operand];
    return bound->present && bound->flat && !bound->constant && !bound->streamed &&
           te_walker_row_stride(w, bound) != 0 && w->job->tile_rows * w->job->columns * bound->size >= LEAST;
}

/* Inputs, and outputs with memory of their own that is too much for the second-level cache: stores would wait for their
 * lines, which those of a single row may do while the next one is summed, but not those of a band. */
static int find_fetched(const te_walker *w, int *fetched)
{
    enum { NEAR = 1 << 20 };
    const te_job *job = w->job;
    int           n = 0, n_inputs = job->program->n_inputs;
    for (int i = 0; i < n_inputs && n < TE_FETCHED_MAX; i++)
        if (goes_on(w, i)) fetched[n++] = i;
    for (int o = n_inputs; job->band && o < n_inputs + job->program->n_outputs && n < TE_FETCHED_MAX; o++) {
        bool own = goes_on(w, o) && job->rows * job->columns * w->operands[o].size > NEAR;
        for (int i = 0; i < n_inputs; i++) own &= w->operands[i].base != w->operands[o].base;
        if (own) fetched[n++] = o;
    }
    return n;
}

/* Lines [first, end) of all those that are fetched, one operand's behind the other's. */
static void take_share(const te_walker *w, te_share *share, const int *fetched, int n, size_t first, size_t end)
{
    int64_t rows = w->job->tile_rows;
    int     parts = 0;
    for (int i = 0; i < n; i++) {
        const te_bound_operand *operand = &w->operands[fetched[i]];
        size_t lines = (size_t)(rows * w->job->columns * operand->size) / TE_LINE, last = end < lines ? end : lines;
        if (first < last)
            share->part[parts++] = (struct te_share_part){.operand = fetched[i], .lines = last - first,
                .offset = rows * te_walker_row_stride(w, operand) + (int64_t)first * TE_LINE};
        first = first > lines ? first - lines : 0, end = end > lines ? end - lines : 0;
    }
}

/* Rows that are gone over several times leave memory idle meanwhile, and the hardware does not fetch the next ones by
 * itself, unless it is one short row after the other; nor those of bands that are added up, some columns of all rows at
 * a time, which shows where tensors are large. So each step that goes over rows fetches its share of the next tile's,
 * as long as both stay in the second-level cache: the first steps those of the first operands, the last ones those of
 * the last. Lines all at once would hold up what is at hand. Rows that are gone over once follow each other in memory,
 * and fetching takes longer than it saves. */
static void settle_shares(te_walker *w)
{
    enum { ALONE = 4 << 10, MOST = 384 << 10, FAR = 4 << 20 };
    const te_job *job = w->job;
    int64_t       bytes = 0, rows = job->tile_rows;
    size_t        lines = 0, turns = (size_t)w->plan->n_turns;
    int           fetched[TE_FETCHED_MAX];
    w->fetches = false;
    memset(w->shares, 0, turns * sizeof *w->shares);
    bool waits = (job->compiled->reduces_rows && turns > 1) || (job->band && job->plan->adds && job->bytes >= FAR);
    if (!waits || job->kind == TE_PLAN_ROWS || job->rows <= rows) return;
    int n = find_fetched(w, fetched);
    for (int i = 0; i < n; i++) {
        bytes += rows * job->columns * w->operands[fetched[i]].size;
        lines += (size_t)(rows * job->columns * w->operands[fetched[i]].size) / TE_LINE;
    }
    if (bytes > MOST || (n < 2 && bytes < ALONE)) return;
    w->fetches = true;
    for (size_t t = 0; t < turns; t++)
        take_share(w, &w->shares[t], fetched, n, lines * t / turns, lines * (t + 1) / turns);
}

void te_walker_uniform_value(te_walker *w, int v)
{
    const te_run  *run = w->job->run;
    const te_insn *insn = &w->job->program->insns[v];
    if (insn->op == TE_PW_CONST) {
        w->blocks->set(w->slot[v], insn->imm);
    } else if (insn->op == TE_PW_PARAM) {
        w->blocks->set(w->slot[v], run->params[insn->slot]);
    } else if (insn->op == TE_PW_LOAD) {
        const te_operand *in = &run->inputs[insn->slot];
        w->blocks->load[in->dtype](w->slot[v], in->data, 1, in->data ? 1 : 0);
    } else {
        const char *arg[3] = {NULL, NULL, NULL};
        for (int k = 0; k < te_opcode_args(insn->op); k++) arg[k] = w->slot[insn->arg[k]];
        w->blocks->op[insn->op][0](w->slot[v], arg[0], arg[1], arg[2], 1);
    }
    /* one per row, as others */
    if (w->job->band) w->blocks->repeat(w->slot[v], w->slot[v], 1, (size_t)w->job->tile_rows);
}

void te_walker_uniform(te_walker *w)
{
    const te_program *p = w->job->program;
    for (int v = 0; v < p->n_insns; v++)
        if (p->insns[v].rate == TE_RATE_UNIFORM) te_walker_uniform_value(w, v);
}

/* Of registers and constants; those of tensors are known once a slot is pointed at one. */
static void settle_steps(te_walker *w)
{
    const te_plan *plan = w->plan;
    for (int i = 0; i < plan->n_slots; i++) {
        const te_slot *slot = &plan->slots[i];
        w->step[i] = slot->kind == TE_SLOT_REGISTER && !slot->brief ? w->job->columns * (int64_t)w->blocks->size : 0;
    }
    for (int s = 0; s < plan->n_steps; s++)
        if (plan->steps[s].kind == TE_STEP_LOAD && w->operands[plan->steps[s].operand].constant)
            w->step[plan->steps[s].dst] = 0;
}

void te_walker_bind(te_walker *w)
{
    const te_job *job = w->job;
    bind_operands(job, w);
    place_constants(w);
    if (job->band) settle_steps(w);
    settle_inputs(w);
    for (int o = 0; o < job->program->n_outputs; o++) {
        w->direct[o] = direct_allowed(w, o) ? job->plan->direct[o].slot : -1;
        settle_streams(w, o);
    }
    settle_window(w);
    settle_shares(w);
}
