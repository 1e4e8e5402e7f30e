/* recipe.c - quantizers of an operation by role, and delayed scaling's memory. */
#include "recipe.h"

#include "numerics.h"
#include "quantized_parameter.h"

#include <math.h>

const char *const te_role_names[] = {"input", "weight", "grad_output", NULL};

/* --- recipes ------------------------------------------------------------------------------------------------------ */

/* Both operands of the weight gradient are summed over rows: a transform along them must be the same on both. */
static te_status check_pair(te_context *ctx, const te_product_recipe *recipe)
{
    const te_quantizer *x = &recipe->quantizers[TE_ROLE_INPUT], *dy = &recipe->quantizers[TE_ROLE_GRAD_OUTPUT];
    bool x_transformed = recipe->quantized[TE_ROLE_INPUT] && x->hadamard;
    bool dy_transformed = recipe->quantized[TE_ROLE_GRAD_OUTPUT] && dy->hadamard;
    if (recipe->backward == TE_BACKWARD_QUANTIZED && x_transformed != dy_transformed)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.recipe: hadamard: the quantizers of input and grad_output meet in the weight gradient; "
                       "both must transform, or neither");
    return TE_OK;
}

te_product_recipe *te_product_recipe_new(te_context *ctx, const te_product_recipe *from)
{
    for (int r = 0; r < TE_ROLE_COUNT; r++)
        if (from->quantized[r] && te_quantizer_check(ctx, &from->quantizers[r]) != TE_OK) return NULL;
    if (check_pair(ctx, from) != TE_OK) return NULL;
    te_product_recipe *recipe = te_mem_alloc(&ctx->mem, sizeof *recipe);
    if (!recipe) {
        te_fail_memory(ctx, "recipe");
        return NULL;
    }
    *recipe = *from;
    recipe->ctx = ctx;
    recipe->refs = 1;
    te_context_retain(ctx);
    return recipe;
}

te_product_recipe *te_product_recipe_retain(te_product_recipe *recipe)
{
    if (recipe) recipe->refs++;
    return recipe;
}

void te_product_recipe_release(te_product_recipe *recipe)
{
    if (!recipe || --recipe->refs > 0) return;
    te_context *ctx = recipe->ctx;
    te_mem_free(&ctx->mem, recipe, sizeof *recipe);
    te_context_unref(ctx);
}

/* --- states ------------------------------------------------------------------------------------------------------- */

te_recipe_state *te_recipe_state_new(te_context *ctx)
{
    te_recipe_state *state = te_mem_zalloc(&ctx->mem, sizeof *state);
    if (!state) {
        te_fail_memory(ctx, "recipe");
        return NULL;
    }
    state->ctx = ctx;
    state->refs = 1;
    te_context_retain(ctx);
    return state;
}

te_recipe_state *te_recipe_state_retain(te_recipe_state *state)
{
    if (state) state->refs++;
    return state;
}

void te_recipe_state_release(te_recipe_state *state)
{
    if (!state || --state->refs > 0) return;
    te_context *ctx = state->ctx;
    te_product_recipe_release(state->recipe);
    te_quantized_close(&state->weight);
    te_numerics_unwatch(state);
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        te_tensor_release(state->scale[r]);
        te_tensor_release(state->history[r]);
    }
    te_mem_free(&ctx->mem, state, sizeof *state);
    te_context_unref(ctx);
}

static float *numbers(te_tensor *t) { return te_tensor_data(t); }

/* A history of `length` that begins as the old one does. NULL on failure. */
static te_tensor *resized(te_context *ctx, te_tensor *old, int64_t length)
{
    te_tensor *t = te_tensor_new(ctx, NULL, TE_F32, 1, &length);
    int64_t kept = old ? old->shape[0] : 0;
    if (!t) return NULL;
    for (int64_t i = 0; i < length; i++) numbers(t)[i] = i < kept ? numbers(old)[i] : 0;
    return t;
}

static te_status remember(te_recipe_state *state, te_role role, int64_t length)
{
    te_context *ctx = state->ctx;
    const int64_t one = 1;
    if (!state->scale[role]) {
        state->scale[role] = te_tensor_new(ctx, NULL, TE_F32, 1, &one);
        if (!state->scale[role]) return ctx->status;
        *numbers(state->scale[role]) = 1;
    }
    if (state->history[role] && state->history[role]->shape[0] == length) return TE_OK;
    te_tensor *history = resized(ctx, state->history[role], length);
    if (!history) return ctx->status;
    te_tensor_release(state->history[role]);
    state->history[role] = history;
    return TE_OK;
}

te_status te_recipe_state_use(te_recipe_state *state, te_product_recipe *recipe)
{
    if (state->recipe == recipe) return TE_OK;
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        if (!recipe->quantized[r] || !recipe->quantizers[r].needs_history) continue;
        te_status status = remember(state, (te_role)r, recipe->history_length);
        if (status != TE_OK) return status;
    }
    te_quantized_close(&state->weight);
    te_product_recipe_release(state->recipe);
    state->recipe = te_product_recipe_retain(recipe);
    return TE_OK;
}

