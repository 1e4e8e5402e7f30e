/* op_program.c - running program ops forward: one run of the backend over the broadcast shape of the inputs. */
#include "op_program.h"

#include "autograd.h"
#include "ops/ops.h"

#include <math.h>

static te_status fail_part(te_call *call, te_part part, const te_tensor *t)
{
    if (part.block < 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "interleave must be a number of features, or 0, not %.0f",
                            (double)part.block);
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
        if (l->rate[i] == TE_RATE_ROW && t->ndim == TE_MAX_DIMS)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "one number per row in a tensor %s, which has %d dimensions",
                                TE_SHAPE_TEXT(t), TE_MAX_DIMS);
        te_space s = te_layout_space(l, i, t->ndim, t->shape);
        if (i == 0) {
            *out = s;
        } else if (!te_broadcast(&out->ndim, out->shape, s.ndim, s.shape)) {
            te_tensor *first = call->in[l->input[0]];
            return te_call_fail(call, TE_ERROR_ARGUMENT, "shapes do not broadcast: %s and %s%s", TE_SHAPE_TEXT(first),
                                TE_SHAPE_TEXT(t), l->rate[i] == TE_RATE_ROW ? ", which has one number per row" : "");
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

/* Kinds of numbers, in the order in which they promote: bool, whole numbers, floating point. */
static int kind_of(te_dtype dtype) { return te_dtype_is_float(dtype) ? 2 : te_dtype_is_integer(dtype); }

/* Whether whole numbers give floating point because a number beside them has a fraction. Attributes count where they
 * are computed with: what is filled in, or drawn between them, is converted. */
static bool has_fraction(const te_call *call)
{
    for (int i = 0; i < call->op->n_params; i++) {
        const te_param *p = &call->op->params[i];
        if (p->type == TE_TYPE_TENSOR && call->is_number[p->slot] && !te_is_whole(call->number[p->slot])) return true;
        if (p->type != TE_TYPE_NUMBER || call->op->def->flags & TE_OP_NOGRAD) continue;
        double number = call->attr[p->slot].number;
        bool left = isinf(number) && number == p->number; /* a bound of clamp that was not given */
        if (!te_is_whole(number) && !left) return true;
    }
    return false;
}

/* Of te.where and te.masked_fill. */
static bool only_chooses(const te_param *p)
{
    return strcmp(p->name, "condition") == 0 || strcmp(p->name, "mask") == 0;
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
        /* a tensor without dimensions has a say against one with only where it is of a higher kind */
        te_dtype without = TE_BOOL;
        for (int i = 0; i < l->n; i++) {
            const te_tensor *t = call->in[l->input[i]];
            if (l->rate[i] == TE_RATE_ROW || (declared && only_chooses(&call->op->params[i]))) continue;
            if (t->ndim)
                dtype = te_promote(dtype, t->dtype);
            else
                without = te_promote(without, t->dtype);
        }
        if (kind_of(without) > kind_of(dtype)) dtype = without;
    }
    for (int i = 0; i < call->op->n_inputs; i++)
        if (call->is_number[i] && dtype == TE_BOOL) dtype = TE_I64;
    bool integer = !te_dtype_is_float(dtype), stored = te_dtype_is_float8(dtype) && !(flags & TE_OP_FLOAT8);
    if (stored || (integer && (flags & TE_OP_FLOAT || has_fraction(call)))) dtype = TE_F32;
    if (flags & TE_OP_F32) return dtype == TE_F64 ? TE_F64 : TE_F32;
    return flags & TE_OP_COMPUTE ? te_call_compute_dtype(call, dtype) : dtype;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static te_status check_inplace(te_call *call, const te_layout *l, const te_space *s)
{
    const te_tensor *t = call->inplace;
    if (s->ndim != t->ndim || memcmp(s->shape, t->shape, (size_t)s->ndim * sizeof *s->shape) != 0) {
        char text[160];
        return te_call_fail(call, TE_ERROR_ARGUMENT, "the result %s does not fit in place into %s",
                            te_shape_text(s->ndim, s->shape, text, sizeof text), TE_SHAPE_TEXT(t));
    }
    if (te_dtype_is_float(t->dtype) || call->op->def->flags & TE_OP_NOGRAD) return TE_OK; /* that converts */
    te_dtype dtype = te_program_result_dtype(call, l);
    if (!te_dtype_is_float(dtype)) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "the result is %s, which does not fit in place into %s",
                        te_dtype_name(dtype), te_dtype_name(t->dtype));
}

/* Inputs that cannot be read where they are: one that in place overlaps the target in another geometry, or that lies on
 * another device. A copy takes their place. */
