/* optim_master.c - masters of parameters that others write to.
 *
 * A master's storage records how many writes its parameter and it had seen when it last held what the parameter does.
 * One that holds what was loaded, or of which a recording found writes that it cannot make up for, records nothing: it
 * is compared with the parameter before it is used. */
#include "optim_internal.h"

#include "graph.h"
#include "quantized_parameter.h"

#include <math.h>

static uint64_t writes_to(const te_tensor *t) { return te_storage_writes(t->storage); }

void te_optim_follow(te_tensor *master, const te_tensor *param)
{
    te_follower *f = &master->storage->follower;
    const te_graph *capture = param->ctx->capture;
    bool waits = capture && f->waiting == te_graph_id(capture);
    *f = (te_follower){!waits, param->storage->id, writes_to(param), writes_to(master), f->waiting};
}

void te_optim_forget(te_tensor *master) { master->storage->follower.known = false; }

/* Whether the parameter may hold something else. Who wrote to both meant the master. */
static bool is_stale(const te_tensor *master, const te_tensor *param)
{
    const te_follower *f = &master->storage->follower;
    if (!f->known) return true;
    return f->own == writes_to(master) && !(f->id == param->storage->id && f->writes == writes_to(param));
}

static te_status run(te_context *ctx, const te_utility *utility, te_exec *exec, int64_t n, const te_operand *in,
                     const te_operand *out, bool compute_f64)
{
    te_program *program = te_utility_program(ctx, utility);
    if (!program) return ctx->status;
    te_run run = {.ndim = 1, .shape = {n}, .inputs = in, .outputs = out, .compute_f64 = compute_f64};
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, "optimizer step");
}

static const te_utility master_program = {
    .name = "master",
    .inputs = "master rounded p",
    .params = "",
    .outputs = "y",
    .formula = "y = where(p == rounded, master, p)",
};

/* Writes that changed nothing, and those beside a parameter that is a view, leave the master as it is. */
static te_status catch_up_plain(te_context *ctx, te_tensor *master, te_tensor *param)
{
    te_tensor *rounded = te_tensor_cast(master, param->dtype);
    if (!rounded) return ctx->status;
    te_operand in[3] = {te_optim_flat(master), te_optim_flat(rounded), te_optim_flat(param)};
    te_status status = run(ctx, &master_program, &param->storage->device->exec, te_tensor_numel(param), in, in,
                           param->dtype == TE_F64);
    te_tensor_release(rounded);
    te_tensor_written(master);
    return status;
}

/* --- of parameters that are stored quantized ---------------------------------------------------------------------- */

/* In float32, which tells all values of any format apart. */
static te_tensor *values_of(te_context *ctx, const te_quantized *copies)
{
    te_quantized z = *copies;
    z.dtype = TE_F32;
    return te_dequantize(ctx, &z, z.side[0].data ? 0 : 1);
}

enum { MAX_FACTORS = 3 };

/* What a history may have given to multiply a parameter by when it was written: the factors that have the inverse which
 * is kept of it, since neighbours may share one. 1 where there is no history. */
static te_status factors_of(const te_tensor *param, float factors[MAX_FACTORS], int *n)
{
    const te_quantized *own = &param->storage->quantized->copies;
    float inverse = 1;
    *n = 0;
    te_status status = own->quantizer.needs_history
                           ? te_tensor_read(own->side[own->side[0].data ? 0 : 1].scale_inv, TE_F32, &inverse)
                           : TE_OK;
    float near[MAX_FACTORS] = {1 / inverse, nextafterf(1 / inverse, 0), nextafterf(1 / inverse, HUGE_VALF)};
    for (int i = 0; i < MAX_FACTORS; i++)
        if (1 / near[i] == inverse) factors[(*n)++] = near[i];
    return status;
}

/* The values that the parameter would have if it were quantized from its master; NULL on failure. */
static te_tensor *quantized_values(te_context *ctx, te_tensor *master, const te_tensor *param, float factor)
{
    const te_quantized *own = &param->storage->quantized->copies;
    const te_quantize_options options = {.want = {own->side[0].data, !own->side[0].data}, .scale = factor};
    te_quantized copies;
    te_tensor *values = NULL, *cast = te_tensor_cast(master, param->dtype);
    if (cast && te_quantize(cast, &own->quantizer, &options, &copies) == TE_OK) {
        values = values_of(ctx, &copies);
        te_quantized_close(&copies);
    }
    te_tensor_release(cast);
    return values;
}

/* A factor that follows from the values may differ in its last bit where these were quantized before. */
static const te_utility changed_program = {
    .name = "master_changed",
    .inputs = "rounded p",
    .params = "",
    .outputs = "y",
    .formula = "y = where(abs(p - rounded) <= abs(p) * 0.000001, 0, 1)",
};

/* Counts the elements that differ, over `rounded`. */
static te_status count_differences(te_context *ctx, te_tensor *rounded, const te_tensor *values, double *count)
{
    te_operand in[2] = {te_optim_flat(rounded), te_optim_flat(values)};
    te_exec *exec = &values->storage->device->exec;
    te_status status = run(ctx, &changed_program, exec, te_tensor_numel(values), in, in, false);
    te_tensor_written(rounded);
    return status == TE_OK ? te_sum_squares(ctx, 1, &rounded, count) : status;
}

/* Whether the parameter holds something else than its master's quantization. */
static te_status has_changed(te_context *ctx, te_tensor *master, const te_tensor *param, bool *changed)
{
    float factors[MAX_FACTORS];
    int n = 0;
    te_tensor *values = values_of(ctx, &param->storage->quantized->copies);
    te_status status = values ? factors_of(param, factors, &n) : ctx->status;
    *changed = true;
    for (int i = 0; status == TE_OK && i < n && *changed; i++) {
        double count = 0;
        te_tensor *rounded = quantized_values(ctx, master, param, factors[i]);
        status = rounded ? count_differences(ctx, rounded, values, &count) : ctx->status;
        *changed = count > 0;
        te_tensor_release(rounded);
    }
    te_tensor_release(values);
    return status;
}

/* Values of one write belong together, as their factors follow from the largest: all are taken, or none. What is
 * rounded stochastically cannot be compared. */
static te_status catch_up_quantized(te_context *ctx, te_tensor *master, te_tensor *param)
{
    bool random = param->storage->quantized->copies.quantizer.stochastic;
    bool changed = !random || master->storage->follower.known;
    te_status status = random || ctx->capture ? TE_OK : has_changed(ctx, master, param, &changed);
    return status == TE_OK && changed ? te_tensor_copy_data(master, param) : status;
}

/* --- catching up -------------------------------------------------------------------------------------------------- */

/* A recording makes up for its own writes alone: for those of others whoever launches it does. */
static bool can_wait(const te_tensor *param)
{
    const te_graph *capture = param->ctx->capture;
    return capture && param->storage->graph_wrote != te_graph_id(capture);
}

te_status te_optim_catch_up(te_tensor *master, te_tensor *param)
{
    if (!is_stale(master, param)) return TE_OK;
    te_context *ctx = param->ctx;
    if (can_wait(param)) {
        te_optim_forget(master);
        master->storage->follower.waiting = te_graph_id(ctx->capture);
        return TE_OK;
    }
    te_status status = te_tensor_is_quantized(param) ? catch_up_quantized(ctx, master, param)
                                                     : catch_up_plain(ctx, master, param);
    if (status == TE_OK) te_optim_follow(master, param);
    return status;
}
