/* op_program.c - running program ops forward: one run of the backend over the broadcast shape of the inputs. */
#include "op_program.h"

#include "autograd.h"
#include "ops/ops.h"

static te_status fail_part(te_call *call, te_part part, const te_tensor *t)
{
    if (part.block)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "the last dimension must be a multiple of 2 * interleave = %.0f: %s",
                            2 * (double)part.block, TE_SHAPE_TEXT(t));
    return te_call_fail(call, TE_ERROR_ARGUMENT, "the last dimension is split in halves, so it must be even: %s",
                        TE_SHAPE_TEXT(t));
}

static te_status iteration_space(te_call *call, const te_layout *l, te_space *out)
{
    *out = (te_space){0};
    for (int i = 0; i < l->n; i++) {
        te_tensor *t = call->in[l->input[i]];
        if (l->part[i].half && (t->ndim == 0 || !te_part_fits(l->part[i], t->shape[t->ndim - 1])))
            return fail_part(call, l->part[i], t);
        te_space s = te_layout_space(l, i, t->ndim, t->shape);
        if (i == 0) {
            *out = s;
        } else if (!te_broadcast(&out->ndim, out->shape, s.ndim, s.shape)) {
            te_tensor *first = call->in[l->input[0]];
            return te_call_fail(call, TE_ERROR_ARGUMENT, "shapes do not broadcast: %s and %s", TE_SHAPE_TEXT(first),
                                TE_SHAPE_TEXT(t));
        }
    }
    te_tensor *x = l->n ? call->in[l->input[0]] : NULL;
    bool rows = call->op->def->flags & TE_OP_LASTROW;
    if (rows && (!x || x->ndim == 0))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "a tensor with at least one dimension is needed");
    te_space s = rows ? te_layout_space(l, 0, x->ndim, x->shape) : *out;
    if (rows && (s.ndim != out->ndim || memcmp(s.shape, out->shape, (size_t)s.ndim * sizeof *s.shape) != 0))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "the other arguments do not fit x of shape %s", TE_SHAPE_TEXT(x));
    return TE_OK;
}

