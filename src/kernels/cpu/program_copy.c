/* program_copy.c - programs that compute nothing: y = x, and y = a number.
 *
 * copy.c moves whole lines of bytes, turns tiles and writes what is large past the caches, so such a run is handed to
 * it.
 */
#include "copy.h"
#include "program_exec.h"

/* The one value of a program with one result over all elements and nothing else, NULL: it is not like that. */
static const te_insn *only_value(const te_program *program)
{
    if (program->n_insns != 1 || program->n_outputs != 1 || program->outputs[0].kind != TE_OUT_ELEM) return NULL;
    const te_insn *insn = &program->insns[0];
    bool           is_element = insn->op == TE_PW_LOAD && insn->rate == TE_RATE_ELEM;
    return is_element || insn->op == TE_PW_PARAM || insn->op == TE_PW_CONST ? insn : NULL;
}

static te_view view_of(const te_run *run, const te_operand *operand)
{
    te_view view = {.data = operand->data, .dtype = operand->dtype, .ndim = run->ndim};
    for (int d = 0; d < run->ndim; d++) {
        view.shape[d] = run->shape[d];
        view.stride[d] = operand->stride[d];
    }
    return view;
}

static bool is_plain(const te_operand *operand)
{
    return operand->data && !operand->block && !operand->accumulate && !operand->quantized;
}

/* A number in the type of the result, as a program stores it. */
static te_view number_view(te_exec *exec, const te_run *run, const te_insn *insn, te_view view, void *element)
{
    const te_blocks *blocks = te_job_blocks(exec, run->compute_f64);
    double           value;
    blocks->set(&value, insn->op == TE_PW_PARAM ? run->params[insn->slot] : insn->imm);
    blocks->store[view.dtype](element, 1, &value, 1);
    view.data = element;
    for (int d = 0; d < view.ndim; d++) view.stride[d] = 0;
    return view;
}

/* Values that the interpreter would not take through float32 or float64 to the same bits are left to it, and so are
 * whole ones of at most 32 bits, which the copy would take through 64. */
static bool same_values(const te_operand *out, const te_operand *in)
{
    bool floats = te_dtype_is_float(out->dtype) && te_dtype_is_float(in->dtype);
    bool whole = te_value_class_of(out->dtype) == TE_CLASS_I64 && te_value_class_of(in->dtype) == TE_CLASS_I64;
    whole &= out->dtype == TE_I64 || in->dtype == TE_I64;
    return out->dtype == in->dtype || whole || (floats && out->dtype != TE_F64 && in->dtype != TE_F64);
}

bool te_program_copy_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs, te_status *status)
{
    const te_insn *insn = n_runs == 1 ? only_value(program) : NULL; /* several short ones better share one loop */
    if (!insn || runs->ndim < 1 || runs->ndim > TE_MAX_DIMS || !is_plain(&runs->outputs[0])) return false;
    te_view dst = view_of(runs, &runs->outputs[0]), src;
    int64_t element;
    if (insn->op == TE_PW_LOAD) {
        const te_operand *in = &runs->inputs[insn->slot];
        if (!is_plain(in) || !same_values(&runs->outputs[0], in)) return false;
        src = view_of(runs, in);
    } else {
        src = number_view(exec, runs, insn, dst, &element);
    }
    *status = te_cpu_copy(exec, &dst, &src);
    return true;
}
