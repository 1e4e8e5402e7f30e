/* recipe_quantize.c - operands quantized by role: the amax of each in the history, and the weight's copy. */
#include "recipe.h"

#include "graph.h"
#include "numerics.h"
#include "ops/ops.h"
#include "quantized_parameter.h"

/* --- amaxes ------------------------------------------------------------------------------------------------------- */

/* Whether the amax of a tensor that is quantized now is one of the step's: the largest of all in this role. */
static bool counts(const te_recipe_state *state, const te_product_recipe *recipe, te_role role)
{
    const te_context *ctx = state->ctx;
    bool wanted =
        ctx->grad_enabled || ctx->recorded_scales.on || te_recipe_calibrates(state) || role == TE_ROLE_GRAD_OUTPUT;
    bool paused = ctx->replayed_scales.on || ctx->amaxes_paused;
    return recipe->quantizers[role].needs_history && wanted && !paused;
}

/* The history, for an amax of a tensor that was quantized to `element`. */
static te_tensor *counted(te_recipe_state *state, te_role role, te_element_kind element)
{
    state->scaled_for[role].counted = true;
    state->scaled_for[role].counting = element;
    return state->history[role];
}

/* A copy of the weight counts once in every step that uses it with gradients, whenever it was made: what a step leaves
 * behind does not depend on what an earlier one had made already. */
static te_status collect_weight(te_recipe_state *state)
{
    if (state->weight_collected || !counts(state, state->recipe, TE_ROLE_WEIGHT)) return TE_OK;
    state->weight_collected = true;
    return te_quantized_count(&state->weight, te_role_seen(state, state->recipe, TE_ROLE_WEIGHT));
}

/* --- quantizing --------------------------------------------------------------------------------------------------- */

/* Whether t is the part of its storage that the weight was. */
static bool is_same_view(const te_recipe_state *state, const te_tensor *t)
{
    const te_quantized *w = &state->weight;
    bool same = w->ndim == t->ndim && state->weight_offset == t->offset;
    for (int i = 0; i < t->ndim && same; i++)
        same = w->shape[i] == t->shape[i] && state->weight_stride[i] == t->stride[i];
    return same;
}

/* A copy from outside is not made again by a graph that would go on with it, and one of a graph is there only when that
 * has run. */
static bool weight_is_current(const te_recipe_state *state, const te_tensor *t, te_dtype compute, bool rowwise,
                              bool columnwise)
{
    const te_quantized *w = &state->weight;
    return t->storage->block && state->weight_id == t->storage->id && state->weight_version == t->storage->version &&
           is_same_view(state, t) && state->weight_graph == te_graph_id(state->ctx->capture) && w->dtype == compute &&
           (w->side[0].data || !rowwise) && (w->side[1].data || !columnwise) && (w->side[0].data || w->side[1].data);
}

/* Of a factor in memory of the host. */
static float number(const te_tensor *factor) { return *(const float *)te_tensor_data((te_tensor *)factor); }

/* Whether the weight would be multiplied by the same factor again. Nobody waits for a device to find that out: there
 * the factor counts as another one once it was written, and the kernel compares (te_quantize_job.kept). */
static bool factor_is_current(const te_recipe_state *state)
{
    const te_tensor *now = state->scale[TE_ROLE_WEIGHT], *then = state->weight_scale;
    if (!then || now->storage->device != then->storage->device) return !then;
    if (now->storage->device == &state->ctx->devices[0]) return number(now) == number(then);
    return state->weight_scale_id == now->storage->id && state->weight_scale_version == now->storage->version;
}

static te_status check_dtype(const te_recipe_state *state, te_role role, te_dtype dtype)
{
    if (dtype == TE_F32 || dtype == TE_BF16 || dtype == TE_F16) return TE_OK;
    return te_fail(state->ctx, TE_ERROR_ARGUMENT,
                   "te.recipe: %s: %s; what a recipe quantizes is float32, bfloat16 or float16: convert, or run this "
                   "under te.autocast{ enabled = false } without calibrating",
                   te_role_names[role], te_dtype_name(dtype));
}

static te_status quantize(te_tensor *t, te_dtype compute, const te_quantizer *q, const te_quantize_options *options,
                          te_quantized *result)
{
    te_tensor *cast = te_tensor_cast_cached(t, compute);
    te_status status = cast ? te_quantize(cast, q, options, result) : t->ctx->status;
    te_tensor_release(cast);
    return status;
}

/* A parameter that is stored quantized is multiplied as it is. */
static te_status take_resident(te_tensor *t, bool rowwise, bool columnwise, te_quantized *result)
{
    const te_quantized *copies = &t->storage->quantized->copies;
    if ((rowwise && !copies->side[0].data) || (columnwise && !copies->side[1].data))
        return te_fail(
            t->ctx, TE_ERROR_ARGUMENT,
            "te.linear: the weight %s has no %s copy; parameters for training are made where gradients are recorded",
            TE_SHAPE_TEXT(t), rowwise && !copies->side[0].data ? "row-wise" : "column-wise");
    te_quantized_share(copies, rowwise, columnwise, result);
    return TE_OK;
}

