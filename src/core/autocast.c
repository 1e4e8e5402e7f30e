/* autocast.c - see autocast.h. */
#include "autocast.h"

#include "kernels/float_mode.h"
#include "op.h"
#include "quantized_parameter.h"

#include <stdio.h>

/* --- scopes ------------------------------------------------------------------------------------------------------- */

static te_scope *innermost(const te_context *ctx) { return ctx->n_scopes ? &ctx->scopes[ctx->n_scopes - 1] : NULL; }

/* What operations compute in: of a scope without a dtype what it is already. */
static te_status read_dtype(te_context *ctx, const te_autocast *scope, te_dtype *dtype)
{
    *dtype = scope->disabled ? TE_DTYPE_COUNT : ctx->compute_dtype;
    if (scope->disabled || !scope->dtype) return TE_OK;
    *dtype = te_dtype_from_name(scope->dtype);
    if (*dtype == TE_F32 || *dtype == TE_BF16 || *dtype == TE_F16) return TE_OK;
    return te_fail(ctx, TE_ERROR_ARGUMENT,
                   "te_autocast_begin: dtype: %.40s is no compute dtype; use float32, bfloat16 or float16",
                   scope->dtype);
}

/* The recipe in force, held for the caller; *recipe NULL: none. */
static te_status take_recipe(te_context *ctx, const te_autocast *scope, te_recipe **recipe)
{
    te_scope *around = innermost(ctx);
    bool calibrates = scope->calibrating && scope->disabled;
    if (scope->recipe && scope->recipe->ctx != ctx)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_autocast_begin: a recipe of another context was given");
    *recipe = te_recipe_retain(scope->recipe ? scope->recipe : around ? around->recipe : NULL);
    if (*recipe || !calibrates) return TE_OK;
    *recipe = te_recipe_new(ctx, "DelayedScaling", NULL, 0);
    return *recipe ? TE_OK : ctx->status;
}

/* Whether a scope is open that ends a step, also where one inside it has switched the recipe off. */
static bool in_step(const te_context *ctx)
{
    for (int i = 0; i < ctx->n_scopes; i++)
        if (ctx->scopes[i].updates) return true;
    return false;
}

te_status te_autocast_begin(te_context *ctx, const te_autocast *given)
{
    TE_FLOAT_DEFAULT_HERE;
    te_autocast scope = {.struct_size = sizeof scope};
    te_recipe *recipe = NULL;
    te_dtype dtype;
    if (!ctx) return TE_ERROR_ARGUMENT;
    if (given && given->struct_size < offsetof(te_autocast, dtype))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_autocast_begin: struct_size: %zu", given->struct_size);
    if (given) te_copy_fields(&scope, given, given->struct_size, sizeof scope);
    if (!te_mem_grow(&ctx->mem, &ctx->scopes, &ctx->scope_capacity, (size_t)ctx->n_scopes + 1, sizeof *ctx->scopes))
        return te_fail_memory(ctx, "autocast");
    te_status status = read_dtype(ctx, &scope, &dtype);
    if (status == TE_OK) status = take_recipe(ctx, &scope, &recipe);
    if (status != TE_OK) return status;
    bool enabled = !scope.disabled && recipe && (scope.recipe || ctx->host_enabled);
    bool calibrates = scope.disabled && scope.calibrating, updates = !in_step(ctx) && (enabled || calibrates);
    ctx->scopes[ctx->n_scopes++] =
        (te_scope){recipe, updates, ctx->host_enabled, ctx->host_calibrating, ctx->compute_dtype};
    ctx->host_enabled = enabled;
    ctx->host_calibrating = calibrates;
    ctx->compute_dtype = dtype;
    return TE_OK;
}

static void leave(te_context *ctx)
{
    te_scope scope = ctx->scopes[--ctx->n_scopes];
    ctx->host_enabled = scope.enabled;
    ctx->host_calibrating = scope.calibrating;
    ctx->compute_dtype = scope.dtype;
    te_recipe_release(scope.recipe);
}

te_status te_autocast_end(te_context *ctx)
{
    TE_FLOAT_DEFAULT_HERE;
    te_scope *scope = ctx ? innermost(ctx) : NULL;
    if (!ctx) return TE_ERROR_ARGUMENT;
    if (!scope) return te_fail(ctx, TE_ERROR_ARGUMENT, "te_autocast_end: no scope has begun");
    bool updates = scope->updates && (ctx->grad_enabled || ctx->host_calibrating);
    leave(ctx);
    return updates ? te_products_update(ctx, false) : TE_OK;
}

