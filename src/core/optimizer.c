/* optimizer.c - AdamW with its state for a C host; the steps are those of optim.h, which scripts make, too.
 *
 * Every parameter is a group of its own in the one pass of a step, because each counts the steps
 * that it took part in. */
#include "optim.h"

#include "autograd.h"
#include "kernels/float_mode.h"
#include "quantized_parameter.h"

#include <math.h>
#include <stddef.h>

static const int64_t MOST_STEPS = INT64_C(1) << 53; /* a float64 counts them one by one */

/* What a parameter has beside its gradient. The fields of a te_optim_group point into here. */
typedef struct entry {
    te_tensor *param, *grad, *exp_avg, *exp_avg_sq, *master;
    int64_t    steps;
} entry;

struct te_optimizer {
    te_context      *ctx;
    te_adamw_options options;
    int              n;
    entry           *entries;
    te_adamw        *steps; /* of one call, for the entries that take part */
    te_optim_group  *groups;
};

static const te_adamw_options defaults = {
    .struct_size = sizeof defaults, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};

void te_adamw_defaults(te_adamw_options *options)
{
    if (!options || options->struct_size < offsetof(te_adamw_options, master_weights)) return;
    size_t size = options->struct_size < sizeof defaults ? options->struct_size : sizeof defaults;
    te_copy_fields(options, &defaults, size, sizeof defaults);
    options->struct_size = size;
}

/* The negated comparisons refuse NaN. */
static te_status read_options(te_context *ctx, const te_adamw_options *given, te_adamw_options *o)
{
    *o = defaults;
    if (given && given->struct_size < offsetof(te_adamw_options, master_weights))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_optimizer_adamw: struct_size: %zu; see te_adamw_defaults",
                       given->struct_size);
    if (given) te_copy_fields(o, given, given->struct_size, sizeof *o);
    if (!(o->lr >= 0 && o->eps >= 0 && o->weight_decay >= 0 && o->lr + o->eps + o->weight_decay < HUGE_VAL))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te_optimizer_adamw: lr %g, eps %g and weight_decay %g must be numbers from 0", o->lr, o->eps,
                       o->weight_decay);
    if (!(o->beta1 >= 0 && o->beta1 < 1 && o->beta2 >= 0 && o->beta2 < 1))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_optimizer_adamw: beta1 %g and beta2 %g must lie in [0, 1)", o->beta1,
                       o->beta2);
    return TE_OK;
}

static te_tensor *zeros_like(te_tensor *t)
{
    te_tensor *z = te_tensor_new(t->ctx, t->storage->device, TE_F32, t->ndim, t->shape);
    if (z && te_tensor_fill(z, 0) == TE_OK) return z;
    te_tensor_release(z);
    return NULL;
}

static te_status open_entry(te_optimizer *o, int i, te_tensor *param)
{
    entry *e = &o->entries[i];
    bool floats = param && te_dtype_has_gradient(param->dtype);
    if (!floats || param->node || param->ctx != o->ctx || !te_tensor_contiguous(param))
        return te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_adamw: parameter %d is %s", i,
                       !param ? "NULL" : !floats ? te_dtype_name(param->dtype)
                       : param->node ? "the result of an operation"
                       : param->ctx != o->ctx ? "a tensor of another context" : "not contiguous");
    for (int k = 0; k < i; k++)
        if (o->entries[k].param == param)
            return te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_adamw: parameter %d came before", i);
    bool mastered = te_tensor_is_quantized(param) ||
                    (o->options.master_weights && (param->dtype == TE_BF16 || param->dtype == TE_F16));
    e->param = te_tensor_retain(param);
    e->exp_avg = zeros_like(param);
    e->exp_avg_sq = zeros_like(param);
    if (mastered) e->master = te_tensor_cast(param, TE_F32);
    if (e->master) te_optim_follow(e->master, param);
    return e->exp_avg && e->exp_avg_sq && (!mastered || e->master) ? TE_OK : o->ctx->status;
}

te_optimizer *te_optimizer_adamw(te_context *ctx, te_tensor *const *params, int n, const te_adamw_options *options)
{
    TE_FLOAT_DEFAULT_HERE;
    te_adamw_options read;
    if (!ctx || read_options(ctx, options, &read) != TE_OK) return NULL;
    if (n < 1 || !params) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "te_optimizer_adamw: %d parameters%s", n, params ? "" : " at NULL");
        return NULL;
    }
    te_optimizer *o = te_mem_zalloc(&ctx->mem, sizeof *o);
    if (!o) {
        te_fail_memory(ctx, "te_optimizer_adamw");
        return NULL;
    }
    *o = (te_optimizer){.ctx = ctx, .options = read, .n = n};
    te_context_retain(ctx);
    o->entries = te_mem_zalloc(&ctx->mem, (size_t)n * sizeof *o->entries);
    o->steps = te_mem_zalloc(&ctx->mem, (size_t)n * sizeof *o->steps);
    o->groups = te_mem_zalloc(&ctx->mem, (size_t)n * sizeof *o->groups);
    te_status status = o->entries && o->steps && o->groups ? TE_OK : te_fail_memory(ctx, "te_optimizer_adamw");
    bool      grads = te_context_set_grad_enabled(ctx, false);
    for (int i = 0; i < n && status == TE_OK; i++) status = open_entry(o, i, params[i]);
    te_context_set_grad_enabled(ctx, grads);
    if (status == TE_OK) return o;
    te_optimizer_release(o);
    return NULL;
}