te_product_recipe *te_recipe_active(const te_recipe_state *state)
{
    return state && state->ctx->recipe_enabled ? state->recipe : NULL;
}

/* --- delayed scaling ---------------------------------------------------------------------------------------------- */

static void roll(float *history, int64_t n, float last)
{
    if (n > 1) {
        memmove(history + 1, history + 2, (size_t)(n - 2) * sizeof *history);
        history[n - 1] = last;
    }
    history[0] = 0;
}

te_status te_recipe_state_update(te_recipe_state *state, te_role role, te_amax_algorithm algorithm, int margin)
{
    te_tensor *history = state->history[role], *scale = state->scale[role];
    if (!history) return TE_OK;
    if (role == TE_ROLE_WEIGHT) state->weight_collected = false; /* the next step counts anew */
    float *amaxes = numbers(history), last = amaxes[0], amax = last;
    int64_t n = history->shape[0];
    if (last == 0) return TE_OK;
    if (!(last > 0 && last <= TE_FLT_MAX)) {
        state->ctx->skipped_amaxes++;
        amaxes[0] = 0;
        return TE_OK;
    }
    for (int64_t i = 1; i < n && algorithm == TE_AMAX_MAX; i++) amax = amaxes[i] > amax ? amaxes[i] : amax;
    roll(amaxes, n, last);
    double max = te_element_max(state->recipe->quantizers[role].element);
    *numbers(scale) = (float)fmin(ldexp(max, -margin) / (double)amax, TE_FLT_MAX);
    scale->storage->version++;
    history->storage->version++;
    return TE_OK;
}

/* Whether the tape of a stretch that runs twice has a factor for this tensor; `given` is changed to it then. */
static void replayed(te_context *ctx, float *given)
{
    te_scale_tape *tape = &ctx->replayed_scales;
    if (tape->at < tape->n) *given = tape->values[tape->at++];
}

static te_status recorded(te_context *ctx, float scale)
{
    te_scale_tape *tape = &ctx->recorded_scales;
    void *values = tape->values;
    if (!tape->on) return TE_OK;
    if (!te_mem_grow(&ctx->mem, &values, &tape->capacity, tape->n + 1, sizeof *tape->values))
        return te_fail_memory(ctx, "recipe");
    tape->values = values;
    tape->values[tape->n++] = scale;
    return TE_OK;
}

/* Reads the amax that quantizing reported, wherever it lies, and lets it count for the step. */
static te_status count_amax(te_recipe_state *state, te_role role, const te_quantized *z)
{
    te_tensor *amax = z->side[0].amax ? z->side[0].amax : z->side[1].amax;
    float *step = numbers(state->history[role]), now;
    te_status status = te_tensor_read(amax, TE_F32, &now);
    if (status == TE_OK && now > *step) *step = now;
    return status;
}

/* The amax of a step is that of all its tensors in this role. *counted: whether this one was taken. */
static te_status collect(te_recipe_state *state, te_role role, const te_quantized *z, bool *counted)
{
    te_context *ctx = state->ctx;
    bool counts = ctx->grad_enabled || ctx->recorded_scales.on || ctx->calibrating || role == TE_ROLE_GRAD_OUTPUT;
    *counted = state->recipe->quantizers[role].needs_history && counts && !ctx->replayed_scales.on;
    return *counted ? count_amax(state, role, z) : TE_OK;
}

/* A copy of the weight counts once in every step that uses it with gradients, whenever it was made: what a step leaves behind
 * does not depend on what an earlier one had made already. */
static te_status collect_weight(te_recipe_state *state)
{
    if (state->weight_collected) return TE_OK;
    return collect(state, TE_ROLE_WEIGHT, &state->weight, &state->weight_collected);
}

/* --- quantizing --------------------------------------------------------------------------------------------------- */

