/* program_straight.c - inputs whose rows run across memory, turned before a program reads them.
 *
 * The interpreter goes along rows. Where the elements of a row lie apart and those of neighbouring rows side by side,
 * as in x:max(1) or a transposed view, it would use one element of every line that it fetches, and lines that are a
 * multiple of some power of two apart throw each other out of the cache before their next element is due. Turning such
 * an input tile by tile first reads and writes it once.
 */
#include "program_exec.h"

#include <string.h>

enum { LEAST = 1 << 14 /* elements */, BESIDE = 8 /* rows that lie side by side */ };

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

te_status te_program_straighten(te_exec *exec, const te_program *program, const te_run *run, te_straight *straight)
{
    int64_t   elements = 1;
    int       axis = row_axis(run);
    te_status status = TE_OK;
    straight->turned = 0;
    straight->run = *run;
    if (axis < 0 || run->ndim > TE_MAX_DIMS || program->n_inputs > TE_STRAIGHT_INPUTS) return TE_OK;
    for (int d = 0; d < run->ndim; d++)
        if (run->shape[d] < 0 || __builtin_mul_overflow(elements, run->shape[d], &elements)) return TE_OK;
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

void te_program_straight_free(te_exec *exec, te_straight *straight)
{
    for (int i = 0; i < TE_STRAIGHT_INPUTS; i++)
        if (straight->turned >> i & 1) exec->scratch_free(exec, straight->inputs[i].data);
}
