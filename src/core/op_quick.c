/* op_quick.c - the short way through a program op, for calls that are over sooner than they are prepared.
 *
 * Where all inputs are contiguous tensors of one shape and dtype on one device, nothing broadcasts, promotes or is
 * recorded, and a formula without rows sees one line of elements. What is left of a call is its result and the run.
 * Whoever does not fit takes the long way, which also finds the words for every mistake and compiles the program at
 * first.
 */
#include "op_program.h"

#include "autograd.h"

static bool same_shape(const te_tensor *a, const te_tensor *b)
{
    if (a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return false;
    return true;
}

/* Whether an argument is a tensor that nothing has to be recorded for. */
static bool is_plain(te_context *ctx, const te_arg *arg)
{
    const te_tensor *t = arg->kind == TE_ARG_TENSOR ? arg->as.tensor : NULL;
    if (!t || t->ctx != ctx) return false;
    bool needs_grad = te_needs_grad(t);
    ctx->gradient_uses += needs_grad;
    return te_tensor_contiguous(t) && !t->storage->quantized && !(ctx->grad_enabled && needs_grad);
}

/* Whether the arguments are inputs of the short way. */
static bool are_alike(te_context *ctx, const te_op *op, const te_arg *args, int n_args)
{
    if (n_args != op->n_params || n_args == 0 || !args || !is_plain(ctx, &args[0])) return false;
    const te_tensor *first = args[0].as.tensor;
    if (first->dtype != TE_F32 && first->dtype != TE_BF16 && first->dtype != TE_F16) return false;
    for (int i = 1; i < n_args; i++) {
        const te_tensor *t = args[i].as.tensor;
        if (!is_plain(ctx, &args[i]) || t->dtype != first->dtype || !same_shape(t, first)) return false;
        if (t->storage->device != first->storage->device) return false;
    }
    return true;
}

/* The strides of other dimensions stay as they are, since a line has none: clearing them would take longer than the
 * rest. */
static void make_line(te_operand *line, const te_tensor *t)
{
    line->data = te_tensor_pointer(t);
    line->dtype = t->dtype;
    line->accumulate = false;
    line->quantized = NULL;
    line->stride[0] = 1;
    line->block = 0;
}

bool te_program_op_quick(te_context *ctx, const te_op *op, const te_arg *args, int n_args, te_tensor **out,
                         te_status *status)
{
    if (!are_alike(ctx, op, args, n_args)) return false;
    const te_variant *v = te_variant_find(ctx, op, n_args);
    if (!v || !v->flat) return false;
    if ((*status = te_context_poll(ctx)) != TE_OK) return true;
    te_tensor *y = te_tensor_new_like(args[0].as.tensor);
    if (!y) {
        *status = ctx->status;
        return true;
    }
    te_operand inputs[TE_OP_MAX_INPUTS], output;
    te_run run;
    make_line(&output, y);
    for (int i = 0; i < n_args; i++) make_line(&inputs[i], args[i].as.tensor);
    run.ndim = 1;
    run.shape[0] = te_tensor_numel(y);
    run.inputs = inputs;
    run.outputs = &output;
    run.params = NULL;
    run.rngs = NULL;
    run.compute_f64 = false;
    run.small = NULL;
    run.tables = NULL;
    te_exec *exec = &y->storage->device->exec;
    *status = exec->backend->program_run(exec, v->gradient.forward, &run, 1);
    if (*status == TE_OK) {
        out[0] = y;
    } else {
        te_fail_exec(ctx, *status, exec, op->name);
        te_tensor_release(y);
    }
    return true;
}
