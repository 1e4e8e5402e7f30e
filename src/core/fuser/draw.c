/* draw.c - random numbers of a run.
 *
 * Single operations draw one after the other. Units do not run in that order, since one holds operations from several
 * branches; so a run draws before it starts, node by node, and every unit finds its generators. A called operation
 * draws by itself: its share of the sequence is left out, and the context is put there while it runs. So does
 * stochastic depth, which draws for whole samples. */
#include "plan.h"

static double attribute(const te_group_node *node, const char *name, double otherwise)
{
    for (int i = 0; i < node->call.op->n_params; i++) {
        const te_param *p = &node->call.op->params[i];
        if (strcmp(p->name, name) == 0 && node->call.attr[p->slot].set) return node->call.attr[p->slot].number;
    }
    return otherwise;
}

bool te_plan_draws(const te_group_node *node) { return attribute(node, "dropout", 0) > 0; }

te_status te_plan_order_draws(te_fuse_plan *plan)
{
    int n = 0;
    if (plan->n_rngs == 0) return TE_OK;
    plan->draws = te_mem_zalloc(&plan->ctx->mem, (size_t)plan->n_rngs * sizeof *plan->draws);
    if (!plan->draws) return te_fail_memory(plan->ctx, "fuser");
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        for (int i = 0; i < unit->n_rngs; i++) {
            te_plan_draw draw = {unit->rng_nodes[i], u, unit->first_rng + i};
            int at = n++;
            for (; at > 0 && plan->draws[at - 1].node > draw.node; at--) plan->draws[at] = plan->draws[at - 1];
            plan->draws[at] = draw;
        }
    }
    return TE_OK;
}

/* Words that attention drops out with: one for every score. */
static uint64_t attention_words(const te_group_state *state, const te_unit *unit)
{
    const te_fuse_plan *plan = state->plan;
    const te_space *s = &state->frames[plan->values[unit->result].frame];
    uint64_t sequence = (uint64_t)s->shape[s->ndim - 2], batch = s->ndim > 2 ? (uint64_t)s->shape[0] : 1;
    return batch * (uint64_t)attribute(&plan->nodes[unit->nodes[0]], "heads", 1) * sequence * sequence;
}

static te_tensor *lengths_of(const te_group_state *state, const te_unit *unit)
{
    int lens = state->plan->nodes[unit->nodes[0]].in[1];
    return lens == TE_NO_VALUE ? NULL : state->values[lens];
}

/* One for every sample. */
static uint64_t mask_words(const te_group_state *state, const te_unit *unit)
{
    const te_space *s = &state->frames[state->plan->values[unit->result].frame];
    const te_tensor *lens = lengths_of(state, unit);
    if (lens) return (uint64_t)te_tensor_numel(lens);
    return s->ndim > 2 ? (uint64_t)s->shape[0] : 1;
}

te_status te_mask_forward(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    te_context *ctx = plan->ctx;
    const te_plan_value *result = &plan->values[unit->result];
    te_space s = state->frames[result->frame];
    s.shape[s.ndim - 1] = 1;
    te_call call = plan->nodes[unit->nodes[0]].call;
    te_tensor *like = te_tensor_new(ctx, state->device, TE_F32, s.ndim, s.shape);
    if (!like) return ctx->status;
    call.ctx = ctx;
    call.in[0] = like;
    call.in[1] = lengths_of(state, unit);
    uint64_t offset = ctx->rng_offset;
    ctx->rng_offset = state->rngs[unit->first_rng].offset;
    te_status status = te_call_run_op(&call);
    ctx->rng_offset = offset;
    te_tensor *kept = status == TE_OK ? te_tensor_cast(call.out[0], TE_F32) : NULL, *rows = NULL;
    if (kept) {
        int64_t stride[TE_MAX_DIMS];
        for (int i = 0; i < s.ndim; i++) stride[i] = kept->shape[i] == 1 ? 0 : kept->stride[i];
        rows = te_tensor_alias(kept, s.ndim - 1, s.shape, stride, kept->offset);
    }
    state->values[unit->result] = rows ? te_state_stored(state, result, rows) : NULL;
    te_tensor_release(rows);
    te_tensor_release(kept);
    te_tensor_release(call.out[0]);
    te_tensor_release(like);
    return status == TE_OK && !state->values[unit->result] ? ctx->status : status;
}

void te_state_draw(te_group_state *state)
{
    const te_fuse_plan *plan = state->plan;
    te_context *ctx = plan->ctx;
    for (int i = 0; i < plan->n_rngs; i++) {
        const te_unit *unit = &plan->units[plan->draws[i].unit];
        te_rng *rng = &state->rngs[plan->draws[i].rng];
        if (unit->kind != TE_UNIT_PROGRAM) {
            uint64_t own = unit->kind == TE_UNIT_MASK ? mask_words(state, unit) : attention_words(state, unit);
            rng->offset = ctx->rng_offset;
            ctx->rng_offset += (own + 3) / 4;
            continue;
        }
        te_space s = te_state_space(state, unit);
        uint64_t words = 1;
        for (int k = 0; k < s.ndim; k++) words *= (uint64_t)s.shape[k];
        *rng = te_context_draw(ctx, words);
    }
}