void te_quantized_values_free(te_storage *storage)
{
    struct te_quantized_values *attached = storage->attached;
    te_mem mem = storage->ctx->mem;
    if (!attached) return;
    te_quantized_close(&attached->copies);
    te_mem_free(&mem, attached, sizeof *attached);
    storage->attached = NULL;
}

/* Whether what an input multiplies in the weight gradient is transformed as `copies` are. */
static bool suits_gradient(const te_product_recipe *recipe, const te_quantized *copies)
{
    bool transformed = recipe->quantized[TE_ROLE_GRAD_OUTPUT] && recipe->quantizers[TE_ROLE_GRAD_OUTPUT].hadamard;
    return recipe->backward != TE_BACKWARD_QUANTIZED || copies->quantizer.hadamard == transformed;
}

/* Whether t is the whole of what its copies stand for, unchanged since, and the wanted ones can be had. What forward
 * multiplies does not depend on whether gradients will be wanted, so neither does whether they suit these. */
static bool has_copies(const te_product_recipe *recipe, const te_tensor *t, te_dtype compute, bool rowwise,
                       bool columnwise)
{
    const struct te_quantized_values *attached = t->storage->attached;
    if (!attached || !suits_gradient(recipe, &attached->copies)) return false;
    if (attached->version != t->storage->version || t->dtype != compute || t->offset) return false;
    const te_quantized *copies = &attached->copies;
    bool same = copies->ndim == t->ndim && te_tensor_contiguous(t);
    for (int i = 0; i < t->ndim && same; i++) same = copies->shape[i] == t->shape[i];
    return same && (copies->side[0].data || !rowwise) && (!columnwise || te_quantized_may_complete(copies));
}

/* Takes both over. */
static te_tensor *attach(te_context *ctx, te_tensor *values, te_quantized *copies)
{
    struct te_quantized_values *attached = values ? te_mem_alloc(&ctx->mem, sizeof *attached) : NULL;
    if (!attached) {
        if (values) te_fail_memory(ctx, "quantize");
        te_quantized_close(copies);
        te_tensor_release(values);
        return NULL;
    }
    *attached = (struct te_quantized_values){*copies, values->storage->version};
    values->storage->attached = attached;
    return values;
}

te_tensor *te_quantized_values(te_context *ctx, te_quantized *copies)
{
    return attach(ctx, te_dequantize(ctx, copies, 0), copies);
}

te_tensor *te_quantized_shell(te_context *ctx, te_device *device, te_quantized *copies)
{
    return attach(ctx, te_tensor_new_unbacked(ctx, device, copies->dtype, copies->ndim, copies->shape), copies);
}

te_tensor *te_role_quantized_values(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                                    te_dtype compute, bool columnwise)
{
    te_context *ctx = state->ctx;
    te_quantized copies;
    if (te_role_quantize(state, recipe, role, t, compute, true, columnwise, &copies) != TE_OK) return NULL;
    return te_quantized_values(ctx, &copies);
}

te_status te_role_settle_resident(te_recipe_state *state, const te_quantizer *q, te_device *device)
{
    return q->needs_history ? te_role_settle(state, TE_ROLE_WEIGHT, device) : TE_OK;
}

te_status te_role_resident_scale(te_recipe_state *state, const te_quantizer *q, float *scale)
{
    *scale = 1;
    if (!q->needs_history) return TE_OK;
    te_status status = te_role_settle(state, TE_ROLE_WEIGHT, te_context_device(state->ctx, "cpu"));
    if (status == TE_OK) *scale = number(state->scale[TE_ROLE_WEIGHT]);
    return status;
}

te_status te_role_count_resident(te_recipe_state *state, const te_quantized *z)
{
    if (!z->quantizer.needs_history) return TE_OK;
    const te_tensor *amax = z->side[0].amax ? z->side[0].amax : z->side[1].amax;
    te_status        status = te_role_settle(state, TE_ROLE_WEIGHT, amax->storage->device);
    return status == TE_OK ? te_quantized_count(z, counted(state, TE_ROLE_WEIGHT, z->quantizer.element)) : status;
}

te_status te_role_forget_resident(te_recipe_state *state, const te_quantizer *q)
{
    return q->needs_history ? te_recipe_forget_amax(state->history[TE_ROLE_WEIGHT]) : TE_OK;
}

