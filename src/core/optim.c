/* optim.c - see optim.h. Each update is a row program, applied to all tensors in one run of the backend. */
#include "optim_internal.h"

#include "graph.h"
#include "quantized_parameter.h"

#include <math.h>

/* What does not change within a step is computed once, in double: gradient scale and bias corrections are folded into
 * the coefficients, so few operations are left per element. The square's coefficient is its root: squared, a gradient
 * scale far from 1 would leave float32 where the scaled gradient does not. */
#define ADAMW                                                                    \
    "m2 = m * beta1 + g * fresh1; f = g * fresh2_root; v2 = v * beta2 + f * f; " \
    "p2 = p * decay - m2 * step_size / (sqrt(v2) + eps)"

static const te_utility adamw_program = {
    .name = "adamw",
    .inputs = "p g m v",
    .params = "decay step_size beta1 beta2 fresh1 fresh2_root eps one",
    .outputs = "p2 m2 v2",
    .formula = ADAMW,
};

/* Where something is to follow the parameters in another dtype. A value of its own can be rounded and stored by the
 * chain that makes it; the same value under two names would be read again. Times 1 changes no bit. */
static const te_utility adamw_copying_program = {
    .name = "adamw",
    .inputs = "p g m v",
    .params = "decay step_size beta1 beta2 fresh1 fresh2_root eps one",
    .outputs = "p2 m2 v2 copy",
    .formula = ADAMW "; copy = p2 * one",
};

/* The same with its coefficients from a device, and a last one that says whether anything changes at all. */
static const te_utility adamw_device_program = {
    .name = "adamw",
    .inputs = "p g m v decay step_size beta1 beta2 fresh1 fresh2_root eps allowed",
    .params = "",
    .outputs = "p2 m2 v2 copy",
    .formula = "m2 = where(allowed, m * beta1 + g * fresh1, m); f = g * fresh2_root; "
               "v2 = where(allowed, v * beta2 + f * f, v); "
               "p2 = where(allowed, p * decay - m2 * step_size / (sqrt(v2) + eps), p); copy = p2",
};

static const te_utility sgd_program = {
    .name = "sgd",
    .inputs = "p g b",
    .params = "lr momentum carry fresh nesterov weight_decay grad_scale",
    .outputs = "p2 b2 copy",
    .formula = "h = g * grad_scale + weight_decay * p; b2 = carry * b + fresh * h; p2 = p - lr * where(nesterov, h + "
               "momentum * b2, b2); copy = p2",
};

static const te_utility plain_sgd_program = {
    .name = "sgd",
    .inputs = "p g",
    .params = "lr weight_decay grad_scale",
    .outputs = "p2 copy",
    .formula = "p2 = p - lr * (g * grad_scale + weight_decay * p); copy = p2",
};

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

/* Scalar parameters of an update. On a device AdamW's 1 is what allows it. */
enum { MAX_VALUES = 8, N_NUMBERS = MAX_VALUES };

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

/* Whether an update has its last output for any parameter. */
static bool any_copies(int n_groups, const te_optim_group *groups)
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
    for (int i = 0; i < N_NUMBERS; i++) {
        in[i] = te_optim_flat(numbers);
        in[i].data = (double *)in[i].data + k * N_NUMBERS + i;
        in[i].stride[0] = 0;
    }
}

/* Updates everything. No interrupt ends that: half a step is worse than a late end. */
static te_status run_whole(te_context *ctx, te_exec *exec, te_program *program, const te_optim_batch *b,
                           te_optim_quantizing *stored, int n_states, int n_groups, const te_optim_group *groups)
{
    const atomic_int *interrupt = exec->interrupt;
    exec->interrupt = NULL;
    te_status status = exec->backend->program_run(exec, program, b->runs, b->n);
    if (status == TE_OK) status = te_optim_quantizing_run(exec, program, stored, b->inputs, b->outputs);
    if (status != TE_OK) te_fail_exec(ctx, status, exec, program->name);
    for (int k = 0; k < n_groups && status == TE_OK; k++)
        for (int i = 0; i < groups[k].n && status == TE_OK; i++)
            status = finish_entry(&groups[k], i, n_states);
    if (status == TE_OK) follow_all(n_groups, groups); /* behind all writes, since parameters may share memory */
    exec->interrupt = interrupt;
    return status;
}

/* An update of groups in one run of the backend, with all that can be found out beforehand: until it runs nothing was
 * written. */
typedef struct pending {
    te_program *program;
    te_device *device;
    const te_optim_group *groups;
    int n_groups, n_states, n; /* n: parameters of all groups */
    te_optim_batch batch;
    te_optim_quantizing stored;
    te_tensor **copies; /* n: of gradients that are not contiguous */
} pending;