int te_autocast_depth(const te_context *ctx) { return ctx ? ctx->n_scopes : 0; }

te_status te_autocast_unwind(te_context *ctx, int depth)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!ctx) return TE_ERROR_ARGUMENT;
    if (depth < 0 || depth > ctx->n_scopes)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_autocast_unwind: depth: %d of %d scopes", depth, ctx->n_scopes);
    bool forgets = false;
    while (ctx->n_scopes > depth) {
        forgets |= innermost(ctx)->updates && (ctx->grad_enabled || ctx->host_calibrating);
        leave(ctx);
    }
    return forgets ? te_products_forget(ctx, false) : TE_OK;
}

void te_scopes_close(te_context *ctx)
{
    while (ctx->n_scopes > 0) leave(ctx);
    te_mem_free(&ctx->mem, ctx->scopes, ctx->scope_capacity * sizeof *ctx->scopes);
    ctx->scopes = NULL;
    ctx->scope_capacity = 0;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

te_product *te_product_new(te_context *ctx, const char *name)
{
    if (!ctx) return NULL;
    struct te_product_host *host = te_mem_zalloc(&ctx->mem, sizeof *host);
    te_recipe_state *state = host ? te_recipe_state_new(ctx) : NULL;
    if (!state) {
        if (!host) te_fail_memory(ctx, "product");
        te_mem_free(&ctx->mem, host, sizeof *host);
        return NULL;
    }
    snprintf(host->name, sizeof host->name, "%s", name ? name : "");
    state->host = host;
    return state;
}

te_product *te_product_retain(te_product *product) { return te_recipe_state_retain(product); }
void te_product_release(te_product *product) { te_recipe_state_release(product); }

static void list(te_recipe_state *state)
{
    te_context *ctx = state->ctx;
    struct te_product_host *host = state->host;
    if (host->listed) return;
    host->listed = true;
    host->next = ctx->products;
    if (host->next) host->next->host->previous = state;
    ctx->products = state;
}

static void unlist(te_recipe_state *state)
{
    struct te_product_host *host = state->host;
    if (!host->listed) return;
    if (host->next) host->next->host->previous = host->previous;
    if (host->previous)
        host->previous->host->next = host->next;
    else
        state->ctx->products = host->next;
}

void te_product_host_close(te_recipe_state *state)
{
    struct te_product_host *host = state->host;
    if (!host) return;
    unlist(state);
    te_recipe_form_close(&host->form);
    te_recipe_release(host->recipe);
    te_mem_free(&state->ctx->mem, host, sizeof *host);
    state->host = NULL;
}

/* The product runs under the recipe from now on. */
static te_status use(te_recipe_state *state, te_recipe *recipe, bool attention)
{
    struct te_product_host *host = state->host;
    te_recipe_form form;
    if (host->recipe == recipe && host->attention == attention) return TE_OK;
    te_status status = te_recipe_form_open(recipe, host->name, attention, &form);
    if (status != TE_OK) return status;
    status = te_recipe_state_use(state, form.recipe);
    if (status != TE_OK) {
        te_recipe_form_close(&form);
        return status;
    }
    for (int r = 0; r < TE_ROLE_COUNT; r++) { /* amaxes may still come: of a backward whose forward ran before */
        if (form.rules[r]) continue;
        form.rules[r] = host->form.rules[r];
        host->form.rules[r] = NULL;
    }
    te_recipe_form_close(&host->form);
    host->form = form;
    te_recipe_release(host->recipe);
    host->recipe = te_recipe_retain(recipe);
    host->attention = attention;
    if (form.rules[TE_ROLE_INPUT] || form.rules[TE_ROLE_WEIGHT] || form.rules[TE_ROLE_GRAD_OUTPUT]) list(state);
    return TE_OK;
}

te_status te_product_prepare(te_recipe_state *state, bool attention)
{
    te_scope *scope = innermost(state->ctx);
    bool on = state->ctx->host_enabled || state->ctx->host_calibrating;
    return on && state->host && scope && scope->recipe ? use(state, scope->recipe, attention) : TE_OK;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

te_status te_products_update(te_context *ctx, bool gradients)
{
    size_t n = 0, at = 0;
    for (const te_recipe_state *s = ctx->products; s; s = s->host->next) n += 2;
    if (n == 0) return TE_OK;
    te_recipe_update *updates = te_mem_alloc(&ctx->mem, n * sizeof *updates);
    if (!updates) return te_fail_memory(ctx, "recipe");
    for (te_recipe_state *s = ctx->products; s; s = s->host->next)
        for (int r = 0; r < TE_ROLE_COUNT; r++) {
            const te_recipe *rule = s->host->form.rules[r];
            if (!rule || (r == TE_ROLE_GRAD_OUTPUT) != gradients) continue;
            const te_recipe_settings *o = &rule->settings;
            bool own = rule->algorithms.amax || rule->algorithms.scale;
            if (own && !s->scaled_for[r].counted) continue; /* maybe of an earlier recipe; nothing is read for it */
            updates[at++] =
                (te_recipe_update){s, (te_role)r, (te_amax_algorithm)te_recipe_setting(o, "amax_compute_algo", 0),
                                   (int)te_recipe_setting(o, "margin", 0), own ? &rule->algorithms : NULL};
        }
    te_status status = te_recipe_states_update(ctx, updates, at);
    te_mem_free(&ctx->mem, updates, n * sizeof *updates);
    return status;
}

te_status te_products_forget(te_context *ctx, bool gradients)
{
    te_status status = TE_OK;
    for (te_recipe_state *s = ctx->products; s && status == TE_OK; s = s->host->next)
        status = te_recipe_state_forget(s, gradients);
    return status;
}

/* --- te.h --------------------------------------------------------------------------------------------------------- */

te_status te_product_run(te_product *product, const te_op *op, const te_arg *args, int n_args, te_tensor **out,
                         int n_out)
{
    for (int i = 0; i < n_out && out; i++) out[i] = NULL;
    if (!product) return TE_ERROR_ARGUMENT;
    te_context *ctx = product->ctx;
    if (op && !te_op_is_of(ctx, op))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_product_run: te.%s is an operation of another context", op->name);
    bool linear = op && op->def->unit == TE_UNIT_LINEAR, attention = op && (op->def->flags & TE_OP_ATTENDS);
    if (!linear && !attention)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_product_run: %s is no linear operation or attention",
                       op ? op->name : "NULL");
    te_status status = te_product_prepare(product, attention);
    if (linear) op = te_op_find(ctx, "quantized_linear"); /* linear where no recipe is in force */
    if (status != TE_OK || !op) return ctx->status;
    te_recipe_state *before = ctx->product_state;
    ctx->product_state = product;
    status = te_op_run(ctx, op, args, n_args, out, n_out);
    ctx->product_state = before;
    return status;
}

te_tensor *te_product_scale(const te_product *product, te_role role)
{
    return product && (unsigned)role < TE_ROLE_COUNT ? product->scale[role] : NULL;
}

te_tensor *te_product_amax_history(const te_product *product, te_role role)
{
    return product && (unsigned)role < TE_ROLE_COUNT ? product->history[role] : NULL;
}

te_status te_product_set_state(te_product *product, te_role role, te_tensor *scale, te_tensor *amax_history)
{
    TE_FLOAT_DEFAULT_HERE;
    return product ? te_recipe_state_set(product, role, scale, amax_history) : TE_ERROR_ARGUMENT;
}

te_status te_context_skipped_amaxes(te_context *ctx, uint64_t *count)
{
    return ctx && count ? te_recipe_skipped_amaxes(ctx, count) : TE_ERROR_ARGUMENT;
}

te_tensor *te_product_parameter(te_product *product, te_recipe *recipe, te_tensor *weight, bool trains)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!product || !recipe || !weight) {
        te_context *ctx = product ? product->ctx : recipe ? recipe->ctx : weight ? weight->ctx : NULL;
        if (ctx) te_fail(ctx, TE_ERROR_ARGUMENT, "te_product_parameter: product, recipe and weight are needed");
        return NULL;
    }
    if (recipe->ctx != product->ctx || weight->ctx != product->ctx) {
        te_fail(product->ctx, TE_ERROR_ARGUMENT, "te_product_parameter: recipe and weight of another context");
        return NULL;
    }
    return use(product, recipe, false) == TE_OK ? te_quantized_parameter_new(weight, product, trains) : NULL;
}
