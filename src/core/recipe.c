/* recipe.c - quantizers of an operation by role, and what it remembers. */
#include "recipe.h"

#include "autocast.h"
#include "numerics.h"

const char *const te_role_names[] = {"input", "weight", "grad_output", NULL};

/* --- recipes ------------------------------------------------------------------------------------------------------ */

const char *const te_fast_accumulation_names[] = {"none", "forward", "all", NULL};

void te_product_recipe_allow_fast_sums(te_product_recipe *recipe, const int choices[TE_ROLE_COUNT])
{
    static const te_role operands[TE_PRODUCT_COUNT][2] = {
        [TE_PRODUCT_FORWARD] = {TE_ROLE_INPUT, TE_ROLE_WEIGHT},
        [TE_PRODUCT_DGRAD] = {TE_ROLE_GRAD_OUTPUT, TE_ROLE_WEIGHT},
        [TE_PRODUCT_WGRAD] = {TE_ROLE_GRAD_OUTPUT, TE_ROLE_INPUT},
    };
    for (int k = 0; k < TE_PRODUCT_COUNT; k++) {
        int least = k == TE_PRODUCT_FORWARD ? 0 : 1;
        recipe->fast_sums[k] = choices[operands[k][0]] > least && choices[operands[k][1]] > least;
    }
}

/* Both operands of the weight gradient are summed over rows: a transform along them must be the same on both. */
static te_status check_pair(te_context *ctx, const te_product_recipe *recipe)
{
    const te_quantizer *x = &recipe->quantizers[TE_ROLE_INPUT], *dy = &recipe->quantizers[TE_ROLE_GRAD_OUTPUT];
    bool x_transformed = recipe->quantized[TE_ROLE_INPUT] && x->hadamard;
    bool dy_transformed = recipe->quantized[TE_ROLE_GRAD_OUTPUT] && dy->hadamard;
    if (recipe->backward == TE_BACKWARD_QUANTIZED && x_transformed != dy_transformed)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.recipe: hadamard: the quantizers of input and grad_output meet in the weight gradient, so "
                       "both must transform, or neither; only that of %s does",
                       x_transformed ? "input" : "grad_output");
    return TE_OK;
}

/* Zeros that count towards the limit of tensor memory: scripts may make as many as they like. */
static void *counted_alloc(te_context *ctx, size_t bytes)
{
    if (!te_context_count(ctx, bytes)) return NULL;
    void *memory = te_mem_zalloc(&ctx->mem, bytes);
    if (memory) return memory;
    te_context_discount(ctx, bytes);
    te_fail_memory(ctx, "recipe");
    return NULL;
}

static void counted_free(te_context *ctx, void *memory, size_t bytes)
{
    te_mem_free(&ctx->mem, memory, bytes);
    te_context_discount(ctx, bytes);
}

te_product_recipe *te_product_recipe_new(te_context *ctx, const te_product_recipe *from)
{
    for (int r = 0; r < TE_ROLE_COUNT; r++)
        if (from->quantized[r] && te_quantizer_check(ctx, &from->quantizers[r]) != TE_OK) return NULL;
    if (check_pair(ctx, from) != TE_OK) return NULL;
    te_product_recipe *recipe = counted_alloc(ctx, sizeof *recipe);
    if (!recipe) return NULL;
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
    counted_free(ctx, recipe, sizeof *recipe);
    te_context_unref(ctx);
}

bool te_product_recipe_alike(const te_product_recipe *a, const te_product_recipe *b)
{
    if (a == b) return true;
    if (!a || !b || a->backward != b->backward || a->hands_on != b->hands_on) return false;
    for (int k = 0; k < TE_PRODUCT_COUNT; k++)
        if (a->fast_sums[k] != b->fast_sums[k]) return false;
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        if (a->quantized[r] != b->quantized[r]) return false;
        if (a->quantized[r] && !te_quantizer_same(&a->quantizers[r], &b->quantizers[r])) return false;
    }
    return true;
}

/* --- states ------------------------------------------------------------------------------------------------------- */

te_recipe_state *te_recipe_state_new(te_context *ctx)
{
    te_recipe_state *state = counted_alloc(ctx, sizeof *state);
    if (!state) return NULL;
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
    te_tensor_release(state->weight_kept);
    te_numerics_unwatch(state);
    te_product_host_close(state);
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        te_tensor_release(state->scale[r]);
        te_tensor_release(state->history[r]);
    }
    counted_free(ctx, state, sizeof *state);
    te_context_unref(ctx);
}

static float *numbers(te_tensor *t) { return te_tensor_data(t); }

te_status te_recipe_move(te_tensor **t, te_device *device)
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

