/* recipe.c - quantizers of an operation by role, and delayed scaling's memory. */
#include "recipe.h"

#include "graph.h"
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
    te_tensor_release(state->weight_scale);
    te_numerics_unwatch(state);
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        te_tensor_release(state->scale[r]);
        te_tensor_release(state->history[r]);
    }
    te_mem_free(&ctx->mem, state, sizeof *state);
    te_context_unref(ctx);
}

static float *numbers(te_tensor *t) { return te_tensor_data(t); }

static te_status move(te_tensor **t, te_device *device)
{
    if (!*t || (*t)->storage->device == device) return TE_OK;
    te_tensor *moved = te_tensor_on_device(*t, device);
    if (!moved) return device->ctx->status;
    te_tensor_release(*t);
    *t = moved;
    return TE_OK;
}

/* A history of `length` on the host that begins as the old one does, which is there too. NULL on failure. */
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
    if (move(&state->history[role], &ctx->devices[0]) != TE_OK) return ctx->status;
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
    const te_product_recipe *r = state ? state->recipe : NULL;
    bool quantizes = r && (r->quantized[0] || r->quantized[1] || r->quantized[2]);
    return quantizes && state->ctx->recipe_enabled ? state->recipe : NULL;
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

static void update_on_host(te_recipe_state *state, const te_delayed *t)
{
    float last = t->history[0], amax = last;
    if (last == 0) return;
    if (!(last > 0 && last <= TE_FLT_MAX)) {
        state->ctx->skipped_amaxes++;
        t->history[0] = 0;
        return;
    }
    for (int64_t i = 1; i < t->length && !t->most_recent; i++) amax = t->history[i] > amax ? t->history[i] : amax;
    roll(t->history, t->length, last);
    *t->scale = te_delayed_scale(t->reach, amax);
}

static bool is_on(const te_recipe_update *u, const te_device *device)
{
    const te_tensor *history = u->state->history[u->role];
    return history && history->storage->device == device;
}

static te_delayed delayed_of(const te_recipe_update *u)
{
    te_tensor *scale = u->state->scale[u->role], *history = u->state->history[u->role];
    double max = te_element_max(u->state->recipe->quantizers[u->role].element);
    scale->storage->version++;
    history->storage->version++;
    return (te_delayed){.scale = te_tensor_pointer(scale),
                        .history = te_tensor_pointer(history),
                        .length = history->shape[0],
                        .most_recent = u->algorithm == TE_AMAX_MOST_RECENT,
                        .reach = ldexp(max, -u->margin)};
}

/* The device's own count, from its first update on. */
static te_status open_skipped(te_device *device)
{
    te_exec *exec = &device->exec;
    const uint64_t none = 0;
    if (device->skipped_amaxes) return TE_OK;
    uint64_t *word = exec->backend->memory_alloc(exec, sizeof none);
    if (!word) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory");
    te_status status = exec->backend->memory_copy(exec, word, &none, sizeof none, TE_COPY_HOST_TO_DEVICE);
    if (status == TE_OK)
        device->skipped_amaxes = word;
    else
        exec->backend->memory_free(exec, word, sizeof none);
    return status;
}

static te_status update_on(te_device *device, const te_recipe_update *updates, size_t n)
{
    te_context *ctx = device->ctx;
    te_exec *exec = &device->exec;
    size_t found = 0, at = 0;
    for (size_t i = 0; i < n; i++) found += is_on(&updates[i], device);
    if (found == 0) return TE_OK;
    te_delayed *list = te_mem_alloc(&ctx->mem, found * sizeof *list);
    if (!list) return te_fail_memory(ctx, "recipe");
    for (size_t i = 0; i < n; i++)
        if (is_on(&updates[i], device)) list[at++] = delayed_of(&updates[i]);
    te_status status = open_skipped(device);
    if (status == TE_OK) status = exec->backend->delayed_update(exec, list, (int64_t)found, device->skipped_amaxes);
    te_mem_free(&ctx->mem, list, found * sizeof *list);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, "recipe");
}

te_status te_recipe_states_update(te_context *ctx, const te_recipe_update *updates, size_t n)
{
    te_status status = TE_OK;
    for (size_t i = 0; i < n; i++) {
        if (updates[i].role == TE_ROLE_WEIGHT) updates[i].state->weight_collected = false; /* the next step counts anew */
        if (!is_on(&updates[i], &ctx->devices[0])) continue;
        te_delayed t = delayed_of(&updates[i]);
        update_on_host(updates[i].state, &t);
    }
    for (int d = 1; d < TE_MAX_DEVICES && status == TE_OK; d++)
        if (ctx->devices[d].open) status = update_on(&ctx->devices[d], updates, n);
    return status;
}