te_status te_role_quantize_resident(te_recipe_state *state, const te_quantizer *q, te_tensor *t, bool columnwise,
                                    bool over, te_quantized *result)
{
    te_quantize_options options = {.want = {true, columnwise && q->has_columnwise}, .scale = 1, .again = over};
    te_status status = q->needs_history ? te_role_settle(state, TE_ROLE_WEIGHT, t->storage->device) : TE_OK;
    if (q->needs_history) options.factor = state->scale[TE_ROLE_WEIGHT];
    if (q->needs_history)
        options.seen = counted(state, TE_ROLE_WEIGHT, q->element); /* wherever an optimizer writes */
    if (!over) memset(result, 0, sizeof *result);
    return status == TE_OK ? te_quantize(t, q, &options, result) : status;
}

te_status te_role_open(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_device *device,
                       te_dtype dtype, int ndim, const int64_t *shape, const bool want[2], te_quantized *result,
                       te_tensor **factor)
{
    const te_quantizer *q = &recipe->quantizers[role];
    *factor = NULL;
    te_status status = check_dtype(state, role, dtype);
    if (status == TE_OK && q->needs_history) status = te_role_take_factor(state, q, role, device, false, factor);
    return status == TE_OK ? te_quantized_open(device, q, dtype, ndim, shape, want, true, result) : status;
}

te_tensor *te_role_seen(te_recipe_state *state, const te_product_recipe *recipe, te_role role)
{
    return counts(state, recipe, role) ? counted(state, role, recipe->quantizers[role].element) : NULL;
}

te_status te_role_close(te_recipe_state *state, const te_product_recipe *recipe, te_role role, const te_quantized *z)
{
    te_tensor *seen = te_role_seen(state, recipe, role);
    bool by_host = seen && seen->storage->device->exec.backend->host_memory;
    return by_host ? te_quantized_count(z, seen) : TE_OK;
}

te_status te_role_keep_factor(te_recipe_state *state, te_role role, te_tensor *factor, te_quantized *z)
{
    z->factor = factor ? te_role_lasting(state, role, factor) : NULL;
    return z->factor || !factor ? TE_OK : state->ctx->status;
}

/* Counts what quantizing will do where somebody looks; on a device that means to wait for the factor. */
static te_status watch(te_recipe_state *state, const te_quantizer *q, te_role role, te_tensor *t, te_dtype compute,
                       te_tensor *factor)
{
    float scale = 1;
    if (!state->watched || !state->watched->on || state->ctx->amaxes_paused) return TE_OK;
    if (state->ctx->capture)
        return te_fail(state->ctx, TE_ERROR_UNSUPPORTED,
                       "te.numerics.watch: a step that is looked at reads its tensors on the host and cannot be part "
                       "of a graph; end the watch first (stop), or look at steps outside");
    te_status status = factor ? te_tensor_read(factor, TE_F32, &scale) : TE_OK;
    return status == TE_OK ? te_numerics_count(state, q, role, t, compute, scale) : status;
}

/* Whether nobody but the state holds the weight's copies. */
static bool holds_alone(const te_recipe_state *state)
{
    bool alone = true;
    for (int s = 0; s < 2; s++) {
        const te_tensor *data = state->weight.side[s].data;
        alone &= !data || (data->refs == 1 && data->storage->refs == 1);
    }
    return alone;
}

/* Room for what the kernels keep of copies, where the host cannot compare factors, or is not asked: in a graph. */
static te_status open_kept(const te_tensor *t, const te_quantizer *q, te_quantize_options *options)
{
    te_device *device = t->storage->device;
    te_graph *graph = t->ctx->capture;
    if (device->exec.backend->host_memory || q->row_scaled || q->stochastic || !(q->needs_history || graph))
        return TE_OK;
    options->kept = te_tensor_new(t->ctx, device, TE_F32, 1, (int64_t[]){3});
    if (graph && options->kept) options->stale = te_graph_stale(graph, t);
    return options->kept ? TE_OK : t->ctx->status;
}

/* Keeps another holder of the weight's copies, and what they were made with: where a stretch runs again that is a
 * factor of its first run, which need not be the one of now. */
static void keep_weight(te_recipe_state *state, const te_tensor *t, const te_quantized *z, te_tensor *factor,
                        bool collected)
{
    te_quantized_close(&state->weight);
    te_quantized_share(z, true, true, &state->weight);
    state->weight_id = t->storage->id;
    state->weight_version = t->storage->version;
    state->weight_offset = t->offset;
    memcpy(state->weight_stride, t->stride, sizeof t->stride);
    state->weight_graph = te_graph_id(state->ctx->capture);
    te_tensor_release(state->weight_scale);
    state->weight_scale = factor ? te_tensor_retain(factor) : NULL;
    bool of_now = factor && !state->ctx->replayed_scales.on;
    state->weight_scale_id = of_now ? state->scale[TE_ROLE_WEIGHT]->storage->id : 0;
    state->weight_scale_version = of_now ? state->scale[TE_ROLE_WEIGHT]->storage->version : UINT64_MAX;
    state->weight_collected = collected;
}