/* Whether a graph reads and writes it, and would not see another one in its place. */
static bool is_in_graph(const te_tensor *history) { return history && history->storage->graph_refs > 0; }

static te_status refuse_length(const te_tensor *history, te_role role, int64_t length)
{
    return te_fail(history->ctx, TE_ERROR_UNSUPPORTED,
                   "te.graph: the amax history of the %s is read by a graph, so that one of %lld cannot take the place "
                   "of its %lld amaxes; let go of the graph first, and record it again",
                   te_role_names[role], (long long)length, (long long)history->shape[0]);
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
    if (is_in_graph(state->history[role])) return refuse_length(state->history[role], role, length);
    if (te_recipe_move(&state->history[role], &ctx->devices[0]) != TE_OK) return ctx->status;
    te_tensor *history = resized(ctx, state->history[role], length);
    if (!history) return ctx->status;
    te_tensor_release(state->history[role]);
    state->history[role] = history;
    return te_recipe_move(&state->history[role], state->scale[role]->storage->device);
}

te_status te_recipe_state_use(te_recipe_state *state, te_product_recipe *recipe)
{
    if (state->recipe == recipe) return TE_OK;
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        if (!recipe->quantized[r] || !recipe->quantizers[r].needs_history) continue;
        te_status status = remember(state, (te_role)r, recipe->history_length[r]);
        if (status != TE_OK) return status;
    }
    te_quantized_close(&state->weight);
    te_product_recipe_release(state->recipe);
    state->recipe = te_product_recipe_retain(recipe);
    return TE_OK;
}

/* A tensor that a graph may hold takes the numbers over. */
static te_status replace(te_tensor **slot, te_tensor *given)
{
    if (*slot && te_same_shape(*slot, given)) return te_tensor_copy_across(*slot, given);
    te_tensor *copy = te_tensor_clone_data(given);
    if (!copy) return given->ctx->status;
    te_tensor_release(*slot);
    *slot = copy;
    return TE_OK;
}

te_status te_recipe_state_check(const te_recipe_state *state, te_role role, te_tensor *scale, te_tensor *history)
{
    te_context *ctx = state->ctx;
    te_tensor *given[] = {scale, history};
    static const char *const names[] = {"scale", "amax_history"};
    if ((unsigned)role >= TE_ROLE_COUNT)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe: there is no role %d", (int)role);
    for (int i = 0; i < 2; i++) {
        const te_tensor *t = given[i];
        bool fits =
            t && t->ctx == ctx && t->dtype == TE_F32 && t->ndim == 1 && t->shape[0] >= 1 && te_tensor_data(given[i]);
        if (!fits)
            return te_fail(ctx, TE_ERROR_ARGUMENT,
                           "te.recipe: %s: expected a float32 tensor of one dimension on the cpu, got %s %s", names[i],
                           t ? te_dtype_name(t->dtype) : "none", t ? TE_SHAPE_TEXT(t) : "");
    }
    if (scale->shape[0] != 1)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe: scale: expected one number, got %s", TE_SHAPE_TEXT(scale));
    if (!te_is_factor(*numbers(scale)))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.recipe: scale: %g; it and its inverse must be positive and finite in float32",
                       (double)*numbers(scale));
    const te_tensor *now = state->history[role];
    bool fits = !is_in_graph(now) || te_same_shape(now, history);
    return fits ? TE_OK : refuse_length(now, role, history->shape[0]);
}

te_status te_recipe_state_set(te_recipe_state *state, te_role role, te_tensor *scale, te_tensor *history)
{
    te_status status = te_recipe_state_check(state, role, scale, history);
    if (status != TE_OK) return status;
    status = replace(&state->scale[role], scale);
    if (status == TE_OK) status = replace(&state->history[role], history);
    if (status == TE_OK) status = te_recipe_move(&state->history[role], state->scale[role]->storage->device);
    state->scaled_for[role].known = false;
    if (role == TE_ROLE_WEIGHT) state->weight_collected = false; /* another step's history */
    return status;
}

void te_recipe_state_updated(te_recipe_state *state, te_role role)
{
    struct te_scaled_for *f = &state->scaled_for[role];
    if (f->counted) f->element = f->counting, f->known = true;
    f->counted = false;
}

te_product_recipe *te_recipe_active(const te_recipe_state *state)
{
    const te_product_recipe *r = state ? state->recipe : NULL;
    bool quantizes = r && (r->quantized[0] || r->quantized[1] || r->quantized[2]);
    if (!quantizes) return NULL;
    return (state->host ? state->ctx->host_enabled : state->ctx->recipe_enabled) ? state->recipe : NULL;
}

bool te_recipe_calibrates(const te_recipe_state *state)
{
    return state && state->recipe && (state->host ? state->ctx->host_calibrating : state->ctx->calibrating);
}