static te_status bind_group(te_context *ctx, pending *p, int k, int first, const double *values,
                            const te_tensor *numbers)
{
    const te_optim_batch *b = &p->batch;
    te_status status = TE_OK;
    for (int i = 0; i < p->groups[k].n && status == TE_OK; i++) {
        int at = first + i;
        te_operand *operands = b->operands + (size_t)at * (size_t)(b->inputs + b->outputs);
        status = bind_entry(ctx, p->program->name, &p->groups[k], i, p->n_states, &b->runs[at], operands,
                            operands + b->inputs, &p->copies[at]);
        if (status != TE_OK) return status;
        b->runs[at].params = values;
        if (numbers) bind_numbers(operands + 2 + p->n_states, numbers, k);
        te_device *here = p->groups[k].params[i]->storage->device;
        if (p->device && here != p->device)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: parameters on %s and %s", p->program->name, p->device->name,
                           here->name);
        p->device = here;
    }
    return status;
}

static void pending_close(te_context *ctx, pending *p)
{
    te_optim_quantizing_close(ctx, &p->stored);
    for (int i = 0; p->copies && i < p->n; i++) te_tensor_release(p->copies[i]);
    if (p->copies) te_mem_free(&ctx->mem, p->copies, (size_t)p->n * sizeof *p->copies);
    if (p->batch.runs) te_mem_free(&ctx->mem, p->batch.runs, p->batch.bytes);
}

/* Coefficients are `values`, which stay where they are until it ran, or lie in `numbers`. To be closed even where it
 * fails. */
static te_status pending_open(te_context *ctx, pending *p, const te_utility *utility, int n_states, int n_groups,
                              const double (*values)[MAX_VALUES], const te_tensor *numbers,
                              const te_optim_group *groups)
{
    *p = (pending){.groups = groups, .n_groups = n_groups, .n_states = n_states};
    for (int k = 0; k < n_groups; k++) p->n += groups[k].n;
    if (p->n < 1) return TE_OK;
    p->program = te_utility_program(ctx, utility);
    if (!p->program) return ctx->status;
    int n_inputs = 2 + n_states + (numbers ? N_NUMBERS : 0);
    te_status status = te_optim_batch_open(ctx, &p->batch, p->n, n_inputs, 2 + n_states);
    if (status != TE_OK) return status;
    p->copies = te_mem_zalloc(&ctx->mem, (size_t)p->n * sizeof *p->copies);
    if (!p->copies) return te_fail_memory(ctx, "optimizer step");
    for (int k = 0, first = 0; k < n_groups && status == TE_OK; first += groups[k++].n)
        status = bind_group(ctx, p, k, first, values ? values[k] : NULL, numbers);
    return status;
}

/* The last preparations, for which all groups of a step are known to be right: masters may change here. */
static te_status pending_settle(te_context *ctx, pending *p)
{
    te_status status = p->n ? catch_up_all(ctx, p->n_groups, p->groups) : TE_OK;
    return status == TE_OK && p->n ? te_optim_quantizing_open(ctx, p->n_groups, p->groups, p->batch.runs, &p->stored)
                                   : status;
}

/* Of groups that are all settled: what follows does not run out of memory. */
static te_status pending_reserve(te_context *ctx, const pending *p)
{
    return te_optim_quantizing_reserve(ctx, &p->stored);
}

static te_status pending_run(te_context *ctx, pending *p)
{
    if (!p->n) return TE_OK;
    return run_whole(ctx, &p->device->exec, p->program, &p->batch, &p->stored, p->n_states, p->n_groups, p->groups);
}

static te_status update(te_context *ctx, const te_utility *utility, int n_states, int n_groups,
                        const double (*values)[MAX_VALUES], const te_tensor *numbers, const te_optim_group *groups)
{
    pending p;
    te_status status = pending_open(ctx, &p, utility, n_states, n_groups, values, numbers, groups);
    if (status == TE_OK) status = pending_settle(ctx, &p);
    if (status == TE_OK) status = pending_reserve(ctx, &p);
    if (status == TE_OK) status = pending_run(ctx, &p);
    pending_close(ctx, &p);
    return status;
}

static te_status adamw_values(te_context *ctx, const te_adamw *o, double values[MAX_VALUES])
{
    if (o->step < 1) return te_fail(ctx, TE_ERROR_ARGUMENT, "adamw: step %lld, the first is 1", (long long)o->step);
    double root =
        sqrt(1 - pow(o->beta2, (double)o->step)); /* sqrt(v / (1 - b2^t)) + eps = (sqrt(v) + eps root) / root */
    double v[] = {1 - o->lr * o->weight_decay,
                  o->lr * root / (1 - pow(o->beta1, (double)o->step)),
                  o->beta1,
                  o->beta2,
                  (1 - o->beta1) * o->grad_scale,
                  sqrt(1 - o->beta2) * o->grad_scale,
                  o->eps * root,
                  1};
    memcpy(values, v, sizeof v);
    return TE_OK;
}

