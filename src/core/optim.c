/* optim.c - updates of optimizers, see optim.h: each is a row program (optim_adamw.c, optim_sgd.c), applied to all
 * tensors in one run of the backend. */
#include "optim_internal.h"

#include "quantized_parameter.h"

te_status te_optim_batch_open(te_context *ctx, te_optim_batch *b, int n, int inputs, int outputs)
{
    size_t each = sizeof(te_run) + (size_t)(inputs + outputs) * sizeof(te_operand);
    *b = (te_optim_batch){.n = n, .inputs = inputs, .outputs = outputs, .bytes = (size_t)n * each};
    b->runs = te_mem_zalloc(&ctx->mem, b->bytes);
    if (!b->runs) return te_fail_memory(ctx, "optimizer step");
    b->operands = (te_operand *)(b->runs + n);
    for (int i = 0; i < n; i++) {
        te_operand *o = b->operands + (size_t)i * (size_t)(inputs + outputs);
        b->runs[i].inputs = o;
        b->runs[i].outputs = o + inputs;
        b->runs[i].ndim = 1;
    }
    return TE_OK;
}

te_operand te_optim_flat(const te_tensor *t)
{
    te_operand o = {.data = t ? te_tensor_pointer(t) : NULL, .dtype = t ? t->dtype : TE_F32};
    o.stride[0] = 1;
    return o;
}

te_status te_optim_check(te_context *ctx, const char *what, int i, const te_tensor *param, const te_tensor *t)
{
    long long place = te_counted(ctx, i);
    if (!t) return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: a tensor of parameter %lld is missing", what, place);
    if (te_tensor_numel(t) != te_tensor_numel(param) || !te_tensor_contiguous(t))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "%s: parameter %lld is %s, but one of its tensors is %s or not contiguous", what, place,
                       TE_SHAPE_TEXT(param), TE_SHAPE_TEXT(t));
    if (t->storage->device != param->storage->device)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: parameter %lld is on %s, one of its tensors on %s", what, place,
                       param->storage->device->name, t->storage->device->name);
    return TE_OK;
}

/* The compute copy that autocast keeps of a parameter, when it is one of the parameter's whole storage and current. Of
 * a parameter in 16 bits it is the copy of rounded values, which an update does not have. */
static te_tensor *current_shadow(const te_tensor *param)
{
    const te_storage *s = param->storage;
    if (te_dtype_size(param->dtype) < sizeof(float)) return NULL;
    bool whole = param->offset == 0 && (size_t)te_tensor_numel(param) * te_dtype_size(param->dtype) == s->bytes;
    return s->shadow && whole && s->shadow_version == s->version && te_tensor_numel(s->shadow) == te_tensor_numel(param)
               ? s->shadow
               : NULL;
}

static void written(te_tensor *param, te_tensor *shadow)
{
    te_tensor_written(param);
    if (!shadow) return;
    te_tensor_written(shadow);
    param->storage->shadow_version = param->storage->version;
}

/* Whether a parameter has to come from its master itself, as from that in 16 bits of one in other 16 bits: what an
 * update has would be rounded once where others see it rounded twice. */
static bool rounds_twice(const te_tensor *param, const te_tensor *master)
{
    return !te_tensor_is_quantized(param) && te_dtype_size(master->dtype) < sizeof(float) &&
           master->dtype != param->dtype;
}

static te_tensor *master_of(const te_optim_group *g, int i)
{
    return g->masters && g->masters[i] != g->params[i] ? g->masters[i] : NULL;
}

static te_status catch_up_all(te_context *ctx, int n_groups, const te_optim_group *groups)
{
    te_status status = TE_OK;
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n && status == TE_OK; i++)
            if (master_of(&groups[k], i)) status = te_optim_catch_up(groups[k].masters[i], groups[k].params[i]);
    return status == TE_OK ? TE_OK : ctx->status;
}

