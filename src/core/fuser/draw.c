/* draw.c - random numbers of a run.
 *
 * Single operations draw one after the other. Units do not run in that order, since one holds operations from several branches; so a
 * run draws before it starts, node by node, and every unit finds its generators. A called operation draws by itself: its share of
 * the sequence is left out, and the context is put there while it runs. */
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

void te_state_draw(te_group_state *state)
{
    const te_fuse_plan *plan = state->plan;
    te_context *ctx = plan->ctx;
    for (int i = 0; i < plan->n_rngs; i++) {
        const te_unit *unit = &plan->units[plan->draws[i].unit];
        te_rng *rng = &state->rngs[plan->draws[i].rng];
        if (unit->kind == TE_UNIT_CALL) {
            rng->offset = ctx->rng_offset;
            ctx->rng_offset += (attention_words(state, unit) + 3) / 4;
            continue;
        }
        te_space s = te_state_space(state, unit);
        uint64_t words = 1;
        for (int k = 0; k < s.ndim; k++) words *= (uint64_t)s.shape[k];
        *rng = te_context_draw(ctx, words);
    }
}