te_status te_adamw_step(te_context *ctx, int n_groups, const te_adamw *options, const te_optim_group *groups)
{
    size_t bytes = (size_t)n_groups * sizeof(double[MAX_VALUES]);
    double(*values)[MAX_VALUES] = te_mem_alloc(&ctx->mem, bytes);
    te_status status = values ? TE_OK : te_fail_memory(ctx, "adamw");
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = adamw_values(ctx, &options[k], values[k]);
    const te_utility *program = any_copies(n_groups, groups) ? &adamw_copying_program : &adamw_program;
    if (status == TE_OK) status = update(ctx, program, 2, n_groups, (const double(*)[MAX_VALUES])values, NULL, groups);
    te_mem_free(&ctx->mem, values, bytes);
    return status;
}

/* --- steps whose numbers lie on the device ------------------------------------------------------------------------ */

/* The coefficients of a step, and behind them, where there is room, those of the step before: options of a lower
 * number. The last one of the first is what the host knows of steps that were not made. */
static te_status send_values(te_context *ctx, const te_adamw *o, double unmade_known, bool both, double *values)
{
    te_adamw before = *o;
    te_status status = adamw_values(ctx, o, values);
    if (status != TE_OK || !both) return status;
    before.step = o->step > 1 ? o->step - 1 : 1;
    values[N_NUMBERS - 1] = unmade_known;
    return adamw_values(ctx, &before, values + N_NUMBERS);
}

te_status te_adamw_send(te_context *ctx, int n_groups, const te_adamw *options, double unmade_known, te_tensor *numbers)
{
    bool both = numbers->ndim == 2 && numbers->shape[1] == 2 * N_NUMBERS;
    int64_t columns = both ? 2 * N_NUMBERS : N_NUMBERS;
    size_t bytes = (size_t)n_groups * (size_t)columns * sizeof(double);
    double *values = te_mem_alloc(&ctx->mem, bytes);
    te_status status = values ? TE_OK : te_fail_memory(ctx, "adamw");
    for (int k = 0; k < n_groups && status == TE_OK; k++)
        status = send_values(ctx, &options[k], unmade_known, both, values + k * columns);
    if (status == TE_OK) status = te_tensor_send(numbers, values, n_groups * columns);
    te_mem_free(&ctx->mem, values, bytes);
    return status;
}

static const te_utility scaled_program = {
    .name = "adamw_numbers",
    .inputs = "latest before factor allowed unmade known",
    .params = "",
    .outputs = "y",
    .formula = "c = column(); x = where(unmade > known, before, latest); scaled = x * factor; "
               "y = where(c == 4, scaled, where(c == 5, scaled, where(c == 7, allowed, x)))",
};

static const te_utility unmade_program = {
    .name = "adamw_unmade",
    .inputs = "unmade allowed",
    .params = "",
    .outputs = "y",
    .formula = "y = unmade + 1 - allowed",
};

static te_operand shifted(const te_tensor *t, int64_t elements)
{
    te_operand o = te_optim_flat(t);
    o.data = (double *)o.data + elements;
    return o;
}

/* After the step: counts it where it was not made. */
static te_status count_unmade(te_context *ctx, const te_tensor *clip, te_tensor *unmade)
{
    te_program *program = te_utility_program(ctx, &unmade_program);
    te_exec *exec = &unmade->storage->device->exec;
    if (!program) return ctx->status;
    te_operand in[2] = {te_optim_flat(unmade), shifted(clip, 2)}, out = in[0];
    te_run run = {.ndim = 1, .shape = {1}, .inputs = in, .outputs = &out, .compute_f64 = true};
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    te_tensor_written(unmade);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, "adamw");
}

/* The numbers {groups, 8} of the step that is due, with the gradients' factor in them: clip is
 * what te_grad_clip gave. */