te_status te_recipe_skipped_amaxes(te_context *ctx, uint64_t *count)
{
    te_status status = TE_OK;
    *count = ctx->skipped_amaxes;
    for (int d = 1; d < TE_MAX_DEVICES && status == TE_OK; d++) {
        te_device *device = &ctx->devices[d];
        te_exec *exec = &device->exec;
        uint64_t here = 0;
        if (!device->open || !device->skipped_amaxes) continue;
        status = exec->backend->memory_copy(exec, &here, device->skipped_amaxes, sizeof here, TE_COPY_DEVICE_TO_HOST);
        if (status != TE_OK) te_fail_exec(ctx, status, exec, "recipe");
        *count += here;
    }
    return status;
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

/* Scales and histories lie where the tensors are that they are about. */
static te_status settle(te_recipe_state *state, te_role role, te_device *device)
{
    te_status status = move(&state->scale[role], device);
    if (status == TE_OK) status = move(&state->history[role], device);
    return status == TE_OK && role == TE_ROLE_WEIGHT ? move(&state->weight_scale, device) : status;
}

/* Keeps the factor on the tape: a copy where it is one that updates change. */
static te_status record(te_recipe_state *state, te_role role, te_tensor *factor)
{
    te_context *ctx = state->ctx;
    te_scale_tape *tape = &ctx->recorded_scales;
    void *values = tape->values;
    if (!tape->on || tape->paused) return TE_OK;
    if (!te_mem_grow(&ctx->mem, &values, &tape->capacity, tape->n + 1, sizeof *tape->values))
        return te_fail_memory(ctx, "recipe");
    tape->values = values;
    te_tensor *kept = factor == state->scale[role] ? te_tensor_clone_data(factor) : te_tensor_retain(factor);
    if (!kept) return ctx->status;
    tape->values[tape->n++] = kept;
    return TE_OK;
}

/* The factor that delayed scaling has for a tensor on `device`, held for the caller: of a weight a copy of its own, or that
 * of the quantized weight which is there; from the tape where a stretch runs again. */
static te_status take_factor(te_recipe_state *state, te_role role, te_device *device, bool current, te_tensor **factor)
{
    te_context *ctx = state->ctx;
    te_scale_tape *replayed = &ctx->replayed_scales;
    bool from_tape = role != TE_ROLE_GRAD_OUTPUT && replayed->at < replayed->n;
    te_status status = settle(state, role, device);
    *factor = NULL;
    if (status != TE_OK) return status;
    te_tensor *own = current ? state->weight_scale : state->scale[role];
    if (from_tape)
        *factor = te_tensor_retain(replayed->values[replayed->at++]);
    else
        *factor = role == TE_ROLE_WEIGHT && !current ? te_tensor_clone_data(own) : te_tensor_retain(own);
    if (!*factor) return ctx->status;
    return role == TE_ROLE_GRAD_OUTPUT ? TE_OK : record(state, role, *factor);
}

void te_scale_tape_clear(te_scale_tape *tape)
{
    for (size_t i = 0; i < tape->n; i++) te_tensor_release(tape->values[i]);
    tape->n = tape->at = 0;
}

/* --- amaxes ------------------------------------------------------------------------------------------------------- */

/* Whether the amax of a tensor that is quantized now is one of the step's: the largest of all in this role. */
static bool counts(const te_recipe_state *state, te_role role)
{
    const te_context *ctx = state->ctx;
    bool wanted = ctx->grad_enabled || ctx->recorded_scales.on || ctx->calibrating || role == TE_ROLE_GRAD_OUTPUT;
    return state->recipe->quantizers[role].needs_history && wanted && !ctx->replayed_scales.on;
}

/* A copy of the weight counts once in every step that uses it with gradients, whenever it was made: what a step leaves behind
 * does not depend on what an earlier one had made already. */
static te_status collect_weight(te_recipe_state *state)
{
    if (state->weight_collected || !counts(state, TE_ROLE_WEIGHT)) return TE_OK;
    state->weight_collected = true;
    return te_quantized_count(&state->weight, state->history[TE_ROLE_WEIGHT]);
}

/* --- quantizing --------------------------------------------------------------------------------------------------- */

/* A copy from outside is not made again by a graph that would go on with it, and one of a graph is there only when that has
 * run. */
static bool weight_is_current(const te_recipe_state *state, const te_tensor *t, te_dtype compute, bool rowwise,
                              bool columnwise)
{
    const te_quantized *w = &state->weight;
    return t->storage->block && state->weight_id == t->storage->id && state->weight_version == t->storage->version &&
           state->weight_graph == te_graph_id(state->ctx->capture) && w->dtype == compute &&
           (w->side[0].data || !rowwise) && (w->side[1].data || !columnwise) && (w->side[0].data || w->side[1].data);
}

/* Whether the weight would be multiplied by the same factor again. Nobody waits for a device to find that out: there the
 * factor counts as another one once it was written. */
static bool factor_is_current(const te_recipe_state *state)
{
    const te_tensor *now = state->scale[TE_ROLE_WEIGHT], *then = state->weight_scale;
    if (!then || now->storage->device != then->storage->device) return !then;
    if (now->storage->device == &state->ctx->devices[0]) return *numbers((te_tensor *)now) == *numbers((te_tensor *)then);
    return state->weight_scale_version == now->storage->version;
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
    bool kept = state->recipe->quantizers[TE_ROLE_WEIGHT].needs_history;
    return kept ? te_quantized_count(z, state->history[TE_ROLE_WEIGHT]) : TE_OK;
}

te_status te_role_quantize_resident(te_recipe_state *state, te_tensor *t, bool columnwise, te_quantized *result)
{
    const te_quantizer *q = &state->recipe->quantizers[TE_ROLE_WEIGHT];
    te_quantize_options options = {.want = {true, columnwise && q->has_columnwise}, .scale = 1};
    te_status status = q->needs_history ? settle(state, TE_ROLE_WEIGHT, t->storage->device) : TE_OK;
    if (q->needs_history) options.factor = state->scale[TE_ROLE_WEIGHT];
    if (q->needs_history) options.seen = state->history[TE_ROLE_WEIGHT]; /* what an optimizer writes counts wherever that happens */
    memset(result, 0, sizeof *result);
    return status == TE_OK ? te_quantize(t, q, &options, result) : status;
}

te_status te_role_open(te_recipe_state *state, te_role role, te_device *device, te_dtype dtype, int ndim, const int64_t *shape,
                       const bool want[2], te_quantized *result, te_tensor **factor)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    *factor = NULL;
    te_status status = q->needs_history ? take_factor(state, role, device, false, factor) : TE_OK;
    return status == TE_OK ? te_quantized_open(device, q, dtype, ndim, shape, want, result) : status;
}

