/* recipe_update.c - the end of a step of delayed scaling, on the host and on devices. */
#include "recipe.h"

#include <math.h>

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
    *t->scale = te_delayed_scale(t->reach, amax, *t->scale);
}

/* Whether the update is made by what is built in, on the device. */
static bool is_on(const te_recipe_update *u, const te_device *device)
{
    const te_tensor *history = u->state->history[u->role];
    return !u->own && history && history->storage->device == device;
}

/* The largest number of what was quantized in the step, or before. */
static double reach_of(const te_recipe_update *u)
{
    const struct te_scaled_for *f = &u->state->scaled_for[u->role];
    const te_product_recipe *recipe = u->state->recipe;
    return te_element_max(f->counted ? f->counting
                          : f->known ? f->element
                          : recipe   ? recipe->quantizers[u->role].element
                                     : TE_E4M3);
}

static te_delayed delayed_of(const te_recipe_update *u)
{
    te_tensor *scale = u->state->scale[u->role], *history = u->state->history[u->role];
    double max = reach_of(u);
    te_tensor_written(scale);
    te_tensor_written(history);
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

/* --- by functions of the host ------------------------------------------------------------------------------------- */

/* The largest amax, or the last one, unless the host says which. */
static float chosen_amax(const te_recipe_update *u, const float *history, int64_t n)
{
    if (u->own->amax) return u->own->amax(u->own->user, history, n);
    float amax = history[0];
    for (int64_t i = 1; i < n && u->algorithm == TE_AMAX_MAX; i++) amax = history[i] > amax ? history[i] : amax;
    return amax;
}

static bool is_positive(float x) { return x > 0 && x <= TE_FLT_MAX; }

/* The same rule as update_on_host, with their numbers. The step's amax is forgotten where they fail. */
static te_status apply_own(const te_recipe_update *u, float *scale, float *history, int64_t n)
{
    te_context *ctx = u->state->ctx;
    float last = history[0], largest = (float)reach_of(u);
    if (!is_positive(last)) {
        ctx->skipped_amaxes++;
        history[0] = 0;
        return TE_OK;
    }
    float amax = chosen_amax(u, history, n), next = *scale;
    if (u->own->scale)
        next = u->own->scale(u->own->user, amax, *scale, largest);
    else
        next = te_delayed_scale(ldexp((double)largest, -u->margin), amax, *scale);
    if (!te_is_factor(next)) {
        history[0] = 0;
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.recipe.DelayedScaling: the scale of %s would be %g; it and its inverse must be positive and "
                       "finite in float32",
                       te_role_names[u->role], (double)next);
    }
    roll(history, n, last);
    *scale = next;
    return TE_OK;
}

static te_status update_own(const te_recipe_update *u)
{
    te_context *ctx = u->state->ctx;
    te_tensor *scale = u->state->scale[u->role], *history = u->state->history[u->role];
    if (!history) return TE_OK;
    int64_t n = history->shape[0];
    float factor, *amaxes = te_mem_alloc(&ctx->mem, (size_t)n * sizeof *amaxes);
    if (!amaxes) return te_fail_memory(ctx, "recipe");
    te_status status = te_tensor_read(history, TE_F32, amaxes), applied = TE_OK;
    if (status == TE_OK && amaxes[0] != 0) {
        status = te_tensor_read(scale, TE_F32, &factor);
        if (status == TE_OK) applied = apply_own(u, &factor, amaxes, n);
        if (status == TE_OK) status = te_tensor_write(scale, TE_F32, &factor);
        if (status == TE_OK) status = te_tensor_write(history, TE_F32, amaxes);
    }
    if (status == TE_OK) status = applied;
    te_mem_free(&ctx->mem, amaxes, (size_t)n * sizeof *amaxes);
    return status;
}

te_status te_recipe_states_update(te_context *ctx, const te_recipe_update *updates, size_t n)
{
    te_status status = TE_OK;
    for (size_t i = 0; i < n; i++) {
        /* the next step counts anew */
        if (updates[i].role == TE_ROLE_WEIGHT) updates[i].state->weight_collected = false;
        if (!is_on(&updates[i], &ctx->devices[0])) continue;
        te_delayed t = delayed_of(&updates[i]);
        update_on_host(updates[i].state, &t);
    }
    for (int d = 1; d < TE_MAX_DEVICES && status == TE_OK; d++)
        if (ctx->devices[d].open) status = update_on(&ctx->devices[d], updates, n);
    for (size_t i = 0; i < n; i++) { /* one that fails keeps no other from its update */
        te_status own = updates[i].own ? update_own(&updates[i]) : TE_OK;
        if (own != TE_OK) status = own;
    }
    for (size_t i = 0; i < n && status == TE_OK; i++) te_recipe_state_updated(updates[i].state, updates[i].role);
    return status;
}

te_status te_recipe_forget_amax(te_tensor *history)
{
    te_tensor *first = history ? te_tensor_alias(history, 1, (int64_t[]){1}, NULL, history->offset) : NULL;
    te_status status = first ? te_tensor_fill(first, 0) : TE_OK;
    te_tensor_release(first);
    return history && !first ? history->ctx->status : status;
}

te_status te_recipe_state_forget(te_recipe_state *state, bool gradients)
{
    if (state->ctx->capture) return TE_OK;
    for (int r = 0; r < TE_ROLE_COUNT; r++)
        if ((r == TE_ROLE_GRAD_OUTPUT) == gradients) state->scaled_for[r].counted = false;
    if (gradients) return te_recipe_forget_amax(state->history[TE_ROLE_GRAD_OUTPUT]);
    te_status status = te_recipe_forget_amax(state->history[TE_ROLE_INPUT]);
    if (status == TE_OK && state->weight_collected) status = te_recipe_forget_amax(state->history[TE_ROLE_WEIGHT]);
    state->weight_collected = false;
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