te_dtype te_program_result_dtype(const te_call *call, const te_layout *l)
{
    unsigned flags = call->op->def->flags;
    te_dtype dtype = TE_BOOL;
    if (flags & TE_OP_BOOL) return TE_BOOL;
    if (l->n == 0) return TE_F32;
    bool declared = call->op->group != NULL; /* what a script defines promotes all that it is given */
    if (flags & (TE_OP_COMPUTE | TE_OP_GATED) || (flags & TE_OP_LASTROW && declared)) {
        dtype = call->in[l->input[0]]->dtype;
    } else {
        /* a tensor without dimensions has no say against one with */
        bool ranked = false;
        for (int i = 0; i < l->n; i++) ranked |= call->in[l->input[i]]->ndim > 0;
        bool first = true;
        for (int i = 0; i < l->n; i++) {
            const te_tensor *t = call->in[l->input[i]];
            if ((ranked && t->ndim == 0) || l->rate[i] == TE_RATE_ROW ||
                (declared && strcmp(call->op->params[i].name, "condition") == 0))
                continue;
            dtype = first ? t->dtype : te_promote(dtype, t->dtype);
            first = false;
        }
    }
    bool integer = dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL;
    for (int i = 0; i < call->op->n_inputs; i++) {
        if (!call->is_number[i] || !integer) continue;
        if (call->number[i] != (double)(int64_t)call->number[i])
            dtype = TE_F32;
        else if (dtype == TE_BOOL)
            dtype = TE_I64;
    }
    integer = dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL;
    bool float8 = dtype == TE_F8E4M3 || dtype == TE_F8E5M2;
    if ((float8 && !(flags & TE_OP_FLOAT8)) || (integer && (flags & TE_OP_FLOAT))) dtype = TE_F32;
    if (flags & TE_OP_F32) return dtype == TE_F64 ? TE_F64 : TE_F32;
    return flags & TE_OP_COMPUTE ? te_call_compute_dtype(call, dtype) : dtype;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static te_status check_inplace(te_call *call, const te_space *s)
{
    const te_tensor *t = call->inplace;
    if (s->ndim != t->ndim || memcmp(s->shape, t->shape, (size_t)s->ndim * sizeof *s->shape) != 0) {
        char text[160];
        return te_call_fail(call, TE_ERROR_ARGUMENT, "the result %s does not fit in place into %s",
                            te_shape_text(s->ndim, s->shape, text, sizeof text), TE_SHAPE_TEXT(t));
    }
    return TE_OK;
}

/* Whether writing result elements may change input elements that are still to be read: same memory seen differently. */
static bool overlaps_otherwise(const te_tensor *out, const te_tensor *in)
{
    if (out->storage != in->storage) return false;
    return out->offset != in->offset || out->dtype != in->dtype || out->ndim != in->ndim ||
           memcmp(out->shape, in->shape, (size_t)in->ndim * sizeof *in->shape) != 0 ||
           memcmp(out->stride, in->stride, (size_t)in->ndim * sizeof *in->stride) != 0;
}

/* Inputs that cannot be read where they are: one that in place overlaps the target in another geometry, or that lies on
 * another device. A copy takes their place. */
static te_status replace_inputs(te_call *call, const te_layout *l, te_tensor **copies)
{
    te_device *device = call->in[0] ? call->in[0]->storage->device : NULL;
    for (int i = 0; i < l->n; i++) {
        te_tensor *t = call->in[l->input[i]];
        bool elsewhere = device && t->storage->device != device;
        if (!elsewhere && !(call->inplace && overlaps_otherwise(call->inplace, t))) continue;
        copies[i] = elsewhere ? te_tensor_on_device(t, device) : te_tensor_clone_data(t);
        if (!copies[i]) return call->ctx->status;
        call->in[l->input[i]] = copies[i];
    }
    return TE_OK;
}

static te_status save_sources(te_call *call, const te_variant *v, const te_layout *l, te_tensor *const *rows)
{
    for (int i = 0; i < v->gradient.n_sources; i++) {
        const te_grad_source *source = &v->gradient.sources[i];
        te_tensor *t = NULL;
        if (source->kind == TE_GRAD_FROM_INPUT) t = te_tensor_retain(call->in[l->input[source->index]]);
        if (source->kind == TE_GRAD_FROM_ROW) t = te_tensor_retain(rows[source->index]);
        if (source->kind ==
            TE_GRAD_FROM_OUTPUT) { /* without its place in the graph, or node and result would keep each other alive */
            const te_tensor *y = call->out[source->index];
            t = te_tensor_alias(call->out[source->index], y->ndim, y->shape, y->stride, y->offset);
        }
        if (!t && source->kind != TE_GRAD_FROM_DOUT) return call->ctx->status;
        int saved = te_call_save(call, t);
        te_tensor_release(t);
        if (saved < 0) return call->ctx->status;
    }
    return TE_OK;
}

static te_status bind_and_run(te_call *call, te_variant *v, const te_layout *l, const te_space *s, unsigned numbers)
{
    te_program *program = v->gradient.forward;
    te_device *device = l->n ? call->in[l->input[0]]->storage->device : call->inplace->storage->device;
    te_operand inputs[TE_PROGRAM_SLOTS], outputs[TE_OP_MAX_OUTPUTS + TE_GRAD_MAX_SOURCES];
    te_tensor *rows[TE_GRAD_MAX_SOURCES] = {NULL};
    double params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS + 1] = {0};
    te_dtype dtype = call->inplace ? call->inplace->dtype : te_program_result_dtype(call, l);
    te_status status = TE_OK;
    te_run run;
    te_run_start(&run, s);
    for (int i = 0; i < l->n; i++) {
        inputs[i] = te_space_operand(call->in[l->input[i]], s, l->part[i], l->rate[i]);
        run.compute_f64 |= te_needs_f64(call->in[l->input[i]], l->rate[i]);
    }
    if (call->inplace && dtype == TE_F64) run.compute_f64 = true;
    int n_results = program->n_outputs - v->gradient.n_rows;
    for (int i = 0; i < program->n_outputs; i++) {
        te_tensor *t;
        if (i == 0 && call->inplace)
            t = te_tensor_retain(call->inplace);
        else
            t = te_program_result(call, program->outputs[i].kind != TE_OUT_ELEM, s,
                                  i < n_results     ? dtype
                                  : run.compute_f64 ? TE_F64
                                                    : TE_F32,
                                  device);
        if (i < n_results)
            call->out[i] = t;
        else
            rows[i - n_results] = t;
        if (!t) {
            status = call->ctx->status;
            goto done;
        }
        outputs[i] =
            te_space_operand(t, s, (te_part){0}, program->outputs[i].kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_ELEM);
    }
    te_program_params(call, program, numbers, run.shape[run.ndim - 1], params);
    if (program->n_rngs) {
        uint64_t words = 1;
        for (int i = 0; i < run.ndim; i++) words *= (uint64_t)run.shape[i];
        call->rng = te_context_draw(call->ctx, words);
    }
    run.inputs = inputs;
    run.outputs = outputs;
    run.params = params;
    run.rngs = &call->rng;
    status = te_call_run(call, device, program, &run);
    bool written = status == TE_OK || status == TE_ERROR_INTERRUPTED;
    if (written && call->inplace) te_tensor_written(call->inplace);
    if (status == TE_OK && call->record) status = save_sources(call, v, l, rows);
done:
    for (int i = 0; i < v->gradient.n_rows; i++) te_tensor_release(rows[i]);
    return status;
}

te_status te_program_op_forward(te_call *call)
{
    unsigned present = 0, numbers = 0;
    for (int i = 0; i < call->op->n_inputs; i++) {
        present |= (unsigned)(call->in[i] != NULL) << i;
        numbers |= (unsigned)call->is_number[i] << i;
    }
    te_layout l = te_program_layout(call, present);
    te_space s;
    te_status status = iteration_space(call, &l, &s);
    if (status == TE_OK && call->inplace) status = check_inplace(call, &s);
    if (status == TE_OK && l.n == 0 && !call->inplace)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "at least one tensor is needed");
    if (status != TE_OK) return status;

    bool wanted[TE_PROGRAM_SLOTS] = {false};
    te_output_kind reduce[TE_PROGRAM_SLOTS] = {TE_OUT_ELEM};
    for (int i = 0; call->record && i < l.n; i++) {
        te_tensor *t = call->in[l.input[i]];
        te_space own = te_layout_space(&l, i, t->ndim, t->shape);
        wanted[i] = te_needs_grad(t);
        if (wanted[i]) te_space_reduce(&s, &own, &reduce[i]);
    }
    te_variant *v = te_variant_get(call, present, numbers, &l, wanted, reduce);
    if (!v) return call->ctx->status;
    call->pointer = v;
    call->memo[0] = (int64_t)present;
    call->memo[1] = (int64_t)numbers;
    te_tensor *copies[TE_PROGRAM_SLOTS] = {NULL};
    status = replace_inputs(call, &l, copies);
    if (status == TE_OK) status = bind_and_run(call, v, &l, &s, numbers);
    for (int i = 0; i < l.n; i++) te_tensor_release(copies[i]);
    return status;
}
