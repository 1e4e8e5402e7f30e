/* program_run.c - the backend's entry for programs: memory, threads, and the joining of sums.
 *
 * All runs of a call share one loop of the workers. The chunks of all of them, one run after the other, are dealt out
 * in contiguous pieces of equal numbers of elements. Small calls, and most calls of a training step are small, take
 * neither threads nor memory: their workspace is on the stack. The smallest do not even come that far: program_again.c.
 */
#include "program_exec.h"
#include "workers.h"

#include <math.h>

/* Below this many element-additions calling workers costs more than it saves. */
enum { PARALLEL_WORK = 1 << 18, STACK_WORKSPACE = 48 << 10, STACK_PARTS = 4 << 10 };

/* What a call works on. Jobs but the first are described again where they are needed, which costs less than keeping
 * them. */
typedef struct call {
    te_exec      *exec;
    te_program   *program;
    const te_run *runs;
    int           n_runs;
    size_t        workspace; /* bytes for the largest job */
    size_t        parts;     /* bytes for the parts of all jobs */
    int64_t       elements, chunks;
    int64_t       bytes;     /* of the tensors of all jobs */
    te_job        first;     /* the first run's, and mostly the only one */
} call;

static void tell_job(const call *c, te_job *job)
{
    job->elements = c->elements;
    job->bytes = c->bytes;
}

static te_status survey(call *c)
{
    for (int r = 0; r < c->n_runs; r++) {
        te_job    other, *job = r == 0 ? &c->first : &other;
        te_status status = te_job_describe(c->exec, c->program, &c->runs[r], job);
        if (status != TE_OK) return status;
        size_t workspace = te_job_workspace(job);
        if (workspace > c->workspace) c->workspace = workspace;
        c->parts += te_job_parts(job);
        c->elements += te_job_elements(job);
        c->bytes += job->bytes;
        c->chunks += te_job_chunks(job);
    }
    if (c->n_runs > 0) tell_job(c, &c->first);
    return TE_OK;
}

/* The job of a run that was surveyed, so that describing it anew cannot fail. */
static const te_job *job_of(const call *c, int run, te_job *other)
{
    if (run == 0) return &c->first;
    (void)te_job_describe(c->exec, c->program, &c->runs[run], other);
    tell_job(c, other);
    return other;
}

/* Of a run's chunks, the first that starts at `element` or later; chunk i starts at i * elements / chunks. Threads that
 * ask for the same element get the same answer, which is all that matters, so that rounding may move it: the exact
 * product need not fit 64 bits. */
static int64_t first_chunk(int64_t element, int64_t elements, int64_t chunks)
{
    if (element <= 0) return 0;
    if (element >= elements) return chunks;
    int64_t first = (int64_t)ceil((double)element * ((double)chunks / (double)elements));
    return first < chunks ? first : chunks;
}

/* The share of thread `index` of `count`: each chunk that starts within the thread's stretch of all elements. */
static void run_share(const call *c, int index, int count, void *workspace, char *parts)
{
    int64_t begin = c->elements / count * index + c->elements % count * index / count;
    int64_t end = c->elements / count * (index + 1) + c->elements % count * (index + 1) / count, before = 0;
    for (int r = 0; r < c->n_runs; r++) {
        te_job        other;
        const te_job *job = job_of(c, r, &other);
        int64_t       elements = te_job_elements(job), chunks = te_job_chunks(job);
        if (chunks > 0) {
            int64_t first = first_chunk(begin - before, elements, chunks),
                    last = first_chunk(end - before, elements, chunks);
            if (first < last) te_job_run(job, first, last, workspace, parts);
        }
        before += elements;
        parts += te_job_parts(job);
    }
}

typedef struct shares {
    const call *c;
    int         count;
    char       *workspace, *parts;
    bool        each; /* thread has a workspace there, not the caller alone */
} shares;

static void run_in(const shares *s, int64_t first, int64_t end, char *workspace)
{
    for (int64_t i = first; i < end; i++) run_share(s->c, (int)i, s->count, workspace, s->parts);
}

/* Of a worker; the caller, whose stack may be small, has its workspace already. */
static __attribute__((noinline)) void run_on_stack(const shares *s, int64_t first, int64_t end)
{
    _Alignas(64) char stack[STACK_WORKSPACE];
    run_in(s, first, end, stack);
}

