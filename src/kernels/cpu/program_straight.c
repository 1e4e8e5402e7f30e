/* program_straight.c - inputs whose rows run across memory, turned before a program reads them.
 *
 * The interpreter goes along rows. Where the elements of a row lie apart and those of neighbouring rows side by side,
 * as in x:max(1) or a transposed view, it would use one element of every line that it fetches, and lines that are a
 * multiple of some power of two apart throw each other out of the cache before their next element is due. Turning such
 * an input tile by tile first reads and writes it once. Where elements do not depend on each other, the run is cut into
 * slabs for that, so that what was turned is still in a near cache when it is read.
 */
#include "program_exec.h"

#include <string.h>

enum { STRAIGHT_INPUTS = 8 };

/* A run with dense copies of the inputs that are `turned`, bits by input. */
typedef struct straight_run {
    te_run     run;
    te_operand inputs[STRAIGHT_INPUTS];
    unsigned   turned;
} straight_run;

enum { LEAST = 1 << 14 /* elements */, BESIDE = 8 /* rows that lie side by side */ };

/* Slabs: bytes of the largest elements, for one thread and for each of several that share a slab; and the shortest
 * sides of those that are cut along the row and across. */
enum { SLAB = 256 << 10, SLAB_SHARED = 2 << 20, SLAB_ALONG = 512, SLAB_ACROSS = 64 };

/* The dimension in which the elements of a row follow each other, -1: rows are single elements. */
static int row_axis(const te_run *run)
{
    int d = run->ndim - 1;
    while (d >= 0 && run->shape[d] == 1) d--;
    return d;
}

static bool runs_across(const te_run *run, const te_operand *in, int axis, int64_t elements)
{
    if (!in->data || in->block || in->quantized || in->stride[axis] < BESIDE || elements < LEAST) return false;
    bool beside = false;
    for (int d = 0; d < axis; d++) {
        if (run->shape[d] > 1 && in->stride[d] == 0) return false; /* what repeats would be written out */
        beside |= in->stride[d] == 1 && run->shape[d] >= BESIDE;
    }
    return beside;
}

/* Puts a dense copy in an input's place, unless there is no memory for one: then it is read where it is. */
static te_status turn(te_exec *exec, const te_run *run, te_operand *in, int64_t elements, bool *turned)
{
    te_view from = {.data = in->data, .dtype = in->dtype, .ndim = run->ndim}, to = from;
    int64_t step = 1;
    for (int d = run->ndim - 1; d >= 0; d--) {
        from.shape[d] = to.shape[d] = run->shape[d];
        from.stride[d] = in->stride[d];
        to.stride[d] = step;
        step *= run->shape[d];
    }
    to.data = exec->scratch(exec, (size_t)elements * te_dtype_size(in->dtype));
    if (!to.data) return TE_OK;
    in->data = to.data;
    memcpy(in->stride, to.stride, sizeof in->stride);
    *turned = true;
    return te_cpu_copy(exec, &to, &from);
}

static int64_t elements_of(const te_run *run)
{
    int64_t elements = 1;
    for (int d = 0; d < run->ndim; d++)
        if (run->shape[d] < 0 || __builtin_mul_overflow(elements, run->shape[d], &elements)) return -1;
    return elements;
}

/* Makes the run that is better done in the other's place, perhaps the same; to be freed whatever comes of it. */
static te_status straighten(te_exec *exec, const te_program *program, const te_run *run, straight_run *straight)
{
    int64_t   elements = elements_of(run);
    int       axis = row_axis(run);
    te_status status = TE_OK;
    straight->turned = 0;
    straight->run = *run;
    if (axis < 0 || run->ndim > TE_MAX_DIMS || program->n_inputs > STRAIGHT_INPUTS || elements < 0) return TE_OK;
    for (int i = 0; i < program->n_inputs; i++) {
        bool turned = false;
        straight->inputs[i] = run->inputs[i];
        if (status == TE_OK && program->input_rates[i] == TE_RATE_ELEM &&
            runs_across(run, &run->inputs[i], axis, elements))
            status = turn(exec, run, &straight->inputs[i], elements, &turned);
        straight->turned |= (unsigned)turned << i;
    }
    if (straight->turned) straight->run.inputs = straight->inputs;
    return status;
}

static te_status run_straight(te_exec *exec, te_program *program, const te_run *run, te_program_runner *runner)
{
    straight_run straight;
    te_status   status = straighten(exec, program, run, &straight);
    if (status == TE_OK) status = runner(exec, program, &straight.run);
    for (int i = 0; i < STRAIGHT_INPUTS; i++)
        if (straight.turned >> i & 1) exec->scratch_free(exec, straight.inputs[i].data);
    return status;
}

/* --- slabs -------------------------------------------------------------------------------------------------------- */