static void follow_all(int n_groups, const te_optim_group *groups)
{
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++)
            if (master_of(&groups[k], i)) te_optim_follow(groups[k].masters[i], groups[k].params[i]);
}

/* Operands of one parameter: p, g and its states; the updated ones behind them. The last output refreshes what follows
 * the updated values: the rounded parameter when a master is kept, else its compute copy. *copy is that of a gradient
 * which is not contiguous, for the caller to release. */
static te_status bind_entry(te_context *ctx, const char *what, const te_optim_group *g, int i, int n_states,
                            te_run *run, te_operand *in, te_operand *out, te_tensor **copy)
{
    te_tensor *param = g->params[i], *grad = g->grads[i], *target = g->masters && g->masters[i] ? g->masters[i] : param;
    te_status status = te_optim_check(ctx, what, i, param, param);
    if (status == TE_OK && te_tensor_is_quantized(target))
        status = te_fail(ctx, TE_ERROR_ARGUMENT, "%s: parameter %lld is stored quantized and has no master copy", what,
                         te_counted(ctx, i));
    if (status == TE_OK) status = te_optim_check(ctx, what, i, param, target);
    if (status == TE_OK && grad && !te_tensor_contiguous(grad)) {
        grad = *copy = te_tensor_contiguous_copy(grad);
        if (!grad) return ctx->status;
    }
    if (status == TE_OK) status = te_optim_check(ctx, what, i, param, grad);
    for (int k = 0; k < n_states && status == TE_OK; k++) {
        status = te_optim_check(ctx, what, i, param, g->states[k][i]);
        if (status == TE_OK) in[2 + k] = out[1 + k] = te_optim_flat(g->states[k][i]);
    }
    if (status != TE_OK) return status;
    run->shape[0] = te_tensor_numel(target);
    run->compute_f64 = target->dtype == TE_F64;
    in[0] = out[0] = te_optim_flat(target);
    in[1] = te_optim_flat(grad);
    const te_tensor *follows = target == param ? current_shadow(param) : rounds_twice(param, target) ? NULL : param;
    out[1 + n_states] = te_optim_flat(follows);
    return TE_OK;
}

static te_status finish_entry(const te_optim_group *g, int i, int n_states)
{
    te_tensor *param = g->params[i], *master = master_of(g, i);
    te_status status = master && rounds_twice(param, master) ? te_tensor_copy_data(param, master) : TE_OK;
    written(param, master ? NULL : current_shadow(param));
    te_tensor_written(master);
    for (int k = 0; k < n_states; k++) te_tensor_written(g->states[k][i]);
    return status;
}

bool te_optim_any_follows(int n_groups, const te_optim_group *groups)
{
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++) {
            const te_tensor *param = groups[k].params[i];
            if (master_of(&groups[k], i) || (param && current_shadow(param))) return true;
        }
    return false;
}

/* Row k of the numbers of a step on a device, each as an input that is the same for every element. */
static void bind_numbers(te_operand *in, const te_tensor *numbers, int k)
{
    for (int i = 0; i < TE_OPTIM_VALUES; i++) {
        in[i] = te_optim_flat(numbers);
        in[i].data = (double *)in[i].data + k * TE_OPTIM_VALUES + i;
        in[i].stride[0] = 0;
    }
}

/* Updates everything. No interrupt ends that: half a step is worse than a late end. */
static te_status run_whole(te_context *ctx, te_exec *exec, te_optim_pending *p)
{
    const te_optim_work *work = &p->work;
    const te_optim_batch *b = &p->batch;
    const atomic_int *interrupt = exec->interrupt;
    exec->interrupt = NULL;
    te_status status = exec->backend->program_run(exec, p->program, b->runs, b->n);
    if (status == TE_OK) status = te_optim_quantizing_run(exec, p->program, &p->stored, b->inputs, b->outputs);
    if (status != TE_OK) te_fail_exec(ctx, status, exec, p->program->name);
    for (int k = 0; k < work->n_groups && status == TE_OK; k++)
        for (int i = 0; i < work->groups[k].n && status == TE_OK; i++)
            status = finish_entry(&work->groups[k], i, work->n_states);
    if (status == TE_OK) follow_all(work->n_groups, work->groups); /* behind all writes: parameters may share memory */
    exec->interrupt = interrupt;
    return status;
}