/* The weight, where what is there will not do; `same`: it may be that nothing but the factor was written,
 * and maybe not changed. */
static te_status quantize_weight(te_recipe_state *state, te_tensor *t, te_dtype compute, bool same,
                                 te_quantize_options *options, te_quantized *result)
{
    const te_quantizer *q = &state->recipe->quantizers[TE_ROLE_WEIGHT];
    te_allocator *allocator = &t->storage->device->allocator;
    te_quantized copies;
    te_status status = TE_OK;
    allocator->lasting = true; /* a launch that finds the weight unchanged makes no copies */
    options->again = same && state->weight_kept && q->needs_history && holds_alone(state);
    if (options->again) {
        te_quantized_share(&state->weight, true, true, &copies);
        options->kept = te_tensor_retain(state->weight_kept);
        for (int s = 0; s < 2; s++)
            te_tensor_written(copies.side[s].data);
    } else {
        status = open_kept(t, q, options);
    }
    if (status == TE_OK) status = quantize(t, compute, q, options, &copies);
    allocator->lasting = false;
    if (status == TE_OK) {
        keep_weight(state, t, &copies, options->factor, options->seen != NULL);
        te_tensor_release(state->weight_kept);
        state->weight_kept = te_tensor_retain(options->kept);
        if (options->stale) te_graph_keep_copies(t->ctx->capture, &copies, options->kept);
        te_quantized_share(&copies, options->want[0], options->want[1], result);
        te_quantized_close(&copies);
    }
    te_tensor_release(options->kept);
    return status;
}

/* `keeps`: the factor stays with the result. */
static te_status quantize_role(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                               te_dtype compute, bool rowwise, bool columnwise, bool keeps, te_quantized *result)
{
    const te_quantizer *q = &recipe->quantizers[role];
    if (role == TE_ROLE_WEIGHT && te_tensor_is_quantized(t)) return take_resident(t, rowwise, columnwise, result);
    if (role == TE_ROLE_INPUT && has_copies(recipe, t, compute, rowwise, columnwise)) {
        te_quantized *copies = &t->storage->attached->copies;
        te_status completed = columnwise ? te_quantized_complete(copies) : TE_OK;
        if (completed == TE_OK) te_quantized_share(copies, rowwise, columnwise, result);
        return completed;
    }
    bool same = role == TE_ROLE_WEIGHT && weight_is_current(state, t, compute, rowwise, columnwise);
    bool current = same && factor_is_current(state);
    te_quantize_options options = {.want = {rowwise, columnwise}, .scale = 1, .passing = role != TE_ROLE_WEIGHT};
    memset(result, 0, sizeof *result);
    te_status status = check_dtype(state, role, compute);
    if (status == TE_OK && q->needs_history)
        status = te_role_take_factor(state, q, role, t->storage->device, current, &options.factor);
    if (status == TE_OK) status = watch(state, q, role, t, compute, options.factor);
    if (status == TE_OK && current && (!q->needs_history || options.factor == state->weight_scale)) {
        status = collect_weight(state);
        if (status == TE_OK) te_quantized_share(&state->weight, rowwise, columnwise, result);
    } else if (status == TE_OK) {
        options.seen = te_role_seen(state, recipe, role);
        if (role == TE_ROLE_WEIGHT)
            status = quantize_weight(state, t, compute, same, &options, result);
        else
            status = quantize(t, compute, q, &options, result);
    }
    if (status == TE_OK && keeps) status = te_role_keep_factor(state, role, options.factor, result);
    if (status != TE_OK) te_quantized_close(result);
    te_tensor_release(options.factor);
    return status;
}

te_status te_role_quantize(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                           te_dtype compute, bool rowwise, bool columnwise, te_quantized *result)
{
    return quantize_role(state, recipe, role, t, compute, rowwise, columnwise, false, result);
}

te_status te_role_quantize_first(te_recipe_state *state, const te_product_recipe *recipe, te_tensor *x,
                                 te_dtype compute, te_quantized *result)
{
    return quantize_role(state, recipe, TE_ROLE_INPUT, x, compute, true, false, true, result);
}

te_status te_role_observe(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    te_quantize_options options = {.want = {true, false}, .scale = 1, .passing = true};
    te_quantized z;
    if (!state->recipe->quantized[role] || !q->needs_history || te_tensor_is_quantized(t)) return TE_OK;
    te_status status = check_dtype(state, role, compute);
    if (status == TE_OK) status = te_role_settle(state, role, t->storage->device);
    if (status != TE_OK) return status;
    options.seen = te_role_seen(state, state->recipe, role);
    status = quantize(t, compute, q, &options, &z);
    if (status == TE_OK) te_quantized_close(&z);
    return status;
}