static te_tensor *scaled_numbers(te_context *ctx, const te_tensor *numbers, const te_tensor *clip,
                                 const te_tensor *unmade)
{
    int64_t groups = numbers->shape[0];
    te_exec *exec = &numbers->storage->device->exec;
    te_tensor *scaled = te_tensor_new(ctx, numbers->storage->device, TE_F64, 2, (int64_t[]){groups, N_NUMBERS});
    te_program *program = scaled ? te_utility_program(ctx, &scaled_program) : NULL;
    te_status status = program ? TE_OK : ctx->status;
    if (status == TE_OK) {
        te_operand in[6] = {te_optim_flat(numbers), shifted(numbers, N_NUMBERS),    shifted(clip, 1),
                            shifted(clip, 2),       te_optim_flat(unmade), shifted(numbers, N_NUMBERS - 1)};
        te_operand out = te_optim_flat(scaled);
        te_run run = {.ndim = 2, .shape = {groups, N_NUMBERS}, .inputs = in, .outputs = &out, .compute_f64 = true};
        in[0].stride[0] = in[1].stride[0] = in[5].stride[0] = 2 * N_NUMBERS;
        in[2].stride[0] = in[3].stride[0] = in[4].stride[0] = 0;
        in[0].stride[1] = in[1].stride[1] = out.stride[1] = 1;
        out.stride[0] = N_NUMBERS;
        status = exec->backend->program_run(exec, program, &run, 1);
        if (status != TE_OK) te_fail_exec(ctx, status, exec, "adamw");
    }
    if (status == TE_OK) return scaled;
    te_tensor_release(scaled);
    return NULL;
}

static bool are_numbers(const te_tensor *t, int64_t n, const te_device *device)
{
    return t && t->dtype == TE_F64 && te_tensor_contiguous(t) && te_tensor_numel(t) == n &&
           t->storage->device == device;
}

te_status te_adamw_step_on(te_context *ctx, int n_groups, te_tensor *numbers, te_tensor *clip, te_tensor *unmade,
                           const te_optim_group *groups)
{
    const te_device *device = numbers->storage->device;
    int columns = clip ? 2 * N_NUMBERS : N_NUMBERS;
    if (numbers->ndim != 2 || numbers->shape[0] != n_groups ||
        !are_numbers(numbers, (int64_t)n_groups * columns, device) ||
        (clip && (!are_numbers(clip, 3, device) || !are_numbers(unmade, 1, device))))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "adamw: numbers %s of %d groups, clip %s, unmade %s: float64 {groups, %d}, {3} and {1} are "
                       "needed",
                       TE_SHAPE_TEXT(numbers), n_groups, clip ? TE_SHAPE_TEXT(clip) : "absent",
                       unmade ? TE_SHAPE_TEXT(unmade) : "absent", columns);
    te_tensor *scaled = clip ? scaled_numbers(ctx, numbers, clip, unmade) : te_tensor_retain(numbers);
    te_status status = scaled ? update(ctx, &adamw_device_program, 2, n_groups, NULL, scaled, groups) : ctx->status;
    if (status == TE_OK && clip) status = count_unmade(ctx, clip, unmade);
    te_tensor_release(scaled);
    return status;
}

/* Groups with and without momentum are different programs, so each has a run of its own; the first one begins when all
 * are bound. */
typedef struct sgd_group {
    pending pending;
    double values[1][MAX_VALUES];
} sgd_group;

static te_status open_sgd_group(te_context *ctx, sgd_group *g, const te_sgd *o, const te_optim_group *group)
{
    bool plain = o->momentum == 0;
    const double with_momentum[MAX_VALUES] = {o->lr, o->momentum, o->first ? 0 : o->momentum,
                                              o->first ? 1 : 1 - o->dampening, o->nesterov, o->weight_decay,
                                              o->grad_scale};
    const double without[MAX_VALUES] = {o->lr, o->weight_decay, o->grad_scale};
    memcpy(g->values[0], plain ? without : with_momentum, sizeof without);
    return pending_open(ctx, &g->pending, plain ? &plain_sgd_program : &sgd_program, plain ? 0 : 1, 1,
                        (const double(*)[MAX_VALUES])g->values, NULL, group);
}

te_status te_sgd_step(te_context *ctx, int n_groups, const te_sgd *options, const te_optim_group *groups)
{
    if (n_groups < 1) return TE_OK;
    size_t bytes = (size_t)n_groups * sizeof(sgd_group);
    sgd_group *all = te_mem_zalloc(&ctx->mem, bytes);
    te_status status = all ? TE_OK : te_fail_memory(ctx, "sgd");
    for (int k = 0; k < n_groups && status == TE_OK; k++)
        status = open_sgd_group(ctx, &all[k], &options[k], &groups[k]);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = pending_settle(ctx, &all[k].pending);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = pending_reserve(ctx, &all[k].pending);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = pending_run(ctx, &all[k].pending);
    for (int k = 0; all && k < n_groups; k++) pending_close(ctx, &all[k].pending);
    if (all) te_mem_free(&ctx->mem, all, bytes);
    return status;
}
