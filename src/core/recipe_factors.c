/* recipe_factors.c - the factor that delayed scaling has for an operand, and the tape of factors for stretches that run
 * again. */
#include "recipe.h"

#include "ops/ops.h"

te_status te_role_settle(te_recipe_state *state, te_role role, te_device *device)
{
    te_status status = te_recipe_move(&state->scale[role], device);
    if (status == TE_OK) status = te_recipe_move(&state->history[role], device);
    return status == TE_OK && role == TE_ROLE_WEIGHT ? te_recipe_move(&state->weight_scale, device) : status;
}

te_tensor *te_role_lasting(const te_recipe_state *state, te_role role, te_tensor *factor)
{
    return factor == state->scale[role] ? te_tensor_clone_data(factor) : te_tensor_retain(factor);
}

/* Tells uses of factors apart. The state is not looked at: it may be gone. */
static uintptr_t use_of(const te_recipe_state *state, te_role role) { return (uintptr_t)state + role; }

/* Keeps the factor on the tape. */
static te_status record(te_recipe_state *state, te_role role, te_tensor *factor)
{
    te_context *ctx = state->ctx;
    te_scale_tape *tape = &ctx->recorded_scales;
    if (!tape->on || tape->paused) return TE_OK;
    if (!te_mem_grow(&ctx->mem, &tape->uses, &tape->capacity, tape->n + 1, sizeof *tape->uses))
        return te_fail_memory(ctx, "recipe");
    te_tensor *kept = te_role_lasting(state, role, factor);
    if (!kept) return ctx->status;
    tape->uses[tape->n++] = (te_scale_use){kept, use_of(state, role)};
    return TE_OK;
}

/* Takes the next factor of a use off the tape, for the caller to hold; NULL: none is left. */
static te_tensor *take_recorded(te_scale_tape *tape, uintptr_t use)
{
    te_tensor *factor = NULL;
    for (size_t i = tape->at; i < tape->n && !factor; i++) {
        if (tape->uses[i].use != use) continue;
        factor = tape->uses[i].factor;
        tape->uses[i].factor = NULL;
    }
    while (tape->at < tape->n && !tape->uses[tape->at].factor) tape->at++;
    return factor;
}

/* Whether the factor of a weight's copies has to be there by itself: the host compares it with the factor of now, and a
 * tape gives it back as the one that the copies were made with. A device compares with what kernels have kept. */
static bool copies_factor(const te_recipe_state *state, const te_device *device)
{
    return device->exec.backend->host_memory || state->ctx->recorded_scales.on;
}

/* factor * ratio, a power of two, as far as float32 holds that and its inverse. */
static te_tensor *converted(te_tensor *factor, double ratio)
{
    te_context *ctx = factor->ctx;
    te_tensor *product = NULL, *limited = NULL;
    te_arg by[] = {TE_A_TENSOR(factor), TE_A_NUMBER(ratio)};
    if (te_op_run(ctx, te_op_find(ctx, "mul"), by, 2, &product, 1) != TE_OK) return NULL;
    te_arg limits[] = {TE_A_TENSOR(product), TE_A_NUMBER(0x1p-126), TE_A_NUMBER(TE_FLT_MAX)};
    te_op_run(ctx, te_op_find(ctx, "clamp"), limits, 3, &limited, 1);
    te_tensor_release(product);
    return limited;
}

te_status te_role_take_factor(te_recipe_state *state, const te_quantizer *q, te_role role, te_device *device,
                              bool current, te_tensor **factor)
{
    te_context *ctx = state->ctx;
    te_status status = te_role_settle(state, role, device);
    *factor = NULL;
    if (status != TE_OK) return status;
    if (role == TE_ROLE_GRAD_OUTPUT) state->backward = ctx->backwards;
    te_tensor *own = current ? state->weight_scale : state->scale[role];
    if (role != TE_ROLE_GRAD_OUTPUT) *factor = take_recorded(&ctx->replayed_scales, use_of(state, role));
    const struct te_scaled_for *f = &state->scaled_for[role];
    if (!*factor && !current && f->known && f->element != q->element)
        *factor = converted(own, te_element_max(q->element) / te_element_max(f->element));
    else if (!*factor)
        *factor = role == TE_ROLE_WEIGHT && !current && copies_factor(state, device) ? te_tensor_clone_data(own)
                                                                                     : te_tensor_retain(own);
    if (!*factor) return ctx->status;
    return role == TE_ROLE_GRAD_OUTPUT ? TE_OK : record(state, role, *factor);
}

void te_scale_tape_clear(te_scale_tape *tape)
{
    for (size_t i = 0; i < tape->n; i++) te_tensor_release(tape->uses[i].factor);
    tape->n = tape->at = 0;
}
