/* op_gradient.c - running program ops backward.
 *
 * The gradient of an input that was broadcast along rows is a column sum, along the row a row sum, to a scalar a total
 * sum, all outputs of the one gradient program; any other broadcast is written out and summed after, unless it is the
 * result's own gradient that is summed.
 */
#include "op_program.h"

#include "autograd.h"
#include "ops/ops.h"

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Where the gradient of one program input is written. */
typedef struct grad_output {
    int slot;          /* program input */
    te_tensor *target; /* borrowed from the graph, or own */
    te_tensor *own;    /* must be given (or summed and given) after the run */
    bool settled;      /* nothing is to be computed: it was handed on, is none, or nobody wants it */
} grad_output;

/* dx of a gated op is one buffer that both halves are written into. */
static te_status open_output(te_call *call, const te_layout *l, int i, const te_space *s, te_output_kind kind,
                             grad_output *out, int done, const grad_output *outs, te_operand *operand)
{
    const te_grad_meta *meta = te_grad_input(call, l->input[i]);
    te_space own = te_layout_space(l, i, meta->ndim, meta->shape);
    te_output_kind exact;
    bool direct = te_space_reduce(s, &own, l->rate[i], &exact);
    bool shared = false, accumulate = false;
    for (int j = 0; j < done; j++) {
        if (!outs[j].target) continue;
        /* the second half goes where the first went */
        if (l->part[i].half == 2 && l->input[outs[j].slot] == l->input[i]) {
            *out = outs[j];
            out->own = NULL;
            *operand = te_space_operand(out->target, s, l->part[i], TE_RATE_ELEM);
            operand->accumulate = operand[-1].accumulate;
            return TE_OK;
        }
        shared |= te_grad_same(call, l->input[outs[j].slot], l->input[i]);
    }
    out->slot = i;
    if (!direct) {
        te_dtype dtype = meta->dtype == TE_F64 ? TE_F64 : TE_F32;
        te_space whole = *s;
        if (l->part[i].half) whole.shape[s->ndim - 1] *= 2;
        out->own = out->target = te_program_result(call, kind == TE_OUT_ROW, &whole, dtype, meta->device);
    } else if (shared) {
        out->own = out->target = te_tensor_new(call->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
    } else {
        out->target = te_grad_target(call, l->input[i], &accumulate);
    }
    if (!out->target) return call->ctx->status;
    if (kind == TE_OUT_COLSUM || kind == TE_OUT_SUM) {
        *operand = (te_operand){.data = te_tensor_pointer(out->target), .dtype = out->target->dtype,
                                .block = l->part[i].block};
        if (s->ndim) operand->stride[s->ndim - 1] = 1;
    } else {
        *operand = te_space_operand(out->target, s, l->part[i], l->rate[i]);
    }
    operand->accumulate = accumulate;
    return TE_OK;
}

/* A gradient of the whole space, added up for an input that was broadcast. */
static te_status give_sum(te_call *call, const te_layout *l, int i, te_tensor *grad)
{
    const te_grad_meta *meta = te_grad_input(call, l->input[i]);
    te_tensor *sum = te_tensor_new(call->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
    te_status status = sum ? te_sum_to(sum, grad, 1.0, false) : call->ctx->status;
    if (status == TE_OK) return te_grad_give(call, l->input[i], sum);
    te_tensor_release(sum);
    return status;
}

static te_status close_output(te_call *call, const te_layout *l, grad_output *out)
{
    const te_grad_meta *meta = te_grad_input(call, l->input[out->slot]);
    te_tensor *grad = out->own;
    out->own = NULL;
    int64_t n = 1;
    for (int i = 0; i < meta->ndim; i++) n *= meta->shape[i];
    if (te_tensor_numel(grad) == n) return te_grad_give(call, l->input[out->slot], grad);
    te_status status = give_sum(call, l, out->slot, grad);
    te_tensor_release(grad);
    return status;
}

/* The space that forward ran over, from what the graph remembers of the inputs. */
static te_space backward_space(const te_call *call, const te_layout *l)
{
    te_space s = {0};
    for (int i = 0; i < l->n; i++) {
        const te_grad_meta *meta = te_grad_input(call, l->input[i]);
        te_space own = te_layout_space(l, i, meta->ndim, meta->shape);
        te_broadcast(&s.ndim, s.shape, own.ndim, own.shape);
    }
    return s;
}

static bool source_rate_is_row(const te_gradient *g, const te_layout *l, int i)
{
    const te_grad_source *source = &g->sources[i];
    switch (source->kind) {
    case TE_GRAD_FROM_INPUT:
        return l->rate[source->index] == TE_RATE_ROW;
    case TE_GRAD_FROM_ROW:
        return true;
    default:
        return g->forward->outputs[source->index].kind == TE_OUT_ROW;
    }
}

static bool has_shape(const te_tensor *t, int ndim, const int64_t *shape)
{
    return t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

/* One backward run, as it is bound. */
typedef struct backward_run {
    te_call *call;
    te_variant *v;
    te_program *program; /* the gradient's, without results that nothing came back for */
    te_layout l;
    te_space s;
    te_run run;
    te_operand inputs[TE_GRAD_MAX_SOURCES], outputs[TE_PROGRAM_SLOTS];
    grad_output outs[TE_PROGRAM_SLOTS];
    te_tensor *zeros[TE_OP_MAX_OUTPUTS]; /* for results that nothing came back for */
    int n, to_compute; /* outputs, and those that are not handed through */
} backward_run;

/* The gradient of a result that as it is is the one of an input, as in a sum; NULL where it has to be computed. */
static te_tensor *passed_through(const backward_run *b, int i, const struct te_program_output *out)
{
    const te_insn *insn = &b->program->insns[out->value];
    if (insn->op != TE_PW_LOAD || out->kind != TE_OUT_ELEM || b->l.part[i].half) return NULL;
    const te_grad_source *source = &b->v->gradient.sources[insn->slot];
    return source->kind == TE_GRAD_FROM_DOUT ? b->call->dout[source->index] : NULL;
}

/* Whether it is none: results that nothing came back for have no part in the input. */
static bool is_nothing(const backward_run *b, int i, int output)
{
    bool partial = b->program != b->v->gradient.backward;
    return partial && !b->l.part[i].half && te_program_gives_nothing(b->program, output);
}

static te_status choose_program(backward_run *b)
{
    bool absent[TE_GRAD_MAX_SOURCES] = {false};
    te_gradient *g = &b->v->gradient;
    for (int i = 0; i < g->n_sources; i++)
        absent[i] = g->sources[i].kind == TE_GRAD_FROM_DOUT && !b->call->dout[g->sources[i].index];
    b->program = te_gradient_without(g, absent);
    return b->program ? TE_OK : te_fail_memory(b->call->ctx, b->call->op->name);
}

static te_status bind_sources(backward_run *b)
{
    te_call *call = b->call;
    for (int i = 0; i < b->v->gradient.n_sources; i++) {
        const te_grad_source *source = &b->v->gradient.sources[i];
        te_tensor *t = source->kind == TE_GRAD_FROM_DOUT ? call->dout[source->index] : call->saved[i];
        te_part part = source->kind == TE_GRAD_FROM_INPUT ? b->l.part[source->index] : (te_part){0};
        te_rate rate = source_rate_is_row(&b->v->gradient, &b->l, i) ? TE_RATE_ROW : TE_RATE_ELEM;
        if (!t) {
            te_device *device = te_grad_input(call, b->l.input[0])->device;
            t = b->zeros[source->index] = te_program_result(call, rate == TE_RATE_ROW, &b->s, TE_F32, device);
            te_status status = t ? te_tensor_fill(t, 0) : call->ctx->status;
            if (status != TE_OK) return status;
        }
        b->inputs[i] = te_space_operand(t, &b->s, part, rate);
        b->run.compute_f64 |= te_needs_f64(t, rate);
    }
    return TE_OK;
}

/* Whether an input was broadcast in a way that the program has no sums for. */
static bool is_summed(const backward_run *b, int i)
{
    const te_grad_meta *meta = te_grad_input(b->call, b->l.input[i]);
    te_space own = te_layout_space(&b->l, i, meta->ndim, meta->shape);
    te_output_kind kind;
    return !te_space_reduce(&b->s, &own, b->l.rate[i], &kind);
}

/* A result's own gradient is handed on, added up where that is needed: nothing else is computed or copied. */
static te_status hand_on(backward_run *b, int i, te_tensor *dout, grad_output *out)
{
    const te_grad_meta *meta = te_grad_input(b->call, b->l.input[i]);
    if (!dout) return TE_OK;
    if (dout->dtype == meta->dtype && has_shape(dout, meta->ndim, meta->shape)) {
        out->settled = true;
        return te_grad_give(b->call, b->l.input[i], te_tensor_retain(dout));
    }
    if (out->settled || !has_shape(dout, b->s.ndim, b->s.shape) || !is_summed(b, i)) return TE_OK;
    out->settled = true;
    return give_sum(b->call, &b->l, i, dout);
}

/* What is handed on goes first. Where one tensor stands for several inputs, the program adds to that; memory that the
 * program has yet to write cannot be added to. */
static te_status bind_outputs(backward_run *b)
{
    te_status status = TE_OK;
    for (int i = 0; i < b->l.n && status == TE_OK; i++) {
        if (!te_variant_wants(b->v, i)) continue;
        int n = b->n++;
        te_tensor *dout = passed_through(b, i, &b->program->outputs[n]);
        b->outputs[n] = (te_operand){.data = NULL};
        b->outs[n].slot = i;
        b->outs[n].settled = is_nothing(b, i, n) || !te_grad_wanted(b->call, b->l.input[i]);
        status = hand_on(b, i, dout, &b->outs[n]);
    }
    for (int n = 0; n < b->n && status == TE_OK; n++) {
        grad_output *out = &b->outs[n];
        if (out->settled) continue;
        te_output_kind kind = (te_output_kind)b->program->outputs[n].kind;
        status = open_output(b->call, &b->l, out->slot, &b->s, kind, out, n, b->outs, &b->outputs[n]);
        b->run.compute_f64 |= b->outputs[n].dtype == TE_F64; /* what is added to has its digits */
        b->to_compute++;
    }
    return status;
}

static te_status run_bound(backward_run *b)
{
    te_call *call = b->call;
    te_program *program = b->program;
    double params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS + 1] = {0};
    te_program_params(call, program, (unsigned)call->memo[1], b->run.shape[b->run.ndim - 1], params);
    b->run.compute_f64 |= te_counts_far(program, &b->run);
    b->run.inputs = b->inputs;
    b->run.outputs = b->outputs;
    b->run.params = params;
    b->run.rngs = &call->rng;
    return te_call_run(call, te_grad_input(call, b->l.input[0])->device, program, &b->run);
}

te_status te_program_op_backward(te_call *call)
{
    backward_run b;
    b.call = call;
    b.v = (te_variant *)(uintptr_t)call->pointer; /* it keeps the gradient without some results */
    b.l = te_program_layout(call, (unsigned)call->memo[0]);
    b.s = backward_space(call, &b.l);
    b.n = b.to_compute = 0;
    memset(b.outs, 0, sizeof b.outs);
    memset(b.zeros, 0, sizeof b.zeros);
    te_run_start(&b.run, &b.s);
    te_status status = choose_program(&b);
    if (status == TE_OK) status = bind_sources(&b);
    if (status == TE_OK) status = bind_outputs(&b);
    if (status == TE_OK && b.to_compute) status = run_bound(&b);
    for (int i = 0; i < b.n; i++) {
        if (b.outs[i].own && status == TE_OK)
            status = close_output(call, &b.l, &b.outs[i]);
        else
            te_tensor_release(b.outs[i].own);
    }
    for (int i = 0; i < TE_OP_MAX_OUTPUTS; i++) te_tensor_release(b.zeros[i]);
    return status;
}
