/* program_again.c - small runs that come again.
 *
 * A run of a few elements takes less time than finding out how to run it: geometry, layout of the workspace, which operands
 * are read and written in place. None of that depends on where the operands lie, only on shape, strides, types and on
 * which outputs have the memory of which inputs. So a program keeps its last small runs as te_walkers in workspaces of
 * their own, and a run like one of them is done by pointing that te_walker at its operands.
 *
 * Small is what one chunk and PLACE_BYTES of workspace hold. All runs of a call must be small, and together too little
 * work for a second thread; else nothing is done here and the call goes the long way, which also finds the words for
 * mistakes.
 */
#include "program_walker.h"

/* What a run has in common with those that it is bound like; followed by the workspace, at a multiple of 64. */
struct te_again {
    te_walker  walker;
    te_job     job;       /* whose run is the one at hand */
    bool       joins;     /* sums are left in parts */
    size_t     bytes;     /* of this struct and its workspace */
    int        ndim;
    bool       compute_f64;
    int64_t    shape[TE_MAX_DIMS];
    uint64_t   shared;    /* as shared_memory() says */
    te_operand operands[]; /* inputs, then outputs; of the data only whether it is there */
};

enum { PLACE_BYTES = 8 << 10, PARTS_BYTES = 4 << 10, MOST_ELEMENTS = TE_CHUNK, MOST_RUNS = 64, MOST_WORK = 1 << 18 };

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
    if (a->dtype != b->dtype || a->accumulate != b->accumulate || !a->data != !b->data) return false;
    for (int d = 0; d < ndim; d++)
        if (a->stride[d] != b->stride[d]) return false;
    return true;
}

static bool bound_like(const te_again *again, const te_program *program, const te_run *run, const te_blocks *blocks)
{
    if (again->ndim != run->ndim || again->compute_f64 != run->compute_f64 || again->job.blocks != blocks) return false;
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
static te_again *make_room(te_compiled *compiled, const te_mem *mem, uint32_t claimed, size_t bytes, int *place)
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
        *place = at;
        return *again;
    }
    return NULL;
}

static void remember(te_again *again, const te_program *program, const te_run *run)
{
    again->ndim = run->ndim;
    again->compute_f64 = run->compute_f64;
    memcpy(again->shape, run->shape, sizeof again->shape);
    again->shared = shared_memory(program, run);
    memcpy(again->operands, run->inputs, (size_t)program->n_inputs * sizeof *run->inputs);
    memcpy(again->operands + program->n_inputs, run->outputs, (size_t)program->n_outputs * sizeof *run->outputs);
}

/* Binds the run to stay; -1 where that is not to be, be it that there is a mistake in it. */
static int keep(te_exec *exec, te_program *program, const te_run *run, uint32_t claimed)
{
    te_compiled *compiled = program->compiled;
    te_job       job;
    if (te_job_describe(exec, program, run, &job) != TE_OK || te_job_chunks(&job) != 1) return -1;
    size_t parts = te_job_parts(&job), workspace = te_job_workspace(&job);
    if (workspace > PLACE_BYTES || parts > PARTS_BYTES) return -1;
    size_t head = te_align64(sizeof(te_again) + (size_t)(program->n_inputs + program->n_outputs) * sizeof(te_operand));
    int    place;
    te_again *again = make_room(compiled, program->mem, claimed, head + 64 + workspace, &place);
    if (!again) return -1;
    remember(again, program, run);
    again->job = job;
    again->joins = parts > 0;
    uintptr_t base = (uintptr_t)again + head;
    te_walker_start(&again->walker, &again->job, (char *)again + head + (-base & 63), NULL);
    return place;
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

static void run_again(te_exec *exec, te_again *again, const te_program *program, const te_run *run)
{
    _Alignas(64) char parts[PARTS_BYTES];
    te_walker *w = &again->walker;
    again->job.exec = exec;
    again->job.run = run;
    w->parts = parts;
    for (int i = 0; i < program->n_inputs; i++) {
        w->operands[i].base = run->inputs[i].data;
        w->operands[i].loaded = 0;
    }
    for (int o = 0; o < program->n_outputs; o++) w->operands[program->n_inputs + o].base = run->outputs[o].data;
    te_walker_uniform(w);
    te_walker_chunk(w, 0);
    if (again->joins) te_job_join(&again->job, parts, 1);
}

bool te_program_run_again(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_compiled *compiled = program->compiled;
    uint8_t      place[MOST_RUNS];
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
        place[r] = (uint8_t)at;
        claimed |= (uint32_t)1 << at;
    }
    for (int r = 0; r < n_runs; r++) run_again(exec, compiled->again[place[r]], program, &runs[r]);
    return true;
}