te_status te_role_close(te_recipe_state *state, te_role role, const te_quantized *z)
{
    return counts(state, role) ? te_quantized_count(z, state->history[role]) : TE_OK;
}

/* Counts what quantizing will do where somebody looks; on a device that means to wait for the factor. */
static te_status watch(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute, te_tensor *factor)
{
    float scale = 1;
    if (!state->watched || !state->watched->on) return TE_OK;
    te_status status = factor ? te_tensor_read(factor, TE_F32, &scale) : TE_OK;
    return status == TE_OK ? te_numerics_count(state, role, t, compute, scale) : status;
}

/* Keeps another holder of the weight's copies, and what they were made with. */
static void keep_weight(te_recipe_state *state, const te_tensor *t, const te_quantized *z, te_tensor *factor, bool collected)
{
    te_quantized_close(&state->weight);
    te_quantized_share(z, true, true, &state->weight);
    state->weight_id = t->storage->id;
    state->weight_version = t->storage->version;
    state->weight_graph = te_graph_id(state->ctx->capture);
    te_tensor_release(state->weight_scale);
    state->weight_scale = factor ? te_tensor_retain(factor) : NULL;
    state->weight_scale_version = factor ? state->scale[TE_ROLE_WEIGHT]->storage->version : 0;
    state->weight_collected = collected;
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
    bool current = role == TE_ROLE_WEIGHT && weight_is_current(state, t, compute, rowwise, columnwise) && factor_is_current(state);
    te_quantize_options options = {.want = {rowwise, columnwise}, .scale = 1};
    te_status status = q->needs_history ? take_factor(state, role, t->storage->device, current, &options.factor) : TE_OK;
    memset(result, 0, sizeof *result);
    if (status == TE_OK) status = watch(state, role, t, compute, options.factor);
    if (status == TE_OK && current && (!q->needs_history || options.factor == state->weight_scale)) {
        status = collect_weight(state);
        if (status == TE_OK) te_quantized_share(&state->weight, rowwise, columnwise, result);
    } else if (status == TE_OK) {
        options.seen = counts(state, role) ? state->history[role] : NULL;
        status = quantize(t, compute, q, &options, result);
        if (status == TE_OK && role == TE_ROLE_WEIGHT) keep_weight(state, t, result, options.factor, options.seen != NULL);
    }
    te_tensor_release(options.factor);
    return status;
}

te_status te_role_observe(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute)
{
    const te_quantizer *q = &state->recipe->quantizers[role];
    te_quantize_options options = {.want = {true, false}, .scale = 1};
    te_quantized z;
    if (!state->recipe->quantized[role] || !q->needs_history || te_tensor_is_quantized(t)) return TE_OK;
    te_status status = settle(state, role, t->storage->device);
    if (status != TE_OK) return status;
    if (counts(state, role)) options.seen = state->history[role];
    status = quantize(t, compute, q, &options, &z);
    if (status == TE_OK) te_quantized_close(&z);
    return status;
}
