/* optim_adamw.c - AdamW (Loshchilov and Hutter 2019), with coefficients from the host or from the device. */
#include "optim_internal.h"

#include "graph.h"

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

static te_status adamw_values(te_context *ctx, const te_adamw *o, double values[TE_OPTIM_VALUES])
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
    size_t bytes = (size_t)n_groups * sizeof(double[TE_OPTIM_VALUES]);
    double(*values)[TE_OPTIM_VALUES] = te_mem_alloc(&ctx->mem, bytes);
    te_status status = values ? TE_OK : te_fail_memory(ctx, "adamw");
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = adamw_values(ctx, &options[k], values[k]);
    te_optim_work work = {.program = te_optim_any_follows(n_groups, groups) ? &adamw_copying_program : &adamw_program,
                          .n_states = 2, .n_groups = n_groups, .groups = groups,
                          .values = (const double(*)[TE_OPTIM_VALUES])values};
    if (status == TE_OK) status = te_optim_update(ctx, &work);
    te_mem_free(&ctx->mem, values, bytes);
    return status;
}

/* --- steps whose numbers lie on the device ------------------------------------------------------------------------ */

/* Behind the coefficients of a step, where there is room: what those of an earlier one follow from, and what the host
 * knows of steps that were not made. */
enum { OF_LR = TE_OPTIM_VALUES, OF_EPS, OF_STEP, OF_KNOWN, TWICE = 2 * TE_OPTIM_VALUES };

static te_status send_values(te_context *ctx, const te_adamw *o, double unmade_known, bool both, double *values)
{
    if (both) {
        memset(values + TE_OPTIM_VALUES, 0, sizeof(double[TE_OPTIM_VALUES]));
        values[OF_LR] = o->lr;
        values[OF_EPS] = o->eps;
        values[OF_STEP] = (double)o->step;
        values[OF_KNOWN] = unmade_known;
    }
    return adamw_values(ctx, o, values);
}

te_status te_adamw_send(te_context *ctx, int n_groups, const te_adamw *options, double unmade_known, te_tensor *numbers)
{
    bool both = numbers->ndim == 2 && numbers->shape[1] == TWICE;
    int64_t columns = both ? TWICE : TE_OPTIM_VALUES;
    size_t bytes = (size_t)n_groups * (size_t)columns * sizeof(double);
    double *values = te_mem_alloc(&ctx->mem, bytes);
    te_status status = values ? TE_OK : te_fail_memory(ctx, "adamw");
    for (int k = 0; k < n_groups && status == TE_OK; k++)
        status = send_values(ctx, &options[k], unmade_known, both, values + k * columns);
    if (status == TE_OK) status = te_tensor_send(numbers, values, n_groups * columns);
    te_mem_free(&ctx->mem, values, bytes);
    return status;
}

/* As adamw_values, of an earlier step where some were not made of which the host does not know. */
static const te_utility scaled_program = {
    .name = "adamw_numbers",
    .inputs = "latest beta1 beta2 lr eps step known factor allowed unmade",
    .params = "",
    .outputs = "y",
    .formula = "c = column(); late = unmade - known; t = step - late; root = sqrt(1 - pow(beta2, t)); "
               "earlier = where(c == 1, lr * root / (1 - pow(beta1, t)), where(c == 6, eps * root, latest)); "
               "x = where(late == 0, latest, earlier); scaled = x * factor; "
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
    te_tensor *scaled = te_tensor_new(ctx, numbers->storage->device, TE_F64, 2, (int64_t[]){groups, TE_OPTIM_VALUES});
    te_program *program = scaled ? te_utility_program(ctx, &scaled_program) : NULL;
    te_status status = program ? TE_OK : ctx->status;
    if (status == TE_OK) {
        static const int of_row[] = {2, 3, OF_LR, OF_EPS, OF_STEP, OF_KNOWN}; /* from beta1 to known */
        enum { IN_ROW = 1 + sizeof of_row / sizeof *of_row };
        te_operand in[IN_ROW + 3] = {te_optim_flat(numbers)};
        for (int i = 1; i < IN_ROW; i++) in[i] = shifted(numbers, of_row[i - 1]);
        in[IN_ROW] = shifted(clip, 1), in[IN_ROW + 1] = shifted(clip, 2), in[IN_ROW + 2] = te_optim_flat(unmade);
        te_operand out = te_optim_flat(scaled);
        te_run run = {.ndim = 2, .shape = {groups, TE_OPTIM_VALUES}, .inputs = in, .outputs = &out,
                      .compute_f64 = true};
        for (int i = 0; i < IN_ROW + 3; i++) {
            in[i].stride[0] = i < IN_ROW ? TWICE : 0;
            in[i].stride[1] = i == 0;
        }
        out.stride[0] = TE_OPTIM_VALUES;
        out.stride[1] = 1;
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
    int columns = clip ? TWICE : TE_OPTIM_VALUES;
    if (numbers->ndim != 2 || numbers->shape[0] != n_groups ||
        !are_numbers(numbers, (int64_t)n_groups * columns, device) ||
        (clip && (!are_numbers(clip, 3, device) || !are_numbers(unmade, 1, device))))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "adamw: numbers %s of %d groups, clip %s, unmade %s: float64 {groups, %d}, {3} and {1} are "
                       "needed",
                       TE_SHAPE_TEXT(numbers), n_groups, clip ? TE_SHAPE_TEXT(clip) : "absent",
                       unmade ? TE_SHAPE_TEXT(unmade) : "absent", columns);
    te_tensor *scaled = clip ? scaled_numbers(ctx, numbers, clip, unmade) : te_tensor_retain(numbers);
    te_optim_work work = {.program = &adamw_device_program, .n_states = 2, .n_groups = n_groups, .groups = groups,
                          .numbers = scaled};
    te_status status = scaled ? te_optim_update(ctx, &work) : ctx->status;
    if (status == TE_OK && clip) status = count_unmade(ctx, clip, unmade);
    te_tensor_release(scaled);
    return status;
}
