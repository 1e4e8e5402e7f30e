/* op_space.c - from tensors to operands: layout, broadcasting, parameters. */
#include "op_program.h"
#include "ops/ops.h"

/* --- geometry ----------------------------------------------------------------------------------------------------- */

/* The attribute by which gated operations are told that the halves of x alternate; 0: they do not. */
static int64_t interleave_of(const te_call *call)
{
    for (int i = 0; i < call->op->n_params; i++) {
        const te_param *p = &call->op->params[i];
        if (p->type > TE_TYPE_TENSORS && strcmp(p->name, "interleave") == 0) return (int64_t)call->attr[p->slot].number;
    }
    return 0;
}

te_layout te_program_layout(const te_call *call, unsigned present)
{
    const te_op *op = call->op;
    te_layout l = {0};
    int64_t block = op->def->flags & TE_OP_GATED ? interleave_of(call) : 0;
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        if (p->type != TE_TYPE_TENSOR || !(present >> p->slot & 1)) continue;
        bool gated = (op->def->flags & TE_OP_GATED) && p->slot == 0;
        for (int half = 0; half <= (int)gated; half++) {
            l.input[l.n] = p->slot;
            l.part[l.n] = (te_part){gated ? half + 1 : 0, gated ? block : 0};
            l.rate[l.n++] = te_is_row_input(op->def, p->name) ? TE_RATE_ROW : TE_RATE_ELEM;
        }
    }
    return l;
}

/* Shape of program input i: halves are halved, row inputs get a last dimension of 1. */
te_space te_layout_space(const te_layout *l, int i, int ndim, const int64_t *shape)
{
    te_space s = {.ndim = ndim};
    memcpy(s.shape, shape, (size_t)ndim * sizeof *shape);
    if (l->part[i].half) s.shape[ndim - 1] /= 2;
    if (l->rate[i] == TE_RATE_ROW && ndim < TE_MAX_DIMS) s.shape[s.ndim++] = 1;
    return s;
}

/* A run has at least one dimension. */
void te_run_start(te_run *run, const te_space *s)
{
    memset(run, 0, sizeof *run);
    run->ndim = s->ndim ? s->ndim : 1;
    run->shape[0] = 1;
    memcpy(run->shape, s->shape, (size_t)s->ndim * sizeof *s->shape);
}

static bool knows_places(const te_program *program, const te_operand *inputs)
{
    bool knows = program->n_rngs > 0;
    for (int i = 0; i < program->n_insns; i++)
        knows |= program->insns[i].op == TE_PW_COLUMN || program->insns[i].rate == TE_RATE_ROW;
    for (int i = 0; i < program->n_inputs; i++) knows |= inputs[i].block != 0;
    for (int i = 0; i < program->n_outputs; i++) knows |= program->outputs[i].kind != TE_OUT_ELEM;
    return knows;
}

static void swap_sizes(int64_t *sizes, int d)
{
    int64_t first = sizes[d];
    sizes[d] = sizes[d + 1];
    sizes[d + 1] = first;
}

void te_run_by_memory(const te_program *program, te_run *run, te_operand *inputs, te_operand *outputs)
{
    const int64_t *stride = outputs[0].stride;
    bool sorted = true;
    for (int d = 0; d + 1 < run->ndim; d++) sorted &= stride[d] >= stride[d + 1];
    if (sorted || knows_places(program, inputs)) return;
    for (int end = run->ndim - 1; end > 0; end--)
        for (int d = 0; d < end; d++) {
            if (stride[d] >= stride[d + 1]) continue;
            swap_sizes(run->shape, d);
            for (int i = 0; i < program->n_inputs; i++) swap_sizes(inputs[i].stride, d);
            for (int i = 0; i < program->n_outputs; i++) swap_sizes(outputs[i].stride, d);
        }
}

/* The operand of a tensor in the space: aligned at the last dimension, stride 0 where broadcast. Dimensions before the
 * space's have the extent 1. */