static te_status bind_group(te_context *ctx, te_optim_pending *p, int k, int first)
{
    const te_optim_work *work = &p->work;
    const te_optim_batch *b = &p->batch;
    te_status status = TE_OK;
    for (int i = 0; i < work->groups[k].n && status == TE_OK; i++) {
        int at = first + i;
        te_operand *operands = b->operands + (size_t)at * (size_t)(b->inputs + b->outputs);
        status = bind_entry(ctx, p->program->name, &work->groups[k], i, work->n_states, &b->runs[at], operands,
                            operands + b->inputs, &p->copies[at]);
        if (status != TE_OK) return status;
        b->runs[at].params = work->values ? work->values[k] : NULL;
        if (work->numbers) bind_numbers(operands + 2 + work->n_states, work->numbers, k);
        te_device *here = work->groups[k].params[i]->storage->device;
        if (p->device && here != p->device)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: parameters on %s and %s", p->program->name, p->device->name,
                           here->name);
        p->device = here;
    }
    return status;
}

void te_optim_close(te_context *ctx, te_optim_pending *p)
{
    te_optim_quantizing_close(ctx, &p->stored);
    for (int i = 0; p->copies && i < p->n; i++) te_tensor_release(p->copies[i]);
    if (p->copies) te_mem_free(&ctx->mem, p->copies, (size_t)p->n * sizeof *p->copies);
    if (p->batch.runs) te_mem_free(&ctx->mem, p->batch.runs, p->batch.bytes);
}

te_status te_optim_open(te_context *ctx, te_optim_pending *p, const te_optim_work *work)
{
    *p = (te_optim_pending){.work = *work};
    for (int k = 0; k < work->n_groups; k++) p->n += work->groups[k].n;
    if (p->n < 1) return TE_OK;
    p->program = te_utility_program(ctx, work->program);
    if (!p->program) return ctx->status;
    int n_inputs = 2 + work->n_states + (work->numbers ? TE_OPTIM_VALUES : 0);
    te_status status = te_optim_batch_open(ctx, &p->batch, p->n, n_inputs, 2 + work->n_states);
    if (status != TE_OK) return status;
    p->copies = te_mem_zalloc(&ctx->mem, (size_t)p->n * sizeof *p->copies);
    if (!p->copies) return te_fail_memory(ctx, "optimizer step");
    for (int k = 0, first = 0; k < work->n_groups && status == TE_OK; first += work->groups[k++].n)
        status = bind_group(ctx, p, k, first);
    return status;
}

te_status te_optim_settle(te_context *ctx, te_optim_pending *p)
{
    te_status status = p->n ? catch_up_all(ctx, p->work.n_groups, p->work.groups) : TE_OK;
    return status == TE_OK && p->n ? te_optim_quantizing_open(ctx, p->work.n_groups, p->work.groups, p->batch.runs,
                                                               &p->stored)
                                   : status;
}

te_status te_optim_reserve(te_context *ctx, const te_optim_pending *p)
{
    return te_optim_quantizing_reserve(ctx, &p->stored);
}

te_status te_optim_run(te_context *ctx, te_optim_pending *p)
{
    if (!p->n) return TE_OK;
    return run_whole(ctx, &p->device->exec, p);
}

te_status te_optim_update(te_context *ctx, const te_optim_work *work)
{
    te_optim_pending p;
    te_status status = te_optim_open(ctx, &p, work);
    if (status == TE_OK) status = te_optim_settle(ctx, &p);
    if (status == TE_OK) status = te_optim_reserve(ctx, &p);
    if (status == TE_OK) status = te_optim_run(ctx, &p);
    te_optim_close(ctx, &p);
    return status;
}