static te_status replace_inputs(te_call *call, const te_layout *l, te_tensor **copies)
{
    te_device *device = call->in[0] ? call->in[0]->storage->device : NULL;
    for (int i = 0; i < l->n; i++) {
        te_tensor *t = call->in[l->input[i]];
        bool elsewhere = device && t->storage->device != device;
        if (!elsewhere && !(call->inplace && te_tensor_overlaps_otherwise(call->inplace, t))) continue;
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

/* Whether float32 is exact for 8 bits: one operation, beside numbers that are whole and not large. */
static bool is_brief(const te_call *call, const te_program *program)
{
    int operations = 0;
    for (int i = 0; i < program->n_insns; i++) operations += te_opcode_args((te_opcode)program->insns[i].op) > 0;
    for (int i = 0; i < call->op->n_inputs; i++)
        if (call->is_number[i] && !(te_is_whole(call->number[i]) && fabs(call->number[i]) <= 0x1p16)) return false;
    return operations <= 1;
}

/* Whole numbers are computed in float64, and those of 8 bits where the result, or what they are compared with, may be
 * larger. A number that is only stored is rounded once. */
static bool computes_f64(const te_call *call, const te_layout *l, const te_program *program, te_dtype dtype)
{
    bool whole = dtype == TE_I64 || dtype == TE_I32, small = l->n > 0;
    for (int i = 0; i < l->n; i++) {
        if (te_needs_f64(call->in[l->input[i]], l->rate[i])) return true;
        small &= !te_dtype_is_float(call->in[l->input[i]]->dtype);
    }
    if (small && (whole || dtype == TE_BOOL)) return !is_brief(call, program);
    return dtype == TE_F64 || whole || (program->n_insns == 1 && program->insns[0].op == TE_PW_PARAM);
}

/* float64 holds no int64 beyond 2^53: one that is only moved is moved as if it were float64. */
static void move_bits(const te_program *program, te_operand *inputs, te_operand *output)
{
    if (program->n_insns != 1 || program->insns[0].op != TE_PW_LOAD) return;
    te_operand *input = &inputs[program->insns[0].slot];
    if (input->dtype == TE_I64 && output->dtype == TE_I64) input->dtype = output->dtype = TE_F64;
}

/* Results of the program: those of the call, of `dtype`, and behind them `rows`, what backward reads again. */
static te_status make_results(te_call *call, const te_variant *v, const te_space *s, te_device *device, te_dtype dtype,
                              bool compute_f64, te_operand *outputs, te_tensor **rows)
{
    const te_program *program = v->gradient.forward;
    int n_results = program->n_outputs - v->gradient.n_rows;
    for (int i = 0; i < program->n_outputs; i++) {
        bool again = i >= n_results, reduced = program->outputs[i].kind != TE_OUT_ELEM;
        te_tensor *t, **place = again ? &rows[i - n_results] : &call->out[i];
        if (i == 0 && call->inplace)
            t = te_tensor_retain(call->inplace);
        else
            t = te_program_result(call, reduced, s, !again ? dtype : compute_f64 ? TE_F64 : TE_F32, device);
        *place = t;
        if (!t) return call->ctx->status;
        outputs[i] =
            te_space_operand(t, s, (te_part){0}, program->outputs[i].kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_ELEM);
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
    te_run run;
    te_run_start(&run, s);
    for (int i = 0; i < l->n; i++)
        inputs[i] = te_space_operand(call->in[l->input[i]], s, l->part[i], l->rate[i]);
    run.compute_f64 = computes_f64(call, l, program, dtype) || te_counts_far(program, &run);
    te_status status = make_results(call, v, s, device, dtype, run.compute_f64, outputs, rows);
    if (status != TE_OK) goto done;
    te_program_params(call, program, numbers, run.shape[run.ndim - 1], params);
    if (program->n_rngs) {
        uint64_t words = 1;
        for (int i = 0; i < run.ndim; i++) words *= (uint64_t)run.shape[i];
        call->rng = te_context_draw(call->ctx, words);
    }
    if (call->inplace) te_run_by_memory(program, &run, inputs, outputs);
    move_bits(program, inputs, outputs);
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
    if (status == TE_OK && call->inplace) status = check_inplace(call, &l, &s);
    if (status == TE_OK && l.n == 0 && !call->inplace)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "at least one tensor is needed");
    if (status != TE_OK) return status;

    bool wanted[TE_PROGRAM_SLOTS] = {false};
    te_output_kind reduce[TE_PROGRAM_SLOTS] = {TE_OUT_ELEM};
    for (int i = 0; call->record && i < l.n; i++) {
        te_tensor *t = call->in[l.input[i]];
        te_space own = te_layout_space(&l, i, t->ndim, t->shape);
        wanted[i] = te_needs_grad(t);
        if (wanted[i]) te_space_reduce(&s, &own, l.rate[i], &reduce[i]);
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