te_operand te_space_operand(const te_tensor *t, const te_space *s, te_part part, te_rate rate)
{
    te_operand o = {.data = te_tensor_pointer(t), .dtype = t->dtype, .block = part.block};
    int ndim = t->ndim + (rate == TE_RATE_ROW);
    for (int i = ndim > s->ndim ? ndim - s->ndim : 0; i < t->ndim; i++)
        o.stride[s->ndim - ndim + i] = t->shape[i] == 1 ? 0 : t->stride[i];
    if (part.half == 2) {
        int64_t before = part.block ? part.block : t->shape[t->ndim - 1] / 2;
        o.data = (char *)o.data + (size_t)(before * t->stride[t->ndim - 1]) * te_dtype_size(t->dtype);
    }
    return o;
}

/* How the gradient of an input of shape `s` follows from gradients over the space; false: write it out, of an input per
 * row as row sums, and sum after. */
bool te_space_reduce(const te_space *whole, const te_space *s, te_rate rate, te_output_kind *kind)
{
    int64_t rows = 1, columns = whole->ndim ? whole->shape[whole->ndim - 1] : 1, n = 1;
    for (int i = 0; i + 1 < whole->ndim; i++) rows *= whole->shape[i];
    for (int i = 0; i < s->ndim; i++) n *= s->shape[i];
    int64_t last = s->ndim ? s->shape[s->ndim - 1] : 1;
    if (rate == TE_RATE_ROW && n == rows)
        *kind = TE_OUT_ROW;
    else if (rate == TE_RATE_ELEM && n == rows * columns)
        *kind = TE_OUT_ELEM;
    else if (n == 1)
        *kind = TE_OUT_SUM;
    else if (rate == TE_RATE_ELEM && n == columns && last == columns)
        *kind = TE_OUT_COLSUM;
    else if (rate == TE_RATE_ELEM && n == rows && last == 1)
        *kind = TE_OUT_ROW;
    else {
        *kind = rate == TE_RATE_ROW ? TE_OUT_ROW : TE_OUT_ELEM;
        return false;
    }
    return true;
}

/* --- binding ------------------------------------------------------------------------------------------------------ */

void te_program_params(const te_call *call, const te_program *program, unsigned numbers, int64_t row_length,
                       double *params)
{
    const te_op *op = call->op;
    int n = 0;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type > TE_TYPE_TENSORS) params[n++] = call->attr[op->params[i].slot].number;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type == TE_TYPE_TENSOR && (numbers >> op->params[i].slot & 1))
            params[n++] = call->number[op->params[i].slot];
    if (program->n_params > n) params[n] = (double)row_length;
}

bool te_needs_f64(const te_tensor *t, te_rate rate)
{
    return t->dtype == TE_F64 || (rate == TE_RATE_ELEM && (t->dtype == TE_I64 || t->dtype == TE_I32));
}

bool te_counts_far(const te_program *program, const te_run *run)
{
    bool counts = false;
    if (run->shape[run->ndim - 1] <= (int64_t)1 << 24) return false;
    for (int i = 0; i < program->n_insns && !counts; i++) counts = program->insns[i].op == TE_PW_COLUMN;
    return counts;
}

/* A result: over the whole space, or one value per row. */
te_tensor *te_program_result(te_call *call, bool per_row, const te_space *s, te_dtype dtype, te_device *device)
{
    int ndim = per_row ? s->ndim - 1 : s->ndim;
    te_tensor *t = te_tensor_new(call->ctx, device, dtype, ndim, s->shape), *x = call->in[0];
    if (t && !per_row && call->ctx->laid_out_alike && x && x->ndim == ndim &&
        memcmp(x->shape, s->shape, (size_t)ndim * sizeof *x->shape) == 0)
        memcpy(t->stride, x->stride, (size_t)ndim * sizeof *t->stride); /* nobody has seen it yet */
    return t;
}

te_status te_call_run(te_call *call, te_device *device, te_program *program, te_run *run)
{
    te_status status = device->exec.backend->program_run(&device->exec, program, run, 1);
    return te_call_kernel(call, &device->exec, status);
}
