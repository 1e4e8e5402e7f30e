/* program_again.c - small runs that come again.
 *
 * A run of a few elements takes less time than finding out how to run it: geometry, layout of the workspace, which
 * operands are read and written in place. None of that depends on where the operands lie, only on shape, strides, types
 * and on which outputs have the memory of which inputs. So a program keeps its last small runs as te_walkers in
 * workspaces of their own, and a run like one of them is done by pointing that te_walker at its operands. Where the run
 * is a single tile, what each step will do is known as well: loads and stores of tensors that are read and written in
 * place are but pointers, and the steps that remain are listed.
 *
 * Small is what is one chunk and takes MOST_BYTES to keep. All runs of a call must be small, and together too little
 * work for a second thread; else nothing is done here and the call goes the long way, which also finds the words for
 * mistakes.
 */
#include "program_walker.h"

/* A slot that is an operand's memory. */
typedef struct place {
    int32_t slot, operand;
} place;

/* What a run has in common with those that it is bound like; followed by the lists and the workspace. */
struct te_again {
    te_walker   walker;
    te_job      job;      /* whose run is the one at hand */
    size_t      bytes;    /* of this struct and all that follows */
    int         ndim;
    bool        compute_f64, small;
    bool        joins;    /* sums are left in parts */
    bool        one_tile; /* the lists below are all there is to do */
    int64_t     shape[TE_MAX_DIMS];
    uint64_t    shared;   /* as shared_memory() says */
    te_operand *operands; /* inputs, then outputs; of the data only whether it is there */
    place      *places;
    int32_t    *steps;    /* to run; ~s: the chain that begins with step s */
    int32_t    *uniform;  /* values to compute, constants left out */
    int         n_places, n_steps, n_uniform;
};

enum { MOST_BYTES = 12 << 10, PARTS_BYTES = 4 << 10, MOST_ELEMENTS = TE_CHUNK, MOST_RUNS = 64, MOST_WORK = 1 << 18 };

_Static_assert(TE_AGAIN_COUNT <= 32, "a bit for each in a mask");

/* --- finding ------------------------------------------------------------------------------------------------------ */

/* Bit o * n_inputs + i: output o begins where input i does. */
static uint64_t shared_memory(const te_program *program, const te_run *run)
{
    uint64_t shared = 0, bit = 1;
    for (int o = 0; o < program->n_outputs; o++)
        for (int i = 0; i < program->n_inputs; i++, bit <<= 1)
            if (run->outputs[o].data == run->inputs[i].data) shared |= bit;
    return shared;
}

static inline bool same_operand(const te_operand *a, const te_operand *b, int ndim)
{
    if (a->dtype != b->dtype || a->accumulate != b->accumulate || !a->data != !b->data || a->block != b->block)
        return false;
    for (int d = 0; d < ndim; d++)
        if (a->stride[d] != b->stride[d]) return false;
    return true;
}

static bool bound_like(const te_again *again, const te_program *program, const te_run *run, const te_blocks *blocks)
{
    if (again->ndim != run->ndim || again->compute_f64 != run->compute_f64 || again->job.blocks != blocks) return false;
    if (again->small != (run->small != NULL)) return false;
    for (int d = 0; d < run->ndim; d++)
        if (again->shape[d] != run->shape[d]) return false;
    for (int i = 0; i < program->n_inputs; i++)
        if (!same_operand(&again->operands[i], &run->inputs[i], run->ndim)) return false;
    for (int o = 0; o < program->n_outputs; o++)
        if (!same_operand(&again->operands[program->n_inputs + o], &run->outputs[o], run->ndim)) return false;
    return again->shared == shared_memory(program, run);
}

static bool is_small(const te_program *program, const te_run *run, int64_t *elements)
{
    if (run->ndim < 1 || run->ndim > TE_MAX_DIMS || program->n_inputs * program->n_outputs > 64) return false;
    *elements = 1;
    for (int d = 0; d < run->ndim; d++) {
        if (run->shape[d] < 1 || run->shape[d] > MOST_ELEMENTS) return false;
        if ((*elements *= run->shape[d]) > MOST_ELEMENTS) return false;
    }
    return true;
}