static bool weight_is_current(const te_recipe_state *state, const te_tensor *t, te_dtype compute, bool rowwise,
                              bool columnwise)
{
    const te_quantized *w = &state->weight;
    return t->storage->block && state->weight_id == t->storage->id && state->weight_version == t->storage->version &&
           w->dtype == compute && (w->side[0].data || !rowwise) && (w->side[1].data || !columnwise) &&
           (w->side[0].data || w->side[1].data);
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
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
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

/* Whether t is the whole of what its copies stand for, unchanged since. */
static bool has_copies(const te_tensor *t, te_dtype compute, bool rowwise, bool columnwise)
{
    const struct te_quantized_values *attached = t->storage->attached;
    if (!attached || attached->version != t->storage->version || t->dtype != compute || t->offset) return false;
    const te_quantized *copies = &attached->copies;
    bool same = copies->ndim == t->ndim && te_tensor_contiguous(t);
    for (int i = 0; i < t->ndim && same; i++) same = copies->shape[i] == t->shape[i];
    return same && (copies->side[0].data || !rowwise) && (copies->side[1].data || !columnwise);
}

te_tensor *te_role_quantized_values(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute, bool columnwise)
{
    te_context *ctx = state->ctx;
    te_quantized copies;
    if (te_role_quantize(state, role, t, compute, true, columnwise, &copies) != TE_OK) return NULL;
    te_tensor *values = te_dequantize(ctx, &copies, 0);
    struct te_quantized_values *attached = values ? te_mem_alloc(&ctx->mem, sizeof *attached) : NULL;
    if (!attached) {
        if (values) te_fail_memory(ctx, "quantize");
        te_quantized_close(&copies);
        te_tensor_release(values);
        return NULL;
    }
    *attached = (struct te_quantized_values){copies, values->storage->version};
    values->storage->attached = attached;
    return values;
}

float te_role_resident_scale(const te_recipe_state *state)
{
    bool given = state->recipe->quantizers[TE_ROLE_WEIGHT].needs_history;
    return given ? *numbers(state->scale[TE_ROLE_WEIGHT]) : 1;
}

te_status te_role_count_resident(te_recipe_state *state, const te_quantized *z)
{
    return state->recipe->quantizers[TE_ROLE_WEIGHT].needs_history ? count_amax(state, TE_ROLE_WEIGHT, z) : TE_OK;
}

te_status te_role_quantize_resident(te_recipe_state *state, te_tensor *t, bool columnwise, te_quantized *result)
{
    const te_quantizer *q = &state->recipe->quantizers[TE_ROLE_WEIGHT];
    te_quantize_options options = {.want = {true, columnwise && q->has_columnwise}, .scale = te_role_resident_scale(state)};
    te_status status = te_quantize(t, q, &options, result);
    if (status == TE_OK) status = te_role_count_resident(state, result);
    if (status != TE_OK) te_quantized_close(result);
    return status;
}

/* The factor that delayed scaling has for a tensor, from the tape where a stretch runs again. */
static te_status take_scale(te_recipe_state *state, te_role role, float *scale)
{
    if (role == TE_ROLE_GRAD_OUTPUT) return TE_OK;
    replayed(state->ctx, scale);
    return recorded(state->ctx, *scale);
}

te_status te_role_open(te_recipe_state *state, te_role role, te_device *device, te_dtype dtype, int ndim, const int64_t *shape,
                       const bool want[2], te_quantized *result, float *scale)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    *scale = q->needs_history ? *numbers(state->scale[role]) : 1;
    te_status status = q->needs_history ? take_scale(state, role, scale) : TE_OK;
    return status == TE_OK ? te_quantized_open(device, q, dtype, ndim, shape, want, result) : status;
}

te_status te_role_close(te_recipe_state *state, te_role role, const te_quantized *z)
{
    bool counted;
    return collect(state, role, z, &counted);
}

te_status te_role_quantize(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute, bool rowwise,
                           bool columnwise, te_quantized *result)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    if (role == TE_ROLE_WEIGHT && te_tensor_is_quantized(t)) return take_resident(t, rowwise, columnwise, result);
    if (role == TE_ROLE_INPUT && has_copies(t, compute, rowwise, columnwise)) {
        te_quantized_share(&t->storage->attached->copies, rowwise, columnwise, result);
        return TE_OK;
    }
    bool current = role == TE_ROLE_WEIGHT && weight_is_current(state, t, compute, rowwise, columnwise);
    float scale = q->needs_history ? *numbers(state->scale[role]) : 1;
    te_status status = TE_OK;
    memset(result, 0, sizeof *result);
    if (q->needs_history) status = take_scale(state, role, &scale);
    if (status == TE_OK && state->watched) status = te_numerics_count(state, role, t, compute, scale);
    if (status != TE_OK) return status;
    if (current && (!q->needs_history || scale == state->weight_scale)) {
        status = collect_weight(state);
        if (status == TE_OK) te_quantized_share(&state->weight, rowwise, columnwise, result);
        return status;
    }
    te_quantize_options options = {.want = {rowwise, columnwise}, .scale = scale};
    status = quantize(t, compute, q, &options, result);
    if (status != TE_OK) return status;
    if (role == TE_ROLE_WEIGHT) {
        te_quantized_close(&state->weight);
        te_quantized_share(result, rowwise, columnwise, &state->weight);
        state->weight_id = t->storage->id;
        state->weight_version = t->storage->version;
        state->weight_scale = scale;
        state->weight_collected = false;
        status = collect_weight(state);
    } else {
        status = te_role_close(state, role, result);
    }
    if (status != TE_OK) te_quantized_close(result);
    return status;
}

te_status te_role_observe(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    te_quantize_options options = {.want = {true, false}, .scale = 1};
    te_quantized z;
    if (!state->recipe->quantized[role] || !q->needs_history || te_tensor_is_quantized(t)) return TE_OK;
    te_status status = quantize(t, compute, q, &options, &z);
    if (status != TE_OK) return status;
    status = te_role_close(state, role, &z);
    te_quantized_close(&z);
    return status;
}