void te_optimizer_release(te_optimizer *o)
{
    if (!o) return;
    te_context *ctx = o->ctx;
    for (int i = 0; o->entries && i < o->n; i++) {
        entry     *e = &o->entries[i];
        te_tensor *held[] = {e->param, e->exp_avg, e->exp_avg_sq, e->master};
        for (int k = 0; k < 4; k++) te_tensor_release(held[k]);
    }
    if (o->entries) te_mem_free(&ctx->mem, o->entries, (size_t)o->n * sizeof *o->entries);
    if (o->steps) te_mem_free(&ctx->mem, o->steps, (size_t)o->n * sizeof *o->steps);
    if (o->groups) te_mem_free(&ctx->mem, o->groups, (size_t)o->n * sizeof *o->groups);
    te_mem_free(&ctx->mem, o, sizeof *o);
    te_context_unref(ctx);
}

te_status te_optimizer_set_lr(te_optimizer *o, double lr)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!o) return TE_ERROR_ARGUMENT;
    if (!(lr >= 0 && lr < HUGE_VAL))
        return te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_set_lr: %g is no number from 0", lr);
    o->options.lr = lr;
    return TE_OK;
}

te_status te_optimizer_grad_norm(te_optimizer *o, double *norm)
{
    if (!o || !norm)
        return o ? te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_grad_norm: norm is NULL") : TE_ERROR_ARGUMENT;
    te_mem     *mem = &o->ctx->mem;
    size_t      each = sizeof(te_tensor *) + sizeof(double), bytes = (size_t)o->n * each;
    double     *squares = te_mem_zalloc(mem, bytes), sum = 0;
    if (!squares) return te_fail_memory(o->ctx, "te_optimizer_grad_norm");
    te_tensor **grads = (te_tensor **)(squares + o->n);
    int         n = 0;
    for (int i = 0; i < o->n; i++)
        if ((grads[n] = te_tensor_gradient(o->entries[i].param))) n++;
    te_float_mode mode = te_float_mode_begin();
    te_status     status = n ? te_sum_squares(o->ctx, n, grads, squares) : TE_OK;
    for (int i = 0; i < n; i++) sum += squares[i];
    if (status == TE_OK) *norm = sqrt(sum);
    te_float_mode_end(&mode);
    te_mem_free(mem, squares, bytes);
    return status;
}

te_status te_optimizer_step(te_optimizer *o, double grad_scale)
{
    if (!o) return TE_ERROR_ARGUMENT;
    if (isnan(grad_scale)) return te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_step: grad_scale is NaN");
    const te_adamw_options *a = &o->options;
    int n = 0;
    for (int i = 0; i < o->n; i++) {
        entry *e = &o->entries[i];
        if (!(e->grad = te_tensor_gradient(e->param))) continue;
        o->steps[n] = (te_adamw){.lr = a->lr, .beta1 = a->beta1, .beta2 = a->beta2, .eps = a->eps,
                                 .weight_decay = a->weight_decay, .step = e->steps + 1, .grad_scale = grad_scale};
        o->groups[n++] = (te_optim_group){.n = 1, .params = &e->param, .grads = &e->grad,
                                          .states = {&e->exp_avg, &e->exp_avg_sq},
                                          .masters = e->master ? &e->master : NULL};
    }
    te_float_mode mode = te_float_mode_begin(); /* powers of the betas are found here */
    te_status     status = n ? te_adamw_step(o->ctx, n, o->steps, o->groups) : TE_OK;
    te_float_mode_end(&mode);
    for (int i = 0; i < o->n && status == TE_OK; i++) o->entries[i].steps += o->entries[i].grad != NULL;
    return status;
}

te_status te_optimizer_zero_grad(te_optimizer *o)
{
    te_status status = o ? TE_OK : TE_ERROR_ARGUMENT;
    for (int i = 0; status == TE_OK && i < o->n; i++) status = te_tensor_zero_gradient(o->entries[i].param);
    return status;
}

te_tensor *te_optimizer_state(te_optimizer *o, int i, const char *name)
{
    if (!o || i < 0 || i >= o->n || !name) return NULL;
    entry *e = &o->entries[i];
    bool   wanted = strcmp(name, "master") == 0 && e->master;
    if (wanted && te_optim_catch_up(e->master, e->param) != TE_OK) return NULL;
    return strcmp(name, "exp_avg") == 0 ? e->exp_avg : strcmp(name, "exp_avg_sq") == 0 ? e->exp_avg_sq
           : wanted ? e->master : NULL;
}

int64_t te_optimizer_steps(const te_optimizer *o, int i) { return o && i >= 0 && i < o->n ? o->entries[i].steps : 0; }

te_status te_optimizer_set_steps(te_optimizer *o, int i, int64_t steps)
{
    if (!o) return TE_ERROR_ARGUMENT;
    if (i < 0 || i >= o->n || steps < 0 || steps > MOST_STEPS)
        return te_fail(o->ctx, TE_ERROR_ARGUMENT, "te_optimizer_set_steps: %lld steps of parameter %d of %d",
                       (long long)steps, i, o->n);
    o->entries[i].steps = steps;
    if (o->entries[i].master) te_optim_forget(o->entries[i].master);
    return TE_OK;
}