static void run_shares(void *context, int64_t first, int64_t end, int thread)
{
    const shares *s = context;
    if (thread == 0 || s->each) run_in(s, first, end, s->workspace + (size_t)thread * s->c->workspace);
    else run_on_stack(s, first, end);
}

static void run_all(const call *c, int threads, char *workspace, char *parts)
{
    if (threads == 1) {
        run_share(c, 0, 1, workspace, parts);
        return;
    }
    shares s = {c, threads, workspace, parts, c->workspace > STACK_WORKSPACE};
    te_cpu_loop(c->exec, threads, threads, 1, run_shares, &s);
}

static void join_all(const call *c, int threads, char *parts)
{
    for (int r = 0; r < c->n_runs; r++) {
        te_job        other;
        const te_job *job = job_of(c, r, &other);
        te_job_join(job, parts, threads);
        parts += te_job_parts(job);
    }
}

static te_status run_long(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    _Alignas(64) char stack[STACK_WORKSPACE], stack_parts[STACK_PARTS];
    te_table_run by_table;
    if (n_runs == 1 && te_program_look_up(exec, program, runs, &by_table)) {
        program = by_table.program;
        runs = &by_table.run;
    }
    call c = {.exec = exec, .program = program, .runs = runs, .n_runs = n_runs};
    te_status status = survey(&c);
    if (status != TE_OK) return status;

    int64_t work = c.elements * ((const te_compiled *)program->compiled)->cost;
    int     threads = work < PARALLEL_WORK || c.chunks < 2 ? 1 : exec->threads;
    if (threads > c.chunks) threads = (int)c.chunks;
    if (threads < 1) threads = 1;
    char *workspace = stack, *parts = stack_parts;
    void *more_workspace = NULL, *more_parts = NULL;
    if (c.workspace > STACK_WORKSPACE) workspace = more_workspace = exec->scratch(exec, c.workspace * (size_t)threads);
    if (c.parts > STACK_PARTS) parts = more_parts = exec->scratch(exec, c.parts);
    if ((c.workspace > STACK_WORKSPACE && !workspace) || !parts) {
        status = TE_ERROR_MEMORY;
    } else {
        run_all(&c, threads, workspace, parts);
        if (!te_cpu_stopped(exec)) join_all(&c, threads, parts);
    }
    if (more_parts) exec->scratch_free(exec, more_parts);
    if (more_workspace) exec->scratch_free(exec, more_workspace);
    return status;
}

/* One run, a long row perhaps in pieces. */
static te_status run_alone(te_exec *exec, te_program *program, const te_run *run)
{
    te_pieces pieces;
    if (!te_program_cut(exec, program, run, &pieces)) return run_long(exec, program, run, 1);
    te_status status = run_long(exec, program, pieces.runs, pieces.n);
    if (status == TE_OK && !te_cpu_stopped(exec))
        status = run_long(exec, program, &pieces.runs[TE_PIECES_LAST], 1);
    exec->scratch_free(exec, pieces.room);
    return status;
}

static te_status run_however(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_status status = TE_OK;
    if (te_program_run_again(exec, program, runs, n_runs)) return status;
    if (te_program_whole_run(exec, program, runs, n_runs)) return status;
    if (te_program_whole_rows_run(exec, program, runs, n_runs)) return status;
    if (te_program_copy_run(exec, program, runs, n_runs, &status)) return status;
    if (n_runs == 1 && te_program_across_run(exec, program, runs, &status)) return status;
    if (n_runs == 1) return te_program_run_straight(exec, program, runs, run_alone);
    return run_long(exec, program, runs, n_runs);
}

/* Whether numbers of 64 bits are made of such numbers: by integers sooner than by float32, which is half as wide. */
static bool stays_wide(const te_program *program, const te_run *run)
{
    return program->n_inputs && program->n_outputs && run->inputs[0].dtype == TE_I64 && run->outputs[0].dtype == TE_I64;
}

te_status te_cpu_program_run(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_small  small;
    te_status status = te_program_compile(exec, program);
    if (status != TE_OK) return status;
    if (n_runs == 1 && stays_wide(program, runs) && te_program_whole_run(exec, program, runs, 1))
        return te_cpu_finish(exec, status);
    if (n_runs == 1 && te_program_small_run(program, runs, &small)) {
        status = run_however(exec, program, &small.run, 1);
        if (status != TE_OK || !te_run_exceeded(&small.run)) return te_cpu_finish(exec, status);
    }
    return te_cpu_finish(exec, run_however(exec, program, runs, n_runs));
}