typedef struct slabs {
    const te_run *run;
    int64_t       piece[TE_MAX_DIMS]; /* lengths of a slab's sides */
} slabs;

/* Whether elements follow from those in the same place alone and are written where nothing is read. */
static bool is_pointwise(const te_program *program, const te_run *run)
{
    bool is = program->n_rngs == 0 && program->n_outputs == 1 && program->outputs[0].kind == TE_OUT_ELEM &&
              !run->outputs[0].block && !run->outputs[0].quantized;
    for (int v = 0; v < program->n_insns; v++)
        is &= program->insns[v].op != TE_PW_COLUMN && program->insns[v].rate != TE_RATE_ROW;
    for (int i = 0; i < program->n_inputs; i++)
        is &= !run->inputs[i].block && run->inputs[i].data != run->outputs[0].data;
    return is;
}

/* Bit d: inputs that run across lie side by side in dimension d; and the size of the largest of their elements. */
static unsigned sides_of(const te_program *program, const te_run *run, int axis, int64_t elements, int64_t *size)
{
    unsigned sides = 0;
    for (int i = 0; i < program->n_inputs; i++) {
        const te_operand *in = &run->inputs[i];
        if (program->input_rates[i] != TE_RATE_ELEM || !runs_across(run, in, axis, elements)) continue;
        if ((int64_t)te_dtype_size(in->dtype) > *size) *size = (int64_t)te_dtype_size(in->dtype);
        for (int d = 0; d < axis && d < TE_MAX_DIMS; d++) sides |= (unsigned)(in->stride[d] == 1) << d;
    }
    return sides;
}

/* Cuts the outer dimensions first; false: there is nothing to turn, or the run is no larger than a slab. */
static bool cut(const te_exec *exec, const te_program *program, const te_run *run, slabs *s)
{
    int64_t elements = elements_of(run), size = 0;
    int     axis = row_axis(run);
    if (axis < 0 || run->ndim > TE_MAX_DIMS || program->n_inputs > STRAIGHT_INPUTS || !is_pointwise(program, run))
        return false;
    unsigned sides = sides_of(program, run, axis, elements, &size);
    int64_t  most = size ? (exec->threads > 1 ? SLAB_SHARED * (int64_t)exec->threads : SLAB) / size : 0;
    if (!sides || elements <= 2 * most) return false;
    s->run = run;
    memcpy(s->piece, run->shape, sizeof s->piece);
    for (int d = 0; d <= axis && elements > most; d++) {
        int64_t inner = elements / s->piece[d], least = d == axis ? SLAB_ALONG : sides >> d & 1 ? SLAB_ACROSS : 1;
        int64_t n = most / inner > least ? most / inner / least * least : least;
        if (n < s->piece[d]) s->piece[d] = n;
        elements = inner * s->piece[d];
    }
    return true;
}

static void move_operand(te_operand *operand, const te_run *run, const int64_t *at)
{
    int64_t offset = 0;
    for (int d = 0; d < run->ndim; d++) offset += at[d] * operand->stride[d];
    operand->data = (char *)operand->data + offset * (int64_t)te_dtype_size(operand->dtype);
}

/* To the next slab's first element; false: that was the last one. */
static bool next_slab(const slabs *s, int64_t *at)
{
    for (int d = s->run->ndim - 1; d >= 0; d--) {
        if ((at[d] += s->piece[d]) < s->run->shape[d]) return true;
        at[d] = 0;
    }
    return false;
}

static te_status run_slabs(te_exec *exec, te_program *program, const slabs *s, te_program_runner *runner)
{
    int64_t   at[TE_MAX_DIMS] = {0};
    te_status status;
    do {
        te_operand inputs[STRAIGHT_INPUTS], output = s->run->outputs[0];
        te_run     run = *s->run;
        run.inputs = inputs;
        run.outputs = &output;
        for (int i = 0; i < program->n_inputs; i++) {
            inputs[i] = s->run->inputs[i];
            if (program->input_rates[i] == TE_RATE_ELEM) move_operand(&inputs[i], &run, at);
        }
        move_operand(&output, &run, at);
        for (int d = 0; d < run.ndim; d++)
            if (run.shape[d] - at[d] < s->piece[d]) run.shape[d] -= at[d];
            else run.shape[d] = s->piece[d];
        status = run_straight(exec, program, &run, runner);
    } while (status == TE_OK && !te_cpu_stopped(exec) && !te_run_exceeded(s->run) && next_slab(s, at));
    return status;
}

te_status te_program_run_straight(te_exec *exec, te_program *program, const te_run *run, te_program_runner *runner)
{
    slabs s;
    if (cut(exec, program, run, &s)) return run_slabs(exec, program, &s, runner);
    return run_straight(exec, program, run, runner);
}
