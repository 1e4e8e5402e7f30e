/* recompute.c - operands of weight gradients that backward computes anew instead of keeping.
 *
 *      forward     h -> [ y = gelu(h) ] -> y W^T           y is released
 *      backward    dy W -> [ dh, and y again ] -> dy^T y
 *
 * The gradient program of y's unit reads what y follows from anyway, and much of y is on the way to its gradient. So y is one
 * more output of it: a tensor less is kept from forward, none more is read, and the product waits until y is there. Where
 * y follows from tensors that backward would not keep, as a sum does, keeping y costs no more and is done; likewise where
 * products are so narrow that computing y again would show beside them (te_context.recompute_width). */
#include "plan.h"

/* Whether nothing but the weight gradients of products in high precision would keep a value, and those are work enough. */
static bool serves_weights_alone(const te_fuse_plan *plan, int value)
{
    int64_t columns = 0;
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        for (int k = 0; k < unit->n_nodes; k++) {
            const te_group_node *node = &plan->nodes[unit->nodes[k]];
            for (int i = 0; i < node->call.op->n_inputs; i++) {
                if (node->in[i] != value || plan->values[value].unit == u) continue;
                bool operand = unit->kind == TE_UNIT_LINEAR && i == 0 && !unit->recipe &&
                               unit->compute == plan->values[value].dtype;
                if (!operand) return false;
                if (plan->values[unit->weight].wanted) columns += plan->values[unit->result].width;
            }
        }
    }
    return columns > 0 && columns >= plan->recompute_width;
}

bool te_plan_may_recompute(const te_fuse_plan *plan, const te_unit *unit, bool *again)
{
    bool any = false;
    for (int k = 0; k < unit->n_nodes; k++)
        if (plan->nodes[unit->nodes[k]].cache_quantized) return false; /* what backward sees is not what forward saw */
    for (int k = 0; k < unit->n_results; k++) {
        const te_plan_value *v = &plan->values[unit->results[k]];
        again[k] = !unit->reload[k] && v->output < 0 && v->cls == TE_VALUE_TOKENS && v->wanted &&
                   serves_weights_alone(plan, unit->results[k]);
        any |= again[k];
    }
    return any;
}

/* Bytes per row that a gradient keeps for itself. */
static int64_t kept_bytes(const te_fuse_plan *plan, const te_unit *unit, const te_gradient *gradient)
{
    int64_t bytes = gradient->n_rows * (unit->compute_f64 ? 8 : 4);
    bool counted[TE_UNIT_SLOTS] = {false};
    for (int i = 0; i < gradient->n_sources; i++) {
        const te_grad_source *source = &gradient->sources[i];
        int value = TE_NO_VALUE;
        if (source->kind == TE_GRAD_FROM_OUTPUT) value = unit->results[source->index];
        for (int s = 0; source->kind == TE_GRAD_FROM_INPUT && s < unit->n_slots; s++) {
            if (unit->slots[s].value != unit->slots[source->index].value || counted[s]) continue;
            counted[s] = true; /* both halves of one value with the first of them */
            value = unit->slots[s].value;
        }
        if (value == TE_NO_VALUE || plan->values[value].cls != TE_VALUE_TOKENS) continue;
        bytes += plan->values[value].width * (int64_t)te_dtype_size(plan->values[value].dtype);
    }
    return bytes;
}

bool te_plan_recompute_pays(const te_fuse_plan *plan, const te_unit *unit, const bool *again, const te_gradient *keeping,
                            const te_gradient *recomputing)
{
    int64_t saved = 0;
    for (int k = 0; k < unit->n_results; k++) {
        const te_plan_value *v = &plan->values[unit->results[k]];
        if (again[k]) saved += v->width * (int64_t)te_dtype_size(v->dtype);
    }
    return kept_bytes(plan, unit, recomputing) - kept_bytes(plan, unit, keeping) < saved;
}