/* --- keeping ------------------------------------------------------------------------------------------------------ */

void te_again_free(const te_mem *mem, te_again *again)
{
    if (again) te_mem_free(mem, again, again->bytes);
}

/* A place that is not among the claimed ones, with room for that many bytes; NULL: none. */
static te_again *make_room(te_compiled *compiled, const te_mem *mem, uint32_t claimed, size_t bytes, int *index)
{
    for (int turn = 0; turn < TE_AGAIN_COUNT; turn++) {
        int at = (int)(compiled->next_again++ % TE_AGAIN_COUNT);
        if (claimed >> at & 1) continue;
        te_again **again = &compiled->again[at];
        if (*again && (*again)->bytes < bytes) {
            te_again_free(mem, *again);
            *again = NULL;
        }
        if (!*again && (*again = te_mem_alloc(mem, bytes))) (*again)->bytes = bytes;
        *index = at;
        return *again;
    }
    return NULL;
}

static void remember(te_again *again, const te_program *program, const te_run *run)
{
    again->ndim = run->ndim;
    again->compute_f64 = run->compute_f64;
    again->small = run->small != NULL;
    memcpy(again->shape, run->shape, sizeof again->shape);
    again->shared = shared_memory(program, run);
    memcpy(again->operands, run->inputs, (size_t)program->n_inputs * sizeof *run->inputs);
    memcpy(again->operands + program->n_inputs, run->outputs, (size_t)program->n_outputs * sizeof *run->outputs);
}

static void list_uniform(te_again *again, const te_program *program)
{
    again->n_uniform = 0;
    for (int v = 0; v < program->n_insns; v++) {
        if (program->insns[v].rate != TE_RATE_UNIFORM) continue;
        if (program->insns[v].op == TE_PW_CONST) te_walker_uniform_value(&again->walker, v);
        else again->uniform[again->n_uniform++] = v;
    }
}

static bool is_one_tile(const te_job *job)
{
    return job->kind <= TE_PLAN_ROWS && job->n_outer <= 1 && job->rows <= job->tile_rows &&
           job->columns <= job->tile_columns;
}

/* Goes over the steps as a tile does and lists what is left of them. */
static void list_steps(te_again *again)
{
    te_walker     *w = &again->walker;
    const te_plan *plan = w->plan;
    w->tile_rows = (size_t)again->job.rows;
    w->tile_columns = (size_t)again->job.columns;
    w->row_number = w->column = w->row_chunk = 0;
    again->n_places = again->n_steps = 0;
    for (int o = 0; o < again->job.program->n_outputs; o++)
        if (te_walker_point_output(w, o))
            again->places[again->n_places++] = (place){w->direct[o], again->job.program->n_inputs + o};
    for (int s = 0; s < plan->n_steps; s++) {
        const te_step *step = &plan->steps[s];
        if (step->kind == TE_STEP_LOAD && te_walker_point_load(w, step)) {
            again->places[again->n_places++] = (place){step->dst, step->operand};
        } else if (te_walker_takes_chain(w, s)) {
            again->steps[again->n_steps++] = ~s;
            s = step->chain_end - 1;
        } else if (step->kind != TE_STEP_STORE || !te_walker_stored(w, step)) {
            again->steps[again->n_steps++] = s;
        }
    }
}

/* Points the te_walker at the operands of a run. */
static void point_at(te_again *again, te_exec *exec, const te_run *run)
{
    te_walker *w = &again->walker;
    int        n_inputs = w->job->program->n_inputs, n_outputs = w->job->program->n_outputs;
    again->job.exec = exec;
    again->job.run = run;
    for (int i = 0; i < n_inputs; i++) {
        w->row[i] = w->operands[i].base = run->inputs[i].data;
        w->operands[i].loaded = 0;
    }
    for (int o = 0; o < n_outputs; o++) w->row[n_inputs + o] = w->operands[n_inputs + o].base = run->outputs[o].data;
}

/* The struct, lists and workspace in one block; with base NULL only the size. */
static size_t lay_out(te_again *again, const te_job *job, char *base)
{
    const te_program *program = job->program;
    size_t            operands = (size_t)(program->n_inputs + program->n_outputs), at = te_align64(sizeof *again);
    size_t            steps = (size_t)job->plan->n_steps, places = steps + (size_t)program->n_outputs;
    size_t starts[4], sizes[4] = {operands * sizeof(te_operand), places * sizeof(place), steps * sizeof(int32_t),
                                  (size_t)program->n_insns * sizeof(int32_t)};
    for (int i = 0; i < 4; i++) {
        starts[i] = at;
        at += te_align64(sizes[i]);
    }
    if (base) {
        again->operands = (te_operand *)(void *)(base + starts[0]);
        again->places = (place *)(void *)(base + starts[1]);
        again->steps = (int32_t *)(void *)(base + starts[2]);
        again->uniform = (int32_t *)(void *)(base + starts[3]);
        te_walker_start(&again->walker, &again->job, base + at + (-(uintptr_t)(base + at) & 63), NULL);
    }
    return at + 64 + te_job_workspace(job);
}

/* Binds the run to stay; -1 where that is not to be, be it that there is a mistake in it. */
static int keep(te_exec *exec, te_program *program, const te_run *run, uint32_t claimed)
{
    te_job job;
    int    index;
    if (te_job_describe(exec, program, run, &job) != TE_OK || te_job_chunks(&job) != 1) return -1;
    size_t parts = te_job_parts(&job), bytes = lay_out(NULL, &job, NULL);
    if (bytes > MOST_BYTES || parts > PARTS_BYTES) return -1;
    te_again *again = make_room(program->compiled, program->mem, claimed, bytes, &index);
    if (!again) return -1;
    again->job = job;
    lay_out(again, &job, (char *)again);
    remember(again, program, run);
    again->joins = parts > 0;
    again->one_tile = !again->joins && is_one_tile(&job);
    point_at(again, exec, run);
    list_uniform(again, program);
    if (again->one_tile) list_steps(again);
    return index;
}

static int find(te_exec *exec, te_program *program, const te_run *run, uint32_t claimed)
{
    const te_compiled *compiled = program->compiled;
    const te_blocks   *blocks = te_job_blocks(exec, run->compute_f64);
    for (int at = 0; at < TE_AGAIN_COUNT; at++)
        if (compiled->again[at] && bound_like(compiled->again[at], program, run, blocks)) return at;
    return keep(exec, program, run, claimed);
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static void run_one_tile(te_again *again)
{
    te_walker *w = &again->walker;
    for (int i = 0; i < again->n_places; i++) w->slot[again->places[i].slot] = w->row[again->places[i].operand];
    for (int i = 0; i < again->n_steps; i++) {
        int s = again->steps[i];
        if (s < 0) te_walker_chain(w, ~s);
        else te_walker_step(w, &w->plan->steps[s]);
    }
}

static void run_chunk(te_again *again)
{
    _Alignas(64) char parts[PARTS_BYTES];
    again->walker.parts = parts;
    te_walker_chunk(&again->walker, 0);
    if (again->joins) te_job_join(&again->job, parts, 1);
}

static void run_again(te_exec *exec, te_again *again, const te_run *run)
{
    point_at(again, exec, run);
    for (int i = 0; i < again->n_uniform; i++) te_walker_uniform_value(&again->walker, again->uniform[i]);
    if (again->one_tile) run_one_tile(again);
    else run_chunk(again);
}

bool te_program_run_again(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_compiled *compiled = program->compiled;
    uint8_t      places[MOST_RUNS];
    uint32_t     claimed = 0;
    int64_t      elements, all = 0;
    if (n_runs > MOST_RUNS) return false;
    for (int r = 0; r < n_runs; r++) {
        if (!is_small(program, &runs[r], &elements)) return false;
        all += elements;
    }
    if (all * compiled->cost >= MOST_WORK) return false;
    for (int r = 0; r < n_runs; r++) {
        int at = find(exec, program, &runs[r], claimed);
        if (at < 0) return false;
        places[r] = (uint8_t)at;
        claimed |= (uint32_t)1 << at;
    }
    for (int r = 0; r < n_runs; r++) run_again(exec, compiled->again[places[r]], &runs[r]);
    return true;
}
